"""quantize with a scale a block, alone or behind a producer: 1x128 and 128x128 blocks, MXFP8."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.pointwise import check_chunks
from te_ops.backends.cuda.reduce import slices_kernel
from te_ops.backends.cuda.source import CTYPES, Source
from te_ops.backends.cuda.wanted import (
    FORMATS,
    THREADS,
    Results,
    Run,
    Wanted,
    scale_rule,
    template,
)
from te_ops.quantizers import Float8BlockQuantizer, MXFP8Quantizer, Quantizer, Record, Usage

BLOCK = 128
WARPS = THREADS // 32
_SCALE_ALIGN = 4  # 128 x 128 scales along a row, for cuBLASLt


@dataclass(frozen=True)
class Shape:
    """How a kernel cuts a tensor, and how many registers a thread may have.

    Attributes:
        groups: rows of a thread: a tile has 16 * groups rows; for MXFP8 a warp has 8 * groups columns.
        batch: how many of them are loaded before the first is used.
        blocks: CTAs that share a multiprocessor.
        ahead: row groups (MXFP8: rows) that a thread brings into L2 for a tile that runs a wave later.
        park: whether the second half of a pair waits in shared memory.
    """

    groups: int
    batch: int
    blocks: int
    ahead: int = 0
    park: bool = False


def shape_of(source: Source, quantizer: Quantizer, wanted: Wanted, arch: str) -> Shape:
    """The shape that was measured best.

    Values wait in registers for the second copy, so what they take decides how many CTAs fit.
    """
    wide, aligned = _wide(wanted), source.aligned
    if isinstance(quantizer, MXFP8Quantizer):
        groups = 4 if source.outs == 2 or wide or not aligned else 8
        batch = min(groups, 4 if source.computes else 8)
        tight = not aligned or (wanted.dense and groups == 8)
        ahead = 0
        if arch == "sm_90" and source.computes and groups == 8:
            ahead = 2 if wanted.dense else 4  # more has no registers beside values that are written
        return Shape(groups, 2 if tight else batch, 2, ahead if source.in_bytes == 4 else 0)
    groups = 8 if wanted.col or _square(quantizer) else 4  # a column block, a tile: 128 rows
    generation = int(arch.removeprefix("sm_"))
    if source.outs == 2 and not wide:
        return _pair_shape(groups, wanted, generation, aligned)
    if wide and groups == 8 and (source.computes or wanted.sums):
        return Shape(groups, 1, 1)  # FP32 values, and what computes or adds them
    if source.computes:
        return _computed_shape(groups, wanted, generation, source)
    blocks = 2
    if not wide and generation >= 89 and (wanted.sums is None or generation == 90):
        blocks = 4 if groups == 4 or (aligned and generation == 90) else 3
    return Shape(groups, groups if aligned else 2, blocks)


def _pair_shape(groups: int, wanted: Wanted, generation: int, aligned: bool) -> Shape:
    """Both halves of a pair in one tile."""
    if generation == 90:
        return Shape(groups, 4 if aligned else 2, 2, 4 if aligned else 0, park=True)
    if wanted.sums is not None:
        return Shape(groups, 1, 2 if generation > 90 else 1, park=generation > 90)
    return Shape(groups, 1, 2 if generation > 90 else 1)


def _computed_shape(groups: int, wanted: Wanted, generation: int, source: Source) -> Shape:
    """One output of a function; `ahead` where it was measured."""
    batch = 4 if source.aligned else 2
    if generation == 90:
        reads = source.in_bytes == 4 and source.aligned and not _wide(wanted)
        ahead = 4 if wanted.sums else groups
        return Shape(groups, batch, 2, ahead if reads else 0)
    if wanted.sums is not None:
        return Shape(groups, 1, 1 if generation > 90 else 2)
    return Shape(groups, batch, 2)


def _wide(wanted: Wanted) -> bool:
    """Whether values are kept as FP32."""
    return (wanted.rounds or torch.float32).itemsize == 4


def _square(quantizer: Any) -> bool:
    if isinstance(quantizer, MXFP8Quantizer):
        return quantizer.with_2d_quantization
    return bool(quantizer.block_scaling_dim == 2)


def _mx(quantizer: Quantizer) -> bool:
    return isinstance(quantizer, MXFP8Quantizer)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def refuse_blocks(quantizer: Quantizer, source_width: int, outs: int) -> str | None:
    """Why a source is not quantized in blocks, or None."""
    if outs == 2 and source_width % BLOCK:
        return f"halves of {source_width} columns are no multiple of 128: a block would span both"
    return None


def slices_sum(dtype: torch.dtype, arch: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The sum of the sums of tiles, in a launch of its own."""
    kernel = slices_kernel(dtype, arch)

    def run(partial: torch.Tensor) -> torch.Tensor:
        slices, total = partial.shape
        y = launch.empty((total,), dtype, partial.device)
        if total:
            kernel(partial.device, -(-total // 64), partial.data_ptr(), y.data_ptr(), total, slices)
        return y

    return run


def refuse_sums(quantizer: Quantizer) -> str | None:
    """Why sums over rows are not made beside a format's copies, or None."""
    if isinstance(quantizer, Float8BlockQuantizer):
        return None
    return f"{quantizer.describe()} has other tiles than the sums beside it"


def make_blocked(
    source: Source,
    quantizer: Float8BlockQuantizer | MXFP8Quantizer,
    wanted: Wanted,
    arch: str,
    shape_: Shape | None = None,
) -> Run:
    """Compile the kernel of a format with a scale a block."""
    cut = shape_of(source, quantizer, wanted, arch) if shape_ is None else shape_
    build = _mx_kernel if isinstance(quantizer, MXFP8Quantizer) else _block_kernel
    anything = wanted.row or wanted.col or wanted.sums is not None
    kernel = build(source, quantizer, wanted, arch, cut) if anything else None
    grid = _mx_grid(source, cut) if _mx(quantizer) else _block_grid(source, wanted, cut)
    shared = isinstance(quantizer, MXFP8Quantizer) and quantizer.with_2d_quantization
    kept = wanted.source_dtype
    add = None if wanted.sums is None else slices_sum(wanted.sums, arch)

    def make(
        shape: tuple[int, ...], usage: Usage, device: torch.device, data: torch.Tensor | None
    ) -> Record:
        (size, dtype), (scales, scale_dtype) = quantizer.layout(shape, usage)
        if data is None:
            data = launch.empty(size, dtype, device)
        scale_inv = _scales(quantizer, scales, scale_dtype, device)
        return Record(data, scale_inv, None, quantizer, usage, shape, kept)

    def run(
        slots: Sequence[int], shape: tuple[int, ...], device: torch.device, _: torch.Tensor | None
    ) -> Results:
        row = make(shape, Usage.ROW, device, None) if wanted.row else None
        same = row.data if row is not None and shared else None  # both copies are the same bytes
        col = make(shape, Usage.COL, device, same) if wanted.col else None
        dense = launch.empty(shape, wanted.dense, device) if wanted.dense else None
        amax = None
        if wanted.amax:
            amax = launch.empty((), torch.float32, device)
            launch.zero_word(amax)
        rows = math.prod(shape[:-1])
        tiles = grid(rows)
        partial = _partial(wanted, cut, rows, shape, device)
        if kernel is not None and tiles:
            written = (
                dense,
                *_tensors(row),
                *_tensors(col),
                *(() if _mx(quantizer) else (partial,)),
            )
            check_chunks(tiles * 16, next(t for t in written if t is not None))
            pointers = [0 if t is None else t.data_ptr() for t in written]
            wave = cut.blocks * processors(device)
            kernel(device, tiles, *slots, *pointers, rows, source.width, wave)
        sums = None if partial is None or add is None else add(partial)
        return Results(row, col, amax, dense, sums)

    return run


def _partial(
    wanted: Wanted, cut: Shape, rows: int, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor | None:
    """Memory for the sums of tiles."""
    if wanted.sums is None:
        return None
    total = shape[-1] if shape else 1
    return launch.empty((-(-rows // (16 * cut.groups)), total), torch.float32, device)


def _scales(
    quantizer: Quantizer, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Memory for scales as kernels and cuBLASLt want them: 1x128 scales [m, k blocks] with m contiguous, 128x128
    scales with rows of a multiple of four."""
    if not isinstance(quantizer, Float8BlockQuantizer):
        return launch.empty(size, dtype, device)
    if quantizer.block_scaling_dim == 1:
        return launch.empty(size[::-1], dtype, device).t()
    filled = -(-size[1] // _SCALE_ALIGN) * _SCALE_ALIGN
    made = launch.empty((size[0], filled), dtype, device)
    return made if filled == size[1] else made[:, : size[1]]


def _tensors(record: Record | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if record is None else (record.data, record.scale_inv)


def _block_grid(source: Source, wanted: Wanted, cut: Shape) -> Any:
    """rows -> tiles. FP32 halves of a pair are tiles of their own."""
    across = -(-source.width // BLOCK) * (source.outs if _wide(wanted) else 1)
    return lambda rows: -(-rows // (16 * cut.groups)) * across


def _mx_grid(source: Source, cut: Shape) -> Any:
    """rows -> CTAs of eight warps."""
    across = -(-source.width // (8 * cut.groups))
    return lambda rows: -(-(-(-rows // 32) * across) // WARPS)


def _in_one_piece(source: Source) -> bool:
    """Whether each half of a pair is known to lie in one piece."""
    return source.computes and 0 < source.block == source.width


def _block_kernel(
    source: Source, quantizer: Any, wanted: Wanted, arch: str, cut: Shape
) -> launch.Function:
    kept = CTYPES[wanted.rounds or torch.float32]
    # A pair has registers for the addresses only where its second half is parked and no sums are kept; elsewhere the
    # check of the interleave is cheaper.
    roomy = source.outs == 1 or (cut.park and wanted.sums is None)
    piece = "te::IN_ONE_PIECE" if _in_one_piece(source) and roomy else False
    numbers = template(
        FORMATS[quantizer.dtype], "Rule", source.aligned, cut.groups, cut.batch,
        cut.ahead, piece, cut.park,
        _square(quantizer), wanted.row, wanted.col, wanted.dense is not None, wanted.sums is not None,
    )  # fmt: skip
    head = (
        f"#include <kernels/block_quantize.cuh>\n{source.head}"
        f"{scale_rule(quantizer, wanted.rounds or torch.float32)}"
        f"typedef te::BlockArguments<{source.ctype}, {kept}> Parameters;\n"
    )
    body = f"te::block_quantize<{numbers}>(p);"
    text = launch.text_of(
        name="block_quantize", head=head, body=body, threads=THREADS, blocks=cut.blocks
    )
    shared = 16 * cut.groups * THREADS if cut.park else 0
    return launch.build("block_quantize", text, arch, THREADS, source.count + 9, shared=shared)


def _mx_kernel(
    source: Source, quantizer: Any, wanted: Wanted, arch: str, cut: Shape
) -> launch.Function:
    kept = CTYPES[wanted.rounds or torch.float32]
    numbers = template(
        source.ctype, FORMATS[quantizer.dtype], kept, source.aligned, cut.groups, cut.batch, cut.ahead,
        "te::IN_ONE_PIECE" if _in_one_piece(source) else False,
        _square(quantizer), wanted.row, wanted.col, wanted.dense is not None,
    )  # fmt: skip
    head = (
        f"#include <kernels/mxfp8.cuh>\n{source.head}"
        f"typedef te::MxArguments<{source.ctype}, {kept}> Parameters;\n"
    )
    body = f"te::mxfp8<{numbers}>(p);"
    text = launch.text_of(name="mxfp8", head=head, body=body, threads=THREADS, blocks=cut.blocks)
    return launch.build("mxfp8", text, arch, THREADS, source.count + 8)
