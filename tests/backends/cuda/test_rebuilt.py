"""What backward rebuilds beside a gradient instead of reading it: the plan, its bytes, the bytes of the values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.cuda import KERNELS, launch, together
from te_ops.registry import REGISTRY
from te_ops.runtime import cache
from tests.layers.test_plans import HIDDEN, RECIPES, layer, saved, transformer_engine


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "arch_of", lambda device: "sm_90")


def kernels_here() -> Any:
    """The CUDA kernels and no other library's."""
    here = [replace(k, available=lambda: None) for k in KERNELS]
    return REGISTRY.without("cublas.", "cudnn.", "sdpa."), REGISTRY.temporary(*here)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("recipe", "share"), [("delayed", 0.849), ("block", 0.852)])
def test_a_layer_does_not_keep_its_activation(
    recipe: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that computes dSwiGLU rebuilds h and writes its column copy, whatever the format's tiles."""
    monkeypatch.setattr(launch, "build", lambda *_, **__: None)  # it is planned, not run
    x = torch.empty(2, 64, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    without, kernels = kernels_here()
    with without, kernels, te.autocast(recipe=RECIPES[recipe]):
        plan = layer().plan(x).to_dict()
    kept = saved(plan)
    kept.pop("rope_table0")
    assert sum(kept.values()) / transformer_engine(2 * 64) == pytest.approx(share, abs=2e-3)
    (step,) = (s for s in plan["segments"][0]["backward"] if "dswiglu" in s["nodes"])
    assert step["kernel"].startswith("cuda.pointwise_together")
    assert "swiglu" in step["nodes"]


def step() -> tuple[int, list[torch.Tensor]]:
    """Bytes that are saved; the output and all gradients."""
    torch.manual_seed(0)
    model = te.Sequential(
        te.Linear(128, 512, bias=False), te.SwiGLU(), te.Linear(256, 128, bias=False)
    ).bfloat16()
    x = torch.randn(150, 128).bfloat16().requires_grad_()
    without, kernels = kernels_here()
    with without, kernels, te.autocast(recipe=te.recipe.Float8BlockScaling()):
        y = model(x)
        count = model.plan(x).saved_bytes
        y.backward(torch.randn(150, 128).bfloat16())
    assert x.grad is not None
    return count, [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("on_the_host", "hopper")
def test_the_copies_are_those_that_would_have_been_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer, rebuilt = step()
    monkeypatch.setattr(together, "_refuse_tiles", lambda *_: "not here")
    more, kept = step()
    assert more - fewer == 256 * 150 + 4 * 256 * 2  # codes of h, scales of two blocks a column
    assert all(torch.equal(a, b) for a, b in zip(rebuilt, kept, strict=True))
