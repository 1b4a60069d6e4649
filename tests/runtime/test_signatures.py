"""What makes another signature of a graphed module, and what no signature can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from tests.runtime.graph_engine import Rerun, data


def _pipeline() -> te.Sequential:
    return te.Sequential(te.RMSNorm(32), te.Linear(32, 32), te.GELU(), te.ConstantScale(2.0))


def _mixed() -> nn.Sequential:
    return nn.Sequential(te.Linear(32, 32), nn.LeakyReLU(0.1), nn.Sequential(nn.Tanh()))


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an option": (_pipeline, lambda m: setattr(m[0], "eps", 1.0)),
    "a number": (_pipeline, lambda m: setattr(m[3], "scale", 3.0)),
    "another op": (_pipeline, lambda m: m.__setitem__(2, te.ReLU())),
    "an op less": (_pipeline, lambda m: m.__delitem__(2)),
    "an op more": (_pipeline, lambda m: m.append(te.GELU())),
    "another module": (_mixed, lambda m: m.__setitem__(1, nn.LeakyReLU(0.5))),
    "a module more": (_mixed, lambda m: m.append(nn.Tanh())),
    "a module more inside": (_mixed, lambda m: m[2].append(nn.Tanh())),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_module_are_captured_anew(engine: Rerun, name: str) -> None:
    build, change = CHANGES[name]
    model = build()
    graphed = te.make_graphed(model, data())
    graphed(data())
    before = engine.recorded, engine.replayed
    change(model)
    with torch.no_grad():
        expected = model(data())
    assert torch.equal(graphed(data()), expected)
    assert (engine.recorded, engine.replayed) == before  # no replay of what was captured before
    assert torch.equal(graphed(data()), expected)
    assert engine.recorded > before[0]


class _Times(nn.Module):
    def forward(self, x: torch.Tensor, factor: Any) -> torch.Tensor:
        return x.clone() if factor is True else x / torch.tensor(factor)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1.0, True), (0.0, -0.0)])
def test_arguments_that_are_equal_are_not_the_same(engine: Rerun, one: Any, other: Any) -> None:
    module, x = _Times(), data(grad=False)
    graphed = te.make_graphed(module, (x, one))
    graphed(x, one)
    before = engine.replayed
    assert torch.equal(graphed(x, other), module(x, other))
    assert engine.replayed == before


def test_a_module_that_writes_its_input_is_refused(engine: Rerun) -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2

    with pytest.raises(te.PlanError, match="Writes writes an input in place"):
        te.make_graphed(Writes(), data(grad=False))


@pytest.mark.parametrize("sample", ["abc", (), 3])
def test_a_sample_without_a_tensor_is_refused(sample: Any) -> None:
    with pytest.raises(te.PlanError, match="a sample needs a tensor"):
        te.make_graphed(te.GELU(), sample)


def test_extra_state_of_the_module_is_saved_and_loaded() -> None:
    class Extra(nn.Module):
        factor = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

        def get_extra_state(self) -> dict[str, int]:
            return {"factor": self.factor}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.factor = state["factor"]

    model, other = Extra(), Extra()
    model.factor = 3
    graphed = te.make_graphed(model)
    assert list(graphed.state_dict()) == list(model.state_dict()) == ["_extra_state"]
    te.make_graphed(other).load_state_dict(graphed.state_dict())
    assert other.factor == 3
