"""The state update of delayed scaling: all states of a commit on a device in one launch."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

import torch

from te_ops.backends.cuda import launch
from te_ops.runtime.state import Roll

THREADS = 256
SIZES = ((8, 8), (32, 64), (48, 112))
"""(states, amaxes) of a launch, whose parameter has 4 KB at most; more take several."""
_WORDS = 8  # of a state


def roll(device: torch.device, rolls: list[Roll]) -> None:
    """Roll the states of one device on its current stream."""
    if torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            roll_on(arch_of(device.index), launch.stream_of(device.index), rolls)
    else:
        roll_on(arch_of(device.index), launch.stream_of(device.index), rolls)


def roll_on(arch: str, stream: int, rolls: list[Roll]) -> None:
    """As `roll`, with the architecture and the stream given.

    A commit that finds everything where it lay comes with the list of before: then everything is prepared.
    """
    place = (arch, stream, id(rolls))  # a list that comes again is not changed meanwhile
    found = _LAST.get(place)
    if found is None:
        if len(_LAST) >= MOST_KEPT:
            _LAST.clear()
        found = _LAST[place] = (rolls, [_Launch(arch, part) for part in _parts(rolls)])
    for made in found[1]:
        made.call(stream)


MOST_KEPT = 256
_LAST: dict[tuple[str, int, int], tuple[list[Roll], list[_Launch]]] = {}


def _parts(rolls: Sequence[Roll]) -> list[Sequence[Roll]]:
    """As many launches as the sizes ask for."""
    most_states, most_amaxes = SIZES[-1]
    made: list[Sequence[Roll]] = []
    start = amaxes = 0
    for i, item in enumerate(rolls):
        if i - start == most_states or amaxes + len(item.amaxes) > most_amaxes:
            made.append(rolls[start:i])
            start, amaxes = i, 0
        amaxes += len(item.amaxes)
    return [*made, rolls[start:]]


class _Launch:
    """One launch with its words, which stay as they are."""

    def __init__(self, arch: str, rolls: Sequence[Roll]) -> None:
        amaxes = [address for r in rolls for address in r.amaxes]
        states, places = next(
            (s, a) for s, a in SIZES if len(rolls) <= s and len(amaxes) <= a
        )  # the last takes whatever `_parts` hands over
        words: list[int] = []
        first = 0
        for scale, history, steps, when, f, found in rolls:
            numbers, flags = _numbers(f.fp8_max, f.divisor), f.most_recent | first << 32
            words += (scale, history, steps, when, f.length, numbers, flags, len(found))
            first += len(found)
        words += [0] * (_WORDS * (states - len(rolls)))
        words += amaxes
        words += [0] * (places - len(amaxes))
        self.memory = (ctypes.c_int64 * len(words))(*words)
        view = memoryview(self.memory).cast("B").cast("q")
        issue = _kernel(states, places, arch).blocks(len(rolls))
        self.call = issue.prepare(view, ctypes.addressof(self.memory))


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
    _LAST.clear()
    _kernel.cache_clear()
