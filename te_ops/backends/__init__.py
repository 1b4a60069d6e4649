"""Kernels, one folder per vendor library. The reference is always there; others come with a device's first plan."""

from __future__ import annotations

import importlib
from typing import Any

from te_ops.registry import REGISTRY

CUDA = ("cublas", "cuda", "cudnn", "cutlass", "flash", "sdpa", "twin")


def register_cuda() -> None:
    """Register the kernels for CUDA devices: GEMMs, attention, and our own compiled at run time.

    Nothing is compiled and no vendor library is imported here; each kernel says whether it is available.
    """
    for name in CUDA:
        importlib.import_module(f"te_ops.backends.{name}").register()


def register_hooks() -> None:
    """Who takes part in step boundaries: on every rank, also on one that never plans for a device."""

    def kernels() -> Any:
        return importlib.import_module("te_ops.backends.cutlass.runtime").KERNELS

    REGISTRY.on_boundary("cutlass", lambda together: kernels().boundary(together))
    REGISTRY.on_settle("cutlass", lambda: kernels().settle())


__all__ = ["CUDA", "register_cuda", "register_hooks"]
