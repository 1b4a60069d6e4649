"""The GEMM kernels on a device, against FP64 and the reference: formats, layouts, odd extents."""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from te_ops.backends.cublas import KERNELS
from te_ops.quantizers import Record, Usage
from te_ops.registry import REGISTRY, Call, Kernel
from te_ops.runtime.cache import arch_of
from te_ops.testing import assert_no_worse, check_kernel
from tests.backends.cublas.problems import (
    EMULATED,
    FORMATS,
    FUSED,
    NATIVE,
    exact,
    fused,
    operands,
    record,
    single,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ROWS = [1, 7, 24, 50, 1912]
INNER = [(256, 512), (1, 256), (130, 272)]  # columns and contraction: friendly, one column, odd
DENSE = (None, None)

# A tensor core sums FP8 products in some 14 bits: relative error in norm, measured 2.9e-3 at most.
FAST, SPLIT = 6e-3, 5e-4


def _arch() -> str:
    return arch_of(torch.device("cuda", 0))


def _launch(kernel: Kernel, call: Call, *xs: object) -> torch.Tensor:
    reason = kernel.reason(call)
    if reason is not None and "needs sm_" in reason:
        pytest.skip(reason)
    assert reason is None, reason
    made: torch.Tensor = kernel.bind(call)(*xs)
    return made


def _error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


def _extents(layout: str, rows: int, inner: tuple[int, int]) -> tuple[int, int, int]:
    """The row count is contracted by a weight gradient."""
    return (inner[1], inner[0], rows) if layout == "tn" else (rows, *inner)


@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("pair", FORMATS)
def test_fp8(pair, layout, rows, inner) -> None:
    a, b = operands(layout, _extents(layout, rows, inner), FORMATS[pair], device=CUDA)
    call = single(a, b, layout, accumulation="split", arch=_arch())
    y = _launch(NATIVE, call, a, b)
    reference = call.node.prim.reference(a, b, layout, torch.bfloat16)
    assert y.is_contiguous()
    assert_no_worse(y, reference, exact(a, b, layout))


@pytest.mark.parametrize("pair", ["hybrid", "1x128 x 128x128", "1x128 x 1x128"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_result_dtypes(pair, dtype) -> None:
    a, b = operands("tn", (256, 384, 1024), FORMATS[pair], dtype, device=CUDA)
    y = _launch(NATIVE, single(a, b, "tn", dtype=dtype, arch=_arch()), a, b)
    assert y.dtype is dtype
    assert _error(y, exact(a, b, "tn")) < SPLIT


@pytest.mark.parametrize("pair", ["current", "hybrid"])
@pytest.mark.parametrize("accumulation", ["fast", "split"])
def test_accumulation(pair, accumulation) -> None:
    a, b = operands("nt", (512, 512, 8192), FORMATS[pair], torch.float32, device=CUDA)
    call = single(a, b, "nt", dtype=torch.float32, accumulation=accumulation, arch=_arch())
    error = _error(_launch(NATIVE, call, a, b), exact(a, b, "nt"))
    assert error < (FAST if accumulation == "fast" else SPLIT)


@pytest.mark.parametrize("rows", [7, 256])
@pytest.mark.parametrize("columns", [64, 50])
@pytest.mark.parametrize("pair", [*FORMATS, "dense"])
def test_the_bias_is_added_before_the_rounding(pair, rows, columns) -> None:
    a, b = operands("nt", (rows, columns, 144), FORMATS.get(pair, DENSE), device=CUDA)
    bias = torch.randn(columns, device=CUDA).bfloat16()
    call = fused(a, b, "nt", "bias", bias, accumulation="split", arch=_arch())
    expected = exact(a, b, "nt") + bias.double()
    assert_no_worse(_launch(FUSED, call, a, b, bias), expected.bfloat16(), expected)


@pytest.mark.parametrize("rows", [50, 1024])
@pytest.mark.parametrize("pair", ["hybrid", "1x128 x 1x128", "dense"])
def test_a_weight_gradient_in_fp32(pair, rows) -> None:
    a, b = operands("tn", (256, 128, rows), FORMATS.get(pair, DENSE), device=CUDA)
    call = fused(a, b, "tn", "cast", result=torch.float32, accumulation="split", arch=_arch())
    y = _launch(FUSED, call, a, b)
    assert y.dtype is torch.float32
    assert _error(y, exact(a, b, "tn")) < (1e-5 if pair == "dense" else SPLIT)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [0, *ROWS])
def test_dense(layout, dtype, rows) -> None:
    a, b = operands(layout, _extents(layout, rows, (130, 272)), DENSE, dtype, device=CUDA)
    call = single(a, b, layout, dtype=dtype, arch=_arch())
    y = _launch(NATIVE, call, a, b)
    assert_no_worse(y, call.node.prim.reference(a, b, layout, dtype), exact(a, b, layout))


@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("pair", [*FORMATS, "dense"])
def test_zero_rows(pair, layout) -> None:
    extents = _extents(layout, 0, (256, 128))
    a, b = operands(layout, extents, FORMATS.get(pair, DENSE), device=CUDA)
    y = _launch(NATIVE, single(a, b, layout, arch=_arch()), a, b)
    assert y.shape == extents[:2]
    assert not y.any()


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize(
    "quantizer",
    [te.MXFP8Quantizer(), te.NVFP4Quantizer(), te.Float8CurrentScalingQuantizer(torch.float8_e5m2)],
    ids=lambda q: q.describe(),
)
def test_emulation(quantizer, layout) -> None:
    a, b = operands(layout, (256, 384, 512), (quantizer, quantizer), device=CUDA)
    call = single(a, b, layout, arch=_arch())
    y = _launch(EMULATED, call, a, b)
    reference = call.node.prim.reference(a, b, layout, torch.bfloat16)
    assert_no_worse(y, reference, exact(a, b, layout))


@pytest.mark.parametrize("pair", ["current", "1x128 x 128x128", "1x128 x 1x128"])
def test_a_nan_stays_in_its_row(pair) -> None:
    x = torch.randn(50, 272, device=CUDA).bfloat16()
    x[3, 5] = torch.nan
    first, second = FORMATS[pair]
    a = record(x, first, Usage.ROW)
    b = record(torch.randn(130, 272, device=CUDA).bfloat16(), second, Usage.ROW)
    y = _launch(NATIVE, single(a, b, "nt", arch=_arch()), a, b)
    assert y[3].isnan().all()
    assert y.isnan().sum() == y.shape[1]


@pytest.mark.parametrize("pair", ["hybrid", "1x128 x 1x128"])
def test_runs_are_identical_and_can_be_captured(pair) -> None:
    a, b = operands("tn", (512, 384, 1912), FORMATS[pair], device=CUDA)
    call = single(a, b, "tn", accumulation="split", arch=_arch())
    first = _launch(NATIVE, call, a, b)
    launch = NATIVE.bind(call)
    assert torch.equal(launch(a, b), first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch(a, b)
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, first)


def test_scales_in_the_librarys_order_are_read_in_place() -> None:
    a, b = operands("nt", (256, 128, 1024), FORMATS["1x128 x 1x128"], device=CUDA)
    assert isinstance(a, Record)
    assert a.scale_inv is not None
    call = single(a, b, "nt", arch=_arch())
    expected = _launch(NATIVE, call, a, b)
    turned = a.with_tensors([a.data, a.scale_inv.t().contiguous().t()])
    assert torch.equal(_launch(NATIVE, call, turned, b), expected)


@pytest.mark.parametrize(
    ("name", "recipes"),
    [
        ("cublas.gemm", ("dense", "delayed", "current", "current_e4m3_pow2", "block")),
        ("cublas.gemm_epilogue", ("dense", "current", "block")),
        ("cublas.emulated", ("mxfp8", "mxfp8_hybrid_2d", "nvfp4")),
    ],
)
def test_plans_pass_the_public_check(name, recipes) -> None:
    model = te.Sequential(te.Linear(50, 64), te.GELU(), te.Linear(64, 130), te.Linear(130, 1))
    with REGISTRY.temporary(*KERNELS):
        check_kernel(
            name,
            model,
            (8, 50),
            rows=(8, 7, 1, 50, 0),
            dtypes=(torch.bfloat16,),
            recipes=recipes,
            device="cuda",
            factor=2.5,  # fast sums of the forward pass add to a rounding to BF16
        )
