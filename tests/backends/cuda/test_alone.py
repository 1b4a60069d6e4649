"""Kernels that no node asks for, by the device text on the host."""

from __future__ import annotations

from typing import Any

import pytest

from te_ops.backends.cuda import launch
from tests.backends.cuda import emulator
from tests.backends.cuda.cases import SHAPES, drawer
from tests.backends.cuda.cases_alone import Multiplied, alone_cases


@pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")
@pytest.mark.parametrize(
    "case", [c for c in alone_cases() if not isinstance(c, Multiplied)], ids=lambda c: c.name
)
def test_what_it_writes(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "build", emulator.build)
    for seed, shape in enumerate(SHAPES):
        assert case.check(drawer(seed, "cpu"), shape, "sm_90") == [], shape
