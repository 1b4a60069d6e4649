"""quantize with a scale a block, alone, behind a producer, or several values of one pass: 1x128 and 128x128 blocks,
MXFP8."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.norm_kernels import shared_kib
from te_ops.backends.cuda.pointwise import check_chunks
from te_ops.backends.cuda.reduce import slices_kernel
from te_ops.backends.cuda.source import CTYPES, Source
from te_ops.backends.cuda.targets import Lead, Part, RunParts, lead_of
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
_SLOTS = 6  # of a `te::BlockTarget`
_WAITING = 128 * BLOCK * 2  # bytes of an output of 128 rows


@dataclass(frozen=True)
class Shape:
    """How a kernel cuts a tensor, and how many registers a thread may have.

    Attributes:
        groups: rows of a thread: a tile has 16 * groups rows; for MXFP8 a warp has 8 * groups columns.
        batch: how many of them are loaded before the first is used.
        blocks: CTAs that share a multiprocessor.
        ahead: row groups that a thread brings into L2 for a tile that runs a wave later; not for MXFP8.
        stages: for MXFP8, how many batches are on their way to shared memory while others are computed; the CTAs then
            stay and go through all tiles. 0: they have a tile a warp.
        threads: of a CTA.
    """

    groups: int
    batch: int
    blocks: int
    ahead: int = 0
    stages: int = 0
    threads: int = THREADS


def shape_of(source: Source, parts: Sequence[Part], arch: str) -> Shape:
    """The shape that was measured best.

    Values wait in registers for the second copy, so what they take decides how many CTAs fit.
    """
    wanted = [part.wanted for part in parts]
    wide, aligned = _wide(wanted[0]), source.aligned
    summed = any(w.sums is not None for w in wanted)
    if isinstance(parts[0].quantizer, MXFP8Quantizer):
        return _mx_shape(source, wanted[0], arch)
    tall = any(w.col for w in wanted) or any(_square(part.quantizer) for part in parts)
    groups = 8 if tall else 4  # a column block, a tile: 128 rows
    generation = int(arch.removeprefix("sm_"))
    if source.outs > 1 and not wide:
        tight = not aligned or (source.outs > 2 and any(w.dense is not None for w in wanted))
        return _shared_shape(groups, 2 if tight else 4 if source.outs == 2 else 8, generation)
    if wide and groups == 8 and (source.computes or summed):
        return Shape(groups, 1, 1)  # FP32 values, and what computes or adds them
    if source.computes:
        return _computed_shape(groups, wanted[0], generation, source)
    blocks = 2
    if not wide and generation >= 89 and (not summed or generation == 90):
        light = generation == 90 and wanted[0].rounds is torch.bfloat16
        blocks = 4 if groups == 4 or light else 3
        blocks -= not aligned  # elements are read one by one
    return Shape(groups, groups if aligned else 2, blocks)


def _mx_shape(source: Source, wanted: Wanted, arch: str) -> Shape:
    """The same of MXFP8. Tiles as wide as shared memory has room for: memory likes long lines."""
    wide, outs = _wide(wanted), source.outs
    if not source.computes and source.aligned:
        return Shape(8 if wide else 32, 4, 4, stages=2, threads=64)
    batch, blocks = 4 // outs, 3
    if arch == "sm_90" and source.aligned:
        batch, blocks = 4, 4 if outs == 1 else 3
    return Shape(8 if wide else 16, batch, blocks, threads=128)


def _shared_shape(groups: int, batch: int, generation: int) -> Shape:
    """Several outputs of a function in one tile."""
    if generation == 90:
        return Shape(groups, min(batch, groups), 2, 4 if batch > 2 else 0)
    return Shape(groups, 1, 2 if generation > 90 else 1)


def _computed_shape(groups: int, wanted: Wanted, generation: int, source: Source) -> Shape:
    """One output of a function."""
    batch = 4 if source.aligned else 2
    if generation == 90:
        ahead = 4 if wanted.sums else groups
        return Shape(groups, batch, 2, ahead if source.aligned and not _wide(wanted) else 0)
    if wanted.sums is not None:
        return Shape(groups, 1, 1 if generation > 90 else 2)
    return Shape(groups, batch, 2)


def _wide(wanted: Wanted) -> bool:
    """Whether values are kept as FP32."""
    return (wanted.rounds or torch.float32).itemsize == 4


def _square(quantizer: Quantizer | None) -> bool:
    """Whether a block has as many rows as columns."""
    if isinstance(quantizer, MXFP8Quantizer):
        return quantizer.with_2d_quantization
    return isinstance(quantizer, Float8BlockQuantizer) and quantizer.block_scaling_dim == 2


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


def refuse_room(outs: int, summed: bool, arch: str) -> str | None:
    """Why the outputs of a function do not wait in a block's shared memory, or None."""
    needed = (
        outs * _WAITING + 2560 + 4096 * summed
    )  # maxima and scales of columns; sums of the warps
    if needed <= (shared_kib(arch) - 1) * 1024:
        return None
    return (
        f"{outs} results wait in {needed >> 10} KiB of shared memory, which a block of {arch} lacks"
    )


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
    run_parts = block_parts(source, (Part(quantizer, wanted, source.outs),), arch, shape_)
    return lambda slots, shape, device, _: run_parts(slots, lead_of(shape), device, (None,))[0]


def block_parts(
    source: Source, parts: Sequence[Part], arch: str, shape_: Shape | None = None
) -> RunParts:
    """Compile the pass over a source whose parts have 1x128 or 128x128 blocks; or one part, of MXFP8."""
    cut = shape_of(source, parts, arch) if shape_ is None else shape_
    mx = isinstance(parts[0].quantizer, MXFP8Quantizer)
    build = _mx_kernel if mx else _block_kernel
    kernel = (
        build(source, parts, arch, cut) if any(_does_anything(part) for part in parts) else None
    )
    count = _mx_grid(source, cut) if mx else _block_grid(source, parts[0].wanted, cut)
    totals = [None if p.wanted.sums is None else slices_sum(p.wanted.sums, arch) for p in parts]
    width = source.width

    def run(
        slots: Sequence[int], lead: Lead, device: torch.device, _: Sequence[torch.Tensor | None]
    ) -> list[Results]:
        rows = math.prod(lead or ())
        shapes = [() if lead is None else (*lead, part.outs * width) for part in parts]
        made = [_allocate(p, s, device) for p, s in zip(parts, shapes, strict=True)]
        down = -(-rows // (16 * cut.groups))
        partial = [_partial(p, s, down, device) for p, s in zip(parts, shapes, strict=True)]
        tiles = count(rows)
        if kernel is not None and tiles:
            written: list[torch.Tensor | None] = []
            for results, sums in zip(made, partial, strict=True):
                written += (results.dense, *_tensors(results.row), *_tensors(results.col))
                written += () if mx else (sums,)
            check_chunks(tiles * 16, next(t for t in written if t is not None))
            pointers = [0 if t is None else t.data_ptr() for t in written]
            wave = cut.blocks * processors(device)
            grid = min(tiles, wave) if cut.stages else tiles
            kernel(device, grid, *slots, *pointers, rows, width, *(() if mx else (wave,)))
        return [
            results if total is None or sums is None else replace(results, sums=total(sums))
            for results, total, sums in zip(made, totals, partial, strict=True)
        ]

    return run


def _does_anything(part: Part) -> bool:
    return part.wanted.row or part.wanted.col or part.wanted.sums is not None


def _allocate(part: Part, shape: tuple[int, ...], device: torch.device) -> Results:
    """Memory for what a part writes, without its sums."""
    wanted, quantizer = part.wanted, part.quantizer
    dense = None if wanted.dense is None else launch.empty(shape, wanted.dense, device)
    if quantizer is None:
        return Results(None, None, None, dense)

    def record(usage: Usage, data: torch.Tensor | None) -> Record:
        (size, dtype), (scales, scale_dtype) = quantizer.layout(shape, usage)
        if data is None:
            data = launch.empty(size, dtype, device)
        scale_inv = _scales(quantizer, scales, scale_dtype, device)
        return Record(data, scale_inv, None, quantizer, usage, shape, wanted.source_dtype)

    row = record(Usage.ROW, None) if wanted.row else None
    shared = isinstance(quantizer, MXFP8Quantizer) and quantizer.with_2d_quantization
    same = row.data if row is not None and shared else None  # both copies are the same bytes
    col = record(Usage.COL, same) if wanted.col else None
    amax = None
    if wanted.amax:
        amax = launch.empty((), torch.float32, device)
        launch.zero_word(amax)
    return Results(row, col, amax, dense)


def _partial(
    part: Part, shape: tuple[int, ...], down: int, device: torch.device
) -> torch.Tensor | None:
    """Memory for the sums of tiles, of which there are `down` above each other."""
    if part.wanted.sums is None:
        return None
    return launch.empty((down, shape[-1] if shape else 1), torch.float32, device)


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
    """rows -> CTAs, with a tile of 32 rows a warp."""
    across = -(-source.width // (8 * cut.groups))
    return lambda rows: -(-(-(-rows // 32) * across) * 32 // cut.threads)


def _in_one_piece(source: Source) -> bool:
    """Whether each half of a pair is known to lie in one piece."""
    return source.computes and 0 < source.block == source.width


def _block_kernel(source: Source, parts: Sequence[Part], arch: str, cut: Shape) -> launch.Function:
    kept = CTYPES[parts[0].wanted.rounds or torch.float32]
    piece = "te::IN_ONE_PIECE" if _in_one_piece(source) else False
    types = "".join(_target(part, k, kept) for k, part in enumerate(parts))
    members = " ".join(f"T{k} t{k};" for k in range(len(parts)))
    head = (
        f"#include <kernels/block_quantize.cuh>\n{source.head}{types}"
        f"struct Parameters {{ {source.ctype} source; {members} te::i64 rows, width, wave; }};\n"
    )
    numbers = template(kept, source.aligned, cut.groups, cut.batch, cut.ahead, piece)
    targets = ", ".join(f"p.t{k}" for k in range(len(parts)))
    body = f"te::block_quantize<{numbers}>(p.source, p.rows, p.width, p.wave, {targets});"
    text = launch.text_of(
        name="block_quantize", head=head, body=body, threads=THREADS, blocks=cut.blocks
    )
    # What is computed, or read one by one, waits as 16 bytes for eight values; codes take half of that place later.
    waits = kept != "float" and (source.computes or not source.aligned)
    turned = any(part.wanted.col for part in parts)
    place = _WAITING * cut.groups // 8
    shared = place * source.outs if waits else place // 2 * turned
    slots = source.count + _SLOTS * len(parts) + 3
    return launch.build("block_quantize", text, arch, THREADS, slots, shared=shared)


def _target(part: Part, number: int, kept: str) -> str:
    """The type `T<number>`, with its rule."""
    wanted, quantizer = part.wanted, part.quantizer
    rule, name, fp8 = "", "void", "te::e4m3"
    if part.codes:
        assert isinstance(quantizer, Float8BlockQuantizer)
        name, fp8 = f"R{number}", FORMATS[quantizer.dtype]
        rule = scale_rule(quantizer, wanted.rounds or torch.float32, name)
    arguments = template(
        fp8, kept, name, part.outs, part.codes and _square(quantizer), wanted.row, wanted.col,
        wanted.dense is not None, wanted.sums is not None,
    )  # fmt: skip
    return f"{rule}typedef te::BlockTarget<{arguments}> T{number};\n"


def _mx_kernel(source: Source, parts: Sequence[Part], arch: str, cut: Shape) -> launch.Function:
    (part,) = parts
    wanted, quantizer = part.wanted, part.quantizer
    assert isinstance(quantizer, MXFP8Quantizer)
    dtype = wanted.rounds or torch.float32
    kept = CTYPES[dtype]
    numbers = template(
        source.ctype, FORMATS[quantizer.dtype], kept, source.aligned, cut.groups, cut.batch, cut.stages, cut.threads,
        "te::IN_ONE_PIECE" if _in_one_piece(source) else False, source.width % 32 == 0,
        _square(quantizer), wanted.row, wanted.col, wanted.dense is not None,
    )  # fmt: skip
    head = (
        f"#include <kernels/mxfp8.cuh>\n{source.head}"
        f"typedef te::MxArguments<{source.ctype}, {kept}> Parameters;\n"
    )
    body = f"te::mxfp8<{numbers}>(p);"
    text = launch.text_of(
        name="mxfp8", head=head, body=body, threads=cut.threads, blocks=cut.blocks
    )
    waits = wanted.col or _square(quantizer)
    shared = (8 * dtype.itemsize * source.outs * cut.groups if waits else 0) + (
        cut.stages * cut.batch * (8 * source.in_bytes | 16)
    )
    return launch.build(
        "mxfp8", text, arch, cut.threads, source.count + 7, shared=shared * cut.threads
    )
