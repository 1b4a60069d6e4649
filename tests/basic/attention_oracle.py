"""Attention in float64 from its definition, and an op that is the bare primitive."""

from __future__ import annotations

import math
from typing import Any

import torch

from te_ops.basic.attention import attention
from te_ops.basic.band import Band
from te_ops.graph import Graph, Value
from te_ops.op import Op

from .interp import forward, program

FULL, CAUSAL = Band(), Band(None, 0)
CAUSAL_BR = Band(None, 0, "bottom_right")
BF16 = torch.bfloat16
Tensors = tuple[torch.Tensor, ...]


class Core(Op):
    """The primitive by itself: o, lse (+inf where empty) and max_logit."""

    num_inputs = 3

    def __init__(self, band: Band = CAUSAL, scale: Any = None, layout: str = "bshd") -> None:
        super().__init__()
        self.band, self.scale, self.layout = band, scale, layout

    def emit(self, g: Graph, *xs: Value) -> tuple[Value, ...]:
        return attention(g, *xs, band=self.band, scale=self.scale, layout=self.layout)


def values(op: Op, *xs: torch.Tensor, **options: Any) -> list[Any]:
    """The outputs; max_logit has no gradient to trace."""
    outputs: list[Any] = forward(op, *xs, given=[False] * 3, **options)
    return outputs


def oracle(q: Any, k: Any, v: Any, band: Band, scale: float | None = None) -> Tensors:
    """o, lse, max_logit in float64 from the definition, masks and repeated heads written out."""
    q, k, v = (x.double() for x in (q, k, v))
    s_q, h_q, s_kv, h_kv = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    heads = torch.arange(h_q) // (h_q // h_kv)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k[:, :, heads])
    shift = 0 if band.diagonal == "top_left" else s_kv - s_q
    offset = torch.arange(s_kv)[None] - torch.arange(s_q)[:, None] - shift
    keep = torch.ones_like(offset, dtype=torch.bool)
    if band.left is not None:
        keep &= offset >= -band.left
    if band.right is not None:
        keep &= offset <= band.right
    scores = scores.masked_fill(~keep, -math.inf)
    empty = ~keep.any(-1, keepdim=True)
    safe = scores.masked_fill(empty, 0.0)
    p = torch.softmax(safe, -1).masked_fill(empty | ~keep, 0.0)
    lse = torch.logsumexp(safe, -1).masked_fill(empty.squeeze(-1), math.inf)
    top = scores.detach().transpose(0, 1).flatten(1)
    top = top.amax(1) if top.shape[1] else torch.full((h_q,), -math.inf, dtype=torch.float64)
    return torch.einsum("bhij,bjhd->bihd", p, v[:, :, heads]), lse, top


def tensors(b: int, lengths: Any, heads: Any, d: Any, dtype: torch.dtype) -> Tensors:
    (s_q, s_kv), (h_q, h_kv) = lengths, heads
    shapes = ((b, s_q, h_q, d[0]), (b, s_kv, h_kv, d[0]), (b, s_kv, h_kv, d[1]))
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def gradients(op: Op, xs: Tensors, dys: list[Any]) -> tuple[list[Any], list[Any]]:
    made = program(op, *xs, given=[dy is not None for dy in dys])
    results = made.run(*xs, dys=dys)
    return results[: len(dys)], results[len(dys) :]


def saved_of(op: Op, xs: Tensors, dys: list[Any]) -> list[Any]:
    """(primitive, output, dtype) of the forward values that the backward reads."""
    made = program(op, *xs, given=[dy is not None for dy in dys])
    made.run(*xs, dys=dys)
    return made.saved


def oracle_gradients(xs: Tensors, band: Band, do: Any, dlse: Any, scale: Any = None) -> Tensors:
    leaves = [x.double().clone().requires_grad_() for x in xs]
    o, lse, _ = oracle(*leaves, band, scale)
    loss = (o * do).sum() if do is not None else o.sum() * 0
    if dlse is not None:
        seen = lse.detach().isfinite()
        loss = loss + (lse * dlse)[seen].sum()
    return torch.autograd.grad(loss, leaves, materialize_grads=True)
