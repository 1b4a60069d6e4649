"""Activations that cache their input, on emulated kernels: nothing but products is left to the reference."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.cuda import KERNELS
from te_ops.registry import REGISTRY
from te_ops.runtime import cache

pytestmark = pytest.mark.usefixtures("on_the_host")

RECIPES: dict[str, te.Recipe | None] = {
    "none": None,
    "delayed": te.recipe.DelayedScaling(),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
}
ACTIVATIONS = {
    "swiglu": lambda: te.SwiGLU(cache_quantized_input=True),
    "swiglu, interleaved": lambda: te.SwiGLU(32, cache_quantized_input=True),
    "gelu": lambda: te.GELU(cache_quantized_input=True),
}
CASES = (
    ("swiglu", "none"),
    ("swiglu", "block"),
    ("swiglu, interleaved", "delayed"),
    ("gelu", "current"),
)


def step(
    model: te.Sequential, recipe: te.Recipe | None
) -> tuple[list[torch.Tensor], dict[str, list[dict[str, Any]]]]:
    torch.manual_seed(1)
    x, dy = (torch.randn(3, 11, 128).bfloat16() for _ in range(2))
    for _ in range(2):  # delayed scaling has its scales at the second
        model.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(leaf)
            (segment,) = model.plan(leaf).to_dict()["segments"]
        y.backward(dy)
    assert leaf.grad is not None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), leaf.grad, *grads], {way: segment[way] for way in ("forward", "backward")}


@pytest.mark.parametrize(("activation", "name"), CASES)
def test_a_training_step(activation: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    inner = 128 if "swiglu" in activation else 256
    model = te.Sequential(
        te.RMSNorm(128), te.Linear(128, 256), ACTIVATIONS[activation](), te.Linear(inner, 128)
    ).bfloat16()
    theirs, _ = step(copy.deepcopy(model), RECIPES[name])
    monkeypatch.setattr(cache, "arch_of", lambda device: "sm_90")
    here = [replace(k, available=lambda: None) for k in KERNELS]
    with REGISTRY.without("cublas.", "cudnn.", "sdpa."), REGISTRY.temporary(*here):
        ours, steps = step(model, RECIPES[name])
    for a, b in zip(ours, theirs, strict=True):
        limit = (
            3e-2 if name == "none" else 0.1
        )  # fused kernels round an inner value less: codes differ by one
        assert (a.float() - b.float()).norm() <= limit * b.float().norm()
    kernels = {s["name"]: s["kernel"] for way in steps.values() for s in way}
    assert {n for n, kernel in kernels.items() if kernel.startswith("reference")} == {"gemm"}
    (made,) = [s for s in steps["forward"] if "bias" in s["nodes"] and s["name"] != "pointwise"]
    assert made["kernel"] == "cuda.pointwise_quantize", "the record is made where x is written"
    names = [s["name"] for s in steps["backward"]]
    assert names.count("dequantize") == 1
    assert names[names.index("dequantize") + 1].startswith("pointwise"), (
        "x is dense for one step only"
    )
