"""Rotary position embedding: a table made once per sequence length, and the rotation that reads it.

Formula: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.4.
Pair i turns by the angle position * base^(-2i / dim).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from te_ops.basic.arguments import indices, show, wide
from te_ops.basic.heads import SPLIT_HEADS, UNPACK_HEADS, Parts, views_of, width_of
from te_ops.basic.norm import L2NORM, LAYERNORM, RMSNORM
from te_ops.basic.rope_scaling import Scaling, frequencies, scaling_of
from te_ops.basic.sequences import packed_parts
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require
from te_ops.op import Op, Scalar

Layout = Literal["bshd", "sbhd", "thd"]
SEQUENCE_AXIS: dict[str, int] = {"bshd": 1, "sbhd": 0, "thd": 0}
PositionsFrom = Literal["start", "offsets", "ids"]
_POSITIONS = ("start", "offsets", "ids")


# -- tables


def _table_infer(length: Spec, *_: Spec, dim: int, dtype: torch.dtype, **__: Any) -> Spec:
    return Spec((length.shape[0], 2, dim // 2), dtype)


@prim("rope_table", infer=_table_infer, differentiable=False, placed=True)
def ROPE_TABLE(
    length: tuple[int, ...],
    *first: torch.Tensor,
    dim: int,
    base: float,
    start: int,
    dtype: torch.dtype,
    scaling: Scaling | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """cos and sin [s, 2, dim / 2] of the positions start .. start + s - 1.

    `first`, a 0-dim number known at run time, is added to the positions. inv_freq, angle, cos and
    sin are all computed in `dtype`: FP32, or FP64 for FP64 inputs.
    """
    positions = torch.arange(start, start + length[0], dtype=dtype, device=device)
    if first:
        positions = positions + first[0].to(positions)
    return _turns(positions, dim, base, scaling)


def _turns(positions: torch.Tensor, dim: int, base: float, scaling: Scaling | None) -> torch.Tensor:
    """cos and sin [..., 2, dim / 2] of positions [...]."""
    length: Any = 0
    if scaling is not None and scaling.needs_length and positions.numel():
        length = positions.max() + 1
    angle = positions.unsqueeze(-1) * frequencies(dim, base, scaling, length, positions)
    table = torch.stack((angle.cos(), angle.sin()), -2)
    return table if scaling is None or scaling.amplitude == 1.0 else table * scaling.amplitude


def _table_at_infer(positions: Spec, dim: int, dtype: torch.dtype, **_: Any) -> Spec:
    indices("rope: positions", positions)
    return Spec((*positions.shape, 2, dim // 2), dtype)


@prim("rope_table_at", infer=_table_at_infer, differentiable=False)
def ROPE_TABLE_AT(
    positions: torch.Tensor,
    dim: int,
    base: float,
    dtype: torch.dtype,
    scaling: Scaling | None = None,
) -> torch.Tensor:
    """cos and sin [..., 2, dim / 2] of int positions [...], computed in `dtype`."""
    return _turns(positions.to(dtype), dim, base, scaling)


def _offset_infer(offsets: Spec, length: Spec, axis: int) -> Spec:
    indices("rope: offsets", offsets)
    require(
        len(offsets.shape) == 1,
        f"rope: offsets must have one entry a sequence, got {show(offsets.shape)}",
    )
    shape = (offsets.shape[0], length.shape[0])
    return Spec(shape if axis == 1 else shape[::-1], torch.int64)


@prim("rope_offsets", infer=_offset_infer, differentiable=False)
def ROPE_OFFSETS(offsets: torch.Tensor, length: tuple[int, ...], axis: int) -> torch.Tensor:
    """Positions offsets[i], offsets[i] + 1, ... of each sequence: [b, s], or [s, b] for axis 0."""
    steps = torch.arange(length[0], dtype=torch.int64, device=offsets.device)
    positions = offsets.long().unsqueeze(1) + steps
    return positions if axis == 1 else positions.t().contiguous()


def _packed_infer(starts: Spec, lens: Spec, length: Spec, *offsets: Spec) -> Spec:
    for x in (starts, lens, *offsets):
        indices("rope: starts, lengths and offsets", x)
        require(
            len(x.shape) == 1 and (x.shape == starts.shape or type(x.shape[0]) is not int),
            f"rope: {show(x.shape)} offsets for {show(starts.shape)} sequences",
        )
    return Spec((length.shape[0],), torch.int64)


@prim("rope_packed_positions", infer=_packed_infer, differentiable=False)
def ROPE_PACKED_POSITIONS(
    starts: torch.Tensor, lens: torch.Tensor, length: tuple[int, ...], *offsets: torch.Tensor
) -> torch.Tensor:
    """The position of each packed token in its sequence, plus the sequence's offset.

    Tokens that belong to no sequence have position 0.
    """
    require(
        all(x.shape == starts.shape for x in offsets),
        f"rope: {[show(x.shape) for x in offsets]} offsets for {show(starts.shape)} sequences",
    )
    tokens = torch.arange(length[0], dtype=torch.int64, device=starts.device)
    if not starts.shape[0]:
        return torch.zeros_like(tokens)
    # Of sequences that start at the same token all but the last are empty.
    sequence = torch.bucketize(tokens, starts, right=True).sub_(1).clamp_(min=0)
    place = tokens - starts[sequence]
    inside = (place >= 0) & (place < lens[sequence])
    for x in offsets:
        place = place + x.long()[sequence]
    return place.masked_fill(~inside, 0)


# -- the rotation


def _rope_infer(x: Spec, table: Spec, interleaved: bool, inverse: bool, axis: int) -> Spec:
    require(
        len(x.shape) in (3, 4),
        "rope: expects 4 dimensions (batch, sequence, heads, features), or 3 of packed tokens, got "
        f"{show(x.shape)}",
    )
    require(x.dtype.is_floating_point, f"rope: cannot rotate a {x.dtype} value; cast it first")
    require(
        x.shape[-1] >= 2 * table.shape[-1],
        f"rope: rotates {2 * table.shape[-1]} features, heads have {int(x.shape[-1])}",
    )
    places, wanted = table.shape[:-2], x.shape[:-2]
    if len(places) == 1 and len(wanted) == 2:
        wanted = (x.shape[axis],)
    require(
        places == wanted,
        f"rope: there are positions for {show(places)}, the input {show(x.shape)} has "
        f"{show(wanted)}",
    )
    return x.like()


@prim("rope", infer=_rope_infer, cheap=True)
def ROPE(
    x: torch.Tensor, table: torch.Tensor, interleaved: bool, inverse: bool, axis: int
) -> torch.Tensor:
    """x with its first features rotated: pairs (i, i + dim/2), interleaved (2i, 2i + 1).

    `inverse` turns back, which is the gradient. Computes in the table's dtype, rounds once.
    """
    half = table.shape[-1]
    if table.dim() == 3 and x.dim() == 4:  # one position for a place of all sequences
        table = table.unsqueeze(1 - axis)
    cos, sin = (t.unsqueeze(-2) for t in table.unbind(-2))
    a, b = (t.to(table.dtype) for t in _pairs(x, half, interleaved))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_a, out_b = _pairs(out, half, interleaved)
    if inverse:
        out_a.copy_(a * cos + b * sin)
        out_b.copy_(b * cos - a * sin)
    else:
        out_a.copy_(a * cos - b * sin)
        out_b.copy_(b * cos + a * sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :].copy_(x[..., 2 * half :])
    return out


def _pairs(x: torch.Tensor, half: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and the second elements of the pairs."""
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


@gradient(ROPE)
def _rope_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value, None]:
    back = g.call(
        ROPE,
        dy,
        node.inputs[1],
        interleaved=node.interleaved,
        inverse=not node.inverse,
        axis=node.axis,
    )
    return back, None


# -- the rotation of some of the heads that lie side by side in one tensor


def _rope_heads_infer(
    x: Spec, table: Spec, parts: Parts, turned: tuple[bool, ...], axis: int, **_: Any
) -> Spec:
    require(
        len(parts) == len(turned) and len(x.shape) > 0 and x.shape[-1] == width_of(parts),
        f"rope_heads: {show(x.shape)} does not hold (heads, features) {parts}, of which {turned} turn",
    )
    for part, turns in zip(parts, turned, strict=True):
        if turns:
            _rope_infer(x.like((*x.shape[:-1], *part)), table, False, False, axis)
    return x.like()


@prim("rope_heads", infer=_rope_heads_infer, cheap=True)
def ROPE_HEADS(
    x: torch.Tensor,
    table: torch.Tensor,
    *,
    parts: Parts,
    turned: tuple[bool, ...],
    interleaved: bool,
    inverse: bool,
    axis: int,
) -> torch.Tensor:
    """x [..., sum h_i d_i] with the heads of the parts marked `turned` rotated as ROPE does, the others as they are."""
    packed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for piece, place, turns in zip(
        views_of(x, parts), views_of(packed, parts), turned, strict=True
    ):
        place.copy_(ROPE.reference(piece, table, interleaved, inverse, axis) if turns else piece)
    return packed


@gradient(ROPE_HEADS)
def _rope_heads_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value, None]:
    attrs = {**node.attrs, "inverse": not node.inverse}
    return g.call(ROPE_HEADS, dy, node.inputs[1], **attrs), None


_ROW_BY_ROW = frozenset({UNPACK_HEADS, SPLIT_HEADS, RMSNORM, LAYERNORM, L2NORM})


def _length(g: Graph, x: Value, axis: int) -> Value:
    """The sequence length, as that of what heads are taken from: the same for queries and keys, so one table."""
    while g.node(x).prim in _ROW_BY_ROW:
        x = g.node(x).inputs[0]
    return g.dim(x, axis)


def rope(
    g: Graph,
    x: Value,
    dim: int,
    base: float = 10000.0,
    *,
    interleaved: bool = False,
    start: int | Scalar = 0,
    layout: Layout = "bshd",
    scaling: Scaling | None = None,
    positions: Value | None = None,
) -> Value:
    """Rotate the first `dim` features of each head of x [b, s, h, d] ("sbhd": [s, b, h, d]).

    `positions` are int, shaped like x's leading dimensions or [s]; else they count from `start`.
    Equal tables are one value of the graph, whichever layer asks, since they depend on nothing but
    the sequence length or the positions.

    Raises:
        ShapeError: x is not floating point with heads of at least `dim` features.
    """
    axis = SEQUENCE_AXIS[layout]
    spec = g.spec(x)
    if len(spec.shape) != (3 if layout == "thd" else 4):
        raise ShapeError(f"rope: expects {' x '.join(layout)}, got shape {show(spec.shape)}")
    attrs: dict[str, Any] = {"dim": dim, "base": float(base), "dtype": wide(spec.dtype)}
    attrs["scaling"] = scaling
    if positions is not None:
        table = g.call(ROPE_TABLE_AT, positions, **attrs)
    elif isinstance(start, Scalar):
        table = g.call(ROPE_TABLE, _length(g, x, axis), g.scalar(start), start=0, **attrs)
    else:
        table = g.call(ROPE_TABLE, _length(g, x, axis), start=start, **attrs)
    return g.call(ROPE, x, table, interleaved=interleaved, inverse=False, axis=axis)


class RoPE(Op):
    """Rotary position embedding of x [b, s, h, d]: rotates the first `dim` features of each head.

    Positions are `start_position` .. `start_position` + s - 1; a `te.scalar` start changes without
    a new plan. Pairs are (i, i + dim/2) as in Hugging Face checkpoints; `interleaved` ones are
    (2i, 2i + 1) as in Meta's. Angles, cos, sin and the rotation are FP32 (FP64 for FP64 inputs),
    rounded once to the input's dtype. Options add inputs: a `te.PackedSequences` for "thd" (whose
    tokens count from 0 in their sequence), then offsets or ids.

    Args:
        dim: even number of rotated features.
        base: of the geometric series of frequencies.
        interleaved: which features form a pair.
        start_position: of the first row, an int >= 0 or a `te.scalar`.
        qkv_format: "bshd", "sbhd" for x [s, b, h, d], or "thd" for packed tokens [t, h, d].
        positions: "start"; "offsets" for an input with the int position of the first row of each
            sequence [b]; "ids" for an input with int positions, shaped like x's leading dimensions
            or [s].
        rope_scaling: how frequencies are stretched, with the keys of Hugging Face's configuration:
            rope_type "linear", "dynamic", "yarn" or "llama3", and its numbers.

    Raises:
        PlanError: an option is out of range.
        ShapeError: at planning, the input is not floating point with heads of `dim` features.
    """

    feature_dims = 2  # heads and features

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        start_position: int | Scalar = 0,
        qkv_format: Layout = "bshd",
        positions: PositionsFrom = "start",
        rope_scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 2 or dim % 2:
            raise PlanError(f"RoPE: dim must be an even int of at least 2, got {dim!r}")
        if not (math.isfinite(base) and base > 0):
            raise PlanError(f"RoPE: base must be positive and finite, got {base!r}")
        is_int = isinstance(start_position, int) and not isinstance(start_position, bool)
        if not isinstance(start_position, Scalar) and not (is_int and start_position >= 0):
            raise PlanError(
                f"RoPE: start_position must be an int >= 0 or a te.scalar, got {start_position!r}"
            )
        if qkv_format not in SEQUENCE_AXIS:
            raise PlanError(
                f"RoPE: qkv_format must be one of {', '.join(SEQUENCE_AXIS)}, got {qkv_format!r}"
            )
        self.dim = dim
        self.base = float(base)
        self.interleaved = bool(interleaved)
        self.start_position = start_position
        self.qkv_format: Layout = qkv_format
        self.positions: PositionsFrom = positions
        scaling_of(rope_scaling, self.base)  # refuses wrong values now
        self.rope_scaling = None if rope_scaling is None else dict(rope_scaling)
        self._check_positions()

    def _check_positions(self) -> None:
        if self.positions not in _POSITIONS:
            raise PlanError(
                f"RoPE: positions must be one of {', '.join(_POSITIONS)}, got {self.positions!r}"
            )
        counts = self.positions == "start" and self.qkv_format != "thd"
        if not counts and (isinstance(self.start_position, Scalar) or self.start_position):
            raise PlanError(
                "RoPE: start_position is for positions='start' of sequences of one length; use "
                "positions='offsets'"
            )

    @property
    def num_inputs(self) -> int:  # type: ignore[override]
        """x, and the sequences and positions that the options ask for."""
        packed = self.qkv_format == "thd" and self.positions != "ids"
        return 1 + int(packed) + int(self.positions != "start")

    def emit(self, g: Graph, *xs: Value) -> Value:
        """rope_table (shared) + rope. An op around this one may give the starts and the lengths of
        packed sequences instead of their table, or the offsets that a cache knows."""
        self._check_positions()  # attributes may have been assigned since
        x, *rest = xs
        starts = lens = None
        if self.qkv_format == "thd" and self.positions != "ids" and rest:
            if len(xs) == self.num_inputs:
                parts = packed_parts(g, rest.pop(0), own=False)
                starts, lens = parts["q_starts"], parts["q_lens"]
            else:
                starts, lens, *rest = rest
        wanted = int(self.positions != "start")
        cached = not wanted and self.num_inputs == 1 and len(rest) == 1
        missing = self.num_inputs > 1 and len(xs) == 1
        if missing or (len(rest) != wanted and not cached):
            raise ShapeError(f"RoPE takes {self.num_inputs} inputs, got {len(xs)}")
        return rope(
            g,
            x,
            self.dim,
            self.base,
            interleaved=self.interleaved,
            start=self.start_position,
            layout=self.qkv_format,
            scaling=scaling_of(self.rope_scaling, self.base),
            positions=self._places(g, x, (starts, lens), rest[0] if rest else None),
        )

    def _places(
        self,
        g: Graph,
        x: Value,
        sequences: tuple[Value | None, Value | None],
        positions: Value | None,
    ) -> Value | None:
        """The position of every token, where it is not a count from the start."""
        axis = SEQUENCE_AXIS[self.qkv_format]
        if self.positions == "ids":
            return positions
        if self.qkv_format == "thd":
            starts, lens = sequences
            assert starts is not None  # emit has counted its inputs
            assert lens is not None
            offsets = [] if positions is None else [positions]
            return g.call(ROPE_PACKED_POSITIONS, starts, lens, g.dim(x, axis), *offsets)
        if positions is None:
            return None
        return g.call(ROPE_OFFSETS, positions, g.dim(x, axis), axis=axis)

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return f"dim={self.dim}, base={self.base}" + (", interleaved" if self.interleaved else "")


__all__ = [
    "ROPE",
    "ROPE_HEADS",
    "ROPE_TABLE",
    "ROPE_TABLE_AT",
    "SEQUENCE_AXIS",
    "Layout",
    "RoPE",
    "rope",
]
