from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import te_ops
from te_ops.cli import bench, main


def test_list_names_cases_presets_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    for name in ("mlp", "norm_quantize-delayed", "hopper", "nvfp4", "te-module", "quack"):
        assert name in shown
    assert "  gated_backward_quantize-delayed  SwiGLU backward" in shown  # the longest name


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "results.json", tmp_path / "plot.png"
    command = ["bench", "linear", "--device", "cpu", "--peers", "torch", "--rounds", "2",
               "--recipe", "none", "--recipe", "block", "--json", str(path), "--plot", str(plot)]  # fmt: skip
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "te_ops/block" in shown
    assert "torch/none" in shown
    assert json.loads(path.read_text())["settings"]["recipes"] == ["none", "block"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "name cases or a preset"),
        (["nothing"], "'nothing' is no case and no preset"),
        (["mlp", "--recipe", "fp7"], "--recipe fp7: choose from none, delayed"),
        (["mlp", "--peers", "torch,unknown"], "--peers unknown: choose from"),
        (["mlp", "--budget", "0"], "--budget must be positive, got 0"),
        (["mlp", "--rounds", "-1"], "--rounds must be positive"),
        (["mlp", "--device", "abacus"], "--device abacus"),
        (["mlp", "--json", "."], "--json . is a folder; name a file"),
        (["mlp", "--json", f"{__file__}/f.json"], "--json"),
        (["mlp", "--plot", "times.txt"], "--plot times.txt: the name ends in .png or .svg"),
    ],
)
def test_mistakes(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_case_that_fails_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("it broke")

    monkeypatch.setattr(bench.suite("run"), "_pipeline", failing)
    assert main(["bench", "linear", "--device", "cpu", "--rounds", "2"]) == 1


def test_without_the_suite_the_error_says_where_it_should_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(te_ops, "__file__", str(tmp_path / "site" / "te_ops" / "__init__.py"))
    assert main(["bench", "--list"]) == 2
    shown = capsys.readouterr().err
    assert "the benchmark is missing" in shown
    assert "_benchmarks" in shown


def test_a_wheel_has_the_suite_inside_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "te_ops"
    package.mkdir()
    source = Path(te_ops.__file__).parents[1] / "benchmarks" / "suite"
    (package / "_benchmarks").symlink_to(source, target_is_directory=True)
    for name in [n for n in sys.modules if n.startswith(bench.NAME)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(te_ops, "__file__", str(package / "__init__.py"))
    found = bench.suite("data")
    assert str(package) in found.__file__
    assert found.CASES
    for name in [n for n in sys.modules if n.startswith(bench.NAME)]:
        del sys.modules[name]
