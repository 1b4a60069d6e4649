"""Attention by FlashAttention's kernels for Hopper, which are compiled for a call's features and masks.

Importing this, and planning, imports no vendor library: a worker process compiles (see `te_ops.backends.cutlass`), and
until a kernel is there others run.
"""

from __future__ import annotations

from te_ops.backends.cutlass import runtime
from te_ops.backends.flash import gates, limits, pays
from te_ops.backends.flash.launch import bind as bind_launch
from te_ops.backends.flash.problem import problem_of, spec_of
from te_ops.backends.flash.versions import missing
from te_ops.registry import REGISTRY, ArchRange, Call, Kernel, Launch

FIRST, LAST = 22, 11
"""Before cuDNN's kernels where they were measured to be faster; else behind torch's of cuDNN, for what those refuse."""


def refuse(call: Call) -> str | None:
    """Calls that no kernel is made for, or whose kernel is not there yet."""
    problem = problem_of(call)
    reason = gates.refuse(problem)
    if reason is not None:
        return reason
    spec = spec_of(problem)
    return limits.refuse(spec) or runtime.refuse(spec, call.arch, call.device)


def refuse_first(call: Call) -> str | None:
    """The same, and where another kernel is as fast."""
    problem = problem_of(call)
    return gates.refuse(problem) or pays.refuse(problem) or refuse(call)


def bind(call: Call) -> Launch:
    """The launch of a call that was not refused."""
    spec = spec_of(problem_of(call))
    return bind_launch(call, runtime.kernel(spec, call.arch, call.device))


KERNELS: tuple[Kernel, ...] = tuple(
    Kernel(
        runs=runs,
        name=f"flash.{runs}{suffix}",
        bind=bind,
        arch=ArchRange("sm_90"),
        priority=priority,
        refuse=check,
        available=lambda: missing(),
        recorded=True,
    )
    for runs in ("attention", "attention_backward")
    for suffix, priority, check in (("_first", FIRST, refuse_first), ("", LAST, refuse))
)
"""Both directions, as first choice and as one among others."""


def register() -> None:
    """Add the kernels; safe to call again."""
    REGISTRY.add(*KERNELS, replace=True)


__all__ = ["KERNELS", "register"]
