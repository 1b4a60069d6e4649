"""Which flash-attn compiles kernels here: only its metadata is read."""

from __future__ import annotations

from te_ops.backends.cutlass import versions
from te_ops.backends.cutlass.family import FLASH

KNOWN = ("4.0.0b36",)
"""Versions whose classes `kernel.py` calls as they are; each beta has changed them."""
INSTALL = "pip install 'te_ops[flash]'"


def missing() -> str | None:
    """None if attention kernels can be compiled and loaded here, else what is missing or why it is not used."""
    found = versions.missing()
    if found is not None:
        return found
    version = versions.installed(FLASH)
    if version is None:
        return f"not available: {FLASH} is missing; {INSTALL}"
    if version not in KNOWN:
        known = ", ".join(KNOWN)
        return (
            f"not available: {FLASH} {version} is not used: its classes change with each beta, and {known} is known; "
            f"{INSTALL} brings it"
        )
    return None
