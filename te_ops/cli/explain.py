"""te-ops explain: what fuses, with which kernel, what is saved, and why not."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import te_ops as te
from te_ops.cli.arms import NAMES, Arm, arm
from te_ops.cli.blocks import BLOCKS, ModelSizes, build
from te_ops.cli.devices import device_named
from te_ops.errors import Error

FORMATS: dict[str, Callable[[Any], str]] = {
    "text": lambda plan: plan.explain(),
    "json": lambda plan: json.dumps(plan.to_dict(), indent=2),
    "mermaid": lambda plan: plan.to_mermaid(),
    "html": lambda plan: plan.to_html(),
}
DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "model", help=f"{', '.join(BLOCKS)}; or module:function that returns (model, inputs)"
    )
    parser.add_argument("--recipe", choices=NAMES, default="fp32")
    parser.add_argument("--dtype", choices=DTYPES, help="of torch.autocast, whatever the recipe")
    parser.add_argument("--format", choices=FORMATS, default="text")
    parser.add_argument("--out", type=Path, help="write there instead of printing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-grad", action="store_true", help="forward only")
    defaults = ModelSizes()
    for name in vars(defaults):
        parser.add_argument(
            f"--{name}", type=int, help=f"of a named block (default {getattr(defaults, name)})"
        )


def run(options: argparse.Namespace) -> int:
    """Plan, and print or write the explanation."""
    device = device_named(options.device)
    model, inputs = _model(options, device)
    way = arm(options.recipe)
    if options.dtype is not None:
        way = replace(way, dtype=DTYPES[options.dtype])
    if options.model == "lm":
        way = way.sparing("head")
    with torch.no_grad() if options.no_grad else contextlib.nullcontext():
        plan = _plan(model, inputs, way, device)
    text = FORMATS[options.format](plan)
    if options.out is None:
        print(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")
        print(f"wrote {options.out}")
    return 0


def _plan(model: te.Op, inputs: tuple[Any, ...], way: Arm, device: torch.device) -> Any:
    with way.active(device):
        return model.plan(*inputs)


def _model(options: argparse.Namespace, device: torch.device) -> tuple[te.Op, tuple[Any, ...]]:
    given = {k: v for k in vars(ModelSizes()) if (v := getattr(options, k)) is not None}
    if options.model in BLOCKS:
        return build(options.model, ModelSizes(**given), device)
    if ":" not in options.model:
        raise Error(
            f"{options.model!r} is no block ({', '.join(BLOCKS)}) and no module:function of yours"
        )
    if given:
        raise Error(f"{options.model} has its own sizes; {', '.join(given)} would change nothing")
    model, inputs = _imported(options.model)
    if not isinstance(model, te.Op):
        raise Error(f"{options.model} returned a {type(model).__name__} as model, not a te_ops op")
    return model, inputs if isinstance(inputs, tuple) else (inputs,)


def _imported(name: str) -> tuple[Any, Any]:
    """Call `module:function`; the module may lie in the current directory."""
    where, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        made = getattr(importlib.import_module(where), function)()
    except (ImportError, AttributeError) as error:
        raise Error(f"cannot get {name}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2):
        raise Error(f"{name} must return (model, inputs), it returned a {type(made).__name__}")
    return made
