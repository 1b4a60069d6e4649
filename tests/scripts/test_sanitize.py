"""What scripts/sanitize.py says of what the tool says, with a stand-in for the tool."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from scripts import sanitize
from te_ops.backends.cuda import launch
from tests.backends.cuda.cases import SHAPES, Case, drawer
from tests.backends.cuda.every import bound, every_case, every_pair

OPTIONS = argparse.Namespace(only="", part="0/1", seconds=1.0)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, said: str, status: int = 0) -> None:
    """A tool that prints and exits."""
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: str(path))


def test_a_machine_without_the_tool_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    status, text = sanitize.watch("memcheck", OPTIONS)
    assert status == sanitize.NOT_CHECKED
    assert "not on this machine" in text


@pytest.mark.parametrize(
    ("said", "statuses", "shown"),
    [
        ("launched 7 groups\n========= ERROR SUMMARY: 0 errors", (0, 0), "clean, launched 7 groups"),
        ("launched 7 groups, out of time for 2\n========= RACECHECK SUMMARY: 0 hazards displayed",
         (0, 0), "clean, launched 7 groups, out of time for 2"),
        ("launched 7 groups\n========= ERROR SUMMARY: 3 errors", (9, 1), "3 errors"),
        ("launched 7 groups\n========= ERROR SUMMARY: 0 errors", (1, 1), "0 errors, launched 7"),
        ("========= Error: Device not supported", (1, sanitize.NOT_CHECKED), "cannot watch"),
        ("Traceback: no kernel was launched", (1, 1), "no summary, exit status 1"),
    ],
)  # fmt: skip
def test_what_the_tool_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    statuses: tuple[int, int],
    shown: str,
) -> None:
    """`statuses`: the tool's, and the script's."""
    stand_in(tmp_path, monkeypatch, said, statuses[0])
    found, text = sanitize.watch("racecheck", OPTIONS)
    assert found == statuses[1]
    assert shown in text


def test_every_case_file_is_gone_through() -> None:
    cases = list(every_case())
    names = [case.name for case in cases]
    assert any(isinstance(case, Case) for case in cases)
    for part in ("norm", "nvfp4", "pointwise_quantize", "mxfp8"):
        assert any(part in name for name in names), part
    pairs = list(every_pair())
    assert len(pairs) > 5 * len(cases)
    assert {shape for _, shape in pairs} == set(SHAPES)


def test_every_case_is_bound_at_some_odd_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "build", lambda *_, **__: lambda *_: None)
    monkeypatch.setattr(launch, "zero_word", lambda *_: None)
    left = {case.name for case in every_case()}
    for case, shape in every_pair():
        if case.name in left and bound(case, drawer(0, "cpu"), shape, "sm_90", "cpu"):
            left.discard(case.name)
    assert left == set()
