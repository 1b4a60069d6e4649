"""NVFP4: E2M1 with an E4M3 scale for 16 elements along the contraction and an FP32 amax.

The tensor is seen as the matrix [M, K] (K the last dimension), any M and K, and col as its
transpose [K, M]. With [R, C] the matrix of the usage:

* data: uint8, two codes a byte, the lower index in the low nibble: [*leading, ceil(K / 2)] for
  row, [K, ceil(M / 2)] for col;
* scale_inv: E4M3 [R, ceil(C / 16)]; for 16 x 16 tiles the scale of a tile is repeated for its
  rows, so that readers see one layout;
* amax: FP32, of the whole tensor without its NaNs (zero dimensions), or [R] with `row_scaled`.

A col record with the random Hadamard transform holds whole groups of 16: C is M rounded up to 16,
as the transform spreads values over the padding and the contraction needs them all.

Order of operations (bit-exact): NVIDIA Transformer Engine,
``common/cast/nvfp4/core_nvfp4.cuh``. With b = 448 (or `four_over_six_bound`), all in FP32:
global encode scale S = min(6 b / amax, FP32 max), 1 if the amax is 0 or Inf; block scale
s8 = E4M3(block_amax * (S * (1/6))); encode scale min(1 / (s8 * (1 / S)), FP32 max);
code = E2M1(x * encode). A value is code * ((s8 * amax) * (1 / (6 b))), with 1 / S for
amax / (6 b) where S was clamped or set to 1. A block that holds a NaN has s8 = NaN (0x7F).
"""

from __future__ import annotations

import math
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
    check_flags,
    no_amax,
    rows_and_columns,
    source,
)
from te_ops.quantizers.codec import (
    blocks_along,
    constant,
    decode_fp8,
    encode_fp8,
    on,
    padded,
    scale_tiles_,
    stretch,
)
from te_ops.quantizers.e2m1 import (
    E2M1_MAX,
    encode_e2m1,
    pack_e2m1,
    unpack_codes,
    unpack_e2m1,
    values_e2m1,
)
from te_ops.quantizers.philox import philox_uniform
from te_ops.quantizers.state import FP32_MAX, divide

__all__ = ["NVFP4Quantizer", "hadamard_16", "inverse_hadamard_16"]

BLOCK = 16
_STREAM = {Usage.ROW: 0, Usage.COL: 1}
_SIGNS = constant(
    torch.tensor(
        [1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
    )
)


def _butterfly(x: Tensor) -> Tensor:
    """x H / 4 for the Sylvester matrix H of order 16 along the last dimension: four stages of sums
    and differences, a fixed order of additions that every kernel can repeat."""
    shape = x.shape
    for half in (1, 2, 4, 8):
        a, b = x.reshape(-1, BLOCK // (2 * half), 2, half).unbind(2)
        x = torch.stack([a + b, a - b], 2)
    return x.reshape(shape).mul_(0.25)


def hadamard_16(x: Tensor) -> Tensor:
    """The random Hadamard transform of groups of 16 along the last dimension: FP32 `x` with
    fixed signs, times H / 4, rounded to BF16 (returned as FP32)."""
    if not x.numel():
        return x
    groups = x.view(*x.shape[:-1], -1, BLOCK)
    return _butterfly(groups * on(_SIGNS, x)).bfloat16().float().view(x.shape)


def inverse_hadamard_16(x: Tensor) -> Tensor:
    """The inverse of `hadamard_16` without its rounding; the transform is orthonormal."""
    if not x.numel():
        return x
    groups = _butterfly(x.view(*x.shape[:-1], -1, BLOCK))
    return groups.mul_(on(_SIGNS, x)).view(x.shape)


@dataclass(frozen=True)
class NVFP4Quantizer(Quantizer):
    """E2M1 with two levels of scales. All arguments are keywords.

    Args:
        with_2d_quantization: one scale for each 16 x 16 tile, so that both usages have the same
            codes (Transformer Engine: for weights).
        with_rht: the random Hadamard transform on the col usage (inputs and gradients).
        stochastic_rounding: round to either neighbour, by a seed; element (r, c) of the usage's
            [R, C] matrix uses number r * C + c, row and col being streams 0 and 1 of the seed.
        row_scaled: an amax for each row of the usage's matrix instead of one for the tensor
            (Transformer Engine: ``row_scaled_nvfp4``).
        four_over_six: try the block scale as it is and times 1.5 (which maps the block's amax to
            4), and keep what has the smaller error, the first if they are equal (Transformer
            Engine: ``nvfp4_use_4over6``). The error of a tile is the sum over its rows of the sums
            in element order.
        four_over_six_bound: 256 or 448, the largest block scale without the 1.5; only for
            `four_over_six` (Transformer Engine: ``nvfp4_e4m3_max``).
        four_over_six_error: "MAE" or "MSE" (Transformer Engine: ``nvfp4_4over6_err_mode``).

    The transform excludes tiles and 4-over-6; stochastic rounding excludes 4-over-6; an amax a row
    excludes tiles.
    """

    name: ClassVar[str] = "nvfp4"

    _: KW_ONLY
    with_2d_quantization: bool = False
    with_rht: bool = False
    stochastic_rounding: bool = False
    row_scaled: bool = False
    four_over_six: bool = False
    four_over_six_bound: int = 256
    four_over_six_error: str = "MAE"

    def __post_init__(self) -> None:
        check_flags(self)
        for one, other in _EXCLUDED:
            if getattr(self, one) and getattr(self, other):
                raise RecipeError(f"{one} and {other} exclude each other; switch one of them off.")
        if self.four_over_six_bound not in (256, 448):
            raise RecipeError(f"four_over_six_bound {self.four_over_six_bound} must be 256 or 448.")
        if self.four_over_six_error not in ("MAE", "MSE"):
            raise RecipeError(
                f"four_over_six_error {self.four_over_six_error!r} must be 'MAE' or 'MSE'."
            )

    @property
    def stochastic(self) -> bool:
        """Whether `stochastic_rounding` is on."""
        return self.stochastic_rounding

    @property
    def limit(self) -> float:
        """What an amax is mapped to: the largest code times the largest block scale."""
        return E2M1_MAX * (self.four_over_six_bound if self.four_over_six else 448)

    def records(
        self,
        x: Tensor,
        *,
        row: bool,
        col: bool,
        state: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Record | None, Record | None, Tensor]:
        """See `Quantizer.records`; the amax is 0, as each record has its own."""
        x = source(x)
        if self.stochastic and seed is None:
            raise RecipeError(
                f"{self.describe()} rounds stochastically and needs seed=, an int64 tensor with "
                "zero dimensions."
            )
        if self.with_2d_quantization:
            rowwise = self._record(x, Usage.ROW, seed) if row or col else None
            columnwise = self.other_usage(rowwise) if rowwise is not None and col else None
            return (rowwise if row else None), columnwise, no_amax(x)
        rowwise = self._record(x, Usage.ROW, seed) if row else None
        columnwise = self._record(x, Usage.COL, seed) if col else None
        return rowwise, columnwise, no_amax(x)

    def _record(self, x: Tensor, usage: Usage, seed: Tensor | None) -> Record:
        matrix = x.reshape(rows_and_columns(tuple(x.shape))).float()
        if usage is Usage.COL:
            matrix = matrix.t()
            if self.with_rht:
                matrix = hadamard_16(padded(matrix, 1, BLOCK).contiguous())
        uniform = None
        if self.stochastic and seed is not None:
            size = (matrix.shape[0], matrix.shape[1])
            uniform = padded(philox_uniform(size, seed, _STREAM[usage], x.device), 1, BLOCK)
        columns = matrix.shape[1]
        matrix = padded(matrix, 1, BLOCK).contiguous()  # what it was is not kept beside it
        codes, block_scale, amax = self._encode(matrix, uniform)
        data = _pack(codes, columns)
        data = data.view(self.layout(tuple(x.shape), usage)[0][0])
        return Record(data, block_scale, amax, self, usage, tuple(x.shape), x.dtype)

    def _encode(self, grid: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [R, C], block scales [R, C / 16] and amax of the FP32 matrix `grid` [R, C]."""
        magnitude = grid.abs()
        amax = self._amax(magnitude)
        scale = self._global_scale(amax)
        tile = BLOCK if self.with_2d_quantization else 1
        size = (blocks_along(len(grid), tile), tile, grid.shape[1] // BLOCK, BLOCK)
        blocks = padded(magnitude, tile, 1).view(size)
        block_amax = stretch(blocks.amax((1, 3)), 0, tile, len(grid))
        del magnitude, blocks  # as large as the grid
        if self.four_over_six:
            return *self._better(grid, block_amax, scale, amax), amax
        block_scale = encode_fp8(block_amax * (scale * (1.0 / E2M1_MAX)), torch.float8_e4m3fn)
        return _codes(grid, block_scale, scale, uniform), block_scale, amax

    def _amax(self, magnitude: Tensor) -> Tensor:
        """Zero dimensions, or [R] for `row_scaled`. NaNs don't count."""
        if not magnitude.numel():
            size = magnitude.shape[:1] if self.row_scaled else ()
            return magnitude.new_zeros(size)
        clean = magnitude.nan_to_num(0.0, math.inf)
        return clean.amax(1) if self.row_scaled else clean.amax()

    def _global_scale(self, amax: Tensor) -> Tensor:
        """S, to be broadcast over [R, blocks]."""
        scale = divide(self.limit, amax).clamp(max=FP32_MAX)
        scale = torch.where((amax > 0.0) & (amax < math.inf), scale, torch.ones_like(scale))
        return scale.unsqueeze(-1) if self.row_scaled else scale

    def _block_values(self, block_scale: Tensor, amax: Tensor) -> Tensor:
        """What the codes of each block are multiplied with, FP32 [R, blocks]."""
        s8 = decode_fp8(block_scale)
        if self.row_scaled:
            amax = amax.unsqueeze(-1)
        inverse = 1.0 / self.limit
        value = (s8 * amax) * inverse
        # A huge amax overflows in that product though the value is representable.
        value = torch.where(torch.isinf(value), s8 * (amax * inverse), value)
        scale = self._global_scale(amax if not self.row_scaled else amax.squeeze(-1))
        regular = (amax < math.inf) & (divide(self.limit, amax) < math.inf)
        return torch.where(regular, value, s8 * divide(1.0, scale))

    def _better(
        self, grid: Tensor, block_amax: Tensor, scale: Tensor, amax: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Codes and block scales by 4-over-6."""
        base = torch.div(block_amax, torch.full_like(block_amax, E2M1_MAX)) * scale
        six, four = (encode_fp8(b, torch.float8_e4m3fn) for b in (base, base * 1.5))
        six_codes, four_codes = (_codes(grid, s, scale, None) for s in (six, four))
        six_error = self._error(grid, six_codes, six, amax)
        smaller = self._error(grid, four_codes, four, amax) < six_error
        blocks = (*six.shape, BLOCK)
        codes = torch.where(smaller.unsqueeze(-1), four_codes.view(blocks), six_codes.view(blocks))
        chosen = torch.where(smaller, four.view(torch.uint8), six.view(torch.uint8))
        return codes.view(grid.shape), chosen.view(torch.float8_e4m3fn)

    def _error(self, grid: Tensor, codes: Tensor, block_scale: Tensor, amax: Tensor) -> Tensor:
        """The error of each block of `grid`, [R, blocks]; for tiles that of the tile."""
        values = scale_tiles_(values_e2m1(codes), self._block_values(block_scale, amax), 1, BLOCK)
        difference = values.sub_(grid).view(*block_scale.shape, BLOCK)
        squared = self.four_over_six_error == "MSE"
        cost = difference * difference if squared else difference.abs()
        total = _sum_in_order(cost, -1)
        if not self.with_2d_quantization:
            return total
        size = (blocks_along(len(grid), BLOCK), BLOCK, total.shape[1])
        rows = padded(total, BLOCK, 1).view(size)
        return stretch(_sum_in_order(rows, 1), 0, BLOCK, len(grid))

    def _matrix_shape(self, shape: tuple[int, ...], usage: Usage) -> tuple[int, int]:
        """[R, C] of a record: what its data encodes, C in elements."""
        rows, columns = rows_and_columns(shape)
        if usage is Usage.ROW:
            return rows, columns
        return columns, (blocks_along(rows, BLOCK) * BLOCK if self.with_rht else rows)

    def decode(self, record: Record) -> Tensor:
        """code * block value, and back through the transform for a col record with it."""
        assert record.scale_inv is not None
        assert record.amax is not None
        rows, columns = self._matrix_shape(record.shape, record.usage)
        values = unpack_e2m1(record.data.reshape(rows, blocks_along(columns, 2)))[:, :columns]
        if record.dtype is torch.float64:
            values = values.double()
        scale_tiles_(values, self._block_values(record.scale_inv, record.amax), 1, BLOCK)
        if record.usage is Usage.COL:
            if self.with_rht:
                values = inverse_hadamard_16(values)[:, : rows_and_columns(record.shape)[0]]
            values = values.t()
        return values.reshape(record.shape).contiguous()

    def layout(
        self, shape: tuple[int, ...], usage: Usage, dtype: torch.dtype = torch.float32
    ) -> Layout:
        """data, scale_inv and amax, as this module says."""
        rows, columns = self._matrix_shape(tuple(shape), usage)
        leading = tuple(shape[:-1]) if usage is Usage.ROW else (rows,)
        return (
            ((*leading, blocks_along(columns, 2)), torch.uint8),
            ((rows, blocks_along(columns, BLOCK)), torch.float8_e4m3fn),
            ((rows,) if self.row_scaled else (), torch.float32),
        )

    def other_usage(self, record: Record) -> Record | None:
        """For 16 x 16 tiles: codes transposed, scales repeated along the other dimension."""
        if not self.with_2d_quantization:
            return None
        assert record.scale_inv is not None
        rows, columns = self._matrix_shape(record.shape, record.usage)
        codes = unpack_codes(record.data.reshape(rows, blocks_along(columns, 2)))[:, :columns]
        tiles = record.scale_inv.view(torch.uint8)[::BLOCK].t()
        scales = stretch(tiles, 0, BLOCK, columns).contiguous()
        usage = record.usage.other
        data = _pack(padded(codes.t(), 1, 2).contiguous(), rows)
        return replace(
            record,
            data=data.view(self.layout(record.shape, usage)[0][0]),
            scale_inv=scales.view(torch.float8_e4m3fn),
            usage=usage,
        )

    def exact_other_usage(self) -> bool:
        """True for 16 x 16 tiles."""
        return self.with_2d_quantization

    def describe(self) -> str:
        """E.g. "nvfp4 rht stochastic"."""
        return " ".join(["nvfp4", *(word for key, word in _WORDS.items() if getattr(self, key))])


_WORDS = {
    "with_2d_quantization": "16x16",
    "with_rht": "rht",
    "stochastic_rounding": "stochastic",
    "row_scaled": "row-scaled",
    "four_over_six": "4over6",
}
_EXCLUDED = (
    ("with_rht", "with_2d_quantization"),
    ("with_rht", "four_over_six"),
    ("stochastic_rounding", "four_over_six"),
    ("row_scaled", "with_2d_quantization"),
)


def _codes(grid: Tensor, block_scale: Tensor, scale: Tensor, uniform: Tensor | None) -> Tensor:
    """E2M1 codes [R, C] of `grid` under the block scales [R, C / 16] and the global scale."""
    product = decode_fp8(block_scale) * divide(1.0, scale)
    encode = divide(1.0, product).clamp(max=FP32_MAX)
    scaled = grid.view(*block_scale.shape, BLOCK) * encode.unsqueeze(-1)
    return encode_e2m1(scaled.view(grid.shape), uniform)


def _pack(codes: Tensor, columns: int) -> Tensor:
    """Codes [R, at least `columns`] as bytes [R, ceil(columns / 2)]."""
    packed = pack_e2m1(codes)
    used = blocks_along(columns, 2)
    return packed if packed.shape[1] == used else packed[:, :used].contiguous()


def _sum_in_order(x: Tensor, dim: int) -> Tensor:
    """The FP32 sum over `dim`, first to last: the order is part of the format's definition."""
    first, *others = x.unbind(dim)
    total = first.clone()
    for other in others:
        total += other
    return total
