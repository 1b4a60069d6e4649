from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from te_ops.backends.cudnn import library, plans
from te_ops.runtime.tune import TABLE
from tests.backends.cudnn import builds
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


Built = tuple[list[Any], str]
"""What a process printed, a line of JSON each, and how it ended."""


@pytest.fixture
def build_plans(tmp_path: Path) -> Callable[[str], Built]:
    """Runs a module that builds real plans, in a process with the library and a driver that has no device."""
    if importlib.util.find_spec("cudnn") is None:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    libraries = _libraries()
    if not any("cudnn_graph" in path.name for path in libraries):
        pytest.skip("the cuDNN library is not installed")
    builds.stub(tmp_path, libraries)
    found = [tmp_path, *dict.fromkeys(path.parent for path in libraries), *_given(), *_packages()]

    def run(module: str) -> Built:
        done = subprocess.run(
            [sys.executable, "-m", module],
            capture_output=True,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, found))},
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line[:1] in tuple("[0123456789")]
        return [json.loads(line) for line in lines], f"{done.returncode}: {done.stderr[-800:]}"

    return run


def _given() -> list[Path]:
    return [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]


def _packages() -> list[Path]:
    """Where packages install libraries: of cuDNN, and what those load."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or []) if spec is not None else []
    return [path for root in roots for path in Path(root).glob("*/lib")]


def _libraries() -> list[Path]:
    """Those of cuDNN and of the CUDA runtime, as packages install them or as the loader's path has them."""
    return [
        path
        for root in (*_given(), *_packages())
        for name in ("libcudnn*.so*", "libcudart.so*")
        for path in root.glob(name)
    ]
