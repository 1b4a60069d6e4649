"""Fusion rules as data: chains of primitive names. A rule says "may"; a kernel says "can"."""

from te_ops.fused.gemm import RULES as GEMM_RULES
from te_ops.fused.norm import RULES as NORM_RULES
from te_ops.fused.pointwise import RULES as POINTWISE_RULES
from te_ops.fused.rope import RULES as ROPE_RULES
from te_ops.registry import REGISTRY

RULES = (*GEMM_RULES, *NORM_RULES, *POINTWISE_RULES, *ROPE_RULES)


def register() -> None:
    """Add every rule of the package; safe to call again."""
    for rule in RULES:
        REGISTRY.add(rule, replace=True)


__all__ = ["RULES", "register"]
