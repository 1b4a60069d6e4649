"""Rolling delayed-scaling states on a device: what a kernel gets, and commits that come again as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_ops.recipe import DelayedScaling
from te_ops.runtime.observed import Cell, Observation

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
        made = Formula((config, fp8_max), config, length, most_recent, fp8_max, divisor)
    if len(_FORMULAS) > 256:
        _FORMULAS.clear()
    _FORMULAS[id(config), fp8_max] = (config, made)
    return made


class Roll(NamedTuple):
    """One state's step for a kernel: addresses (0: none), and what to compute."""

    scale: int
    history: int
    nonfinite_steps: int
    when: int
    formula: Formula
    amaxes: list[int]


UPDATES: dict[str, Callable[[torch.device, list[Roll]], None]] = {}
"""By device type: what rolls many states of one device at once. A backend adds itself with its kernels."""


class Batch(NamedTuple):
    """The rolls of a commit, for those that come with everything where it lay."""

    device: torch.device
    rolls: list[Roll]

    def roll(self, observed: dict[DelayedState, Observation]) -> None:
        """Roll these states, which have the batch's key."""
        UPDATES[self.device.type](self.device, self.rolls)
        _increment_versions([b for s in observed for b in s.__dict__["_buffers"].values()])
        for state in observed:
            state.__dict__["version"] += 1


BATCHES: dict[tuple[int, ...], Batch] = {}
MOST_BATCHES = 256


def key_of(observed: dict[DelayedState, Observation]) -> tuple[int, ...] | None:
    """Everything that the rolls of a commit are made of, None if some state was not rolled like this before.

    A batch keeps its formulas alive, so their ids are theirs as long as it is known.
    """
    found: list[int] = []
    for state, seen in observed.items():
        fields = state.__dict__
        formula = fields["formula"]
        if seen.when is not None or not _current(formula, seen, fields["maker"]):
            return None
        scale, history, steps = fields["_buffers"].values()
        found += (
            id(formula),
            scale.data_ptr(),
            history.data_ptr(),
            history.numel(),
            steps.data_ptr(),
            len(seen.cells),
        )
        amaxes = _addresses(seen, scale.device)
        if amaxes is None:
            return None
        found += amaxes
    return tuple(found)


def again(observed: dict[DelayedState, Observation], key: tuple[int, ...] | None) -> bool:
    """Roll states that were rolled together before, and whose numbers lie where they lay; False for others."""
    batch = None if key is None else BATCHES.get(key)
    if batch is None or batch.device.type not in UPDATES:
        return False
    batch.roll(observed)
    return True


def roll_on_device(
    observed: dict[DelayedState, Observation], key: tuple[int, ...] | None
) -> dict[DelayedState, Observation]:
    """Roll the states that a kernel can; returns the others. `key`: what to remember the rolls by."""
    left: dict[DelayedState, Observation] = {}
    rolls: dict[torch.device, list[Roll]] = {}
    written: list[torch.Tensor] = []
    rolled: list[tuple[dict[str, Any], Formula]] = []
    for state, seen in observed.items():
        made = _roll_of(state, seen)
        if made is None:
            left[state] = seen
            continue
        buffers = state.__dict__["_buffers"].values()
        rolls.setdefault(state.scale.device, []).append(made)
        written += buffers
        rolled.append((state.__dict__, made.formula))
    for device, together in rolls.items():
        UPDATES[device.type](device, together)
        if key is not None and len(together) == len(observed):
            if len(BATCHES) >= MOST_BATCHES:
                BATCHES.clear()
            BATCHES[key] = Batch(device, together)
    if written:
        _increment_versions(written)
    for fields, formula in rolled:
        fields["maker"], fields["formula"] = formula.maker, formula
        fields["version"] += 1
    return left


def _roll_of(state: DelayedState, seen: Observation) -> Roll | None:
    """The step of one state, None where no kernel takes it."""
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
    return Roll(scale.data_ptr(), history.data_ptr(), steps.data_ptr(), when, formula, amaxes)


def _current(formula: Formula | None, seen: Observation, maker: Any) -> bool:
    """Whether the formula of a state's last step is that of this one."""
    return (
        formula is not None
        and formula.config is seen.config
        and formula.fp8_max == seen.fp8_max
        and formula.maker is maker
    )


def _increment_versions(written: list[torch.Tensor]) -> None:
    try:
        torch.autograd.graph.increment_version(written)
    except RuntimeError:  # a tensor of inference mode has none
        torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])


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
