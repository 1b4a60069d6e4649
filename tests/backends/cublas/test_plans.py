"""Whole plans: the CPU stands for Hopper, and the library checks what it is given."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

import te_ops as te
from te_ops.backends.cublas import DIRECT, KERNELS
from te_ops.registry import REGISTRY
from te_ops.runtime import cache
from te_ops.runtime import tune as tuning
from te_ops.testing import assert_close, check_kernel
from te_ops.testing.cases import RECIPES
from tests.backends.cublas.fakelt import FakeLt
from tests.backends.cublas.library import Library


@pytest.fixture
def hopper(library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.setattr(cache, "arch_of", lambda device: "sm_90")
    with REGISTRY.without("cuda."), REGISTRY.temporary(*KERNELS):
        yield library


def _model(features: int = 48) -> te.Sequential:
    return te.Sequential(
        te.Linear(50, 32, dtype=torch.bfloat16),
        te.GELU(),
        te.Linear(32, features, dtype=torch.bfloat16),
    )


def _step(model: te.Sequential, rows: int, recipe: te.Recipe | None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(rows, 50).bfloat16().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(torch.randn_like(y))
    return [y, x.grad, *(p.grad for p in model.parameters())]


def _kernels(model: te.Sequential, rows: int, recipe: te.Recipe | None) -> list[str]:
    x = torch.zeros(rows, 50).bfloat16().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        (segment,) = model.plan(x).segments
    steps = (*segment.forward_steps, *segment.backward_steps)
    return [s.kernel for s in steps if any("gemm" in n for n in s.nodes)]


TAKEN = {
    "dense": "cublas.gemm",
    "delayed": "cublas.gemm",
    "current": "cublas.gemm",
    "block": "cublas.gemm",
    "mxfp8": "cublas.emulated",
    "nvfp4": "cublas.emulated",
}


@pytest.mark.parametrize("rows", [0, 1, 7, 24, 50])
@pytest.mark.parametrize(
    "recipe", [r for r in TAKEN if r != "nvfp4"]
)  # 4 bits move too far to compare
def test_a_step_is_the_references(hopper, recipe, rows) -> None:
    model = _model()
    twin = copy.deepcopy(model)
    ours = _step(model, rows, RECIPES[recipe])
    assert not rows or len(hopper.calls) >= 5  # a first input's gradient is a GEMM too
    with REGISTRY.temporary():
        for kernel in KERNELS:
            REGISTRY.remove(kernel.name)
        theirs = _step(twin, rows, RECIPES[recipe])
    for a, b in zip(ours, theirs, strict=True):
        # A rounding to BF16 that differs moves codes of what is quantized next.
        assert_close(a, b, terms=50, roundings=40)


@pytest.mark.parametrize("recipe", TAKEN)
def test_every_gemm_of_a_plan_is_taken(hopper, recipe) -> None:
    kernels = _kernels(_model(), 24, RECIPES[recipe])
    assert len(kernels) == 6
    assert set(kernels) <= {TAKEN[recipe], "cublas.gemm_epilogue"}
    biased = TAKEN[recipe] == "cublas.gemm"
    assert ("cublas.gemm_epilogue" in kernels) is biased


def test_one_column_is_filled_up(hopper) -> None:
    model = _model(features=1)
    recipe = RECIPES["current"]
    y, *_ = _step(model, 7, recipe)
    assert y.shape == (7, 1)
    assert all(c["b"].shape[1] % 16 == 0 for c in hopper.named("_scaled_mm"))


def test_master_weights_get_fp32_gradients_from_the_gemm(hopper) -> None:
    model = te.Sequential(te.Linear(48, 32, bias=False))
    x = torch.randn(24, 48)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.backward(torch.randn_like(y))
    assert model[0].weight.grad.dtype is torch.float32
    assert [c["out_dtype"] for c in hopper.named("mm")][-1] is torch.float32


def test_accumulation_is_fast_forward_and_split_backward(hopper) -> None:
    _step(_model(), 16, RECIPES["current"])
    assert [c["fast"] for c in hopper.named("_scaled_mm")].count(True) == 2


@pytest.mark.parametrize(
    ("name", "recipes", "dtypes"),
    [
        ("cublas.gemm", ("dense",), (torch.float32, torch.bfloat16)),
        ("cublas.gemm", ("current", "block"), (torch.float32, torch.bfloat16)),
        ("cublas.gemm_epilogue", ("dense", "delayed", "block"), (torch.bfloat16,)),
        ("cublas.emulated", ("mxfp8", "nvfp4"), (torch.bfloat16,)),
    ],
)
def test_the_public_check_passes(hopper, name, recipes, dtypes) -> None:
    check_kernel(
        name, _model(), (8, 50), recipes=recipes, dtypes=dtypes, rows=(8, 7, 0), device="cpu"
    )


# -- through cuBLASLt itself


@pytest.fixture
def driven(
    library: Library, lt_library: FakeLt, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeLt]:
    monkeypatch.setattr(cache, "arch_of", lambda device: "sm_90")
    with REGISTRY.without("cuda."), REGISTRY.temporary(*KERNELS, *DIRECT):
        yield lt_library


@pytest.mark.parametrize("recipe", ["dense", "delayed", "current", "block"])
def test_the_library_itself_is_preferred(driven, recipe) -> None:
    kernels = _kernels(_model(), 24, RECIPES[recipe])
    assert set(kernels) == {"cublas.lt_gemm", "cublas.lt_gemm_epilogue"}


@pytest.mark.parametrize("rows", [0, 1, 7, 24, 64])
@pytest.mark.parametrize("recipe", ["dense", "delayed", "current", "block"])
def test_a_driven_step_is_the_references(driven, library, recipe, rows) -> None:
    model = te.Sequential(
        te.Linear(64, 32, dtype=torch.bfloat16),
        te.GELU(),
        te.Linear(32, 48, dtype=torch.bfloat16),
    )
    twin = copy.deepcopy(model)
    ours = _wide_step(model, rows, RECIPES[recipe])
    assert driven.calls or rows < 24
    assert driven.calls or library.calls or not rows
    with REGISTRY.temporary():
        for kernel in (*KERNELS, *DIRECT):
            REGISTRY.remove(kernel.name)
        theirs = _wide_step(twin, rows, RECIPES[recipe])
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, terms=64, roundings=40)


@pytest.mark.parametrize("rows", [7, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", ["dense", "delayed", "current"])
def test_a_residual_is_added_in_the_gemm(driven, recipe, bias, rows) -> None:
    """The sum, and what follows it, read it no more than once: in the epilogue of the product."""
    model = te.Sequential(
        te.Residual(te.GELU(), te.Linear(64, 64, dtype=torch.bfloat16, bias=bias)),
        te.RMSNorm(64, dtype=torch.bfloat16),
        te.Linear(64, 32, dtype=torch.bfloat16, bias=False),
    )
    twin = copy.deepcopy(model)
    x = torch.zeros(rows, 64).bfloat16().requires_grad_()
    with te.autocast(enabled=recipe != "dense", recipe=RECIPES[recipe]):
        (segment,) = model.plan(x).segments
    (fused,) = [s for s in segment.forward_steps if s.kernel == "cublas.lt_gemm_epilogue"]
    assert [n.partition("(")[0] for n in fused.nodes] == [
        "gemm_nt",
        "bias + add" if bias else "add",
    ]
    assert not [s for s in segment.forward_steps if s.nodes == ("add",)]
    ours = _wide_step(model, rows, RECIPES[recipe])
    assert [c["beta"] for c in driven.calls].count(1.0) == 1
    with REGISTRY.temporary():
        for kernel in (*KERNELS, *DIRECT):
            REGISTRY.remove(kernel.name)
        theirs = _wide_step(twin, rows, RECIPES[recipe])
    for a, b in zip(ours, theirs, strict=True):  # one rounding less moves codes of what follows
        assert (a - b).norm() <= 0.03 * b.norm()


def _wide_step(model: te.Sequential, rows: int, recipe: te.Recipe | None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(rows, 64).bfloat16().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(torch.randn_like(y))
    grads = [p.grad if p.grad is not None else p.main_grad for p in model.parameters()]
    return [y, x.grad, *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["dense", "delayed", "current", "block"])
def test_main_grad_is_added_to_in_the_gemm(driven, recipe, dtype) -> None:
    torch.manual_seed(0)
    model = te.Sequential(
        te.Linear(64, 32, dtype=torch.bfloat16, accumulate_into_main_grad=True),
        te.GELU(),
        te.Linear(32, 48, dtype=torch.bfloat16, accumulate_into_main_grad=True),
    )
    twin = copy.deepcopy(model)
    for m in (model, twin):
        for i in (0, 2):
            m[i].weight.main_grad = torch.full_like(m[i].weight, 0.5, dtype=dtype)
    ours = [_wide_step(model, 64, RECIPES[recipe]) for _ in range(2)][-1]
    added = [c for c in driven.calls if c["beta"]]
    assert [c["dtype"] for c in added] == [dtype] * 4
    assert {c["d"] for c in added} == {model[i].weight.main_grad.data_ptr() for i in (0, 2)}
    with REGISTRY.temporary():
        for kernel in (*KERNELS, *DIRECT):
            REGISTRY.remove(kernel.name)
        theirs = [_wide_step(twin, 64, RECIPES[recipe]) for _ in range(2)][-1]
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, terms=64, roundings=40)


def test_tuning_picks_among_the_librarys_algorithms(driven, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "_times", lambda runs, rounds: [_run(r) for r in runs])
    model, x = _model(), torch.randn(16, 64).bfloat16().requires_grad_()
    model = te.Sequential(te.Linear(64, 32, dtype=torch.bfloat16))
    y = model(x)
    assert driven.calls[-1]["algo"] == 1
    recipe = RECIPES["current"]
    for wanted in (None, recipe):
        report = te.tune(model, x, recipe=wanted)
        assert len(report.problems) == 3
        assert {p.candidates for p in report.problems} == {3}
        driven.calls.clear()
        with te.autocast(enabled=wanted is not None, recipe=wanted):
            y = model(x)
        y.sum().backward()
        assert [c["algo"] for c in driven.calls] == [3, 3, 3]


def _run(run) -> float:
    """The stand-in's algorithms cost the less the higher their number."""
    run()
    run()
    (prepared,) = (c.cell_contents for c in run.__closure__ if hasattr(c.cell_contents, "chosen"))
    return 10.0 - prepared.chosen.algo[0]
