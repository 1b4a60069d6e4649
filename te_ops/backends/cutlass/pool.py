"""Compiling beside the program: a few threads for an architecture, each with a worker process of its own."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, TypeAlias

from te_ops import config
from te_ops.backends.cutlass.cache import source_hash
from te_ops.backends.cutlass.family import FAMILIES, Spec
from te_ops.backends.cutlass.versions import environment, package_folder, target
from te_ops.errors import PlanError

WORKER = (sys.executable, "-P", "-m", "te_ops.backends.cutlass.worker")
"""Without the current folder on its path, where a `cutlass` of the user's may lie."""
LONGEST = 300.0  # seconds: a compilation that needs more is given up
IDLE = 60.0  # seconds: a worker that waited longer ends, and its memory with it
_TAIL = 2000  # characters of what a worker printed, in an error

Compile: TypeAlias = Callable[[Any, Path], None]
Job: TypeAlias = Callable[[Compile], Path]
"""Makes an object with the compiler that it is given."""


def workers() -> int:
    """How many processes compile at once: `TE_OPS_JIT_WORKERS`, by default half of the processors, at most four."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.number("JIT_WORKERS", min(4, max(1, here // 2)), least=1)


def scratch(owner: object) -> tuple[Path, Callable[[], Any]]:
    """A folder that goes with its owner, or when the function is called; never by the end of a forked child."""
    path = Path(tempfile.mkdtemp(prefix="te_ops-"))
    return path, weakref.finalize(owner, _remove, path, os.getpid())


def _remove(path: Path, maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(path, ignore_errors=True)


class Worker:
    """A process that compiles for one architecture; it is started by the first job."""

    def __init__(self, arch: str, command: tuple[str, ...] = WORKER) -> None:
        self.arch, self.command = target(arch), command
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None
        self._remove: Callable[[], Any] | None = None
        self._late = False

    def compile(self, spec: Spec, path: Path) -> None:
        """Compile into a file.

        Raises:
            PlanError: the compiler refuses the spec, dies, or needs longer than `LONGEST`.
        """
        process = self._started()
        job = {"family": spec.family, "spec": spec.to_dict(), "arch": self.arch, "path": str(path)}
        line = json.dumps({**job, "source": source_hash(spec.family)})
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(LONGEST, self._stop)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it is gone
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise PlanError(self._gone(process))
        error = json.loads(line)["error"]
        if error is not None:
            name = FAMILIES[spec.family].name
            raise PlanError(f"{name} does not compile for {self.arch}: {error}")

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None:
            return self._process
        folder, self._remove = scratch(self)
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=config.environment(
                **environment(self.arch),
                PYTHONPATH=_path(),
                PYTHONWARNINGS="ignore",
                QUACK_CACHE_DIR=str(folder),  # its keys do not cover our operations
            ),
        )
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._late = True
            self._process.kill()

    def _gone(self, process: subprocess.Popen[str]) -> str:
        """Why there was no answer; the next job starts another process."""
        code, tail = process.wait(), ""
        if self._log is not None and not self._log.closed:
            self._log.seek(0)
            tail = self._log.read()[-_TAIL:].strip()
        why = f"needs more than {LONGEST:.0f} s" if self._late else f"ends with {code}"
        self.close()
        return f"the process that compiles for {self.arch} {why}" + (f": {tail}" if tail else "")

    def close(self) -> None:
        """End the process and remove what it left. The next job starts another."""
        process, self._process, self._late = self._process, None, False
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        if self._log is not None:
            self._log.close()
        if self._remove is not None:
            self._remove()
        self._log = self._remove = None


def _path() -> str:
    """Where a worker finds this te_ops, also one that is not installed."""
    mine, given = package_folder(), config.environment().get("PYTHONPATH", "")
    installed = mine in {Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib")}
    return given if installed else os.pathsep.join(filter(None, (str(mine), given)))


class Pool:
    """Jobs for one architecture, done by threads that come and go."""

    def __init__(self, arch: str, most: int, command: tuple[str, ...] = WORKER) -> None:
        self.arch, self.most, self.command = arch, most, command
        self.pid = os.getpid()  # after a fork there are no threads
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Path]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open, self._threads = 0, 0  # jobs that are not done, threads that do them
        self._closed = False
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        _POOLS.add(self)

    def submit(self, job: Job) -> Future[Path]:
        """Do a job when a thread is free."""
        made: Future[Path] = Future()
        with self._lock:
            self._jobs.put((job, made))
            self._open += 1
            if self._threads < min(self.most, self._open):
                self._threads += 1
                threading.Thread(target=self._serve, name="te_ops-compile", daemon=True).start()
        return made

    def _serve(self) -> None:
        worker = Worker(self.arch, self.command)
        self._workers.add(worker)
        try:
            while (found := self._next()) is not None:
                job, made = found
                try:
                    result = job(worker.compile)
                except BaseException as error:  # noqa: BLE001  (whoever waits for it gets it)
                    self._done()
                    made.set_exception(error)
                else:
                    self._done()
                    made.set_result(result)
        finally:
            worker.close()

    def _done(self) -> None:
        with self._lock:
            self._open -= 1

    def _next(self) -> tuple[Job, Future[Path]] | None:
        """The next job; None after a while without one, and the thread is then no longer counted."""
        with contextlib.suppress(queue.Empty):
            if not self._closed:
                return self._jobs.get(timeout=IDLE)
        with self._lock:
            if self._jobs.empty() or self._closed:
                self._threads -= 1
                return None
            return self._jobs.get()  # it came just now

    def close(self) -> None:
        """End the processes and begin no other; a job that runs fails."""
        self._closed = True
        for worker in list(self._workers):
            worker.close()


_POOLS: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS):
        if pool.pid == os.getpid():
            pool.close()
