"""K11: recomputing gives the numbers, gradients and scales of not recomputing, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import te_ops as te
from tests.faults import cases
from tests.faults.cases import RECIPES, every_mode

Way = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def plain(op: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = op(x)
    return made


def torch_way(reentrant: bool) -> Way:
    def run(op: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.utils.checkpoint.checkpoint(op, x, use_reentrant=reentrant)
        return made

    return run


def te_way(op: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = te.checkpoint(op, x)
    return made


def te_function(op: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = te.checkpoint(lambda t: op(2 * t) + 0 * op(t), x)
    return made


WAYS: dict[str, Way] = {"te": te_way, "torch": torch_way(False), "torch_reentrant": torch_way(True)}


def model(recompute: bool = False, dropout: float = 0.0) -> te.Sequential:
    torch.manual_seed(2)
    body = [te.Linear(64, 96), te.GELU(), te.Dropout(dropout), te.Linear(96, 64)]
    inner = te.Recompute(*body) if recompute else te.Sequential(*body)
    return te.Sequential(te.RMSNorm(64), inner, te.Bias(64))


def steps(
    op: nn.Module, recipe: te.Recipe | None, way: Way, inside: bool, count: int = 2
) -> tuple[list[cases.Result], dict[str, torch.Tensor]]:
    """Training steps whose backward runs inside or outside the autocast."""
    made = []
    for i in range(count):
        torch.manual_seed(10 + i)
        x = torch.randn(5, 64, requires_grad=True)
        op.zero_grad()
        with cases.within(recipe):
            y = way(op, x)
            if inside:
                cases.backward([y])
        if not inside:
            cases.backward([y])
        made.append(
            cases.Result(
                [y.detach()],
                [x.grad],
                {n: p.grad.clone() for n, p in op.named_parameters() if p.grad is not None},
            )
        )
    return made, {k: v.clone() for k, v in op.state_dict().items()}


def check(
    a: tuple[list[cases.Result], dict[str, Any]], b: tuple[list[cases.Result], dict[str, Any]]
) -> None:
    for left, right in zip(a[0], b[0], strict=True):
        cases.same(left, right)
    assert a[1].keys() == b[1].keys()
    for name, value in b[1].items():
        assert torch.equal(a[1][name], value), name


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("way", WAYS)
@every_mode
def test_checkpoint_is_bit_equal(recipe: te.Recipe | None, way: str, inside: bool) -> None:
    """B061 and B063: also the backward scale, and also where backward runs outside autocast."""
    wanted = steps(model(dropout=0.4), recipe, plain, inside)
    stateful = recipe in [RECIPES[name] for name in cases.DELAYED]
    if stateful and way != "te" and (way == "torch_reentrant" or not inside):
        with pytest.raises(te.RecipeError, match=r"te\.checkpoint"):
            check(steps(model(dropout=0.4), recipe, WAYS[way], inside), wanted)
        return
    check(steps(model(dropout=0.4), recipe, WAYS[way], inside), wanted)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@every_mode
def test_recompute_op_is_bit_equal(recipe: te.Recipe | None, inside: bool) -> None:
    a = steps(model(True, 0.4), recipe, plain, inside)
    b = steps(model(False, 0.4), recipe, plain, inside)
    check(a, b)


@every_mode
def test_recompute_inside_checkpoint(recipe: te.Recipe | None) -> None:
    check(steps(model(True), recipe, te_way, False), steps(model(False), recipe, plain, False))


@every_mode
def test_nested_checkpoints(recipe: te.Recipe | None) -> None:
    def nested(op: Any, x: torch.Tensor) -> torch.Tensor:
        def outer(t: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = op[2](te.checkpoint(op[1], op[0](t)))
            return made

        result: torch.Tensor = te.checkpoint(outer, x)
        return result

    def unnested(op: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = op[2](op[1](op[0](x)))
        return made

    check(steps(model(), recipe, nested, False), steps(model(), recipe, unnested, False))


@every_mode
def test_recompute_saves_less(recipe: te.Recipe | None) -> None:
    x = torch.randn(512, 64)
    with cases.within(recipe):
        saved = [model(flag).plan(x).saved_bytes for flag in (True, False)]
    assert saved[0] < saved[1]


@every_mode
def test_several_calls_in_a_checkpointed_function(recipe: te.Recipe | None) -> None:
    def function(op: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = op(2 * x) + op(x)
        return made

    def wrapped(op: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = te.checkpoint(function, op, x)
        return made

    check(steps(model(), recipe, wrapped, False), steps(model(), recipe, function, False))


@every_mode
def test_backwards_in_another_order_than_forwards(recipe: te.Recipe | None) -> None:
    """Two checkpointed forwards in flight: each recomputes with its own scales."""

    def grads(way: Way) -> list[torch.Tensor]:
        op = model()
        torch.manual_seed(0)
        xs = [torch.randn(5, 64, requires_grad=True) for _ in range(2)]
        ys = []
        for i, x in enumerate(xs):
            with cases.within(recipe):
                ys.append(way(op, (10.0**i) * x))
        torch.manual_seed(1)
        for y in ys:
            cases.backward([y])
        return [x.grad for x in xs if x.grad is not None]

    for a, b in zip(grads(te_way), grads(plain), strict=True):
        assert torch.equal(a, b)


def test_recompute_observes_nothing() -> None:
    recipe = te.recipe.DelayedScaling(amax_history_len=8)
    op = te.Linear(16, 16)
    x = torch.ones(4, 16, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = te.checkpoint(op, x)
    y.sum().backward()
    for operand in ("input", "weight", "grad_output"):
        history = op.quantizer.delayed.get_submodule(operand).amax_history  # type: ignore[union-attr]
        assert (history != 0).sum() == 1, operand
