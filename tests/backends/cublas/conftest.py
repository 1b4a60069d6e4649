from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_ops.backends.cublas import choices, lt
from te_ops.registry import REGISTRY
from te_ops.runtime.tune import TABLE
from tests.backends.cublas.fakelt import FakeLt
from tests.backends.cublas.library import Library


@pytest.fixture(autouse=True)
def no_device_kernels() -> Iterator[None]:
    """The CPU stands for a device here, and has none of the other kernels of one, which a test may have registered."""
    with REGISTRY.without("cuda.", "cutlass."):
        yield


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """torch's GEMMs replaced by ones that check what the CUDA versions check."""
    made = Library()
    for name in ("mm", "addmm", "_scaled_mm", "_scaled_mm_v2"):
        monkeypatch.setattr(torch, name, getattr(made, name))
    return made


@pytest.fixture
def lt_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeLt]:
    """cuBLASLt's bindings replaced by functions over host memory, and nothing measured."""
    made = FakeLt()
    folder = tmp_path / "tune"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TE_OPS_TUNE_CACHE", str(folder))
    monkeypatch.setattr(lt, "_import", lambda: made)
    monkeypatch.setattr(lt, "missing", lambda: None)
    monkeypatch.setattr(lt, "version", made.get_version)
    monkeypatch.setattr(lt, "entered", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(lt, "device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(lt, "device_name", lambda index: "Stand-in")
    monkeypatch.setattr(lt, "current_device", lambda: 0)
    monkeypatch.setattr(lt, "stream_of", lambda index: 7)
    monkeypatch.setattr(lt, "_DEVICES", {})
    _forget()
    yield made
    _forget()


def _forget() -> None:
    TABLE.forget()
    choices.place.cache_clear()
    choices._first.cache_clear()
