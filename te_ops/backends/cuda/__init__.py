"""Kernels written in CUDA C++ (csrc), compiled at run time by NVRTC.

Importing this touches no CUDA library.
"""

from __future__ import annotations

from te_ops.backends.cuda import fused, norm, pointwise, quantize, reduce
from te_ops.backends.cuda.compile import missing
from te_ops.registry import REGISTRY, ArchRange, Kernel

PRIORITY = 20

_TABLE = (
    ("pointwise", pointwise.refuse, pointwise.bind),
    ("sum", pointwise.refuse_sum, pointwise.bind_sum),
    ("reduce", reduce.refuse, reduce.bind),
    ("amax", quantize.refuse_amax, quantize.bind_amax),
    ("quantize", quantize.refuse, quantize.bind),
    ("rmsnorm", norm.refuse_affine, norm.bind),
    ("layernorm", norm.refuse_affine, norm.bind),
    ("rmsnorm_backward", norm.refuse, norm.bind_backward),
    ("layernorm_backward", norm.refuse, norm.bind_backward),
    ("rmsnorm_dgamma", norm.refuse_dgamma, norm.bind_dgamma),
    ("layernorm_dgamma", norm.refuse_dgamma, norm.bind_dgamma),
    ("norm_quantize", fused.refuse_norm_quantize, fused.bind_norm_quantize),
    ("pointwise_quantize", fused.refuse_pointwise_quantize, fused.bind_pointwise_quantize),
    ("pointwise_reduce", fused.refuse_pointwise_reduce, fused.bind_pointwise_reduce),
)

KERNELS = tuple(
    Kernel(
        runs=runs,
        name=f"cuda.{runs}",
        bind=bind,
        arch=ArchRange("sm_80+"),
        priority=PRIORITY,
        refuse=refuse,
        available=missing,
    )
    for runs, refuse, bind in _TABLE
)
"""Every kernel of this backend, by the primitive or rule that it runs."""


def register() -> None:
    """Add the kernels; cheap, and safe to call again."""
    for kernel in KERNELS:
        REGISTRY.add(kernel, replace=True)


__all__ = ["KERNELS", "register"]
