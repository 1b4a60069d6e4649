"""The record: the bytes of one usage of a quantized tensor, with the scales that decode them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from te_ops.quantizers.base import Quantizer


class Usage(enum.Enum):
    """Along which dimension a GEMM contracts the record.

    ``ROW``: the last dimension. ``COL``: the leading dimensions (all but the last, flattened).
    """

    ROW = "row"
    COL = "col"

    @property
    def other(self) -> Usage:
        """The other usage."""
        return Usage.COL if self is Usage.ROW else Usage.ROW


@dataclass(frozen=True, eq=False)
class Record:
    """One usage of a quantized tensor. Compared by identity: two records are never merged.

    Attributes:
        data: the codes; shape and dtype as `Quantizer.layout` says.
        scale_inv: what a code is multiplied with; ``None`` where the format has no scale.
        amax: FP32, what the format needs besides `scale_inv` to decode; else ``None``.
        quantizer: how the bytes were made (for a hybrid: the quantizer of this usage).
        usage: row or col.
        shape: logical shape of the source.
        dtype: dtype of the source.
    """

    data: Tensor
    scale_inv: Tensor | None
    amax: Tensor | None
    quantizer: Quantizer
    usage: Usage
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.data.device

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in the logical shape: FP32 arithmetic (FP64 for an FP64 source) and one
        rounding to `dtype` (default: the source's dtype)."""
        return self.quantizer.decode(self).to(self.dtype if dtype is None else dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        """data, scale_inv, amax without the missing ones."""
        return tuple(t for t in (self.data, self.scale_inv, self.amax) if t is not None)

    def with_tensors(self, tensors: Iterable[Tensor]) -> Record:
        """This record over other tensors, given in the order of `tensors()`."""
        left = list(tensors)
        names = [n for n in ("data", "scale_inv", "amax") if getattr(self, n) is not None]
        return replace(self, **dict(zip(names, left, strict=True)))  # type: ignore[arg-type]

    def map(self, function: Callable[[Tensor], Tensor]) -> Record:
        """This record with `function` applied to each tensor."""
        return self.with_tensors(function(t) for t in self.tensors())

    def transposed(self) -> Record | None:
        """The other usage made from these bytes, where the format allows that exactly:
        one scale for the tensor, or one for each square tile. Else ``None``."""
        return self.quantizer.other_usage(self)

    def reshaped(self, shape: tuple[int, ...]) -> Record | None:
        """The same bytes under another logical shape of as many elements: a view. ``None`` where
        blocks would be torn, that is when the last dimension changes."""
        if shape == self.shape:
            return self
        keeps_last = bool(shape) and bool(self.shape) and shape[-1] == self.shape[-1]
        if not (keeps_last or self.quantizer.reshapes_freely(self.usage)):
            return None
        data = self.data.view(self.quantizer.layout(shape, self.usage)[0][0])
        return replace(self, data=data, shape=shape)
