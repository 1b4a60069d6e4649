"""dequantize: records of every format as BF16, FP16 or FP32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.pointwise import check_chunks
from te_ops.backends.cuda.source import CTYPES
from te_ops.backends.cuda.wanted import FORMATS, THREADS, template
from te_ops.graph import Spec
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    Record,
    Usage,
)
from te_ops.registry import Call, Launch

_UNROLL = 4
_LINES, _LONG = 64, 128  # of a tile of a transposed copy


@dataclass(frozen=True)
class Decoding:
    """How a format's records are read.

    Attributes:
        codes: the C++ type of a code.
        scales: the C++ type that finds an element's scale in the matrix that the data encodes.
        count: its 8-byte slots.
        transposed: whether that matrix is the tensor's transpose.
        each: whether neighbours along a row have scales of their own.
        filled: whether its lines are filled up to 16 and transformed.
    """

    codes: str
    scales: str
    count: int
    transposed: bool
    each: bool = False
    filled: bool = False


def decoding_of(quantizer: Quantizer, usage: Usage) -> Decoding | None:
    """The decoding of a format, or None if there is no kernel for it."""
    made = _DECODINGS.get(type(quantizer))
    return None if made is None else made(quantizer, usage is Usage.COL)


def _tensor(quantizer: Any, col: bool) -> Decoding:
    return Decoding(FORMATS[quantizer.dtype], "te::GridScales<0, 0>", 3, col)


def _block(quantizer: Any, col: bool) -> Decoding:
    tall = 128 if quantizer.block_scaling_dim == 2 else 1
    return Decoding(FORMATS[quantizer.dtype], f"te::GridScales<{tall}, 128>", 3, col)


def _mxfp8(quantizer: Any, col: bool) -> Decoding:
    tile = "32, 1" if col else "1, 32"
    return Decoding(FORMATS[quantizer.dtype], f"te::E8m0Scales<{tile}>", 3, False, each=col)


def _nvfp4(quantizer: Any, col: bool) -> Decoding:
    limit = int(quantizer.limit)
    filled = col and quantizer.with_rht
    return Decoding("te::e2m1", f"te::Fp4Scales<{limit}>", 5, col, filled=filled)


_DECODINGS: dict[type, Callable[[Any, bool], Decoding]] = {
    Float8Quantizer: _tensor,
    Float8CurrentScalingQuantizer: _tensor,
    Float8BlockQuantizer: _block,
    MXFP8Quantizer: _mxfp8,
    NVFP4Quantizer: _nvfp4,
}


def _decoding(spec: Spec) -> Decoding | None:
    return decoding_of(spec.kind.quantizer.of_usage(spec.kind.usage), spec.kind.usage)


def refuse(call: Call) -> str | None:
    """Formats of others, FP64."""
    record, y = call.spec(call.node.inputs[0]), call.spec(call.node.out)
    if record.dtype is torch.float64:
        return "values of an FP64 source are FP64"
    if y.dtype not in CTYPES:
        return f"writes FP32, BF16 and FP16, not {y.dtype}"
    if _decoding(record) is None:
        return f"no kernel for {record.kind.quantizer.describe()}"
    return None


def bind(call: Call) -> Launch:
    """The launch of one dequantize node."""
    record = call.spec(call.node.inputs[0])
    decoding = _decoding(record)
    assert decoding is not None
    return make_dequantize(decoding, call.spec(call.node.out).dtype, call.arch)


def make_dequantize(
    decoding: Decoding, dtype: torch.dtype, arch: str
) -> Callable[[Record], torch.Tensor]:
    """run(record) -> its values in the logical shape. A text for each alignment that records turn out to have."""
    kernels: dict[tuple[bool, bool], launch.Function] = {}

    def kernel(width: int, length: int) -> launch.Function:
        key = width % 8 == 0, length % 16 == 0
        if key not in kernels:
            kernels[key] = _kernel(decoding, dtype, arch, key)
        return kernels[key]

    kernel(0, 0)  # the usual one is ready before the first launch

    def run(record: Record) -> torch.Tensor:
        shape = tuple(record.shape)
        y = launch.empty(shape, dtype, record.device)
        rows, width = math.prod(shape[:-1]), shape[-1] if shape else 1
        if not y.numel():
            return y
        grid = _grid(decoding, rows, width, y)
        length = -(-rows // 16) * 16 if decoding.filled else rows
        data = launch.ready(record.data)
        kernel(width, length)(
            record.device,
            grid,
            data.data_ptr(),
            y.data_ptr(),
            *_scales(decoding, record),
            rows,
            width,
        )
        return y

    return run


def _grid(decoding: Decoding, rows: int, width: int, y: torch.Tensor) -> int:
    if decoding.transposed:
        return -(-rows // _LONG) * -(-width // _LINES)
    chunks = rows * -(-width // 8)
    check_chunks(chunks, y)
    return -(-chunks // (THREADS * _UNROLL))


def _scales(decoding: Decoding, record: Record) -> tuple[int, ...]:
    """The slots of the C++ type that finds scales."""
    scale = record.scale_inv
    assert scale is not None
    down, across = scale.stride() if scale.dim() == 2 else (0, 0)
    if record.amax is None:
        return scale.data_ptr(), down, across
    step = 1 if record.amax.dim() else 0
    return scale.data_ptr(), record.amax.data_ptr(), down, across, step


def _kernel(
    decoding: Decoding, dtype: torch.dtype, arch: str, whole: tuple[bool, bool]
) -> launch.Function:
    rows_whole, lines_whole = whole
    types = (decoding.codes, decoding.scales, CTYPES[dtype], rows_whole)
    if decoding.transposed:
        body = f"te::dequantize_transposed<{template(*types, lines_whole, decoding.filled)}>(p);"
    else:
        body = f"te::dequantize<{template(*types, decoding.each, _UNROLL)}>(p);"
    head = (
        "#include <kernels/dequantize.cuh>\n"
        f"typedef te::DequantizeArguments<{decoding.scales}, {CTYPES[dtype]}> Parameters;\n"
    )
    held = 3 if int(arch.removeprefix("sm_")) < 89 else 4  # without FP8 instructions
    text = launch.text_of(name="dequantize", head=head, body=body, threads=THREADS, blocks=held)
    return launch.build("dequantize", text, arch, THREADS, 4 + decoding.count)
