"""Launches through cuBLASLt: every format and layout, what goes to torch instead, accumulation, recording."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.cublas import DIRECT, KERNELS, lt
from te_ops.basic.gemm import ACCUMULATE, GEMM
from te_ops.basic.pointwise import SUM
from te_ops.graph import Graph
from te_ops.pointwise import Fn, Input
from te_ops.quantizers import Record
from te_ops.registry import Call, Rule
from te_ops.runtime.tape import recording
from te_ops.testing import assert_close
from tests.backends.cublas.fakelt import FakeLt
from tests.backends.cublas.library import Library
from tests.backends.cublas.problems import FORMATS, exact, fused, operands, run, single, spec_of

SINGLE, EPILOGUE, ADDED = DIRECT
BF16, FP32 = torch.bfloat16, torch.float32
CURRENT = (te.Float8CurrentScalingQuantizer(), te.Float8CurrentScalingQuantizer())
PAIRS = {"dense": (None, None), **FORMATS}


def same(y: torch.Tensor, expected: torch.Tensor) -> None:
    """The product rounded once; the stand-in sums in FP64 and scales in another order."""
    assert_close(y, expected.to(y.dtype), terms=2)


def added(a: Any, b: Any, total: torch.Tensor, layout: str = "tn") -> Call:
    """A gemm added to a tensor."""
    g = Graph()
    values = [g.input(i, spec_of(x)) for i, x in enumerate((a, b, total))]
    y = g.call(GEMM, *values[:2], layout=layout, dtype=FP32, accumulation=None)
    z = g.call(ACCUMULATE, values[2], y)
    specs = {v: g.spec(v) for v in (*values, y, z)}
    rule = Rule("gemm_accumulate", ("gemm", "accumulate"))
    nodes = (g.node(y), g.node(z))
    return Call(nodes, tuple(values), (z,), specs, torch.device("cpu"), "sm_90", 16, rule)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_format_and_layout(lt_library: FakeLt, pair: str, layout: str) -> None:
    a, b = operands(layout, (32, 48, 256), PAIRS[pair])
    y = run(SINGLE, single(a, b, layout, accumulation="split"), a, b)
    same(y, exact(a, b, layout))
    (call,) = lt_library.calls
    assert (call["fast"], call["stream"], call["dtype"]) == (False, 7, BF16)


def test_fast_accumulation_is_of_fp8_only(lt_library: FakeLt) -> None:
    for quantizers, fast in ((CURRENT, True), ((None, None), False)):
        a, b = operands("nt", (32, 48, 256), quantizers)
        run(SINGLE, single(a, b, "nt", accumulation="fast"), a, b)
        assert lt_library.calls[-1]["fast"] is fast


@pytest.mark.parametrize("dtype", [torch.float16, FP32], ids=str)
def test_other_result_dtypes(lt_library: FakeLt, dtype: torch.dtype) -> None:
    source = torch.float16 if dtype is torch.float16 else BF16
    for quantizers in ((None, None), CURRENT):
        a, b = operands("tn", (32, 48, 256), quantizers, source)
        y = run(SINGLE, single(a, b, "tn", dtype=dtype), a, b)
        same(y, exact(a, b, "tn"))


def test_leading_dimensions_are_kept(lt_library: FakeLt) -> None:
    a, b = torch.randn(2, 3, 16).bfloat16(), torch.randn(48, 16).bfloat16()
    y = run(SINGLE, single(a, b, "nt"), a, b)
    assert y.shape == (2, 3, 48)
    same(y, exact(a, b, "nt"))


@pytest.mark.parametrize("quantizers", [(None, None), CURRENT], ids=["dense", "fp8"])
def test_a_bias(lt_library: FakeLt, quantizers: Any) -> None:
    a, b = operands("nt", (32, 48, 256), quantizers)
    bias = torch.randn(48).bfloat16()
    y = run(EPILOGUE, fused(a, b, "nt", "bias", bias), a, b, bias)
    same(y, exact(a, b, "nt") + bias.double())
    assert lt_library.calls[-1]["biased"]


X, Y, Z = Input(0), Input(1), Input(2)
BIASED = {  # bias and matrix in every order that a trace may add them
    "(y + bias) + c": (Fn("sum", ["value"] * 3, (X + Y) + Z), (0, 1)),
    "c + (y + bias)": (Fn("sum", ["value"] * 3, Z + (X + Y)), (0, 1)),
    "(y + c) + bias": (Fn("sum", ["value"] * 3, (X + Y) + Z), (1, 0)),
}


@pytest.mark.parametrize("pair", ["dense", "current", "delayed", "hybrid"])
def test_a_matrix_is_added(lt_library: FakeLt, pair: str) -> None:
    a, b = operands("nt", (32, 48, 256), PAIRS[pair])
    c = torch.randn(32, 48).bfloat16()
    before = c.clone()
    y = run(EPILOGUE, fused(a, b, "nt", "add", c, accumulation="fast"), a, b, c)
    same(y, exact(a, b, "nt") + c.double())
    assert torch.equal(c, before)
    (call,) = lt_library.calls
    assert (call["beta"], call["biased"]) == (1.0, False)


@pytest.mark.parametrize("order", BIASED)
@pytest.mark.parametrize("quantizers", [(None, None), CURRENT], ids=["dense", "fp8"])
def test_a_bias_and_a_matrix(lt_library: FakeLt, quantizers: Any, order: str) -> None:
    fn, places = BIASED[order]
    a, b = operands("nt", (32, 48, 256), quantizers)
    more = torch.randn(48).bfloat16(), torch.randn(32, 48).bfloat16()
    extra = [more[i] for i in places]
    y = run(EPILOGUE, fused(a, b, "nt", fn, *extra), a, b, *extra)
    same(y, exact(a, b, "nt") + more[0].double() + more[1].double())
    assert (lt_library.calls[-1]["beta"], lt_library.calls[-1]["biased"]) == (1.0, True)


def test_what_is_multiplied_is_added_too(lt_library: FakeLt) -> None:
    x, w = torch.randn(32, 32).bfloat16(), torch.randn(32, 32).bfloat16()
    g = Graph()
    a, b = g.input(0, spec_of(x)), g.input(1, spec_of(w))
    y = g.call(GEMM, a, b, layout="nt", dtype=BF16, accumulation=None)
    z = g.call(SUM, a, y, dtype=BF16)
    specs = {v: g.spec(v) for v in (a, b, y, z)}
    rule = Rule("gemm_epilogue", ("gemm", "pointwise*", "sum?"), commutes=("sum",))
    nodes, cpu = (g.node(y), g.node(z)), torch.device("cpu")
    call = Call(nodes, (a, b), (z,), specs, cpu, "sm_90", 16, rule)
    same(run(EPILOGUE, call, x, w), exact(x, w, "nt") + x.double())


def test_a_matrix_that_does_not_lie_as_the_library_reads_it(
    lt_library: FakeLt, library: Library
) -> None:
    a, b = operands("nt", (32, 48, 256), CURRENT)
    call = fused(a, b, "nt", "add", torch.randn(32, 48).bfloat16())
    launch = EPILOGUE.bind(call)
    wide = torch.randn(32, 64).bfloat16()
    shifted = torch.randn(32 * 48 + 1).bfloat16()[1:].view(32, 48)
    for c in (wide[:, :48], torch.randn(48, 32).bfloat16().t(), shifted):
        assert_close(launch(a, b, c), (exact(a, b, "nt") + c.double()).to(BF16), terms=256)
    assert not lt_library.calls


@pytest.mark.parametrize("total", [FP32, BF16], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_product_is_added_in_place(lt_library: FakeLt, pair: str, total: torch.dtype) -> None:
    a, b = operands("tn", (32, 48, 256), PAIRS[pair])
    into = torch.randn(32, 48).to(total)
    expected = exact(a, b, "tn") + into.double()
    y = run(ADDED, added(a, b, into), a, b, into)
    assert y is into
    same(into, expected)
    assert lt_library.calls[-1]["beta"] == 1.0


def test_several_shapes_of_a_launch(lt_library: FakeLt) -> None:
    _, b = operands("nt", (32, 48, 256), CURRENT)
    launch = None
    for rows in (32, 16, 7, 32):
        a, _ = operands("nt", (rows, 48, 256), CURRENT)
        launch = launch or SINGLE.bind(single(a, b, "nt"))
        same(launch(a, b), exact(a, b, "nt"))
    assert [c["shape"][0] for c in lt_library.calls] == [32, 16, 7, 32]
    assert lt_library.queries == 3


# -- what torch multiplies instead


def _by_torch(lt_library: FakeLt, library: Library, call: Call, *xs: Any) -> torch.Tensor:
    y: torch.Tensor = run(SINGLE, call, *xs)
    assert not lt_library.calls
    assert library.calls or 0 in call.spec(call.reads[0]).shape
    return y


@pytest.mark.parametrize("extents", [(32, 1, 256), (32, 48, 50), (0, 48, 256), (32, 48, 0)])
def test_extents_of_fp8_that_must_be_filled_up(
    lt_library: FakeLt, library: Library, extents: tuple[int, int, int]
) -> None:
    a, b = operands("nt", extents, CURRENT)
    y = _by_torch(lt_library, library, single(a, b, "nt"), a, b)
    assert_close(y, exact(a, b, "nt").to(BF16), terms=256)


def test_rows_of_block_scales_that_must_be_filled_up(lt_library: FakeLt, library: Library) -> None:
    quantizers = FORMATS["1x128 x 128x128"]
    a, b = operands("nt", (7, 48, 256), quantizers)
    y = _by_torch(lt_library, library, single(a, b, "nt"), a, b)
    assert_close(y, exact(a, b, "nt").to(BF16), terms=256)


def test_an_address_that_does_not_divide(lt_library: FakeLt, library: Library) -> None:
    a, b = operands("nt", (32, 48, 256), (None, None))
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    shifted = torch.empty(a.numel() + 1, dtype=BF16)[1:].view(a.shape).copy_(a)
    y = _by_torch(lt_library, library, single(shifted, b, "nt"), shifted, b)
    assert_close(y, exact(a, b, "nt").to(BF16), terms=256)


def test_strided_operands(lt_library: FakeLt, library: Library) -> None:
    a, b = torch.randn(256, 32).bfloat16().t(), torch.randn(48, 256).bfloat16()
    y = _by_torch(lt_library, library, single(a, b, "nt"), a, b)
    assert_close(y, exact(a, b, "nt").to(BF16), terms=256)


def test_a_strided_main_grad(lt_library: FakeLt, library: Library) -> None:
    a, b = operands("tn", (32, 48, 256), CURRENT)
    into = torch.randn(48, 32).t()
    expected = into + exact(a, b, "tn").float()
    y = run(ADDED, added(a, b, into), a, b, into)
    assert y is into
    assert_close(into, expected, terms=256)
    assert not lt_library.calls


def test_a_product_that_the_library_has_no_algorithm_for(
    lt_library: FakeLt, library: Library
) -> None:
    lt_library.offered = 0
    a, b = operands("nt", (32, 48, 256), (None, None))
    y = _by_torch(lt_library, library, single(a, b, "nt"), a, b)
    assert_close(y, exact(a, b, "nt").to(BF16), terms=256)


# -- what is refused


def test_fp32_is_left_to_torch(lt_library: FakeLt) -> None:
    a, b = operands("nt", (32, 48, 256), (None, None), FP32)
    call = single(a, b, "nt", dtype=FP32)
    assert SINGLE.reason(call) == "torch.float32 operands are left to torch"
    assert KERNELS[0].reason(call) is None


def test_without_the_bindings_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lt, "missing", lambda: "nvmath is not installed")
    a, b = operands("nt", (32, 48, 256), CURRENT)
    assert SINGLE.reason(single(a, b, "nt")) == "nvmath is not installed"
    assert KERNELS[0].reason(single(a, b, "nt")) is None
    assert SINGLE.priority > KERNELS[0].priority


def test_a_product_that_is_read_elsewhere_is_not_only_added(lt_library: FakeLt) -> None:
    a, b = operands("tn", (32, 48, 256), (None, None))
    call = added(a, b, torch.zeros(32, 48))
    call = Call(**{**call.__dict__, "writes": (call.nodes[0].out, *call.writes)})
    assert ADDED.reason(call) == "the library adds the product to a tensor, and nothing more"


@pytest.mark.parametrize(
    ("c", "fn", "words"),
    [
        (torch.randn(32, 48), "add", "the matrix that is added is torch.float32"),
        (torch.randn(32, 48).bfloat16(), "mul", "has no 'mul' epilogue"),
        (torch.randn(32, 48).bfloat16(), Fn("twice", ["value"] * 2, X + X + Y), "no 'twice'"),
        (torch.randn(32, 48).bfloat16(), Fn("more", ["value"] * 2, X + Y + 1.0), "no 'more'"),
    ],
)
def test_other_sums_are_refused(lt_library: FakeLt, c: torch.Tensor, fn: Any, words: str) -> None:
    a, b = operands("nt", (32, 48, 256), (None, None))
    assert words in str(EPILOGUE.reason(fused(a, b, "nt", fn, c, result=BF16)))


def test_block_scales_are_left_to_the_kernel_of_our_own(lt_library: FakeLt) -> None:
    a, b = operands("nt", (32, 48, 256), FORMATS["1x128 x 128x128"])
    call = fused(a, b, "nt", "add", torch.randn(32, 48).bfloat16())
    assert "cuda.gemm_block" in str(EPILOGUE.reason(call))


# -- recording


def test_a_launch_is_reported_and_can_be_issued_elsewhere(lt_library: FakeLt) -> None:
    a, b = operands("nt", (32, 48, 256), CURRENT)
    assert isinstance(a, Record)
    launch = SINGLE.bind(single(a, b, "nt"))
    with recording() as recorder:
        y = launch(a, b)
    assert recorder.reason is None
    (issued,) = recorder.issued
    assert issued.words[2] == y.data_ptr()
    place = (ctypes.c_int64 * len(issued.words))(*issued.words)
    words = memoryview(place).cast("B").cast("q")
    again = torch.zeros_like(y)
    words[2] = again.data_ptr()
    issued.issue.prepare(words, ctypes.addressof(place))(11)
    assert torch.equal(again, y)
    assert lt_library.calls[-1]["stream"] == 11
