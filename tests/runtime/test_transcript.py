"""From words to memory: roles of allocations, liveness, and what makes a recording useless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from te_ops.runtime import replay
from te_ops.runtime.tape import Recorder, recorder, recording
from te_ops.runtime.transcript import (
    ALIGN,
    NotRecorded,
    Operand,
    Origin,
    Recorded,
    Wanted,
    build,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cpu_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(replay.STREAMS, "cpu", lambda device: 7)


@dataclass(eq=False)
class Note:
    """An operation that notes the words it was issued with."""

    name: str
    clears: bool = False
    seen: list[tuple[int, list[int]]] = field(default_factory=list)

    def prepare(self, words: memoryview, address: int) -> Any:
        return lambda stream: self.seen.append((stream, list(words)))


def bytes_(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)


def made(*issued: tuple[Note, Sequence[Any]], allocations: Sequence[Tensor]) -> Recorder:
    """A recording; tensors among the words are their addresses."""
    found = Recorder()
    found.allocations += allocations
    for note, words in issued:
        found.launched(note, tuple(w.data_ptr() if isinstance(w, Tensor) else w for w in words))
    return found


def given(*tensors: Tensor) -> list[Operand]:
    return [Operand(t, Origin.GIVEN) for t in tensors]


def run(tape: replay.Tape, *operands: Tensor) -> replay.Replayed:
    return tape.replay([t.data_ptr() for t in operands], list(operands))


def test_words_become_memory_and_numbers_stay() -> None:
    x, y, scratch = torch.randn(64), bytes_(256), bytes_(300)
    note = Note("a")
    tape = build(
        made((note, (x.data_ptr() + 8, 12, y, scratch, -5)), allocations=[y, scratch]),
        given(x),
        Wanted([y]),
        CPU,
    )
    other = torch.randn(64)
    first, second = run(tape, x), run(tape, other)
    (stream, a), (_, b) = note.seen
    assert stream == 7
    assert (a[0], b[0]) == (x.data_ptr() + 8, other.data_ptr() + 8)
    assert a[1] == b[1] == 12
    assert a[4] == b[4] == -5
    results = [r.results[0] for r in (first, second)]
    assert [a[2], b[2]] == [r.data_ptr() for r in results if r is not None]
    assert tape.blocks == (0, 0, 2 * ALIGN)


def test_temporaries_share_memory_only_while_they_do_not_live_together() -> None:
    a, b, c, d = (bytes_(1000) for _ in range(4))
    notes = [Note(str(i)) for i in range(3)]
    tape = build(
        made((notes[0], (a, b)), (notes[1], (b, c)), (notes[2], (c, d)), allocations=[a, b, c, d]),
        [],
        Wanted([]),
        CPU,
    )
    run(tape)
    (_, (at_a, at_b)), (_, (again_b, at_c)), (_, (again_c, at_d)) = (n.seen[0] for n in notes)
    assert (at_b, at_c) == (again_b, again_c)
    assert len({at_a, at_b}) == len({at_b, at_c}) == len({at_c, at_d}) == 2
    assert at_c == at_a
    assert tape.blocks[2] == 2 * 1024


def test_an_allocation_that_nobody_uses_takes_no_memory() -> None:
    tape = build(made(allocations=[bytes_(10_000)]), [], Wanted([]), CPU)
    assert tape.blocks == (0, 0, 0)


def test_cleared_words_are_cleared_together_and_first() -> None:
    x = torch.randn(8)
    amax, other, late = (torch.empty(8) for _ in range(3))
    clear, use = Note("clear", clears=True), Note("use")
    recording_ = made(
        (clear, (amax, 1)),
        (use, (x, amax)),
        (clear, (other, 1)),
        (use, (late, other)),
        (clear, (late, 1)),  # not the first that touches it
        allocations=[amax, other, late],
    )
    tape = build(recording_, given(x), Wanted([], observed=[other]), CPU)
    result = run(tape, x)
    numbers, (offset,) = result.numbers, tape.observed
    assert numbers is not None
    assert tape.blocks[0] == 2 * ALIGN
    assert clear.seen[0][1] == [numbers.data_ptr(), 2 * ALIGN // 4]
    assert [issue.clears for issue, *_ in tape.operations] == [True, False, False, True]
    assert use.seen[1][1][1] == numbers.data_ptr() + offset


def test_cleared_words_that_nobody_gets_lie_behind_the_temporaries() -> None:
    amax, early, late = bytes_(4), bytes_(300), torch.empty(8)
    clear, use = Note("clear", clears=True), Note("use")
    recording_ = made(
        (use, (early,)),
        (clear, (amax, 1)),
        (use, (early, amax)),
        (clear, (late, 8)),
        allocations=[amax, early, late],
    )
    tape = build(recording_, [], Wanted([]), CPU)
    result = run(tape)
    assert tape.blocks == (0, 0, 4 * ALIGN)
    assert result.numbers is None
    start = use.seen[0][1][0]
    assert clear.seen[0][1] == [start + 2 * ALIGN, 2 * ALIGN // 4]
    assert use.seen[1][1][0] == start
    assert use.seen[1][1][1] - start in (2 * ALIGN, 3 * ALIGN)  # they lie in the order of addresses
    assert len(clear.seen) == 1


def test_cleared_words_that_are_saved_stay_a_tensor() -> None:
    amax = torch.empty(1)
    note, clear = Note("use"), Note("clear", clears=True)
    made_ = made((clear, (amax, 1)), (note, (amax,)), allocations=[amax])
    tape = build(made_, [], Wanted([], saved=[amax]), CPU)
    assert tape.blocks == (ALIGN, 0, 0)
    (carrier,) = run(tape).carriers
    assert note.seen[0][1] == [carrier.data_ptr()]


def test_saved_values_lie_in_one_block_and_operands_stay_what_they_are() -> None:
    x, y, saved = torch.randn(4, 4), torch.empty(4, 4), torch.empty(4, 8, dtype=torch.bfloat16)
    part = saved[1:3]
    note = Note("a")
    tape = build(
        made((note, (x, y, saved)), allocations=[y, saved]),
        given(x),
        Wanted([y], [x, y, part, (3, 4)]),
        CPU,
    )
    assert tape.layout is not None
    result = run(tape, x)
    carriers = result.carriers
    assert carriers[0] is x
    assert carriers[1] is result.results[0]
    assert len(carriers) == 3
    values = tape.layout.values(carriers)
    assert values[0] is x
    assert values[1] is result.results[0]
    assert (values[2].shape, values[2].dtype) == (part.shape, part.dtype)
    assert values[2].data_ptr() == note.seen[0][1][2] + 16
    assert values[3] == (3, 4)


def test_results_that_are_parts_of_what_was_allocated_or_given() -> None:
    x, y = torch.randn(6), torch.empty(32)
    note = Note("a")
    tape = build(
        made((note, (x, y)), allocations=[y]),
        given(x),
        Wanted([y[4:20].view(4, 4), x, x.view(2, 3), None]),
        CPU,
    )
    part, same, shaped, none = run(tape, x).results
    assert part is not None
    assert part.shape == (4, 4)
    assert part.data_ptr() == note.seen[0][1][1] + 16
    assert same is x
    assert shaped is not None
    assert shaped.shape == (2, 3)
    assert shaped.data_ptr() == x.data_ptr()
    assert none is None


def refused(found: Recorder, operands: list[Operand], wanted: Wanted) -> NotRecorded:
    with pytest.raises(NotRecorded) as caught:
        build(found, operands, wanted, CPU)
    return caught.value


def test_an_address_of_nothing_known() -> None:
    # Mapped on its own, never written: small ones may lie below 1 TiB, where no device's memory does.
    stray = torch.empty(1 << 26, dtype=torch.uint8)
    why = refused(made((Note("a"), (stray,)), allocations=[]), [], Wanted([]))
    assert why.final
    assert "belongs to nothing" in str(why)
    kept = made((Note("a"), (stray,)), allocations=[])
    kept.keep(stray)
    tape = build(kept, [], Wanted([]), CPU)
    assert tape.ready()


def test_kept_memory_belongs_to_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stray = torch.empty(16)
    kept = made((Note("a"), (stray,)), allocations=[])
    kept.keep(stray)
    tape = build(kept, [], Wanted([]), CPU)
    tape.current = lambda device: 8
    assert not tape.ready()


@pytest.mark.parametrize(
    ("origins", "fine"),
    [
        ((Origin.GIVEN, Origin.GIVEN), False),
        ((Origin.GIVEN, Origin.PARAMETER), False),
        ((Origin.GIVEN, Origin.MADE), False),
        ((Origin.INPUT, Origin.INPUT), False),
        ((Origin.INPUT, Origin.MADE), True),
        ((Origin.MADE, Origin.MADE), True),
        ((Origin.PARAMETER, Origin.PARAMETER), True),
    ],
)
def test_who_may_share_memory(origins: tuple[Origin, Origin], fine: bool) -> None:
    x = torch.randn(8)
    operands = [Operand(x, o) for o in origins]
    found = made((Note("a"), (x,)), allocations=[])
    if fine:
        build(found, operands, Wanted([]), CPU)
    else:
        assert not refused(found, operands, Wanted([])).final


def test_parameters_that_overlap_without_being_tied() -> None:
    x = torch.randn(8)
    operands = [Operand(x, Origin.PARAMETER), Operand(x[2:], Origin.PARAMETER)]
    assert not refused(made((Note("a"), (x,)), allocations=[]), operands, Wanted([])).final


def test_what_is_kept_apart() -> None:
    """Reasons that another recording would not change."""
    x, y = torch.randn(8), torch.empty(8)
    plain = made((Note("a"), (x, y)), allocations=[y])
    for wanted, text in (
        (Wanted([torch.randn(3)]), "not known"),
        (Wanted([y[:4], y[4:]]), "share memory"),
        (Wanted([], ["text"]), "a str is saved"),
        (Wanted([], [torch.empty(0)]), "empty"),
        (Wanted([], observed=[x[:1]]), "no value of its own"),
    ):
        why = refused(plain, given(x), wanted)
        assert text in str(why)
        assert why.final


def test_a_phase_is_recorded_after_its_first_calls_and_not_for_ever() -> None:
    phase = Recorded("")
    assert [phase.due(CPU) for _ in range(4)] == [False, False, True, True]
    x = torch.randn(8)
    twice = given(x, x)
    for _ in range(20):
        if phase.due(CPU):
            phase.learn(made((Note("a"), (x,)), allocations=[]), twice, Wanted([]), CPU)
    assert "share memory" in str(phase)
    assert not phase.due(CPU)
    assert not Recorded("a kernel").due(CPU)
    assert not Recorded("").due(torch.device("meta"))


def test_the_recorder_is_of_its_thread_and_sees_torch() -> None:
    assert recorder() is None
    with recording() as outer:
        assert recorder() is outer
        x = torch.empty(3)
        y = torch.empty_like(x)
        x.view(3, 1).t()
        assert outer.reason is None
        assert [t.data_ptr() for t in outer.allocations] == [x.data_ptr(), y.data_ptr()]
        float(x.fill_(1.0)[0])
    assert outer.reason == "torch's fill_ is called, which is not recorded"
    assert recorder() is None
