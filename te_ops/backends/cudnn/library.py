"""The cuDNN frontend: loading it, handles, and running a plan that was built.

Importing this touches no CUDA and no vendor library; `missing()` says what is not there.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import threading
import weakref
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from te_ops.errors import PlanError
from te_ops.runtime.tape import unwatched

OLDEST = 90600
"""Of cuDNN: ragged statistics, and bottom-right diagonals at any length."""
BROKEN = (91000, 91001)  # refused by the frontend itself: wrong results


@functools.cache
def _import() -> Any:
    """The frontend, or why there is none."""
    try:
        found = importlib.import_module("cudnn")
        atexit.register(_close)
        return found
    except Exception as error:  # noqa: BLE001  (a broken installation raises anything; torch's attention remains)
        return f"nvidia-cudnn-frontend cannot be imported: {type(error).__name__}: {error}"


@functools.cache
def missing() -> str | None:
    """None if graphs can be built and run here, else what is missing."""
    found = _import()
    if isinstance(found, str):
        return found
    try:
        mine = version()
    except Exception as error:  # noqa: BLE001  (no library behind the frontend)
        return f"cuDNN cannot be loaded: {type(error).__name__}: {error}"
    if mine < OLDEST or mine in BROKEN:
        return f"cuDNN {mine} is not used: attention needs {OLDEST} or later, without {BROKEN}"
    return _mismatch(mine)


def _mismatch(mine: int) -> str | None:
    """Two cuDNN libraries in a process fail at the first plan, so the frontend must have found torch's."""
    found = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    theirs: int | None = found
    if theirs is None or theirs == mine:
        return None
    return f"the frontend loads cuDNN {mine}, torch {theirs}; make both find one library"


def library() -> Any:
    """The frontend's module.

    Raises:
        PlanError: it cannot be imported.
    """
    found = _import()
    if isinstance(found, str):
        raise PlanError(found)
    return found


@functools.cache
def version() -> int:
    """Of cuDNN: 91900 and the like."""
    return int(library().backend_version())


# -- devices, streams and handles


def entered(index: int) -> Any:
    """A context in which this device is the current one."""
    return torch.cuda.device(index)


def current_device() -> int:
    """Number of the current device."""
    return torch._C._cuda_getDevice()


def stream_of(index: int) -> int:
    """Handle of torch's current stream on a device."""
    return int(torch._C._cuda_getCurrentRawStream(index))


def capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def captured_here() -> bool:
    """`capturing`, of the current device, with less around it; CUDA is there."""
    return torch._C._cuda_isCurrentStreamCapturing()


SCRATCH = 1 << 20
"""Bytes of workspace, at most, that lie ready for a thread and a stream; more are allocated for each call."""
_SCRATCH: dict[tuple[int, int, int], torch.Tensor] = {}


def scratch(device: torch.device, stream: int) -> int:
    """Address of `SCRATCH` bytes for the calls of this thread on a stream, which run one after the other.

    A call is several kernels, and those of two threads may alternate on one stream: so it is the thread's own.
    """
    key = (threading.get_ident(), device.index or 0, stream)
    found = _SCRATCH.get(key)
    if found is None:
        with unwatched():  # no memory of a plan
            found = torch.empty(SCRATCH, dtype=torch.uint8, device=device)
        _SCRATCH[key] = found
    return found.data_ptr()


def release() -> None:
    """Give the workspaces that lie ready back to torch."""
    _SCRATCH.clear()


_GUARDS = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_ALLOCATE = getattr(_GUARDS, "_empty_strided_cuda", None)
"""What compiled code of torch allocates with: half of what `torch.empty_like` costs."""


def fresh(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes contiguous tensors like this one. On CUDA that is on the current device, and no recorder hears of it."""
    if _ALLOCATE is None or like.device.type != "cuda":
        return partial(torch.empty_like, like)
    shape = tuple(like.shape)
    strides = torch.empty(shape, device="meta").stride()
    return partial(_ALLOCATE, shape, strides, like.dtype)


class _Handles(threading.local):
    """A handle is used by one thread at a time, and autograd runs backward in threads of its own."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, int | None]] = {}


_HANDLES = _Handles()


def handle(index: int, stream: int) -> Any:
    """This thread's handle for a device, which is the current one, on a stream."""
    found, on = _HANDLES.made.get(index, (None, None))
    if on != stream or found is None:
        lib = library()
        found = lib.create_handle() if found is None else found
        lib.set_stream(handle=found, stream=stream)
        _HANDLES.made[index] = (found, stream)
    return found


# -- plans

_LIVE: weakref.WeakSet[Built] = weakref.WeakSet()


def _close() -> None:
    """Let go of all graphs while the frontend is still whole: it complains about those that outlive it."""
    for built in list(_LIVE):
        built.graph = built.raw = None
    _HANDLES.made.clear()


class Built:
    """A graph with one plan of it. Threads may share it; `operands` are names in the order of `run`'s addresses."""

    clears = False  # as `te_ops.runtime.tape.Issue` asks

    def __init__(
        self,
        index: int,
        graph: Any,
        uids: dict[str, int],
        plan: int = -1,
        *,
        stored: tuple[str, int] | None = None,
    ) -> None:
        """`plan` is among those of the graph; `stored`, of a graph that was loaded with one: its name and workspace."""
        self.index, self.graph, self.plan = index, graph, plan
        self.operands = tuple(sorted(uids, key=uids.__getitem__))
        self.uids = tuple(uids[name] for name in self.operands)
        if stored is None:
            stored = (
                str(graph.get_plan_name_at_index(plan)),
                int(graph.get_workspace_size_plan_at_index(plan)),
            )
        self.name, self.workspace = stored
        self.raw = self._direct()
        _LIVE.add(self)

    def _direct(self) -> Callable[..., Any] | None:
        """The call below `execute`, which takes the addresses as they lie in memory; None if this frontend has none.

        It costs a third of the public call's host time. Only taken where the frontend orders the operands as here.
        """
        lowered = getattr(self.graph, "_lowered_graph", None)
        raw = getattr(lowered, "_execute_with_raw_ptrs", None)
        order = getattr(self.graph, "_variant_pack_uids", None)
        plans = getattr(self.graph, "_plans", None)
        if raw is None or order is None or plans is None or tuple(order() or ()) != self.uids:
            return None
        self._at = -1 if self.plan < 0 else getattr(plans[self.plan], "cpp_index", None)
        return None if self._at is None else raw

    def run(self, addresses: list[int], stream: int) -> None:
        """Issue the plan over the addresses of its operands and the workspace, in that order, on a stream."""
        words = array("q", addresses)  # of this call: threads share a plan
        self._issue(words, words.buffer_info()[0], stream)

    def prepare(self, words: memoryview, address: int) -> Callable[[int], None]:
        """A call over the words at another place, for a tape of launches."""
        return partial(self._issue, words, address)

    def _issue(self, words: Any, address: int, stream: int) -> None:
        count, index = len(self.uids), self.index
        if self.raw is not None:
            found, on = _HANDLES.made.get(index, (None, None))
            if on != stream or found is None:
                found = handle(index, stream)
            self.raw(address, count, words[count], found.backend_handle, self._at)
            return
        given = dict(zip(self.uids, words[:count].tolist(), strict=True))
        found = handle(index, stream)
        if self.plan < 0:
            self.graph.execute(given, words[count], handle=found)
        else:
            self.graph.execute_plan_at_index(given, words[count], self.plan, handle=found)
