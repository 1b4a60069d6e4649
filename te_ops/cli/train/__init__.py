"""te-ops train: train a small language model under several recipes, compare and check them."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console

from te_ops.cli.train.compare import compare, finish
from te_ops.cli.train.settings import add_setting_arguments, from_options, load
from te_ops.errors import Error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_setting_arguments(parser)
    run = parser.add_argument_group("this run")
    run.add_argument("--out", type=Path, help="folder for results (default runs/<time>)")
    run.add_argument(
        "--resume", type=Path, metavar="DIR", help="continue the run in DIR from its checkpoints"
    )
    run.add_argument(
        "--stop", type=int, metavar="STEP", help="save every model after this step and end"
    )


def run(options: argparse.Namespace) -> int:
    """Train every recipe, compare, and return 1 if a check failed."""
    if options.resume is not None and options.out is not None:
        raise Error("--resume continues in its own folder; leave --out away")
    if options.stop is not None and options.stop < 1:
        raise Error(f"--stop must be at least 1, got {options.stop}")
    out = options.resume or options.out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
    settings = from_options(options, load(out) if options.resume else None)
    torch.set_num_threads(settings.threads)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    resumed = options.resume is not None
    settings, runs = compare(settings, out, console, stop=options.stop, resumed=resumed)
    if options.stop is not None and options.stop < settings.steps:
        console.print(f"stopped; go on with: te-ops train --resume {out}")
        return 0
    return finish(settings, runs, out, console)
