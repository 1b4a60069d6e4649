"""What a step saw of delayed-scaling states, until it is committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_ops.recipe import DelayedScaling

if TYPE_CHECKING:
    from te_ops.runtime.state import DelayedState


class Cell(NamedTuple):
    """An amax that lies in a block of bytes: FP32 at `offset`. A tensor of it is made only where torch reads it."""

    block: torch.Tensor
    offset: int

    def tensor(self) -> torch.Tensor:
        """The amax, with no dimension."""
        return self.block[self.offset : self.offset + 4].view(torch.float32).view(())


class Seen(NamedTuple):
    """Under what an amax was observed."""

    config: DelayedScaling
    fp8_max: float
    group: Any


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


_CELLS = 16  # amaxes that wait for a commit before they are combined


def observe(
    into: dict[DelayedState, Observation],
    state: DelayedState,
    amax: torch.Tensor | Cell,
    seen: Seen | Observation,
) -> None:
    """Add an observation to a region (or a backward) that commits later."""
    old = into.get(state)
    made = into[state] = Observation(amax, seen.config, seen.fp8_max, seen.group)
    if old is not None:
        made.cells += old.cells
        if len(made.cells) > _CELLS:
            made.amax = made.amax
