"""Kernels, one folder per vendor library; importing this package registers those that need none."""
