"""K09: frozen parameters and partly needed gradients: right values, and nothing paid for what is not needed."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import te_ops as te
from tests.faults import cases
from tests.faults.cases import Case, every_case, every_mode
from tests.faults.experts import experts, routed


def masked(
    case: Case, mask: tuple[tuple[bool, ...], tuple[bool, ...]]
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    op, xs = case.fresh(), case.data(5)
    for x, on in zip(xs, mask[0], strict=True):
        if x.is_floating_point():
            x.requires_grad_(on)
    for p, on in zip(op.parameters(), mask[1], strict=True):
        p.requires_grad_(on)
    return op, xs


@every_case
def test_every_gradient_mask_gives_the_gradients_of_the_full_run(case: Case) -> None:
    full = cases.run(case.fresh(), case.data(5))
    op = case.fresh()
    for mask in cases.grad_masks(op, case.data(5)):
        op, xs = masked(case, mask)
        made = cases.run(op, xs)
        for a, b in zip(made.outputs, full.outputs, strict=True):
            assert torch.equal(a, b)
            assert a.requires_grad is False
        for on, a, b in zip(mask[0], made.input_grads, full.input_grads, strict=True):
            assert (a is None) == (not on or b is None), mask
            assert a is None or torch.equal(a, b), mask  # type: ignore[arg-type]
        for on, (name, a) in zip(mask[1], made.param_grads.items(), strict=True):
            assert (a is None) == (not on), (name, mask)
            assert a is None or torch.equal(a, full.param_grads[name]), (name, mask)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", cases.RECIPES.values(), ids=list(cases.RECIPES))
def test_gradient_masks_under_every_recipe(recipe: te.Recipe) -> None:
    case = cases.BY_NAME["MLP"]
    full = cases.step(case.fresh(), case.data(5), recipe)
    stochastic = recipe in [cases.RECIPES[name] for name in cases.STOCHASTIC]
    for mask in cases.grad_masks(case.fresh(), case.data(5)):
        op, xs = masked(case, mask)
        made = cases.step(op, xs, recipe)
        for a, b in zip(made.outputs, full.outputs, strict=True):
            assert torch.equal(a, b)
        for name, grad in [("x", made.input_grads[0]), *made.param_grads.items()]:
            wanted = full.input_grads[0] if name == "x" else full.param_grads[name]
            if grad is not None and not stochastic:
                assert torch.equal(grad, wanted), (name, mask)  # type: ignore[arg-type]


# -- B055


@dataclass(frozen=True)
class Spy(te.IdentityQuantizer):
    """Counts what it is asked to make."""

    name: ClassVar[str] = "spy"
    operand: str = ""
    seen: ClassVar[list[tuple[str, bool, bool]]] = []

    def records(self, x: torch.Tensor, *, row: bool, col: bool, **keywords: Any) -> Any:
        Spy.seen.append((self.operand, row, col))
        rowwise, _, amax = super().records(x, row=True, col=False, **keywords)
        assert rowwise is not None
        return rowwise if row else None, self.other_usage(rowwise) if col else None, amax

    def exact_other_usage(self) -> bool:
        return False  # else a transpose would serve


@pytest.fixture(autouse=True)
def _fresh_spy() -> Iterator[None]:
    Spy.seen.clear()
    yield
    Spy.seen.clear()


RECIPE = te.recipe.CustomRecipe(qfactory=lambda role: Spy(operand=role.operand))


@pytest.mark.parametrize("b", [False, True])
@pytest.mark.parametrize("w", [False, True])
@pytest.mark.parametrize("x", [False, True])
def test_only_directions_that_a_needed_gemm_reads_are_made(x: bool, w: bool, b: bool) -> None:
    op = te.Linear(8, 8)
    op.weight.requires_grad_(w)
    op.bias.requires_grad_(b)
    inputs = torch.randn(3, 8, requires_grad=x)
    with te.autocast(recipe=RECIPE):
        y = op(inputs)
        plan = op.plan(inputs)
    if y.requires_grad:
        y.sum().backward()
    made = {operand: (row, col) for operand, row, col in Spy.seen}
    assert len(Spy.seen) == len(made), "an operand was quantized twice"
    assert made.get("input") == (True, w)
    assert made.get("weight") == (True, x)
    if x or w:
        assert made.get("grad_output") == (x, w)
    else:
        assert "grad_output" not in made
    saved = [v for s in plan.segments for v in s.saved_values]
    assert len(saved) == x + w, saved


def test_frozen_layers_of_a_pipeline_cost_what_a_chain_rule_needs() -> None:
    """LoRA-like: only the middle layer trains, so the first has no backward at all."""
    s = te.Sequential(te.Linear(8, 8), te.GELU(), te.Linear(8, 8), te.GELU(), te.Linear(8, 8))
    for layer in (s[0], s[4]):
        layer.requires_grad_(False)
    x = torch.randn(3, 8)
    with te.autocast(recipe=RECIPE):
        y = s(x)
    y.sum().backward()
    cols = [(operand, row, col) for operand, row, col in Spy.seen]
    assert cols.count(("grad_output", True, False)) == 1  # of the last layer: dgrad only
    assert cols.count(("grad_output", False, True)) == 1  # of the middle one: wgrad only
    assert len([c for c in cols if c[0] == "grad_output"]) == 2
    assert s[0].weight.grad is None
    assert s[2].weight.grad is not None


@every_case
def test_everything_frozen_builds_no_backward(case: Case) -> None:
    op, xs = case.fresh(), case.data(5, grad=False)
    op.requires_grad_(False)
    plan = op.plan(*xs)
    assert all(not s.backward_steps and not s.saved for s in plan.segments)
    assert not any(y.requires_grad for y in cases.outputs_of(op(*xs)))


FROZEN = {
    "all weights": [f"{i}.weight" for i in range(3)],
    "one expert": ["1.weight", "1.bias"],
    "one weight": ["0.weight"],
    "all biases": [f"{i}.bias" for i in range(3)],
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=list(FROZEN))
@every_mode
def test_frozen_parts_of_experts(frozen: list[str], recipe: te.Recipe | None) -> None:
    """B053: what trains gets the gradients of the run in which all train, the rest None; one expert has no rows."""
    if recipe in [cases.RECIPES[name] for name in cases.STOCHASTIC]:
        recipe = dataclasses.replace(recipe, disable_stochastic_rounding=True)  # type: ignore[type-var]
    torch.manual_seed(0)
    new = torch.nn.ModuleList(experts(3, 64, 64))
    results = []
    for names in ([], frozen):
        every = copy.deepcopy(new)
        for name, p in every.named_parameters():
            p.requires_grad_(name not in names)
        torch.manual_seed(1)
        x = torch.randn(12, 64, requires_grad=True)
        with cases.within(recipe):
            y = routed(every, x, (5, 7, 0))
        cases.backward([y])
        results.append({"x": x.grad, **{n: p.grad for n, p in every.named_parameters()}})
    full, made = results
    for name, grad in made.items():
        assert (grad is None) == (name in frozen), name
        assert grad is None or torch.equal(grad, full[name]), name
