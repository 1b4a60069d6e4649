"""Block formats, emulated: NVFP4, dequantize, where scales lie, shapes with tails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_ops.backends.cublas.scaled import tile_scale, vector_scale
from te_ops.backends.cuda import block
from te_ops.backends.cuda.block import Shape, make_blocked
from te_ops.backends.cuda.source import plain
from te_ops.backends.cuda.wanted import Wanted
from te_ops.quantizers import (
    Float8BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    Record,
)
from tests.backends.cuda import emulator
from tests.backends.cuda.cases import BIND, Case, cases, check, drawer
from tests.backends.cuda.cases_block import Decoded, dequantize_cases, nvfp4_cases, sums_cases

SHAPES = ((0, 32), (1,), (2, 3, 40), (129, 131), (144, 256))
NVFP4 = {case.name: case for case in nvfp4_cases()}
SOME = (
    "nvfp4-bf16-rca-1",
    "nvfp4 16x16 stochastic-bf16-rca-1",
    "nvfp4 rht stochastic-bf16-rca-1",
    "nvfp4 16x16-f32-rc-1",
    "nvfp4-f32-rc-1e-37",
    "nvfp4-f32-rc-1e-41",
)
DECODED = [case for i, case in enumerate(dequantize_cases()) if i not in (0, 3, 6, 7, 16, 17)]
FUSED = (
    "pointwise_quantize-swiglu-e4m3 block 1x128-dense",
    "pointwise_quantize-dswiglu-e4m3 block 1x128",
    "pointwise_quantize-dswiglu-mxfp8 e4m3",
    "pointwise_quantize-bias+gelu-e4m3 block 1x128",
    "quantize-e4m3 block 1x128-f16-rc",
    "quantize-e4m3 block 1x128-f32-rca",
    "quantize-mxfp8 e4m3-f32-rca",
)
BY_NAME = {case.name: case for case in cases()}

needs_compiler = pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")


@needs_compiler
@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("name", SOME)
def test_nvfp4_has_the_bytes_of_the_reference(name: str) -> None:
    case: Case = NVFP4[name]
    for i, shape in enumerate(SHAPES):
        assert check(case.make(drawer(i, "cpu"), shape), "sm_90", "cpu") == [], shape


@needs_compiler
@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("name", FUSED)
def test_values_kept_between_two_passes(name: str) -> None:
    case = BY_NAME[name]
    for i, shape in enumerate(((2, 3, 40), (130, 260))):
        assert check(case.make(drawer(i, "cpu"), shape), "sm_90", "cpu") == [], shape


@needs_compiler
@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("case", list(sums_cases()), ids=lambda case: case.name)
def test_sums_beside_the_copies(case: Case) -> None:
    for i, shape in enumerate(((0, 300), (5, 7), (300, 140))):
        assert check(case.make(drawer(i, "cpu"), shape), "sm_90", "cpu") == [], shape


@needs_compiler
@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("case", DECODED, ids=lambda case: case.name)
def test_dequantize_equals_the_reference(case: Decoded) -> None:
    for i, shape in enumerate(((0, 32), (129, 131), (144, 256))):
        assert case.check(drawer(i, "cpu"), shape, "sm_90") == [], shape
    assert case.check(drawer(7, "cpu"), (33, 70), "sm_90", scale=1e-37, stray=True) == []


@needs_compiler
@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("pointwise_quantize-dswiglu-e4m3 block 1x128", Shape(8, 2, 3, 8)),
        ("pointwise_quantize-dswiglu-e4m3 block 1x128", Shape(8, 8, 2, 4)),
        ("pointwise_quantize-swiglu-e4m3 block 1x128-dense", Shape(8, 4, 3, 8)),
        ("pointwise_quantize-dswiglu-mxfp8 e4m3", Shape(8, 2, 2, threads=32)),
        ("pointwise_quantize-dswiglu-mxfp8 e4m3", Shape(16, 4, 2, stages=2)),
        ("quantize-mxfp8 e4m3-f32-rca", Shape(4, 4, 2)),
        ("quantize-mxfp8 e4m3-f32-rca", Shape(32, 4, 1, stages=3, threads=64)),
    ],
)
def test_every_cut_gives_the_same(name: str, cut: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """How tiles are cut is a choice for speed alone; bringing operands ahead stays inside the tensors."""
    monkeypatch.setattr(block, "shape_of", lambda *_: cut)
    width = 264 if cut.stages else 260  # copies are of whole chunks
    for i, shape in enumerate(((2, 3, 40), (300, width))):
        assert check(BY_NAME[name].make(drawer(i, "cpu"), shape), "sm_90", "cpu") == [], shape


def quantized(quantizer: Any, x: torch.Tensor, arch: str = "sm_90") -> tuple[Record, Record]:
    wanted = Wanted(True, True, False, None, x.dtype, x.dtype)
    run = make_blocked(plain(x.dtype, x.shape[-1]), quantizer, wanted, arch)
    made = run([x.data_ptr(), x.shape[-1]], tuple(x.shape), x.device, None)
    assert made.row is not None
    assert made.col is not None
    return made.row, made.col


@needs_compiler
@pytest.mark.usefixtures("on_the_host")
def test_scales_lie_as_the_gemm_reads_them() -> None:
    """1x128: nothing is copied where rows need no filling up; 128x128: never."""
    x = drawer(0, "cpu")((272, 700), torch.bfloat16)
    for record in quantized(Float8BlockQuantizer(), x):
        assert record.scale_inv is not None
        made = vector_scale(record.scale_inv, 0)
        assert made.data_ptr() == record.scale_inv.data_ptr()
        assert made.stride() == (1, record.scale_inv.shape[0])
    for record in quantized(Float8BlockQuantizer(block_scaling_dim=2), x):
        assert record.scale_inv is not None
        made = tile_scale(record.scale_inv)
        assert made.data_ptr() == record.scale_inv.data_ptr()
        assert made.shape[0] % 4 == 0
        count = record.scale_inv.shape[1]
        assert torch.equal(made[:count].t(), record.scale_inv)
        assert not made[count:].any()


def test_a_slice_of_scales_is_copied() -> None:
    """The end of a storage may lack the filled-up part."""
    last = torch.rand(7).as_strided((1, 7), (8, 1))
    assert tile_scale(last).shape == (8, 1)
    assert torch.equal(tile_scale(last)[:7, 0], last[0])
    assert tile_scale(last)[7, 0] == 0.0


@needs_compiler
@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("quantizer", [Float8BlockQuantizer(), MXFP8Quantizer()])
def test_what_leaves_with_other_strides_is_the_same_tensor(quantizer: Quantizer) -> None:
    """Serialised, copied, decoded."""
    x = drawer(0, "cpu")((130, 260), torch.bfloat16)
    ours = quantized(quantizer, x)
    theirs = quantizer.records(x, row=True, col=True)[:2]
    for a, b in zip(ours, theirs, strict=True):
        assert b is not None
        assert torch.equal(a.dequantize(), b.dequantize())
        copied = a.map(torch.clone)
        assert torch.equal(copied.dequantize(), b.dequantize())
    made = QuantizedTensor(*ours, quantizer)
    assert torch.equal(made.dequantize(), QuantizedTensor(*theirs, quantizer).dequantize())


@pytest.mark.parametrize("name", ["row_scaled", "four_over_six"])
def test_nvfp4_without_a_kernel_is_refused(name: str) -> None:
    case = next(iter(NVFP4.values()))
    group = case.make(drawer(0, "cpu"), (16, 16))
    node = group.nodes[0]
    changed = node.attrs | {"quantizer": NVFP4Quantizer(**{name: True})}
    made = group.inputs.g.calls(node.prim, *node.inputs, **changed)
    call = type(group)("quantize", group.inputs, (group.inputs.g.nodes[-1],), made[:2]).call(
        "sm_90", "cpu"
    )
    reason = BIND["quantize"].refuse(call)
    assert reason is not None
    assert name in reason
