"""Replay: the operations of a recorded phase on other memory.

Each word of the recording that lies in memory which is known (an operand, an allocation of the phase) becomes that
memory and an offset. Allocations get a role: a result is a fresh tensor at every call; what backward needs lies in one
block; the few bytes that are cleared or observed (amaxes) in another; temporaries share an arena by liveness. A replay
allocates these, patches the addresses that changed, and issues everything on the current stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_ops.runtime.bundle import Bundles
from te_ops.runtime.saved import Layout, Part, View, view_of
from te_ops.runtime.tape import Issue, Prepared


def _cuda_stream(device: torch.device) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device.index))


STREAMS: dict[str, Callable[[torch.device], int]] = {"cuda": _cuda_stream}
"""Device types whose launches are recorded, with the handle of the current stream of a device."""


class Result(NamedTuple):
    """How to give a result: an operand or a fresh tensor, as it is or what lies in it."""

    operand: int | None
    fresh: int = 0
    view: View | None = None

    def of(self, operands: Sequence[Tensor | None], fresh: Sequence[Tensor]) -> Tensor | None:
        """The result of one call."""
        made = fresh[self.fresh] if self.operand is None else operands[self.operand]
        return made if self.view is None or made is None else view_of(made, self.view)


class Replayed(NamedTuple):
    """What a replay gives: results, amaxes, and what to save for backward."""

    results: list[Tensor | None]
    numbers: Tensor | None  # the block with what was observed
    carriers: list[Tensor]


class _Frame:
    """The words of all operations in host memory, of one call at a time."""

    __slots__ = ("bases", "calls", "memory", "words")

    def __init__(self, tape: Tape) -> None:
        self.memory = (ctypes.c_int64 * max(tape.size, 1))()
        self.words = memoryview(self.memory).cast("B").cast("q")
        self.bases: list[int] = [0] * len(tape.patched)
        for place, word in tape.constants:
            self.words[place] = word
        for uses in tape.uses:
            for place, offset in uses:
                self.words[place] = offset
        address, calls = ctypes.addressof(self.memory), []
        for issue, start, count in tape.operations:
            calls.append(issue.prepare(self.words[start : start + count], address + 8 * start))
        self.calls: list[Prepared] = calls


@dataclass(eq=False)
class Tape:
    """A recorded phase.

    Attributes:
        device: where it runs.
        operations: the issue, and where its words lie.
        constants: words that are the same at every call, by place.
        blocks: bytes of the small numbers that are cleared or observed, of what backward needs, and of temporaries.
        uses: for every base (operands, numbers, block, arena, fresh results) the places of its addresses, with offsets.
        fresh: tensors like the fresh results.
        results: how each result is given.
        observed: where each amax lies, in bytes from the start of `numbers`.
        layout: how saved values lie in their carriers.
        carriers: the bases whose tensors are saved.
        stream: of the recording, if memory is kept that belongs to it.
    """

    device: torch.device
    size: int
    operations: list[tuple[Issue, int, int]]
    constants: list[tuple[int, int]]
    uses: list[list[tuple[int, int]]]
    operands: int
    blocks: tuple[int, int, int]
    fresh: list[Tensor]
    results: list[Result | None]
    observed: tuple[int, ...] = ()
    layout: Layout | None = None
    carriers: tuple[int, ...] = ()
    expected: tuple[tuple[int, ...] | None, ...] = ()  # strides of operands that are not contiguous
    kept: list[Tensor] = field(default_factory=list)
    stream: int | None = None

    def __post_init__(self) -> None:
        self.frames: list[_Frame] = []
        blocks = [(i, n) for i, n in enumerate(self.blocks) if n]  # one without bytes has no base
        self.templates = [*(_template(n, self.device) for _, n in blocks), *self.fresh]
        places = (*(i for i, _ in blocks), *range(3, 3 + len(self.fresh)))
        count, at = self.operands, {place: i for i, place in enumerate(places)}
        self.patched = [*self.uses[:count], *(self.uses[count + i] for i in places)]
        self.numbers = at.get(0)  # among what a replay allocates, as all that follows
        self.first = len(blocks)  # fresh result
        self.carry = [(b, None) if b < count else (None, at[b - count]) for b in self.carriers]
        plain = [Result(None, i) for i in range(len(self.fresh))]
        self.plain = self.results == plain
        self.current = STREAMS[self.device.type]
        self.index = self.device.index if self.device.type == "cuda" else None
        fresh = sum(t.numel() * t.element_size() for t in self.fresh)
        self.bundles = Bundles.of(self.device, sum(self.blocks) + fresh)
        self.passed = frozenset(r.operand for r in self.results if r and r.operand is not None)

    def ready(self) -> bool:
        """Whether a replay does now what the launches would do."""
        if torch._C._len_torch_dispatch_stack():
            return False
        return self.stream is None or self.stream == self.current(self.device)

    def replay(self, addresses: list[int], operands: Sequence[Tensor | None]) -> Replayed:
        """Issue everything.

        Args:
            addresses: of the operands, which are alive and fit.
            operands: the tensors of those that are results.
        """
        made = list(map(_empty_like, self.templates))
        addresses += map(_data_ptr, made)
        if self.index is not None and torch._C._cuda_getDevice() != self.index:
            with torch.cuda.device(self.device):
                self._run(addresses)
        else:
            self._run(addresses)
        results: list[Any] = made[self.first :]
        if not self.plain:
            results = [None if r is None else r.of(operands, results) for r in self.results]
        numbers = made[self.numbers] if self.numbers is not None else None
        carriers: list[Any] = [
            made[at] if base is None else operands[base]  # type: ignore[index]
            for base, at in self.carry
        ]
        # The arena lives until here: what is allocated next on the stream comes after.
        return Replayed(results, numbers, carriers)

    def _run(self, addresses: list[int]) -> None:
        """Everything at once where these addresses are known, else one by one. The device is current."""
        stream, bundles = self.current(self.device), self.bundles
        if bundles is None:
            self._one_by_one(addresses, stream, None, None)
            return
        key = (stream, *addresses)
        whole = bundles.find(key)
        if whole is None:
            self._one_by_one(addresses, stream, bundles, key)
        else:
            whole(stream)

    def _one_by_one(
        self, addresses: list[int], stream: int, bundles: Bundles | None, key: Any
    ) -> None:
        frames = self.frames
        frame = frames.pop() if frames else _Frame(self)
        try:
            if addresses != frame.bases:
                words = frame.words
                for new, old, uses in zip(addresses, frame.bases, self.patched, strict=True):
                    if new != old:
                        for place, offset in uses:
                            words[place] = new + offset
                frame.bases = addresses
            for call in frame.calls:
                call(stream)
            if bundles is not None and bundles.due(key):
                bundles.make(key, stream, frame.calls)
        finally:
            frames.append(frame)


_data_ptr, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_empty_like = torch.empty_like


def _template(count: int, device: torch.device) -> Tensor:
    return like(torch.Size((count,)), torch.uint8, device)


def like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one element's memory: `torch.empty_like` of it is contiguous and costs less than `torch.empty`."""
    return torch.empty((1,) * len(shape), dtype=dtype, device=device).expand(shape)


# -- operands of a replay


def addresses_of(
    tensors: Sequence[Tensor], expected: Sequence[tuple[int, ...] | None]
) -> list[int] | None:
    """Where operands lie; None if one does not lie as it was recorded, or not on 16 bytes."""
    if expected.count(None) == len(expected) == len(tensors):
        if not all(map(_is_contiguous, tensors)):
            return None
        places = list(map(_data_ptr, tensors))
        return None if reduce(or_, places, 0) & 15 else places
    found = []
    for tensor, strides in zip(tensors, expected, strict=True):
        if strides is None:
            if not tensor.is_contiguous():
                return None
        elif tensor.stride() != strides:
            return None
        address = tensor.data_ptr()
        if address & 15:
            return None
        found.append(address)
    return found


class Link(NamedTuple):
    """How the saved operands of a backward tape lie in the carriers that one kind of forward saves."""

    parts: list[Part]
    strides: list[tuple[int, ...] | None]  # of the carriers
    rest: tuple[tuple[int, ...] | None, ...] = ()  # of the operands that were not saved

    def addresses(self, carriers: Sequence[Tensor]) -> list[int] | None:
        """Addresses of the operands; None as for `addresses_of` (a hook may have put other tensors there)."""
        found = addresses_of(carriers, self.strides)
        return None if found is None else [found[p.carrier] + p.offset for p in self.parts]

    def operands(self, tape: Tape, carriers: Sequence[Tensor]) -> list[Tensor | None]:
        """The operands that are results, None for the others."""
        return [
            part.of(carriers) if i in tape.passed else None for i, part in enumerate(self.parts)
        ]


def link(tape: Tape, layout: Layout | None, carriers: int, picks: Sequence[int]) -> Link | None:
    """The link of a backward tape with the layout of a forward (None: `carriers` tensors, the values themselves).

    None if values lie in memory otherwise than in the forward whose backward was recorded.
    """
    parts = [Part(p, 0) for p in picks] if layout is None else layout.parts(picks)
    strides: list[tuple[int, ...] | None] = [None] * carriers
    for part, expected in zip(parts, tape.expected, strict=False):
        if part.view is None:
            strides[part.carrier] = expected
        else:
            _, shape, stride, _ = part.view
            view = torch.empty_strided(shape, stride, device="meta")
            if not (view.is_contiguous() if expected is None else stride == expected):
                return None
    return Link(parts, strides, tape.expected[len(parts) :])
