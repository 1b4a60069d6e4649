"""Rotary position embedding: a table made once per sequence length, and the rotation that reads it.

Formula: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.4.
Pair i turns by the angle position * base^(-2i / dim).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from te_ops.basic.arguments import show
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require
from te_ops.op import Op, Scalar

Layout = Literal["bshd", "sbhd"]
SEQUENCE_AXIS: dict[str, int] = {"bshd": 1, "sbhd": 0}


def _table_infer(
    length: Spec, *_: Spec, dim: int, base: float, start: int, dtype: torch.dtype
) -> Spec:
    return Spec((length.shape[0], 2, dim // 2), dtype)


@prim("rope_table", infer=_table_infer, differentiable=False, placed=True)
def ROPE_TABLE(
    length: tuple[int, ...],
    *first: torch.Tensor,
    dim: int,
    base: float,
    start: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """cos and sin [s, 2, dim / 2] of the positions start .. start + s - 1.

    `first`, a 0-dim number known at run time, is added to the positions. inv_freq, angle, cos and
    sin are all computed in `dtype`: FP32, or FP64 for FP64 inputs.
    """
    powers = torch.arange(0, dim, 2, dtype=dtype, device=device) / dim
    positions = torch.arange(start, start + length[0], dtype=dtype, device=device)
    if first:
        positions = positions + first[0].to(positions)
    angle = positions[:, None] * (1.0 / base**powers)
    return torch.stack((angle.cos(), angle.sin()), 1)


def _rope_infer(x: Spec, table: Spec, interleaved: bool, inverse: bool, axis: int) -> Spec:
    require(
        len(x.shape) == 4,
        f"rope: expects 4 dimensions (batch, sequence, heads, features), got {show(x.shape)}",
    )
    require(x.dtype.is_floating_point, f"rope: cannot rotate a {x.dtype} value; cast it first")
    require(
        x.shape[-1] >= 2 * table.shape[-1],
        f"rope: rotates {2 * table.shape[-1]} features, heads have {int(x.shape[-1])}",
    )
    require(
        x.shape[axis] == table.shape[0],
        f"rope: the table has {int(table.shape[0])} positions, the input {show(x.shape)} has "
        f"{int(x.shape[axis])}",
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
    lead = (-1, 1, 1) if axis == 0 else (-1, 1)
    cos, sin = (t.reshape(*lead, half) for t in table.unbind(1))
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


def rope(
    g: Graph,
    x: Value,
    dim: int,
    base: float = 10000.0,
    *,
    interleaved: bool = False,
    start: int | Scalar = 0,
    layout: Layout = "bshd",
) -> Value:
    """Rotate the first `dim` features of each head of x [b, s, h, d] ("sbhd": [s, b, h, d]).

    Equal tables are one value of the graph, whichever layer asks, since they depend on nothing but
    the sequence length.

    Raises:
        ShapeError: x is not 4-d floating point with at least `dim` features.
    """
    axis = SEQUENCE_AXIS[layout]
    spec = g.spec(x)
    if len(spec.shape) != 4:
        raise ShapeError(f"rope: expects {' x '.join(layout)}, got shape {show(spec.shape)}")
    attrs: dict[str, Any] = {
        "dim": dim,
        "base": float(base),
        "dtype": torch.float64 if spec.dtype is torch.float64 else torch.float32,
    }
    length = g.dim(x, axis)
    if isinstance(start, Scalar):
        table = g.call(ROPE_TABLE, length, g.scalar(start), start=0, **attrs)
    else:
        table = g.call(ROPE_TABLE, length, start=start, **attrs)
    return g.call(ROPE, x, table, interleaved=interleaved, inverse=False, axis=axis)


class RoPE(Op):
    """Rotary position embedding of x [b, s, h, d]: rotates the first `dim` features of each head.

    Positions are `start_position` .. `start_position` + s - 1; a `te.scalar` start changes without
    a new plan. Pairs are (i, i + dim/2) as in Hugging Face checkpoints; `interleaved` ones are
    (2i, 2i + 1) as in Meta's. Angles, cos, sin and the rotation are FP32 (FP64 for FP64 inputs),
    rounded once to the input's dtype.

    Args:
        dim: even number of rotated features.
        base: of the geometric series of frequencies.
        interleaved: which features form a pair.
        start_position: of the first row, an int >= 0 or a `te.scalar`.
        qkv_format: "bshd", or "sbhd" for x [s, b, h, d].

    Raises:
        PlanError: an option is out of range.
        ShapeError: at planning, the input is not 4-d floating point with `dim` features.
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
            raise PlanError(f"RoPE: qkv_format must be 'bshd' or 'sbhd', got {qkv_format!r}")
        self.dim = dim
        self.base = float(base)
        self.interleaved = bool(interleaved)
        self.start_position = start_position
        self.qkv_format: Layout = qkv_format

    def emit(self, g: Graph, x: Value) -> Value:
        """rope_table (shared) + rope."""
        return rope(
            g,
            x,
            self.dim,
            self.base,
            interleaved=self.interleaved,
            start=self.start_position,
            layout=self.qkv_format,
        )

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return f"dim={self.dim}, base={self.base}" + (", interleaved" if self.interleaved else "")


__all__ = ["ROPE", "ROPE_TABLE", "RoPE", "rope"]
