"""quantize to NVFP4: a pass for the amax (of the transformed columns too), and one that makes both copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.source import CTYPES
from te_ops.backends.cuda.wanted import THREADS, template
from te_ops.basic.quantize import seed_offset
from te_ops.errors import ShapeError
from te_ops.graph import Value
from te_ops.quantizers import NVFP4Quantizer, Record, Usage
from te_ops.registry import Call, Launch

TILE = 128
_AMAX_BLOCKS = 2112  # of the amax pass at most: sixteen a multiprocessor

Amaxes = tuple[torch.Tensor, torch.Tensor]


def refuse_format(quantizer: NVFP4Quantizer) -> str | None:
    """Why a variant of the format has no kernel, or None."""
    for name in ("row_scaled", "four_over_six"):
        if getattr(quantizer, name):
            return f"no kernel for NVFP4 with {name}"
    return None


def refuse(call: Call) -> str | None:
    """A quantize node on its own; its dtype has been looked at."""
    node = call.node
    if node.quantizer.stochastic and call.spec(node.inputs[-1]).dtype is not torch.int64:
        return f"the seed is {call.spec(node.inputs[-1]).dtype}; int64 is read"
    return refuse_format(node.quantizer)


def bind(call: Call) -> Launch:
    """The launches of one quantize node."""
    node = call.node
    quantizer, spec = node.quantizer, call.spec(node.inputs[0])
    width = int(spec.shape[-1]) if spec.shape else 1
    live = [Value(node.id, i) in call.writes for i in range(3)]
    run = make_nvfp4(
        spec.dtype,
        width,
        quantizer,
        (live[0], live[1]),
        call.arch,
        stream=node.attrs.get("stream", 0),
    )
    place = call.reads.index(node.inputs[0])
    seed_place = call.reads.index(node.inputs[-1]) if quantizer.stochastic else None
    picks = tuple(v.index for v in call.writes)

    def launched(*xs: Any) -> Any:
        x = launch.ready(xs[place])
        row, col = run(x, None if seed_place is None else xs[seed_place])
        outs = (row, col, _no_amax(x.device) if live[2] else None)
        return outs[picks[0]] if len(picks) == 1 else tuple(outs[i] for i in picks)

    return launched


def _no_amax(device: torch.device) -> torch.Tensor:
    amax = launch.empty((), torch.float32, device)
    launch.zero_word(amax)
    return amax


Run = Callable[[torch.Tensor, torch.Tensor | None], tuple[Record | None, Record | None]]


def make_nvfp4(
    dtype: torch.dtype,
    width: int,
    quantizer: NVFP4Quantizer,
    usages: tuple[bool, bool],
    arch: str,
    *,
    stream: int = 0,
    blocks: int | None = None,
) -> Run:
    """run(x, seed) -> (row record, col record) of a contiguous x whose last dimension is `width`.

    Args:
        usages: whether the row and the column record are made.
        stream: of the quantize node, an offset of the seed.
        blocks: CTAs that share a multiprocessor; what was measured best if None.
    """
    row, col = usages
    held = blocks or resident_blocks(dtype, quantizer)
    amaxes = _amax_pass(dtype, width, quantizer, usages, arch)
    kernel = _kernel(dtype, width, quantizer, usages, arch, blocks=held) if row or col else None
    offset = seed_offset(stream)

    def run(x: torch.Tensor, seed: torch.Tensor | None) -> tuple[Record | None, Record | None]:
        if kernel is None:
            return None, None
        shape = tuple(x.shape)
        rows = math.prod(shape[:-1])
        row_amax, col_amax = amaxes(x, rows)
        made = [
            _memory(quantizer, shape, usage, amax, x) if wanted else None
            for usage, amax, wanted in ((Usage.ROW, row_amax, row), (Usage.COL, col_amax, col))
        ]
        tiles = -(-rows // TILE) * -(-width // TILE)
        if tiles:
            data = [t for r in made for t in ((0, 0) if r is None else _addresses(r))]
            drawn = 0 if seed is None else seed.data_ptr()
            kernel(
                x.device, tiles, x.data_ptr(), row_amax.data_ptr(), col_amax.data_ptr(), *data,
                drawn, offset, rows, width,
            )  # fmt: skip
        return made[0], made[1]

    return run


def resident_blocks(dtype: torch.dtype, quantizer: NVFP4Quantizer) -> int:
    """CTAs that share a multiprocessor: as many as registers allow without spills."""
    if dtype.itemsize == 4:
        return 1
    if not quantizer.stochastic_rounding:
        return 4
    return 2 if quantizer.with_2d_quantization else 3


def _memory(
    quantizer: NVFP4Quantizer,
    shape: tuple[int, ...],
    usage: Usage,
    amax: torch.Tensor,
    x: torch.Tensor,
) -> Record:
    (data, kind), (scales, scale_kind), _ = quantizer.layout(shape, usage)
    return Record(
        launch.empty(data, kind, x.device),
        launch.empty(scales, scale_kind, x.device),
        amax, quantizer, usage, shape, x.dtype,
    )  # fmt: skip


def _addresses(record: Record) -> tuple[int, int]:
    assert record.scale_inv is not None
    return record.data.data_ptr(), record.scale_inv.data_ptr()


def _kernel(
    dtype: torch.dtype,
    width: int,
    quantizer: NVFP4Quantizer,
    usages: tuple[bool, bool],
    arch: str,
    *,
    blocks: int,
) -> launch.Function:
    row, col = usages
    square = quantizer.with_2d_quantization
    random = quantizer.stochastic_rounding
    multiple = math.gcd(width, 16) if width % 8 == 0 else 1
    numbers = template(
        CTYPES[dtype], multiple, square, row, col, quantizer.with_rht and col, random
    )
    head = f"#include <kernels/nvfp4.cuh>\ntypedef te::Fp4Arguments<{CTYPES[dtype]}> Parameters;\n"
    text = launch.text_of(
        name="nvfp4", head=head, body=f"te::nvfp4<{numbers}>(p);", threads=THREADS, blocks=blocks
    )
    shared = TILE * TILE * dtype.itemsize + 2 * 4 * (TILE // 16) ** 2 if col else 16
    return launch.build("nvfp4", text, arch, THREADS, 11, shared=shared)


# -- the amax of the tensor


def _amax_pass(
    dtype: torch.dtype, width: int, quantizer: NVFP4Quantizer, usages: tuple[bool, bool], arch: str
) -> Callable[[torch.Tensor, int], Amaxes]:
    """amaxes(x, rows) -> of the row copy and of the column copy, which are one unless columns are transformed."""
    if quantizer.with_rht and usages[1]:
        return _transformed_amax(dtype, width, usages[0], arch)
    head = (
        "#include <kernels/nvfp4.cuh>\n"
        f"struct Parameters {{ const {CTYPES[dtype]}* x; te::u32* out; te::i64 count; }};\n"
    )
    body = f"te::fp4_amax<{CTYPES[dtype]}>(p.x, p.out, p.count);"
    text = launch.text_of(name="nvfp4_amax", head=head, body=body, threads=THREADS)
    kernel = launch.build("nvfp4_amax", text, arch, THREADS, 3)
    per_block = THREADS * 4 * 8

    def amaxes(x: torch.Tensor, rows: int) -> Amaxes:
        amax = _no_amax(x.device)
        count = rows * width
        if count:
            grid = min(-(-count // per_block), _AMAX_BLOCKS)
            kernel(x.device, grid, x.data_ptr(), amax.data_ptr(), count)
        return amax, amax

    return amaxes


def _transformed_amax(
    dtype: torch.dtype, width: int, row: bool, arch: str
) -> Callable[[torch.Tensor, int], Amaxes]:
    numbers = template(CTYPES[dtype], width % 2 == 0 and dtype.itemsize == 2, row)
    head = (
        f"#include <kernels/nvfp4.cuh>\ntypedef te::Fp4AmaxArguments<{CTYPES[dtype]}> Parameters;\n"
    )
    body = f"te::fp4_amax_transformed<{numbers}>(p);"
    text = launch.text_of(name="nvfp4_amax", head=head, body=body, threads=THREADS, blocks=3)
    kernel = launch.build("nvfp4_amax", text, arch, THREADS, 5)

    def amaxes(x: torch.Tensor, rows: int) -> Amaxes:
        col_amax = _no_amax(x.device)
        row_amax = _no_amax(x.device) if row else col_amax
        units = -(-rows // 16) * -(-width // 64)
        if units >= 1 << 32:
            raise ShapeError(
                f"a tensor of shape {tuple(x.shape)} is too large for one kernel; split it"
            )
        if units:
            grid = min(-(-units // (THREADS // 32)), _AMAX_BLOCKS)
            kernel(
                x.device, grid, x.data_ptr(), row_amax.data_ptr(), col_amax.data_ptr(), rows, width
            )
        return row_amax, col_amax

    return amaxes
