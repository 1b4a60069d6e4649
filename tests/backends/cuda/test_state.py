"""The state update in one launch equals `delayed_update`, bit for bit, on the host build."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda import launch, state
from te_ops.runtime import state as runtime_state
from te_ops.runtime.state import Cell, DelayedState, Observation, commit
from tests.backends.cuda import emulator

pytestmark = pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")

AMAXES = (0.0, 1e-45, 1e-38, 0.3, 7.0, 448.0, 3e38, math.inf, math.nan)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    monkeypatch.setattr(launch, "build", emulator.build)
    state.forget()
    sizes: list[int] = []

    def roll(device: torch.device, rolls: Any) -> None:
        sizes.append(len(rolls))
        state.roll_on("sm_90", 0, rolls)

    monkeypatch.setitem(runtime_state.UPDATES, "cpu", roll)
    yield sizes
    state.forget()


def pairs(
    count: int, length: int, draw: torch.Generator
) -> tuple[list[DelayedState], list[DelayedState]]:
    """Random states, twice."""
    ours = [DelayedState(length) for _ in range(count)]
    theirs = [DelayedState(length) for _ in range(count)]
    for a, b in zip(ours, theirs, strict=True):
        a.scale.copy_(torch.rand(1, generator=draw) * 100)
        a.amax_history.copy_(torch.rand(length, generator=draw) * 50)
        a.nonfinite_steps.fill_(int(torch.randint(5, (1,), generator=draw)))
        if length > 3:
            a.amax_history[2] = math.nan if float(a.scale) > 80 else 1e38
        b.load_state_dict(a.state_dict())
        a.version = b.version
    return ours, theirs


def same(a: DelayedState, b: DelayedState) -> bool:
    return all(
        torch.equal(x.nan_to_num(-1.0), y.nan_to_num(-1.0))
        for x, y in zip(a.buffers(), b.buffers(), strict=True)
    )


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 3, 16, 256, 257, 1024])
def test_the_numbers_are_those_of_the_reference(
    algo: str, length: int, on_the_host: list[int]
) -> None:
    draw = torch.Generator().manual_seed(length)
    config = te.recipe.DelayedScaling(
        amax_history_len=length,
        amax_compute_algo=algo,
        margin=length % 3,
        use_power_2_scales=length % 2 == 1,
    )
    ours, theirs = pairs(len(AMAXES), length, draw)
    for step in range(3):
        order = torch.randperm(len(AMAXES), generator=draw).tolist()
        seen = {}
        for s, i in zip(ours, order, strict=True):
            seen[s] = Observation(torch.tensor([AMAXES[i]]), config, (448.0, 57344.0)[i % 2], None)
            s.maker = None
        commit(seen)
        for t, i in zip(theirs, order, strict=True):
            t.maker = None
            t.advance(torch.tensor(AMAXES[i]), config, (448.0, 57344.0)[i % 2])
        for s, t in zip(ours, theirs, strict=True):
            assert same(s, t), (step, s.state_dict(), t.state_dict())
            assert (s.version, s.maker) == (t.version, t.maker)
    assert on_the_host == [len(AMAXES)] * 3


def test_several_amaxes_of_one_state_combine_and_cells_are_read_in_their_block() -> None:
    config = te.recipe.DelayedScaling(amax_history_len=4)
    block = torch.zeros(1024, dtype=torch.uint8)
    block[256:260].view(torch.float32).fill_(5.0)
    block[512:516].view(torch.float32).fill_(9.0)
    a, b = DelayedState(4), DelayedState(4)
    seen = Observation(Cell(block, 256), config, 448.0, None)
    seen.cells += [Cell(block, 512), torch.tensor(2.0)]
    assert float(seen.amax) == 9.0
    bad = Observation(torch.tensor(1.0), config, 448.0, None)
    bad.cells += [torch.tensor(math.nan), torch.tensor(2.0)]
    commit({a: seen, b: bad})
    assert torch.equal(a.scale, torch.tensor([448.0]) / 9.0)
    assert a.amax_history.tolist() == [0.0, 0.0, 0.0, 9.0]
    assert (b.scale.item(), b.nonfinite_steps.item()) == (1.0, 1)


def test_a_condition_is_read_on_the_device() -> None:
    config = te.recipe.DelayedScaling(amax_history_len=3)
    states = [DelayedState(3), DelayedState(3)]
    before = {k: v.clone() for k, v in states[1].state_dict().items()}
    commit(
        {
            s: Observation(torch.tensor(4.0), config, 448.0, None, torch.tensor(holds))
            for s, holds in zip(states, (True, False), strict=True)
        }
    )
    assert states[0].scale.item() == 112.0
    assert all(torch.equal(v, before[k]) for k, v in states[1].state_dict().items())


@pytest.mark.parametrize("count", [1, 9, 33, 130])
def test_many_states_take_several_launches(count: int, on_the_host: list[int]) -> None:
    config = te.recipe.DelayedScaling(amax_history_len=5)
    states = [DelayedState(5) for _ in range(count)]
    commit(
        {
            s: Observation(torch.tensor(float(i + 1)), config, 448.0, None)
            for i, s in enumerate(states)
        }
    )
    assert [s.amax_history[-1].item() for s in states] == [float(i + 1) for i in range(count)]
    assert on_the_host == [count]


def test_what_the_kernel_does_not_know_takes_the_torch_path(on_the_host: list[int]) -> None:
    own = te.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=lambda h: h.amin(0))
    known = te.recipe.DelayedScaling(amax_history_len=4)
    other = te.recipe.DelayedScaling(amax_history_len=4, margin=1)
    longer = te.recipe.DelayedScaling(amax_history_len=6)
    states = [DelayedState(4) for _ in range(4)]
    states[2].advance(torch.tensor(2.0), other, 448.0)  # another recipe made its scale
    configs = [own, known, known, longer]
    commit(
        {
            s: Observation(torch.tensor(2.0), c, 448.0, None)
            for s, c in zip(states, configs, strict=True)
        }
    )
    assert on_the_host == [1]
    assert [len(s.amax_history) for s in states] == [4, 4, 4, 6]
    assert states[2].scale.item() == 224.0


def test_torch_sees_the_writes() -> None:
    state_ = DelayedState(2)
    before = [b._version for b in state_.buffers()]
    commit(
        {
            state_: Observation(
                torch.tensor(1.0), te.recipe.DelayedScaling(amax_history_len=2), 448.0, None
            )
        }
    )
    assert all(b._version > v for b, v in zip(state_.buffers(), before, strict=True))


@pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_it_compiles(arch: str) -> None:
    for size in state.SIZES:
        log = compiler.compile_text(state.text_of(*size), arch, options=("--ptxas-options=-v",)).log
        assert "spill" not in log or "0 bytes spill stores, 0 bytes spill loads" in log
