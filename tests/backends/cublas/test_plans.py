"""Whole plans: the CPU stands for Hopper, and the library checks what it is given."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

import te_ops as te
from te_ops.backends.cublas import KERNELS
from te_ops.registry import REGISTRY
from te_ops.runtime import cache
from te_ops.testing import assert_close, check_kernel
from te_ops.testing.cases import RECIPES
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
