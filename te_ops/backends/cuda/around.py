"""A recorded graph with the copies around it as one graph of the driver.

A graph works on memory that stays where it is. What goes in and what comes out lies elsewhere at every call: a kernel
before the graph and one behind it copy, as nodes whose addresses are set anew where they changed. A call is one launch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.bundle import driver
from te_ops.backends.cuda.state import arch_of

THREADS, UNROLL = 256, 4
SHARE = THREADS * UNROLL * 16
"""Bytes that a block copies."""
SIZES = (1, 4, 16, 96)
"""Tensors of a launch, whose parameter has 4 KB at most."""
_WORDS = 4  # of a tensor


class Around:
    """`around(stream, addresses)`: values at the first addresses go in, the graph runs, results go to the others.

    One call at a time, with the device current. An address is on 16 bytes; what lies there has the layout of the
    graph's own memory.
    """

    def __init__(self, graph: int, executable: int, nodes: Sequence[_Node]) -> None:
        """It owns both graphs: nodes are set by their handles in the first."""
        library = driver()
        self.nodes = tuple(nodes)
        self.addresses: Sequence[int] = ()
        self._launch = functools.partial(library.cuGraphLaunch, executable)
        self._destroy = (
            functools.partial(library.cuGraphExecDestroy, executable),
            functools.partial(library.cuGraphDestroy, graph),
        )
        for node in nodes:
            node.bind(executable)

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on a stream."""
        if addresses != self.addresses:
            self.addresses = ()  # it may fail half way
            for node in self.nodes:
                node.set(addresses)
            self.addresses = addresses
        if code := self._launch(stream):
            launch.again(lambda: self._launch(stream), code, "launching a graph")

    def __del__(self) -> None:
        for destroy in self._destroy:
            destroy()  # one that still runs is freed by the driver when it is done


class _Parameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of the driver, its second version."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class _Node:
    """A kernel that copies some tensors: its words in host memory, and the node once there is one."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], first: int, arch: str, inwards: bool
    ) -> None:
        """`tensors`: of the graph; `first`: where the addresses of the other sides begin among those of a call."""
        count, self.first = len(tensors), first
        size = next(s for s in SIZES if count <= s)
        words, end = [], 0
        for t in tensors:
            end += -(-t.nbytes // SHARE)
            words += [t.data_ptr(), t.data_ptr(), t.nbytes, end]
        words += [0, 0, 0, end] * (size - count)
        self.memory = (ctypes.c_int64 * len(words))(*words)
        self.places = range(1 if inwards else 0, _WORDS * count, _WORDS)
        self.arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self.memory))
        self.blocks = end
        self.kernel = _kernel(size, arch)
        self.known: list[int] = []
        self._write: Any = None

    def add(self, graph: Any, after: Any) -> Any:
        """Make it a node of a graph, behind another node; the node, or None."""
        made = ctypes.c_void_p()
        self.parameters = _Parameters(
            None,
            (self.blocks, 1, 1),
            (THREADS, 1, 1),
            0,
            ctypes.addressof(self.arguments),
            None,
            self.kernel.handle,
            None,
        )
        failed = driver().cuGraphAddKernelNode_v2(
            ctypes.byref(made), graph, *_behind(after), ctypes.addressof(self.parameters)
        )
        self.node = made
        return None if failed else made

    def bind(self, executable: int) -> None:
        """The executable graph whose node is set from now on."""
        self._write = functools.partial(
            driver().cuGraphExecKernelNodeSetParams_v2,
            executable,
            self.node,
            ctypes.addressof(self.parameters),
        )

    def set(self, addresses: Sequence[int]) -> None:
        """Where the other sides lie from now on; what runs already is not touched."""
        mine = [*addresses[self.first : self.first + len(self.places)]]
        if mine == self.known:
            return
        self.known = []
        for place, address in zip(self.places, mine, strict=True):
            self.memory[place] = address
        if code := self._write():
            launch.again(self._write, code, "setting what a graph copies")
        self.known = mine


def build(
    graph: int,
    device: torch.device,
    reads: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> Around | None:
    """A recorded graph with copies to `reads` before it and from `results` behind it.

    Args:
        graph: of the driver, not executable; the caller keeps its memory.
        reads, results: dense tensors in the graph's memory, up to 96 of each.

    None where the driver cannot: the caller launches three times then.
    """
    both = ((reads, 0, True), (results, len(reads), False))
    sides = [side for side in both if any(t.nbytes for t in side[0])]
    if any(len(tensors) > SIZES[-1] for tensors, *_ in sides):
        return None
    arch, library = arch_of(device.index), driver()
    whole, executable = ctypes.c_void_p(), ctypes.c_void_p()
    nodes = {inwards: _Node(t, first, arch, inwards) for t, first, inwards in sides}
    if library.cuGraphCreate(ctypes.byref(whole), 0):
        return None
    if _assemble(library, whole, graph, nodes) and not library.cuGraphInstantiateWithFlags(
        ctypes.byref(executable), whole, 0
    ):
        assert whole.value is not None
        assert executable.value is not None
        return Around(whole.value, executable.value, tuple(nodes.values()))
    library.cuGraphDestroy(whole)
    return None


def _assemble(library: Any, whole: Any, graph: int, nodes: dict[bool, _Node]) -> bool:
    """Copies in, the graph, copies out; whether the driver took all of it."""
    last, inner = None, ctypes.c_void_p()
    if True in nodes:
        last = nodes[True].add(whole, None)
        if last is None:
            return False
    if library.cuGraphAddChildGraphNode(ctypes.byref(inner), whole, *_behind(last), graph):
        return False
    return False not in nodes or nodes[False].add(whole, inner) is not None


def _behind(node: Any) -> tuple[int | None, int]:
    """The nodes that another one depends on, as the driver takes them: where they are, and how many."""
    return (None, 0) if node is None else (ctypes.addressof(node), 1)


@functools.cache
def _kernel(size: int, arch: str) -> Any:
    """Loaded where there is a device: its handle is that of the node."""
    return launch.build("copy_several", text_of(size), arch, THREADS, _WORDS * size)


def text_of(size: int) -> str:
    """The device text for up to so many tensors."""
    return launch.text_of(
        name="copy_several",
        head=f"#include <kernels/copy.cuh>\ntypedef te::Copies<{size}> Parameters;\n",
        body=f"te::copy_several<{size}, {THREADS}, {UNROLL}>(p);",
        threads=THREADS,
    )
