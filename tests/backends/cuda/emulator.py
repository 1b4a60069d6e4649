"""Runs the device text on the host: g++ with a header that turns every GPU thread into a fiber.

The launches of the backend run unchanged on CPU tensors, so index arithmetic, tails, reductions,
byte layouts and argument packing are tested where there is no GPU. FP8 goes through the software
conversion.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import torch

from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda import launch

HOST = Path(__file__).parent / "host"
FOLDER = Path(tempfile.gettempdir()) / "te_ops-host-kernels"
TANH = 'asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));'


@functools.cache
def compiler_path() -> str | None:
    return shutil.which("g++")


@functools.cache
def shared_library(name: str, text: str) -> ctypes.CDLL:
    """The text compiled for the host, with a function that runs a grid of it."""
    run = (
        f'extern "C" void te_host_run(long long grid, int threads, const Parameters* p) {{\n'
        f"  te::run_blocks(grid, threads, [&] {{ {launch.KERNEL}_{name}(*p); }});\n}}\n"
    )
    source = "#include <te_ops/machine.cuh>\n" + text.replace(TANH, "y = tanhf(x);") + run
    root = compiler.source_root()
    key = hashlib.blake2b(
        (source + compiler.source_hash() + (HOST / "te_ops/machine.cuh").read_text()).encode(),
        digest_size=16,
    ).hexdigest()
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    library = FOLDER / f"{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            file, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            file.write_text(source)
            command = [
                "g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w",
                "-ffp-contract=off", "-fno-strict-aliasing",
                f"-I{HOST}", f"-I{root / 'include'}", f"-I{root}", str(file), "-o", str(made),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[:4000]
            made.replace(library)
    return ctypes.CDLL(str(library))


def build(
    name: str, text: str, arch: str, threads: int, slots: int, *, shared: int = 0
) -> launch.Function:
    """In place of `launch.build`."""
    run = shared_library(name, text).te_host_run
    run.argtypes = [ctypes.c_longlong, ctypes.c_int, ctypes.c_void_p]

    def function(device: torch.device, grid: int, *values: int) -> None:
        assert grid > 0
        assert len(values) == slots
        packed = struct.pack(f"={slots}q", *values)
        run(grid, threads, ctypes.c_char_p(packed))

    return function


def zero_word(x: torch.Tensor) -> None:
    """In place of `launch.zero_word`."""
    x.view(-1).view(torch.uint8)[:4] = 0
