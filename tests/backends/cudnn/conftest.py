from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_ops.backends.cudnn import library, plans
from te_ops.runtime.tune import TABLE
from tests.backends.cudnn.fake import FakeCudnn


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCudnn]:
    """The frontend replaced by one that runs over host memory, on a device that is the CPU."""
    made = FakeCudnn()
    folder = tmp_path / "tune"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TE_OPS_TUNE_CACHE", str(folder))
    monkeypatch.setenv("TE_OPS_PLAN_CACHE", "off")
    monkeypatch.setattr(library, "_import", lambda: made)
    monkeypatch.setattr(library, "missing", lambda: None)
    monkeypatch.setattr(library, "version", made.backend_version)
    monkeypatch.setattr(library, "entered", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(library, "current_device", lambda: 0)
    monkeypatch.setattr(library, "stream_of", lambda index: 7)
    monkeypatch.setattr(library, "captured_here", lambda: library.capturing())
    monkeypatch.setattr(library, "_HANDLES", library._Handles())
    monkeypatch.setattr(plans, "device_name", lambda index: "Stand-in")
    monkeypatch.setattr(plans, "device_of", lambda index: torch.device("cpu"))
    monkeypatch.setattr(plans, "limit", lambda index: plans.WORKSPACE)
    _forget()
    yield made
    _forget()


def _forget() -> None:
    TABLE.forget()
    plans.forget()
    plans.place.cache_clear()
