"""Kernels, one folder per vendor library. The reference is always there; others come with a device's first plan."""

from __future__ import annotations

import importlib

CUDA = ("cublas", "cuda", "cudnn", "sdpa")


def register_cuda() -> None:
    """Register the kernels for CUDA devices: GEMMs, attention, and our own compiled at run time.

    Nothing is compiled and no vendor library is imported here; each kernel says whether it is available.
    """
    for name in CUDA:
        importlib.import_module(f"te_ops.backends.{name}").register()


__all__ = ["CUDA", "register_cuda"]
