"""The only module that reads environment variables."""

from __future__ import annotations

import os

from te_ops.errors import Error

KNOWN = (
    "AOT_DIR",
    "BLOCK_GEMM",
    "CHECK_FROZEN",
    "CUDA_CACHE",
    "CUDNN_WHOLE",
    "CUTLASS",
    "CUTLASS_CACHE",
    "JIT",
    "JIT_WORKERS",
    "PLAN_CACHE",
    "TUNE_CACHE",
)
"""Every `TE_OPS_<name>` that is read; the guide has them all."""


def flag(name: str, default: bool) -> bool:
    """`TE_OPS_<name>` as a switch: 0, false, off and no are False."""
    value = os.environ.get(f"TE_OPS_{name}")
    return (
        default if value is None else value.strip().lower() not in ("", "0", "false", "off", "no")
    )


def text(name: str, default: str) -> str:
    """`TE_OPS_<name>` as text."""
    return os.environ.get(f"TE_OPS_{name}", default)


def number(name: str, default: int, *, least: int = 0) -> int:
    """`TE_OPS_<name>` as a whole number.

    Raises:
        Error: it is none, or smaller than `least`.
    """
    value = os.environ.get(f"TE_OPS_{name}", "").strip()
    if not value:
        return default
    if not value.isdecimal() or int(value) < least:
        raise Error(f"TE_OPS_{name} is a whole number from {least} on, got {value!r}")
    return int(value)


def choice(name: str, default: str, among: tuple[str, ...]) -> str:
    """`TE_OPS_<name>` as one of some words.

    Raises:
        Error: it is another word.
    """
    value = os.environ.get(f"TE_OPS_{name}", "").strip().lower() or default
    if value not in among:
        raise Error(f"TE_OPS_{name} is one of {', '.join(among)}, got {value!r}")
    return value


def environment(**changes: str) -> dict[str, str]:
    """All variables with these changes, for a process that is to be started."""
    return {**os.environ, **changes}


def variables() -> dict[str, str]:
    """Every TE_OPS_ variable that is set, for `te-ops info`."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("TE_OPS_")}


def unknown() -> list[str]:
    """Variables that are set and that nothing reads: spelled wrong, or of another version."""
    return [name for name in variables() if name.removeprefix("TE_OPS_") not in KNOWN]
