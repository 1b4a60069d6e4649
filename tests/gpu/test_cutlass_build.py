"""Compiled GEMMs on a device: the self-test, kernels made elsewhere, and when they begin to be used."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import te_ops as te
from te_ops.backends.cutlass import cache, choices, gemm, runtime, selftest, versions
from te_ops.backends.cutlass.spec import GemmSpec
from te_ops.registry import REGISTRY
from te_ops.runtime.cache import arch_of

pytestmark = [
    pytest.mark.skipif(versions.missing() is not None, reason=str(versions.missing())),
    pytest.mark.timeout(300),
]

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def hopper() -> str:
    arch = arch_of(DEVICE)
    if arch != "sm_90":
        pytest.skip(f"fused GEMMs run on sm_90, this is {arch}")
    return arch


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[runtime.Kernels]:
    """A process that has asked for no kernel yet, with the user's cache."""
    monkeypatch.setenv("TE_OPS_AOT_DIR", "off")
    monkeypatch.delenv("TE_OPS_JIT", raising=False)
    made = runtime.Kernels()
    monkeypatch.setattr(runtime, "KERNELS", made)
    REGISTRY.version += 1
    yield made
    REGISTRY.version += 1


def fused(model: te.Op, x: torch.Tensor) -> int:
    """How many steps of the plan are fused GEMMs."""
    segments = model.plan(x).to_dict()["segments"]
    names = [
        s["kernel"] for part in segments for phase in ("forward", "backward") for s in part[phase]
    ]
    return sum(name.startswith("cutlass.") for name in names)


def mlp() -> tuple[te.Sequential, torch.Tensor]:
    model = te.Sequential(te.Linear(256, 512), te.GELU(), te.Linear(512, 256))
    x = torch.randn(256, 256, device=DEVICE, dtype=torch.bfloat16)
    return model.to(DEVICE, torch.bfloat16), x


@pytest.mark.parametrize("spec", [pytest.param(s, id=n) for n, s in selftest.KINDS.items()])
def test_what_the_self_test_runs(spec: GemmSpec, process: runtime.Kernels) -> None:
    assert runtime.wait([spec], "sm_90", DEVICE) == {spec: None}
    assert selftest.check(spec, runtime.kernel(spec, "sm_90", DEVICE), DEVICE) is None


def test_kernels_of_a_folder_run_without_a_compiler(
    process: runtime.Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = selftest.specs()
    runtime.wait(specs, "sm_90", DEVICE)
    ahead = tmp_path / "ahead"
    ahead.mkdir(mode=0o755)
    for spec in specs:
        path = cache.find(spec, "sm_90")
        assert path is not None
        for file in (path, path.with_suffix(".json")):
            shutil.copy(file, ahead)
    monkeypatch.setenv("TE_OPS_AOT_DIR", str(ahead))
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", "off")
    monkeypatch.setenv("TE_OPS_JIT", "off")
    other = runtime.Kernels()
    assert [other.refuse(spec, "sm_90", DEVICE) for spec in specs] == [None] * len(specs)
    for spec in specs:
        assert selftest.check(spec, other.run(spec, "sm_90"), DEVICE) is None


def test_training_switches_after_an_optimizer_step(
    process: runtime.Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", str(tmp_path))
    model, x = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    results = []
    with choices.forced("prefer"):
        deadline = time.monotonic() + 200
        while not (used := fused(model, x)) or runtime.pending():
            assert time.monotonic() < deadline, [e.reason for e in runtime.pending()]
            before = model.plan(x)
            y = model(x)
            y.float().square().mean().backward()
            assert model.plan(x) is before, "within a step nothing changes"
            optimizer.step()
            results.append(y)
            time.sleep(0.1)
        assert used
        assert len(results) > 1, "the first step does not wait"
        difference = (model(x).float() - results[0].float()).norm()
        assert difference <= 0.01 * results[0].float().norm()


def test_a_captured_graph_has_them(process: runtime.Kernels) -> None:
    model, x = mlp()
    with choices.forced("prefer"):
        graphed = te.make_graphed(model, x)
        assert graphed.captured == 1
        y = graphed(x)
        assert fused(model, x)
        assert torch.equal(y, model(x))


def test_nothing_is_loaded_during_capture(process: runtime.Kernels) -> None:
    spec = selftest.KINDS["BF16"]
    counter = torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        reason = runtime.refuse(spec, "sm_90", DEVICE)
    assert reason is not None
    assert "captured" in reason
    assert process.entries == {}


def test_host_cost_of_a_call(process: runtime.Kernels) -> None:
    """12 us are wanted; the limit leaves room for a slow host."""
    spec = selftest.KINDS["BF16"]
    runtime.wait([spec], "sm_90", DEVICE)
    path = cache.find(spec, "sm_90")
    assert path is not None
    run = gemm.load(path, spec)
    a = torch.zeros(128, 64, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty(128, 128, device=DEVICE, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            run(a, a, y=y)
        best = min(best, (time.perf_counter() - began) / 50)
    assert best < 40e-6
