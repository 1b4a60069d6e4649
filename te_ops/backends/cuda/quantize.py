"""quantize, alone or behind a producer: per-tensor FP8, 1x128 and 128x128 blocks, MXFP8."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.pointwise import check_chunks
from te_ops.backends.cuda.source import CTYPES, Source, flag, literal, plain
from te_ops.graph import Node, Value
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    Quantizer,
    Record,
    Usage,
)
from te_ops.quantizers.state import largest_scale
from te_ops.registry import Call, Launch

FORMATS = {torch.float8_e4m3fn: "te::e4m3", torch.float8_e5m2: "te::e5m2"}
PER_TENSOR = (Float8Quantizer, Float8CurrentScalingQuantizer)
BLOCKED = (Float8BlockQuantizer, MXFP8Quantizer)
THREADS = 256

Fields = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Wanted:
    """What a quantize kernel writes.

    Attributes:
        row, col, amax: outputs of the quantize node.
        dense: dtype of the values that are written too, or None.
        rounds: dtype that values are rounded to before they are quantized (None: they stay FP32).
        source_dtype: dtype that the record names.
    """

    row: bool
    col: bool
    amax: bool
    dense: torch.dtype | None
    rounds: torch.dtype | None
    source_dtype: torch.dtype


@dataclass(frozen=True)
class Results:
    """What it has written."""

    row: Record | None
    col: Record | None
    amax: torch.Tensor | None
    dense: torch.Tensor | None


Run = Callable[[Sequence[int], tuple[int, ...], torch.device, torch.Tensor | None], Results]
"""run(slots of the source, logical shape, device, scale) -> Results."""


def refuse_quantizer(
    quantizer: Quantizer, source_width: int, outs: int, *, fused: bool
) -> str | None:
    """Why a quantizer has no kernel, or None."""
    if type(quantizer) not in (*PER_TENSOR, *BLOCKED):
        return f"no kernel for {quantizer.describe()}"
    if fused and isinstance(quantizer, Float8CurrentScalingQuantizer):
        return "current scaling needs the amax of all values before the first is quantized"
    if isinstance(quantizer, BLOCKED) and outs == 2 and source_width % 128:
        return f"halves of {source_width} columns are no multiple of 128: a block would span both"
    return None


def refuse(call: Call) -> str | None:
    """A quantize node on its own."""
    node = call.node
    spec = call.spec(node.inputs[0])
    if spec.dtype not in CTYPES:
        return f"quantizes FP32, BF16 and FP16, not {spec.dtype}"
    return refuse_state(call, node) or refuse_quantizer(node.quantizer, 0, 1, fused=False)


def refuse_state(call: Call, node: Node) -> str | None:
    """The scale of delayed scaling is read as FP32."""
    if node.quantizer.stateful and call.spec(node.inputs[1]).dtype is not torch.float32:
        return f"the scale is {call.spec(node.inputs[1]).dtype}; FP32 is read"
    return None


def bind(call: Call) -> Launch:
    """The launch of one quantize node."""
    node = call.node
    quantizer = node.quantizer
    spec = call.spec(node.inputs[0])
    width = int(spec.shape[-1]) if spec.shape else 1
    wanted = wanted_of(call, node, None, spec.dtype)
    reads = tuple(call.reads.index(v) for v in node.inputs)
    picks = tuple(v.index for v in call.writes)
    source = plain(spec.dtype, width)
    run = make_run(source, quantizer, wanted, call.arch)

    def launched(*xs: Any) -> Any:
        x = launch.ready(xs[reads[0]])
        scale = xs[reads[1]] if quantizer.stateful else None
        made = run(
            [x.data_ptr(), width], tuple(x.shape), x.device, scale if scale is not None else x
        )
        outs = (made.row, made.col, made.amax)
        return outs[picks[0]] if len(picks) == 1 else tuple(outs[i] for i in picks)

    return launched


def wanted_of(
    call: Call, node: Node, dense: torch.dtype | None, rounds: torch.dtype | None
) -> Wanted:
    """What the call wants of a quantize node."""
    live = [Value(node.id, i) in call.writes for i in range(3)]
    return Wanted(live[0], live[1], live[2], dense, rounds, call.spec(node.inputs[0]).dtype)


def make_run(source: Source, quantizer: Quantizer, wanted: Wanted, arch: str) -> Run:
    """Compile what a quantizer needs."""
    if isinstance(quantizer, PER_TENSOR):
        return _per_tensor(source, quantizer, wanted, arch)
    assert isinstance(quantizer, BLOCKED)
    return _blocked(source, quantizer, wanted, arch)


# -- one scale for the tensor


def scale_rule(quantizer: Any, dtype: torch.dtype, *, reversed_tiles: bool = False) -> str:
    """The C++ struct that turns an amax (or, delayed, the scale) into the scale."""
    scale = "x"
    if not isinstance(quantizer, Float8Quantizer):
        largest = f"{FORMATS[quantizer.dtype]}::largest"
        numbers = f"{literal(quantizer.amax_epsilon)}, {literal(largest_scale(dtype))}"
        scale = f"te::scale_of(x, {largest}, {numbers}, {flag(quantizer.force_pow_2_scales)})"
    return (
        f"struct Rule {{\n  static constexpr bool reversed = {flag(reversed_tiles)};\n"
        f"  static TE_DEVICE float scale(float x) {{ return {scale}; }}\n}};\n"
    )


def _per_tensor(
    source: Source,
    quantizer: Float8Quantizer | Float8CurrentScalingQuantizer,
    wanted: Wanted,
    arch: str,
) -> Run:
    current = isinstance(quantizer, Float8CurrentScalingQuantizer)
    codes = wanted.row or wanted.col
    tile = _tile_kernel(source, quantizer, wanted, arch) if codes or not current else None
    amax_kernel = _amax_kernel(wanted.source_dtype, arch) if current or tile is None else None
    groups = 8 if source.outs == 1 else 4
    width = source.width
    fp8, kept = quantizer.dtype, wanted.source_dtype

    def run(
        slots: Sequence[int],
        shape: tuple[int, ...],
        device: torch.device,
        scale: torch.Tensor | None,
    ) -> Results:
        lead = shape[:-1]
        rows, total = math.prod(lead), (shape[-1] if shape else 1)
        numbers = launch.empty((8,), torch.float32, device)
        amax, scale_inv = numbers[0], numbers[4]  # cuBLASLt wants a scale on 16 bytes
        if current or wanted.amax:
            launch.zero_word(amax)
        if current:
            assert amax_kernel is not None
            amax_kernel(device, slots[0], rows * total, amax)
        if tile is None:
            return Results(None, None, amax, None)
        row = launch.empty(shape, fp8, device) if wanted.row else None
        col = launch.empty((*shape[-1:], *lead), fp8, device) if wanted.col else None
        dense = launch.empty(shape, wanted.dense, device) if wanted.dense else None
        tiles = -(-rows // (16 * groups)) * -(-width // 128)
        used = amax if current else scale
        assert used is not None
        tile(
            device, max(tiles, 1), *slots, used.data_ptr(), amax.data_ptr(), scale_inv.data_ptr(),
            *(0 if t is None else t.data_ptr() for t in (dense, row, col)), rows, width,
        )  # fmt: skip
        made = [
            None if data is None else Record(data, scale_inv, None, quantizer, usage, shape, kept)
            for data, usage in ((row, Usage.ROW), (col, Usage.COL))
        ]
        return Results(made[0], made[1], amax, dense)

    return run


def _tile_kernel(source: Source, quantizer: Any, wanted: Wanted, arch: str) -> launch.Function:
    current = isinstance(quantizer, Float8CurrentScalingQuantizer)
    rounded = CTYPES[wanted.rounds or torch.float32]
    groups = 8 if source.outs == 1 else 4
    flags = [
        source.aligned,
        groups,
        wanted.row,
        wanted.col,
        wanted.amax and not current,
        wanted.dense is not None,
    ]
    numbers = ", ".join(flag(f) if isinstance(f, bool) else str(f) for f in flags)
    head = (
        f"#include <kernels/quantize.cuh>\n{source.head}"
        f"{scale_rule(quantizer, wanted.rounds or torch.float32, reversed_tiles=current)}"
        f"typedef te::QuantizeArguments<{source.ctype}, {rounded}> Parameters;\n"
    )
    body = (
        f"te::quantize<{source.ctype}, {FORMATS[quantizer.dtype]}, {rounded}, Rule, {numbers}>(p);"
    )
    text = launch.text_of(name="quantize", head=head, body=body, threads=THREADS, blocks=2)
    return launch.build("quantize", text, arch, THREADS, source.count + 8)


Amax = Callable[[torch.device, int, int, torch.Tensor], None]


def _amax_kernel(dtype: torch.dtype, arch: str) -> Amax:
    """amax(device, pointer, count, out): out, zero before, becomes max |x|."""
    unroll = 4
    head = (
        "#include <kernels/quantize.cuh>\n"
        f"struct Parameters {{ const {CTYPES[dtype]}* x; te::u32* out; te::i64 count; }};\n"
    )
    body = f"te::amax<{CTYPES[dtype]}, {THREADS}, {unroll}>(p.x, p.out, p.count);"
    text = launch.text_of(name="amax", head=head, body=body, threads=THREADS)
    function = launch.build("amax", text, arch, THREADS, 3)
    per_block = THREADS * unroll * 8

    def run(device: torch.device, pointer: int, count: int, out: torch.Tensor) -> None:
        if count:
            function(device, min(-(-count // per_block), 2048), pointer, out.data_ptr(), count)

    return run


def refuse_amax(call: Call) -> str | None:
    """The amax prim."""
    dtype = call.spec(call.node.inputs[0]).dtype
    return None if dtype in CTYPES else f"reads FP32, BF16 and FP16, not {dtype}"


def bind_amax(call: Call) -> Launch:
    """The launch of one amax node."""
    kernel = _amax_kernel(call.spec(call.node.inputs[0]).dtype, call.arch)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = launch.ready(x)
        out = launch.empty((), torch.float32, x.device)
        launch.zero_word(out)
        kernel(x.device, x.data_ptr(), x.numel(), out)
        return out

    return run


# -- a scale a block


def _blocked(
    source: Source, quantizer: Float8BlockQuantizer | MXFP8Quantizer, wanted: Wanted, arch: str
) -> Run:
    mx = isinstance(quantizer, MXFP8Quantizer)
    square = quantizer.with_2d_quantization if mx else quantizer.block_scaling_dim == 2  # type: ignore[union-attr]
    shared = mx and square  # both copies are the same bytes
    kernel = _block_kernel(source, quantizer, wanted, arch) if wanted.row or wanted.col else None
    outs, width, kept = source.outs, source.width, wanted.source_dtype

    def make(
        shape: tuple[int, ...], usage: Usage, device: torch.device, data: torch.Tensor | None
    ) -> Record:
        (size, dtype), (scales, scale_dtype) = quantizer.layout(shape, usage)
        if data is None:
            data = launch.empty(size, dtype, device)
        scale_inv = launch.empty(scales, scale_dtype, device)
        return Record(data, scale_inv, None, quantizer, usage, shape, kept)

    def run(
        slots: Sequence[int], shape: tuple[int, ...], device: torch.device, _: torch.Tensor | None
    ) -> Results:
        row = make(shape, Usage.ROW, device, None) if wanted.row else None
        same = row.data if row is not None and shared else None
        col = make(shape, Usage.COL, device, same) if wanted.col else None
        dense = launch.empty(shape, wanted.dense, device) if wanted.dense else None
        amax = None
        if wanted.amax:
            amax = launch.empty((), torch.float32, device)
            launch.zero_word(amax)
        rows = math.prod(shape[:-1])
        tiles = -(-rows // _rows(quantizer)) * -(-width // 128) * outs
        if kernel is not None and tiles:
            check_chunks(tiles * 16, row.data if row is not None else col.data)  # type: ignore[union-attr]
            pointers = [
                0 if t is None else t.data_ptr() for t in (dense, *_tensors(row), *_tensors(col))
            ]
            kernel(device, tiles, *slots, *pointers, rows, width)
        return Results(row, col, amax, dense)

    return run


def _rows(quantizer: Quantizer) -> int:
    """Rows of a tile: a block down, or half of one less registers where blocks are small."""
    return 64 if isinstance(quantizer, MXFP8Quantizer) else 128


def _tensors(record: Record | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if record is None else (record.data, record.scale_inv)


def _block_kernel(source: Source, quantizer: Any, wanted: Wanted, arch: str) -> launch.Function:
    mx = isinstance(quantizer, MXFP8Quantizer)
    fp8, rounded = FORMATS[quantizer.dtype], CTYPES[wanted.rounds or torch.float32]
    if mx:
        rule, scale, block, square = "", f"te::E8m0Scale<{fp8}>", 32, quantizer.with_2d_quantization
    else:
        rule = scale_rule(quantizer, wanted.rounds or torch.float32)
        scale, block, square = f"te::Fp32Scale<{fp8}, Rule>", 128, quantizer.block_scaling_dim == 2
    flags = (
        source.aligned,
        _rows(quantizer) // 16,
        block,
        square,
        not mx,
        wanted.row,
        wanted.col,
        wanted.dense is not None,
    )
    numbers = ", ".join(flag(f) if isinstance(f, bool) else str(f) for f in flags)
    head = (
        f"#include <kernels/block_quantize.cuh>\n{source.head}{rule}"
        f"typedef te::BlockArguments<{source.ctype}, {rounded}> Parameters;\n"
    )
    body = f"te::block_quantize<{source.ctype}, {fp8}, {rounded}, {scale}, {numbers}>(p);"
    text = launch.text_of(name="block_quantize", head=head, body=body, threads=THREADS, blocks=2)
    return launch.build("block_quantize", text, arch, THREADS, source.count + 7)
