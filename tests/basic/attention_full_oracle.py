"""Attention with everything, in float64 from its definition: one sequence and one head at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from te_ops.basic.band import Band

FULL = Band()


@dataclass
class Meaning:
    """What a call means, whatever keywords said it.

    `spans` are, for each sequence, (batch row, start, length) of queries and of keys; the batch row
    of packed tokens is None. bias, pre_bias and mask broadcast to [b, h, s_q, s_kv]; `keep` is the
    dropout mask [b, h, s_q, s_kv], or [h, tokens of q, keys of a row or tokens].
    """

    spans: Sequence[tuple[tuple[int | None, int, int], tuple[int | None, int, int]]]
    band: Band = FULL
    scale: float | None = None
    pre_bias: Any = None
    bias: Any = None
    slopes: Any = None
    slopes_bottom_right: bool = False
    mask: Any = None
    score: Callable[..., Any] | None = None
    sink: Any = None
    keep: Any = None
    p: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)


def _head(x: Any, e: int, h: int, rows: slice, keys: slice) -> Any:
    """One head's [rows, keys] of what broadcasts to [b, h, s_q, s_kv]."""
    x = x.reshape((1,) * (4 - x.dim()) + x.shape)
    e, h = (i if n > 1 else 0 for i, n in ((e, x.shape[0]), (h, x.shape[1])))
    x = x[e, h]
    x = x[rows] if x.shape[0] > 1 else x
    return x[:, keys] if x.shape[1] > 1 else x


def scores(q: Any, k: Any, meaning: Meaning, at: Any) -> Any:
    """Scores [s_q, s_kv] before any mask; `at` is (sequence, head, rows, keys)."""
    e, h, rows, keys = at
    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    s = q @ k.T
    if meaning.pre_bias is not None:
        s = s + _head(meaning.pre_bias, e, h, rows, keys)
    s = s * (q.shape[-1] ** -0.5 if meaning.scale is None else meaning.scale)
    if meaning.score is not None:
        s = meaning.score(s, i.double(), j.double(), float(h), float(e))
    if meaning.bias is not None:
        s = s + _head(meaning.bias, e, h, rows, keys)
    if meaning.slopes is not None:
        slopes = meaning.slopes if meaning.slopes.dim() == 1 else meaning.slopes[e]
        shift = len(k) - len(q) if meaning.slopes_bottom_right else 0
        s = s - slopes[h] * (j - i - shift).abs()
    return s


def hidden_scores(s_q: int, s_kv: int, meaning: Meaning, at: Any) -> Any:
    """True where band or mask hide a score."""
    e, h, rows, keys = at
    distance = torch.arange(s_kv)[None] - torch.arange(s_q)[:, None]
    distance = distance - (0 if meaning.band.diagonal == "top_left" else s_kv - s_q)
    hidden = torch.zeros(s_q, s_kv, dtype=torch.bool)
    if meaning.band.left is not None:
        hidden = hidden | (distance < -meaning.band.left)
    if meaning.band.right is not None:
        hidden = hidden | (distance > meaning.band.right)
    if meaning.mask is not None:
        hidden = hidden | _head(meaning.mask, e, h, rows, keys)
    return hidden


def one_head(xs: Any, meaning: Meaning, at: Any) -> Any:
    """o [s_q, d_v], lse [s_q] (+inf where empty), largest score of q, k and v [s, d]."""
    q, k, v = xs
    e, h, rows, keys = at
    s, hidden = scores(q, k, meaning, at), hidden_scores(len(q), len(k), meaning, at)
    empty = hidden.all(-1)
    s = s.masked_fill(hidden, -math.inf)
    top = float(s.detach().max()) if s.numel() else -math.inf
    safe = s.masked_fill(empty[:, None], 0.0)
    lse = torch.logsumexp(safe, -1) if len(k) else torch.zeros(len(q), dtype=q.dtype)
    if meaning.sink is not None:
        lse = torch.logaddexp(lse, meaning.sink[h])
    p = torch.exp(safe - lse[:, None]).masked_fill(hidden, 0.0)
    if meaning.keep is not None:
        keep = meaning.keep[e] if meaning.keep.dim() == 4 else meaning.keep
        p = p * keep[h, rows, keys] / (1.0 - meaning.p)
    return p @ v, lse.masked_fill(empty, math.inf), top


def oracle(q: Any, k: Any, v: Any, meaning: Meaning) -> tuple[Any, Any, Any]:
    """o, lse and max_logit of q [b, s, h, d] or [tokens, h, d], and k, v in either form, in float64.

    Rows of no sequence are 0, their lse +inf.
    """
    h_q, h_kv = q.shape[-2], k.shape[-2]
    o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    by_row = (*q.shape[:-2], h_q)
    lse = torch.full(by_row, math.inf, dtype=torch.float64)
    tops = [-math.inf] * h_q
    for e, (of_q, of_k) in enumerate(meaning.spans):
        for h in range(h_q):
            g = h // (h_q // h_kv)
            at = (e, h, *(slice(start, start + n) for _, start, n in (of_q, of_k)))
            heads = (_rows(q, of_q)[:, h], _rows(k, of_k)[:, g], _rows(v, of_k)[:, g])
            parts = one_head(heads, meaning, at)
            place = (*(() if of_q[0] is None else (of_q[0],)), slice(of_q[1], of_q[1] + of_q[2]))
            o = _put(o, place, h, parts[0])
            lse = _put(lse, place, h, parts[1])
            tops[h] = max(tops[h], parts[2])
    lse = lse.transpose(-1, -2)
    return o, lse, torch.tensor(tops, dtype=torch.float64)


def _rows(x: Any, span: Any) -> Any:
    entry, start, length = span
    return (x if entry is None else x[entry])[start : start + length]


def _put(into: Any, place: Any, h: int, part: Any) -> Any:
    """`into` with a part replaced, for autograd."""
    made = into.clone()
    made[(*place, h)] = part
    return made


def dense_spans(b: int, q: Any, kv: Any) -> list[Any]:
    """Spans of a dense batch from (starts, lengths)."""
    return [((e, q[0][e], q[1][e]), (e, kv[0][e], kv[1][e])) for e in range(b)]
