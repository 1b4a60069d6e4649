"""K33 (B159): what must not make a plan."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import te_ops as te
from tests.faults import cases
from tests.faults.cases import RECIPES, Case, every_case
from tests.faults.pairs import builds, pair

pytestmark = pytest.mark.usefixtures("no_plans")


@every_case
def test_row_counts_of_a_class_share_a_plan(case: Case) -> None:
    op = case.fresh()
    with builds(at_most=1):
        op(*case.data(33))
    for rows in (35, 37, 61):
        xs = case.data(rows)
        expected = case.expected(op, xs)
        op.zero_grad()
        with builds(0):
            actual = cases.run(op, xs)
        cases.compare(actual, expected, 1e-4)


@every_case
def test_grad_mode_flips_build_once_each(case: Case) -> None:
    op, xs = case.fresh(), case.data(3)
    with builds(at_most=2):
        for _ in range(4):
            with torch.no_grad():
                op(*xs)
            op(*xs)


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
@pytest.mark.parametrize("reentrant", [True, False])
def test_ten_checkpointed_steps_build_at_most_twice(
    recipe: te.Recipe | None, reentrant: bool
) -> None:
    if reentrant and recipe in [RECIPES[name] for name in cases.DELAYED]:
        pytest.skip("refused: see K11")
    op = cases.BY_NAME["MLP"].fresh()
    x = torch.randn(5, cases.WIDTH, requires_grad=True)
    with builds(at_most=2):
        for _ in range(10):
            with cases.within(recipe):
                y = torch.utils.checkpoint.checkpoint(op, x, use_reentrant=reentrant)
                y.sum().backward()


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
def test_te_checkpoint_and_optimizer_steps_build_once(recipe: te.Recipe | None) -> None:
    op = cases.BY_NAME["MLP"].fresh()
    optimizer = torch.optim.SGD(op.parameters(), lr=1e-3)
    x = torch.randn(5, cases.WIDTH)
    with builds(at_most=1):
        for _ in range(10):
            with cases.within(recipe):
                y = te.checkpoint(op, x)
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_equal_layers_and_copies_share_a_plan() -> None:
    x = torch.randn(5, 8)
    layers = [pair() for _ in range(3)]
    with builds(1):
        for layer in (*layers, copy.deepcopy(layers[0])):
            layer(x)


def test_scalars_equal_recipes_and_weight_updates_make_no_plan() -> None:
    scale = te.scalar(2.0)
    s = te.Sequential(te.Linear(8, 8), te.ConstantScale(scale))
    x = torch.randn(5, 8)
    expected = F.linear(x, s[0].weight, s[0].bias)
    torch.testing.assert_close(s(x), 2 * expected)
    with builds(0):
        scale.set(5.0)
        torch.testing.assert_close(s(x), 5 * expected)
        with torch.no_grad():
            s[0].weight.mul_(2)
        s(x)
    with builds(1):
        for _ in range(3):
            with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
                s(x)


def test_state_that_appears_makes_no_second_plan() -> None:
    s = pair()
    x = torch.randn(5, 8)
    recipe = te.recipe.DelayedScaling()
    with builds(1):
        for _ in range(3):
            with te.autocast(recipe=recipe):
                y = s(x)
            y.sum().backward()
