"""`te.step`, `te.warmup`, `te.free_workspaces`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.registry import REGISTRY, Kernel
from te_ops.runtime.cache import CACHE
from te_ops.runtime.state import registered
from tests.runtime.cases import RECIPES, assert_same, mlp, state, step


def test_kernels_that_wait_take_effect_at_a_step_boundary() -> None:
    (plain,) = REGISTRY.kernels("*")
    used: list[str] = []

    def bind(call):  # type: ignore[no-untyped-def]
        used.append(call.node.prim.name)
        return plain.bind(call)

    model, x = te.GELU(), torch.randn(3, 8)
    with REGISTRY.temporary():
        before = REGISTRY.version
        model(x)
        REGISTRY.later(replace(plain, runs="pointwise", name="waiting", priority=500, bind=bind))
        model(x)
        assert REGISTRY.version == before
        assert not used
        assert te.step() == 1
        assert te.step() == 0
        model(x)
        assert used
        assert isinstance(REGISTRY.find("waiting"), Kernel)


@pytest.mark.parametrize("name", RECIPES)
def test_warmup_plans_and_changes_nothing(name: str) -> None:
    model = te.Sequential(mlp(), te.Dropout(0.25))
    before = state(model)
    torch.manual_seed(3)
    rng = torch.get_rng_state()
    xs = [torch.randn(16, 32), torch.randn(4, 5, 32)]
    torch.set_rng_state(rng)
    with te.autocast(enabled=name != "none", recipe=RECIPES[name]):
        te.warmup(model, *(x.requires_grad_() for x in xs))
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())
    assert all(x.grad is None for x in xs)
    after = state(model)
    assert_same({k: after[k] for k in before}, before)
    assert all(not s.amax_history.any() for s in registered() if s.maker is None)
    built = CACHE.built
    for x in xs:
        step(model, x, RECIPES[name])
    assert CACHE.built == built or name == "none"  # without a recipe, step() opens no autocast


def test_warmup_takes_modules_with_several_arguments() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor, by: float, y: torch.Tensor) -> torch.Tensor:
            return self.body(x) * by + y

    te.warmup(Block(), (torch.randn(4, 32), 2.0, torch.randn(4, 32)))
    te.warmup(te.make_graphed(mlp()), torch.randn(4, 32))
    with torch.no_grad():
        te.warmup(mlp(), torch.randn(4, 32))


def test_warmup_without_tensors_is_refused() -> None:
    with pytest.raises(te.PlanError, match="at least one sample"):
        te.warmup(mlp())
    with pytest.raises(te.PlanError, match="needs a tensor"):
        te.warmup(mlp(), (1, 2))
    with pytest.raises(te.PlanError, match="1 more input given"):
        te.warmup(te.Sequential(te.GELU()), (torch.randn(2, 2), torch.randn(2, 2)))


def test_free_workspaces_calls_every_backend_and_can_be_called_again() -> None:
    called: list[str] = []
    saved = dict(REGISTRY._releases)
    try:
        REGISTRY.on_release("test", lambda: called.append("first"))
        REGISTRY.on_release("test", lambda: called.append("second"))
        te.free_workspaces()
        te.free_workspaces()
    finally:
        REGISTRY._releases = saved
    assert called == ["second", "second"]
    model = mlp()
    x = torch.randn(4, 32)
    y = model(x)
    te.free_workspaces()
    assert torch.equal(model(x), y)


def test_warmup_refuses_what_it_cannot_do() -> None:
    x = torch.randn(4, 32)
    with pytest.raises(te.PlanError, match="takes a module, got a str"):
        te.warmup("model", x)  # type: ignore[arg-type]
    with pytest.raises(te.PlanError, match="passes must be a positive number, got 0"):
        te.warmup(mlp(), x, passes=0)
    model = te.Sequential(te.Linear(32, 32, accumulate_into_main_grad=True))
    model[0].weight.main_grad = torch.zeros(32, 32)
    with pytest.raises(te.PlanError, match=r"warmup: 0 adds gradients to main_grad"):
        te.warmup(model, x)
    with torch.no_grad():
        te.warmup(model, x)
    assert not model[0].weight.main_grad.any()
