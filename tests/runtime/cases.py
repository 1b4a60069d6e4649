"""What the runtime's tests share: recipes, small pipelines, and how to compare two runs of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import te_ops as te
from te_ops.graph import Graph, Value

RECIPES: dict[str, te.Recipe | None] = {
    "none": None,
    "delayed": te.recipe.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
    "nvfp4": te.recipe.NVFP4BlockScaling(),
}


def mlp(width: int = 32, hidden: int = 64) -> te.Sequential:
    """A norm, two linears and a gate: every kind of saved value."""
    return te.Sequential(
        te.RMSNorm(width),
        te.Linear(width, 2 * hidden),
        te.SwiGLU(),
        te.Linear(hidden, width, bias=False),
    )


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of everything that a checkpoint would hold."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by parameter name, without the missing ones."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal names, equal bits."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def step(
    model: nn.Module, x: Tensor, recipe: te.Recipe | None, run: Callable[..., Any] | None = None
) -> Tensor:
    """One forward under the recipe and one backward outside it; returns the output."""
    run = run or model
    if recipe is None:
        y = run(x)
    else:
        with te.autocast(recipe=recipe):
            y = run(x)
    weights = torch.arange(1.0, y.numel() + 1).reshape(y.shape) / y.numel()
    (y.float() * weights).sum().backward()
    return y.detach()


def both(
    pair: tuple[nn.Module, nn.Module], recipe: te.Recipe | None, x: torch.Tensor, seed: int = 0
) -> None:
    """One step of each on the same data and random numbers, equal in outputs and input gradients."""
    found = []
    for model in pair:
        mine = x.detach().clone().requires_grad_(x.requires_grad)
        torch.manual_seed(seed)
        y = step(model, mine, recipe)
        found.append((y, mine.grad))
    (y, dx), (y2, dx2) = found
    assert torch.equal(y, y2)
    assert (dx is None) == (dx2 is None)
    assert dx is None or torch.equal(dx, dx2)


def twin(model: nn.Module) -> Any:
    """A deep copy without gradients."""
    made = copy.deepcopy(model)
    made.zero_grad(set_to_none=True)
    return made


def pair() -> tuple[te.Sequential, nn.Sequential]:
    """The same network in te_ops and in torch."""
    ours = te.Sequential(te.Linear(8, 16), te.GELU(), te.Linear(16, 8))
    theirs = nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def double(g: Graph, x: Value) -> Value:
    """x + x: a node of its own, for ops of tests."""
    return te.basic.structure.add(g, x, x)
