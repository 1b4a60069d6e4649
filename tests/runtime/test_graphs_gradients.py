"""Gradients of graphed calls (B067): whose memory they are, which there are, and what may not change in between."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.runtime import engines
from tests.runtime.cases import RECIPES, assert_same, both, gradients, mlp, state, twin
from tests.runtime.graph_engine import Rerun, Still, data

DELAYED = te.recipe.DelayedScaling(amax_history_len=4)
# Another backward draws other random numbers: rounding is to nearest here.
EXACT = {**RECIPES, "nvfp4": te.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)}


def test_grad_buffers_stay_the_users(engine: Rerun) -> None:
    model = mlp()
    weight = model[1].weight
    buffer = weight.grad = torch.ones_like(weight)
    graphed = te.make_graphed(model, data())
    eager = twin(model)
    eager(data()).sum().backward()
    once = eager[1].weight.grad
    for n in (1, 2):
        graphed(data()).sum().backward()
        assert weight.grad is buffer
        torch.testing.assert_close(buffer, 1 + n * once)
    model.zero_grad()
    graphed(data()).sum().backward()
    kept = weight.grad
    copied = kept.clone()
    model.zero_grad()
    graphed(100 * data()).square().sum().backward()
    assert torch.equal(kept, copied)  # the next replay does not write what was handed out


def test_outputs_survive_the_next_replay_unless_copies_are_off(engine: Rerun) -> None:
    for copies in (True, False):
        graphed = te.make_graphed(mlp(), copies=copies)
        with torch.no_grad():
            graphed(data(grad=False))
            first = graphed(data(grad=False))
            kept = first.clone()
            graphed(2 + data(grad=False))
        assert torch.equal(first, kept) == copies


def test_without_copies_gradients_are_right_until_the_next_replay(engine: Rerun) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model, copies=False)
    for i in range(4):
        both((graphed, other), DELAYED, data(seed=i))
        assert_same(gradients(model), gradients(other))
        model.zero_grad()
        other.zero_grad()
    assert_same(state(model), state(other))


def test_masks_of_gradients_are_part_of_the_signature(engine: Rerun) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model)
    for frozen in ((), (0,), (1, 3), (0, 1, 3), ()):
        for m in (model, other):
            m.zero_grad()
            m.requires_grad_(True)
            for i in frozen:
                m[i].requires_grad_(False)
        for grad in (True, False, True, False):
            if grad or frozen != (0, 1, 3):
                both((graphed, other), None, data(grad=grad))
        assert_same(gradients(model), gradients(other))
    assert engine.replayed


def test_a_second_backward_is_refused(engine: Rerun) -> None:
    graphed = te.make_graphed(mlp(), data())
    y = graphed(data()).sum()
    y.backward(retain_graph=True)
    with pytest.raises(te.PlanError, match="second backward"):
        y.backward()
    x = data()
    (g,) = torch.autograd.grad(graphed(x).square().sum(), x, create_graph=True)
    with pytest.raises(te.PlanError, match="double backward"):
        g.sum().backward()


def test_a_parameter_written_between_forward_and_backward_is_refused(engine: Rerun) -> None:
    model = mlp()
    graphed = te.make_graphed(model, data())
    y = graphed(data()).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(
        te.PlanError, match=r"Sequential: a parameter or a buffer has been changed in place"
    ):
        y.backward()


def test_writers_of_parameters_are_seen(engine: Rerun) -> None:
    model = mlp()
    graphed = te.make_graphed(model, data())

    def check() -> None:
        for _ in range(3):
            assert torch.equal(graphed(data()), model(data()))

    check()
    model[1].weight.data.mul_(2)
    check()
    model[1].weight.data = 3 * model[1].weight.data
    check()
    model.load_state_dict({k: 2 * v for k, v in state(model).items()}, assign=True)
    check()
    model[1].weight = nn.Parameter(torch.randn(128, 32))
    check()


def test_a_parameter_turned_over_in_its_place_is_seen(engine: Rerun) -> None:
    model = te.Sequential(te.Linear(32, 32, bias=False))
    graphed = te.make_graphed(model, data())
    for _ in range(2):
        for _ in range(3):
            graphed(data())
        before = engine.replayed
        assert torch.equal(graphed(data()), model(data()))
        assert engine.replayed > before
        weight = model[0].weight
        address, weight.data = weight.data_ptr(), weight.data.t()
        assert weight.data_ptr() == address
        assert torch.equal(graphed(data()), model(data()))
    for _ in range(3):
        graphed(data())
    assert graphed.captured > 1


def test_a_module_that_is_replaced_over_the_same_memory_gets_the_gradients(engine: Rerun) -> None:
    engines.ENGINES["cpu"] = Still()
    model = mlp()
    graphed = te.make_graphed(model, data())
    graphed(data()).sum().backward()
    old = model[1].weight
    before = old.grad.clone()  # type: ignore[union-attr]
    other = copy.deepcopy(model[1])
    other.weight = nn.Parameter(old.detach())
    other.bias = None if model[1].bias is None else nn.Parameter(model[1].bias.detach())
    model[1] = other
    for _ in range(2):
        graphed(data()).sum().backward()
    assert torch.equal(old.grad, before)
    torch.testing.assert_close(other.weight.grad, 2 * before)


class Heads(nn.Module):
    """Three outputs: of a trunk, of a head on it, and of a pipeline beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = te.Sequential(te.Linear(32, 32), te.MakeExtraOutput(), te.Linear(32, 32))
        self.head, self.beside = te.Linear(32, 32), mlp()

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, extra = self.trunk(x)
        return self.head(y), extra, self.beside(z)


@pytest.mark.parametrize("name", EXACT)
def test_outputs_whose_gradient_is_missing_are_those_of_eager_calls(
    engine: Rerun, name: str
) -> None:
    """Nothing that only they reach has a gradient, and no amax of zeros enters a history."""
    model = Heads()
    other = twin(model)
    graphed = te.make_graphed(model)
    masks = [m for m in itertools.product((True, False), repeat=3) if any(m)]
    for i, mask in enumerate([masks[0], *masks, *masks]):
        for run in (graphed, other):
            xs = [data(seed=i), data(seed=i + 50)]
            torch.manual_seed(i)
            with te.autocast(EXACT[name] is not None, recipe=EXACT[name]):
                outputs = run(*xs)
            loss = sum(y.square().sum() for y, m in zip(outputs, mask, strict=True) if m)
            loss.backward()  # type: ignore[union-attr]
            run.__dict__["dx"] = {str(n): x.grad for n, x in enumerate(xs) if x.grad is not None}
        assert_same(graphed.__dict__["dx"], other.__dict__["dx"])
        assert_same(gradients(model), gradients(other))
        assert_same(state(model), state(other))
        if i % 3 == 0:
            model.zero_grad()
            other.zero_grad()
    assert engine.replayed == 2 * 2 * len(masks)


class Pair(torch.autograd.Function):
    """Its backward takes no missing gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> torch.Tensor:
        return 2 * dys[0] + 3 * dys[1]


class Paired(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = te.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> Any:
        return Pair.apply(self.first(x))  # type: ignore[no-untyped-call]


def test_a_backward_that_needs_all_gradients_is_replayed_with_all(engine: Rerun) -> None:
    model = Paired()
    other = twin(model)
    graphed = te.make_graphed(model, data())
    for run in (graphed, other):
        a, b = run(data())
        (a + b).square().sum().backward()
    assert_same(gradients(model), gradients(other))
    assert engine.replayed == 2
    with pytest.raises(te.PlanError, match=r"Paired: an output has no gradient.*TypeError"):
        graphed(data())[0].sum().backward()


class Scaled(nn.Module):
    """A buffer that backward reads, and one that forward counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = te.Linear(32, 32)
        self.register_buffer("by", torch.full((32,), 2.0))
        self.register_buffer("calls", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        return self.first(x) * self.by + 0 * self.calls


def test_a_buffer_written_between_forward_and_backward_is_refused(engine: Rerun) -> None:
    """As in an eager call, whose backward needs what it saved; a buffer that no backward reads may change."""
    engines.ENGINES["cpu"] = still = Still()
    model = Scaled()
    graphed = te.make_graphed(model, data())
    for run in (graphed, model):
        y = run(data()).sum()
        model.by.mul_(1.0)
        error = te.PlanError if run is graphed else RuntimeError
        with pytest.raises(error, match=r"changed in place|inplace operation"):
            y.backward()
        del y  # the graph is free
        model.zero_grad()
        y = run(data()).sum()
        model.calls.mul_(1.0)
        y.backward()
        assert model.first.weight.grad is not None
    assert still.replayed == 3


def test_what_a_replay_writes_into_a_buffer_counts_as_written(engine: Rerun) -> None:
    engines.ENGINES["cpu"] = Still()
    model = Scaled()
    graphed = te.make_graphed(model, data())
    y = model.calls.clone().requires_grad_() * model.calls  # saves the buffer
    graphed(data())
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()
