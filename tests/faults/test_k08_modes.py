"""K08: train, eval, no_grad and inference_mode in any order leave nothing stale behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import te_ops as te
from tests.faults import cases
from tests.faults.cases import Case, every_case, every_mode

GUARDS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad": lambda: torch.set_grad_enabled(False),
    "grad": contextlib.nullcontext,
}
# Every op under every recipe, and every guard on one op that has it all.
TRIPLES = [
    pytest.param(case, recipe, guard, id=f"{case.name}-{mode}-{name}")
    for case in cases.QUANTIZED
    for mode, recipe in ((m, cases.MODES[m]) for m in cases.SOME)
    for name, guard in GUARDS.items()
    if (case.name == "MLP" or name == "inference_mode")
    and (case.name in cases.CORE or mode == "delayed")
]
every_triple = pytest.mark.parametrize(("case", "recipe", "guard"), TRIPLES)


def validate(
    op: Any, xs: Sequence[torch.Tensor], recipe: te.Recipe | None, guard: Callable[[], Any]
) -> None:
    op.eval()
    with guard(), cases.within(recipe):
        op(*(x.detach() for x in xs))
    op.train()


@every_triple
def test_validation_between_steps_changes_nothing(
    case: Case, recipe: te.Recipe | None, guard: Callable[[], Any]
) -> None:
    """B047. (A forward with grad mode on records: it is a step of delayed scaling, so not compared there.)"""
    op, twin = case.fresh(), case.fresh()
    xs = case.data(5)
    for _ in range(2):
        a = cases.step(op, xs, recipe)
        b = cases.step(twin, case.data(5), recipe)
        if not (
            guard is contextlib.nullcontext and recipe in [cases.RECIPES[n] for n in cases.DELAYED]
        ):
            cases.same(a, b)
        validate(op, xs, recipe, guard)


@every_triple
def test_first_forward_in_any_mode_then_training(
    case: Case, recipe: te.Recipe | None, guard: Callable[[], Any]
) -> None:
    """B049, B051: what the first forward made (state, caches, plans) must serve a training step."""
    op, twin = case.fresh(), case.fresh()
    xs = case.data(5)
    validate(op, xs, recipe, guard)
    made = [cases.step(op, xs, recipe) for _ in range(2)]
    wanted = [cases.step(twin, case.data(5), recipe) for _ in range(2)]
    if not (
        guard is contextlib.nullcontext and recipe in [cases.RECIPES[n] for n in cases.DELAYED]
    ):
        for a, b in zip(made, wanted, strict=True):
            cases.same(a, b)
    assert not any(t.is_inference() for t in op.state_dict().values())


@pytest.mark.parametrize("maker", ["no_grad", "inference_mode"])
@every_mode
def test_model_made_without_gradients_trains(recipe: te.Recipe | None, maker: str) -> None:
    case = cases.BY_NAME["MLP"]
    if maker == "inference_mode":
        with torch.inference_mode():
            op = case.fresh()
        for module in op.modules():  # as with nn modules: such parameters must be cloned first
            for name, p in list(module._parameters.items()):
                if p is not None:
                    setattr(module, name, torch.nn.Parameter(p.detach().clone()))
    else:
        with torch.no_grad():
            op = case.fresh()
    for _ in range(2):
        result = cases.step(op, case.data(5), recipe)
    assert all(g is not None for _, g in result.tensors())


@pytest.mark.parametrize("enabled", [True, False])
def test_state_prepared_in_inference_mode_moves_in_training(enabled: bool) -> None:
    recipe = te.recipe.DelayedScaling()
    op = te.Linear(16, 16)
    x = torch.randn(4, 16)
    with torch.inference_mode(), te.autocast(enabled=enabled, calibrating=True, recipe=recipe):
        op(x)
    assert op.quantizer.delayed.input.amax_history[-1] == x.abs().amax()
    with te.autocast(recipe=recipe):
        y = op(2 * x)
    y.sum().backward()
    assert op.quantizer.delayed.input.amax_history[-1] == (2 * x).abs().amax()


@every_case
def test_inference_tensors_as_inputs(case: Case) -> None:
    op = case.fresh()
    with torch.inference_mode():
        xs = case.data(5, grad=False)
        first = cases.outputs_of(op(*xs))
    assert all(y.is_inference() or any(y.data_ptr() == x.data_ptr() for x in xs) for y in first)
    with torch.no_grad():
        second = cases.outputs_of(op(*xs))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    trained = cases.run(op, case.data(5))
    for a, b in zip(first, trained.outputs, strict=True):
        assert torch.equal(a, b)


@every_case
def test_modes_give_equal_numbers(case: Case) -> None:
    """But for dropout, eval computes what train does; no mode needs a gradient to be right."""
    op, xs = case.fresh(), case.data(5)
    wanted = cases.outputs_of(op(*xs))
    for guard in GUARDS.values():
        with guard():
            made = cases.outputs_of(op(*xs))
        for a, b in zip(made, wanted, strict=True):
            assert torch.equal(a, b)
    if te.Dropout not in case.kinds:
        for a, b in zip(cases.outputs_of(op.eval()(*xs)), wanted, strict=True):
            assert torch.equal(a, b)


@every_mode
def test_inference_saves_nothing_and_makes_one_usage(recipe: te.Recipe | None) -> None:
    """B051: a forward that nobody differentiates holds one copy of the weight."""
    op = cases.BY_NAME["MLP"].fresh()
    x = torch.randn(5, cases.WIDTH)
    with torch.no_grad(), cases.within(recipe):
        plan = op.plan(x)
        y = op(x)
    assert not y.requires_grad
    assert all(not s.saved and not s.backward_steps for s in plan.segments)
    names = [n for s in plan.segments for step in s.forward_steps for n in step.nodes]
    assert not any("col" in n.rpartition(",")[2] for n in names if n.startswith("quantize"))
