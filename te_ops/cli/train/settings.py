"""What a training run is: one table of options, their defaults by device, and the recorded run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from te_ops.cli.arms import NAMES, SABOTAGED, Arm, arm
from te_ops.cli.blocks import ModelSizes
from te_ops.cli.devices import device_named
from te_ops.cli.models import DTYPES
from te_ops.errors import Error

FILE = "run.json"


class Option(NamedTuple):
    """A setting: its type, default on the CPU and on a GPU, and help."""

    kind: type
    cpu: Any
    gpu: Any
    help: str


OPTIONS: dict[str, Option] = {
    "steps": Option(int, 400, 250, "training steps of each recipe"),
    "seconds": Option(float, 0.0, 0.0, "choose the steps so that all training takes this long"),
    "seed": Option(int, 0, 0, "of weights and batches"),
    "layers": Option(int, 2, 8, "Transformer layers"),
    "dim": Option(int, 96, 512, "features of the residual stream"),
    "heads": Option(int, 4, 8, "attention heads"),
    "ffn": Option(int, 256, 1408, "features inside the SwiGLU MLP"),
    "context": Option(int, 128, 512, "bytes of text a sequence"),
    "batch": Option(int, 8, 16, "sequences a step"),
    "dtype": Option(str, "float32", "bfloat16", "torch.autocast dtype of all recipes but fp32"),
    "lr": Option(float, 3e-3, 1e-3, "peak learning rate"),
    "weight_decay": Option(float, 0.1, 0.1, "of matrices"),
    "warmup": Option(int, 20, 50, "steps of linear warm-up, then cosine to a tenth"),
    "clip": Option(float, 1.0, 1.0, "gradient norm limit"),
    "threads": Option(int, 2, 2, "torch threads"),
    "checkpoint_every": Option(int, 0, 0, "steps between checkpoints; 0 for none"),
    "text": Option(str, "", "", "a file (default: the Python standard library's sources)"),
}
RECIPES = ("fp32", "delayed", "mxfp8")


@dataclass(frozen=True)
class Settings:
    """One run. Everything that decides its numbers is here, so that it can be resumed.

    Raises:
        Error: a value is out of range or unknown.
    """

    device: str
    recipes: tuple[str, ...]
    untied: bool
    steps: int
    seconds: float
    seed: int
    layers: int
    dim: int
    heads: int
    ffn: int
    context: int
    batch: int
    dtype: str
    lr: float
    weight_decay: float
    warmup: int
    clip: float
    threads: int
    checkpoint_every: int
    text: str

    def __post_init__(self) -> None:
        for name in ("steps", "threads"):
            if getattr(self, name) < 1:
                raise Error(f"--{name} must be at least 1, got {getattr(self, name)}")
        for name in ("seconds", "lr", "weight_decay", "warmup", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise Error(f"--{name.replace('_', '-')} must be at least 0")
        if not self.clip > 0:
            raise Error(f"--clip must be positive, got {self.clip}")
        if self.dtype not in DTYPES:
            raise Error(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        self.arms  # noqa: B018  (names and sizes are checked now, not after minutes)
        self.sizes  # noqa: B018

    @property
    def arms(self) -> tuple[Arm, ...]:
        """What is compared, fp32 first; the head is not quantized."""
        return tuple(arm(name, DTYPES[self.dtype]).sparing("head") for name in self.recipes)

    @property
    def sizes(self) -> ModelSizes:
        """Of the model; symbols are bytes."""
        s = self
        return ModelSizes(s.layers, s.dim, s.heads, s.ffn, s.context, s.batch)


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """One argument per setting; those not given are None."""
    what = parser.add_argument_group("recipes")
    what.add_argument(
        "--recipes",
        help=f"names with commas (default {','.join(RECIPES)}; fp32 is always there): "
        f"{', '.join(NAMES)}",
    )
    what.add_argument("--all-recipes", action="store_true", default=None)
    what.add_argument(
        "--sabotage",
        action="store_true",
        default=None,
        help="compare with a recipe whose scale is wrong: the checks must fail",
    )
    group = parser.add_argument_group("model and training")
    group.add_argument("--device", help="cpu, cuda or cuda:1 (default: cuda if there is one)")
    group.add_argument("--untied", action="store_true", default=None, help="a head of its own")
    for name, option in OPTIONS.items():
        default = f"{option.cpu}" + (f"; {option.gpu} on a GPU" if option.gpu != option.cpu else "")
        note = (
            option.help if option.kind is str and not option.cpu else f"{option.help} ({default})"
        )
        group.add_argument(f"--{name.replace('_', '-')}", type=option.kind, help=note)


def from_options(options: argparse.Namespace, recorded: Settings | None) -> Settings:
    """The settings of a new run, or the recorded ones after a check that no option contradicts.

    Raises:
        Error: an option differs from the run that is resumed.
    """
    given = {k: v for k in OPTIONS if (v := getattr(options, k)) is not None}
    if options.device is not None:
        given["device"] = options.device
    if options.untied is not None:
        given["untied"] = True
    recipes = _recipes(options)
    if recipes is not None:
        given["recipes"] = recipes
    if recorded is None:
        return completed(given)
    for name, value in given.items():
        if getattr(recorded, name) != value:
            raise Error(
                f"--resume continues the run as it was started: {name} is "
                f"{getattr(recorded, name)!r} there, {value!r} here"
            )
    return recorded


def _recipes(options: argparse.Namespace) -> tuple[str, ...] | None:
    asked = [options.recipes is not None, bool(options.all_recipes), bool(options.sabotage)]
    if sum(asked) > 1:
        raise Error("--recipes, --all-recipes and --sabotage exclude each other")
    if options.sabotage:
        return ("fp32", SABOTAGED)
    if options.all_recipes:
        return NAMES
    if options.recipes is None:
        return None
    names = [name.strip() for name in options.recipes.split(",") if name.strip()]
    return tuple(dict.fromkeys(("fp32", *names)))


def completed(given: dict[str, Any]) -> Settings:
    """Settings with the device's defaults for what is not given."""
    device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device_named(device).type == "cuda"
    defaults = {name: o.gpu if on_gpu else o.cpu for name, o in OPTIONS.items()}
    if "threads" not in given:
        defaults["threads"] = min(defaults["threads"], os.cpu_count() or 1)
    made = {"recipes": RECIPES, "untied": False, **defaults, **given, "device": device}
    return Settings(**made)


def save(settings: Settings, out: Path) -> None:
    """Record the settings, for `load`."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(settings), indent=2)
    (out / FILE).write_text(text + "\n", encoding="utf-8")


def load(out: Path) -> Settings:
    """The settings of the run in a folder.

    Raises:
        Error: there is none.
    """
    try:
        values = json.loads((out / FILE).read_text(encoding="utf-8"))
        return Settings(**{**values, "recipes": tuple(values["recipes"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Error(f"--resume {out}: no run can be read from {out / FILE} ({error})") from error
