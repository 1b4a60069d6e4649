"""Who replays a graph and who copies, without a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from te_ops.errors import PlanError
from te_ops.runtime import engines
from te_ops.runtime.engines import _Replay, room_for


class Graph:
    """torch's graph: doubles what it reads; `draws` random numbers, or none."""

    def __init__(self, draws: bool) -> None:
        self.reads = [torch.zeros(4), torch.zeros(2, 3)]
        self.results = [torch.zeros(4), torch.zeros(3, 2).t()]
        self.draws, self.offset, self.replays = draws, 0, 0

    def replay(self) -> None:
        self.replays += 1
        self.offset += 4 * self.draws
        self.run()

    def run(self) -> None:
        for a, b in zip(self.reads, self.results, strict=True):
            b.copy_(2 * a)

    def get_offset(self) -> int:
        return self.offset

    def raw_cuda_graph(self) -> int:
        return 11


class Around:
    """One launch for all: the addresses that it was called with."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.called: list[tuple[int, list[int]]] = []

    def __call__(self, stream: int, addresses: list[int]) -> None:
        self.called.append((stream, addresses))


class Case:
    def __init__(self, draws: bool = False) -> None:
        self.graph = Graph(draws)
        self.current = 0
        self.made: list[Around] = []
        self.replay = _Replay(
            self.graph, torch.device("cuda", 0), self.graph.reads, self.graph.results
        )

    def build(self, *args: Any) -> Around:
        self.made.append(Around(*args))
        return self.made[-1]

    def check(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A call by torch's replay; what came out."""
        made = [torch.empty_like(room_for(r)) for r in self.graph.results]
        self.replay(given, made)
        assert all(torch.equal(2 * a, b) for a, b in zip(given, made, strict=True))
        return made


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Case:
    made = Case(*getattr(request, "param", ()))
    monkeypatch.setitem(engines.AROUND, "cuda", made.build)
    monkeypatch.setattr(torch.cuda, "default_generators", (made.graph,))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 3, raising=False)
    return made


def inputs() -> list[torch.Tensor]:
    return [torch.randn(4), torch.randn(2, 3)]


def test_the_first_replay_is_torchs_and_the_others_are_one_launch(case: Case) -> None:
    made = case.check(inputs())
    assert made[1].stride() == (1, 2)  # as the graph's result
    (around,) = case.made
    assert around.args[0] == 11
    assert around.args[2] == case.graph.reads
    given, fresh = inputs(), [torch.empty(4), torch.empty(2, 3)]
    case.replay(given, fresh)
    assert case.graph.replays == 1
    assert around.called == [(3, [t.data_ptr() for t in (*given, *fresh)])]


def test_values_that_lie_otherwise_are_brought_into_order(case: Case) -> None:
    case.check(inputs())
    strided = torch.randn(3, 2).t()
    plain = torch.randn(4)
    case.replay([plain, strided], [torch.empty(4), torch.empty(2, 3)])
    (_, addresses) = case.made[0].called[0]
    assert addresses[0] == plain.data_ptr()
    assert addresses[1] != strided.data_ptr()


def test_results_that_stay_where_they_are(case: Case) -> None:
    for i in range(3):
        given = inputs()
        case.replay(given, ())
        if not i:
            assert all(
                torch.equal(2 * a, b) for a, b in zip(given, case.graph.results, strict=True)
            )
    (around,) = case.made
    assert around.args[3] == []
    assert len(around.called) == 2
    case.check(inputs())  # another kind of call has a launch of its own
    assert len(case.made) == 2


def test_another_current_device_is_torchs_business(case: Case) -> None:
    case.check(inputs())
    case.current = 1
    case.check(inputs())
    assert case.graph.replays == 2


@pytest.mark.parametrize("case", [(True,)], indirect=True)
def test_a_graph_that_draws_random_numbers_is_replayed_by_torch(case: Case) -> None:
    for _ in range(3):
        case.check(inputs())
    assert case.graph.replays == 3
    assert not case.made


def test_without_a_backend_torch_does_all(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "AROUND", {})
    for _ in range(3):
        case.check(inputs())
    assert case.graph.replays == 3


def test_results_with_gaps_are_copied_by_torch(case: Case) -> None:
    wide = torch.zeros(2, 6)
    case.graph.results[1] = wide[:, ::2]
    case.replay = _Replay(case.graph, torch.device("cuda", 0), case.graph.reads, case.graph.results)
    for _ in range(2):
        case.check(inputs())
    assert case.graph.replays == 2
    assert not case.made


@pytest.mark.parametrize("kind", ["offset", "negated", "conjugated"])
def test_results_that_are_no_bytes_in_their_place_are_copied_by_torch(
    case: Case, kind: str
) -> None:
    result = {
        "offset": torch.zeros(5)[1:],
        "negated": torch._neg_view(torch.zeros(4)),
        "conjugated": torch.zeros(4, dtype=torch.complex64).conj(),
    }[kind]
    case.graph.results[0] = result
    case.replay = _Replay(case.graph, torch.device("cuda", 0), case.graph.reads, case.graph.results)
    for _ in range(2):
        case.check(inputs())
    assert case.graph.replays == 2
    assert not case.made


def test_complex_values_may_be_lazy_and_are_copied_by_torch(case: Case) -> None:
    case.graph.reads[0] = torch.zeros(4, dtype=torch.complex64)
    case.graph.results[0] = torch.zeros(4, dtype=torch.complex64)
    case.replay = _Replay(case.graph, torch.device("cuda", 0), case.graph.reads, case.graph.results)
    for _ in range(2):
        case.check([torch.randn(4, dtype=torch.complex64).conj(), torch.randn(2, 3)])
    assert not case.made


def test_a_launch_that_cannot_be_built_leaves_torchs_replay(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any) -> Any:
        raise PlanError("no compiler")

    monkeypatch.setitem(engines.AROUND, "cuda", build)
    with pytest.raises(PlanError, match="no compiler"):
        case.check(inputs())
    case.check(inputs())
    assert case.graph.replays == 2


def test_what_is_there_already_is_not_copied(case: Case) -> None:
    case.graph.reads[0].fill_(3.0)
    other = torch.ones(2, 3)
    made = [torch.empty_like(room_for(r)) for r in case.graph.results]
    case.replay([case.graph.reads[0], other], made)
    assert (made[0] == 6.0).all()
    assert (made[1] == 2.0).all()
