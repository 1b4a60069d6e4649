"""Recompute never differs in silence (core contract 6, numerics 8)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_ops as te
from te_ops.backends.reference.kernels import bind_composed
from te_ops.registry import REGISTRY, Call, Kernel, Launch
from tests.runtime.cases import RECIPES, assert_same, gradients, mlp, state, twin

WHERE = ("inside", "outside", "thread")
# Only a state can make a difference: after the region's exit its scales are others.
REFUSED = {("nonreentrant", "outside"), ("nonreentrant", "thread")}


def via_torch(reentrant: bool) -> Callable[[te.Op], Callable[[Tensor], Tensor]]:
    return lambda model: lambda x: torch_checkpoint(model, x, use_reentrant=reentrant)


WAYS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "reentrant": via_torch(True),
    "nonreentrant": via_torch(False),
    "te_recompute": lambda model: te.Recompute(model),
    "te_checkpoint": lambda model: lambda x: te.checkpoint(model, x),
}


def backward(loss: Tensor, where: str, recipe: te.Recipe | None) -> None:
    if where == "inside":
        loss.backward()
        return
    if where == "outside":
        loss.backward()
        return
    failed: list[BaseException] = []

    def work() -> None:
        try:
            loss.backward()
        except Exception as error:  # noqa: BLE001  (raised again below)
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def train(
    model: nn.Module, run: Callable[[Tensor], Tensor], recipe: te.Recipe | None, where: str
) -> list[dict[str, Tensor]]:
    """Three steps; after each its output and gradients, at the end the state."""
    seen = []
    for i in range(3):
        torch.manual_seed(i)
        x = (1 + i) * torch.randn(32, 32)
        x.requires_grad_()
        model.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = run(x)
            weights = torch.linspace(-1.0, 1.0, y.numel()).reshape(y.shape)
            if where == "inside":
                backward((y * weights).sum(), where, recipe)
        if where != "inside":
            backward((y * weights).sum(), where, recipe)
        assert x.grad is not None
        seen.append({"y": y.detach(), "x": x.grad} | gradients(model))
    seen.append(state(model))
    return seen


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_matrix(recipe: str, way: str, where: str) -> None:
    model = te.Sequential(mlp(), te.Dropout(0.25), te.Linear(32, 32))
    other = twin(model)
    want = train(model, model, RECIPES[recipe], where)
    wrapped = WAYS[way](other)
    refused = pytest.raises(te.RecipeError, match=r"te\.checkpoint")
    if recipe == "delayed" and (way == "reentrant" or (way, where) in REFUSED):
        with refused:
            train(other, wrapped, RECIPES[recipe], where)
        return
    outcome = train(other, wrapped, RECIPES[recipe], where)
    for a, b in zip(want, outcome, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("way", ["te_recompute", "te_checkpoint"])
@pytest.mark.parametrize("where", WHERE)
def test_our_checkpoints_work_with_state(way: str, where: str) -> None:
    model = te.Sequential(mlp(), te.Linear(32, 32))
    other = twin(model)
    recipe = te.recipe.DelayedScaling(amax_history_len=3)
    want = train(model, model, recipe, where)
    for a, b in zip(want, train(other, WAYS[way](other), recipe, where), strict=True):
        assert_same(a, b)


def test_recompute_in_the_middle() -> None:
    inner = te.Sequential(te.Linear(32, 64), te.GELU(), te.Linear(64, 32))
    plain = te.Sequential(te.RMSNorm(32), inner, te.Linear(32, 32))
    other = twin(plain)
    other[1] = te.Recompute(*other[1])
    for name in RECIPES:
        recipe = RECIPES[name]
        want, got = train(plain, plain, recipe, "outside"), train(other, other, recipe, "outside")
        for a, b in zip(want[:-1], got[:-1], strict=True):
            assert_same(a, b)


def test_recompute_saves_only_its_input() -> None:
    layers = [te.Linear(16, 64), te.GELU(), te.Linear(64, 16)]
    plain, again = (
        te.Sequential(*layers, te.Linear(16, 16)),
        te.Sequential(te.Recompute(*layers), te.Linear(16, 16)),
    )
    x = torch.randn(64, 16, requires_grad=True)
    assert again.plan(x).saved_bytes < plain.plan(x).saved_bytes / 2
    assert {s.bytes for seg in again.plan(x).segments for s in seg.saved_values} == {64 * 16 * 4}


def test_recompute_observes_once() -> None:
    recipe = te.recipe.DelayedScaling(amax_history_len=4)
    model = te.Sequential(te.Linear(32, 32), te.Recompute(te.Linear(32, 32)))
    x = torch.randn(32, 32)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = model(x)
        y.sum().backward()
    history = model.state_dict()["1.0.quantizer.delayed.input.amax_history"]
    assert int((history > 0).sum()) == 2


def test_nested_checkpoints() -> None:
    model = te.Sequential(*(te.Sequential(te.Linear(32, 32), te.GELU()) for _ in range(3)))
    other = twin(model)

    def nested(x: Tensor) -> Tensor:
        return te.checkpoint(
            lambda t: te.checkpoint(other[2], te.checkpoint(other[1], other[0](t))), x
        )

    recipe = te.recipe.DelayedScaling(amax_history_len=3)
    want = train(model, lambda x: model[2](model[1](model[0](x))), recipe, "outside")
    for a, b in zip(want, train(other, nested, recipe, "outside"), strict=True):
        assert_same(a, b)


def test_one_op_twice_in_a_checkpoint_with_a_commit_in_between() -> None:
    """Each call replays the scale that it used."""
    op = te.Linear(32, 32)
    other = twin(op)
    recipe = te.recipe.DelayedScaling(amax_history_len=2)

    def twice(layer: te.Op, x: Tensor) -> Tensor:
        with te.autocast(recipe=recipe):
            h = layer(x)
        with te.autocast(recipe=recipe):
            return layer(50 * h)

    x = torch.randn(32, 32, requires_grad=True)
    twice(op, x).sum().backward()
    want = {"x": x.grad.clone()} | gradients(op)
    x.grad = None
    te.checkpoint(twice, other, x).sum().backward()
    assert_same(want, {"x": x.grad} | gradients(other))


def test_checkpoint_of_two_calls_under_other_recipes() -> None:
    """One op called twice under two recipes: each recompute uses its own, or raises."""
    op = te.Linear(32, 32)
    x = torch.randn(32, 32, requires_grad=True)

    def run(call: Callable[..., Tensor]) -> Tensor:
        with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
            a = call(op, x)
        with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
            b = call(op, x)
        return (a * a).sum() + b.sum()

    def result(call: Callable[..., Tensor]) -> dict[str, Tensor]:
        op.zero_grad()
        x.grad = None
        run(call).backward()
        return {"x": x.grad.clone()} | gradients(op)

    want = result(lambda f, *a: f(*a))
    assert_same(want, result(te.checkpoint))
    try:
        got = result(lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False))
    except (te.RecipeError, CheckpointError):
        return
    assert_same(want, got)


def test_state_that_moved_on_is_refused() -> None:
    model = te.Linear(32, 32)
    x = torch.randn(32, 32, requires_grad=True)
    with te.autocast(recipe=RECIPES["delayed"]):
        y = torch_checkpoint(model, x, use_reentrant=False)
    with pytest.raises(
        te.RecipeError, match=r"te\.checkpoint"
    ):  # the region's exit moved the scales
        y.sum().backward()


def test_keywords_and_several_outputs_of_checkpoint() -> None:
    model = te.Linear(8, 8)

    def f(x: Tensor, *, k: float) -> tuple[Tensor, Tensor]:
        h = model(x)
        return h * k, h

    x = torch.randn(4, 8, requires_grad=True)
    a, b = te.checkpoint(f, x, k=3.0)
    (a.sum() + b.sum()).backward()
    torch.testing.assert_close(x.grad, 4 * model.weight.detach().sum(0).expand(4, 8))


def test_our_checkpoint_inside_torch_checkpoint() -> None:
    model = te.Sequential(te.Linear(32, 32), te.GELU(), te.Linear(32, 32))
    other = twin(model)
    recipe = te.recipe.MXFP8BlockScaling()

    def nested(x: Tensor) -> Tensor:
        return torch_checkpoint(lambda t: te.checkpoint(other, t), x, use_reentrant=False)

    want = train(model, model, recipe, "outside")
    for a, b in zip(want, train(other, nested, recipe, "outside"), strict=True):
        assert_same(a, b)


def test_one_op_under_two_recipes_before_its_backward_is_an_error_not_a_guess() -> None:
    op = te.Sequential(te.Linear(32, 32))
    x = torch.randn(8, 32, requires_grad=True)
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        first = torch.utils.checkpoint.checkpoint(op, x, use_reentrant=False)
    with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        op(x)
    with pytest.raises(te.RecipeError, match="several recipes"):
        first.sum().backward()


def test_validation_between_forward_and_backward_does_not_change_the_recompute() -> None:
    op = te.Sequential(te.Linear(32, 32), te.GELU(), te.Linear(32, 32))
    x = torch.randn(8, 32, requires_grad=True)
    recipe = te.recipe.Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        y = op(x)
    (expected,) = torch.autograd.grad(y.square().sum(), x)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = torch.utils.checkpoint.checkpoint(op, x, use_reentrant=False)
        with torch.no_grad():
            op(x)
        (actual,) = torch.autograd.grad(y.square().sum(), x)
        assert torch.equal(actual, expected)
        with torch.no_grad():
            op(x)
    with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):  # another recipe after the backward
        torch.utils.checkpoint.checkpoint(op, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("name", ["nonreentrant", "te_checkpoint", "te_recompute"])
def test_a_recompute_runs_the_kernels_of_its_forward(name: str) -> None:
    """One that comes between forward and backward rounds otherwise, and may save other values."""
    ran: list[int] = []

    def bind(call: Call) -> Launch:
        launch = bind_composed(call)

        def run(*xs: Any) -> Any:
            ran.append(1)
            return launch(*xs)

        return run

    model, x = mlp(), torch.randn(16, 32, requires_grad=True)
    loss = WAYS[name](model)(x).sum()
    with REGISTRY.temporary(Kernel(runs="gemm", name="late.gemm", bind=bind, priority=99)):
        loss.backward()
        assert not ran
        model(x)
        assert ran, "the next call takes it"
