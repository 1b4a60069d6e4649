from __future__ import annotations

import json
from pathlib import Path

import pytest

from te_ops.cli import main
from te_ops.cli.blocks import BLOCKS
from te_ops.cli.explain import FORMATS

SMALL = ["--dim", "16", "--heads", "2", "--ffn", "32", "--context", "8", "--batch", "2"]
MINE = """
import torch, te_ops as te

def build():
    return te.Sequential(te.Linear(4, 8), te.GELU()), torch.ones(3, 4)

def broken():
    return te.Linear(4, 8)

def foreign():
    return torch.nn.Linear(4, 8), torch.ones(3, 4)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_model.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("block", BLOCKS)
def test_text_of_every_block(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", block, "--recipe", "mxfp8", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "quantize(mxfp8" in shown
    assert "gemm" in shown


@pytest.mark.parametrize("form", FORMATS)
def test_formats_go_to_a_file(form: str, tmp_path: Path) -> None:
    out = tmp_path / "made" / f"plan.{form}"
    assert main(["explain", "norm_linear", "--format", form, "--out", str(out), *SMALL]) == 0
    text = out.read_text()
    start = {"text": "", "json": "{", "mermaid": "flowchart", "html": "<!doctype html>"}[form]
    assert text.lower().startswith(start)
    assert "rmsnorm" in text


def test_json_is_the_plan_and_follows_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for more in ([], ["--no-grad"], ["--dtype", "bfloat16"]):
        assert main(["explain", "linear", "--format", "json", *SMALL, *more]) == 0
        plans.append(capsys.readouterr().out)
    assert all(json.loads(plan) for plan in plans)
    assert len(set(plans)) == 3


def test_the_head_of_the_language_model_stays_dense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "lm", "--recipe", "current", "--layers", "1", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "quantize(" in line and "at head" in line]
    assert [line for line in lines if "quantize(" in line and "fc1" in line]


def test_a_model_of_your_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "my_model:build"]) == 0
    assert "gelu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_model:missing"], "has no attribute 'missing'"),
        (["no_such_module:build"], "No module named"),
        (["my_model:broken"], r"must return (model, inputs)"),
        (["my_model:foreign"], "not a te_ops op"),
        (["my_model:build", "--dim", "8"], "has its own sizes; dim would change nothing"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err
