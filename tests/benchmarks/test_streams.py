"""Memory-bound groups: the launches of a plan, their bytes and their check."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from benchmarks.suite import data, streams
from te_ops.backends.cuda import KERNELS, launch
from te_ops.registry import REGISTRY
from te_ops.runtime import cache
from tests.backends.cuda import emulator

CPU = torch.device("cpu")


def stream(name: str) -> data.Stream:
    return next(s for s in data.STREAMS if s.name == name).smaller(256, 64)


@pytest.mark.parametrize("name", [s.name for s in data.STREAMS])
def test_every_group_is_found_in_its_plan(name: str) -> None:
    groups = streams.launches(stream(name), CPU, 2)
    assert len(groups) == 2
    assert [x.kernel for x in groups[0]] == [x.kernel for x in groups[1]]
    names = {n.prim.name for x in groups[0] for n in x.call.nodes}
    assert "gemm" not in names
    wanted = {"norm": "norm", "gelu": "pointwise", "gated": "pointwise", "weights": "quantize",
              "quantize": "quantize", "layer": "layernorm", "add": "norm"}  # fmt: skip
    key = next(k for k in wanted if name.startswith(k))
    assert any(wanted[key] in n for n in names), names


def test_bytes_count_operands_and_results_once() -> None:
    (group, _) = streams.launches(stream("norm-16384x4096"), CPU, 2)
    results = [x.run(*x.operands) for x in group]
    x, gamma, rstd = 256 * 128 * 2, 128 * 2, 256 * 4
    assert streams.moved(group, results) in (2 * x + gamma, 2 * x + gamma + rstd)
    backward = streams.launches(stream("norm_backward-16384x4096"), CPU, 2)[0]
    results = [x.run(*x.operands) for x in backward]
    # x, dy and dx once, though dx and the gradient of gamma are two launches
    assert streams.moved(backward, results) == 3 * x + 2 * gamma + rstd


def test_recording_leaves_the_registry_as_it_was() -> None:
    before = list(REGISTRY.all())
    streams.launches(stream("quantize-current"), CPU, 2)
    assert list(REGISTRY.all()) == before


def test_a_wrong_launch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    original = streams.launches

    def wrong(*args: Any) -> Any:
        groups = original(*args)
        for group in groups:
            run = group[0].run
            group[0] = dataclasses.replace(group[0], run=lambda *xs, run=run: _off(run(*xs)))
        return groups

    case = stream("norm-16384x4096")
    streams.measure(case, CPU, (), least=2, seconds=1)
    monkeypatch.setattr(streams, "launches", wrong)
    with pytest.raises(RuntimeError, match="from the reference"):
        streams.measure(case, CPU, (), least=2, seconds=1)


def _off(made: Any) -> Any:
    if isinstance(made, tuple):
        return (made[0] * 1.1, *made[1:])
    return made * 1.1


def test_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    row = streams.measure(
        stream("gated_quantize-delayed"), CPU, ("compile", "te"), least=2, seconds=1
    )
    assert set(row["us"]) == {"te_ops", "copy", "compile"}
    assert row["peers"] == {"te": "absent"}
    assert row["of_copy"] == pytest.approx(row["us"]["copy"] / row["us"]["te_ops"])
    assert row["bytes"] >= 256 * 128 * 6
    assert row["error"] <= streams.TOLERANCE


@pytest.mark.parametrize("name", [s.name for s in data.STREAMS if s.recipe in data.NATIVE])
def test_the_peer_written_for_torch_computes_the_same_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = stream(name)
    if case.group == "weights":
        with pytest.raises(streams.Unsupported):
            streams._compile(case, CPU)
        return
    made = streams._compile(case, CPU)(*streams._operands(case, CPU, 0))
    assert all(torch.isfinite(t.float()).all() for t in streams.tensors(made))


@pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("norm_quantize-delayed", "cuda.norm_quantize"), ("quantize-block", "cuda.quantize")],
)
def test_on_a_device_the_group_is_one_launch_that_moves_each_byte_once(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "build", emulator.build)
    monkeypatch.setattr(launch, "zero_word", emulator.zero_word)
    monkeypatch.setattr(cache, "arch_of", lambda device: "sm_90")
    here = [dataclasses.replace(k, available=lambda: None) for k in KERNELS]
    case = stream(name)
    with REGISTRY.without("cublas."), REGISTRY.temporary(*here):
        row = streams.measure(case, CPU, (), least=2, seconds=1)
    assert row["kernels"] == [kernel]
    assert row["operand_bytes"] == pytest.approx(case.rows * case.columns * case.traffic, rel=0.02)
