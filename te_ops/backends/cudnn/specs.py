"""The graph of a problem over given tensors: strides, size classes, guards, and where sequences start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_ops.backends.cudnn import sequences
from te_ops.backends.cudnn.graphs import E4M3, GraphSpec, Strides
from te_ops.backends.cudnn.problem import Problem

TILE = 128  # keys of a block of the library's kernels
READ = {False: ("q", "k", "v"), True: ("q", "k", "v", "o", "do")}
"""The 4-D tensors that a graph reads, forward and backward."""
GRADS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias"}
OF_KEYS = frozenset({"k", "v", "dk", "dv"})


def contiguous(x: Any) -> Tensor:
    """A contiguous tensor of x's shape, without memory."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _strides(x: Tensor, layout: str, most: int | None) -> Strides:
    """Of a tensor, as the library counts its dimensions.

    Entries of a ragged one start at offsets: its first stride only has to be that of `most` rows.
    """
    if layout == "thd":
        row, head, batch = x.stride(0), x.stride(1), 0
    else:
        b, s = (1, 0) if layout == "sbhd" else (0, 1)
        row, head, batch = x.stride(s), x.stride(2), x.stride(b)
        if x.shape[b] == 1:
            batch = x.shape[s] * row  # of one entry, any will do: the plan is the same
    return (batch if most is None else most * row, head, row, 1)


def up(size: int, least: int) -> int:
    """The size of a class: a power of two and three steps up to the next, so at most a quarter more."""
    if size <= least:
        return least
    step = max(least, (1 << size.bit_length()) >> 3)
    return -(-size // step) * step


def power(size: int, least: int) -> int:
    """The next power of two, or `least`: few classes, since for each a plan is built."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def spec_of(problem: Problem, xs: dict[str, Any], *, shared: bool = False) -> GraphSpec:
    """The graph of a problem over these tensors; `shared`: that of its size class."""
    n, form, band = problem.sizes, problem.form, problem.band
    ragged = shared or problem.ragged
    b, s_q, s_kv = n.b, n.s_q, n.s_kv
    rows = (s_q, s_kv)
    if ragged:
        rows = (up(s_q, TILE), up(s_kv, TILE))
        b, s_q, s_kv = up(b, 1), *_most(problem, rows)
    assert problem.dtype is not None
    assert form.scale is not None
    bias = _bias_shape(problem)
    return GraphSpec(
        backward=problem.backward,
        dtype=E4M3 if problem.quantized else problem.dtype,
        b=b,
        h_q=n.h_q,
        h_kv=n.h_kv,
        s_q=s_q,
        s_kv=s_kv,
        d_qk=n.d_qk,
        d_v=n.d_v,
        strides=_all_strides(problem, xs, ragged, (s_q, s_kv)),
        scale=form.scale,
        left=band.left,
        right=band.right,
        bottom_right=band.diagonal == "bottom_right",
        padding=ragged or problem.varied or _guarded(problem),
        ragged=ragged,
        totals=_totals(problem, b, rows) if ragged and problem.backward else None,
        bias=bias,
        bias_dtype=None if bias is None else problem.dtype,
        dbias=problem.wants("bias"),
        alibi="slopes" in problem.has,
        dropout=form.dropout,
        peak=problem.peak,
        deterministic=problem.backward and problem.deterministic,
    )


def _most(problem: Problem, rows: tuple[int, int]) -> tuple[int, int]:
    """The greatest lengths of ragged sequences: the library starts blocks for so many rows of each."""
    q, kv = (
        size if known is None else min(size, power(known, TILE))
        for known, size in zip(problem.longest, rows, strict=True)
    )
    return q, kv


def _guarded(problem: Problem) -> bool:
    """Whether keys need a padding mask with the full lengths.

    Without it, rows whose scores are all below -88 get a NaN gradient where the last block of keys is not full or
    there is one query (cuDNN 9.19, seen on an H200: docs/design).
    """
    n = problem.sizes
    square = problem.bias is not None or "mask" in problem.has
    return (square and n.s_kv % TILE != 0) or n.s_q == 1


def _bias_shape(problem: Problem) -> tuple[int, int, int, int] | None:
    name = "mask" if "mask" in problem.has else problem.bias
    if name is None:
        return None
    shape = problem.shape(name)
    return (1,) * (4 - len(shape)) + shape  # type: ignore[return-value]


def _totals(problem: Problem, b: int, sizes: tuple[int, int]) -> tuple[int, int]:
    form = problem.form
    layouts = (form.layout, form.kv_layout)
    rows = [s if layout == "thd" else b * s for layout, s in zip(layouts, sizes, strict=True)]
    return rows[0], rows[1]


def _tensors(problem: Problem, xs: dict[str, Any]) -> dict[str, tuple[Tensor, str]]:
    """Every 4-D tensor of a graph but the statistics, as it lies, with its layout."""
    form = problem.form
    layouts = dict.fromkeys(("k", "v"), form.kv_layout)
    made = {name: (xs[name], layouts.get(name, form.layout)) for name in READ[problem.backward]}
    if problem.backward:
        for name in ("q", "k", "v"):
            made[GRADS[name]] = (contiguous(xs[name]), made[name][1])
    else:
        q = xs["q"]
        o = torch.empty((*q.shape[:-1], problem.sizes.d_v), dtype=q.dtype, device="meta")
        made["o"] = (o, form.layout)
    return made


def _all_strides(
    problem: Problem, xs: dict[str, Any], ragged: bool, most: tuple[int, int]
) -> tuple[tuple[str, Strides], ...]:
    h, s = problem.sizes.h_q, most[0]
    made = {
        name: _strides(x, layout, most[name in OF_KEYS] if ragged else None)
        for name, (x, layout) in _tensors(problem, xs).items()
    }
    made["stats"] = (s * h, 1, h, 1) if ragged else (h * s, s, 1, 1)
    return tuple(made.items())


def steps_of(problem: Problem, xs: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Elements between two rows, and between two entries of the batch, of every tensor of a graph."""
    made: dict[str, tuple[int, int]] = {}
    for name, (x, layout) in _tensors(problem, xs).items():
        strides = _strides(x, layout, None)
        made[name] = (strides[2], strides[0])
    n = problem.sizes
    made["stats"] = (n.h_q, n.s_q * n.h_q)
    return made


def offsets_of(
    spec: GraphSpec,
    sides: tuple[sequences.Side, sequences.Side],
    steps: dict[str, tuple[int, int]],
) -> dict[str, Tensor]:
    """Where the sequences of every ragged tensor start."""
    made: dict[str, Tensor] = {}
    for side, keys in zip(sides, (False, True), strict=True):
        own = {f"{name}_at": step for name, step in steps.items() if (name in OF_KEYS) is keys}
        made |= sequences.offsets(side, spec.b, own)
    return made


def facts(
    problem: Problem, spec: GraphSpec, xs: dict[str, Any], lying: dict[str, Any]
) -> sequences.Facts:
    """What sequences of these lengths mean for a graph; `lying` are the operands as they are going to lie."""
    q, kv = sequences.sides(problem, xs)
    operands = {"q_lens": sequences.lengths(q, spec.b), "kv_lens": sequences.lengths(kv, spec.b)}
    if spec.ragged:
        operands |= offsets_of(spec, (q, kv), steps_of(problem, lying))
    if problem.whole:
        return sequences.Facts(operands, None, None, None)
    places, (_, _, kept) = q.places(), kv.places()
    empty = sequences.empty_rows(problem.band, q, kv, places)
    return sequences.Facts(operands, empty, ~places[2], ~kept)
