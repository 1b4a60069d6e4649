"""Which kernels the ranks of a process group begin to use at one step: those that every rank has that asked for them.

A decision is a collective over gloo, on the host, so it is only made where all ranks are known to be: in `te.step()`,
at each of the first ones, later at every 32nd.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

EACH, OFTEN = 32, 32  # the first so many boundaries decide, then every so many


class Vote(NamedTuple):
    """What a rank says of a kernel: it has it, it is waiting for it, or why it will not have it."""

    ready: bool
    failed: str = ""


def alone() -> bool:
    """Whether this process belongs to no process group, or to one of its own."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


@dataclass
class Group:
    """The process group that decides: of the same ranks as the default one, over gloo."""

    default: Any = None
    group: Any = None
    steps: int = 0  # boundaries that all ranks have passed in it

    def due(self) -> bool:
        """Count a boundary; whether the ranks decide at it."""
        default = dist.distributed_c10d._get_default_group()
        if default is not self.default:
            if self.default is None:
                atexit.register(self._forget)
            self.default, self.steps = default, 0
            self.group = dist.new_group(backend="gloo")
        self.steps += 1
        return self.steps <= EACH or self.steps % OFTEN == 0

    def _forget(self) -> None:
        """A gloo group that is freed with the interpreter ends its threads too late: the process aborts."""
        self.default = self.group = None

    def decide(self, mine: dict[str, Vote]) -> dict[str, Vote]:
        """What all ranks say together of the kernels of this one: ready if it is so on every rank that named it."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine, group=self.group)
        return {key: _together(key, gathered) for key in mine}


def _together(key: str, gathered: list[dict[str, Vote]]) -> Vote:
    votes = {rank: Vote(*said[key]) for rank, said in enumerate(gathered) if key in said}
    for rank, vote in votes.items():
        if vote.failed:
            return Vote(False, f"rank {rank} has not got it: {vote.failed}")
    return Vote(all(vote.ready for vote in votes.values()))
