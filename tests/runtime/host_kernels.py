"""Kernels that report their work to the recorder, on the CPU: the reference of each primitive as one operation."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from te_ops.quantizers import Record
from te_ops.registry import REGISTRY, Call, Kernel
from te_ops.runtime import replay
from te_ops.runtime.tape import Prepared, recorder, unwatched


def tensor_at(address: int, like: torch.Tensor) -> torch.Tensor:
    """Memory as a tensor of this dtype, shape and these strides."""
    if not like.numel():
        return torch.empty_like(like)
    last = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    count = (last + 1) * like.element_size()
    memory = (ctypes.c_char * count).from_address(address)
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def flat_of(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors of values; a shape or number has none."""
    return [t for v in values for t in _parts(v)]


def _parts(value: Any) -> tuple[torch.Tensor, ...]:
    if isinstance(value, Record):
        return value.tensors()
    return (value,) if isinstance(value, torch.Tensor) else ()


def filled(values: tuple[Any, ...], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """The values over other tensors."""
    left = list(tensors)
    made: list[Any] = []
    for v in values:
        count = len(_parts(v))
        mine, left = left[:count], left[count:]
        made.append(v.with_tensors(mine) if isinstance(v, Record) else mine[0] if mine else v)
    return tuple(made)


@dataclass(eq=False)
class Counter:
    """Operations that were launched, and that were issued again by a tape."""

    launched: int = 0
    issued: int = 0
    lock: Any = field(default_factory=threading.Lock)
    fail_at: int | None = None  # an issue that fails


@dataclass(eq=False)
class HostIssue:
    function: Callable[..., Any]
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    counter: Counter
    clears: bool = False

    def prepare(self, words: memoryview, address: int) -> Prepared:
        def call(stream: int) -> None:
            with self.counter.lock:
                self.counter.issued += 1
                if self.counter.issued == self.counter.fail_at:
                    raise RuntimeError("the device failed")
            assert ctypes.addressof(ctypes.c_char.from_buffer(words)) == address
            like = [*flat_of(self.reads), *flat_of(self.writes)]
            tensors = [tensor_at(w, t) for w, t in zip(words, like, strict=True)]
            count = len(flat_of(self.reads))
            made = self.function(*filled(self.reads, tensors[:count]))
            made = made if isinstance(made, tuple) else (made,)
            for ours, theirs in zip(tensors[count:], flat_of(made), strict=True):
                ours.copy_(theirs)

        return call


def recordable(counter: Counter) -> Kernel:
    """A kernel for every primitive."""

    def bind(call: Call) -> Any:
        function = REGISTRY.find("reference").bind(call)  # type: ignore[union-attr]

        def launch(*xs: Any) -> Any:
            made = recorder()
            with counter.lock:
                counter.launched += 1
            if made is None:
                return function(*xs)
            with unwatched():
                found = function(*xs)
            single = not isinstance(found, tuple)
            results = (found,) if single else found
            tensors = [torch.empty(t.shape, dtype=t.dtype) for t in flat_of(results)]
            with unwatched():
                for ours, theirs in zip(tensors, flat_of(results), strict=True):
                    ours.copy_(theirs)
                # What the issue knows of its operands, without their memory; results lie as they were allocated.
                shapes = [
                    filled(v, [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in of])
                    for v, of in ((xs, flat_of(xs)), (results, tensors))
                ]
            words = tuple(t.data_ptr() for t in (*flat_of(xs), *tensors))
            if tensors:
                made.launched(HostIssue(function, shapes[0], shapes[1], counter), words)
            results = filled(results, tensors)
            return results[0] if single else results

        return launch

    return Kernel("*", "test.host", bind, priority=99, recorded=True)


@contextlib.contextmanager
def host_kernels() -> Iterator[Counter]:
    """Within, CPU plans run on recordable kernels, and are recorded."""
    counter = Counter()
    before = dict(replay.STREAMS)
    replay.STREAMS["cpu"] = lambda device: 0
    try:
        with REGISTRY.only(), REGISTRY.temporary(recordable(counter)):
            yield counter
    finally:
        replay.STREAMS.clear()
        replay.STREAMS.update(before)


class Steady:
    """`torch.empty_like` for a tape whose memory comes back: the same places at every call, as on a device."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # alive: ids come again

    def __call__(self, like: torch.Tensor) -> torch.Tensor:
        if id(like) not in self.kept:
            self.kept[id(like)] = like, torch.empty_like(like)
        return self.kept[id(like)][1].detach()
