"""A compiler that only writes a file, and a program for workers that uses one: what is tested is all around it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from te_ops.backends.cutlass.spec import Epilogue, GemmSpec

PLAIN = GemmSpec("bf16", "bf16", Epilogue(store="bf16"))
OTHER = GemmSpec("e4m3", "e4m3", Epilogue(store="bf16"), scaled=True)

_SERVE = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from te_ops.backends.cutlass.worker import serve

def compile_to(spec, arch, path):
    {body}
    path.write_text(f"{{spec.key}} {{arch}} {{os.environ['CUTE_DSL_ARCH']}} {{os.environ['QUACK_ARCH']}}")

own = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
serve(sys.stdin, own, SimpleNamespace(compile_to=compile_to))
"""


def command(body: str = "pass") -> tuple[str, ...]:
    """A worker whose compiler first does this."""
    return (sys.executable, "-c", _SERVE.format(body=body))


class Compiler:
    """`gemm`, without its libraries: it counts what it makes, and waits for `go` if it has been told to."""

    def __init__(self) -> None:
        self.made: list[GemmSpec] = []
        self.loaded: list[GemmSpec] = []
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def compile_to(self, spec: GemmSpec, path: Path) -> None:
        """As a worker does it."""
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        self.made.append(spec)
        path.write_text(spec.key)

    def load(self, path: Path, spec: GemmSpec) -> Callable[..., Any]:
        """As `gemm.load`."""
        assert path.read_text() == spec.key
        self.loaded.append(spec)
        return lambda *_, **__: spec.key


class Pool:
    """`pool.Pool` with one thread a job, and the compiler in this process."""

    def __init__(self, compiler: Compiler, pid: int) -> None:
        self.compiler, self.pid = compiler, pid
        self.threads: list[threading.Thread] = []

    def submit(self, job: Callable[[Any], Path]) -> Future[Path]:
        """Start the job."""
        made: Future[Path] = Future()

        def run() -> None:
            try:
                made.set_result(job(self.compiler.compile_to))
            except Exception as error:  # noqa: BLE001
                made.set_exception(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        return made

    def join(self) -> None:
        """Wait for all jobs."""
        for thread in self.threads:
            thread.join(20)
