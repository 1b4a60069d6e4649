"""A graph with copies around it: the kernel on the host build, and the driver's calls on a stand-in that runs them."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_ops.backends.cuda import around, bundle, launch
from te_ops.backends.cuda import compile as compiler
from te_ops.errors import PlanError
from tests.backends.cuda import emulator

DEVICE = torch.device("cuda", 0)


# -- the kernel


@pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")
@pytest.mark.parametrize(
    "sizes", [[1], [16, 0, 15], [around.SHARE, 3 * around.SHARE + 40, 7], [33] * 11], ids=str
)
def test_it_copies_every_byte_and_no_other(sizes: list[int]) -> None:
    size = next(s for s in around.SIZES if len(sizes) <= s)
    kernel = emulator.build("copy_several", around.text_of(size), "sm_90", around.THREADS, 4 * size)
    draw = torch.Generator().manual_seed(0)
    sources = [torch.randint(256, (n + 16,), dtype=torch.uint8, generator=draw) for n in sizes]
    made = [torch.full_like(s, 7) for s in sources]
    slots, end = [], 0
    for n, a, b in zip(sizes, made, sources, strict=True):
        end += -(-n // around.SHARE)
        slots += [a.data_ptr(), b.data_ptr(), n, end]
    slots += [0, 0, 0, end] * (size - len(sizes))
    kernel(torch.device("cpu"), end, *slots)
    for n, a, b in zip(sizes, made, sources, strict=True):
        assert torch.equal(a[:n], b[:n])
        assert (a[n:] == 7).all()


@pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_it_compiles(arch: str) -> None:
    for size in around.SIZES:
        log = compiler.compile_text(around.text_of(size), arch, options=("--ptxas-options=-v",)).log
        assert "spill" not in log or "0 bytes spill stores, 0 bytes spill loads" in log


# -- the driver


class Driver:
    """Graphs are lists of what their nodes do; an executable one has a copy of each kernel node's words."""

    def __init__(self, inner: Any) -> None:
        self.log: list[str] = []
        self.fails: dict[str, int] = {}
        self.handles = iter(range(100, 10_000))
        self.inner = inner  # what the recorded graph does
        self.graphs: dict[int, list[int]] = {}
        self.nodes: dict[int, Any] = {}  # None: the recorded graph
        self.behind: dict[int, int | None] = {}
        self.executables: dict[int, dict[int, Any]] = {}

    def _call(self, name: str, out: Any = None) -> int | None:
        self.log.append(name)
        if self.fails.get(name):
            return None
        made = next(self.handles)
        if out is not None:
            ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[0] = made
        return made

    def cuGraphCreate(self, out: Any, flags: int) -> int:
        made = self._call("create", out)
        if made is None:
            return self.fails["create"]
        self.graphs[made] = []
        return 0

    def _add(self, name: str, node: tuple[Any, Any, Any, int], value: Any) -> int:
        out, graph, depends, count = node
        made = self._call(name, out)
        if made is None:
            return self.fails[name]
        self.behind[made] = (
            ctypes.cast(depends, ctypes.POINTER(ctypes.c_void_p))[0] if count else None
        )
        self.graphs[graph.value].append(made)
        self.nodes[made] = value
        return 0

    @staticmethod
    def _words(address: int) -> Any:
        """The copies that the parameters of a kernel node ask for."""
        node = around._Parameters.from_address(address)
        size = {h: s for s, h in HANDLES.items()}[node.kernel]
        assert node.function is None
        assert (*node.grid[1:], *node.block) == (1, 1, around.THREADS, 1, 1)
        memory = ctypes.cast(node.arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        return [*(ctypes.c_int64 * (4 * size)).from_address(memory)]

    def cuGraphAddKernelNode_v2(self, *args: Any) -> int:
        return self._add("kernel", args[:4], self._words(args[4]))

    def cuGraphAddChildGraphNode(self, *args: Any) -> int:
        assert args[4] == 55
        return self._add("child", args[:4], None)

    def cuGraphInstantiateWithFlags(self, out: Any, graph: Any, flags: int) -> int:
        made = self._call("instantiate", out)
        if made is None:
            return self.fails["instantiate"]
        self.executables[made] = {n: self.nodes[n] for n in self.graphs[graph.value]}
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, executable: int, node: Any, parameters: int) -> int:
        self.log.append("set")
        self.executables[executable][node.value] = self._words(parameters)
        return self.fails.get("set", 0)

    def cuGraphLaunch(self, executable: int, stream: int) -> int:
        self.log.append("launch")
        for words in self.executables[executable].values():
            if words is None:
                self.inner()
                continue
            for into, source, count, _ in zip(*[iter(words)] * 4, strict=True):
                ctypes.memmove(into, source, count)
        return self.fails.get("launch", 0)

    def cuGraphExecDestroy(self, executable: int) -> int:
        self.log.append("destroy")
        del self.executables[executable]
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        self.log.append("drop")
        del self.graphs[getattr(graph, "value", graph)]
        return 0


HANDLES = {size: 1000 + size for size in around.SIZES}


class Case:
    """A graph that doubles its two inputs into two results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = [torch.zeros(5), torch.zeros(3, 4)]
        self.results = [torch.zeros(5), torch.zeros(3, 4), torch.zeros(0)]
        self.driver = Driver(self.run)
        for module in (around, bundle):
            monkeypatch.setattr(module, "driver", lambda: self.driver)
        monkeypatch.setattr(around, "arch_of", lambda index: "sm_90")
        monkeypatch.setattr(
            around, "_kernel", lambda size, arch: SimpleNamespace(handle=HANDLES[size])
        )
        monkeypatch.setattr(launch, "error_text", lambda code: f"error {code}")

    def run(self) -> None:
        for a, b in zip(self.reads, self.results, strict=False):
            b.copy_(2 * a)

    def build(self) -> around.Around | None:
        return around.build(55, DEVICE, self.reads, self.results)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(monkeypatch)


def addresses(*tensors: torch.Tensor) -> list[int]:
    return [t.data_ptr() for t in tensors]


def test_values_go_in_and_results_come_out_in_one_launch(case: Case) -> None:
    made = case.build()
    assert made is not None
    assert case.driver.log == ["create", "kernel", "child", "kernel", "instantiate"]
    first, child, last = case.driver.nodes
    assert [case.driver.behind[n] for n in (first, child, last)] == [None, first, child]
    given, fresh = [torch.randn(5), torch.randn(3, 4)], [torch.zeros_like(r) for r in case.results]
    del case.driver.log[:]
    made(7, addresses(*given, *fresh))
    assert case.driver.log == ["set", "set", "launch"]
    assert all(torch.equal(2 * a, b) for a, b in zip(given, fresh, strict=False))
    made(7, addresses(*given, *fresh))
    assert case.driver.log[3:] == ["launch"]  # the same places
    other = torch.randn(5)
    made(7, addresses(other, given[1], *fresh))
    assert case.driver.log[4:] == ["set", "launch"]  # of the side that has changed
    assert torch.equal(fresh[0], 2 * other)
    assert torch.equal(fresh[1], 2 * given[1])


def test_a_side_without_bytes_has_no_node(case: Case) -> None:
    case.results = [torch.zeros(0)]
    made = case.build()
    assert made is not None
    assert case.driver.log == ["create", "kernel", "child", "instantiate"]
    case.reads = []
    assert case.build() is not None
    assert case.driver.log[4:7] == ["create", "child", "instantiate"]


def test_it_gives_everything_back(case: Case) -> None:
    made = case.build()
    assert made is not None
    del made
    gc.collect()
    assert not case.driver.graphs
    assert not case.driver.executables


@pytest.mark.parametrize("name", ["create", "kernel", "child", "instantiate"])
def test_a_driver_that_does_not_take_it(case: Case, name: str) -> None:
    case.driver.fails[name] = 801
    assert case.build() is None
    assert not case.driver.graphs
    assert not case.driver.executables


def test_more_tensors_than_a_launch_has_room_for(case: Case) -> None:
    case.results = [torch.zeros(4)] * (around.SIZES[-1] + 1)
    assert case.build() is None
    assert not case.driver.log


def test_what_fails_later_is_said_and_set_again(case: Case) -> None:
    made = case.build()
    assert made is not None
    fresh = [torch.zeros_like(r) for r in case.results]
    places = addresses(*case.reads, *fresh)
    case.driver.fails["set"] = 700
    with pytest.raises(PlanError, match="setting what a graph copies fails with error 700"):
        made(7, places)
    case.driver.fails = {"launch": 719}
    del case.driver.log[:]
    with pytest.raises(PlanError, match="launching a graph fails with error 719"):
        made(7, places)
    assert case.driver.log == ["set", "set", "launch"]
