"""What the kernels of block formats are checked on beside `cases`: NVFP4, and dequantize for every format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from te_ops.basic.pointwise import REDUCE
from te_ops.basic.quantize import DEQUANTIZE, QUANTIZE
from te_ops.graph import Kind, Spec
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    Usage,
)
from tests.backends.cuda.calls import Inputs, make_call
from tests.backends.cuda.cases import (
    BF16,
    BIND,
    E5M2,
    FP16,
    FP32,
    Case,
    Draw,
    Group,
    _pick,
    _s,
)
from tests.backends.cuda.cases_pointwise import SWIGLU, apply, group, quantized
from tests.backends.cuda.cases_pointwise import _bias_gelu as bias_gelu
from tests.backends.cuda.cases_pointwise import _reduce_quantize as reduce_quantize

NVFP4 = (
    NVFP4Quantizer(),
    NVFP4Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(with_rht=True),
    NVFP4Quantizer(stochastic_rounding=True),
    NVFP4Quantizer(with_2d_quantization=True, stochastic_rounding=True),
    NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
)


def _nvfp4(
    quantizer: NVFP4Quantizer, dtype: torch.dtype, live: tuple[int, ...], scale: float
) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        x = inputs(draw(shape, dtype, special=scale == 1.0, scale=scale))
        # Values that lie between two codes, and on them.
        given = inputs.tensors[x].view(-1)
        count = min(given.numel(), 64)
        given[:count] = (torch.arange(count, device=given.device) % 29 - 14).to(dtype) * (scale / 4)
        seed = torch.full((), 0x1234567890ABCDEF, dtype=torch.int64, device=given.device)
        more = [inputs(seed)] if quantizer.stochastic else []
        outs = inputs.g.calls(QUANTIZE, x, *more, quantizer=quantizer, stream=5)
        return Group("quantize", inputs, (inputs.g.nodes[-1],), _pick(outs, live))

    used = "".join("rca"[i] for i in live)
    return Case(f"{quantizer.describe()}-{_s(dtype)}-{used}-{scale:g}", make)


def nvfp4_cases() -> Iterator[Case]:
    """Variants, usages, dtypes; amaxes near both ends of FP32."""
    for quantizer in NVFP4:
        yield _nvfp4(quantizer, BF16, (0, 1, 2), 1.0)
        yield _nvfp4(quantizer, BF16, (0, 1), 2.0)
    for quantizer in (NVFP4[0], NVFP4[1], NVFP4[5]):
        for live in ((0,), (1,)):
            yield _nvfp4(quantizer, BF16, live, 1.0)
        for dtype in (FP32, FP16):
            yield _nvfp4(quantizer, dtype, (0, 1), 1.0)
    for scale in (1e-37, 1e-41, 1e37):
        yield _nvfp4(NVFP4[0], FP32, (0, 1), scale)


# -- sums over rows beside the copies


def _dswiglu(quantizer: Quantizer) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        width = -(-shape[-1] // 128) * 128
        pair = inputs(draw((*shape[:-1], 2 * width), BF16, scale=3.0))
        dy = inputs(draw((*shape[:-1], width), BF16))
        dx = apply(inputs, SWIGLU.grad(0), pair, dy)
        outs = quantized(inputs, draw, dx, quantizer, (0, 1))
        total = inputs.g.call(REDUCE, dx, over="rows", dtype=BF16)
        return group(inputs, "pointwise_together_rounded", (*outs, total))

    return Case(f"pointwise_together_rounded-dswiglu-dbias-{quantizer.describe()}", make, True)


def sums_cases() -> Iterator[Case]:
    """The gradient of a bias from the pass that quantizes the gradient of the output."""
    for quantizer in (Float8BlockQuantizer(), Float8BlockQuantizer(E5M2, block_scaling_dim=2)):
        for dtype in (BF16, FP32):
            yield reduce_quantize(quantizer, dtype)
        yield bias_gelu(quantizer, "pointwise_together_rounded")
        yield _dswiglu(quantizer)
    yield bias_gelu(Float8BlockQuantizer(), "pointwise_together", dense=True)


# -- dequantize

RECORDS: tuple[Quantizer, ...] = (
    Float8Quantizer(E5M2),
    Float8CurrentScalingQuantizer(),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False),
    MXFP8Quantizer(),
    MXFP8Quantizer(E5M2, with_2d_quantization=True),
    NVFP4Quantizer(),
    NVFP4Quantizer(with_rht=True),
    NVFP4Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(row_scaled=True),
    NVFP4Quantizer(four_over_six=True),
)


@dataclass(frozen=True)
class Decoded:
    """A record to be decoded into a dtype."""

    name: str
    quantizer: Quantizer
    usage: Usage
    dtype: torch.dtype

    def check(
        self, draw: Draw, shape: tuple[int, ...], arch: str, scale: float = 1.0, stray: bool = False
    ) -> list[str]:
        """What differs from the reference. `stray`: scales with strides that kernels write."""
        x = draw(shape, FP32 if scale != 1.0 else BF16, special=scale == 1.0, scale=scale)
        state = torch.full((1,), 1.7, device=x.device) if self.quantizer.stateful else None
        row, col, _ = self.quantizer.records(x, row=True, col=True, state=state)
        record = row if self.usage is Usage.ROW else col
        assert record is not None
        if stray and record.scale_inv is not None and record.scale_inv.dim() == 2:
            scales = record.scale_inv
            turned = torch.empty(scales.shape[::-1], dtype=scales.dtype, device=x.device).t()
            record = replace(record, scale_inv=turned.copy_(scales))
        inputs = Inputs()
        kind = Kind("record", self.quantizer, self.usage)
        given = inputs.g.input(0, Spec(tuple(x.shape), x.dtype, kind))
        y = inputs.g.call(DEQUANTIZE, given, dtype=self.dtype)
        call = make_call(inputs, (inputs.g.node(y),), (y,), arch=arch, device=x.device)
        reason = BIND["dequantize"].refuse(call)
        if reason is not None:
            return [f"refused: {reason}"]
        got = BIND["dequantize"].bind(call)(record)
        expected = self.quantizer.decode(record).to(self.dtype)
        if got.shape != expected.shape or got.dtype is not expected.dtype:
            return [f"{got.dtype} {tuple(got.shape)}, not {expected.dtype} {tuple(expected.shape)}"]
        same = (got == expected) | (got.isnan() & expected.isnan())
        return [] if bool(same.all()) else [f"{int((~same).sum())} of {same.numel()} values differ"]


def dequantize_cases() -> Iterator[Decoded]:
    """Every format, both usages."""
    for i, quantizer in enumerate(RECORDS):
        for usage in Usage:
            dtype = (BF16, FP32, FP16)[i % 3]
            yield Decoded(
                f"{quantizer.describe()}-{usage.value}-{_s(dtype)}", quantizer, usage, dtype
            )
