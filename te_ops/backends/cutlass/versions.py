"""Which packages compile kernels here, in which versions, and which versions are not used.

Nothing here imports them: what is installed is read from the metadata of the packages.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

DSL, QUACK, FFI = "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi"
PACKAGES = (DSL, QUACK, FFI)
"""What a compiled kernel depends on; their versions are in its key."""
MODULES = {"cutlass": DSL, "quack": QUACK, "tvm_ffi": FFI, "triton": "triton"}
"""Modules that have to be there, and who brings them (quack's tuner, which is not used, imports triton)."""
INSTALL = "pip install 'te_ops[cuda]'"


@dataclass(frozen=True)
class Denied:
    """Versions of a package that are not used: from `first` on, before `end` ("": no end)."""

    package: str
    first: str
    end: str
    reason: str


DENIED: tuple[Denied, ...] = (
    Denied(
        DSL, "4.5.0", "4.5.2",
        "with its CUDA 13 libraries it drops predicated copies, or never ends (NVIDIA/cutlass#3241)",
    ),
    Denied(DSL, "0", "4.7", "quack 0.6 needs 4.7 or later, and 4.3 compiles only beside a driver"),
    Denied(DSL, "4.7", "4.8", "workers see no device, and only 4.8 is known to compile without"),
    Denied(QUACK, "0", "0.6.5", "its epilogue composer has another interface before 0.6.5"),
    Denied(QUACK, "0.7", "", "its interface is not stable between minor versions; 0.6 is known"),
    Denied(FFI, "0", "0.1.6", "quack needs 0.1.6 or later"),
)  # fmt: skip
"""The first row that holds is the reason given."""


@functools.cache
def installed(package: str) -> str | None:
    """The version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Of every package that takes part: "" for one that is missing."""
    return {package: installed(package) or "" for package in packages}


@functools.cache
def missing() -> str | None:
    """None if kernels can be compiled and loaded here, else what is missing or why it is not used."""
    for module, package in MODULES.items():
        if not _found(module):
            return f"not available: {package} is missing; {INSTALL}"
    for package in PACKAGES:
        version = installed(package)
        if version is None:
            return (
                f"not available: {package} has no metadata, so its version is not known; {INSTALL}"
            )
        reason = denied(package, version)
        if reason is not None:
            return f"not available: {reason}"
    return None


def _found(module: str) -> bool:
    """Whether a module can be imported; one that a program has put in its place cannot."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # something blocks it, or an empty module stands for it
        return False


def denied(package: str, version: str) -> str | None:
    """None if a version of a package is used, else why not and what to do."""
    at = _numbers(version)
    for row in DENIED:
        inside = _numbers(row.first) <= at and not (row.end and at >= _numbers(row.end))
        if row.package == package and inside:
            return f"{package} {version} is not used: {row.reason}; {INSTALL} brings another"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release part of a version, without zeros at its end: 4.8.1.dev3 and 4.8.1 are the same here."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(n) for n in found.group().split(".")] if found else [0]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def target(arch: str) -> str:
    """The compiler's name of an architecture: "sm_90a" for "sm_90", whose code only runs there."""
    number = int(arch.removeprefix("sm_").rstrip("af"))
    return f"sm_{number}a" if number >= 90 else f"sm_{number}"


def environment(arch: str) -> dict[str, str]:
    """What a process that compiles for `arch` is started with: both libraries read it when they load."""
    name = target(arch)
    return {
        "CUTE_DSL_ARCH": name,
        "QUACK_ARCH": name.removeprefix("sm_").rstrip("a"),
        "CUDA_VISIBLE_DEVICES": "",
    }


def package_folder() -> Path:
    """The folder that `te_ops` lies in."""
    return Path(__file__).resolve().parents[3]
