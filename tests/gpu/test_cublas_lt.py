"""GEMMs through cuBLASLt itself on a device: formats, every algorithm, accumulation, streams, capture, tuning."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.cublas import DIRECT, KERNELS, lt
from te_ops.basic.gemm import ACCUMULATE, GEMM
from te_ops.graph import Graph
from te_ops.registry import REGISTRY, Call, Kernel, Rule
from te_ops.runtime import tune as tuning
from te_ops.runtime.cache import arch_of
from te_ops.testing import assert_no_worse, check_kernel
from te_ops.testing.cases import RECIPES
from tests.backends.cublas.problems import FORMATS, exact, fused, operands, single, spec_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SINGLE, EPILOGUE, ADDED = DIRECT
BF16, FP32 = torch.bfloat16, torch.float32
DENSE = (None, None)
PAIRS = {"dense": DENSE, **FORMATS}
# As in test_cublas.py: relative error in norm of sums in the tensor core, and in two levels.
FAST, SPLIT = 6e-3, 5e-4


@pytest.fixture(autouse=True)
def bindings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reason = lt.missing()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("TE_OPS_TUNE_CACHE", str(tmp_path / "tune"))
    tuning.TABLE.forget()


def _launch(kernel: Kernel, call: Call, *xs: Any) -> torch.Tensor:
    reason = kernel.reason(call)
    if reason is not None and "needs sm_" in reason:
        pytest.skip(reason)
    assert reason is None, reason
    made: torch.Tensor = kernel.bind(call)(*xs)
    return made


def _error(y: torch.Tensor, expected: torch.Tensor) -> float:
    y, expected = y.detach().double(), expected.detach()
    return float((y - expected).norm() / expected.norm())


def _added(a: Any, b: Any, total: torch.Tensor) -> Call:
    g = Graph()
    values = [g.input(i, spec_of(x)) for i, x in enumerate((a, b, total))]
    y = g.call(GEMM, *values[:2], layout="tn", dtype=FP32, accumulation="split")
    z = g.call(ACCUMULATE, values[2], y)
    specs = {v: g.spec(v) for v in (*values, y, z)}
    rule = Rule("gemm_accumulate", ("gemm", "accumulate"))
    return Call((g.node(y), g.node(z)), tuple(values), (z,), specs, CUDA, arch_of(CUDA), 16, rule)


@pytest.mark.parametrize("inner", [(256, 512), (1, 256), (130, 272)], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 24, 50, 1912])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_format_and_layout(pair, layout, rows, inner) -> None:
    extents = (inner[1], inner[0], rows) if layout == "tn" else (rows, *inner)
    a, b = operands(layout, extents, PAIRS[pair], device=CUDA)
    call = single(a, b, layout, accumulation="split", arch=arch_of(CUDA))
    y = _launch(SINGLE, call, a, b)
    assert y.is_contiguous()
    reference = call.node.prim.reference(a, b, layout, BF16)
    assert_no_worse(y, reference, exact(a, b, layout))


@pytest.mark.parametrize("rows", [7, 256])
@pytest.mark.parametrize("columns", [64, 50])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_bias_is_added_before_the_rounding(pair, rows, columns) -> None:
    a, b = operands("nt", (rows, columns, 144), PAIRS[pair], device=CUDA)
    bias = torch.randn(columns, device=CUDA).bfloat16()
    call = fused(a, b, "nt", "bias", bias, accumulation="split", arch=arch_of(CUDA))
    expected = exact(a, b, "nt") + bias.double()
    assert_no_worse(_launch(EPILOGUE, call, a, b, bias), expected.bfloat16(), expected)


@pytest.mark.parametrize("rows", [7, 256, 1912])
@pytest.mark.parametrize("columns", [64, 50])
@pytest.mark.parametrize("pair", ["dense", "current", "delayed", "hybrid"])
def test_a_matrix_is_added_before_the_rounding(pair, rows, columns) -> None:
    a, b = operands("nt", (rows, columns, 144), PAIRS[pair], device=CUDA)
    c = torch.randn(rows, columns, device=CUDA).bfloat16()
    before = c.clone()
    call = fused(a, b, "nt", "add", c, accumulation="split", arch=arch_of(CUDA))
    y = _launch(EPILOGUE, call, a, b, c)
    expected = exact(a, b, "nt") + c.double()
    # Where the library does not take the extents, the product is rounded before torch adds to it.
    twice = (exact(a, b, "nt").bfloat16() + c).double()
    assert_no_worse(y, expected.bfloat16() if columns % 16 == 0 else twice.bfloat16(), expected)
    assert torch.equal(c, before)


@pytest.mark.parametrize("accumulation", ["fast", "split"])
def test_accumulation_of_fp8(accumulation) -> None:
    a, b = operands("nt", (512, 512, 8192), FORMATS["current"], FP32, device=CUDA)
    call = single(a, b, "nt", dtype=FP32, accumulation=accumulation, arch=arch_of(CUDA))
    error = _error(_launch(SINGLE, call, a, b), exact(a, b, "nt"))
    assert error < (FAST if accumulation == "fast" else SPLIT)


@pytest.mark.parametrize("total", [FP32, BF16], ids=str)
@pytest.mark.parametrize("extents", [(256, 384, 1024), (256, 384, 1000), (256, 40, 50)], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_product_is_added_in_place(pair, extents, total) -> None:
    a, b = operands("tn", extents, PAIRS[pair], device=CUDA)
    into = torch.randn(extents[:2], device=CUDA).to(total)
    expected = into.double() + exact(a, b, "tn")
    y = _launch(ADDED, _added(a, b, into), a, b, into)
    assert y is into
    if total is BF16:
        assert_no_worse(into, expected.bfloat16(), expected)
    else:
        assert _error(into, expected) < SPLIT


def test_a_slice_of_a_flat_buffer_is_added_to() -> None:
    flat = torch.zeros(256 * 384 + 3, device=CUDA)
    a, b = operands("tn", (256, 384, 1024), FORMATS["current"], device=CUDA)
    for start in (0, 1):  # on 16 bytes, and not
        into = flat[start : start + 256 * 384].view(256, 384)
        before = into.double()
        _launch(ADDED, _added(a, b, into), a, b, into)
        assert _error(into, before + exact(a, b, "tn")) < SPLIT


@pytest.mark.parametrize("pair", ["dense", "current", "1x128 x 128x128", "1x128 x 1x128"])
@pytest.mark.parametrize("shape", [(1024, 2048, 512), (96, 512, 4096)], ids=str)
def test_every_algorithm_is_right(pair, shape) -> None:
    a, b = operands("nt", shape, PAIRS[pair], device=CUDA)
    modes = {"dense": ("", ""), "current": ("tensor", "tensor")}.get(pair) or tuple(
        pair.split(" x ")
    )
    products = []
    launch = SINGLE.bind(single(a, b, "nt", accumulation="split", arch=arch_of(CUDA)))
    launch(a, b)
    calls = launch.__self__  # type: ignore[attr-defined]
    ((prepared, _),) = calls.made.values()
    product = prepared.product
    assert product.scales == modes
    expected = exact(a, b, "nt")
    for candidate in lt.candidates(0, product):
        y = torch.empty(shape[:2], dtype=BF16, device=CUDA)
        scales = [calls.read_scales[i](x.scale_inv) for i, x in enumerate((a, b)) if modes[0]]
        addresses = [s.data_ptr() for s in scales] or [0, 0]
        data = [x.data if modes[0] else x for x in (a, b)]
        words = (*(x.data_ptr() for x in data), y.data_ptr(), *addresses, 0, 0, 0)
        lt.Prepared(0, product, candidate).run(words, torch.cuda.current_stream().cuda_stream)
        assert_no_worse(y, expected.bfloat16(), expected)
        products.append(y)
        assert lt.checked(0, product, candidate.algo) is not None
    assert products


def test_runs_are_identical_and_can_be_captured() -> None:
    for pair in ("dense", "hybrid", "1x128 x 1x128"):
        a, b = operands("tn", (512, 384, 1024), PAIRS[pair], device=CUDA)
        call = single(a, b, "tn", accumulation="split", arch=arch_of(CUDA))
        first = _launch(SINGLE, call, a, b)
        launch = SINGLE.bind(call)
        assert torch.equal(launch(a, b), first)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = launch(a, b)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, first)


def test_streams_do_not_share_scratch_memory() -> None:
    a, b = operands("tn", (128, 128, 65536), DENSE, device=CUDA)  # a split contraction
    launch = SINGLE.bind(single(a, b, "tn", arch=arch_of(CUDA)))
    expected = launch(a, b)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for stream in streams * 4:
        with torch.cuda.stream(stream):
            found.append(launch(a, b))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in found)


def test_threads_share_a_launch() -> None:
    pairs = [operands("nt", (64, 128, 256), FORMATS["current"], device=CUDA) for _ in range(4)]
    launch = SINGLE.bind(single(*pairs[0], "nt", accumulation="split", arch=arch_of(CUDA)))
    expected = [launch(a, b) for a, b in pairs]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y = launch(*pairs[i])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(y, expected[i]):
                    wrong.append(i)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_scratch_memory_is_given_back_and_made_again() -> None:
    REGISTRY.prepare("cuda")  # as every plan does: the backend says how its memory is given back
    a, b = operands("tn", (128, 128, 65536), DENSE, device=CUDA)
    launch = SINGLE.bind(single(a, b, "tn", arch=arch_of(CUDA)))
    expected = launch(a, b)
    te.free_workspaces()
    assert lt.release() == 0
    assert torch.equal(launch(a, b), expected)


@pytest.mark.parametrize("recipe", ["dense", "delayed", "current", "block"])
def test_main_grad_against_summed_gradients(recipe) -> None:
    def build(fused: bool) -> te.Sequential:
        torch.manual_seed(0)
        return te.Sequential(
            te.Linear(256, 512, device=CUDA, dtype=BF16, accumulate_into_main_grad=fused),
            te.GELU(),
            te.Linear(512, 256, device=CUDA, dtype=BF16, accumulate_into_main_grad=fused),
        )

    ours, theirs = build(True), build(False)
    for i in (0, 2):
        ours[i].weight.main_grad = torch.zeros_like(ours[i].weight, dtype=FP32)
    sums = {i: torch.zeros(ours[i].weight.shape, dtype=FP32, device=CUDA) for i in (0, 2)}
    for seed in range(3):
        for model in (ours, theirs):
            torch.manual_seed(seed)
            x = torch.randn(384, 256, device=CUDA, dtype=BF16, requires_grad=True)
            wanted = RECIPES[recipe]
            with te.autocast(enabled=wanted is not None, recipe=wanted):
                y = model(x)
            y.backward(torch.randn_like(y))
        for i, total in sums.items():
            total += theirs[i].weight.grad.float()
            theirs[i].weight.grad = None
    for i, total in sums.items():
        assert ours[i].weight.grad is None
        assert _error(ours[i].weight.main_grad, total.double()) < 4e-3
    with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        kernels = [s.kernel for s in ours.plan(x).backward]
    assert kernels.count("cublas.lt_gemm_accumulate") == 2


def test_tuning_measures_and_keeps_results_right(tmp_path: Path) -> None:
    model = te.Sequential(te.Linear(1024, 2048, bias=False, device=CUDA, dtype=BF16))
    x = torch.randn(512, 1024, device=CUDA, dtype=BF16, requires_grad=True)
    recipe = RECIPES["current"]
    with REGISTRY.temporary(*KERNELS, *DIRECT), te.autocast(recipe=recipe):
        before = model(x)
    report = te.tune(model, x, recipe=recipe, rounds=3)
    assert len(report.problems) == 3
    assert all(p.best is not None and 0 < p.best <= 1.001 * p.first for p in report.problems)
    with te.autocast(recipe=recipe):
        after = model(x)
    assert _error(after, before.double()) < FAST
    again = te.tune(model, x, recipe=recipe)
    assert all(p.best is None for p in again.problems)
    tuning.TABLE.forget()


@pytest.mark.parametrize(
    ("name", "recipes"),
    [
        ("cublas.lt_gemm", ("dense", "delayed", "current", "block")),
        ("cublas.lt_gemm_epilogue", ("dense", "current", "block")),
    ],
)
def test_plans_pass_the_public_check(name, recipes) -> None:
    model = te.Sequential(te.Linear(64, 64), te.GELU(), te.Linear(64, 130), te.Linear(130, 1))
    with REGISTRY.temporary(*KERNELS, *DIRECT):
        check_kernel(
            name,
            model,
            (8, 64),
            rows=(8, 7, 1, 50, 0),
            dtypes=(BF16,),
            recipes=recipes,
            device="cuda",
            factor=2.5,  # fast sums of the forward pass add to a rounding to BF16
        )


def test_a_main_grad_inside_a_flat_buffer_that_is_not_on_16_bytes() -> None:
    ours = te.Linear(256, 512, bias=False, device=CUDA, dtype=BF16, accumulate_into_main_grad=True)
    plain = te.Linear(256, 512, bias=False, device=CUDA, dtype=BF16)
    plain.load_state_dict(ours.state_dict())
    flat = torch.zeros(256 * 512 + 1, dtype=FP32, device=CUDA)
    ours.weight.main_grad = flat[1:].view(512, 256)
    for _ in range(5):  # launched, then recorded and issued again
        x = torch.randn(384, 256, device=CUDA, dtype=BF16)
        ours(x).sum().backward()
        plain(x).sum().backward()
    assert _error(ours.weight.main_grad, plain.weight.grad.double()) < 2e-2
    assert not flat[0]
