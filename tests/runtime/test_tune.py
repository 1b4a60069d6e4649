"""te.tune: what is measured, what is kept where, and when a choice is seen."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.basic.gemm import GEMM
from te_ops.registry import REGISTRY, Call, Kernel
from te_ops.runtime import tune as tuning
from te_ops.runtime.disk import own_folder

WHERE = "Stand-in, library 1"
COST = {"slow": 3.0, "fast": 1.0, "even": 2.99}


class Trial:
    """A GEMM with named ways to run it."""

    where, device, gain = WHERE, torch.device("cpu"), tuning.GAIN

    def __init__(self, key: str) -> None:
        self.key = key

    def candidates(self) -> list[str]:
        return list(NAMES)

    def start(self) -> Callable[[str], Callable[[], None]]:
        def run(name: str) -> Callable[[], None]:
            def once() -> None:
                pass

            once.name = name  # type: ignore[attr-defined]
            return once

        return run


NAMES = ["slow", "fast", "even"]
used: list[str | None] = []


def _bind(call: Call) -> Any:
    key = "x".join(str(int(d)) for d in call.spec(call.writes[0]).shape) + call.node.layout
    if tuning.collecting():
        tuning.offer(Trial(key))
    choice = tuning.TABLE.get(WHERE, key)

    def launch(a: Any, b: Any) -> Any:
        used.append(choice)
        return GEMM.reference(a, b, **call.node.attrs)

    return launch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tune"


@pytest.fixture(autouse=True)
def tunable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    def times(runs: Sequence[Any], rounds: int) -> list[float]:
        return [COST[run.name] for run in runs]

    monkeypatch.setenv("TE_OPS_TUNE_CACHE", str(folder))
    monkeypatch.setattr(tuning, "_times", times)
    tuning.TABLE.forget()
    used.clear()
    with REGISTRY.temporary(Kernel("gemm", "tunable.gemm", _bind, priority=50)):
        yield
    tuning.TABLE.forget()


def model() -> te.Sequential:
    return te.Sequential(te.Linear(8, 16), te.GELU(), te.Linear(16, 8))


def x() -> torch.Tensor:
    return torch.randn(4, 8, requires_grad=True)


def test_forward_and_backward_are_tuned_and_used() -> None:
    m = model()
    report = te.tune(m, x())
    assert {t.key for t in report.problems} == {
        "4x16nt", "4x8nt", "4x16nn", "4x8nn", "16x8tn", "8x16tn",
    }  # fmt: skip
    assert {(t.choice, t.candidates, t.first, t.best) for t in report.problems} == {
        ("fast", 3, 3.0, 1.0)
    }
    assert "4x16nt: 1.0 us of 3.0 (3 candidates)" in str(report)
    m(x()).sum().backward()
    assert used == ["fast"] * 6


def test_nothing_of_the_model_changes() -> None:
    m = te.Sequential(te.Linear(8, 16), te.Dropout(0.5), te.Linear(16, 8))
    recipe = te.recipe.DelayedScaling()
    with te.autocast(recipe=recipe):
        m(x()).sum().backward()
    before = {n: b.clone() for n, b in m.named_buffers()}
    grads = [p.grad.clone() for p in m.parameters()]
    state = torch.get_rng_state()
    for wrapped in (m, nn.Sequential(m, nn.Tanh())):
        te.tune(wrapped, x(), recipe=recipe, again=True)
    x()
    assert all(torch.equal(b, before[n]) for n, b in m.named_buffers())
    assert all(torch.equal(p.grad, g) for p, g in zip(m.parameters(), grads, strict=True))
    assert before
    torch.set_rng_state(state)


def test_random_state_is_kept() -> None:
    m = nn.Sequential(model(), nn.Dropout(0.5))
    given = x()
    state = torch.get_rng_state()
    te.tune(m, given)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_gradients_only_the_forward() -> None:
    with torch.no_grad():
        assert {t.key for t in te.tune(model(), x()).problems} == {"4x16nt", "4x8nt"}


def test_a_model_that_is_no_op_is_run_once() -> None:
    inner = model()
    calls: list[int] = []
    probe = nn.Tanh()
    probe.register_forward_hook(lambda *_: calls.append(1))
    assert len(te.tune(nn.Sequential(inner, probe), x()).problems) == 6
    assert calls == [1]


def test_a_gain_within_noise_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.test_tune.NAMES", ["slow", "even"])
    assert {t.choice for t in te.tune(model(), x()).problems} == {"slow"}


def test_a_problem_without_candidates_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.test_tune.NAMES", [])
    assert str(te.tune(model(), x())) == "no problem has a choice"


def test_plans_made_before_keep_what_they_have() -> None:
    m = model()
    y = m(x())
    te.tune(m, x())
    used.clear()
    y.sum().backward()
    assert used == [None] * 4
    m(x())
    assert used[4:] == ["fast"] * 2


# -- what is kept


def test_another_process_finds_the_choices(folder: Path) -> None:
    te.tune(model(), x())
    (path,) = folder.glob("*.json")
    assert json.loads(path.read_text())["where"] == WHERE
    assert folder.stat().st_mode & 0o077 == 0
    tuning.TABLE.forget()  # as in another process
    report = te.tune(model(), x(), measure=False)
    assert all(t.first is None and t.choice == "fast" for t in report.problems)
    assert str(report).count("known") == 6


def test_known_problems_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    te.tune(model(), x())
    monkeypatch.setattr(tuning, "_times", lambda *_: pytest.fail("measured"))
    te.tune(model(), x())


def test_again_measures_and_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    te.tune(model(), x())
    monkeypatch.setitem(COST, "fast", 9.0)
    te.tune(model(), x(), again=True)
    assert tuning.TABLE.get(WHERE, "4x16nt") == "slow"


def test_what_others_wrote_meanwhile_is_kept(folder: Path) -> None:
    tuning.TABLE.add(WHERE, {"a": "1"})
    other = tuning.Table()
    other.add(WHERE, {"b": "2"})
    tuning.TABLE.add(WHERE, {"c": "3"})
    tuning.TABLE.forget()
    assert [tuning.TABLE.get(WHERE, k) for k in "abc"] == ["1", "2", "3"]


def test_places_do_not_mix() -> None:
    tuning.TABLE.add(WHERE, {"a": "1"})
    assert tuning.TABLE.get("another device", "a") is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 1}', '{"format":1,"where":"'])
def test_a_damaged_file_is_not_used(folder: Path, text: str) -> None:
    tuning.TABLE.add(WHERE, {"a": "1"})
    (path,) = folder.glob("*.json")
    path.write_text(text)
    tuning.TABLE.forget()
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert tuning.TABLE.get(WHERE, "a") is None
    with pytest.warns(RuntimeWarning, match="damaged"):
        tuning.TABLE.add(WHERE, {"b": "2"})
    tuning.TABLE.forget()
    assert tuning.TABLE.get(WHERE, "b") == "2"


def test_off_keeps_choices_in_memory_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("TE_OPS_TUNE_CACHE", "off")
    te.tune(model(), x())
    assert tuning.TABLE.get(WHERE, "4x16nt") == "fast"
    assert not folder.exists()


def test_a_folder_that_others_may_write_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(te.PlanError, match=r"can be written by others.*TE_OPS_TUNE_CACHE"):
        own_folder("TUNE_CACHE", "tune")


def test_a_file_in_place_of_a_folder_is_refused(folder: Path) -> None:
    folder.touch()
    for make in (True, False):
        with pytest.raises(te.PlanError, match=r"cannot be used.*TE_OPS_TUNE_CACHE.*or to off"):
            own_folder("TUNE_CACHE", "tune", make=make)


def test_a_cache_of_somebody_else_at_home_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TE_OPS_TUNE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    there = tmp_path / ".cache"
    assert own_folder("TUNE_CACHE", "tune", make=False) is None
    there.mkdir()
    access = os.access
    monkeypatch.setattr("os.access", lambda p, mode: Path(p) != there and access(p, mode))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert own_folder("TUNE_CACHE", "tune") == tmp_path / f"temporary/te_ops-{os.getuid()}/tune"


def test_looking_makes_no_folder(folder: Path) -> None:
    assert tuning.TABLE.get(WHERE, "a") is None
    assert not folder.exists()


# -- when


def test_wrong_arguments() -> None:
    with pytest.raises(te.PlanError, match=r"te\.tune takes a module, got a str"):
        te.tune("model", x())  # type: ignore[arg-type]
    with pytest.raises(te.PlanError, match="rounds must be a positive number, got 0"):
        te.tune(model(), x(), rounds=0)


def test_only_between_steps() -> None:
    m, given = model(), x()
    with (
        te.autocast(recipe=te.recipe.DelayedScaling()),
        pytest.raises(te.PlanError, match=r"inside te.autocast \(pass recipe= instead\)"),
    ):
        te.tune(m, given)
    y = m(given)
    y.register_hook(lambda _: te.tune(m, given))
    with pytest.raises(te.PlanError, match="in a backward pass"):
        y.sum().backward()
