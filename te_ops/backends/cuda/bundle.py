"""Graphs of the driver over the launches of a tape: one call issues them all."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.runtime.tape import Prepared

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: a library may allocate its scratch memory meanwhile


class Graph:
    """An executable graph. `graph(stream)` launches it; one launch at a time, as the driver asks."""

    def __init__(self, handle: int) -> None:
        self._launch = functools.partial(driver().cuGraphLaunch, handle)
        self._destroy = functools.partial(driver().cuGraphExecDestroy, handle)
        self._lock = threading.Lock()

    def __call__(self, stream: int) -> None:
        """Launch on a stream."""
        with self._lock:
            code = self._launch(stream)
            if code:
                launch.again(lambda: self._launch(stream), code, "launching a graph")

    def __del__(self) -> None:
        self._destroy()  # one that still runs is freed by the driver when it is done


class Bundler:
    """See `te_ops.runtime.bundle.Bundler`. Recording happens on a stream of its own for each stream of the callers:
    libraries keep scratch memory by stream, and graphs of two streams may run at the same time."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def capturing(self) -> bool:
        """See the protocol."""
        return torch._C._cuda_isCurrentStreamCapturing()

    def bundle(
        self, device: torch.device, stream: int, calls: Sequence[Prepared]
    ) -> Prepared | None:
        """See the protocol."""
        with self._lock:
            side = self._side(device.index, stream)
            return None if side is None else _record(side, calls)

    def _side(self, index: int, stream: int) -> int | None:
        found = self._streams.get((index, stream))
        if found is None:
            made = ctypes.c_void_p()
            if driver().cuStreamCreate(ctypes.byref(made), _NON_BLOCKING) or not made.value:
                return None
            found = self._streams[index, stream] = made.value
        return found


def _record(stream: int, calls: Sequence[Prepared]) -> Graph | None:
    """What the calls issue on a stream, as a graph; None if something of it cannot be recorded."""
    library, graph, made = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    if library.cuStreamBeginCapture_v2(stream, _RELAXED):
        return None
    failed = False
    try:
        for call in calls:
            call(stream)
    except Exception:  # noqa: BLE001  (libraries raise anything; what cannot be recorded is issued one by one)
        failed = True
    finally:
        code = library.cuStreamEndCapture(stream, ctypes.byref(graph))
    if code or not graph.value:
        return None
    if not failed:
        code = library.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, 0)
    library.cuGraphDestroy(graph)
    return None if failed or code or not made.value else Graph(made.value)


@functools.cache
def driver() -> Any:
    """The driver's library with the types of what is called here."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    for name, types in (
        ("cuStreamCreate", [pointer, number]),
        ("cuStreamBeginCapture_v2", [pointer, ctypes.c_int]),
        ("cuStreamEndCapture", [pointer, pointer]),
        ("cuGraphInstantiateWithFlags", [pointer, pointer, ctypes.c_ulonglong]),
        ("cuGraphLaunch", [pointer, pointer]),
        ("cuGraphCreate", [pointer, number]),
        ("cuGraphAddKernelNode_v2", [pointer, pointer, pointer, ctypes.c_size_t, pointer]),
        ("cuGraphAddChildGraphNode", [pointer, pointer, pointer, ctypes.c_size_t, pointer]),
        ("cuGraphExecKernelNodeSetParams_v2", [pointer, pointer, pointer]),
        ("cuGraphDestroy", [pointer]),
        ("cuGraphExecDestroy", [pointer]),
    ):
        getattr(library, name).argtypes = types
    return library
