"""Engines: how a device type records the body of a graph and replays it."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from te_ops.runtime.loads import entry
from te_ops.runtime.replay import addresses_of, like

Body = Callable[[], list[torch.Tensor]]
"""What is captured: it returns the tensors that a replay fills again."""


class Replay(Protocol):
    """A recorded graph, with the way in and out of its memory."""

    def __call__(self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Values go to what the graph reads, it runs on the current stream, and its results go to `made`.

        Args:
            given: one for each tensor that it reads; that tensor itself where nothing is to be copied.
            made: tensors from `room_for` of its first results, all or none.
        """


def room_for(result: torch.Tensor) -> torch.Tensor:
    """What `torch.empty_like` makes the room for a result from: of the same layout, where the result is dense."""
    if result.is_contiguous():
        return like(result.shape, result.dtype, result.device)
    return result.detach()


class Engine(Protocol):
    """How a device type records bodies and replays them."""

    def pool(self, device: torch.device) -> Any:
        """Memory that recordings which never wait for each other may share."""

    def apart(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Where rehearsals run: apart from the caller's stream, ordered after what it holds and before what follows."""

    def record(
        self, body: Body, pool: Any, device: torch.device, reads: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Replay]:
        """Record the body, which reads these contiguous tensors; its results, and what fills them again."""

    def strict(self) -> contextlib.AbstractContextManager[Any]:
        """Within, what waits for the device raises: a recording that fails in the middle leaves traces."""

    def capturing(self) -> bool:
        """Whether the caller is recording the current stream himself."""

    def turn(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Within, the current stream is behind all earlier replays on the device, and nobody else issues one."""


class CudaEngine:
    """Recording by CUDA's stream capture; errors of other threads do not touch it, nor it them.

    All recordings of a device are made on one stream, so their GEMMs may share scratch memory of cuBLAS: replays on
    several streams therefore wait for each other.
    """

    def __init__(self) -> None:
        self.streams: dict[tuple[int | None, str], Any] = {}
        self.turns: dict[torch.device, _Turn] = {}

    def pool(self, device: torch.device) -> Any:
        """See `Engine`."""
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        """See `Engine`."""
        with torch.cuda.device(device):
            before = torch.cuda.current_stream()
            side = self._stream(device, "rehearse")
            side.wait_stream(before)
            try:
                with torch.cuda.stream(side):
                    yield
            finally:
                before.wait_stream(side)

    def record(
        self, body: Body, pool: Any, device: torch.device, reads: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Replay]:
        """See `Engine`."""
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.device(device), torch.cuda.stream(self._stream(device, "record")):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = body()
            except BaseException:
                self._abort(graph, pool)
                raise
            graph.capture_end()
        return results, _Replay(graph, device, reads, results)

    def _stream(self, device: torch.device, use: str) -> Any:
        """One stream for each use: libraries keep memory by stream, which all graphs then share."""
        key = device.index, use
        if key not in self.streams:
            self.streams[key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self.streams[key]

    @staticmethod
    def _abort(graph: Any, pool: Any) -> None:
        """End a capture that failed, so that the next one finds the device as it was."""
        try:
            graph.capture_end()
        except RuntimeError:
            end = getattr(torch._C, "_cuda_endAllocateToPool", None)
            if end is not None:
                with contextlib.suppress(RuntimeError):
                    end(torch.cuda.current_device(), pool)

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        """See `Engine`. torch keeps one mode for the process."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capturing(self) -> bool:
        """See `Engine`."""
        return torch._C._cuda_isCurrentStreamCapturing()

    def turn(self, device: torch.device) -> _Turn:
        """See `Engine`."""
        found = self.turns.get(device)
        if found is None:
            found = self.turns.setdefault(device, _Turn(device))
        return found


AROUND: dict[str, Callable[..., Any]] = {}
"""By device type: what makes a graph and the copies around it one launch (`backends.cuda.around`)."""


class _Replay:
    """See `Replay`. One launch of the driver's, where a graph draws no random numbers; that shows at its first replay.

    torch's own replay moves the state of random numbers on; the copies are launches of their own then.
    """

    def __init__(
        self,
        graph: Any,
        device: torch.device,
        reads: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        self.graph, self.device, self.index = graph, device, device.index
        self.reads, self.results = list(reads), [r.detach() for r in results]
        self.dense: list[None] = [None] * len(self.reads)
        # By how many results leave: what launches all at once, or None where torch replays.
        self.around: dict[int, Any] = {}

    def __call__(self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """See `Replay`."""
        index = self.index
        around = self.around.get(len(made))
        if around is not None and torch._C._cuda_getDevice() == index:
            addresses = addresses_of(given, self.dense)
            if addresses is None:
                given = [entry(x) for x in given]  # alive until the launch
                addresses = [x.data_ptr() for x in given]
            addresses += map(_address, made)
            around(torch._C._cuda_getCurrentRawStream(index), addresses)
            return
        copy_all(self.reads, given)
        if len(made) in self.around:
            self.graph.replay()
        else:
            self._first(len(made))
        copy_all(made, self.results[: len(made)])

    def _first(self, leaving: int) -> None:
        """The first replay of this kind: by torch, to see whether random numbers are drawn."""
        generator = torch.cuda.default_generators[self.index]
        before = generator.get_offset()
        self.graph.replay()
        build, results = AROUND.get("cuda"), self.results[:leaving]
        self.around[leaving] = None  # also if building raises: torch's replay works
        drawn = generator.get_offset() != before
        # A lazily conjugated value has the bytes of another one; only complex ones come so.
        if build is None or drawn or any(r.is_complex() for r in self.reads):
            return
        if all(map(_copied_by_bytes, results)):
            with torch.cuda.device(self.device):
                raw = self.graph.raw_cuda_graph()
                self.around[leaving] = build(raw, self.device, self.reads, results)


_address = torch.Tensor.data_ptr


def _copied_by_bytes(result: torch.Tensor) -> bool:
    """Whether its bytes, copied 16 at a time to the room for it, are the result."""
    if result.data_ptr() % 16 or result.is_conj() or result.is_neg():
        return False
    return torch.empty_like(room_for(result), device="meta").stride() == result.stride()


def copy_all(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy all of them, in one launch where torch has one; none onto itself."""
    pairs = [(a, b) for a, b in zip(into, values, strict=True) if a is not b]
    if len(pairs) == 1:
        pairs[0][0].copy_(pairs[0][1])
    elif pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


class _Turn:
    """The replays of one device, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.index = device, device.index
        self.lock = threading.Lock()
        self.handle: int | None = None
        self.last: Any = None

    def __enter__(self) -> None:
        self.lock.acquire()
        try:
            handle = torch._C._cuda_getCurrentRawStream(self.index)
            if handle != self.handle:
                now = torch.cuda.current_stream(self.device)
                if self.last is not None:
                    now.wait_stream(self.last)
                self.last, self.handle = now, handle
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self.lock.release()


ENGINES: dict[str, Engine] = {"cuda": CudaEngine()}
"""By device type; a device without one runs eagerly."""
