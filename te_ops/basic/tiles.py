"""How the attention reference walks the scores: tiles of a bounded size, cut to band and lengths.

Heads are grouped as n = batch * key/value heads by g query heads, so that grouped heads read their
keys without a repeat. Packed tokens ("thd") are one batch entry whose sequences are ranges of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from te_ops.basic.band import Band

ROW_BLOCK = 64  # query rows at a time; larger blocks waste up to half of a short causal square
TILE = 1 << 20  # most scores that it holds at a time, unless one row block of one head has more


class Entry(NamedTuple):
    """Sequences that are walked together: all of a dense batch, or one with lengths of its own.

    `number` is that of the batch entry, None for all; `q_head` and `kv_head` the first of `heads` grouped
    heads; `q` and `kv` are (start, length) of its rows and its keys.
    """

    number: int | None
    q_head: int
    kv_head: int
    heads: int
    q: tuple[int, int]
    kv: tuple[int, int]


class Tile(NamedTuple):
    """A part of the scores: some key/value heads, some of the query heads of each, rows, keys.

    `rows` and `keys` are places in the tensors; `first` are the numbers of the first row and the
    first key in their sequences, `shift` the key on the diagonal of row 0 of a bottom-right band.
    """

    entry: int | None
    kv_heads: slice  # of one entry
    q_place: slice  # of kv_heads in the grouped queries
    kv_place: slice
    group: slice
    rows: slice
    keys: slice
    first: tuple[int, int]
    shift: int
    bias: torch.Tensor | None

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, g, s_q, ...] -> its part [n', g' * rows, ...]."""
        return x[self.q_place, self.group, self.rows].flatten(1, 2)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, s_kv, d] -> its part [n', keys, d], a view."""
        return x[self.kv_place, self.keys]

    def store(self, into: torch.Tensor, part: torch.Tensor) -> None:
        """The inverse of `queries`."""
        place = into[self.q_place, self.group, self.rows]
        place.copy_(part.reshape(place.shape))

    def grid(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [n', g' * rows, keys] seen as [n', g', rows, keys]."""
        return scores.view(scores.shape[0], -1, self.rows.stop - self.rows.start, scores.shape[-1])

    def hide(self, scores: torch.Tensor) -> torch.Tensor:
        """Add the band's bias to scores [n', g' * rows, keys] in place."""
        if self.bias is not None:
            self.grid(scores).add_(self.bias)
        return scores


def tiles(band: Band, entries: Sequence[Entry], group: int, like: torch.Tensor) -> Iterator[Tile]:
    """Tiles with every score of `entries` that the band does not hide.

    `group` is the number of query heads of a key head; dtype and device are those of `like`.
    """
    for entry in entries:
        (q_start, s_q), (kv_start, s_kv) = entry.q, entry.kv
        shift = band.shift(s_q, s_kv)
        first, last = band.rows(s_q, s_kv)
        for start in range(first, last, ROW_BLOCK):
            rows = (start, min(start + ROW_BLOCK, last))
            keys = band.keys(rows, s_q, s_kv)
            bias = band.bias(rows, keys, shift, like)
            one = (rows[1] - rows[0]) * (keys[1] - keys[0])
            members = max(1, min(group, TILE // one))
            heads = max(1, TILE // (members * one))
            for i in range(0, entry.heads, heads):
                some = (i, min(i + heads, entry.heads))
                for j in range(0, group, members):
                    yield Tile(
                        entry.number,
                        slice(*some),
                        _moved(some, entry.q_head),
                        _moved(some, entry.kv_head),
                        slice(j, min(j + members, group)),
                        _moved(rows, q_start),
                        _moved(keys, kv_start),
                        (rows[0], keys[0]),
                        s_kv - s_q,
                        bias,
                    )


def _moved(span: tuple[int, int], by: int) -> slice:
    return slice(span[0] + by, span[1] + by)


def grouped(x: Any, groups: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """x in `layout`, of any strides, or a record -> contiguous [b * groups, h / groups, s, d].

    For packed tokens ("thd") b is 1.
    """
    x = x if isinstance(x, torch.Tensor) else x.dequantize(dtype)
    if layout == "thd":
        x = x.unsqueeze(0)
    elif layout == "sbhd":
        x = x.transpose(0, 1)
    b, s, h, d = x.shape
    out = torch.empty((b, groups, h // groups, s, d), dtype=dtype, device=x.device)
    out.copy_(x.unflatten(2, (groups, h // groups)).permute(0, 2, 3, 1, 4))
    return out.view(b * groups, h // groups, s, d)


def gathered(x: Any, table: torch.Tensor, ends: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Pages x [pages, page, h, d] -> contiguous [b * h, pages of an entry * page, d].

    Only the first `ends` slots of an entry are read; the rest is 0.
    """
    x = x if isinstance(x, torch.Tensor) else x.dequantize(dtype)
    page, h, d = x.shape[1:]
    out = torch.zeros((len(ends), h, table.shape[1] * page, d), dtype=dtype, device=x.device)
    for entry, length in enumerate(ends):
        count = -(-length // page)
        slots = x[table[entry, :count].long()].flatten(0, 1)[:length]
        out[entry, :, :length].copy_(slots.transpose(0, 1))
    return out.flatten(0, 1)


def ungrouped(x: torch.Tensor, groups: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `grouped`, rounded to `dtype`."""
    n, g, s, d = x.shape
    b, h = n // groups, groups * g
    shape = (s, b, h, d) if layout == "sbhd" else (b, s, h, d)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    place = out.transpose(0, 1) if layout == "sbhd" else out
    place.copy_(x.view(b, h, s, d).transpose(1, 2))
    return out.squeeze(0) if layout == "thd" else out


__all__ = ["ROW_BLOCK", "TILE", "Entry", "Tile", "gathered", "grouped", "tiles", "ungrouped"]
