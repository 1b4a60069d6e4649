"""What a step saw of delayed-scaling states, until it is committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_ops.context import Observed
from te_ops.recipe import DelayedScaling

if TYPE_CHECKING:
    from te_ops.runtime.state import DelayedState


class Cell(NamedTuple):
    """An amax in a block of memory, FP32 at `offset` bytes. A tensor of it is made only where torch reads it."""

    block: torch.Tensor
    offset: int

    def tensor(self) -> torch.Tensor:
        """The amax, with no dimension."""
        block = self.block.view(torch.uint8)
        return block[self.offset : self.offset + 4].view(torch.float32).view(())


class Seen(NamedTuple):
    """Under what an amax was observed."""

    config: DelayedScaling
    fp8_max: float
    group: Any


class Sheet:
    """Which states a phase observes, and where in a block of bytes the amax of each lies: the same at every call.

    A call hands over the sheet and its block. A commit that gets the same sheets again finds its launch prepared in
    the first of them (`te_ops.runtime.rolls`).
    """

    __slots__ = ("batches", "group", "offsets", "reduces", "seen", "states")

    def __init__(
        self,
        states: tuple[DelayedState, ...],
        used: Sequence[tuple[DelayedScaling, float]],
        offsets: tuple[int, ...],
        group: Any,
    ) -> None:
        """`used`: the recipe and the format's maximum under which each state was read."""
        self.states = states
        self.seen = tuple([Seen(config, fp8_max, group) for config, fp8_max in used])
        self.offsets = offsets
        self.group = group
        self.reduces = group is not None and any(config.reduce_amax for config, _ in used)
        self.batches: dict[tuple[int, ...], Any] = {}


class Handed:
    """A sheet with the block of a call, on its way to a commit.

    `lent`: the block is a graph's own, and the next replay writes it again; who replays looks whether this is still
    alive, and has it `keep` what lies there.
    """

    __slots__ = ("__weakref__", "block", "lent", "sheet")

    def __init__(self, sheet: Sheet, block: torch.Tensor, *, lent: bool = False) -> None:
        self.sheet, self.block, self.lent = sheet, block, lent

    def keep(self) -> None:
        """Copy the block, if it is lent."""
        if self.lent:
            self.block, self.lent = self.block.clone(), False


class Observation:
    """What one step saw of one state; several uses in a region combine by max."""

    __slots__ = ("cells", "config", "fp8_max", "group", "when")

    def __init__(
        self,
        amax: torch.Tensor | Cell,
        config: DelayedScaling,
        fp8_max: float,
        group: Any,
        when: torch.Tensor
        | None = None,  # 0-dim bool: roll only if it holds, without asking the host
    ) -> None:
        self.cells: list[torch.Tensor | Cell] = [amax]
        self.config = config
        self.fp8_max = fp8_max
        self.group = group
        self.when = when

    @property
    def amax(self) -> torch.Tensor:
        """The largest amax that was observed; NaN if one was."""
        found = [c.tensor() if isinstance(c, Cell) else c for c in self.cells]
        if len(found) == 1:
            return found[0]
        return torch.stack([f.reshape(()) for f in found]).amax(0)

    @amax.setter
    def amax(self, value: torch.Tensor) -> None:
        self.cells = [value]


MOST_CELLS = 16  # amaxes of a state that wait for a commit before they are combined
_SHEETS = 512  # sheets that wait for a commit before they are spread


def observe(into: Observed, state: DelayedState, amax: torch.Tensor | Cell, seen: Seen) -> None:
    """Add an observation to a region (or a backward) that commits later."""
    _add(by_state(into), state, amax, seen)


def observe_sheet(into: Observed, handed: Handed) -> None:
    """Add the observations of a call at once."""
    into.sheets.append(handed)
    if len(into.sheets) > _SHEETS:
        by_state(into)


def by_state(observed: Observed) -> dict[DelayedState, Observation]:
    """All observations by state: sheets are spread."""
    found = observed.by_state
    if observed.sheets:
        for handed in observed.sheets:
            handed.keep()
            sheet, block = handed.sheet, handed.block
            for state, seen, offset in zip(sheet.states, sheet.seen, sheet.offsets, strict=True):
                _add(found, state, Cell(block, offset), seen)
        observed.sheets = []
    return found


def _add(
    into: dict[DelayedState, Observation],
    state: DelayedState,
    amax: torch.Tensor | Cell,
    seen: Seen,
) -> None:
    old = into.get(state)
    made = into[state] = Observation(amax, *seen)
    if old is not None:
        made.cells += old.cells
        if len(made.cells) > MOST_CELLS:
            made.amax = made.amax
