"""Rolling delayed-scaling states on a device: what a kernel gets, and commits that come again as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_ops.recipe import DelayedScaling
from te_ops.runtime.observed import MOST_CELLS, Cell, Handed, Observation, Seen, Sheet

if TYPE_CHECKING:
    from te_ops.runtime.state import DelayedState


class Formula(NamedTuple):
    """What a recipe and a format ask of every step: the numbers of `delayed_update`."""

    maker: tuple[DelayedScaling, float]
    config: DelayedScaling
    length: int
    most_recent: bool  # else the largest of the window
    fp8_max: float
    divisor: float  # 2 ** margin
    pow2: bool  # scales are rounded down to powers of two

    def fits(self, maker: tuple[DelayedScaling, float] | None, history: torch.Tensor) -> bool:
        """Whether a state with this maker rolls from its own scale, and with its own history's length."""
        known = maker is None or maker is self.maker or maker == self.maker
        return known and history.numel() == self.length


_FORMULAS: dict[tuple[int, float], tuple[DelayedScaling, Formula | None]] = {}


def formula_of(config: DelayedScaling, fp8_max: float) -> Formula | None:
    """The formula of a recipe; None where it has functions of the user's. Recipes hash slowly: found by identity."""
    found = _FORMULAS.get((id(config), fp8_max))
    if found is not None and found[0] is config:
        return found[1]
    made = None
    if not callable(config.amax_compute_algo) and config.scaling_factor_compute_algo is None:
        most_recent = config.amax_compute_algo == "most_recent"
        length, divisor = config.amax_history_len, 2.0**config.margin
        pow2 = config.use_power_2_scales
        made = Formula((config, fp8_max), config, length, most_recent, fp8_max, divisor, pow2)
    if len(_FORMULAS) > 256:
        _FORMULAS.clear()
    _FORMULAS[id(config), fp8_max] = (config, made)
    return made


class Roll(NamedTuple):
    """One state's step for a kernel: addresses (0: none), how many amaxes it has, and what to compute."""

    scale: int
    history: int
    nonfinite_steps: int
    when: int
    formula: Formula
    amaxes: int


class Rolls:
    """The steps of a commit on a device, and where their amaxes lie, one after the other.

    `prepared` is the backend's, for a commit that comes again: of what is here, only `amaxes` changes then, to another
    list.
    """

    __slots__ = ("amaxes", "items", "prepared")

    def __init__(self) -> None:
        self.items: list[Roll] = []
        self.amaxes: list[int] = []
        self.prepared: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self.items)


UPDATES: dict[str, Callable[[torch.device, Rolls], None]] = {}
"""By device type: what rolls many states of one device at once. A backend adds itself with its kernels."""


class Batch:
    """The steps of a commit of whole sheets: prepared once, good as long as the states are what they were."""

    __slots__ = (
        "bases", "cells", "device", "fields", "kind", "lock", "makers", "others", "places", "rolls", "tables",
    )  # fmt: skip

    def __init__(self, sheets: Sequence[Sheet], device: torch.device) -> None:
        # Alive, so that their ids are theirs; the first is, since it holds this, and states are not to live in circles.
        self.others = tuple(s for s in sheets if s is not sheets[0])
        self.device, self.kind = device, device.type
        self.fields: list[dict[str, Any]] = []  # of the states: not through nn.Module's look-up
        self.tables: list[dict[str, torch.Tensor]] = []  # their buffers
        self.cells: list[tuple[int, int]] = []  # of all rolls: which sheet's block, and the offset
        self.rolls = Rolls()
        self.bases: list[int] = []
        self.lock = threading.Lock()

    def fill(self, sheets: Sequence[Sheet]) -> bool:
        """Collect the steps of the sheets' states; False if a kernel does not take one of them."""
        found: dict[DelayedState, list[tuple[int, int]]] = {}
        for i, sheet in enumerate(sheets):
            for state, seen, offset in zip(sheet.states, sheet.seen, sheet.offsets, strict=True):
                formula, maker = state.formula, state.maker
                if formula is None or not _current(formula, seen, maker):
                    return False
                found.setdefault(state, []).append((i, offset))
        for state, cells in found.items():
            if len(cells) > MOST_CELLS:
                return False
            scale, history, steps = state.__dict__["_buffers"].values()
            if scale.device != self.device or not state.formula.fits(state.maker, history):  # type: ignore[union-attr]
                return False
            places = (scale.data_ptr(), history.data_ptr(), steps.data_ptr())
            self.rolls.items.append(Roll(*places, 0, state.formula, len(cells)))  # type: ignore[arg-type]
            self.cells += cells
        self.fields = [s.__dict__ for s in found]
        self.tables = [fields["_buffers"] for fields in self.fields]
        self.makers = list(map(_maker, self.fields))
        self.places = list(map(_place, chain.from_iterable(map(_items, self.tables))))
        return True

    def roll(self, found: Sequence[Handed]) -> bool:
        """Roll by the amaxes in these blocks; False, and nothing done, if a state is not what it was."""
        buffers = [*chain.from_iterable(map(_items, self.tables))]
        update = UPDATES.get(self.kind)
        if (
            list(map(_place, buffers)) != self.places
            or list(map(_maker, self.fields)) != self.makers
            or update is None
        ):
            return False
        bases = [handed.block.data_ptr() for handed in found]
        with self.lock:
            if bases != self.bases:
                self.rolls.amaxes = [bases[i] + offset for i, offset in self.cells]
                self.bases = bases
            update(self.device, self.rolls)
        try:
            _increment(buffers)
        except RuntimeError:
            _increment_versions(buffers)
        for fields in self.fields:
            fields["version"] += 1
        return True


_place = torch.Tensor.data_ptr
_increment = torch._C._increment_version
_items = dict.values
_maker = itemgetter("maker")
MOST_BATCHES = 16  # that begin with one sheet


def again(found: Sequence[Handed]) -> bool:
    """Roll states whose sheets were committed together before; False for others."""
    batch = found[0].sheet.batches.get(() if len(found) == 1 else _key(found))
    return batch is not None and batch.roll(found)


def remember(found: Sequence[Handed]) -> None:
    """Prepare the next commit of these sheets, which has just been done for the first time as they are."""
    device = found[0].block.device
    if device.type not in UPDATES or any(handed.block.device != device for handed in found):
        return
    mine = [handed.sheet for handed in found]
    known, made = mine[0].batches, Batch(mine, device)
    if made.fill(mine):
        if len(known) >= MOST_BATCHES:
            known.clear()
        known[_key(found)] = made


def _key(found: Sequence[Handed]) -> tuple[int, ...]:
    """Which sheets come after the first, whose batches are looked up."""
    return tuple([id(handed.sheet) for handed in found[1:]])


def roll_on_device(observed: dict[DelayedState, Observation]) -> dict[DelayedState, Observation]:
    """Roll the states that a kernel can; returns the others."""
    left: dict[DelayedState, Observation] = {}
    rolls: dict[torch.device, Rolls] = {}
    written: list[torch.Tensor] = []
    rolled: list[tuple[dict[str, Any], Formula]] = []
    for state, seen in observed.items():
        found = _roll_of(state, seen)
        if found is None:
            left[state] = seen
            continue
        made, amaxes = found
        together = rolls.setdefault(state.scale.device, Rolls())
        together.items.append(made)
        together.amaxes += amaxes
        written += state.__dict__["_buffers"].values()
        rolled.append((state.__dict__, made.formula))
    for device, together in rolls.items():
        UPDATES[device.type](device, _known(device, together))
    if written:
        _increment_versions(written)
    for fields, formula in rolled:
        fields["maker"], fields["formula"] = formula.maker, formula
        fields["version"] += 1
    return left


_KNOWN: dict[tuple[Any, ...], Rolls] = {}
MOST_KNOWN = 64


def _known(device: torch.device, rolls: Rolls) -> Rolls:
    """The rolls of an earlier commit that were equal, with what was prepared for them, else these.

    They keep their formulas alive, so the ids of these are theirs as long as they are known.
    """
    parts = [(*r[:4], id(r.formula), r.amaxes) for r in rolls.items]
    key = (device, *chain.from_iterable(parts), *rolls.amaxes)
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        found = _KNOWN[key] = rolls
    return found


def forget() -> None:
    """Drop what was prepared for rolls; for tests."""
    _KNOWN.clear()


def _roll_of(state: DelayedState, seen: Observation) -> tuple[Roll, list[int]] | None:
    """The step of one state and where its amaxes lie; None where no kernel takes it."""
    fields = state.__dict__  # not through nn.Module, which looks for parameters and buffers
    formula = fields["formula"]
    scale, history, steps = fields["_buffers"].values()
    if scale.device.type not in UPDATES:
        return None
    if not _current(formula, seen, fields["maker"]):
        formula = formula_of(seen.config, seen.fp8_max)
    if formula is None or not formula.fits(fields["maker"], history):
        return None
    amaxes = _addresses(seen, scale.device)
    if amaxes is None:
        return None
    when = 0 if seen.when is None else seen.when.data_ptr()
    places = (scale.data_ptr(), history.data_ptr(), steps.data_ptr())
    return Roll(*places, when, formula, len(amaxes)), amaxes


def _current(formula: Formula | None, seen: Observation | Seen, maker: Any) -> bool:
    """Whether the formula of a state's last step is that of this one."""
    return (
        formula is not None
        and formula.config is seen.config
        and formula.fp8_max == seen.fp8_max
        and formula.maker is maker
    )


def _increment_versions(written: list[torch.Tensor]) -> None:
    """Of all that have one: a tensor of inference mode has none."""
    _increment([t for t in written if not t.is_inference()])


def _addresses(seen: Observation, device: torch.device) -> list[int] | None:
    """Where the amaxes lie; None if one is elsewhere or no FP32 number."""
    found = []
    for cell in seen.cells:
        if isinstance(cell, Cell):
            block, offset = cell
            found.append(block.data_ptr() + offset)
            if block.device != device:
                return None
        elif cell.device == device and cell.dtype is torch.float32:
            found.append(cell.data_ptr())
        else:
            return None
    return found
