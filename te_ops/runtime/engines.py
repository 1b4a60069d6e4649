"""Engines: how a device type records the body of a graph and replays it."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from te_ops.runtime.bundle import BUNDLERS

Body = Callable[[], list[torch.Tensor]]
"""What is captured: it returns the tensors that a replay fills again."""


class Engine(Protocol):
    """How a device type records bodies and replays them."""

    def pool(self, device: torch.device) -> Any:
        """Memory that recordings which never wait for each other may share."""

    def apart(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Where rehearsals run: apart from the caller's stream, ordered after what it holds and before what follows."""

    def record(
        self, body: Body, pool: Any, device: torch.device
    ) -> tuple[list[torch.Tensor], Callable[[], Any]]:
        """Record the body; its results, and what fills them again on the current stream."""

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
        self, body: Body, pool: Any, device: torch.device
    ) -> tuple[list[torch.Tensor], Callable[[], Any]]:
        """See `Engine`."""
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.stream(self._stream(device, "record")):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                results = body()
            except BaseException:
                self._abort(graph, pool)
                raise
            graph.capture_end()
        return results, _Replay(graph, device)

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
        return torch.cuda.is_current_stream_capturing()

    def turn(self, device: torch.device) -> _Turn:
        """See `Engine`."""
        found = self.turns.get(device)
        if found is None:
            found = self.turns.setdefault(device, _Turn(device))
        return found


class _Replay:
    """Launches a recorded graph on the current stream.

    torch's own way moves the state of random numbers on, for graphs that draw some. Whether one does shows at its
    first launch; what does not is launched by the driver alone from then on, for a third of the host's time.
    """

    def __init__(self, graph: Any, device: torch.device) -> None:
        self.graph, self.device, self.index = graph, device, device.index
        self.launch: Any = None
        self.first = True

    def __call__(self) -> None:
        index = self.index
        if self.launch is not None and torch._C._cuda_getDevice() == index:
            self.launch(torch._C._cuda_getCurrentRawStream(index))
        elif self.first:
            generator = torch.cuda.default_generators[index]
            before = generator.get_offset()
            self.graph.replay()
            self.first, bundler = False, BUNDLERS.get("cuda")
            if generator.get_offset() == before and bundler is not None:
                self.launch = bundler.launcher(self.graph.raw_cuda_graph_exec())
        else:
            self.graph.replay()


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
