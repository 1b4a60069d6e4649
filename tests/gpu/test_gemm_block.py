"""Products with block scales by our own kernel: odd extents, every result, accumulation, other memory, plans."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from te_ops.backends.cublas import lt
from te_ops.backends.cuda import gemm_block, launch
from te_ops.runtime.cache import arch_of
from te_ops.testing import assert_no_worse
from tests.backends.cublas.problems import FORMATS, exact, fused, operands, single

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SINGLE, _, EPILOGUE = gemm_block.KERNELS
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
EXTENTS = [(4, 16, 16), (192, 128, 128), (132, 144, 272), (1000, 400, 1040), (2560, 2064, 2000)]
# In norm: sums of 128 in the tensor core, whose accumulator is narrower than FP32, then the rounding of the result.
ERRORS = {BF16: 2.5e-3, FP16: 5e-4, FP32: 3e-4}


@pytest.fixture(autouse=True)
def hopper() -> None:
    if arch_of(CUDA) != gemm_block.ARCH:
        pytest.skip(f"the kernel needs {gemm_block.ARCH}")


def _spread(scale: torch.Tensor, mode: str, rows: int, k: int) -> torch.Tensor:
    if mode == "1x128":
        return scale.t().repeat_interleave(128, 1)[:, :k]
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]


def _given(p: lt.Product, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Codes, d and scales in the order of the kernel's words but for d; the product in FP64."""
    made = torch.Generator(CUDA).manual_seed(seed)
    codes, scales, wide = [], [], []
    for rows, mode in zip((p.m, p.n), p.scales, strict=True):
        x = torch.randn(rows, p.k, device=CUDA, generator=made).mul_(64).to(E4M3)
        blocks = -(-p.k // 128)
        size = (blocks, rows) if mode == "1x128" else (-(-rows // 128), -(-blocks // 4) * 4)
        s = torch.rand(size, device=CUDA, generator=made).add_(0.5).mul_(2.0**-6)
        codes.append(x)
        scales.append(s)
        wide.append(x.double() * _spread(s.double(), mode, rows, p.k))
    return [*codes, *scales], wide[0] @ wide[1].t()


def _words(given: list[torch.Tensor], d: torch.Tensor) -> list[int]:
    a, b, a_scale, b_scale = given
    return [t.data_ptr() for t in (a, b, d, a_scale, b_scale)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("scales", gemm_block.SCALES, ids="*".join)
def test_odd_extents(scales: Any, dtype: torch.dtype, accumulate: bool) -> None:
    for extents in EXTENTS:
        p = lt.Product(*extents, E4M3, E4M3, dtype, scales=scales, accumulate=accumulate)
        given, expected = _given(p)
        d = torch.randn(p.m, p.n, device=CUDA).to(dtype)
        expected = expected + d.double() if accumulate else expected
        prepared = gemm_block.Prepared(0, p, gemm_block.kernel_of(p))
        prepared.run(_words(given, d), launch.stream_of(0))
        assert float((d.double() - expected).norm() / expected.norm()) < ERRORS[dtype], p.key


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_a_bias(dtype: torch.dtype) -> None:
    for extents in EXTENTS:
        p = lt.Product(*extents, E4M3, E4M3, dtype, scales=("1x128", "128x128"), bias=dtype)
        given, expected = _given(p)
        bias = torch.randn(p.n, device=CUDA).to(dtype)
        expected = expected + bias.double()
        d = torch.full((p.m, p.n), float("nan"), dtype=dtype, device=CUDA)
        prepared = gemm_block.Prepared(0, p, gemm_block.kernel_of(p))
        prepared.run([*_words(given, d), bias.data_ptr()], launch.stream_of(0))
        assert float((d.double() - expected).norm() / expected.norm()) < ERRORS[dtype], p.key


@pytest.mark.parametrize("scales", gemm_block.SCALES, ids="*".join)
def test_other_memory_of_the_same_extents(scales: Any) -> None:
    """One prepared product, and one place of a tape, over several operands: the maps move along."""
    p = lt.Product(260, 272, 400, E4M3, E4M3, BF16, scales=scales)
    prepared = gemm_block.Prepared(0, p, gemm_block.kernel_of(p))
    own = (ctypes.c_int64 * 8)()
    place = prepared.prepare(memoryview(own).cast("B").cast("q"), ctypes.addressof(own))
    for seed in range(3):
        given, expected = _given(p, seed)
        ys = [torch.empty(p.m, p.n, dtype=BF16, device=CUDA) for _ in "ab"]
        prepared.run(_words(given, ys[0]), launch.stream_of(0))
        own[:5] = _words(given, ys[1])
        place(launch.stream_of(0))
        assert float((ys[0].double() - expected).norm() / expected.norm()) < ERRORS[BF16]
        assert torch.equal(*ys)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("pair", ["1x128 x 128x128", "1x128 x 1x128"])
def test_records(pair: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gemm_block.SWITCH, "1")
    monkeypatch.setattr(gemm_block, "slower", lambda product, count: None)
    a, b = operands(layout, (2304, 1408, 2048), FORMATS[pair], device=CUDA)
    call = single(a, b, layout, accumulation="split", arch=arch_of(CUDA))
    assert SINGLE.available() is None
    assert SINGLE.reason(call) is None
    y = SINGLE.bind(call)(a, b)
    assert_no_worse(y, call.node.prim.reference(a, b, layout, BF16), exact(a, b, layout))


def test_records_and_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gemm_block.SWITCH, "1")
    monkeypatch.setattr(gemm_block, "slower", lambda product, count: None)
    a, b = operands("nt", (2304, 1408, 2048), FORMATS["1x128 x 128x128"], device=CUDA)
    bias = torch.randn(1408, device=CUDA).bfloat16()
    call = fused(a, b, "nt", "bias", bias, accumulation="split", arch=arch_of(CUDA))
    assert EPILOGUE.reason(call) is None
    y, right = EPILOGUE.bind(call)(a, b, bias), exact(a, b, "nt") + bias.double()
    assert_no_worse(y, right.bfloat16(), right)
