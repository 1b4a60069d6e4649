"""Bundles: all operations of a tape as one operation of the driver, where their addresses come again.

In a steady loop torch's allocator hands out the same few sets of addresses. A set that was met before is recorded once
as a graph of the driver's (kernels and their words as they are, no memory of its own), and later calls with these
addresses issue that. Other addresses are issued one by one, so the numbers never depend on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar, Protocol

import torch

from te_ops.runtime.tape import Prepared

AFTER = 2
"""Calls with the same addresses before they are recorded."""
MOST = 16
"""Recorded sets of a tape; more make the next set take the place of all."""
TRIES = 64
"""Recordings of a tape: where addresses keep changing, they do not pay."""
LIMIT = 128 << 20
"""Bytes that a phase allocates: beyond, the device hides the host anyway."""


class Bundler(Protocol):
    """What records operations of a device type."""

    def capturing(self) -> bool:
        """Whether the caller is recording the current stream: what is issued has to come one by one."""

    def bundle(
        self, device: torch.device, stream: int, calls: Sequence[Prepared]
    ) -> Prepared | None:
        """One call that issues what `calls` issue now, to be run on `stream`; None where it cannot be recorded.

        The device is current. Nothing runs. Scratch memory of libraries that the calls name belongs to `stream`.
        """


BUNDLERS: dict[str, Bundler] = {}
"""By device type; a backend adds itself with its kernels."""


class Bundles:
    """The recorded sets of addresses of one tape."""

    scratch: ClassVar[int] = 0
    """Moves when a library gives scratch memory back whose address may have been recorded."""

    __slots__ = ("bundler", "device", "left", "made", "met", "period")

    def __init__(self, bundler: Bundler, device: torch.device) -> None:
        self.bundler, self.device = bundler, device
        self.made: dict[Hashable, Prepared] = {}
        self.met: dict[Hashable, int] = {}
        self.left = TRIES
        self.period = Bundles.scratch

    @staticmethod
    def of(device: torch.device, size: int) -> Bundles | None:
        """For a tape whose phase allocates so many bytes; None where it is issued one by one."""
        bundler = BUNDLERS.get(device.type)
        return None if bundler is None or size > LIMIT else Bundles(bundler, device)

    def find(self, key: Hashable) -> Prepared | None:
        """The recorded set, to be issued instead of everything."""
        if self.period != Bundles.scratch:
            self.made, self.period = {}, Bundles.scratch
        found = self.made.get(key)
        return None if found is None or self.bundler.capturing() else found

    def due(self, key: Hashable) -> bool:
        """Whether to record a set that is not known."""
        if not self.left:
            return False
        met = self.met
        count = met[key] = met.get(key, 0) + 1
        if len(met) > 4 * MOST:
            self.met = {}
        return count >= AFTER and key not in self.made and not self.bundler.capturing()

    def make(self, key: Hashable, stream: int, calls: Sequence[Prepared]) -> None:
        """Record what the calls issue with the words that they have now."""
        self.left -= 1
        self.met.pop(key, None)
        period = Bundles.scratch
        found = self.bundler.bundle(self.device, stream, calls)
        if found is None:
            self.left = 0
        elif period == self.period:
            if len(self.made) >= MOST:
                self.made = {}
            self.made[key] = found
