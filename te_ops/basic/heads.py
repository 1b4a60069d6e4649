"""Slices and heads of packed tensors: views forward, and the placement that is their gradient."""

from __future__ import annotations

from itertools import accumulate

import torch

from te_ops.basic.arguments import show
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require


def _split_infer(x: Spec, sizes: tuple[int, ...], axis: int = -1) -> tuple[Spec, ...]:
    rank = len(x.shape)
    require(-rank <= axis < rank, f"split: axis {axis} is not an axis of a {rank}-d value")
    require(
        sum(sizes) == x.shape[axis] and min(sizes, default=-1) >= 0,
        f"split: the parts {sizes} make {sum(sizes)}, the axis has {int(x.shape[axis])}",
    )
    return tuple(x.like(_with_axis(x.shape, axis, size)) for size in sizes)


def _with_axis(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    axis %= len(shape)
    return (*shape[:axis], size, *shape[axis + 1 :])


# n_out only says "several": a node has as many outputs as `sizes` has entries.
@prim("split", infer=_split_infer, n_out=2, nature="view")
def SPLIT(x: torch.Tensor, sizes: tuple[int, ...], axis: int = -1) -> tuple[torch.Tensor, ...]:
    """Neighbouring slices of `x` along `axis`, of the given sizes."""
    return torch.split(x, list(sizes), axis)


@gradient(SPLIT)
def _split_gradient(g: Graph, node: Node, *dys: Value | None) -> tuple[Value]:
    filled = tuple(i for i, dy in enumerate(dys) if dy is not None)
    parts = [dy for dy in dys if dy is not None]
    return (g.call(PACK, *parts, sizes=node.sizes, filled=filled, axis=node.axis),)


def _pack_infer(*xs: Spec, sizes: tuple[int, ...], filled: tuple[int, ...], axis: int = -1) -> Spec:
    require(len(xs) == len(filled) > 0, f"pack: {len(xs)} parts for the places {filled}")
    for x, place in zip(xs, filled, strict=True):
        require(
            x.shape == _with_axis(xs[0].shape, axis, sizes[place]) and x.dtype is xs[0].dtype,
            f"pack: part {place} is {x.dtype} {show(x.shape)}, which does not fit beside "
            f"{xs[0].dtype} {show(xs[0].shape)} with sizes {sizes}",
        )
    return xs[0].like(_with_axis(xs[0].shape, axis, sum(sizes)))


@prim("pack", infer=_pack_infer, nature="placement")
def PACK(
    *xs: torch.Tensor, sizes: tuple[int, ...], filled: tuple[int, ...], axis: int = -1
) -> torch.Tensor:
    """The parts side by side along `axis`: part i fills place `filled[i]`, other places are 0.

    A kernel that can write strided results writes straight into its place instead.
    """
    if len(filled) == len(sizes):
        return torch.cat(xs, axis)
    shape = _with_axis(tuple(xs[0].shape), axis, sum(sizes))
    packed = xs[0].new_zeros(shape)
    starts = (0, *accumulate(sizes))
    for x, place in zip(xs, filled, strict=True):
        packed.narrow(axis, starts[place], sizes[place]).copy_(x)
    return packed


@gradient(PACK)
def _pack_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value, ...]:
    parts = g.calls(SPLIT, dy, sizes=node.sizes, axis=node.axis)
    return tuple(parts[place] for place in node.filled)


def _split_heads_infer(x: Spec, heads: int) -> Spec:
    require(
        len(x.shape) > 0 and heads >= 1 and x.shape[-1] % heads == 0,
        f"split_heads: {show(x.shape)} cannot be cut into {heads} heads of one size",
    )
    return x.like((*x.shape[:-1], heads, x.shape[-1] // heads))


@prim("split_heads", infer=_split_heads_infer, nature="view")
def SPLIT_HEADS(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[..., h * d] -> [..., h, d], whatever the strides."""
    made: torch.Tensor = x.unflatten(-1, (heads, x.shape[-1] // heads))  # type: ignore[no-untyped-call]
    return made


@gradient(SPLIT_HEADS)
def _split_heads_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value]:
    return (g.call(MERGE_HEADS, dy),)


def _merge_heads_infer(x: Spec) -> Spec:
    require(len(x.shape) >= 2, f"merge_heads: expects [..., h, d], got {show(x.shape)}")
    return x.like((*x.shape[:-2], x.shape[-2] * x.shape[-1]))


@prim("merge_heads", infer=_merge_heads_infer, nature="view")
def MERGE_HEADS(x: torch.Tensor) -> torch.Tensor:
    """[..., h, d] -> [..., h * d]; a view where the heads are adjacent, as kernels write them."""
    return x.flatten(-2)


@gradient(MERGE_HEADS)
def _merge_heads_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value]:
    return (g.call(SPLIT_HEADS, dy, heads=g.spec(node.inputs[0]).shape[-2]),)


# -- heads of several kinds side by side, as one projection makes them

Parts = tuple[tuple[int, int], ...]
"""(heads, features of a head) of each part of a packed tensor, in order."""


def width_of(parts: Parts) -> int:
    """Features of a packed tensor."""
    return sum(heads * size for heads, size in parts)


def views_of(x: torch.Tensor, parts: Parts) -> list[torch.Tensor]:
    """The parts of a packed tensor [..., sum h_i d_i], each [..., h_i, d_i], as views."""
    pieces = torch.split(x, [heads * size for heads, size in parts], -1)
    return [
        piece.unflatten(-1, part)  # type: ignore[no-untyped-call]
        for piece, part in zip(pieces, parts, strict=True)
    ]


def _unpack_infer(x: Spec, parts: Parts) -> tuple[Spec, ...]:
    require(
        len(x.shape) > 0 and x.shape[-1] == width_of(parts),
        f"unpack_heads: {show(x.shape)} does not hold "
        + " + ".join(f"{heads} heads of {size}" for heads, size in parts),
    )
    return tuple(x.like((*x.shape[:-1], *part)) for part in parts)


@prim("unpack_heads", infer=_unpack_infer, n_out=2, nature="view")
def UNPACK_HEADS(x: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, ...]:
    """[..., sum h_i d_i] -> [..., h_i, d_i] of each part, whatever the strides."""
    return tuple(views_of(x, parts))


@gradient(UNPACK_HEADS)
def _unpack_gradient(g: Graph, node: Node, *dys: Value | None) -> tuple[Value]:
    filled = tuple(i for i, dy in enumerate(dys) if dy is not None)
    parts = [dy for dy in dys if dy is not None]
    return (g.call(PACK_HEADS, *parts, parts=node.parts, filled=filled),)


def _pack_heads_infer(*xs: Spec, parts: Parts, filled: tuple[int, ...]) -> Spec:
    require(len(xs) == len(filled) > 0, f"pack_heads: {len(xs)} parts for the places {filled}")
    for x, place in zip(xs, filled, strict=True):
        require(
            x.shape == (*xs[0].shape[:-2], *parts[place]) and x.dtype is xs[0].dtype,
            f"pack_heads: part {place} is {x.dtype} {show(x.shape)}, which does not fit beside "
            f"{xs[0].dtype} {show(xs[0].shape)} with (heads, features) {parts}",
        )
    return xs[0].like((*xs[0].shape[:-2], width_of(parts)))


@prim("pack_heads", infer=_pack_heads_infer, nature="placement")
def PACK_HEADS(*xs: torch.Tensor, parts: Parts, filled: tuple[int, ...]) -> torch.Tensor:
    """The inverse of unpack_heads: operand i fills part `filled[i]`, other parts are 0.

    An attention that can write strided gradients writes straight into its parts instead.
    """
    shape = (*xs[0].shape[:-2], width_of(parts))
    packed = xs[0].new_empty(shape) if len(filled) == len(parts) else xs[0].new_zeros(shape)
    places = views_of(packed, parts)
    for x, place in zip(xs, filled, strict=True):
        places[place].copy_(x)
    return packed


@gradient(PACK_HEADS)
def _pack_heads_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value, ...]:
    made = g.calls(UNPACK_HEADS, dy, parts=node.parts)
    return tuple(made[place] for place in node.filled)


def unpack_heads(g: Graph, x: Value, parts: Parts) -> tuple[Value, ...]:
    """[..., sum h_i d_i] seen as one [..., h_i, d_i] a part; their gradients meet in one buffer.

    Raises:
        ShapeError: the parts do not make up the last dimension.
    """
    return g.calls(UNPACK_HEADS, x, parts=parts)


def pack_heads(g: Graph, xs: tuple[Value, ...]) -> Value:
    """Parts [..., h_i, d_i] beside each other in one [..., sum h_i d_i].

    Raises:
        ShapeError: their leading dimensions or dtypes differ.
    """
    parts = tuple((g.spec(x).shape[-2], g.spec(x).shape[-1]) for x in xs)
    return g.call(PACK_HEADS, *xs, parts=parts, filled=tuple(range(len(xs))))


def split(g: Graph, x: Value, sizes: tuple[int, ...], *, axis: int = -1) -> tuple[Value, ...]:
    """Slices of `x` along `axis` as views; their gradients meet in one buffer.

    Raises:
        ShapeError: the sizes do not add up to the axis.
    """
    return (x,) if len(sizes) == 1 else g.calls(SPLIT, x, sizes=sizes, axis=axis)


def split_heads(g: Graph, x: Value, heads: int) -> Value:
    """[..., h * d] seen as [..., h, d]."""
    return g.call(SPLIT_HEADS, x, heads=heads)


def merge_heads(g: Graph, x: Value) -> Value:
    """[..., h, d] seen as [..., h * d]."""
    return g.call(MERGE_HEADS, x)


__all__ = [
    "MERGE_HEADS",
    "PACK",
    "PACK_HEADS",
    "SPLIT",
    "SPLIT_HEADS",
    "UNPACK_HEADS",
    "Parts",
    "merge_heads",
    "pack_heads",
    "split",
    "split_heads",
    "unpack_heads",
    "views_of",
    "width_of",
]
