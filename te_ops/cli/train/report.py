"""What a run shows and leaves behind: progress, tables, a picture and results.json."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import te_ops
from te_ops.cli.train.checks import Check, Run
from te_ops.cli.train.metrics import OPERANDS, Metrics, Rounding
from te_ops.cli.train.trainer import Trainer

EVERY = 10.0  # seconds between lines where there is no terminal


class Watch:
    """Bars on a terminal, elsewhere a line now and then; call it after each step."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.spoken = time.monotonic()
        self.tasks: dict[str, Any] = {}
        self.bars = Progress(
            TextColumn("{task.description:10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Watch:
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bars.stop()

    def __call__(self, trainer: Trainer) -> None:
        """Show where a trainer is."""
        name, steps = trainer.arm.name, trainer.settings.steps
        recent = trainer.losses[-20:]
        loss = f"loss {sum(recent) / len(recent):.3f}"
        if self.console.is_terminal:
            if name not in self.tasks:
                self.tasks[name] = self.bars.add_task(name, total=steps, loss="")
            self.bars.update(self.tasks[name], completed=trainer.step, loss=loss)
        elif trainer.done or time.monotonic() - self.spoken >= EVERY:
            self.spoken = time.monotonic()
            self.console.print(f"{name:10} step {trainer.step}/{steps} {loss}")


# -- tables


def show_table(console: Console, runs: list[Run]) -> None:
    """One row a recipe."""
    table = Table(title="After training", title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("recipe")
    names = ("val loss", "gap", "SQNR dB: in, w, grad", "grad cosine (worst)", "underflow")
    for name in (*names, "kept MB", "of fp32", "ms/step"):
        table.add_column(name, justify="right")
    base = runs[0]
    for run in runs:
        m = run.metrics
        table.add_row(
            run.name,
            f"{run.loss:.4f}",
            f"{run.loss - base.loss:+.4f}" if run is not base else "",
            ", ".join(_db(m.worst(name)) for name in OPERANDS) if m.errors else "",
            f"{m.cosine:.4f} ({m.cosine_worst:.4f})",
            f"{100 * max((e.underflow for e in m.errors), default=0.0):.2f} %",
            f"{m.saved_bytes / 1e6:.2f}",
            f"{m.saved_bytes / base.metrics.saved_bytes:.2f}",
            f"{m.ms:.1f}",
        )
    console.print(table)


def _db(error: Rounding | None) -> str:
    return "-" if error is None else f"{error.sqnr:.1f}"


def show_checks(console: Console, made: list[Check]) -> None:
    """One line a check: the value, its limit and where that comes from."""
    table = Table(title="Checks", title_justify="left", box=SIMPLE, pad_edge=False)
    for name, fixed in (("", True), ("recipe", True), ("check", True), ("worst at", False)):
        table.add_column(name, no_wrap=fixed)
    table.add_column("value", justify="right", no_wrap=True)
    for name, fixed in (("limit", True), ("which is", False)):
        table.add_column(name, no_wrap=fixed)
    for check in made:
        mark = "[green]ok[/]" if check.ok else "[bold red]FAILED[/]"
        sign = ">=" if check.at_least else "<="
        limit = f"{sign} {check.limit:.4g} {check.unit}".rstrip()
        where = check.where.removeprefix("layers.").removesuffix(".weight")
        table.add_row(mark, check.arm, check.what, where, f"{check.value:.4g}", limit, check.why)
    console.print(table)
    failed = sum(not check.ok for check in made)
    console.print(f"{len(made) - failed} checks hold, {failed} failed")


# -- files


def write_results(path: Path, settings: Any, runs: list[Run], made: list[Check]) -> None:
    """Settings, environment, curves, metrics and checks as JSON."""
    document = {
        "settings": dataclasses.asdict(settings),
        "environment": {
            "te_ops": te_ops.__version__,
            "torch": torch.__version__,
            "device": _device(runs[0].trainer.device),
            "threads": torch.get_num_threads(),
        },
        "runs": {run.name: _run(run, runs[0]) for run in runs},
        "checks": [{**dataclasses.asdict(c), "ok": c.ok} for c in made],
        "ok": all(c.ok for c in made),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_plain(document), indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _run(run: Run, base: Run) -> dict[str, Any]:
    m: Metrics = run.metrics
    return {
        "validation_loss": run.loss,
        "gap": run.loss - base.loss,
        "gradient_cosine": m.cosine,
        "gradient_cosine_worst": m.cosine_worst,
        "worst_parameter": m.worst_parameter,
        "saved_bytes": m.saved_bytes,
        "saved_of_fp32": m.saved_bytes / base.metrics.saved_bytes,
        "ms_per_step": m.ms,
        "first_step_ms": m.first_ms,
        "operands": [
            {"path": e.operand.path, "operand": e.operand.name, "sqnr_db": e.sqnr}
            | {"underflow": e.underflow, "underflow_limit": e.underflow_limit}
            for e in m.errors
        ],
        "losses": run.trainer.losses,
        "validation": run.trainer.validation,
    }


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def draw(path: Path, runs: list[Run]) -> bool:
    """Loss curves as PNG; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(9, 4.5), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for run in runs:
        smooth = _smooth(run.trainer.losses)
        (line,) = left.plot(range(1, len(smooth) + 1), smooth, label=run.name, linewidth=1.2)
        steps, losses = zip(*run.trainer.validation, strict=True)
        right.plot(steps, losses, ".-", color=line.get_color(), label=f"{run.name} {run.loss:.3f}")
    left.set(title="training loss (smoothed)", xlabel="step", ylabel="nats a byte")
    right.set(title="validation loss", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True


def _smooth(losses: list[float], keep: float = 0.95) -> list[float]:
    """Exponential moving average without the bias of its start."""
    made, total, weight = [], 0.0, 0.0
    for loss in losses:
        total = keep * total + (1 - keep) * loss
        weight = keep * weight + (1 - keep)
        made.append(total / weight)
    return made
