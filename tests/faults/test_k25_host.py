"""K25: what a call costs on the host, counted in Python calls, which no load of the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import te_ops as te
from te_ops.runtime import bundle, cache, replay, replay_report
from te_ops.runtime.state import UPDATES
from tests.runtime.host_kernels import Steady, host_kernels


def calls(run: Callable[[], object], repeat: int = 5) -> int:
    """Python and C functions that one call enters, once everything is cached."""
    for _ in range(5):
        run()
    count = 0

    def watch(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        for _ in range(repeat):
            run()
    finally:
        sys.setprofile(None)
    return count // repeat


BUDGETS = {
    ("linear", False): 120,
    ("linear", True): 125,
    ("pipeline", False): 210,
    ("pipeline", True): 250,
}
"""Calls of a forward by its launches, without and with gradients: about a quarter above what they take now. A replay
of a plan may not become a second planning."""


def model(name: str) -> te.Op:
    if name == "linear":
        return te.Linear(64, 64)
    return te.Sequential(te.RMSNorm(64), te.Linear(64, 64), te.GELU(), te.Linear(64, 64))


@pytest.mark.parametrize(("name", "grad"), BUDGETS)
def test_a_replay_stays_within_its_budget(name: str, grad: bool) -> None:
    """B130, as a budget of calls: a cached plan is looked up and replayed, and nothing more."""
    ours = model(name)
    x = torch.randn(8, 64)
    with torch.set_grad_enabled(grad):
        found = calls(lambda: ours(x))
    assert found <= BUDGETS[name, grad], f"{found} calls"


RECORDED = {
    ("none", "forward"): 100,
    ("none", "step"): 260,
    ("current", "forward"): 125,
    ("current", "step"): 285,
    ("delayed", "forward"): 150,
    ("delayed", "step"): 370,
}
"""The same where launches are recorded and issued at once: a forward without gradients, and a step of training."""

RECIPES: dict[str, te.Recipe | None] = {
    "none": None,
    "current": te.recipe.Float8CurrentScaling(),
    "delayed": te.recipe.DelayedScaling(),
}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recorded phases cost their launch only, which does nothing here."""
    monkeypatch.setitem(bundle.BUNDLERS, "cpu", None)
    monkeypatch.setattr(bundle.Bundles, "of", lambda device, size: found)
    monkeypatch.setattr(replay, "_empty_like", Steady())
    monkeypatch.setitem(UPDATES, "cpu", lambda device, rolls: None)

    def find(key: object) -> Callable[[int], None]:
        return lambda stream: None

    found = SimpleNamespace(find=find)
    with host_kernels():
        yield


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("name", "what"), RECORDED)
def test_a_recorded_call_stays_within_its_budget(name: str, what: str) -> None:
    ours, recipe = model("pipeline"), RECIPES[name]
    x, dy = torch.randn(16, 64, requires_grad=True), torch.randn(16, 64)

    def forward() -> torch.Tensor:
        if recipe is None:
            found = ours(x)
        else:
            with te.autocast(recipe=recipe):
                found = ours(x)
        assert isinstance(found, torch.Tensor)
        return found

    def step() -> None:
        forward().backward(dy)

    with torch.set_grad_enabled(what == "step"):
        found = calls(step if what == "step" else forward)
    assert all(line.endswith("operations") for line in replay_report(ours))
    assert found <= RECORDED[name, what], f"{found} calls"


def test_the_cost_does_not_depend_on_the_number_of_models_and_plans() -> None:
    ours = model("pipeline")
    x = torch.randn(8, 64)
    before = calls(lambda: ours(x))
    others = [model("pipeline") for _ in range(20)]
    for i, other in enumerate(others):
        other(torch.randn(i + 1, 64))
    assert calls(lambda: ours(x)) <= before + 2


def test_a_call_like_the_last_one_makes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = model("pipeline")
    x = torch.randn(8, 64)
    ours(x)
    made: list[str] = []
    for name in ("_keyed", "_plan"):
        original = getattr(cache, name)
        monkeypatch.setattr(
            cache,
            name,
            lambda *a, n=name, f=original: made.append(n) or f(*a),  # type: ignore[func-returns-value]
        )
    ours(x)
    ours(torch.randn(8, 64))
    assert made == []
    ours(x.requires_grad_())  # something else: a key, and a plan
    assert made == ["_keyed", "_plan"]
    made.clear()
    ours(x.detach())  # known: a key
    assert made == ["_keyed"]
