"""Attention kernels come by the way of fused GEMMs: compiled beside, used from a boundary on, by their own compiler."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from te_ops.backends import flash
from te_ops.backends.cutlass import cache, runtime
from te_ops.backends.flash import versions
from te_ops.backends.flash.spec import FlashSpec
from te_ops.registry import REGISTRY
from tests.backends.cutlass.fake import Compiler, Pool
from tests.backends.flash.test_gates import case

ARCH, CPU = "sm_90", torch.device("cpu")
SPEC = FlashSpec(False, "bf16", 64, 64)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Of attention only: nothing of GEMMs may be asked for."""
    folder = tmp_path / "cutlass"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", str(folder))
    monkeypatch.setenv("TE_OPS_AOT_DIR", "off")
    monkeypatch.delenv("TE_OPS_JIT", raising=False)
    made = Compiler()
    monkeypatch.setattr(runtime, "compiler", {"flash": made}.__getitem__)
    monkeypatch.setattr(runtime, "prepare", lambda: None)
    monkeypatch.setattr(runtime, "Pool", lambda arch, most: Pool(made, os.getpid()))
    monkeypatch.setattr(runtime, "KERNELS", runtime.Kernels())
    monkeypatch.setattr(REGISTRY, "waiting", {})
    return made


def test_a_kernel_is_used_from_a_boundary_on(compiler: Compiler) -> None:
    kernels = runtime.KERNELS
    assert "is being compiled in the background" in str(kernels.refuse(SPEC, ARCH, CPU))
    kernels.entries[SPEC.key, ARCH].future.result(20)
    assert kernels.refuse(SPEC, ARCH, CPU) is not None
    assert kernels.boundary() == 1
    assert kernels.refuse(SPEC, ARCH, CPU) is None
    assert kernels.run(SPEC, ARCH)() == SPEC.key
    assert compiler.made == compiler.loaded == [SPEC]
    found = cache.find(SPEC, ARCH)
    assert found is not None
    assert '"family": "flash"' in found.with_suffix(".json").read_text()


def test_one_that_does_not_load_is_told(compiler: Compiler) -> None:
    kernels = runtime.KERNELS
    kernels.refuse(SPEC, ARCH, CPU)
    entry = kernels.entries[SPEC.key, ARCH]
    entry.future.result(20).write_text("damaged")
    with pytest.warns(RuntimeWarning, match="te_ops runs separate kernels"):
        kernels.boundary()
    assert "is not used" in str(kernels.refuse(SPEC, ARCH, CPU))
    with pytest.raises(runtime.PlanError, match="an attention for sm_90 cannot be bound"):
        kernels.run(SPEC, ARCH)


def test_a_call_is_refused_until_its_kernel_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "missing", lambda: None)
    asked: list[Any] = []

    def refuse(spec: FlashSpec, *_: Any) -> str | None:
        asked.append(spec)
        return "not yet" if len(asked) == 1 else None

    monkeypatch.setattr(runtime, "refuse", refuse)
    monkeypatch.setattr(runtime, "kernel", lambda *_: lambda *_: None)
    first, last = (k for k in flash.KERNELS if k.runs == "attention")
    call = case(s=(1024, 1024), d=(128, 128))
    assert first.priority > last.priority
    assert first.reason(call) == "not yet"
    assert first.reason(call) is None
    assert asked[0] == asked[1]
    assert first.bind(call) is not None
    assert last.reason(call) is None
    slower = case(s=(1024, 1024), d=(80, 80))
    assert "were not timed" in str(first.reason(slower))
    assert last.reason(slower) is None


def test_without_its_packages_a_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.versions, "missing", lambda: None)
    monkeypatch.setattr(versions.versions, "installed", lambda _: None)
    for kernel in flash.KERNELS:
        assert "pip install 'te_ops[flash]'" in str(kernel.available())
