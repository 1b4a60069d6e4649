"""`Quantizer`: a number format with its scaling rule, as an immutable value."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from te_ops.errors import RecipeError
from te_ops.quantizers.kinds import KINDS, quantizer_from_dict, quantizer_to_dict
from te_ops.quantizers.record import Record, Usage
from te_ops.quantizers.tensor import QuantizedTensor, quantize

__all__ = [
    "Layout",
    "Quantizer",
    "Record",
    "Usage",
    "check_fp8",
    "fp8_max",
    "no_amax",
    "quantizer_from_dict",
    "quantizer_to_dict",
    "rows_and_columns",
    "source",
]

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]

_SOURCES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True)
class Quantizer(ABC):
    """How a tensor is turned into records. Hashable, printable, compared by value; scales that
    persist are passed as `state`, never kept here.

    A subclass is a frozen dataclass of plain fields with a `name` of its own, and defines
    `records`, `decode`, `layout` and `describe`.
    """

    name: ClassVar[str]
    stateful: ClassVar[bool] = False
    aliases: ClassVar[bool] = False  # whether a record may share memory with its source

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        name = cls.__dict__.get("name")
        if name is not None:
            known = KINDS.get(name)
            if known is not None and known.__qualname__ != cls.__qualname__:
                raise RecipeError(f"A quantizer named {name!r} exists: {known}. Pick another.")
            KINDS[name] = cls

    @property
    def stochastic(self) -> bool:
        """Whether quantizing needs a seed."""
        return False

    @abstractmethod
    def records(
        self,
        x: Tensor,
        *,
        row: bool,
        col: bool,
        state: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Record | None, Record | None, Tensor]:
        """Quantize `x` (any shape; FP16, BF16, FP32 or FP64) without autograd.

        Args:
            x: the tensor.
            row, col: which usages to make.
            state: the scale, a one-element FP32 tensor, for a stateful quantizer.
            seed: int64, zero dimensions, for a stochastic quantizer.

        Returns:
            the row record, the col record (``None`` where not asked for) and the observed amax,
            FP32 with zero dimensions: max |x|, NaN propagating, 0 for an empty tensor. Formats
            whose scale is not one per tensor return 0 there, since nobody reads it.
        """

    @abstractmethod
    def decode(self, record: Record) -> Tensor:
        """The values of `record` in its logical shape: FP32, or FP64 for an FP64 source."""

    @abstractmethod
    def layout(
        self, shape: tuple[int, ...], usage: Usage, dtype: torch.dtype = torch.float32
    ) -> Layout:
        """(shape, dtype) of the tensors of a record: data, scale_inv, amax, as far as they exist.

        Nothing is allocated. `dtype` is the source's, which only a format that keeps it reads.
        """

    @abstractmethod
    def describe(self) -> str:
        """A few words for ``explain()``."""

    def other_usage(self, record: Record) -> Record | None:
        """See `Record.transposed`."""
        return None

    def exact_other_usage(self) -> bool:
        """Whether `Record.transposed` gives a record rather than ``None``."""
        return False

    def reshapes_freely(self, usage: Usage) -> bool:
        """Whether a view may change the last dimension without changing any byte."""
        return False

    def quantize(
        self,
        x: Tensor,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        state: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> QuantizedTensor:
        """`te_ops.quantize` with this quantizer."""
        return quantize(x, self, rowwise=rowwise, columnwise=columnwise, state=state, seed=seed)

    def dequantize(self, q: QuantizedTensor | Record, dtype: torch.dtype | None = None) -> Tensor:
        """The values of `q`, in `dtype` (default: the dtype of what was quantized)."""
        return q.dequantize(dtype)

    def make_empty(
        self,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        rowwise: bool = True,
        columnwise: bool = False,
    ) -> QuantizedTensor:
        """A quantized tensor of `shape` and nominal `dtype` whose bytes are all zero, to be
        filled by ``copy_``."""
        row = self._empty(tuple(shape), Usage.ROW, dtype, device) if rowwise else None
        col = self._empty(tuple(shape), Usage.COL, dtype, device) if columnwise else None
        return QuantizedTensor(row, col, self)

    def _empty(
        self,
        shape: tuple[int, ...],
        usage: Usage,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> Record:
        tensors: list[Tensor | None] = [None, None, None]
        for i, (size, kind) in enumerate(self.layout(shape, usage, dtype)):
            # E8M0 has no zero to fill with, so its bytes are cleared.
            filled = torch.uint8 if kind is torch.float8_e8m0fnu else kind
            tensors[i] = torch.zeros(size, dtype=filled, device=device).view(kind)
        data, scale_inv, amax = tensors
        assert data is not None
        return Record(data, scale_inv, amax, self.of_usage(usage), usage, shape, dtype)

    def of_usage(self, usage: Usage) -> Quantizer:
        """The quantizer that a record of `usage` names: this one, but for a hybrid."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """This quantizer as plain data; `quantizer_from_dict` is the inverse."""
        return quantizer_to_dict(self)


def check_fp8(dtype: torch.dtype) -> None:
    """`RecipeError` unless `dtype` is one of the two FP8 formats."""
    if dtype not in _FP8:
        raise RecipeError(
            f"dtype {dtype} is not an FP8 format; use torch.float8_e4m3fn or torch.float8_e5m2."
        )


def check_flags(quantizer: Quantizer) -> None:
    """`RecipeError` unless every field that is a switch holds a bool."""
    for field in fields(quantizer):
        value = getattr(quantizer, field.name)
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise RecipeError(f"{field.name}={value!r} must be True or False.")


def check_epsilon(epsilon: float) -> None:
    """`RecipeError` unless `epsilon` is a finite number that is not negative."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float):
        raise RecipeError(f"amax_epsilon {epsilon!r} must be a number.")
    if not (0.0 <= epsilon < math.inf):
        raise RecipeError(f"amax_epsilon {epsilon} must be finite and not negative.")


def fp8_max(dtype: torch.dtype) -> float:
    """The largest finite value: 448 for E4M3, 57344 for E5M2."""
    return torch.finfo(dtype).max


def short(dtype: torch.dtype) -> str:
    """``e4m3`` or ``e5m2``."""
    return _FP8[dtype]


def no_amax(x: Tensor) -> Tensor:
    """The amax that formats without a scale for the whole tensor report."""
    return torch.zeros((), dtype=torch.float32, device=x.device)


def source(x: Tensor) -> Tensor:
    """`x` without its autograd history; `RecipeError` for a dtype that is no source."""
    if x.dtype not in _SOURCES:
        raise RecipeError(
            f"Cannot quantize a tensor of dtype {x.dtype}; cast it to one of "
            f"{', '.join(map(str, _SOURCES))} first."
        )
    return x.detach()


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix (product of the leading dimensions, last dimension) that `shape` stands for."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
