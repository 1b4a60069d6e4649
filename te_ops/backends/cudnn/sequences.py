"""Sequences of different lengths, as the library wants them: lengths, offsets, and which rows belong to none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_ops.backends.cudnn.problem import Problem
from te_ops.basic.band import Band


class Facts(NamedTuple):
    """What a graph is told of sequences, and which rows there are that are no sequence's or see no key.

    `empty` and `outside` are of queries, `hidden` of keys: [rows] or [batch, rows]. None: there are none of the three.
    """

    operands: dict[str, Tensor]
    empty: Tensor | None
    outside: Tensor | None
    hidden: Tensor | None


def facts_of(anchor: Tensor, key: Any, others: list[Tensor], make: Callable[[], Facts]) -> Facts:
    """What `make` makes of lengths and starts, once for all layers that are given the same tensors.

    It is kept with `anchor`, and made again when that or one of the others was written to. Tensors of inference mode
    do not tell, so for them it is made each time.
    """
    if anchor.is_inference():
        return make()
    kept = anchor.__dict__.setdefault("_te_facts", {})
    versions = [anchor._version, *[x._version for x in others]]
    found = kept.get(key)
    if found is not None:
        tensors, then, facts = found
        if then == versions and all(a is b for a, b in zip(tensors, others, strict=True)):
            return facts  # type: ignore[no-any-return]
    facts = make()
    if len(kept) >= MOST_FACTS:
        kept.clear()
    kept[key] = (others, versions, facts)
    return facts


MOST_FACTS = 64


class Side(NamedTuple):
    """The queries or the keys: int64 starts and lengths [sequences], which lie within `size` rows, and their layout."""

    starts: Tensor
    lens: Tensor
    size: int
    layout: str

    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row of the tensor ([rows], or [batch, rows]): its sequence, its place there, whether it has one."""
        at = torch.arange(self.size, device=self.lens.device)
        if self.layout == "thd":
            found = torch.searchsorted(self.starts, at, right=True).sub_(1)
            sequence = found.clamp_(min=0)
            place = at - self.starts[sequence]
            inside = (place >= 0) & (place < self.lens[sequence])
            return sequence, place, inside
        place = at - self.starts.unsqueeze(1)
        sequence = torch.arange(self.lens.shape[0], device=at.device).unsqueeze(1)
        return sequence, place, (place >= 0) & (place < self.lens.unsqueeze(1))


def sides(problem: Problem, by_name: dict[str, Any]) -> tuple[Side, Side]:
    """Of queries and keys. What does not lie within the tensors is cut off, without a look at the values."""
    form, n = problem.form, problem.sizes
    layouts = (("q", form.layout, n.s_q), ("kv", form.kv_layout, n.s_kv))
    device = by_name["q"].device
    return tuple(  # type: ignore[return-value]
        _side(by_name, name, layout, (n.b, size), device) for name, layout, size in layouts
    )


def _side(
    by_name: dict[str, Any], name: str, layout: str, sizes: tuple[int, int], device: torch.device
) -> Side:
    b, size = sizes
    starts, lens = by_name.get(f"{name}_starts"), by_name.get(f"{name}_lens")
    if starts is None:
        starts = torch.zeros(b, dtype=torch.int64, device=device)
    starts = starts.to(torch.int64).clamp(0, size)
    left = size - starts
    lens = left if lens is None else torch.minimum(lens.to(torch.int64).clamp(min=0), left)
    return Side(starts, lens, size, layout)


def cleaned(x: Tensor, layout: str, hidden: Tensor) -> Tensor:
    """A contiguous x with zeros in hidden rows: 0 times what is there may be NaN in a block."""
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    read = bytes_of(x)
    torch.where(by_row(hidden, layout), read.new_zeros(()), read, out=bytes_of(made))
    return made


def bytes_of(x: Tensor) -> Tensor:
    """FP8 codes as bytes, which torch can select and fill; other dtypes as they are."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def by_row(mask: Tensor, layout: str) -> Tensor:
    """A mask [rows] or [batch, rows] as it broadcasts to a tensor of heads and features."""
    turned = mask.t() if layout == "sbhd" else mask
    return turned[..., None, None]


def by_head(mask: Tensor, layout: str) -> Tensor:
    """The same as it broadcasts to statistics [heads, rows] or [batch, heads, rows]."""
    return mask.unsqueeze(0) if layout == "thd" else mask.unsqueeze(1)


def empty_rows(band: Band, q: Side, kv: Side, places: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Rows that see no key, or belong to no sequence."""
    sequence, place, inside = places
    keys, rows = kv.lens[sequence], q.lens[sequence]
    middle = place + (keys - rows) if band.diagonal == "bottom_right" else place
    low = middle - band.left if band.left is not None else torch.zeros_like(middle)
    high = middle + band.right if band.right is not None else keys - 1
    last = torch.minimum(high, keys - 1)
    return ~inside | (last < low.clamp(min=0))


def lengths(side: Side, count: int) -> Tensor:
    """int32 [count]: the lengths, and 0 for entries that a bucket adds."""
    return _filled(side.lens.to(torch.int32), count, 0)


def offsets(side: Side, count: int, strides: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """int64 [count + 1] for each name: where sequences start, in elements; entries beyond the last are the end.

    `strides` are those of a row and of an entry of the batch.
    """
    starts, made = side.starts, {}
    entries = torch.arange(starts.shape[0], device=starts.device, dtype=torch.int64)
    for name, (row, batch) in strides.items():
        packed = side.layout == "thd"
        at = starts * row if packed else starts * row + entries * batch
        end = side.size * row if packed else starts.shape[0] * batch
        made[name] = _filled(at, count + 1, end)
    return made


def _filled(x: Tensor, count: int, value: int) -> Tensor:
    missing = count - x.shape[0]
    return torch.nn.functional.pad(x, (0, missing), value=value) if missing else x.contiguous()
