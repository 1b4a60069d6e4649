"""What a capture takes, refuses and leaves alone, with an engine that runs recordings again on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.context import RECORDING, current
from te_ops.runtime import engines
from tests.runtime.cases import assert_same, mlp, state, twin
from tests.runtime.graph_engine import Rerun, data

DELAYED = te.recipe.DelayedScaling(amax_history_len=4)


class Keeps(nn.Module):
    """Has a parameter in the table of a module and in a list, and reads it in one or both."""

    def __init__(self, place: str = "table") -> None:
        super().__init__()
        self.inner, self.place = mlp(), place
        self.kept = [self.inner[1].weight]
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.inner[1].weight)
        y = self.inner(x) if self.place != "list" else x
        return y * self.kept[0].square().mean() if self.place != "table" else y


def test_a_capture_leaves_the_leaves_of_others_alone(engine: Rerun) -> None:
    """It runs on twins of the parameters: no hook runs, no node of another forward's graph is met."""
    model = Keeps()
    weight, met = model.inner[1].weight, []
    weight.register_hook(met.append)
    waits = model(data())
    assert te.make_graphed(model).capture(data())
    assert met == []
    assert model.seen[0] is weight
    assert all(
        t is not weight and t.data_ptr() == weight.data_ptr() and t._version == weight._version
        for t in model.seen[1:]
    )
    assert model.inner[1].weight is weight
    waits.sum().backward()
    assert len(met) == 1
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("place", ["table", "both", "list"])
def test_gradients_of_parameters_that_are_kept_elsewhere_too(engine: Rerun, place: str) -> None:
    recorded: list[torch.Tensor] = []

    class Spy(Rerun):
        def record(self, body, pool, device, reads):  # type: ignore[no-untyped-def]
            found = super().record(body, pool, device, reads)
            recorded[:] = found[0]
            return found

    engines.ENGINES["cpu"] = Spy()
    model = Keeps(place)
    expected = torch.autograd.grad(model(data()).sum(), model.kept[0])[0]
    graphed = te.make_graphed(model)
    assert graphed.capture(data())
    assert any(g.shape == expected.shape for g in recorded)  # the recorded backward makes it
    graphed(data()).sum().backward()
    assert torch.allclose(model.kept[0].grad, expected)


def test_a_capture_that_fails_puts_the_parameters_back(engine: Rerun) -> None:
    class Fails(Keeps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise te.PlanError("no")

    model = Fails()
    before = list(model.parameters())
    with pytest.raises(te.PlanError, match="no"):
        te.make_graphed(model, data())
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    assert model.seen[0] is not before[1]


def test_no_capture_while_another_call_runs_eagerly(engine: Rerun) -> None:
    """A capture exchanges the parameters, which that call is reading."""

    class Asks(Keeps):
        graphed: te.Graphed | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.graphed is not None and len(self.seen) == 1:
                self.seen.append(x)
                thread = threading.Thread(target=lambda: asked.append(made.capture(data(8))))
                thread.start()
                thread.join()
            return super().forward(x)

    asked: list[bool] = []
    model = Asks()
    made = te.make_graphed(model)
    model(data())
    object.__setattr__(model, "graphed", made)
    made(data()).sum().backward()
    assert asked == [False]
    assert made.capture(data(8))
    assert all(p.grad is not None for p in model.parameters())


def test_hooks_are_refused_with_their_place(engine: Rerun) -> None:
    model = mlp()
    graphed = te.make_graphed(model, data())
    handle = model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(te.PlanError, match="1 has a module hook"):
        graphed(data())
    handle.remove()
    graphed(data()).sum().backward()
    with torch.no_grad():
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        with pytest.raises(te.PlanError, match="global module hook"):
            graphed(data())
        handle.remove()
    seen = []
    graphed.register_forward_hook(lambda *_: seen.append(1))  # around the graph, not in it
    graphed(data())
    assert seen


def test_an_error_inside_names_the_module_and_leaves_all_as_it_was(engine: Rerun) -> None:
    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if RECORDING.get():
                raise RuntimeError("operation not permitted when stream is capturing")
            return x

    model = nn.Sequential(mlp(), nn.Sequential(Waits()))
    graphed = te.make_graphed(model)
    with te.autocast(recipe=DELAYED):
        graphed(data())
    before = state(model)
    with (
        pytest.raises(te.PlanError, match=r"Sequential.1.0 \(Waits\): it cannot be part of a CUDA"),
        te.autocast(recipe=DELAYED),
    ):
        graphed(data())
    assert_same(state(model), before)


def test_an_autocast_inside_is_refused(engine: Rerun) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.autocast(recipe=DELAYED):
                return self.body(x)

    model = Inner()
    graphed = te.make_graphed(model)
    with pytest.raises(te.PlanError, match=r"body: the module enters te\.autocast inside"):
        graphed.capture(data())
    other = twin(model)
    for _ in range(4):  # with an outer one, its region is the outer one's
        for run in (graphed, other):
            with te.autocast(recipe=DELAYED):
                run(data()).sum().backward()
    assert engine.replayed
    assert_same(state(model), state(other))


def test_outputs_that_are_no_tensors_are_refused(engine: Rerun) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return x, "text"

    with pytest.raises(te.PlanError, match="Odd returned a str"):
        te.make_graphed(Odd(), data())


def test_gradients_into_main_grad_are_refused_with_the_way_out(engine: Rerun) -> None:
    model = te.Sequential(te.Linear(32, 32, accumulate_into_main_grad=True), te.GELU())
    weight = model[0].weight
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    with pytest.raises(te.PlanError, match=r"0 adds gradients to main_grad.*torch\.cuda\.graph"):
        te.make_graphed(model, data())
    assert not weight.main_grad.any()
    with torch.no_grad():
        assert te.make_graphed(model, data()).captured == 1


def test_amaxes_are_lent_and_copied_only_if_they_wait(engine: Rerun) -> None:
    model = mlp()
    recipe = te.recipe.DelayedScaling(amax_history_len=4)
    with te.autocast(recipe=recipe):
        graphed = te.make_graphed(model, data())
        graphed(data(seed=1)).sum().backward()
        frame = current()
        assert frame is not None
        (first,) = frame.region.observed.sheets
        lent, seen = first.block, first.block.clone()
        assert first.lent
        graphed(8 * data(seed=2)).sum().backward()
        second = frame.region.observed.sheets[1]
        assert second.block is lent
        assert not first.lent
        assert torch.equal(first.block, seen)
        assert not torch.equal(second.block, seen)
    del first, second
    with te.autocast(recipe=recipe):
        graphed(data(seed=3)).sum().backward()
        frame = current()
        assert frame is not None
        (third,) = frame.region.observed.sheets
        assert third.lent
        assert third.block is lent
