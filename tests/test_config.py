"""Settings from the environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from te_ops import config
from te_ops.errors import Error

ROOT = Path(__file__).parents[1]


def test_every_variable_is_known_and_in_the_guide() -> None:
    read = re.compile(
        r"\b(?:flag|text|number|choice|own_folder)\(\s*\"([A-Z_]+)\"|\"TE_OPS_([A-Z_]+)\""
    )
    code = "\n".join(path.read_text() for path in (ROOT / "te_ops").rglob("*.py"))
    assert {name for pair in read.findall(code) for name in pair if name} == set(config.KNOWN)
    guide = "\n".join(path.read_text() for path in (ROOT / "docs" / "guide").glob("*.md"))
    assert not [
        name
        for name in config.KNOWN
        if f"TE_OPS_{name}`" not in guide and f"TE_OPS_{name}=" not in guide
    ]


def test_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TE_OPS_X", raising=False)
    assert config.choice("X", "a", ("a", "b")) == "a"
    monkeypatch.setenv("TE_OPS_X", " B ")
    assert config.choice("X", "a", ("a", "b")) == "b"
    monkeypatch.setenv("TE_OPS_X", "c")
    with pytest.raises(Error, match="TE_OPS_X is one of a, b, got 'c'"):
        config.choice("X", "a", ("a", "b"))


def test_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_OPS_X", "")
    assert config.number("X", 3) == 3
    monkeypatch.setenv("TE_OPS_X", "12")
    assert config.number("X", 3, least=12) == 12
    for wrong in ("11", "-1", "1.5", "many"):
        monkeypatch.setenv("TE_OPS_X", wrong)
        with pytest.raises(Error, match="TE_OPS_X is a whole number from 12 on"):
            config.number("X", 3, least=12)


def test_environment_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_OPS_X", "1")
    found = config.environment(TE_OPS_Y="2")
    assert (found["TE_OPS_X"], found["TE_OPS_Y"]) == ("1", "2")
    assert "TE_OPS_Y" not in os.environ
