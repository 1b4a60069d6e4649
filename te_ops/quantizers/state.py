"""Scales from amaxes, and the state of delayed scaling, as pure functions of tensors.

All arithmetic is FP32, whatever the dtype of the data. The state of one operand is its scale, a
window of amaxes (slot 0 takes the current step, the last slot is the most recent finished step)
and a count of steps whose amax was not finite. An amax and a scale may carry trailing dimensions,
to update several operands at once: history [length, ...], the others [...] or of one element.

Formulas: NVIDIA Transformer Engine, ``common/recipe/recipe_common.cuh`` and
``common/recipe/delayed_scaling.cu``; a non-finite amax is handled differently here (see
`delayed_update`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from te_ops.errors import RecipeError

AmaxAlgo = str | Callable[[Tensor], Tensor]
ScaleAlgo = Callable[[Tensor, Tensor, float], Tensor]

FP32_MAX = torch.finfo(torch.float32).max
_EXPONENT_BITS = 0x7F800000


def largest_scale(dtype: torch.dtype) -> float:
    """What replaces an overflowing scale: the largest finite value of `dtype`, within FP32."""
    return min(torch.finfo(dtype).max, FP32_MAX)


def divide(numerator: float, x: Tensor) -> Tensor:
    """``numerator / x`` with one rounding. (``float / Tensor`` multiplies by a reciprocal.)"""
    return torch.div(torch.full_like(x, numerator), x)


def observe_amax(x: Tensor) -> Tensor:
    """max |x| as FP32 with zero dimensions: NaN propagates, 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    least, most = torch.aminmax(x)
    return torch.maximum(least.abs(), most.abs()).float()


def scale_from_amax(
    amax: Tensor,
    fp8_max: float,
    pow2: bool = False,
    eps: float = 0.0,
    value_for_inf: float = FP32_MAX,
) -> Tensor:
    """The scale, ``fp8_max / amax`` in FP32, of `amax`'s shape.

    Args:
        amax: any shape; a value below `eps`, 0 included, counts as `eps`, NaN does not.
        fp8_max: largest finite value of the format.
        pow2: round down to a power of two.
        value_for_inf: the scale where the quotient overflows.

    Where the amax is 0, Inf or NaN the scale is 1.
    """
    amax = amax.float()
    if eps > 0.0:
        amax = amax.clamp(min=eps)
    scale = divide(fp8_max, amax)
    # An overflow only: a finite scale may exceed the largest value of a narrow input dtype.
    scale = scale.masked_fill_(torch.isinf(scale), value_for_inf)
    scale = torch.where((amax > 0.0) & (amax < math.inf), scale, torch.ones_like(scale))
    return _floored(scale) if pow2 else scale


def _floored(scale: Tensor) -> Tensor:
    """A finite scale rounded down to a power of two; below 2**-126 it is 0."""
    return (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def split_nonfinite(amax: Tensor) -> tuple[Tensor, Tensor]:
    """`amax` as (finite amax, flag), both FP32 and safe under a MAX reduction over ranks.

    A reduction may drop a NaN, depending on the rank that holds it. The finite amax has 0 in place
    of Inf and NaN, the flag is 1 there and 0 elsewhere.
    """
    amax = amax.float()
    finite = torch.isfinite(amax)
    return torch.where(finite, amax, torch.zeros_like(amax)), 1.0 - finite.float()


def join_nonfinite(finite_amax: Tensor, flag: Tensor) -> Tensor:
    """The inverse of `split_nonfinite` after the reduction: NaN wherever any rank's flag is set."""
    return torch.where(flag > 0.0, torch.full_like(finite_amax, math.nan), finite_amax)


def _window_amax(history: Tensor, algo: AmaxAlgo) -> Tensor:
    if callable(algo):
        return algo(history)
    if algo == "max":
        return history.amax(0)
    if algo == "most_recent":
        return history[0]
    raise RecipeError(
        f"amax_compute_algo {algo!r} is not known; use 'max', 'most_recent' or a function of "
        "the history."
    )


def _next_scale(
    scale: Tensor,
    amax: Tensor,
    fp8_max: float,
    *,
    margin: float,
    algo: ScaleAlgo | None,
    pow2: bool,
) -> Tensor:
    """The scale for `amax`, or `scale` where the amax or the result is of no use."""
    new = (
        torch.div(divide(fp8_max, amax), 2.0**margin)
        if algo is None
        else algo(amax, scale, fp8_max).float()
    )
    new = new.clamp(max=FP32_MAX)
    new = _floored(new) if pow2 else new
    usable = (amax > 0.0) & (amax < math.inf) & (new > 0.0)
    return torch.where(usable, new, scale)


def delayed_update(
    scale: Tensor,
    amax_history: Tensor,
    nonfinite_steps: Tensor,
    amax: Tensor,
    *,
    fp8_max: float,
    margin: float = 0,
    algo: AmaxAlgo = "max",
    scale_algo: ScaleAlgo | None = None,
    pow2: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of delayed scaling.

    The amax joins slot 0, the scale becomes ``(fp8_max / window amax) / 2**margin`` (unchanged if
    that amax is 0; the largest FP32 value if it overflows), and slot 0 rolls to the end.

    An amax that is Inf or NaN joins as 0, is counted in `nonfinite_steps` and leaves the scale of
    this step alone, so that one bad step does not spoil a whole window.

    Args:
        scale: FP32, one element (or one an operand).
        amax_history: FP32 [length, ...].
        nonfinite_steps: an integer or FP32 counter shaped like `scale`.
        amax: FP32, what this step observed, its largest value if it observed several times.
        algo: "max", "most_recent", or a function of the history with the current amax in slot 0.
        scale_algo: a function (window amax, old scale, fp8_max) -> scale instead of the formula.
        pow2: round the new scale down to a power of two.

    Returns:
        the new scale, history and counter, shaped like the old; nothing is written in place.
    """
    inner = amax_history.shape[1:]
    finite, flag = split_nonfinite(amax.reshape(inner))
    live = torch.maximum(amax_history[:1], finite.unsqueeze(0))
    window = torch.cat([live, amax_history[1:]])
    old = scale.reshape(inner)
    most = _window_amax(window, algo).reshape(inner)
    new = _next_scale(old, most, fp8_max, margin=margin, algo=scale_algo, pow2=pow2)
    new = torch.where(flag > 0.0, old, new)
    # A window of one slot has nothing to roll to: the cut leaves its zero.
    rolled = torch.cat([torch.zeros_like(live), window[2:], live])[: len(window)]
    counter = nonfinite_steps + flag.reshape(nonfinite_steps.shape).to(nonfinite_steps.dtype)
    return new.reshape(scale.shape), rolled, counter


def scale_from_history(
    history: Tensor,
    *,
    fp8_max: float,
    margin: float = 0,
    algo: AmaxAlgo = "max",
    scale_algo: ScaleAlgo | None = None,
    pow2: bool = False,
) -> Tensor:
    """The scale [...] that the finished steps in `history` [length, ...] give under a recipe that
    did not make it; 1 where the history is all zero."""
    # Between steps the most recent one is in the last slot: roll it to where `algo` expects it.
    window = history.roll(1, 0)
    amax = _window_amax(window, algo).reshape(history.shape[1:])
    one = torch.ones_like(amax)
    return _next_scale(one, amax, fp8_max, margin=margin, algo=scale_algo, pow2=pow2)


def resize_history(history: Tensor, length: int) -> Tensor:
    """`history` with `length` slots: the live slot and the most recent finished steps (the last slots) are kept,
    older ones are cut, or zeros are put in where older ones would be."""
    if length < 1:
        raise RecipeError(f"amax_history_len {length} must be at least 1.")
    live, finished = history[:1], history[1:]
    kept = finished[len(finished) - min(len(finished), length - 1) :]
    missing = torch.zeros_like(live).expand(length - 1 - len(kept), *history.shape[1:])
    return torch.cat([live, missing, kept])
