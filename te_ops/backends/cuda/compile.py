"""NVRTC: device text to machine code, cached in memory and on disk.

Nothing here imports `cuda` before the first compilation. The disk cache is private to the user, its
key covers the text, every file of csrc, the architecture, the options, and the versions of NVRTC
and the driver.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from te_ops.errors import PlanError
from te_ops.runtime.disk import locked, own_folder, put

OPTIONS = ("--std=c++17", "--fmad=true", "-default-device", "--diag-suppress=177")
_DIGEST = 32


@functools.cache
def source_root() -> Path:
    """The folder of the device code: `_csrc` in a wheel, `csrc` beside the package in a checkout.

    Raises:
        PlanError: neither is there.
    """
    package = Path(__file__).resolve().parents[2]
    candidates = (package / "_csrc", package.parent / "csrc")
    for folder in candidates:
        if (folder / "include" / "te_ops").is_dir() and (folder / "kernels").is_dir():
            return folder
    listed = " or ".join(map(str, candidates))
    raise PlanError(
        f"the CUDA sources of te_ops are missing: expected in {listed}; reinstall te_ops"
    )


@functools.cache
def source_hash() -> str:
    """A digest of every file of the device code."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    root = source_root()
    for path in sorted(root.rglob("*.cuh")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def missing() -> str | None:
    """None if device text can be compiled here, else the reason."""
    try:
        source_root()
        nvrtc_version()
    except PlanError as error:
        return str(error)
    except ImportError as error:
        return f"not available: {error.name or error} is missing; pip install 'te_ops[cuda]'"
    except Exception as error:  # noqa: BLE001  (a vendor's loader may raise anything)
        return f"not available: NVRTC does not load ({error}); pip install nvidia-cuda-nvrtc"
    return None


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the compiler's library."""
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise PlanError(f"not available: NVRTC gives no version ({error})")
    return int(major), int(minor)


@functools.cache
def driver_version() -> int:
    """Version of the CUDA driver, 0 without one."""
    from cuda.bindings import driver

    try:
        error, version = driver.cuDriverGetVersion()
    except RuntimeError:  # no driver library
        return 0
    return int(version) if error == driver.CUresult.CUDA_SUCCESS else 0


def target(arch: str) -> str:
    """The compiler's name of an architecture: "sm_90a" for "sm_90", whose code only runs there."""
    number = int(arch.removeprefix("sm_").rstrip("af"))
    return f"sm_{number}a" if number >= 90 else f"sm_{number}"


def cubin(text: str, arch: str) -> bytes:
    """Machine code of `text` for `arch` ("sm_90"), from memory, disk or the compiler. Thread-safe.

    Raises:
        PlanError: the compiler refuses the text (its log is in the message), or a CUDA graph is
            being captured.
    """
    key = cache_key(text, arch)
    with _CELLS_LOCK:
        cell = _CELLS.setdefault(key, _Cell())
    if cell.code is None:
        with cell.lock:
            if cell.code is None:
                refuse_capture()
                cell.code = _from_disk(key, text, arch)
    return cell.code


def cache_key(text: str, arch: str) -> str:
    """What identifies a compilation."""
    parts = (
        text,
        source_hash(),
        target(arch),
        repr(OPTIONS),
        repr(nvrtc_version()),
        str(driver_version()),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=20).hexdigest()


def refuse_capture() -> None:
    """Raise while a CUDA graph is being captured: compiling and loading are no part of a graph."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise PlanError(
            "a kernel would have to be compiled while a CUDA graph is being captured; run the "
            "module once with these shapes before the capture"
        )


@dataclass
class _Cell:
    lock: threading.Lock = field(default_factory=threading.Lock)
    code: bytes | None = None


_CELLS: dict[str, _Cell] = {}
_CELLS_LOCK = threading.Lock()


def forget() -> None:
    """Empty the cache in memory; for tests."""
    with _CELLS_LOCK:
        _CELLS.clear()


# -- disk


def cache_folder() -> Path | None:
    """The user's own folder for kernels, made if need be; None if `TE_OPS_CUDA_CACHE` is "off".

    Raises:
        PlanError: the folder belongs to somebody else or others may write to it.
    """
    return own_folder("CUDA_CACHE", "cuda")


def _from_disk(key: str, text: str, arch: str) -> bytes:
    folder = cache_folder()
    if folder is None:
        return compile_text(text, arch).code
    path = folder / f"{key}.cubin"
    found = _read(path)
    if found is not None:
        return found
    with locked(folder / f"{key[:2]}.lock"):
        found = _read(path)  # another process may have made it meanwhile
        if found is None:
            found = compile_text(text, arch).code
            put(path, hashlib.blake2b(found, digest_size=_DIGEST).digest() + found)
    return found


def _read(path: Path) -> bytes | None:
    """The code in a file, None if there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, code = data[:_DIGEST], data[_DIGEST:]
    return code if hashlib.blake2b(code, digest_size=_DIGEST).digest() == digest else None


# -- NVRTC


@dataclass(frozen=True)
class Compiled:
    """Machine code, and what the compiler said."""

    code: bytes
    log: str


def compile_text(text: str, arch: str, *, options: tuple[str, ...] = ()) -> Compiled:
    """Compile without any cache.

    Raises:
        PlanError: the compiler refuses the text; the message ends with its log.
    """
    from cuda.bindings import nvrtc

    root = source_root()
    given = (
        *OPTIONS,
        f"--gpu-architecture={target(arch)}",
        f"-I{root / 'include'}",
        f"-I{root}",
        *options,
    )
    encoded = [option.encode() for option in given]
    program = _call(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), b"te_ops.cu", 0, [], []))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _text(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        message = log.decode(errors="replace").rstrip("\0\n")
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise PlanError(
                f"NVRTC {nvrtc_version()} refuses a kernel for {target(arch)}:\n{message}"
            )
        code = _text(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return Compiled(code, message)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(nvrtc: Any, size_of: Any, get: Any, program: Any) -> bytes:
    buffer: bytes = b"\0" * _call(nvrtc, size_of(program))
    _call(nvrtc, get(program, buffer))
    return buffer


def _call(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise PlanError(f"NVRTC fails: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
    return result[1] if len(result) > 1 else None
