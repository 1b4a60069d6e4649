"""What cuDNN is not asked for, and why: a table over exact problems, which needs neither the library nor a device.

Rows marked `library` say what the library itself refuses, which a build shows; the others are what it does wrong, or
what a graph here does not express.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from te_ops.backends.cudnn.problem import HALF, Problem
from te_ops.basic.attention_form import learned

MAX_FEATURES = 256
"""Of a head: with more, only an engine of an older architecture runs, and no backward."""
FEW = 64
"""Queries of a block of the library's backward."""


@dataclass(frozen=True)
class Gate:
    """Problems that are refused, and the reason."""

    name: str
    refuses: Callable[[Problem], bool]
    reason: str
    library: bool = False


def _diagonal(p: Problem) -> bool:
    return p.band.diagonal == "bottom_right"


def _extras(p: Problem) -> bool:
    return p.bias is not None or p.form.dropout > 0 or "slopes" in p.has


def _square(p: Problem) -> bool:
    return not p.has.isdisjoint(("mask", "bias"))


def _narrow(p: Problem) -> bool:
    """A bias or mask that is one number for all keys."""
    name = "bias" if "bias" in p.has else "mask"
    return _square(p) and p.shape(name)[-1] != p.sizes.s_kv


def _partial_bias(p: Problem) -> bool:
    if not p.wants("bias"):
        return False
    shape = p.shape("bias")
    return len(shape) < 2 or shape[-2] != p.sizes.s_q


GATES: tuple[Gate, ...] = (
    Gate(
        "dtype",
        lambda p: not p.quantized and p.dtype not in HALF,
        "q, k and v must be BF16 or FP16",
    ),
    Gate(
        "fp8 of fp64",
        lambda p: p.quantized and p.dtype is torch.float64,
        "statistics of what was FP64 are FP64",
    ),
    Gate(
        "fp8 features",
        lambda p: p.quantized and (p.sizes.d_qk % 16 != 0 or p.sizes.d_v % 16 != 0),
        "the features of a head must divide by 16 in FP8",
        library=True,
    ),
    Gate(
        "fp8 bias",
        lambda p: p.quantized and _square(p),
        "FP8 attention of the library takes no bias and no mask tensor",
        library=True,
    ),
    Gate(
        "fp8 slopes",
        lambda p: p.quantized and "slopes" in p.has,
        "FP8 attention of the library has no ALiBi beside a band",
    ),
    Gate(
        "fp8 diagonal",
        lambda p: p.quantized and _diagonal(p),
        "FP8 attention of the library has no diagonal that ends at the last key before sm_100",
        library=True,
    ),
    Gate(
        "fp8 one query",
        lambda p: p.quantized and p.sizes.s_q == 1,
        "FP8 attention of the library takes more than one query",
        library=True,
    ),
    Gate(
        "fp8 offsets",
        lambda p: p.quantized and p.ragged,
        "FP8 attention of the library ends in an illegal instruction where a sequence with an offset has no tokens",
    ),
    Gate(
        "fp8 peak",
        lambda p: p.quantized and p.peak,
        "FP8 attention of the library writes largest scores in another unit (times log2(e)) than it says",
    ),
    Gate(
        "fp8 dropout",
        lambda p: p.quantized and p.form.dropout > 0,
        "FP8 attention of the library with dropout ends in an illegal address",
    ),
    Gate("empty", lambda p: 0 in p.sizes, "nothing of size zero is given to the library"),
    Gate(
        "features",
        lambda p: p.sizes.d_qk % 8 != 0 or p.sizes.d_v % 8 != 0,
        "the features of a head must divide by 8",
        library=True,
    ),
    Gate(
        "many features",
        lambda p: max(p.sizes.d_qk, p.sizes.d_v) > MAX_FEATURES,
        f"more than {MAX_FEATURES} features of a head run on an engine for older devices, without backward",
    ),
    Gate(
        "score",
        lambda p: p.form.score is not None,
        "a score modifier excludes every mask in the library's graphs, and costs the skipping of hidden blocks",
    ),
    Gate(
        "scale", lambda p: p.form.scale is None, "the scale is a te.scalar; a graph holds a number"
    ),
    Gate(
        "sign",
        lambda p: p.form.scale is not None and p.form.scale <= 0,
        "the library takes the largest score of a row before the scale, which has to be positive",
    ),
    Gate(
        "pre-bias",
        lambda p: "pre_bias" in p.has,
        "the library adds a bias after the scale only; a scaled copy would be rounded again",
    ),
    Gate(
        "bias dtype",
        lambda p: "bias" in p.has and dict(p.dtypes)["bias"] is not p.dtype,
        "a bias is read in the dtype of q, k and v only; another would be rounded",
    ),
    Gate(
        "two biases",
        lambda p: {"mask", "bias"} <= p.has,
        "a mask is given to the library as a bias, of which there is one",
    ),
    Gate("narrow bias", _narrow, "a bias or mask must have a column for each key"),
    Gate(
        "partial dbias",
        _partial_bias,
        "the gradient of a bias that is one row for all queries is left to the reference",
    ),
    Gate(
        "square with lengths",
        lambda p: _square(p) and p.varied,
        "masks and biases together with lengths are left to the reference",
    ),
    Gate(
        "mask with band",
        lambda p: "mask" in p.has and (p.band.left is not None or p.band.right is not None),
        "a mask and a band together may hide whole rows, which the library does not make 0",
    ),
    Gate(
        "slopes",
        lambda p: "slopes" in p.has and not p.alibi,
        "only the slopes of the ALiBi paper, for a power of two of heads, are known to the library",
    ),
    Gate(
        "slopes band",
        lambda p: "slopes" in p.has and p.band.right != 0,
        "ALiBi needs a causal band in the library",
        library=True,
    ),
    Gate(
        "slopes diagonal",
        lambda p: "slopes" in p.has and p.form.slope_diagonal != "top_left",
        "ALiBi that ends at the last key is left to the reference",
    ),
    Gate("slopes gradient", lambda p: p.wants("slopes"), "slopes get no gradient from the library"),
    Gate(
        "diagonal with extras",
        lambda p: _diagonal(p) and _extras(p),
        "a diagonal that ends at the last key excludes bias, ALiBi and dropout in the library",
        library=True,
    ),
    Gate(
        "diagonal beyond keys",
        lambda p: _diagonal(p) and not p.varied and p.sizes.s_q > p.sizes.s_kv,
        "a diagonal that ends at the last key needs as many keys as queries, unless there are lengths",
        library=True,
    ),
    Gate(
        "window beyond keys",
        lambda p: p.band.left is not None and not p.varied and p.sizes.s_q > p.sizes.s_kv,
        "a window needs as many keys as queries, unless there are lengths",
        library=True,
    ),
    Gate(
        "one by one",
        lambda p: p.backward and p.sizes.s_q == 1 and p.sizes.s_kv == 1,
        "one query and one key have no backward in the library",
        library=True,
    ),
    Gate(
        "few queries beside a mask",
        lambda p: p.backward and "mask" in p.has and p.sizes.s_q < FEW,
        f"the library's gradient of q was wrong beside a mask with 2 queries; {FEW} and more are given to it",
    ),
    Gate(
        "gradient of the lse",
        lambda p: p.backward and not ("do" in p.has and "dlse" not in p.has),
        "the library takes no gradient of the lse",
    ),
    Gate(
        "dropout of all",
        lambda p: p.form.dropout >= 1.0,
        "all probabilities dropped leave nothing to scale",
        library=True,
    ),
)


def refuse(problem: Problem) -> str | None:
    """None if a graph is made for the problem, else the first reason why not.

    With dropout both directions are asked, whichever the problem is: they are taken together or not at all, since
    only the library repeats the library's mask.
    """
    for asked in _directions(problem) if problem.form.dropout else (problem,):
        for gate in GATES:
            if gate.refuses(asked):
                return gate.reason
    return None


def _directions(problem: Problem) -> tuple[Problem, Problem]:
    names = tuple(n for n in problem.form.operands if n not in ("sink", "o", "lse", "do", "dlse"))
    live = (True,) * (3 + len(learned(names)))
    back = (*names, "o", "lse", "do")
    return (
        replace(
            problem,
            backward=False,
            form=replace(problem.form, operands=names),
            live=(True, True, False),
        ),
        replace(problem, backward=True, form=replace(problem.form, operands=back), live=live),
    )
