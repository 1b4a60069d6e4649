"""The smallest run that still trains: for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from te_ops.cli.train.settings import Settings, completed

VALUES: dict[str, Any] = {
    "device": "cpu",
    "steps": 6,
    "layers": 1,
    "dim": 32,
    "heads": 2,
    "ffn": 32,
    "context": 16,
    "batch": 2,
    "warmup": 2,
    "threads": 1,
}


def write_text(folder: Path) -> str:
    """A text with some structure; returns its path."""
    path = folder / "text.txt"
    path.write_text("".join(f"line {i % 13} of {i * i % 17}\n" for i in range(400)))
    return str(path)


def settings(folder: Path, **changed: Any) -> Settings:
    """Settings of a small run on that text."""
    return completed({**VALUES, "text": write_text(folder), **changed})


def arguments(folder: Path, *more: str) -> list[str]:
    """The same as a command line."""
    made = ["train", "--text", write_text(folder)]
    for name, value in VALUES.items():
        made += [f"--{name}", str(value)]
    return [*made, *more]
