"""What attention is called with: its operands by name, its attributes, and which sizes fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_ops.attrs import Dim
from te_ops.basic.arguments import FLOATS, INDICES, number, on_host, show
from te_ops.basic.band import Band, Diagonal
from te_ops.basic.score import Score
from te_ops.basic.tiles import Entry
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Spec, require

LAYOUTS = ("bshd", "sbhd", "thd")
KV_LAYOUTS = (*LAYOUTS, "paged")
FULL = Band()
_LENGTHS = ("q_starts", "q_lens", "kv_starts", "kv_lens")
_FORWARD = frozenset(
    ("q", "k", "v", "scale", *_LENGTHS, "page_table", "mask", "pre_bias", "bias", "slopes", "sink")
) | {"seed"}
_BACKWARD = (_FORWARD - {"sink"}) | {"o", "lse", "do", "dlse"}
_CAPTURED = "captured_"
QUANTIZABLE = frozenset({"q", "k", "v", "do"})
LEARNED = ("pre_bias", "bias", "slopes")  # and what a score modifier captures


@dataclass(frozen=True)
class Form:
    """The attributes of an attention node.

    Attributes:
        operands: the name of each input.
        layout: of q and o: "bshd", "sbhd" or "thd". kv_layout: of k and v, also "paged".
        band: which keys a row sees, counted within its sequences.
        scale: a number, or None for the operand "scale".
        score: what happens to a scaled score, see `Score`.
        dropout: probability of dropping a probability; the mask is a function of the operand
            "seed", `stream` and the place (head, row, key).
        slope_diagonal: where the distance that "slopes" weigh is 0.
    """

    operands: tuple[str, ...]
    layout: str = "bshd"
    kv_layout: str = "bshd"
    band: Band = FULL
    scale: float | None = None
    score: Score | None = None
    dropout: float = 0.0
    stream: int = 0
    slope_diagonal: Diagonal = "top_left"


class Sizes(NamedTuple):
    """batch, queries, keys, query heads, key/value heads, features of q and k, features of v.

    The queries (keys) of packed tokens are all rows of the tensor, the batch their sequences.
    """

    b: int
    s_q: int
    s_kv: int
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int


def named(form: Form, values: Sequence[Any], *, backward: bool = False) -> dict[str, Any]:
    """The operands of a node by name.

    Raises:
        PlanError: a name is unknown, q, k or v is missing, or the number of values is wrong.
    """
    operands, known = form.operands, _BACKWARD if backward else _FORWARD
    for name in operands:
        if name not in known and not name.startswith(_CAPTURED):
            raise PlanError(
                f"attention has no operand {name!r}; it knows {', '.join(sorted(known))}"
            )
    if len(operands) != len(values) or len(set(operands)) != len(operands):
        raise PlanError(
            f"attention: {len(values)} values for the operands {operands}; name each of them once"
        )
    missing = [name for name in _needed(form) if name not in operands]
    if missing:
        raise PlanError(f"attention: the operands {operands} lack {', '.join(missing)}")
    if (form.scale is None) != ("scale" in operands):
        raise PlanError("attention: scale is either a number or the operand 'scale'")
    return dict(zip(operands, values, strict=True))


def _needed(form: Form) -> list[str]:
    needed = ["q", "k", "v"]
    if form.layout == "thd":
        needed += ["q_starts", "q_lens"]
    if form.kv_layout == "thd":
        needed += ["kv_starts", "kv_lens"]
    if form.kv_layout == "paged":
        needed += ["page_table", "kv_lens"]
    if form.dropout:
        needed += ["seed"]
    if form.score is not None:
        needed += form.score.captured
    return needed


def learned(operands: Sequence[str]) -> tuple[str, ...]:
    """The operands beside q, k and v whose gradient attention_backward makes, in order."""
    return tuple(x for x in operands if x in LEARNED or x.startswith(_CAPTURED))


# -- sizes


class _Side(NamedTuple):
    """Of one tensor: batch (None where only its sequences tell), length, heads, features."""

    batch: int | None
    length: int
    heads: int
    features: int


def _side(name: str, x: Any, layout: str, table: Any) -> _Side:
    rank = 3 if layout == "thd" else 4
    what = "pages of slots, heads and features" if layout == "paged" else layout
    require(len(x.shape) == rank, f"attention: {name} must be {what}, its shape is {show(x.shape)}")
    if layout == "thd":
        return _Side(None, *x.shape)
    if layout == "sbhd":
        return _Side(x.shape[1], x.shape[0], x.shape[2], x.shape[3])
    if layout == "paged":
        require(
            len(table.shape) == 2 and table.dtype in INDICES,
            f"attention: page_table must be int32 or int64 [batch, pages], it is {table.dtype} "
            f"{show(table.shape)}",
        )
        return _Side(table.shape[0], table.shape[1] * x.shape[1], x.shape[2], x.shape[3])
    return _Side(*x.shape)


def sizes(form: Form, by_name: dict[str, Any]) -> Sizes:
    """Sizes of specs, tensors or records, checked against each other.

    Raises:
        ShapeError: they do not fit.
    """
    table = by_name.get("page_table")
    sides = [
        _side(name, by_name[name], form.layout if name == "q" else form.kv_layout, table)
        for name in ("q", "k", "v")
    ]
    q, k, v = sides
    lens = [by_name[name].shape[0] for name in _LENGTHS if name in by_name]
    batches = [side.batch for side in sides if side.batch is not None]
    require(len(set(batches)) <= 1, f"attention: q, k and v have batches {_ints(batches)}")
    require(
        k.heads == v.heads and k.length == v.length,
        f"attention: k {show(by_name['k'].shape)} and v {show(by_name['v'].shape)} must have the "
        "same length and heads",
    )
    require(
        q.heads >= 1 and k.heads >= 1 and q.heads % k.heads == 0,
        f"attention: {int(q.heads)} query heads cannot share {int(k.heads)} key/value heads evenly",
    )
    require(
        q.features == k.features and q.features >= 1 and v.features >= 1,
        f"attention: heads of q have {int(q.features)} features, of k {int(k.features)}, of v "
        f"{int(v.features)}; those of q and k must agree, none may be 0",
    )
    b = batches[0] if batches else lens[0]
    return Sizes(b, q.length, k.length, q.heads, k.heads, q.features, v.features)


def _ints(values: Sequence[int]) -> str:
    return ", ".join(str(int(v)) for v in values)


def fits(size: int, wanted: int) -> bool:
    """Whether a size is the wanted one, or may be: leading dimensions vary from call to call, and
    are compared again when the values are there."""
    return size == wanted or isinstance(size, Dim) or isinstance(wanted, Dim)


def check(form: Form, by_name: dict[str, Any], n: Sizes) -> None:
    """Refuse operands beside q, k and v whose shape, dtype or layout does not fit.

    Raises:
        ShapeError: one does not fit.
        PlanError: a combination that does not exist.
    """
    for name, layout in (("layout", form.layout), ("kv_layout", form.kv_layout)):
        known = LAYOUTS if name == "layout" else KV_LAYOUTS
        if layout not in known:
            raise PlanError(f"attention: {name} must be one of {', '.join(known)}, got {layout!r}")
    number("attention", "dropout", form.dropout, low=0.0, high=1.0)
    for name, x in by_name.items():
        rule = _RULES.get(name)
        if rule is not None:
            rule(name, x, n, form)
        elif name.startswith(_CAPTURED):
            one = x.shape in ((), (1,)) or (len(x.shape) == 1 and fits(x.shape[0], n.h_q))
            require(
                one and x.dtype in FLOATS,
                f"attention: {name.removeprefix(_CAPTURED)} of the score modifier is {x.dtype} "
                f"{show(x.shape)}; it must be floating point, 0-dim or with {int(n.h_q)} numbers",
            )


def _check_lengths(name: str, x: Any, n: Sizes, form: Form) -> None:
    require(
        len(x.shape) == 1 and fits(x.shape[0], n.b) and x.dtype in INDICES,
        f"attention: {name} must be int32 or int64 with one entry for each of {int(n.b)} sequences, "
        f"it is {x.dtype} {show(x.shape)}",
    )


def _check_square(name: str, x: Any, n: Sizes, form: Form) -> None:
    """A mask or bias, which broadcasts to [b, h, s_q, s_kv]."""
    if "thd" in (form.layout, form.kv_layout) or form.kv_layout == "paged":
        raise PlanError(
            f"attention: a {name} needs sequences of one length (bshd or sbhd), since its rows and "
            "keys are those of the tensors; use mask types, windows, ALiBi or score_mod"
        )
    kinds = (torch.bool,) if name == "mask" else FLOATS
    wanted = (n.b, n.h_q, n.s_q, n.s_kv)
    rank = len(x.shape)
    ok = 1 <= rank <= 4 and all(
        size == 1 or fits(size, want)
        for size, want in zip(x.shape, wanted[4 - rank :], strict=True)
    )
    require(
        ok and x.dtype in kinds,
        f"attention: {name} is {x.dtype} {show(x.shape)}; it must be "
        f"{'bool (True = masked out)' if name == 'mask' else 'floating point'} and broadcast to "
        f"[batch, heads, queries, keys] = {show(wanted)}",
    )


def _check_slopes(name: str, x: Any, n: Sizes, form: Form) -> None:
    shapes = ((n.h_q,), (n.b, n.h_q))
    ok = len(x.shape) in (1, 2) and all(
        fits(a, b) for a, b in zip(x.shape, shapes[len(x.shape) - 1], strict=True)
    )
    require(
        ok and x.dtype in FLOATS,
        f"attention: slopes are {x.dtype} {show(x.shape)}; they must be floating point [heads] or "
        f"[batch, heads] = {show(shapes[1])}",
    )


def _check_sink(name: str, x: Any, n: Sizes, form: Form) -> None:
    require(
        len(x.shape) == 1 and fits(x.shape[0], n.h_q) and x.dtype in FLOATS,
        f"attention: sink is {x.dtype} {show(x.shape)}; it must be one floating-point number for "
        f"each of {int(n.h_q)} heads",
    )


_RULES: dict[str, Callable[[str, Any, Sizes, Form], None]] = {
    **dict.fromkeys(_LENGTHS, _check_lengths),
    "mask": _check_square,
    "pre_bias": _check_square,
    "bias": _check_square,
    "slopes": _check_slopes,
    "sink": _check_sink,
}


def infer(form: Form, specs: Sequence[Spec]) -> tuple[dict[str, Spec], Sizes]:
    """The specs by name, and the sizes, of a node.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        PlanError: operands or attributes do not.
    """
    by_name = named(form, specs)
    if form.layout not in LAYOUTS or form.kv_layout not in KV_LAYOUTS:
        check(form, {}, Sizes(*[1] * 7))
    n = sizes(form, by_name)
    dtypes = [by_name[name].dtype for name in ("q", "k", "v")]
    require(
        len(set(dtypes)) == 1 and dtypes[0] in FLOATS,
        f"attention: q, k and v have dtypes {', '.join(map(str, dtypes))}; they must have one "
        "floating-point dtype: cast them, or run under torch.autocast",
    )
    check(form, by_name, n)
    return by_name, n


# -- sequences


def entries(form: Form, by_name: dict[str, Any], n: Sizes, *, apart: bool) -> list[Entry]:
    """The ranges of rows and keys that belong together, from the values of starts and lengths.

    A dense batch is one entry, or with `apart` (something differs between its entries) one each.

    Raises:
        ShapeError: a sequence does not lie within its tensor.
    """
    if not (set(_LENGTHS) & set(by_name)) and not apart and form.kv_layout != "paged":
        return [Entry(None, 0, 0, n.b * n.h_kv, (0, n.s_q), (0, n.s_kv))]
    q, kv = (_ranges(side, by_name, n) for side in ("q", "kv"))
    dense = [layout != "thd" for layout in (form.layout, form.kv_layout)]
    return [
        Entry(e, e * n.h_kv * dense[0], e * n.h_kv * dense[1], n.h_kv, q[e], kv[e])
        for e in range(n.b)
    ]


def _ranges(side: str, by_name: dict[str, Any], n: Sizes) -> list[tuple[int, int]]:
    """(start, length) of every sequence."""
    size = n.s_q if side == "q" else n.s_kv
    starts, lens = (by_name.get(f"{side}_{what}") for what in ("starts", "lens"))
    for name, x in ((f"{side}_starts", starts), (f"{side}_lens", lens)):
        require(
            x is None or x.shape[0] == n.b,
            f"attention: {name} has {0 if x is None else x.shape[0]} entries for {n.b} sequences",
        )
    begin = [0] * n.b if starts is None else on_host(starts)
    if lens is None:
        return [(start, size - start) for start in begin]
    made = list(zip(begin, on_host(lens), strict=True))
    for e, (start, length) in enumerate(made):
        if start < 0 or length < 0 or start + length > size:
            raise ShapeError(
                f"attention: sequence {e} of {side} starts at {start} with length {length}, which "
                f"does not lie within the {size} rows there are"
            )
    return made


__all__ = [
    "KV_LAYOUTS",
    "LAYOUTS",
    "QUANTIZABLE",
    "Form",
    "Sizes",
    "check",
    "entries",
    "infer",
    "learned",
    "named",
    "sizes",
]
