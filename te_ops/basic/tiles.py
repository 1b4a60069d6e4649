"""How the attention reference walks the scores: tiles of a bounded size, cut to the band.

Heads are grouped as n = batch * key/value heads by g query heads, so that grouped heads read their
keys without a repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from te_ops.basic.band import Band

ROW_BLOCK = 64  # query rows at a time; larger blocks waste up to half of a short causal square
TILE = 1 << 20  # most scores that it holds at a time, unless one row block of one head has more


class Tile(NamedTuple):
    """A part of the scores: some key/value heads, some of the query heads of each, rows, keys."""

    heads: slice
    group: slice
    rows: slice
    keys: slice
    bias: torch.Tensor | None

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, g, s_q, ...] -> its part [n', g' * rows, ...]."""
        return x[self.heads, self.group, self.rows].flatten(1, 2)

    def store(self, into: torch.Tensor, part: torch.Tensor) -> None:
        """The inverse of `queries`."""
        place = into[self.heads, self.group, self.rows]
        place.copy_(part.reshape(place.shape))

    def hide(self, scores: torch.Tensor) -> torch.Tensor:
        """Add the bias to scores [n', g' * rows, keys] in place."""
        if self.bias is not None:
            rows, keys = self.bias.shape
            scores.view(scores.shape[0], -1, rows, keys).add_(self.bias)
        return scores


def tiles(band: Band, q: torch.Tensor, k: torch.Tensor) -> Iterator[Tile]:
    """Tiles of q [n, g, s_q, d] against k [n, s_kv, d] with every score that is not hidden."""
    n, g, s_q, s_kv = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    first, last = band.rows(s_q, s_kv)
    for start in range(first, last, ROW_BLOCK):
        rows = (start, min(start + ROW_BLOCK, last))
        keys = band.keys(rows, s_q, s_kv)
        bias = band.bias(rows, keys, band.shift(s_q, s_kv), q)
        one = (rows[1] - rows[0]) * (keys[1] - keys[0])
        members = max(1, min(g, TILE // one))
        heads = max(1, TILE // (members * one))
        for i in range(0, n, heads):
            for j in range(0, g, members):
                yield Tile(
                    slice(i, i + heads), slice(j, j + members), slice(*rows), slice(*keys), bias
                )


def grouped(x: Any, groups: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """x in `layout`, of any strides, or a record -> contiguous [b * groups, h / groups, s, d]."""
    x = x if isinstance(x, torch.Tensor) else x.dequantize(dtype)
    if layout == "sbhd":
        x = x.transpose(0, 1)
    b, s, h, d = x.shape
    out = torch.empty((b, groups, h // groups, s, d), dtype=dtype, device=x.device)
    out.copy_(x.unflatten(2, (groups, h // groups)).permute(0, 2, 3, 1, 4))
    return out.view(b * groups, h // groups, s, d)


def ungrouped(x: torch.Tensor, groups: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `grouped`, rounded to `dtype`."""
    n, g, s, d = x.shape
    b, h = n // groups, groups * g
    shape = (b, s, h, d) if layout == "bshd" else (s, b, h, d)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    place = out if layout == "bshd" else out.transpose(0, 1)
    place.copy_(x.view(b, h, s, d).transpose(1, 2))
    return out


__all__ = ["ROW_BLOCK", "TILE", "Tile", "grouped", "tiles", "ungrouped"]
