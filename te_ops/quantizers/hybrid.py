"""Two quantizers side by side, one for each usage; and the one that keeps values as they are."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from te_ops.errors import RecipeError
from te_ops.quantizers.base import Layout, Quantizer, Record, Usage, no_amax, source

__all__ = ["HybridQuantizer", "IdentityQuantizer"]

_SOURCES = ("original", "rowwise_dequantized")


@dataclass(frozen=True)
class HybridQuantizer(Quantizer):
    """Another format for each usage.

    Args:
        rowwise_quantizer: makes the row record.
        columnwise_quantizer: makes the col record.
        columnwise_source: what the col record is made from, "original" or "rowwise_dequantized"
            (the row record's values, so that forward and backward see the same tensor).

    Neither may be a hybrid, or need a `state` (delayed scaling).
    """

    name: ClassVar[str] = "hybrid"

    rowwise_quantizer: Quantizer
    columnwise_quantizer: Quantizer
    _: KW_ONLY
    columnwise_source: str = "original"

    def __post_init__(self) -> None:
        for part in (self.rowwise_quantizer, self.columnwise_quantizer):
            if not isinstance(part, Quantizer) or isinstance(part, HybridQuantizer):
                raise RecipeError(f"A hybrid is made of two plain quantizers; got {part!r}.")
            if part.stateful:
                raise RecipeError(
                    f"{part.describe()} needs a scale of its own and cannot be part of a hybrid; "
                    "use Float8CurrentScalingQuantizer."
                )
        if self.columnwise_source not in _SOURCES:
            raise RecipeError(
                f"columnwise_source {self.columnwise_source!r} must be one of {_SOURCES}."
            )

    @property
    def stochastic(self) -> bool:
        """Whether one of the two is."""
        return self.rowwise_quantizer.stochastic or self.columnwise_quantizer.stochastic

    def of_usage(self, usage: Usage) -> Quantizer:
        """The quantizer of `usage`."""
        return self.rowwise_quantizer if usage is Usage.ROW else self.columnwise_quantizer

    def records(
        self,
        x: Tensor,
        *,
        row: bool,
        col: bool,
        state: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Record | None, Record | None, Tensor]:
        """See `Quantizer.records`; the amax is 0, as each part has its own."""
        x = source(x)
        amax = no_amax(x)
        chained = col and self.columnwise_source == "rowwise_dequantized"
        rowwise = columnwise = None
        if row or chained:
            rowwise, _, _ = self.rowwise_quantizer.records(x, row=True, col=False, seed=seed)
        if col:
            values = x if rowwise is None or not chained else rowwise.dequantize()
            _, columnwise, _ = self.columnwise_quantizer.records(
                values, row=False, col=True, seed=seed
            )
        return (rowwise if row else None), columnwise, amax

    def decode(self, record: Record) -> Tensor:
        """By the quantizer of the record's usage, which is the one that the record names."""
        return self.of_usage(record.usage).decode(record)

    def layout(
        self, shape: tuple[int, ...], usage: Usage, dtype: torch.dtype = torch.float32
    ) -> Layout:
        """That of the quantizer of `usage`."""
        return self.of_usage(usage).layout(shape, usage, dtype)

    def describe(self) -> str:
        """Both parts."""
        chained = " from row" if self.columnwise_source == "rowwise_dequantized" else ""
        return (
            f"hybrid(row {self.rowwise_quantizer.describe()}, "
            f"col{chained} {self.columnwise_quantizer.describe()})"
        )


@dataclass(frozen=True)
class IdentityQuantizer(Quantizer):
    """No quantization: the values themselves, so that one usage of a hybrid, or one role of a
    recipe, can stay in high precision. Data has the tensor's shape in both usages.

    Args:
        dtype: what to store; ``None`` keeps the source's dtype, and then a record made inside a
            plan shares the memory of its source (`te_ops.quantize` copies it).
    """

    name: ClassVar[str] = "identity"
    aliases: ClassVar[bool] = True

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise RecipeError(f"dtype {self.dtype} must be a floating-point type or None.")

    def records(
        self,
        x: Tensor,
        *,
        row: bool,
        col: bool,
        state: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Record | None, Record | None, Tensor]:
        """See `Quantizer.records`."""
        x = source(x)
        data = x.to(x.dtype if self.dtype is None else self.dtype)
        rowwise = Record(data, None, None, self, Usage.ROW, tuple(x.shape), x.dtype)
        columnwise = self.other_usage(rowwise) if col else None
        return (rowwise if row else None), columnwise, no_amax(x)

    def decode(self, record: Record) -> Tensor:
        """A copy of the data, widened to FP32 or FP64."""
        wide = torch.float64 if record.dtype is torch.float64 else torch.float32
        return record.data.to(wide, copy=True)

    def layout(
        self, shape: tuple[int, ...], usage: Usage, dtype: torch.dtype = torch.float32
    ) -> Layout:
        """data in the tensor's shape."""
        return ((tuple(shape), dtype if self.dtype is None else self.dtype),)

    def other_usage(self, record: Record) -> Record:
        """The same data."""
        return replace(record, usage=record.usage.other)

    def exact_other_usage(self) -> bool:
        """True."""
        return True

    def reshapes_freely(self, usage: Usage) -> bool:
        """True: there are no blocks."""
        return True

    def describe(self) -> str:
        """E.g. "unquantized bfloat16"."""
        kept = "" if self.dtype is None else f" {str(self.dtype).removeprefix('torch.')}"
        return f"unquantized{kept}"
