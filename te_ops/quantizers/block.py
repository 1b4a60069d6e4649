"""FP8 with one FP32 scale for 128 elements along the contraction, or for a 128 x 128 tile.

Seen as the matrix [M, K] (K the last dimension), any M and K:

========  =====================  ==========================
usage     data                   scale_inv (FP32)
========  =====================  ==========================
row, 1D   the tensor's shape     [M, ceil(K / 128)]
col, 1D   [K, *leading]          [K, ceil(M / 128)]
row, 2D   the tensor's shape     [ceil(M / 128), ceil(K / 128)]
col, 2D   [K, *leading]          [ceil(K / 128), ceil(M / 128)]
========  =====================  ==========================
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from te_ops.errors import RecipeError
from te_ops.quantizers.base import (
    Layout,
    Quantizer,
    Record,
    Usage,
    check_epsilon,
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
    decode_fp8,
    encode_fp8,
    scale_tiles_,
    tile_amax,
    transpose_bytes,
    untranspose_bytes,
)
from te_ops.quantizers.state import divide, largest_scale, scale_from_amax

__all__ = ["Float8BlockQuantizer"]

BLOCK = 128


@dataclass(frozen=True)
class Float8BlockQuantizer(Quantizer):
    """FP8 with an FP32 scale a block.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block_scaling_dim: 1 for 128 elements along the contraction, 2 for 128 x 128 tiles.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: stands in for any smaller amax of a block.
    """

    name: ClassVar[str] = "float8_block"

    dtype: torch.dtype = torch.float8_e4m3fn
    _: KW_ONLY
    block_scaling_dim: int = 1
    force_pow_2_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_fp8(self.dtype)
        check_epsilon(self.amax_epsilon)
        check_flags(self)
        if self.block_scaling_dim not in (1, 2):
            raise RecipeError(f"block_scaling_dim {self.block_scaling_dim} must be 1 or 2.")

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
        if self.block_scaling_dim == 2:
            rowwise = self._record(x, Usage.ROW) if row or col else None
            columnwise = self.other_usage(rowwise) if rowwise is not None and col else None
            return (rowwise if row else None), columnwise, amax
        rowwise = self._record(x, Usage.ROW) if row else None
        return rowwise, (self._record(x, Usage.COL) if col else None), amax

    def _tile(self, usage: Usage) -> tuple[int, int]:
        if self.block_scaling_dim == 2:
            return BLOCK, BLOCK
        return (1, BLOCK) if usage is Usage.ROW else (BLOCK, 1)

    def _record(self, x: Tensor, usage: Usage) -> Record:
        matrix, tile = x.reshape(rows_and_columns(tuple(x.shape))), self._tile(usage)
        scale = scale_from_amax(
            tile_amax(matrix, *tile),
            fp8_max(self.dtype),
            self.force_pow_2_scales,
            self.amax_epsilon,
            largest_scale(x.dtype),
        )
        scaled = scale_tiles_(matrix.to(torch.float32, copy=True).contiguous(), scale, *tile)
        codes, scale_inv = encode_fp8(scaled, self.dtype).view(x.shape), divide(1.0, scale)
        if usage is Usage.COL:
            codes, scale_inv = transpose_bytes(codes), scale_inv.t().contiguous()
        return Record(codes, scale_inv, None, self, usage, tuple(x.shape), x.dtype)

    def decode(self, record: Record) -> Tensor:
        """code * the scale_inv of its block."""
        codes, scale_inv = record.data, record.scale_inv
        assert scale_inv is not None
        if record.usage is Usage.COL:
            codes, scale_inv = untranspose_bytes(codes), scale_inv.t()
        values = decode_fp8(codes.reshape(rows_and_columns(record.shape)))
        if record.dtype is torch.float64:
            values = values.double()
        return scale_tiles_(values, scale_inv, *self._tile(record.usage)).view(record.shape)

    def layout(
        self, shape: tuple[int, ...], usage: Usage, dtype: torch.dtype = torch.float32
    ) -> Layout:
        """data and scale_inv, as in the table of this module."""
        rows, columns = rows_and_columns(tuple(shape))
        tile = self._tile(usage)
        scales = (blocks_along(rows, tile[0]), blocks_along(columns, tile[1]))
        if usage is Usage.COL:
            return ((*shape[-1:], *shape[:-1]), self.dtype), (scales[::-1], torch.float32)
        return (tuple(shape), self.dtype), (scales, torch.float32)

    def other_usage(self, record: Record) -> Record | None:
        """For 128 x 128 tiles, bytes and scales transposed."""
        if self.block_scaling_dim == 1:
            return None
        assert record.scale_inv is not None
        turn = transpose_bytes if record.usage is Usage.ROW else untranspose_bytes
        return replace(
            record,
            data=turn(record.data),
            scale_inv=record.scale_inv.t().contiguous(),
            usage=record.usage.other,
        )

    def exact_other_usage(self) -> bool:
        """True for 128 x 128 tiles."""
        return self.block_scaling_dim == 2

    def describe(self) -> str:
        """E.g. "e4m3 block 1x128"."""
        shape = "1x128" if self.block_scaling_dim == 1 else "128x128"
        return f"{short(self.dtype)} block {shape}" + (
            "" if self.force_pow_2_scales else ", fp32 scales"
        )
