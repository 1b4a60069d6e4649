"""From a recording to a tape: whose memory each word of a phase is, and where that lies at a later call."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_ops.quantizers import Record
from te_ops.runtime.replay import STREAMS, Result, Tape, like
from te_ops.runtime.saved import Layout, Part, Template, View
from te_ops.runtime.tape import LIMIT, Issue, Recorder

ALIGN = 256  # bytes, of every allocation in a block: torch's own
SMALL = 4096  # bytes; larger allocations are cleared where they are
_ADDRESS = (1 << 40, 1 << 57)  # what a word in between is: no count, and no two FP32 numbers


class NotRecorded(Exception):
    """Why a phase has no tape; `final`: recording it again would not help."""

    def __init__(self, reason: str, *, final: bool = True) -> None:
        super().__init__(reason)
        self.final = final


class Origin(Enum):
    """Whose memory an operand is: what it may share with others by the plan's structure rather than by chance."""

    GIVEN = "given"  # by the caller, an input or a gradient
    PARAMETER = "parameter"
    INPUT = "input"  # saved in forward
    MADE = "made"  # in forward


class Operand(NamedTuple):
    """A tensor that a phase reads or writes and did not allocate."""

    tensor: Tensor
    origin: Origin


class Source(NamedTuple):
    """A place in memory: an index into a tape's bases, and bytes from there."""

    base: int
    offset: int


@dataclass
class Wanted:
    """What is wanted of a phase: its results (None where there is none), values to save, and amaxes observed."""

    results: Sequence[Any]
    saved: Sequence[Any] = ()
    observed: Sequence[Tensor] = ()


# -- from a recording to a tape


def build(
    made: Recorder, operands: Sequence[Operand], wanted: Wanted, device: torch.device
) -> Tape:
    """The tape of a recording.

    Raises:
        NotRecorded: something ran that cannot be issued again, or memory is shared by chance.
    """
    if made.reason is not None:
        raise NotRecorded(made.reason)
    _apart(operands)
    return _Builder(made, operands, wanted, device).build()


def extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor, and the byte after its last."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _apart(operands: Sequence[Operand]) -> None:
    """An address in two operands would belong to both; by structure, only what forward made may overlap."""
    ranges = [(*extent(t), origin) for t, origin in operands]
    for i, (start, end, origin) in enumerate(ranges):
        for start2, end2, origin2 in ranges[:i]:
            if start < end2 and start2 < end and not _by_structure(origin, origin2):
                same = (start, end, origin) == (start2, end2, origin2)
                if not (same and origin is Origin.PARAMETER):  # tied: in the key
                    raise NotRecorded("two operands share memory", final=False)


def _by_structure(a: Origin, b: Origin) -> bool:
    return Origin.GIVEN not in (a, b) and Origin.MADE in (a, b)


class _Allocation:
    """An allocation of the phase: its memory, and when it is used."""

    def __init__(self, tensor: Tensor) -> None:
        self.start = tensor.data_ptr()
        self.bytes = tensor.untyped_storage().nbytes()
        self.first = self.last = -1
        self.cleared = False  # before anything else
        self.base: int | None = None
        self.offset = 0

    @property
    def used(self) -> bool:
        return self.first >= 0


class _Builder:
    def __init__(
        self, made: Recorder, operands: Sequence[Operand], wanted: Wanted, device: torch.device
    ) -> None:
        self.made = made
        self.operands = [o.tensor for o in operands]
        self.extents = [extent(t) for t in self.operands]
        self.wanted = wanted
        self.device = device
        found = [_Allocation(t) for t in made.allocations]
        self.allocations = sorted((a for a in found if a.bytes), key=lambda a: a.start)
        self.starts = [a.start for a in self.allocations]
        count = len(operands)
        self.numbers, self.block, self.arena = count, count + 1, count + 2
        self.start = 0  # of the small numbers
        self.fresh: list[Tensor] = []

    def build(self) -> Tape:
        self._uses()
        results = [self._result(r) for r in self.wanted.results]
        numbers = self._numbers()
        block = self._block()
        arena = self._arena()
        if block + arena > LIMIT:
            raise NotRecorded(f"saved values and temporaries take {(block + arena) >> 20} MiB")
        layout, carriers = self._layout()
        if not (self.wanted.observed or self.numbers in carriers):
            numbers, arena = 0, self._join(numbers, arena)
        operations = self._operations()
        bases = self.arena + 1 + len(self.fresh)
        uses: list[list[tuple[int, int]]] = [[] for _ in range(bases)]
        constants: list[tuple[int, int]] = []
        placed, size = [], 0
        for issue, words in operations:
            placed.append((issue, size, len(words)))
            for k, word in enumerate(words):
                if isinstance(word, Source):
                    uses[word.base].append((size + k, word.offset))
                else:
                    constants.append((size + k, word))
            size += len(words) + len(words) % 2
        stream = STREAMS[self.device.type](self.device) if self.made.kept else None
        return Tape(
            device=self.device,
            size=size,
            operations=placed,
            constants=constants,
            uses=uses,
            operands=len(self.operands),
            blocks=(numbers, block, arena),
            fresh=self.fresh,
            results=results,
            observed=tuple(self._observed(t) for t in self.wanted.observed),
            layout=layout,
            carriers=carriers,
            expected=tuple(None if t.is_contiguous() else t.stride() for t in self.operands),
            kept=self.made.kept,
            stream=stream,
        )

    # -- memory

    def _own(self, address: int) -> _Allocation | None:
        at = bisect_right(self.starts, address) - 1
        if at < 0:
            return None
        found = self.allocations[at]
        return found if address < found.start + found.bytes else None

    def _operand(self, address: int) -> int | None:
        for i, (start, end) in enumerate(self.extents):
            if start <= address < end:
                return i
        return None

    def _uses(self) -> None:
        for i, (issue, words) in enumerate(self.made.issued):
            for word in words:
                found = self._own(word)
                if found is not None:
                    if not found.used:
                        found.first, found.cleared = i, issue.clears
                    found.last = i

    def _find(self, address: int) -> Source | None:
        own = self._own(address)
        if own is not None:
            assert own.base is not None
            return Source(own.base, own.offset + address - own.start)
        operand = self._operand(address)
        return None if operand is None else Source(operand, address - self.extents[operand][0])

    def _word(self, word: int) -> int | Source:
        found = self._find(word)
        if found is None and _ADDRESS[0] <= word < _ADDRESS[1]:
            kept = (extent(t) for t in self.made.kept)
            if not any(start <= word < end for start, end in kept):
                raise NotRecorded("a kernel is given an address that belongs to nothing known")
        return word if found is None else found

    def _place(self, tensor: Tensor) -> Source:
        """Where a tensor with elements lies.

        Raises:
            NotRecorded: in no known memory.
        """
        found = self._find(tensor.data_ptr())
        if found is None:
            raise NotRecorded("a value lies in memory that is not known")
        return found

    # -- roles

    def _result(self, value: Any) -> Result | None:
        if value is None:
            return None
        if not isinstance(value, Tensor):
            raise NotRecorded("a result is quantized")
        for i, operand in enumerate(self.operands):
            if _same(operand, value):
                return Result(i)
        if not value.numel():
            return self._new(value, None)
        own = self._own(value.data_ptr())
        if own is None:
            base, offset = self._place(value)
            if not self.operands[base].is_contiguous():
                raise NotRecorded("a result is a view of an operand that is not contiguous")
            return Result(base, view=_view(value, offset))
        if own.base is None:
            return self._new(value, own)
        fresh = own.base - self.arena - 1
        if _same_layout(self.fresh[fresh], value):
            return Result(None, fresh)
        raise NotRecorded("two results share memory")

    def _new(self, value: Tensor, own: _Allocation | None) -> Result:
        whole = own is None or (value.is_contiguous() and value.nbytes == own.bytes)
        view, shape, dtype = None, value.shape, value.dtype
        if own is not None:
            own.base = self.arena + 1 + len(self.fresh)
        if own is not None and not whole:
            view = _view(value, value.data_ptr() - own.start)
            shape, dtype = torch.Size((own.bytes,)), torch.uint8
        self.fresh.append(like(shape, dtype, self.device))
        return Result(None, len(self.fresh) - 1, view)

    def _numbers(self) -> int:
        """Cleared allocations first: one operation clears them all."""
        observed = {id(self._own(t.data_ptr())) for t in self.wanted.observed}
        cleared = [a for a in self.allocations if a.cleared and self._small(a)]
        others = [
            a for a in self.allocations if id(a) in observed and not a.cleared and self._small(a)
        ]
        self.at_once = frozenset(map(id, cleared))
        self.cleared = _in_order(cleared, self.numbers, 0)
        return _in_order(others, self.numbers, self.cleared)

    def _small(self, own: _Allocation) -> bool:
        return own.base is None and own.bytes <= SMALL

    def _block(self) -> int:
        tensors = [t for value in self.wanted.saved for t in _tensors(value) if t.numel()]
        found = {id(a): a for t in tensors if (a := self._own(t.data_ptr())) is not None}
        return _in_order([a for a in found.values() if a.base is None], self.block, 0)

    def _arena(self) -> int:
        """First fit, in order of first use."""
        size = 0
        placed: list[_Allocation] = []
        left = [a for a in self.allocations if a.base is None and a.used]
        for own in sorted(left, key=lambda a: a.first):
            live = sorted(
                (a for a in placed if a.last >= own.first and own.last >= a.first),
                key=lambda a: a.offset,
            )
            at = 0
            for other in live:
                if at + own.bytes <= other.offset:
                    break
                at = max(at, _up(other.offset + other.bytes))
            own.base, own.offset = self.arena, at
            placed.append(own)
            size = max(size, _up(at + own.bytes))
        return size

    def _join(self, numbers: int, arena: int) -> int:
        """Small numbers that nobody gets are temporaries: behind these, and their size with them."""
        for own in self.allocations:
            if own.base == self.numbers:
                own.base, own.offset = self.arena, arena + own.offset
        self.numbers, self.start = self.arena, arena
        return arena + numbers

    def _operations(self) -> list[tuple[Issue, list[int | Source]]]:
        made: list[tuple[Issue, list[int | Source]]] = []
        clear: Issue | None = None
        for i, (issue, words) in enumerate(self.made.issued):
            own = self._own(words[0]) if issue.clears else None
            if own is not None and id(own) in self.at_once and own.first == i:
                clear = issue
                continue
            made.append((issue, [self._word(w) for w in words]))
        if clear is not None:
            made.insert(0, (clear, [Source(self.numbers, self.start), self.cleared // 4]))
        return made

    # -- what backward gets

    def _observed(self, tensor: Tensor) -> int:
        found = self._place(tensor)
        if found.base != self.numbers:
            raise NotRecorded("an observed amax is no value of its own")
        return found.offset

    def _layout(self) -> tuple[Layout | None, tuple[int, ...]]:
        carriers: dict[int, int] = {}
        items: list[Any] = []
        for value in self.wanted.saved:
            if isinstance(value, Tensor):
                items.append(self._part(value, carriers))
            elif isinstance(value, Record):
                parts = tuple(self._part(t, carriers) for t in value.tensors())
                items.append(Template.of(value, parts))
            elif isinstance(value, int | tuple | None):
                items.append((value,))
            else:
                raise NotRecorded(f"a {type(value).__name__} is saved for backward")
        return (Layout(tuple(items)) if items else None), tuple(carriers)

    def _part(self, tensor: Tensor, carriers: dict[int, int]) -> Part:
        for i, operand in enumerate(self.operands):
            if _same(operand, tensor):
                return Part(carriers.setdefault(i, len(carriers)), 0)
        if not tensor.numel():
            raise NotRecorded("an empty tensor is saved for backward")
        base, offset = self._place(tensor)
        carrier = carriers.setdefault(base, len(carriers))
        fresh = base - self.arena - 1
        if fresh >= 0 and offset == 0 and _same_layout(self.fresh[fresh], tensor):
            return Part(carrier, 0)
        if base < len(self.operands) and not self.operands[base].is_contiguous():
            raise NotRecorded("a view of an operand that is not contiguous is saved")
        return Part(carrier, offset, _view(tensor, offset))


def _view(tensor: Tensor, offset: int) -> View:
    return tensor.dtype, tensor.shape, tensor.stride(), offset


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return (
        (value,)
        if isinstance(value, Tensor)
        else value.tensors()
        if isinstance(value, Record)
        else ()
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.data_ptr() == b.data_ptr()
        and a.dtype is b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.numel() > 0
    )


def _same_layout(fresh: Tensor, value: Tensor) -> bool:
    return fresh.dtype is value.dtype and fresh.shape == value.shape and value.is_contiguous()


def _in_order(allocations: Sequence[_Allocation], base: int, at: int) -> int:
    for own in allocations:
        own.base, own.offset = base, at
        at = _up(at + own.bytes)
    return at


def _up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


# -- a phase


WARM = 2  # calls before one is recorded: libraries prepare themselves, formats settle
TRIES = 8


class Recorded:
    """What is known about one phase of a runner: its tape, or why there is none."""

    def __init__(self, unrecorded: str) -> None:
        self.calls = 0
        self.tape: Tape | None = None
        self.reason: str | None = unrecorded or None

    def due(self, device: torch.device) -> bool:
        """Whether to record the call that comes."""
        if self.reason is not None or device.type not in STREAMS:
            return False
        self.calls += 1
        if self.calls <= WARM or torch._C._len_torch_dispatch_stack():
            return False
        return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def learn(
        self, made: Recorder, operands: Sequence[Operand], wanted: Wanted, device: torch.device
    ) -> None:
        """Make the tape, or keep the reason why not."""
        try:
            self.tape = build(made, operands, wanted, device)
        except NotRecorded as why:
            if why.final or self.calls > WARM + TRIES:
                self.reason = str(why)

    def __str__(self) -> str:
        if self.tape is not None:
            return f"{len(self.tape.operations)} operations"
        return self.reason or f"not recorded yet ({self.calls} calls)"
