"""The ordered list of passes; plug-ins and `parallel` register into the named slots."""

from __future__ import annotations

from collections.abc import Callable

from te_ops.compiler.work import Work
from te_ops.errors import PlanError

Pass = Callable[[Work], None]

PIPELINE_SLOTS = ("trace", "parallel", "joint")
SEGMENT_SLOTS = (
    "differentiate",
    "quantize",
    "remat",
    "fuse",
    "select",
    "legalize",
    "schedule",
    "bind",
)
SLOTS = PIPELINE_SLOTS + SEGMENT_SLOTS


class Passes:
    """Passes by slot, in order of registration; `version` moves with every change."""

    def __init__(self) -> None:
        self.version = 0
        self._slots: dict[str, list[Pass]] = {slot: [] for slot in SLOTS}

    def add(self, slot: str, made: Pass) -> Pass:
        """Append a pass to a slot: pipeline slots see the whole graph, the later ones one segment each.

        Raises:
            PlanError: no such slot.
        """
        if slot not in self._slots:
            raise PlanError(f"no compiler slot is named {slot!r}; slots: {', '.join(SLOTS)}")
        self._slots[slot].append(made)
        self.version += 1
        return made

    def remove(self, slot: str, made: Pass) -> None:
        """Take a pass out again."""
        self._slots[slot].remove(made)
        self.version += 1

    def run(self, slots: tuple[str, ...], work: Work) -> None:
        """Run every pass of these slots."""
        for slot in slots:
            for step in self._slots[slot]:
                step(work)


passes = Passes()
