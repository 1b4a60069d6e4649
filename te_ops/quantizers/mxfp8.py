"""MXFP8: FP8 with a power-of-two scale (E8M0) for 32 elements along the contraction.

Seen as the matrix [M, K] (K the last dimension), any M and K: data has the tensor's shape in both
usages (col data is *not* transposed); scale_inv is E8M0, [M, ceil(K / 32)] for row and
[ceil(M / 32), K] for col. With 32 x 32 tiles the scale of a tile is repeated for its rows (row) or
its columns (col), so that readers see one layout.

Formats and rounding: OCP Microscaling Formats (MX) 1.0; the exponent rule is the round-up that
NVIDIA GPUs convert with (``cvt.rp.satfinite.ue8m0x2.f32``).
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from te_ops.quantizers.base import (
    Layout,
    Quantizer,
    Record,
    Usage,
    check_flags,
    check_fp8,
    fp8_max,
    no_amax,
    rows_and_columns,
    short,
    source,
)
from te_ops.quantizers.codec import (
    blocks_along,
    constant,
    decode_fp8,
    encode_fp8,
    pick,
    scale_tiles_,
    stretch,
    tile_amax,
)

__all__ = ["MXFP8Quantizer", "e8m0_from_amax"]

BLOCK = 32
_MANTISSA = 0x7FFFFF
_HALF = 0x400000
_NAN_CODE = 255

# What code e stands for (2**(e - 127)), and what an element is multiplied with under it.
_DECODE = constant(torch.tensor([2.0 ** (e - 127) for e in range(_NAN_CODE)] + [math.nan]))
_ENCODE = constant(torch.tensor([2.0 ** (127 - e) for e in range(_NAN_CODE)] + [math.nan]))


def e8m0_from_amax(amax: Tensor, fp8_max: float) -> Tensor:
    """The E8M0 code, as uint8, of ``amax * float32(1 / fp8_max)`` rounded up to a power of two.

    2**-127 and everything below it, 0 included, has code 0; Inf has 0xFE; NaN has 0xFF.
    """
    bits = (amax.float() * (1.0 / fp8_max)).view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & _MANTISSA
    # A subnormal number is above 2**-127, the value of code 0, from half the mantissa range on.
    exact = torch.where(exponent == 0, _HALF, 0)
    code = exponent + (mantissa > exact).int()
    # 255 is Inf (or beyond the range) and 256 is NaN by now.
    return (code - (code >= _NAN_CODE).int()).to(torch.uint8)


@dataclass(frozen=True)
class MXFP8Quantizer(Quantizer):
    """FP8 with an E8M0 scale a block of 32; row and col are made from the source independently.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        with_2d_quantization: one scale for each 32 x 32 tile, so that both usages have the same
            codes.
    """

    name: ClassVar[str] = "mxfp8"

    dtype: torch.dtype = torch.float8_e4m3fn
    _: KW_ONLY
    with_2d_quantization: bool = False

    def __post_init__(self) -> None:
        check_fp8(self.dtype)
        check_flags(self)

    def records(
        self,
        x: Tensor,
        *,
        row: bool,
        col: bool,
        state: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Record | None, Record | None, Tensor]:
        """See `Quantizer.records`; the amax is 0, as scales belong to blocks."""
        x = source(x)
        amax = no_amax(x)
        if self.with_2d_quantization and row and col:
            rowwise = self._record(x, Usage.ROW)
            return rowwise, self.other_usage(rowwise), amax
        rows = self._record(x, Usage.ROW) if row else None
        return rows, (self._record(x, Usage.COL) if col else None), amax

    def _record(self, x: Tensor, usage: Usage) -> Record:
        matrix = x.reshape(rows_and_columns(tuple(x.shape)))
        tile = (BLOCK, BLOCK) if self.with_2d_quantization else _tile(usage)
        codes = e8m0_from_amax(tile_amax(matrix, *tile), fp8_max(self.dtype))
        encode = pick(_ENCODE, codes)
        scaled = scale_tiles_(matrix.to(torch.float32, copy=True).contiguous(), encode, *tile)
        if self.with_2d_quantization:
            dim = 0 if usage is Usage.ROW else 1
            codes = stretch(codes, dim, BLOCK, matrix.shape[dim]).contiguous()
        data = encode_fp8(scaled, self.dtype).view(x.shape)
        scale_inv = codes.view(torch.float8_e8m0fnu)
        return Record(data, scale_inv, None, self, usage, tuple(x.shape), x.dtype)

    def decode(self, record: Record) -> Tensor:
        """code * 2**(scale code - 127)."""
        assert record.scale_inv is not None
        values = decode_fp8(record.data.reshape(rows_and_columns(record.shape)))
        if record.dtype is torch.float64:
            values = values.double()
        scale = pick(_DECODE, record.scale_inv.view(torch.uint8))
        return scale_tiles_(values, scale, *_tile(record.usage)).view(record.shape)

    def layout(
        self, shape: tuple[int, ...], usage: Usage, dtype: torch.dtype = torch.float32
    ) -> Layout:
        """data of the tensor's shape, and scale_inv as this module says."""
        rows, columns = rows_and_columns(tuple(shape))
        tile = _tile(usage)
        scales = (blocks_along(rows, tile[0]), blocks_along(columns, tile[1]))
        return (tuple(shape), self.dtype), (scales, torch.float8_e8m0fnu)

    def other_usage(self, record: Record) -> Record | None:
        """For 32 x 32 tiles: the same data, the scales repeated along the other dimension."""
        if not self.with_2d_quantization:
            return None
        assert record.scale_inv is not None
        size = rows_and_columns(record.shape)
        # Row scales repeat along dimension 0 and are single along 1; for col it is the opposite.
        repeated = 0 if record.usage is Usage.ROW else 1
        codes = record.scale_inv.view(torch.uint8)
        tiles = codes[::BLOCK] if repeated == 0 else codes[:, ::BLOCK]
        codes = stretch(tiles, 1 - repeated, BLOCK, size[1 - repeated]).contiguous()
        scale_inv = codes.view(torch.float8_e8m0fnu)
        return replace(record, scale_inv=scale_inv, usage=record.usage.other)

    def exact_other_usage(self) -> bool:
        """True for 32 x 32 tiles."""
        return self.with_2d_quantization

    def describe(self) -> str:
        """E.g. "mxfp8 e4m3"."""
        return f"mxfp8 {short(self.dtype)}" + (" 32x32" if self.with_2d_quantization else "")


def _tile(usage: Usage) -> tuple[int, int]:
    return (1, BLOCK) if usage is Usage.ROW else (BLOCK, 1)
