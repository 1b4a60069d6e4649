"""Fused GEMMs on a device: every kernel row against its group's reference, whole steps, row counts, capture, tuning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import recipe
from te_ops.backends.cutlass import choices, runtime
from te_ops.runtime import tune as tuning
from te_ops.runtime.cache import arch_of
from te_ops.testing import check_kernel

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16
DELAYED, CURRENT = recipe.DelayedScaling(), recipe.Float8CurrentScaling()


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reason = runtime.missing()
    if reason is None and arch_of(CUDA) != "sm_90":
        reason = f"the kernels are for sm_90, this is {arch_of(CUDA)}"
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("TE_OPS_JIT", "sync")
    monkeypatch.setenv("TE_OPS_TUNE_CACHE", str(tmp_path / "tune"))
    tuning.TABLE.forget()


@te.pointwise
def softcap(x: Any, cap: float) -> Any:
    """An op of a user's own."""
    return cap * te.math.tanh(x / cap)


def gelu(own: Callable[[], te.Op] = te.GELU) -> te.Sequential:
    return te.Sequential(te.Linear(64, 96), own(), te.Linear(96, 64))


def gated() -> te.Sequential:
    return te.Sequential(
        te.RMSNorm(64), te.Linear(64, 256, bias=False), te.SwiGLU(), te.Linear(128, 64, bias=False)
    )


MODELS: dict[str, Callable[[], te.Sequential]] = {
    "gelu": gelu,
    "own": lambda: gelu(lambda: softcap(cap=3.0)),
    "swiglu": gated,
}
ROWS: dict[str, tuple[str, list[Any], tuple[int, ...]]] = {
    "gemm": ("gelu", ["dense", "current"], (8, 5, 160, 1, 0)),
    "gemm_epilogue": ("gelu", ["dense"], (8, 5, 300, 1, 0)),
    "gemm_epilogue own": ("own", ["dense"], (8, 5, 300)),
    "gemm_epilogue gated": ("swiglu", ["dense", DELAYED], (16, 304, 0)),
    "gemm_epilogue_together": ("gelu", ["dense", DELAYED], (16, 304, 0)),
    "gemm_epilogue_together gated": ("swiglu", [DELAYED], (16, 304, 0)),
    "gemm_epilogue_rounded": ("gelu", ["current"], (16, 304)),
    "gemm_epilogue_rounded gated": ("swiglu", ["current"], (16, 304)),
}


@pytest.mark.parametrize("case", ROWS)
def test_kernels_equal_the_reference_of_their_group(case: str) -> None:
    model, recipes, rows = ROWS[case]
    with choices.forced("prefer"):
        assert check_kernel(
            f"cutlass.{case.split()[0]}", MODELS[model](), (16, 64), rows=rows, dtypes=(BF16,),
            recipes=recipes,
        )  # fmt: skip


def step(model: te.Op, x: torch.Tensor, made: te.Recipe | None) -> list[torch.Tensor]:
    """Results and gradients of the second of two steps."""
    model = copy.deepcopy(model)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        x = x.detach().requires_grad_()
        with te.autocast(enabled=made is not None, recipe=made):
            y = model(x)
        y.backward(torch.ones_like(y))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("made", [None, DELAYED, CURRENT], ids=["dense", "delayed", "current"])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_equals_that_of_separate_kernels(name: str, made: te.Recipe | None) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(CUDA).bfloat16()
    x = torch.randn(2, 160, 64, device=CUDA, dtype=BF16)
    results = {}
    for mode in ("off", "prefer"):
        with choices.forced(mode):
            results[mode] = step(model, x, made)
    for a, b in zip(results["prefer"], results["off"], strict=True):
        assert (a.float() - b.float()).norm() <= 3e-2 * b.float().norm()


def test_gradients_are_added_to_main_grad() -> None:
    made = te.Sequential(te.Linear(64, 128, bias=False, accumulate_into_main_grad=True))
    made = made.to(CUDA).bfloat16()
    x = torch.randn(160, 64, device=CUDA, dtype=BF16)
    totals = []
    for mode in ("off", "prefer"):
        model = copy.deepcopy(made)  # a call of delayed scaling leaves its scales to the next
        weight: Any = model[0].weight
        weight.main_grad = torch.ones(128, 64, device=CUDA)
        with choices.forced(mode), te.autocast(recipe=DELAYED):
            y = model(x)
        y.sum().backward()
        totals.append(weight.main_grad)
    assert (totals[0] - totals[1]).norm() <= 1e-2 * totals[0].norm()


def test_a_run_time_number_reaches_the_kernel() -> None:
    """`te.scalar` lives on the host."""
    cap = te.scalar(3.0)
    model = (
        te.Sequential(te.Linear(64, 96), softcap(cap=cap), te.Linear(96, 64)).to(CUDA).bfloat16()
    )
    x = torch.randn(160, 64, device=CUDA, dtype=BF16)
    for number in (3.0, 0.25):
        cap.set(number)
        results = {}
        for mode in ("off", "prefer"):
            with choices.forced(mode):
                results[mode] = model(x)
        assert (results["prefer"] - results["off"]).norm() <= 3e-2 * results["off"].norm()


@pytest.mark.parametrize("place", ["transposed", "not on 16 bytes"])
def test_a_main_grad_lies_as_it_likes(place: str) -> None:
    model = te.Sequential(te.Linear(64, 128, bias=False, accumulate_into_main_grad=True))
    model = model.to(CUDA).bfloat16()
    weight: Any = model[0].weight
    turned = torch.ones(64, 128, device=CUDA).t()
    shifted = torch.ones(128 * 64 + 1, device=CUDA)[1:].view(128, 64)
    weight.main_grad = turned if place == "transposed" else shifted
    x = torch.randn(160, 64, device=CUDA, dtype=BF16)
    with choices.forced("prefer"):
        model(x).sum().backward()
    wanted = 1 + x.float().sum(0).expand(128, 64)
    assert (weight.main_grad - wanted).norm() <= 1e-2 * wanted.norm()


def test_nan_and_infinity_are_not_hidden() -> None:
    model = gelu().to(CUDA).bfloat16()
    x = torch.randn(32, 64, device=CUDA, dtype=BF16)
    x[3, 5] = float("nan")
    for mode in ("off", "prefer"):
        with choices.forced(mode), te.autocast(recipe=DELAYED), torch.no_grad():
            y = model(x)
        assert y[3].isnan().all()
        assert y[:3].isfinite().all()


def test_a_captured_step_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    with choices.forced("prefer"):
        model = gated().to(CUDA).bfloat16()
        x = torch.randn(160, 64, device=CUDA, dtype=BF16, requires_grad=True)
        wanted = model(x).detach()
        graphed = te.make_graphed(model, (x,))
        assert torch.equal(graphed(x), wanted)


def test_tuning_measures_fused_and_separate() -> None:
    model = gelu().to(CUDA).bfloat16()
    x = torch.randn(256, 64, device=CUDA, dtype=BF16, requires_grad=True)
    report = te.tune(model, x, recipe=DELAYED, rounds=2)
    found = [p for p in report.problems if "->" in p.key]
    assert found
    assert all(p.candidates > 1 for p in found)
