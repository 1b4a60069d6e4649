"""What FlashAttention is not asked for, and why: a table over exact problems; it needs neither library nor device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from te_ops.backends.cudnn.problem import HALF, LENGTHS
from te_ops.backends.flash.limits import FEATURES, STEP, WIDER
from te_ops.backends.flash.problem import Problem

_TAKEN = {"q", "k", "v", "o", "lse", "do", "sink", *LENGTHS}


@dataclass(frozen=True)
class Gate:
    """Problems that are refused, and the reason."""

    name: str
    refuses: Callable[[Problem], bool]
    reason: str


def _mixed(p: Problem) -> bool:
    return not p.packed and ("thd" in (p.form.layout, p.form.kv_layout) or p.varied)


def _off_diagonal(p: Problem) -> bool:
    """A mask that starts at the first key, where it matters."""
    band = p.band
    bound = band.left is not None or band.right is not None
    return bound and band.diagonal == "top_left" and not p.equal


def _features(p: Problem) -> bool:
    sizes = (p.sizes.d_qk, p.sizes.d_v)
    return any(size % 8 or size > FEATURES for size in sizes)


def _learns(p: Problem) -> bool:
    """A captured value wants its gradient, a sum over all scores."""
    return p.form.score is not None and any(p.wants(name) for name in p.form.score.captured)


def _other_operands(p: Problem) -> bool:
    taken = _TAKEN if p.form.score is None else _TAKEN.union(p.form.score.captured)
    return not taken.issuperset(p.form.operands)


GATES: tuple[Gate, ...] = (
    Gate(
        "dtype",
        lambda p: p.quantized or p.dtype not in HALF,
        "q, k and v must be BF16 or FP16",
    ),
    Gate("empty", lambda p: 0 in p.sizes, "nothing of size zero is given to the kernels"),
    Gate(
        "features",
        _features,
        f"the features of a head must divide by 8, and be {FEATURES} at most",
    ),
    Gate("wider values", lambda p: p.sizes.d_v > p.sizes.d_qk, WIDER),
    Gate(
        "features of a gradient",
        lambda p: p.backward and any(size % STEP for size in (p.sizes.d_qk, p.sizes.d_v)),
        f"in a gradient the features of a head must divide by {STEP}",
    ),
    Gate(
        "shared keys",
        lambda p: p.backward and p.sizes.h_q != p.sizes.h_kv and p.sizes.d_qk != p.sizes.d_v,
        "where query heads share keys, the gradient needs as many features of v as of q and k",
    ),
    Gate(
        "scale",
        lambda p: p.form.scale is None,
        "the scale is a te.scalar; the kernels take a number",
    ),
    Gate(
        "sign",
        lambda p: p.form.scale is not None and p.form.scale <= 0,
        "the kernels take the largest score of a row before the scale, which has to be positive",
    ),
    Gate(
        "captured",
        _learns,
        "the gradient of what a score modifier captures is left to the reference",
    ),
    Gate("lengths", _mixed, "sequences have lengths in thd or in bshd, on both sides"),
    Gate(
        "diagonal",
        _off_diagonal,
        "masks end at the last key where the numbers of queries and keys differ",
    ),
    Gate("dropout", lambda p: p.form.dropout > 0, "the kernels drop nothing"),
    Gate("peak", lambda p: p.peak, "the kernels return no largest scores"),
    Gate(
        "gradient of the lse",
        lambda p: p.backward and not ("do" in p.has and "dlse" not in p.has),
        "the kernels are given no gradient of the lse",
    ),
    Gate(
        "operands",
        _other_operands,
        "the kernels are given no mask, bias or slopes",
    ),
    Gate(
        "deterministic",
        lambda p: p.backward and p.deterministic,
        "the gradient of q is summed in the order in which blocks finish",
    ),
)


def refuse(problem: Problem) -> str | None:
    """None if a kernel is made for the problem, else the first reason why not."""
    return next((gate.reason for gate in GATES if gate.refuses(problem)), None)
