"""Recording: which device operations the launches of a plan issue, word by word, while they run as usual.

A launch that can be recorded reports each device operation as an `Issue` and its words: 8 bytes each, an address or a
number; its kernel is registered with `recorded=True`. Afterwards `replay` finds out whose memory each address is, and
issues the same operations on other memory without running the launches again. What runs through torch is noticed by a
dispatch mode: allocations are noted, views pass, everything else is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LIMIT = 256 << 20
"""Bytes that a recorded phase may allocate: beyond, memory has to fall step by step, and the device hides the host."""

Prepared = Callable[[int], Any]
"""`prepared(stream)` issues one operation on a stream, given as its handle."""


class Issue(Protocol):
    """One device operation without its words."""

    @property
    def clears(self) -> bool:
        """Whether it writes zeros to words[0], words[1] 4-byte words of it, and does nothing else."""

    def prepare(self, words: memoryview, address: int) -> Prepared:
        """A call that issues the operation with what `words` (int64, at `address` in host memory) hold by then.

        The words are read during the call. Called once for each place where words lie; the calls of two places may
        run at the same time, so whatever they patch besides (descriptors) belongs to the place. An address is on
        16 bytes at least, whatever it was when it was recorded; everything else is as recorded. The device is
        current. The stream may be one that records a graph: nothing waits for the device. A failure raises.
        """


class Issued(NamedTuple):
    """One operation as it was issued during the recording."""

    issue: Issue
    words: tuple[int, ...]


class Recorder:
    """What a phase did, in order, and every tensor that it allocated: none is freed, so no address comes twice."""

    def __init__(self) -> None:
        self.issued: list[Issued] = []
        self.allocations: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        self.reason: str | None = None
        self._bytes = 0

    def launched(self, issue: Issue, words: tuple[int, ...]) -> None:
        """A device operation has just been issued on the current stream."""
        self.issued.append(Issued(issue, words))

    def allocated(self, tensor: torch.Tensor) -> None:
        """Memory that is written anew at every call; torch's allocations are noticed without this."""
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes > LIMIT:
            self.refuse(f"more than {LIMIT >> 20} MiB are allocated")
        if self.reason is None:
            self.allocations.append(tensor)

    def keep(self, tensor: torch.Tensor) -> None:
        """Memory of the launch's own whose address is among the words (a workspace, a table): it stays as it is.

        Workspaces belong to a stream, so a tape with one is replayed on the stream of its recording only.
        """
        self.kept.append(tensor)

    def refuse(self, reason: str) -> None:
        """What runs cannot be replayed; nothing needs to be kept any longer."""
        if self.reason is None:
            self.reason = reason
            self.allocations.clear()


class _Local(threading.local):
    recorder: Recorder | None = None


_LOCAL = _Local()


def recorder() -> Recorder | None:
    """The recorder of this thread, if something is being recorded."""
    return _LOCAL.recorder


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record what this thread launches inside."""
    made = Recorder()
    before, _LOCAL.recorder = _LOCAL.recorder, made
    try:
        with _Watch(made):
            yield made
    finally:
        _LOCAL.recorder = before


@contextmanager
def unwatched() -> Iterator[None]:
    """Within, torch calls are not the recorder's business: for launches that report them as an `Issue` themselves."""
    before, _LOCAL.recorder = _LOCAL.recorder, None
    try:
        yield
    finally:
        _LOCAL.recorder = before


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
"""By device type: `clone` of a small contiguous tensor as an operation that is recorded; a backend adds itself."""


_ALLOCATES = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
)
_HARMLESS = frozenset({"aten::_unsafe_view", "aten::detach", "aten::lift_fresh"})


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes allocations, lets views pass, and refuses every other torch call."""

    def __init__(self, made: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if _LOCAL.recorder is not self.made:
            return out
        name = func._schema.name
        if name in _ALLOCATES:
            self.made.allocated(out)
        elif not (func.is_view or name in _HARMLESS):
            self.made.refuse(f"torch's {name.partition('::')[2]} is called, which is not recorded")
        return out
