"""Runs the device text on the host: g++ with a header that turns every GPU thread into a fiber.

The launches of the backend run unchanged on CPU tensors, so index arithmetic, tails, reductions,
byte layouts and argument packing are tested where there is no GPU. FP8 goes through the software
conversion.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda import launch
from te_ops.runtime.tape import Prepared, recorder

HOST = Path(__file__).parent / "host"
FOLDER = Path(tempfile.gettempdir()) / "te_ops-host-kernels"
# A kernel's shared memory is its own, though another's has the same name.
FLAGS = ("-ffp-contract=off", "-fno-strict-aliasing", "-fno-gnu-unique")
TANH = 'asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));'


@functools.cache
def compiler_path() -> str | None:
    return shutil.which("g++")


@functools.cache
def shared_library(name: str, text: str) -> ctypes.CDLL:
    """The text compiled for the host, with a function that runs a grid of it."""
    runtime()
    found = re.search(r"__cluster_dims__\((\d+)", text)
    cluster = found[1] if found else "1"
    run = (
        f"static void te_body(const void* p) {{ {launch.KERNEL}_{name}(*(const Parameters*)p); }}\n"
        'extern "C" void te_host_run(long long grid, int threads, int shared, const void* p) {\n'
        f"  te::run_blocks(grid, threads, shared, {cluster}, te_body, p);\n}}\n"
    )
    return loaded("#include <te_ops/machine.cuh>\n" + text.replace(TANH, "y = tanhf(x);") + run)


@functools.cache
def runtime() -> ctypes.CDLL:
    """What runs the fibers of all kernels, whose libraries find it by its names."""
    return loaded((HOST / "machine.cpp").read_text(), mode=ctypes.RTLD_GLOBAL)


def loaded(source: str, *, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """A library of this text, compiled where it has not been. Its calls hold the GIL: the fibers' state is one."""
    root = compiler.source_root()
    key = hashlib.blake2b(
        (source + compiler.source_hash() + header() + " ".join(FLAGS)).encode(), digest_size=16
    ).hexdigest()
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    library = FOLDER / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            file, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            file.write_text(source)
            command = [
                "g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w",
                *FLAGS,
                f"-I{HOST}", f"-I{root / 'include'}", f"-I{root}", str(file), "-o", str(made),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[:4000]
            made.replace(library)
    return ctypes.PyDLL(str(library), mode=mode)


@functools.cache
def header() -> str:
    """The host's side of the device code."""
    return (HOST / "te_ops/machine.cuh").read_text()


def build(
    name: str,
    text: str,
    arch: str,
    threads: int,
    slots: int,
    *,
    shared: int = 0,
    early: bool = False,
) -> launch.Function:
    """In place of `launch.build`; every launch runs to its end here, so `early` changes nothing."""
    run = shared_library(name, text).te_host_run
    run.argtypes = [ctypes.c_longlong, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]

    return Emulated(run, threads, slots, shared)


@dataclass(eq=False)
class Emulated:
    """A kernel of the host build; it reports to the recorder as `launch.Loaded` does."""

    run: Any
    threads: int
    slots: int
    shared: int

    def __call__(self, device: torch.device, grid: int, *values: int) -> None:
        assert grid > 0
        assert len(values) == self.slots
        packed = struct.pack(f"={self.slots}q", *values)
        self.run(grid, self.threads, self.shared, ctypes.c_char_p(packed))
        if (tape := recorder()) is not None:
            tape.launched(Grid(self, grid), values)

    def blocks(self, grid: int) -> Grid:
        return Grid(self, grid)


@dataclass(frozen=True)
class Grid:
    kernel: Emulated
    blocks: int
    clears: bool = False

    def prepare(self, words: memoryview, address: int) -> Prepared:
        kernel = self.kernel
        assert len(words) == kernel.slots
        return lambda stream: kernel.run(self.blocks, kernel.threads, kernel.shared, address)


@dataclass(frozen=True)
class Clear:
    clears: bool = True

    def prepare(self, words: memoryview, address: int) -> Prepared:
        return lambda stream: ctypes.memset(words[0], 0, 4 * words[1])


class Copy:
    """words[2] bytes at words[1] go to words[0], on the host."""

    clears = False

    def prepare(self, words: memoryview, address: int) -> Any:
        """See `te_ops.runtime.tape.Issue`."""
        return lambda stream: ctypes.memmove(words[0], words[1], words[2])


def clone(x: torch.Tensor) -> torch.Tensor:
    """In place of `launch.clone`."""
    made = torch.empty(x.shape, dtype=x.dtype)
    words = (made.data_ptr(), x.data_ptr(), x.nbytes)
    ctypes.memmove(*words)
    if (tape := recorder()) is not None:
        tape.launched(Copy(), words)
    return made


def zero_word(x: torch.Tensor, count: int = 1) -> None:
    """In place of `launch.zero_word`."""
    ctypes.memset(x.data_ptr(), 0, 4 * count)
    if (tape := recorder()) is not None:
        tape.launched(Clear(), (x.data_ptr(), count))
