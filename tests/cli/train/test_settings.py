from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch

from te_ops.cli.arms import NAMES, SABOTAGED
from te_ops.cli.train import add_arguments
from te_ops.cli.train.settings import OPTIONS, Settings, from_options, load, save
from te_ops.errors import Error
from tests.cli.train.small import settings


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def _made(*arguments: str) -> Settings:
    return from_options(_parse("--device", "cpu", *arguments), None)


def test_the_table_of_options_and_the_settings_agree() -> None:
    fields = {f.name for f in dataclasses.fields(Settings)}
    assert fields == {"device", "recipes", "untied", *OPTIONS}


def test_defaults_and_given_values() -> None:
    made = _made("--steps", "5", "--weight-decay", "0", "--untied")
    assert (made.steps, made.weight_decay, made.untied) == (5, 0.0, True)
    assert (made.dim, made.recipes) == (OPTIONS["dim"].cpu, ("fp32", "delayed", "mxfp8"))


@pytest.mark.parametrize(
    ("arguments", "recipes"),
    [
        (["--recipes", "mxfp8, fp32,mxfp8"], ("fp32", "mxfp8")),
        (["--recipes", "fp32"], ("fp32",)),
        (["--all-recipes"], NAMES),
        (["--sabotage"], ("fp32", SABOTAGED)),
    ],
)
def test_recipes_have_fp32_first(arguments: list[str], recipes: tuple[str, ...]) -> None:
    assert _made(*arguments).recipes == recipes


def test_dtype_is_that_of_all_but_fp32() -> None:
    arms = _made("--dtype", "bfloat16").arms
    assert [a.dtype for a in arms] == [None, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--clip", "0"], "--clip must be positive"),
        (["--weight-decay", "-1"], "--weight-decay must be at least 0"),
        (["--dtype", "float8"], "--dtype must be one of float32, bfloat16"),
        (["--recipes", "fp7"], "no recipe is named 'fp7'"),
        (["--recipes", "mxfp8", "--sabotage"], "exclude each other"),
        (["--heads", "5"], "multiple of 2 x heads"),
        (["--device", "toaster"], "--device toaster"),
    ],
)
def test_mistakes(arguments: list[str], message: str) -> None:
    with pytest.raises(Error, match=message):
        _made(*arguments)


def test_a_run_is_recorded(tmp_path: Path) -> None:
    made = settings(tmp_path, recipes=("fp32", "block"), lr=0.1)
    save(made, tmp_path / "run")
    assert load(tmp_path / "run") == made


def test_a_resumed_run_keeps_its_settings(tmp_path: Path) -> None:
    recorded = settings(tmp_path)
    assert from_options(_parse(), recorded) == recorded
    assert from_options(_parse("--steps", "6"), recorded) == recorded
    with pytest.raises(Error, match="steps is 6 there, 7 here"):
        from_options(_parse("--steps", "7"), recorded)
    with pytest.raises(Error, match="recipes is"):
        from_options(_parse("--recipes", "nvfp4"), recorded)


@pytest.mark.parametrize("content", [None, "{}", "nonsense"])
def test_a_folder_without_a_run(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(Error, match="no run can be read"):
        load(tmp_path)
