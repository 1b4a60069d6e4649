"""Compiled kernels by spec: in memory, in a folder made ahead of time, on disk, or compiled while the program runs.

A kernel is asked for when a plan is made, and what was refused once begins to be used only at a step boundary:
`te.step()`, `te.warmup()`, the step of any torch optimizer, or, in a program that only infers, its next call. In a
process group of several ranks that is `te.step()` alone, where they agree; before its first call there, and while a
CUDA graph is prepared, a plan waits for its kernels instead.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_ops import config
from te_ops.backends.cutlass import cache, ranks, selftest, versions
from te_ops.backends.cutlass.family import FAMILIES, Spec
from te_ops.backends.cutlass.pool import Compile, Pool, scratch, workers
from te_ops.backends.cutlass.selftest import SelfTest
from te_ops.context import RECORDING
from te_ops.errors import Error, PlanError
from te_ops.registry import REGISTRY

MODES = ("async", "sync", "off")
BATCH = 30.0  # seconds that a kernel waits for others that are being compiled: a boundary with news costs new plans
Run = Callable[..., Any]
"""What `gemm.load` returns."""


def mode() -> str:
    """`TE_OPS_JIT`: compile in the background ("async", the default), wait for it ("sync"), or never ("off").

    Raises:
        Error: it is something else.
    """
    return config.choice("JIT", "async", MODES)


def missing() -> str | None:
    """None if kernels can be compiled or loaded here, else why not."""
    return None if COLLECTING.get() is not None else versions.missing()


def capturing() -> bool:
    """Whether a CUDA graph is being captured: nothing is compiled or loaded meanwhile."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Status(Enum):
    """What there is of a kernel in this process."""

    QUEUED = "is being compiled in the background; it is used from a later step on"
    READY = "is compiled, and used from the next step boundary on (te.step)"
    USED = ""
    FAILED = "is not used"


@dataclass(eq=False)
class Entry:
    """One kernel that a plan has asked for."""

    spec: Spec
    arch: str
    device: torch.device
    status: Status = Status.QUEUED
    why: str = ""  # it failed
    future: Future[Path] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)
    run: Run | None = None

    @property
    def reason(self) -> str | None:
        """None if plans may use it."""
        if self.status is Status.USED:
            return None
        return f"the fused kernel {self.status.value}" + (f": {self.why}" if self.why else "")

    @property
    def open(self) -> bool:
        """Whether it may still come to be used."""
        return self.status in (Status.QUEUED, Status.READY)

    def fail(self, why: str, *, warn: bool = False) -> None:
        """It will not be used in this process."""
        self.status, self.why = Status.FAILED, why
        if warn:
            warnings.warn(
                f"te_ops runs separate kernels where one for {self.arch} was meant: {why}",
                RuntimeWarning,
                stacklevel=3,
            )


class Kernels:
    """All kernels of this process. Threads may share it."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Entry] = {}
        self.trained = False  # a plan with gradients has asked: a call is no step boundary then
        self.marked = False  # te.step() was called in a process group
        self._pools: dict[str, Pool] = {}
        self._tests: dict[tuple[str, str], SelfTest] = {}
        self._group = ranks.Group()
        self._lock = threading.RLock()
        self._asked = threading.local()
        self._scratch: Path | None = None

    # -- when a plan is made

    def refuse(self, spec: Spec, arch: str, device: torch.device) -> str | None:
        """See `refuse` below."""
        _watch_optimizers()
        with self._lock:
            self.trained = self.trained or torch.is_grad_enabled()
            entry = self.entries.get((spec.key, arch))
            if entry is None:
                if capturing():
                    return "the fused kernel was not asked for before this CUDA graph is captured"
                entry = self._first(spec, arch, device)
            if entry.open:
                self._asked.__dict__.setdefault("entries", []).append(entry)
                self._arm(entry)
            return entry.reason

    def run(self, spec: Spec, arch: str) -> Run:
        """See `kernel` below."""
        entry = self.entries.get((spec.key, arch))
        if entry is None or entry.run is None:
            why = "no plan asked for it" if entry is None else entry.reason
            name = FAMILIES[spec.family].name
            raise PlanError(f"{name} for {arch} cannot be bound: {why}")
        return entry.run

    def _first(self, spec: Spec, arch: str, device: torch.device) -> Entry:
        """A kernel that is asked for the first time: taken at once if it exists already."""
        entry = self.entries[spec.key, arch] = Entry(spec, arch, device)
        try:
            path = cache.find(spec, arch)
            if path is None and mode() == "off":
                entry.fail("it is not compiled, and TE_OPS_JIT is off")
                return entry
            entry.future = self._object(spec, arch, path)
        except (Error, OSError) as error:  # a folder that is not safe, a setting that is wrong
            entry.fail(str(error), warn=True)
            return entry
        entry.future.add_done_callback(lambda _: self._arm(entry))
        if path is not None:
            self._take([entry])
        return entry

    def _object(self, spec: Spec, arch: str, path: Path | None = None) -> Future[Path]:
        """The object of a spec: `path`, else compiled in the background."""
        if path is not None:
            made: Future[Path] = Future()
            made.set_result(path)
            return made
        pool = self._pools.get(arch)
        if pool is None or pool.pid != os.getpid():
            pool = self._pools[arch] = Pool(arch, workers())
        folder = cache.cache_folder()
        if folder is None or not os.access(folder, os.W_OK):  # off, or for reading only
            folder = self._own_folder()

        def job(compile_to: Compile) -> Path:
            made = cache.make(spec, arch, folder, compile_to)
            prepare()
            return made

        return pool.submit(job)

    def _own_folder(self) -> Path:
        """Where kernels go without a cache: it leaves with the process."""
        if self._scratch is None:
            self._scratch, _ = scratch(self)
        return self._scratch

    # -- waiting

    def settle(self) -> bool:
        """Wait for what the last plan of this thread asked for, where plans wait; whether it gets some of it now."""
        asked = {id(e): e for e in self._asked.__dict__.pop("entries", ())}
        if not asked or capturing() or not self._waits():
            return False
        return self.wait(list(asked.values())) > 0

    def _waits(self) -> bool:
        if mode() == "sync" or RECORDING.get():
            return True
        return not ranks.alone() and not self.marked

    def wait(self, entries: Sequence[Entry]) -> int:
        """Let these be compiled, which each may take `pool.LONGEST`; how many begin to be used."""
        for entry in entries:
            if entry.open:
                concurrent.futures.wait([entry.future, *self._objects(entry)])
        with self._lock:
            return self._take(entries)

    # -- step boundaries

    def unused(self) -> list[Entry]:
        """What plans asked for and do not use."""
        return [e for e in list(self.entries.values()) if e.status is not Status.USED]

    def boundary(self, together: bool = False) -> int:
        """Begin to use what is compiled; how many kernels that are. `together`: all ranks are at this place."""
        if capturing():
            return 0
        if not ranks.alone():
            return self._agreed() if together else 0
        if RECORDING.get():  # a warm-up
            return self.wait(self.unused())
        with self._lock:
            waiting = [e for e in self.entries.values() if e.open]
            ready = [e for e in waiting if e.future.done()]
            late = any(time.monotonic() - e.since > BATCH for e in ready)
            return self._take(ready) if late or len(ready) == len(waiting) else 0

    def _agreed(self) -> int:
        """What every rank has that has asked for it."""
        self.marked = True
        if not self._group.due():
            return 0
        with self._lock:
            open_ = {
                cache.key_of(e.spec, e.arch): e
                for e in self.entries.values()
                if e.status is not Status.USED
            }
            votes = {key: self._vote(e) for key, e in open_.items()}
        said = self._group.decide(votes)
        with self._lock:
            for key, vote in said.items():
                if vote.failed and open_[key].open:
                    open_[key].fail(vote.failed)
            return self._take([open_[key] for key, vote in said.items() if vote.ready])

    def _vote(self, entry: Entry) -> ranks.Vote:
        ready = self._loaded(entry)
        return ranks.Vote(ready, entry.why if entry.status is Status.FAILED else "")

    def _arm(self, entry: Entry) -> None:
        """In a program that only infers, a call is a boundary: have the next one look."""
        waiting = REGISTRY.waiting.get(entry.device.type, [])
        if not self.trained and self._at_call not in waiting:
            REGISTRY.when(entry.device.type, self._at_call)

    def _at_call(self) -> None:
        still = not (self.trained or torch.is_grad_enabled() or RECORDING.get())
        if still and ranks.alone() and self.boundary():
            REGISTRY.version += 1

    # -- from an object to a kernel in use

    def _take(self, entries: Sequence[Entry]) -> int:
        """Begin to use those that are loaded; how many that are."""
        ready = [entry for entry in entries if entry.open and self._loaded(entry)]
        for entry in ready:
            entry.status = Status.USED
        return len(ready)

    def _loaded(self, entry: Entry) -> bool:
        """Whether a kernel is compiled, tested and loaded; it is loaded here, once its object is there."""
        if not entry.open or not entry.future.done():
            return False
        if entry.run is not None:
            return True
        try:
            with _on(entry.device):
                entry.run = self._load(entry, entry.future.result())
        except Exception as error:  # noqa: BLE001  (compilers and loaders raise anything; others run instead)
            entry.fail(str(error) or type(error).__name__, warn=True)
        return entry.run is not None

    def _load(self, entry: Entry, path: Path) -> Run | None:
        """None while the kernels of the self-test are being compiled."""
        entry.status = Status.READY
        if FAMILIES[entry.spec.family].tested:
            test = self._test(entry)
            if not test.known(compiler().load):
                return None
            if test.failed:
                raise PlanError(test.failed)
        made: Run = compiler(entry.spec.family).load(path, entry.spec)
        return made

    def _objects(self, entry: Entry) -> list[Future[Path]]:
        """What the self-test of a kernel still needs."""
        return self._test(entry).objects() if FAMILIES[entry.spec.family].tested else []

    def _test(self, entry: Entry) -> SelfTest:
        """The self-test of the entry's device, begun if need be."""
        with self._lock:
            place = (entry.arch, selftest.device_name(entry.device))
            if place not in self._tests:
                self._tests[place] = SelfTest(entry.arch, entry.device, self._tested)
            return self._tests[place]

    def _tested(self, spec: Spec, arch: str) -> Future[Path]:
        """The object of a kernel of the self-test."""
        path = cache.find(spec, arch)
        if path is None and mode() == "off":
            raise PlanError("the kernels of the self-test are not compiled, and TE_OPS_JIT is off")
        made = self._object(spec, arch, path)
        made.add_done_callback(lambda _: self._arm_all())
        return made

    def _arm_all(self) -> None:
        for entry in list(self.entries.values()):
            if entry.status is Status.READY:
                self._arm(entry)


def _on(device: torch.device) -> Any:
    """Within, the device is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def compiler(family: str = "gemm") -> Any:
    """The module that compiles and loads; it imports the vendors' libraries when it does."""
    return FAMILIES[family].module()


def prepare() -> None:
    """Import what loading a kernel needs: seconds, which nobody waits for in the thread of a compilation."""
    with contextlib.suppress(Exception):  # loading says what is wrong
        importlib.import_module("cutlass.cute")


KERNELS = Kernels()
"""Of this process."""


@functools.cache
def _watch_optimizers() -> None:
    """The step of an optimizer is a step boundary of a single process."""

    def stepped(*_: Any) -> None:
        if ready := KERNELS.boundary():
            REGISTRY.version += ready

    register_optimizer_step_post_hook(stepped)


# -- what plans use

COLLECTING: ContextVar[list[tuple[Spec, str]] | None] = ContextVar("te_ops_specs", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[tuple[Spec, str]]]:
    """Within, plans get every kernel that they ask for, and nothing is compiled: it gives (spec, arch) of each.

    Such plans cannot run. They are made anew, and forgotten behind.
    """
    found: list[tuple[Spec, str]] = []
    token = COLLECTING.set(found)
    try:
        with REGISTRY.temporary():
            yield found
    finally:
        COLLECTING.reset(token)


def refuse(spec: Spec, arch: str, device: torch.device) -> str | None:
    """None if `kernel` has this kernel now, else why not; one that is not there yet is compiled in the background.

    Args:
        spec: the kernel.
        arch: "sm_90" and the like.
        device: where it is to run.
    """
    noted = COLLECTING.get()
    if noted is not None:
        noted.append((spec, arch))
        return None
    if device.type != "cuda" or not torch.cuda.is_available():
        return "fused kernels run on a CUDA device only"
    return missing() or KERNELS.refuse(spec, arch, device)


def kernel(spec: Spec, arch: str, device: torch.device) -> Run:
    """The kernel of a spec that was not refused, as `gemm.load` gives it; several calls give the same one.

    Raises:
        PlanError: it is not there.
    """
    if COLLECTING.get() is not None:
        return _cannot_run
    return KERNELS.run(spec, arch)


def _cannot_run(*_: Any, **__: Any) -> Any:
    raise PlanError(
        "this plan was made to see its kernels (`collecting`) and cannot run; plan again"
    )


def wait(specs: Sequence[Spec], arch: str, device: torch.device) -> dict[Spec, str | None]:
    """Have several kernels compiled at once, in any mode but "off", and wait; None or why it is not there, by spec."""
    for spec in specs:
        refuse(spec, arch, device)
    entries = [e for s in specs if (e := KERNELS.entries.get((s.key, arch))) is not None]
    KERNELS.wait(entries)
    return {spec: refuse(spec, arch, device) for spec in specs}


def pending() -> list[Entry]:
    """Kernels of this process that plans asked for and do not use."""
    return KERNELS.unused()
