"""Kernels written in CUDA C++ (csrc), compiled at run time by NVRTC.

Importing this touches no CUDA library.
"""

from __future__ import annotations

from te_ops.backends.cuda import (
    around,
    bundle,
    dequantize,
    few_queries,
    fused,
    gemm_block,
    heads_back,
    heads_quantize,
    kv_append,
    launch,
    many,
    norm,
    norm_heads,
    norm_quantize,
    pointwise,
    quantize,
    reduce,
    rope,
    state,
    together,
    transpose,
)
from te_ops.backends.cuda.compile import missing
from te_ops.registry import REGISTRY, ArchRange, Kernel
from te_ops.runtime.bundle import BUNDLERS
from te_ops.runtime.engines import AROUND
from te_ops.runtime.state import UPDATES
from te_ops.runtime.tape import COPIES

PRIORITY = 20

_TABLE = (
    ("pointwise", pointwise.refuse, pointwise.bind),
    ("sum", pointwise.refuse_sum, pointwise.bind_sum),
    ("reduce", reduce.refuse, reduce.bind),
    ("amax", quantize.refuse_amax, quantize.bind_amax),
    ("quantize", quantize.refuse, quantize.bind),
    ("dequantize", dequantize.refuse, dequantize.bind),
    ("transpose_record", transpose.refuse, transpose.bind),
    ("rmsnorm", norm.refuse_affine, norm.bind),
    ("layernorm", norm.refuse_affine, norm.bind),
    ("rmsnorm_backward", norm.refuse, norm.bind_backward),
    ("layernorm_backward", norm.refuse, norm.bind_backward),
    ("rmsnorm_dgamma", norm.refuse_dgamma, norm.bind_dgamma),
    ("layernorm_dgamma", norm.refuse_dgamma, norm.bind_dgamma),
    ("add_norm_quantize", norm_quantize.refuse, norm_quantize.bind),
    ("norm_quantize", norm_quantize.refuse, norm_quantize.bind),
    ("norm_quantize_rounded", norm_quantize.refuse, norm_quantize.bind),
    ("norm_backward_sum", norm.refuse_group, norm.bind_backward),
    ("norm_backward_together", norm.refuse_group, norm.bind_backward),
    ("norm_backward_weights", norm.refuse_group, norm.bind_backward),
    ("pointwise_quantize", fused.refuse_pointwise_quantize, fused.bind_pointwise_quantize),
    (
        "pointwise_quantize_rounded",
        fused.refuse_pointwise_quantize,
        fused.bind_pointwise_quantize,
    ),
    ("pointwise_reduce", fused.refuse_pointwise_reduce, fused.bind_pointwise_reduce),
    ("pointwise_together", together.refuse_pointwise_together, together.bind_pointwise_together),
    (
        "pointwise_together_rounded",
        together.refuse_pointwise_together,
        together.bind_pointwise_together,
    ),
    ("quantize_together", many.refuse_quantize_together, many.bind_quantize_together),
    ("reduce_quantize", together.refuse_reduce_quantize, together.bind_reduce_quantize),
    ("rope_table", rope.refuse_table, rope.bind_table),
    ("rope", rope.refuse, rope.bind),
    ("rope_heads", rope.refuse, rope.bind),
    ("pack_heads", rope.refuse, rope.bind),
    ("pack_rope", rope.refuse, rope.bind),
    ("norm_heads", norm_heads.refuse, norm_heads.bind),
    ("norm_rope_heads", norm_heads.refuse, norm_heads.bind),
    ("norm_heads_backward", norm_heads.refuse_backward, norm_heads.bind_backward),
    ("heads_quantize", rope.refuse, rope.bind),
    ("heads_quantize_rounded", rope.refuse, rope.bind),
    ("heads_quantize_each", heads_quantize.refuse, heads_quantize.bind),
    ("heads_norm_back_quantize", heads_back.refuse, heads_back.bind),
    ("kv_append", kv_append.refuse, kv_append.bind),
    ("kv_append_pages", kv_append.refuse, kv_append.bind),
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
        recorded=True,
    )
    for runs, refuse, bind in _TABLE
)
"""Every kernel of this backend, by the primitive or rule that it runs."""


def register() -> None:
    """Add the kernels; cheap, and safe to call again."""
    for kernel in (*KERNELS, *few_queries.KERNELS, *gemm_block.KERNELS):
        REGISTRY.add(kernel, replace=True)
    if missing() is None:
        UPDATES["cuda"] = state.roll
        COPIES["cuda"] = launch.clone
        BUNDLERS.setdefault("cuda", bundle.Bundler())
        AROUND["cuda"] = around.build


__all__ = ["KERNELS", "register"]
