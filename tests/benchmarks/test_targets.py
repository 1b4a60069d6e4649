"""Targets: figures from results, verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.suite import attention, data, fused, targets


def arm(ms: float, **more: Any) -> dict[str, Any]:
    return {"time": {"ms": ms, "p10": ms, "p90": ms, "rounds": 20}, **more}


def results() -> dict[str, Any]:
    grown = {"growth": {"bytes_grown": 0, "kernels_grown": 1}}
    return {
        "pipelines": {
            "mlp": {
                "arms": {
                    "te_ops/delayed": arm(7.6, memory={"peak": 90}),
                    "te-module/delayed": arm(8.1, memory={"peak": 100}),
                    "te-ops/delayed": arm(8.0, memory={"peak": 80}),
                    "te_ops/block": {"failed": "x"},
                    "compile/none": arm(13.0),
                }
            },
            "small": {"arms": {"te_ops/delayed": arm(0.4, host_us=340.0, **grown)}},
        },
        "streams": {
            "norm-16384x4096": {"recipe": "none", "of_copy": 0.89,
                                "us": {"te_ops": 70.0, "copy": 62.3, "te": 80.0, "compile": 69.0}},
            "quantize-nvfp4": {"recipe": "nvfp4", "of_copy": 0.5, "us": {"te_ops": 1.0, "copy": 2.0}},
        },
    }  # fmt: skip


def verdicts() -> dict[str, dict[str, Any]]:
    return {v["target"]: v for v in targets.judge(results())}


@pytest.mark.parametrize(
    ("name", "figure", "verdict"),
    [
        ("mlp, delayed: of the best of Transformer Engine", 7.6 / 8.0, "ok"),
        ("mlp, block: of the best of Transformer Engine", None, "not measured"),
        ("mlp, delayed: of torch.compile in BF16", 7.6 / 13.0, "missed"),
        ("mlp, delayed: peak memory of Transformer Engine's", 90 / 80, "missed"),
        ("small, delayed: time to issue a step", 0.34, "ok"),
        ("small, delayed: bytes grown over 1,000 steps", 0, "ok"),
        ("small, delayed: kernels grown over 1,000 steps", 1, "missed"),
        ("norm-16384x4096: rate of a copy's", 0.89, "missed"),
        ("norm-16384x4096: time of the best of Transformer Engine and torch.compile", 70 / 69,
         "missed"),
        ("quantize-nvfp4: rate of a copy's", 0.5, "ok"),
    ],
)  # fmt: skip
def test_figure_and_verdict(name: str, figure: float | None, verdict: str) -> None:
    found = verdicts()[name]
    assert found["verdict"] == verdict
    assert found["figure"] == (None if figure is None else pytest.approx(figure))


def test_targets_name_cases_that_exist() -> None:
    names = [t.split(":")[0].split(",")[0] for t in verdicts()]
    known = {x.name for x in (*data.CASES, *data.STREAMS, *fused.CASES, *attention.CASES)}
    assert set(names) <= known
    assert len(set(verdicts())) == len(targets.judge(results()))


def test_measured_only() -> None:
    found = targets.judge(results(), measured_only=True)
    assert found
    assert all(v["figure"] is not None for v in found)
    assert targets.judge({}, measured_only=True) == []
