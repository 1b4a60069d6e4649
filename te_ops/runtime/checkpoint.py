"""Activation recompute across calls: recorded recipes, torch's checkpoint, and `te.checkpoint`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from te_ops.context import Frame, current
from te_ops.errors import RecipeError
from te_ops.op import Op
from te_ops.registry import REGISTRY


class Recorded(NamedTuple):
    """What an op's last forward outside backward ran under."""

    frame: Frame | None
    states: Sequence[Any]
    versions: list[int]  # of the states
    grad: bool
    ambiguous: bool = (
        False  # an earlier forward, under another recipe, still waits for its backward
    )


def record(op: Op, frame: Frame | None, states: Sequence[Any], grad: bool) -> None:
    """Remember the recipe (and the state's version) of a forward, for a recompute of it.

    A validation without gradients between a forward and its backward does not take its place.
    """
    fields = op.__dict__  # not through __setattr__: a call must not look like a change of the op
    if grad:
        fields[_VERSION] = REGISTRY.version
    prior: Recorded | None = fields.get(_LAST)
    if frame is None and prior is None:
        return
    waits = prior is not None and prior.grad and not fields.get(_USED, True)
    if waits and not grad:
        return
    ambiguous = False
    if prior is not None and waits:
        ambiguous = prior.ambiguous or _key(prior.frame) != _key(frame)
    fields[_LAST] = Recorded(frame, states, list(map(_version, states)), grad, ambiguous)
    fields[_USED] = False


def unseen(op: Op) -> bool:
    """Whether no forward of this op ran under a recipe: there is nothing to remember for a recompute."""
    return _LAST not in op.__dict__


def _key(frame: Frame | None) -> Any:
    return None if frame is None else frame.key


def used(op: Any) -> None:
    """A backward of this op has run: its last forward no longer waits."""
    if op is not None and _LAST in op.__dict__:
        op.__dict__[_USED] = True


def recorded(op: Op) -> Recorded | None:
    """The last forward of this op outside backward."""
    return op.__dict__.get(_LAST)


_LAST, _USED, _VERSION = "_te_last", "_te_used", "_te_version"
_version = attrgetter("version")


def surroundings(op: Op, recomputing: bool) -> tuple[Frame | None, int | None]:
    """The autocast in force, and the registry's version if it is to be another than the present one.

    Inside a recompute they are those of the forward: kernels that came since would round, and save, otherwise.
    """
    replay = REPLAY.get()
    if replay is not None and not replay.recording:
        replay.position += 1
        at = replay.position - 1
        if at < len(replay.frames):
            return replay.frames[at], replay.versions.get(replay.position)
        return current(), None
    seen = recorded(op) if recomputing else None
    frame = seen.frame if seen is not None else current()
    if replay is not None:
        replay.frames.append(frame)
        replay.position += 1
    return frame, op.__dict__.get(_VERSION) if recomputing else None


def check_recompute(op: Op, states: Sequence[Any], seen: Recorded | None) -> None:
    """A recompute must see the recipe of its forward, and a stateful one its scales.

    Raises:
        RecipeError: it is not clear which recipe that was, the scales moved on, or were not recorded.
    """
    replay = REPLAY.get()
    if (replay is not None and not replay.recording) or seen is None:
        return
    if seen.ambiguous:
        raise RecipeError(
            f"{type(op).__name__}: it was called under several recipes before this backward, and torch's checkpoint "
            "does not say which call is recomputed; use te.checkpoint or te.Recompute"
        )
    if not states:
        return
    if not seen.grad:
        raise RecipeError(
            f"{type(op).__name__}: reentrant checkpointing runs the first forward without gradients, so "
            "delayed scaling would never observe it; use te.checkpoint, te.Recompute or use_reentrant=False"
        )
    known = dict(zip(seen.states, seen.versions, strict=True))
    for state in states:
        if known.get(state) != state.version:
            raise RecipeError(
                f"{type(op).__name__}: a recompute in backward would quantize with other scales than its forward, "
                "since the delayed-scaling state has moved on; use te.checkpoint or te.Recompute, "
                "which replay the scales"
            )


@dataclass
class Replay:
    """Frames, registry versions and scales that a checkpointed function used, in the order of its calls.

    `position` counts them.
    """

    recording: bool = True
    frames: list[Frame | None] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)  # of the registry, by position
    scales: dict[tuple[int, Any], torch.Tensor] = field(default_factory=dict)
    position: int = 0
    inner: list[Replay] = field(default_factory=list)  # of the checkpoints inside, in order
    inner_position: int = 0

    def enter(self) -> Replay:
        """The replay of the next checkpoint inside: a new one, or that of the first pass."""
        if self.recording:
            self.inner.append(Replay())
        self.inner_position += 1
        return self.inner[self.inner_position - 1]


REPLAY: ContextVar[Replay | None] = ContextVar("te_ops_replay", default=None)


@contextlib.contextmanager
def _replaying(replay: Replay, recording: bool) -> Iterator[None]:
    replay.recording, replay.position, replay.inner_position = recording, 0, 0
    token = REPLAY.set(replay)
    try:
        yield
    finally:
        REPLAY.reset(token)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` and recompute its inside in backward instead of saving it.

    Like `torch.utils.checkpoint` (non-reentrant), and the recompute uses the recipe, scales and random numbers of
    the first call and observes nothing, wherever backward runs.
    """
    outer = REPLAY.get()
    replay = Replay() if outer is None else outer.enter()
    first = outer is None or outer.recording

    def contexts() -> tuple[Any, Any]:
        return _replaying(replay, first), _replaying(replay, False)

    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )
