"""Where these kernels are not the first choice: what was measured to be slower than cuDNN's, or not measured.

One H200, BF16, flash-attn 4.0.0b36 and cuDNN 9.19; figures are in docs/guide/attention.md. Where cuDNN has no kernel,
they run all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from te_ops.backends.flash.problem import Problem

MEASURED = (64, 96, 128, 256)
"""Features of a head that were timed, of q and of v."""
SHORT = 512
"""Queries up to which cuDNN's forward is the faster one, where sequences are not packed."""


@dataclass(frozen=True)
class Loss:
    """Problems where another kernel is taken first, and why."""

    name: str
    holds: Callable[[Problem], bool]
    reason: str


def _short(p: Problem) -> bool:
    return not p.packed and not p.backward and p.sizes.s_q <= SHORT


LOSSES: tuple[Loss, ...] = (
    Loss(
        "gradient of padded batches",
        lambda p: p.padded and p.backward,
        "gradients of batches with lengths were not timed against cuDNN's kernels, which come first",
    ),
    Loss(
        "features",
        lambda p: p.sizes.d_qk != p.sizes.d_v or p.sizes.d_qk not in MEASURED,
        "heads of so many features were not timed against cuDNN's kernels, which come first",
    ),
    Loss(
        "gradient of wide heads",
        lambda p: p.backward and p.sizes.d_qk == 256,
        "cuDNN's gradient is the faster one with 256 features",
    ),
    Loss("short", _short, f"cuDNN's forward is the faster one up to {SHORT} queries"),
)


def refuse(problem: Problem) -> str | None:
    """None where they come first, else why not."""
    if problem.form.score is not None:
        return None  # others have no kernel
    return next((loss.reason for loss in LOSSES if loss.holds(problem)), None)
