"""Attention through the graphs of the cuDNN frontend."""

from __future__ import annotations

from te_ops.backends.cudnn.gates import refuse
from te_ops.backends.cudnn.launch import bind
from te_ops.backends.cudnn.launch_fp8 import bind as bind_fp8
from te_ops.backends.cudnn.launch_whole import Whole
from te_ops.backends.cudnn.library import missing
from te_ops.backends.cudnn.plans import forget
from te_ops.backends.cudnn.problem import problem_of
from te_ops.registry import REGISTRY, ArchRange, Call, Kernel

PRIORITY = 20


def _refuse(call: Call) -> str | None:
    return refuse(problem_of(call))


KERNELS: tuple[Kernel, ...] = tuple(
    Kernel(
        runs=runs,
        name=f"cudnn.{runs}",
        bind=how,
        arch=ArchRange("sm_90+"),
        priority=PRIORITY,
        refuse=_refuse,
        available=lambda: missing(),
        recorded=True,
    )
    for runs, how in (
        ("attention", bind),
        ("attention_backward", bind),
        ("attention_fp8", bind_fp8),
    )
)
"""Both directions, and forward in FP8."""


def register() -> None:
    """Add the kernels; safe to call again."""
    REGISTRY.add(*KERNELS, replace=True)
    REGISTRY.on_release("cudnn", forget)


__all__ = ["KERNELS", "Whole", "register"]
