"""Plans on emulated kernels, recorded and replayed: cleared amaxes, shared memory and saved values in one block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import recipe
from te_ops.backends.cuda import KERNELS, launch, state
from te_ops.registry import REGISTRY
from te_ops.runtime import cache, replay, tape, transcript
from te_ops.runtime import state as runtime_state
from tests.backends.cuda import emulator
from tests.runtime.host_kernels import Counter, recordable

pytestmark = pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")

RECIPES: dict[str, te.Recipe | None] = {
    "dense": None,
    "delayed": recipe.DelayedScaling(amax_history_len=3),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "build", emulator.build)
    monkeypatch.setattr(launch, "zero_word", emulator.zero_word)
    monkeypatch.setattr(cache, "arch_of", lambda device: "sm_90")
    state.forget()
    monkeypatch.setitem(
        runtime_state.UPDATES, "cpu", lambda device, rolls: state.roll_on("sm_90", 0, rolls)
    )
    monkeypatch.setitem(tape.COPIES, "cpu", emulator.clone)
    here = [replace(k, available=lambda: None) for k in KERNELS]
    gemm = replace(recordable(Counter()), runs="gemm", priority=90)
    with REGISTRY.without("cublas."), REGISTRY.temporary(*here, gemm):
        yield
    state.forget()


def train(made: te.Recipe | None, *, sink: list[Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = te.Sequential(
        te.RMSNorm(128), te.Linear(128, 256), te.SwiGLU(), te.Linear(128, 128, bias=False)
    ).bfloat16()
    found: list[torch.Tensor] = []
    for step in range(transcript.WARM + 3):
        torch.manual_seed(step)
        x = torch.randn(3, 11, 128, dtype=torch.bfloat16, requires_grad=True)
        model.zero_grad(set_to_none=True)
        with te.autocast(enabled=made is not None, recipe=made):
            y = model(x)
        y.backward(torch.randn_like(y))
        assert x.grad is not None
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found += [t.detach().clone() for t in (y, x.grad, *grads, *model.buffers())]
    (runner,) = model.__dict__["_te_cache"].runners.values()
    (part,) = runner.runners
    sink += [part.recorded, *(b.recorded for b in part._backwards.values())]
    return found


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("name", RECIPES)
def test_a_tape_gives_what_the_launches_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: list[Any] = []
    theirs = train(RECIPES[name], sink=plain)
    assert [p.tape for p in plain] == [None, None]
    monkeypatch.setitem(replay.STREAMS, "cpu", lambda device: 0)
    taped: list[Any] = []
    ours = train(RECIPES[name], sink=taped)
    assert all(p.tape is not None for p in taped), [str(p) for p in taped]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.float().nan_to_num(7.0), b.float().nan_to_num(7.0))


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_amaxes_are_cleared_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replay.STREAMS, "cpu", lambda device: 0)
    taped: list[Any] = []
    train(RECIPES[name], sink=taped)
    for phase in taped:
        clears = [issue for issue, _, _ in phase.tape.operations if issue.clears]
        assert len(clears) == 1
        assert phase.tape.operations[0][0].clears


@pytest.mark.usefixtures("on_the_host")
def test_a_scale_that_backward_reads_again_is_copied_by_the_tape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commit writes the scale in between; without a copy that is recorded, torch makes one at every call."""
    monkeypatch.setitem(replay.STREAMS, "cpu", lambda device: 0)
    counts = []
    for copy in (emulator.clone, None):
        if copy is None:
            monkeypatch.delitem(tape.COPIES, "cpu")
        taped: list[Any] = []
        train(RECIPES["delayed"], sink=taped)
        counts.append([len(phase.tape.operations) for phase in taped])
    assert counts[0][0] == counts[1][0] + 1
    assert counts[0][1] == counts[1][1]
