"""The norm of queries and keys over the features of a head, where heads of several kinds lie in one packed tensor."""

from __future__ import annotations

import torch

from te_ops.basic.arguments import show, wide
from te_ops.basic.heads import Parts, views_of, width_of
from te_ops.basic.norm import (
    L2NORM,
    L2NORM_BACKWARD,
    RMSNORM,
    RMSNORM_BACKWARD,
    RMSNORM_DGAMMA,
)
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require


def _heads(parts: Parts, normed: tuple[bool, ...]) -> list[slice | None]:
    """Of each part, where its heads are among all that are normalised."""
    found: list[slice | None] = []
    start = 0
    for (heads, _), has in zip(parts, normed, strict=True):
        found.append(slice(start, start + heads) if has else None)
        start += heads * has
    return found


def _check(x: Spec, parts: Parts, normed: tuple[bool, ...], gammas: tuple[Spec, ...]) -> None:
    require(
        len(parts) == len(normed) and len(x.shape) > 0 and x.shape[-1] == width_of(parts),
        f"norm_heads: {show(x.shape)} does not hold (heads, features) {parts}, of which {normed} "
        "are normalised",
    )
    sizes = [size for (_, size), has in zip(parts, normed, strict=True) if has]
    if gammas:
        require(
            [tuple(gamma.shape) for gamma in gammas] == [(size,) for size in sizes],
            f"norm_heads: heads have {sizes} features, the weights {[show(g.shape) for g in gammas]}",
        )


def _infer(
    x: Spec, *gammas: Spec, parts: Parts, normed: tuple[bool, ...], eps: float, zero_centered: bool
) -> tuple[Spec, Spec]:
    _check(x, parts, normed, gammas)
    count = sum(heads for (heads, _), has in zip(parts, normed, strict=True) if has)
    return x.like(), Spec((*x.shape[:-1], count), wide(x.dtype))


@prim("norm_heads", n_out=2, infer=_infer)
def NORM_HEADS(
    x: torch.Tensor,
    *gammas: torch.Tensor,
    parts: Parts,
    normed: tuple[bool, ...],
    eps: float,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, scale): x [..., sum h_i d_i] with the heads of the parts marked `normed` normalised, the others as they are,
    and what each of those heads was multiplied by [..., heads].

    With a gamma for each such part they are normalised as RMSNORM does, without as L2NORM does.
    """
    packed = torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = x.new_empty((*x.shape[:-1], _count(parts, normed)), dtype=wide(x.dtype))
    weights = iter(gammas)
    places = views_of(packed, parts)
    for piece, place, at in zip(views_of(x, parts), places, _heads(parts, normed), strict=True):
        if at is None:
            place.copy_(piece)
            continue
        if gammas:
            y, r = RMSNORM.reference(piece, next(weights), eps, zero_centered)
        else:
            y, r = L2NORM.reference(piece, eps)
        place.copy_(y)
        scale[..., at] = r
    return packed, scale


def _count(parts: Parts, normed: tuple[bool, ...]) -> int:
    return sum(heads for (heads, _), has in zip(parts, normed, strict=True) if has)


def _backward_infer(
    dy: Spec,
    x: Spec,
    scale: Spec,
    *gammas: Spec,
    parts: Parts,
    normed: tuple[bool, ...],
    zero_centered: bool,
) -> tuple[Spec, ...]:
    _check(x, parts, normed, gammas)
    return (x.like(), *(gamma.like() for gamma in gammas))


@prim("norm_heads_backward", n_out=2, infer=_backward_infer, selective=True)
def NORM_HEADS_BACKWARD(
    dy: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    *gammas: torch.Tensor,
    parts: Parts,
    normed: tuple[bool, ...],
    zero_centered: bool,
    live: tuple[bool, ...] = (),
) -> tuple[torch.Tensor | None, ...]:
    """dx, and the gradient of each gamma: sums over rows and heads, rounded once."""
    packed = torch.empty_like(x, memory_format=torch.contiguous_format)
    found: list[torch.Tensor] = []
    weights = iter(gammas)
    pieces = zip(*(views_of(t, parts) for t in (dy, x, packed)), _heads(parts, normed), strict=True)
    for g, piece, place, at in pieces:
        if at is None:
            place.copy_(g)
        elif gammas:
            gamma, r = next(weights), scale[..., at]
            place.copy_(RMSNORM_BACKWARD.reference(g, piece, gamma, r, zero_centered))
            found.append(RMSNORM_DGAMMA.reference(g, piece, r, gamma.dtype))
        else:
            place.copy_(L2NORM_BACKWARD.reference(g, piece, scale[..., at]))
    return packed, *found


@gradient(NORM_HEADS)
def _norm_heads_gradient(
    g: Graph, node: Node, dy: Value | None, _: Value | None
) -> tuple[Value | None, ...]:
    if dy is None:
        return tuple(None for _ in node.inputs)
    x, *gammas = node.inputs
    return g.calls(
        NORM_HEADS_BACKWARD,
        dy,
        x,
        node.outs[1],
        *gammas,
        parts=node.parts,
        normed=node.normed,
        zero_centered=node.zero_centered,
    )


__all__ = ["NORM_HEADS", "NORM_HEADS_BACKWARD"]
