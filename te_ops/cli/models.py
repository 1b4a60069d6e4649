"""Language models in files: safetensors with what is needed to build the model again in the header."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

import te_ops as te
from te_ops.cli.arms import Arm, arm
from te_ops.cli.blocks import ModelSizes, language_model
from te_ops.errors import Error

KEY = "te_ops.language_model"  # in the header
FOLDER = "models"  # of a run
SUFFIX = ".safetensors"
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}  # of torch.autocast, by name


class LanguageModel(NamedTuple):
    """(tokens, targets) -> loss, and the way it was trained to compute."""

    model: te.Sequential
    sizes: ModelSizes
    arm: Arm


def model_path(out: Path, name: str) -> Path:
    """Where a run's folder has the model of an arm."""
    return out / FOLDER / f"{name}{SUFFIX}"


def save_model(made: LanguageModel, path: Path) -> None:
    """Write the weights, the quantizer state, and in the header sizes, recipe and dtype.

    Raises:
        Error: safetensors is not installed.
    """
    tied = made.model["head"].weight is made.model["embedding"].weight
    dtype = next(name for name, value in DTYPES.items() if value is made.arm.dtype)
    about = {"sizes": dataclasses.asdict(made.sizes), "tied": tied}
    about |= {"recipe": made.arm.name, "dtype": dtype}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    te.save_file(made.model, unfinished, {KEY: json.dumps(about)})
    unfinished.replace(path)


def load_model(path: Path, device: torch.device) -> LanguageModel:
    """The model of a file that `save_model` wrote.

    Raises:
        Error: the file cannot be read, or another program wrote it.
    """
    about = _about(path)
    try:
        sizes = ModelSizes(**about["sizes"])
        model = language_model(sizes, tied=about["tied"])
        te.load_file(model, path)
        way = arm(about["recipe"], DTYPES[about["dtype"]]).sparing("head")
    except (KeyError, TypeError, RuntimeError) as error:  # of another version
        raise Error(f"{path} does not hold the model that its header describes: {error}") from error
    return LanguageModel(model.to(device), sizes, way)


def _about(path: Path) -> dict[str, Any]:
    try:
        library = importlib.import_module("safetensors")
    except ImportError as error:
        raise Error("safetensors is not installed: pip install safetensors") from error
    try:
        with library.safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
    except (OSError, library.SafetensorError) as error:
        raise Error(f"{path} cannot be read: {error}") from error
    if KEY not in header:
        raise Error(f"{path} is not a language model of te-ops train: its header has no {KEY}")
    made: dict[str, Any] = json.loads(header[KEY])
    return made


def find_model(path: Path, recipe: str | None) -> Path:
    """The file itself, or in the folder of a run the one of a recipe (fp32 unless named).

    Raises:
        Error: there is none, or `recipe` is named for a file, which has its own.
    """
    if path.is_dir():
        found = sorted(p.stem for p in (path / FOLDER).glob(f"*{SUFFIX}"))
        name = recipe or "fp32"
        if name not in found:
            raise Error(f"{path} has no model of {name}; it has {', '.join(found) or 'none'}")
        return model_path(path, name)
    if not path.exists():
        raise Error(f"there is no {path}")
    if recipe is not None:
        raise Error(f"{path} says itself which recipe it computes with; leave --recipe out")
    return path


__all__ = [
    "DTYPES",
    "FOLDER",
    "KEY",
    "LanguageModel",
    "find_model",
    "load_model",
    "model_path",
    "save_model",
]
