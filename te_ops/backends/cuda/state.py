"""The state update of delayed scaling: all states of a commit on a device in one launch."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from te_ops.backends.cuda import launch
from te_ops.runtime import rolls
from te_ops.runtime.rolls import Roll, Rolls

THREADS = 256
SIZES = ((8, 8), (32, 64), (48, 112))
"""(states, amaxes) of a launch, whose parameter has 4 KB at most; more take several."""
_WORDS = 8  # of a state


def roll(device: torch.device, found: Rolls) -> None:
    """Roll the states of one device on its current stream."""
    index = device.index
    if torch._C._cuda_getDevice() != index:
        with torch.cuda.device(device):
            roll(device, found)
        return
    stream = torch._C._cuda_getCurrentRawStream(index)
    made, amaxes = found.prepared.get(stream), found.amaxes
    if made is None:
        roll_on(arch_of(index), stream, found)
        return
    for each in made:
        if each.amaxes is not amaxes:
            each.write(amaxes)
        each.call(stream)


def roll_on(arch: str, stream: int, found: Rolls) -> None:
    """As `roll`, with the architecture and the stream given."""
    made = found.prepared.get(
        stream
    )  # threads with a stream of their own may come at the same time
    if made is None:
        made = [_Launch(arch, found.items, part) for part in _parts(found)]
        found.prepared[stream] = made
    for each in made:
        each.write(found.amaxes)
        each.call(stream)


class _Part(NamedTuple):
    """A launch's states and amaxes among all."""

    states: slice
    amaxes: slice


def _parts(found: Rolls) -> list[_Part]:
    """As many launches as the sizes ask for."""
    most_states, most_amaxes = SIZES[-1]
    made: list[_Part] = []
    start = first = end = 0
    for i, item in enumerate(found.items):
        if i - start == most_states or end + item.amaxes - first > most_amaxes:
            made.append(_Part(slice(start, i), slice(first, end)))
            start, first = i, end
        end += item.amaxes
    return [*made, _Part(slice(start, len(found)), slice(first, end))]


class _Launch:
    """One launch with its words; where the amaxes lie is written anew when that changes."""

    def __init__(self, arch: str, items: Sequence[Roll], part: _Part) -> None:
        mine, self.part = items[part.states], part.amaxes
        count = part.amaxes.stop - part.amaxes.start
        states, places = next(
            (s, a) for s, a in SIZES if len(mine) <= s and count <= a
        )  # the last takes whatever `_parts` hands over
        words: list[int] = []
        first = 0
        for scale, history, steps, when, f, found in mine:
            numbers = _numbers(f.fp8_max, f.divisor)
            flags = f.most_recent | f.pow2 << 1 | first << 32
            words += (scale, history, steps, when, f.length, numbers, flags, found)
            first += found
        words += [0] * (_WORDS * (states - len(mine)) + places)
        self.memory = (ctypes.c_int64 * len(words))(*words)
        self.words = memoryview(self.memory).cast("B").cast("q")
        self.first = _WORDS * states
        self.amaxes: list[int] | None = None
        issue = _kernel(states, places, arch).blocks(len(mine))
        self.call = issue.prepare(self.words, ctypes.addressof(self.memory))

    def write(self, amaxes: list[int]) -> None:
        """What the next `call(stream)` reads: the amaxes of all rolls, a list that nobody changes."""
        for place, address in enumerate(amaxes[self.part], self.first):
            self.words[place] = address
        self.amaxes = amaxes


@functools.cache
def _numbers(fp8_max: float, divisor: float) -> int:
    """Two FP32 numbers in a word."""
    word: int = struct.unpack("<q", struct.pack("<ff", fp8_max, divisor))[0]
    return word


@functools.cache
def arch_of(index: int) -> str:
    """Architecture of a device, "sm_90"."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


@functools.cache
def _kernel(states: int, amaxes: int, arch: str) -> launch.Function:
    text = text_of(states, amaxes)
    return launch.build("update_state", text, arch, THREADS, _WORDS * states + amaxes)


def text_of(states: int, amaxes: int) -> str:
    """The device text for launches of up to so many states and amaxes."""
    return launch.text_of(
        name="update_state",
        head=(
            "#include <kernels/state.cuh>\n"
            f"typedef te::StateArguments<{states}, {amaxes}> Parameters;\n"
        ),
        body=f"te::update_state<{THREADS}>(p.states[te::block()], p.amaxes);",
        threads=THREADS,
    )


def forget() -> None:
    """Drop the kernels and launches that were made; for tests."""
    rolls.forget()
    _kernel.cache_clear()
