"""Settings from the environment."""

from __future__ import annotations

import os

import pytest

from te_ops import config
from te_ops.errors import Error


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
