"""A run from start to end: every arm in turn, then metrics, checks and what is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from te_ops.cli.arms import SABOTAGED
from te_ops.cli.train import report
from te_ops.cli.train.checks import Run, checks
from te_ops.cli.train.metrics import measure
from te_ops.cli.train.settings import Settings, save
from te_ops.cli.train.text import Text, read
from te_ops.cli.train.trainer import CHECKPOINTS, Trainer, affordable_steps
from te_ops.errors import Error


def compare(
    settings: Settings,
    out: Path,
    console: Console,
    *,
    stop: int | None = None,
    resumed: bool = False,
) -> tuple[Settings, list[Trainer]]:
    """Train every arm to its end, or to step `stop`; a `resumed` run continues from `out`.

    Raises:
        Error: a new run would mix with the checkpoints of another.
    """
    if not resumed and any((out / CHECKPOINTS).glob("*.pt")):
        raise Error(f"{out} has checkpoints of another run: --resume it, or give another --out")
    text = read(settings.text, settings.context + 1)
    if settings.seconds:
        steps = affordable_steps(settings, text)
        settings = replace(settings, steps=steps, seconds=0.0)
    _introduce(settings, text, console)
    keep = bool(settings.checkpoint_every) or stop is not None
    if keep and not resumed:
        save(settings, out)
    trainers = []
    with report.Watch(console) as watch:
        for arm in settings.arms:
            trainer = Trainer(settings, arm, text)
            if resumed:
                trainer.load(out)
            until = settings.steps if stop is None else min(stop, settings.steps)
            trainer.run(until, out if keep else None, watch)
            trainers.append(trainer)
    return settings, trainers


def _introduce(settings: Settings, text: Text, console: Console) -> None:
    s = settings
    parameters = sum(p.numel() for p in Trainer(s, s.arms[0], text).model.parameters())
    console.print(
        f"{text.source}: {len(text.train):,} bytes to train on, {len(text.validation):,} held out\n"
        f"{s.layers} layers, dim {s.dim}, {parameters:,} parameters on {s.device}; "
        f"{s.steps} steps of {s.batch} x {s.context} bytes for each of {', '.join(s.recipes)}"
    )


def finish(settings: Settings, trainers: list[Trainer], out: Path, console: Console) -> int:
    """Measure, check, show and write; returns 1 if a check failed."""
    runs = [Run(trainer, measure(trainer)) for trainer in trainers]
    text = read(settings.text, settings.context + 1)
    made = checks(runs, text.unigram_entropy())
    report.show_table(console, runs)
    report.show_checks(console, made)
    report.write_results(out / "results.json", settings, runs, made)
    console.print(f"wrote {out / 'results.json'}")
    if report.draw(out / "loss.png", runs):
        console.print(f"wrote {out / 'loss.png'}")
    else:
        console.print("no picture: matplotlib is not installed (pip install 'te_ops[demo]')")
    _export(trainers, out, console)
    return 0 if all(check.ok for check in made) else 1


def _export(trainers: list[Trainer], out: Path, console: Console) -> None:
    """Write the models, but those whose recipe is wrong on purpose."""
    try:
        kept = [trainer.export(out) for trainer in trainers if trainer.arm.name != SABOTAGED]
    except Error as error:
        console.print(f"no models: {error}")
        return
    console.print(f"wrote {kept[0].parent}: continue a text with te-ops generate --model {out}")
