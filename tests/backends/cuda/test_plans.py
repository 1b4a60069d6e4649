"""Whole plans on emulated kernels: the planner picks them, and a training step gives what the reference gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import recipe
from te_ops.backends.cuda import KERNELS, launch
from te_ops.registry import REGISTRY
from te_ops.runtime import cache
from tests.backends.cuda import emulator

pytestmark = pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")

RECIPES = {
    "dense": (None, {"cuda.pointwise", "cuda.rmsnorm", "cuda.rmsnorm_backward"}),
    "delayed": (recipe.DelayedScaling(), {"cuda.norm_quantize", "cuda.pointwise_quantize"}),
    "current": (recipe.Float8CurrentScaling(), {"cuda.quantize", "cuda.rmsnorm"}),
    "block": (recipe.Float8BlockScaling(), {"cuda.norm_quantize", "cuda.pointwise_quantize"}),
}


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "build", emulator.build)
    monkeypatch.setattr(launch, "zero_word", emulator.zero_word)


def step(made: Any) -> tuple[list[torch.Tensor], set[str]]:
    torch.manual_seed(0)
    model = te.Sequential(
        te.RMSNorm(128), te.Linear(128, 512), te.SwiGLU(), te.Linear(256, 128, bias=False)
    ).bfloat16()
    x = torch.randn(3, 11, 128, dtype=torch.bfloat16)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        given = x.clone().requires_grad_()
        with te.autocast(enabled=made is not None, recipe=made):
            y = model(given)
            plan = model.plan(given).to_dict()
        y.backward(torch.ones_like(y))
    kernels = {
        s["kernel"]
        for part in plan["segments"]
        for phase in ("forward", "backward")
        for s in part[phase]
    }
    assert given.grad is not None
    return [
        y.detach(),
        given.grad,
        *(p.grad for p in model.parameters() if p.grad is not None),
    ], kernels


@pytest.mark.parametrize("name", RECIPES)
def test_a_training_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, expected = RECIPES[name]
    theirs, _ = step(made)
    monkeypatch.setattr(cache, "arch_of", lambda device: "sm_90")
    # Emulated kernels need no NVRTC.
    kernels_here = [replace(k, available=lambda: None) for k in KERNELS]
    with REGISTRY.without("cublas."), REGISTRY.temporary(*kernels_here):
        ours, kernels = step(made)
    assert kernels >= expected
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm()
