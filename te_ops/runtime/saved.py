"""Saved values as autograd keeps them: a flat list of tensors (carriers), and how to put the values together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_ops.quantizers import Quantizer, Record, Usage

View = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""dtype, shape, strides (elements), and bytes from the start of the memory that is viewed."""


def view_of(memory: Tensor, view: View) -> Tensor:
    """A tensor in the memory of a contiguous one."""
    dtype, shape, stride, offset = view
    flat = memory.view(-1).view(torch.uint8)[offset:]
    if extra := flat.numel() % dtype.itemsize:
        flat = flat[:-extra]
    return flat.view(dtype).as_strided(shape, stride)


class Part(NamedTuple):
    """A saved tensor: a carrier as it is (`view` is None), or what lies in it from a byte on."""

    carrier: int
    offset: int
    view: View | None = None

    def of(self, carriers: Sequence[Tensor]) -> Tensor:
        """The tensor."""
        memory = carriers[self.carrier]
        return memory if self.view is None else view_of(memory, self.view)


class Template(NamedTuple):
    """A record without its tensors, which are parts."""

    parts: tuple[Part, ...]
    present: tuple[bool, ...]
    quantizer: Quantizer
    usage: Usage
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, record: Record, parts: tuple[Part, ...]) -> Template:
        """The template of a record whose tensors became these parts."""
        present = tuple(t is not None for t in (record.data, record.scale_inv, record.amax))
        return cls(parts, present, record.quantizer, record.usage, record.shape, record.dtype)

    def rebuild(self, carriers: Sequence[Tensor]) -> Record:
        """The record over saved tensors."""
        made = iter(self.parts)
        data, scale_inv, amax = (next(made).of(carriers) if p else None for p in self.present)
        assert data is not None
        return Record(data, scale_inv, amax, self.quantizer, self.usage, self.shape, self.dtype)


class Layout:
    """How the values of a call lie in its carriers: a part, a template, or a tuple that holds what is no tensor."""

    __slots__ = ("items",)

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items = items

    def values(self, carriers: Sequence[Tensor]) -> list[Any]:
        """The saved values."""
        return [
            item.of(carriers)
            if isinstance(item, Part)
            else item.rebuild(carriers)
            if isinstance(item, Template)
            else item[0]
            for item in self.items
        ]

    def parts(self, picks: Sequence[int]) -> list[Part]:
        """The tensors of some of the values."""
        found: list[Part] = []
        for pick in picks:
            item = self.items[pick]
            if isinstance(item, Part):
                found.append(item)
            elif isinstance(item, Template):
                found.extend(item.parts)
        return found


def flatten(values: Sequence[Any]) -> tuple[list[Tensor], Layout]:
    """All tensors of saved values, those of records too, and their layout."""
    flat: list[Tensor] = []
    items: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            items.append(Part(len(flat), 0))
            flat.append(value)
        elif isinstance(value, Record):
            tensors = value.tensors()
            items.append(
                Template.of(value, tuple(Part(len(flat) + k, 0) for k in range(len(tensors))))
            )
            flat.extend(tensors)
        else:
            items.append((value,))
    return flat, Layout(tuple(items))
