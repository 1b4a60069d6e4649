"""The only module that reads environment variables."""

from __future__ import annotations

import os


def flag(name: str, default: bool) -> bool:
    """`TE_OPS_<name>` as a switch: 0, false, off and no are False."""
    value = os.environ.get(f"TE_OPS_{name}")
    return (
        default if value is None else value.strip().lower() not in ("", "0", "false", "off", "no")
    )


def text(name: str, default: str) -> str:
    """`TE_OPS_<name>` as text."""
    return os.environ.get(f"TE_OPS_{name}", default)


def variables() -> dict[str, str]:
    """Every TE_OPS_ variable that is set, for `te-ops info`."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("TE_OPS_")}
