"""The command from end to end, on a model of a few thousand parameters."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from te_ops.cli import main
from te_ops.cli.train import report
from te_ops.cli.train.text import read
from te_ops.cli.train.trainer import Trainer
from tests.cli.train.small import arguments, settings


def _results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def test_a_run_compares_checks_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(arguments(tmp_path, "--out", str(out), "--recipes", "delayed,mxfp8")) == 0
    shown = capsys.readouterr().out
    assert "mxfp8" in shown
    assert "0 failed" in shown
    results = _results(out)
    assert list(results["runs"]) == ["fp32", "delayed", "mxfp8"]
    assert results["ok"]
    run = results["runs"]["mxfp8"]
    assert len(run["losses"]) == 6
    assert run["gap"] == run["validation_loss"] - results["runs"]["fp32"]["validation_loss"]
    assert 0.5 < run["saved_of_fp32"] < 1.1
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "checkpoints").exists()


def test_every_recipe_passes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ("--all-recipes", "--out", str(out), "--steps", "3")
    assert main([*arguments(tmp_path), *more]) == 0, _results(out)["checks"]
    assert len(_results(out)["runs"]) == 7


def test_sabotage_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(arguments(tmp_path, "--sabotage", "--out", str(out))) == 1
    assert "FAILED" in capsys.readouterr().out
    failed = {c["what"] for c in _results(out)["checks"] if not c["ok"]}
    assert failed >= {"SQNR input", "SQNR weight", "SQNR grad_output", "grad cosine"}


def test_stop_and_resume_give_the_uninterrupted_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recipes = ("--recipes", "delayed")
    assert main(arguments(tmp_path, *recipes, "--out", str(whole))) == 0
    assert main(arguments(tmp_path, *recipes, "--out", str(parts), "--stop", "3")) == 0
    assert f"--resume {parts}" in capsys.readouterr().out.replace("\n", "")
    assert not (parts / "results.json").exists()
    assert main(arguments(tmp_path, *recipes, "--out", str(parts))) == 2
    assert "has checkpoints of another run" in capsys.readouterr().err
    torch.manual_seed(5)
    assert main(["train", "--resume", str(parts)]) == 0
    for name in ("fp32", "delayed"):
        one, other = (_results(out)["runs"][name] for out in (whole, parts))
        for key in ("losses", "validation", "operands", "gradient_cosine"):
            assert one[key] == other[key]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--resume", "missing"], "no run can be read"),
        (["--resume", "a", "--out", "b"], "leave --out away"),
        (["--stop", "0"], "--stop must be at least 1"),
        (["--text", "missing.txt"], "No such file"),
    ],
)
def test_mistakes(
    more: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--threads", "1", *more]) == 2
    assert message in capsys.readouterr().err


def _watched(folder: Path, *, terminal: bool) -> str:
    s = settings(folder, recipes=("fp32",))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=100)
    trainer = Trainer(s, s.arms[0], read(s.text, s.context + 1))
    with report.Watch(console) as watch:
        trainer.run(6, None, watch)
    return shown.getvalue()


def test_progress_is_bars_on_a_terminal_and_lines_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "6/6" in _watched(tmp_path, terminal=True)
    quiet = _watched(tmp_path, terminal=False)
    assert quiet.startswith("fp32       step 6/6 loss ")
    assert quiet.count("\n") == 1
    monkeypatch.setattr(report, "EVERY", 0.0)
    assert _watched(tmp_path, terminal=False).count("\n") == 6


def test_without_matplotlib_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(arguments(tmp_path, "--recipes", "fp32", "--out", str(tmp_path / "out"))) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "out" / "loss.png").exists()


def test_without_safetensors_there_are_no_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert main(arguments(tmp_path, "--recipes", "fp32", "--out", str(tmp_path / "out"))) == 0
    assert "no models: safetensors is not installed" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.safetensors"))


def test_seconds_choose_the_steps(tmp_path: Path) -> None:
    more = ("--recipes", "fp32", "--seconds", "0.3", "--out", str(tmp_path / "out"))
    assert main(arguments(tmp_path, *more)) == 0
    assert _results(tmp_path / "out")["settings"]["steps"] >= 10
