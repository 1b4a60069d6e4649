"""What a phase observes is handed over as a whole, and rolls as state by state would; nothing is trusted that may have
changed since the last commit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.context import Observed
from te_ops.runtime import observed as observed_
from te_ops.runtime.loads import Places
from te_ops.runtime.observed import (
    MOST_CELLS,
    Handed,
    Observation,
    Seen,
    Sheet,
    by_state,
    observe,
    observe_sheet,
)
from te_ops.runtime.rolls import Rolls
from te_ops.runtime.state import UPDATES, DelayedState, make_state, settle
from tests.runtime.host_kernels import host_kernels, tensor_at

CONFIG = te.recipe.DelayedScaling(amax_history_len=3)
USE = (CONFIG, 448.0)
CPU = torch.device("cpu")


class Device:
    """Rolls from the addresses that a kernel would get, and counts."""

    def __init__(self) -> None:
        self.commits: list[Rolls] = []

    def __call__(self, device: torch.device, rolls: Rolls) -> None:
        self.commits.append(rolls)
        left = iter(rolls.amaxes)
        one = torch.zeros(1)
        for r in rolls.items:
            made = DelayedState(r.formula.length)
            own = {
                "scale": tensor_at(r.scale, one),
                "amax_history": tensor_at(r.history, torch.zeros(r.formula.length)),
                "nonfinite_steps": tensor_at(r.nonfinite_steps, torch.zeros(1, dtype=torch.int64)),
            }
            made._buffers.update(own)
            amaxes = [tensor_at(next(left), one).clone() for _ in range(r.amaxes)]
            made.advance(torch.cat(amaxes).amax(), r.formula.config, r.formula.fp8_max)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setitem(UPDATES, "cpu", made)
    return made


def block(*amaxes: float) -> torch.Tensor:
    """A block as a tape has it: bytes, amaxes 8 bytes apart."""
    made = torch.zeros(len(amaxes), 2)
    made[:, 0] = torch.tensor(amaxes)
    return made.view(-1).view(torch.uint8)


def sheet_of(*states: DelayedState, group: Any = None, use: Any = USE) -> Sheet:
    return Sheet(states, [use] * len(states), tuple(range(0, 8 * len(states), 8)), group)


def same(ours: list[DelayedState], theirs: list[DelayedState]) -> None:
    for s, t in zip(ours, theirs, strict=True):
        for (name, a), b in zip(s.named_buffers(), t.buffers(), strict=True):
            assert torch.equal(a, b), name
        assert (s.version, s.maker) == (t.version, t.maker)


def filled(*items: tuple[Sheet, torch.Tensor]) -> Observed:
    made = Observed()
    for item in items:
        observe_sheet(made, Handed(*item))
    return made


def test_sheets_roll_as_states_do_and_are_prepared_once(device: Device) -> None:
    states = [DelayedState(3) for _ in range(3)]
    alone = copy.deepcopy(states)
    first, second = sheet_of(*states[:2]), sheet_of(states[2], states[0])
    for k in range(1, 5):
        versions = [b._version for s in states for b in s.buffers()]
        settle(filled((first, block(k, 9.0)), (second, block(5.0 * k, 2.0 * k))))
        for s, amax in zip(alone, (2.0 * k, 9.0, 5.0 * k), strict=True):
            s.advance(torch.tensor(amax), *USE)
        same(states, alone)
        assert all(
            b._version > v
            for b, v in zip((b for s in states for b in s.buffers()), versions, strict=True)
        )
    assert len({id(r) for r in device.commits[1:]}) == 1  # the second commit's, again and again


def replaced(state: DelayedState) -> None:
    state.scale = torch.tensor([2.0])


def resized(state: DelayedState) -> None:
    state.amax_history = torch.zeros(5)


def loaded(state: DelayedState) -> None:
    state.load_state_dict({k: v.clone() + 1 for k, v in state.state_dict().items()})


def by_another_recipe(state: DelayedState) -> None:
    state.advance(torch.tensor(3.0), te.recipe.DelayedScaling(amax_history_len=3, margin=1), 448.0)


@pytest.mark.parametrize("change", [replaced, resized, loaded, by_another_recipe])
def test_a_state_that_has_changed_rolls_from_what_it_is(
    change: Callable[[DelayedState], None], device: Device
) -> None:
    states = [DelayedState(3), DelayedState(3)]
    alone = copy.deepcopy(states)
    sheet = sheet_of(*states)
    for k in range(6):
        if k == 3:
            change(states[1])
            change(alone[1])
        settle(filled((sheet, block(1.0 + k, 7.0 - k))))
        for s, amax in zip(alone, (1.0 + k, 7.0 - k), strict=True):
            s.advance(torch.tensor(amax), *USE)
        same(states, alone)
    assert len(device.commits) >= 5


@pytest.mark.usefixtures("device")
def test_microbatches_combine_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed_, "_SHEETS", 40)
    for count in (2, MOST_CELLS + 1, 50):
        state, alone = DelayedState(3), DelayedState(3)
        sheet = sheet_of(state)
        for _ in range(3):
            settle(filled(*((sheet, block(float(i + 1))) for i in range(count))))
            alone.advance(torch.tensor(float(count)), *USE)
        same([state], [alone])


@pytest.mark.usefixtures("device")
def test_sheets_and_single_observations_keep_their_order() -> None:
    state, other = DelayedState(3), te.recipe.DelayedScaling(amax_history_len=3, margin=2)
    made = filled((sheet_of(state), block(4.0)))
    observe(made, state, torch.tensor(1.0), Seen(other, 448.0, None))
    assert not made.sheets
    observe_sheet(made, Handed(sheet_of(state), block(2.0)))
    assert made
    (found,) = by_state(made).values()
    assert isinstance(found, Observation)
    assert (float(found.amax), found.config) == (4.0, CONFIG)  # the last recipe counts
    settle(made)
    assert state.amax_history.tolist() == [0.0, 0.0, 4.0]


def test_single_observations_that_come_again_find_their_launch(device: Device) -> None:
    states, amaxes = [DelayedState(3) for _ in range(2)], [torch.tensor([3.0]), torch.tensor([5.0])]
    alone = copy.deepcopy(states)
    for k in range(4):
        made = Observed()
        for s, amax in zip(states, amaxes, strict=True):
            amax.fill_(k + 1.0)
            observe(made, s, amax, Seen(*USE, None))
        settle(made)
        for s in alone:
            s.advance(torch.tensor(k + 1.0), *USE)
        same(states, alone)
    assert len({id(r) for r in device.commits}) == 1
    other = Observed()
    observe(other, states[0], torch.tensor([9.0]), Seen(*USE, None))
    settle(other)
    assert device.commits[-1] is not device.commits[0]
    assert states[0].amax_history.tolist()[-1] == 9.0


@pytest.mark.usefixtures("device")
def test_a_recipe_with_a_function_of_the_users_takes_the_torch_path(device: Device) -> None:
    own = te.recipe.DelayedScaling(amax_history_len=3, amax_compute_algo=lambda h: h.amin(0))
    state, alone = DelayedState(3), DelayedState(3)
    sheet = sheet_of(state, use=(own, 448.0))
    for k in range(3):
        settle(filled((sheet, block(2.0 + k))))
        alone.advance(torch.tensor(2.0 + k), own, 448.0)
    same([state], [alone])
    assert not device.commits
    assert not sheet.batches


def test_a_group_is_reduced_first() -> None:
    state = DelayedState(3)
    assert sheet_of(state, group=object()).reduces
    alone = te.recipe.DelayedScaling(amax_history_len=3, reduce_amax=False)
    assert not sheet_of(state, group=object(), use=(alone, 448.0)).reduces
    with pytest.raises(te.RecipeError, match=r"torch\.distributed is not initialised"):
        settle(filled((sheet_of(state, group=object()), block(1.0))))


def test_states_are_found_where_they_are_now() -> None:
    op = te.Linear(4, 4)
    places = Places([(None, "input", 3), (op, "weight", 3)])
    first = places.find(op, CPU)
    assert places.find(op, CPU) is first
    del op.quantizer.delayed.input  # type: ignore[union-attr]
    second = places.find(op, CPU)
    assert second[0] is not first[0]
    assert second[1] is first[1]
    op.quantizer.delayed.weight = other = DelayedState(3)  # type: ignore[union-attr]
    assert places.find(op, CPU)[1] is other
    op._modules.pop("quantizer")
    assert places.find(op, CPU)[0] is make_state(op, "input", 3)
    assert places.find(op, torch.device("meta"))[0].scale.is_meta


@pytest.mark.usefixtures("device")
def test_a_prepared_commit_keeps_no_state_alive() -> None:
    """States that live until the collector comes are live on some ranks only, which reduce all live ones together."""
    gc.collect()
    gc.disable()
    try:
        first, second = sheet_of(DelayedState(3)), sheet_of(DelayedState(3))
        for _ in range(3):
            settle(filled((first, block(1.0)), (second, block(2.0)), (first, block(3.0))))
        assert first.batches
        left = [weakref.ref(s) for sheet in (first, second) for s in sheet.states]
        del first, second
        assert [ref() for ref in left] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("fp8_dpa", [False, True])
def test_training_by_tapes_and_sheets_is_training(
    fp8_dpa: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of several microbatches, one under another recipe, and one that skips an op."""
    recipe = te.recipe.DelayedScaling(amax_history_len=3, fp8_dpa=fp8_dpa)
    other = te.recipe.DelayedScaling(amax_history_len=4, fp8_dpa=fp8_dpa, margin=1)

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        first, second = (
            te.Linear(16, 48),
            te.Sequential(te.Attention(2, packed=True), te.Linear(16, 16)),
        )
        for k in range(10):
            with te.autocast(recipe=other if k == 6 else recipe):
                for _ in range(1 + k % 3):
                    y = first(torch.randn(2, 4, 16) * (k + 1))
                    (y if k == 8 else second(y)).square().sum().backward()
        both = torch.nn.ModuleList([first, second])
        return [
            *both.state_dict().values(),
            *(p.grad for p in both.parameters() if p.grad is not None),
        ]

    plain, device = train(), Device()
    with host_kernels() as counter:
        monkeypatch.setitem(UPDATES, "cpu", device)
        made = train()
    assert counter.issued
    assert len({id(r) for r in device.commits}) < len(device.commits)  # some came again
    assert all(torch.equal(a, b) for a, b in zip(plain, made, strict=True))
