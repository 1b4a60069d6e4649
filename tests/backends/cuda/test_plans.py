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

pytestmark = pytest.mark.usefixtures("on_the_host")

RECIPES = {
    "dense": (
        None,
        {"cuda.pointwise", "cuda.pointwise_together", "cuda.rmsnorm"},
    ),
    "delayed": (
        recipe.DelayedScaling(),
        {"cuda.norm_quantize", "cuda.pointwise_together", "cuda.quantize_together"},
    ),
    "current": (
        recipe.Float8CurrentScaling(),
        {"cuda.quantize_together", "cuda.pointwise_together_rounded"},
    ),
    "block": (
        recipe.Float8BlockScaling(),
        {
            "cuda.norm_quantize",
            "cuda.pointwise_quantize_rounded",
            "cuda.pointwise_together_rounded",
        },
    ),
}


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


def planned(made: Any, model: te.Op, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plan that sm_90 gets; nothing is compiled."""
    monkeypatch.setattr(cache, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(launch, "build", lambda *_, **__: lambda *_: None)
    kernels_here = [replace(k, available=lambda: None) for k in KERNELS]
    with REGISTRY.without("cublas."), REGISTRY.temporary(*kernels_here), te.autocast(recipe=made):
        return model.plan(x)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_large_mlp_makes_each_byte_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters over the size of a segment: the gradient of the activation is quantized where it is made, and the
    transposed copy of the activation is made there too."""
    with torch.device("meta"):
        model = te.Sequential(
            te.RMSNorm(2048), te.Linear(2048, 14336, bias=False), te.SwiGLU(),
            te.Linear(7168, 2048, bias=False),
        ).bfloat16()  # fmt: skip
        x = torch.empty(256, 2048, dtype=torch.bfloat16, requires_grad=True)
    made, _ = RECIPES[name]
    plan = planned(made, model, x, monkeypatch)
    (segment,) = plan.segments
    steps = [s for s in segment.backward_steps if s.name.startswith("pointwise")]
    assert len(steps) == 1
    assert [n.partition("(")[0] for n in steps[0].nodes] == [
        "swiglu", "quantize", "dswiglu", "quantize",
    ]  # fmt: skip
    assert [s.name for s in segment.forward_steps].count("quantize_together") == 1
    assert not any("swiglu" in s.value and s.format == "bfloat16" for s in segment.saved_values)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [("delayed", "pointwise_together"), ("block", "pointwise_together_rounded")],
)
def test_a_bias_gradient_costs_no_pass(
    name: str, gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = te.Sequential(te.Linear(64, 128), te.GELU(), te.Linear(128, 64)).bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    plan = planned(RECIPES[name][0], model, x, monkeypatch)
    steps = [s for s in plan.segments[0].backward_steps if s.kernel.startswith("cuda.")]
    assert [s.name for s in steps] == ["reduce_quantize", gradient]
