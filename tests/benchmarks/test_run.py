"""Whole runs on a CPU: partial results, failures, budgets; the tables made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suite import machine, peers, report, run

CPU = torch.device("cpu")


def settings(*cases: str, **more: Any) -> run.Settings:
    given = {"peers": ("te_ops", "torch", "te-module"), "rounds": 2, "budget": 60.0, **more}
    return run.Settings(cases, CPU, **given)


def quiet(_: str) -> None:
    pass


def test_names_keep_the_order_given() -> None:
    found = run.expand(["small", "norm_quantize-delayed", "mlp", "small"])
    assert [x.name for x in found] == ["small", "norm_quantize-delayed", "mlp"]
    assert len(run.expand(["hopper", "mlp"])) == len(run.expand(["hopper"]))
    with pytest.raises(KeyError, match="nothing"):
        run.expand(["nothing"])


def test_a_run_and_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "made" / "results.json"
    found = run.run(
        settings("small", "quantize-current", json=path, recipes=("none", "current")), quiet
    )
    assert json.loads(path.read_text()) == json.loads(json.dumps(found))
    assert list(tmp_path.rglob("*.part")) == []
    assert found["version"] == run.VERSION
    assert found["providers"]["te_ops"] == "here"
    assert found["providers"]["te-module"].startswith("absent")
    arms = found["pipelines"]["small"]["arms"]
    assert set(arms) == {"te_ops/none", "te_ops/current", "torch/none"}
    for entry in arms.values():
        assert entry["time"]["rounds"] == 2
        assert entry["time"]["p10"] <= entry["time"]["ms"] <= entry["time"]["p90"]
        assert max(entry["errors"].values()) <= entry["tolerance"]
    assert found["ceilings"]["copy"] > 0
    text, pages = report.text(found), report.markdown(found)
    for shown in (text, pages):
        assert "te_ops/current" in shown
        assert "quantize-current" in shown
        assert "te-module absent" in shown
        assert "missed" not in shown  # targets are a GPU's
    assert report.markdown(found, ["memory-bound"]).count("te_ops/current") == 0
    assert report.plot(found, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("<svg") == 1


def test_a_failing_provider_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: peers.Data, recipe: str) -> peers.Arm:
        raise ValueError("no such luck")

    def wrong(data: peers.Data, recipe: str) -> peers.Arm:
        arm = peers.PROVIDERS[0].build(data, recipe)
        inner = arm.call
        arm.call = lambda x: 2 * inner(x)
        return arm

    table = (*peers.PROVIDERS, peers.Provider("broken", broken), peers.Provider("wrong", wrong))
    monkeypatch.setattr(peers, "PROVIDERS", table)
    said: list[str] = []
    found = run.run(
        settings("linear", peers=("te_ops", "broken", "wrong"), recipes=("none",)), said.append
    )
    arms = found["pipelines"]["linear"]["arms"]
    assert arms["broken/none"] == {"failed": "ValueError: no such luck"}
    assert "results are wrong" in arms["wrong/none"]["failed"]
    assert "time" not in arms["wrong/none"]  # what is wrong is never timed
    assert "time" in arms["te_ops/none"]
    assert any("no such luck" in line for line in said)
    assert "failed" in report.text(found)


def test_a_failing_case_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    original = run._stream

    def failing(current: run.Run, stream: Any) -> Any:
        if stream.name == "quantize-delayed":
            raise RuntimeError("it broke")
        return original(current, stream)

    monkeypatch.setattr(run, "_stream", failing)
    found = run.run(settings("quantize-delayed", "quantize-current"), quiet)["streams"]
    assert found["quantize-delayed"]["failed"].startswith("RuntimeError: it broke")
    assert found["quantize-current"]["of_copy"] > 0


def test_out_of_time_is_said() -> None:
    found = run.run(replace(settings("linear", "small"), budget=1e-9), quiet)
    assert {e["failed"] for e in found["pipelines"].values()} == {"out of time"}
    assert "out of time" in report.text(found)


def test_burst_rests_and_takes_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(run.time, "sleep", rests.append)
    run.run(settings("linear", recipes=("none",), regime="burst"), quiet)
    assert len(rests) == 6  # two arms and a plain product, two rounds


def test_description_names_what_is_absent() -> None:
    found = machine.describe(CPU)
    assert found["torch"] == torch.__version__
    assert found["transformer_engine"] == "absent"
    assert "nvidia-smi" in machine._smi("clocks.sm") or machine._smi("clocks.sm")


def test_the_watch_gives_medians_since_a_moment() -> None:
    watch = machine.Watch()
    assert watch.since(0) is None
    watch.seen += [(1980.0, 100.0, 30.0), (1500.0, 600.0, 50.0), (1400.0, 650.0, 60.0)]
    assert watch.since(1) == {"sm_mhz": 1450.0, "watt": 625.0, "celsius": 55.0}
