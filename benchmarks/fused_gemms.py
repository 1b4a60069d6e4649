"""Fused GEMMs of te_ops on one Hopper GPU: correct first, then timed against the kernels that run otherwise.

    python benchmarks/fused_gemms.py --seconds 65 --write te_ops/backends/cutlass/measured.json

1. correctness: every group of the pipelines at awkward row counts, each way to run it, against the group's reference.
2. times: every group at Llama shapes, every tiling, against cuBLASLt's best algorithm and a separate kernel. Operands
   are made up, ways interleaved, medians of CUDA graphs.
3. steps: whole training steps without fused GEMMs and with those that pay.
4. the table that the package ships (--write): kind of kernel -> class of shape -> gain and tiling. Rows that were not
   measured this time stay as they are.

A failure is printed and does not stop the rest. What does not fit into --seconds is left out and said so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import te_ops as te
from te_ops import recipe
from te_ops.backends.cutlass import choices, runtime
from te_ops.backends.cutlass.trial import SEPARATE, Trial, operand
from te_ops.runtime import tune as tuning
from te_ops.runtime.cache import plan_for

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.suite.fused import worst

SHAPES = ((4096, 14336, 8192), (4096, 14336, 2048), (2048, 8192, 8192), (8192, 28672, 4096))
"""Hidden size, size inside, rows."""
SMALL = (256, 512, 1040)
FEWEST = 2048
"""Rows below which nothing is written to the table: the host is the slower side there, and a phase with a fused launch
is not recorded."""
SURE = 1.05
"""What a plain product must gain: nothing is saved there but time in the product, and measurements differ by 2 %."""


@dataclass(frozen=True, kw_only=True)
class Fast(recipe.DelayedScaling):
    """Delayed scaling whose three products sum in the tensor core."""

    split_accumulator = (False, False, False)


RECIPES: dict[str, te.Recipe | None] = {
    "delayed": recipe.DelayedScaling(),
    "fast": Fast(),
    "current": recipe.Float8CurrentScaling(),
    "bf16": None,
}


@te.pointwise
def own(x: Any, cap: float) -> Any:
    """An activation of a user's."""
    return cap * te.math.tanh(x / cap)


MODELS = ("swiglu", "gelu", "own")


def mlp(kind: str, hidden: int, inside: int, device: torch.device) -> te.Op:
    """RMSNorm, Linear, an activation, Linear; with biases where nothing is gated."""
    gated = kind == "swiglu"
    act: te.Op = te.SwiGLU() if gated else te.GELU() if kind == "gelu" else own(cap=30.0)
    with torch.device(device):
        return te.Sequential(
            te.RMSNorm(hidden),
            te.Linear(hidden, 2 * inside if gated else inside, bias=not gated),
            act,
            te.Linear(inside, hidden, bias=not gated),
        ).bfloat16()


def added(hidden: int, inside: int, device: torch.device) -> te.Op:
    """A weight whose gradient is added to an FP32 main_grad."""
    with torch.device(device):
        model = te.Sequential(
            te.Linear(hidden, 2 * inside, bias=False, accumulate_into_main_grad=True)
        ).bfloat16()
        weight: Any = next(model.parameters())
        weight.main_grad = torch.zeros(weight.shape)
    return model


# -- the groups


Key = tuple[str, str, str]
"""Whose activation ("own" or ""), kind, class of shape."""


def trials(model: te.Op, rows: int, hidden: int, name: str, device: torch.device) -> list[Trial]:
    """What a training step of the model offers to `te.tune`."""
    x = torch.empty(rows, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    made = RECIPES[name]
    with tuning.collected() as found, te.autocast(enabled=made is not None, recipe=made):
        plan_for(model, (x,))
    return [t for t in found if isinstance(t, Trial)]


def groups(shape: tuple[int, int, int], device: torch.device) -> dict[Key, Trial]:
    """One trial of each kind and class that these pipelines have."""
    hidden, inside, rows = shape
    found: dict[Key, Trial] = {}

    def add(model: te.Op, names: Iterator[str], tag: str, wanted: str = "") -> None:
        for name in names:
            for t in trials(model, rows, hidden, name, device):
                kind = choices.kind(t.match.spec)
                key = (tag if t.match.fn else "", kind, choices.class_of(t.match.extents(t.call)))
                if wanted in kind:
                    found.setdefault(key, t)

    for kind in MODELS:
        add(mlp(kind, hidden, inside, device), iter(RECIPES), "own" if kind == "own" else "")
    add(added(hidden, inside, device), iter(("delayed", "fast", "bf16")), "", "+=")
    return found


def ways(trial: Trial) -> list[str]:
    """The tilings of the trial that are compiled."""
    return [name for name in trial.candidates() if name != SEPARATE]


# -- what is measured


@dataclass
class Run:
    """A run under way: what is left of the time, and the rows of the table."""

    seconds: float
    start: float = field(default_factory=time.monotonic)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self.start)

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """The call's result; a failure is printed."""
        if self.left() <= 0:
            print(f"left out, no time: {what}", flush=True)
            return None
        try:
            return call()
        except Exception as error:  # noqa: BLE001  (the rest goes on)
            print(f"FAILED {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return None


def check(trial: Trial) -> str:
    """The error of every way to run a group.

    Raises:
        RuntimeError: one is wrong.
    """
    reads = [operand(trial.call.spec(v), trial.device) for v in trial.call.reads]
    launches = {name: trial.bound(name) for name in (SEPARATE, *ways(trial))}
    return " ".join(f"{n}: {worst(trial.call, {n: x}, reads):.1e}" for n, x in launches.items())


def gain(run: Run, key: Key, trial: Trial) -> str:
    """Times of a group, and its row of the table."""
    names = (SEPARATE, *ways(trial))
    if len(names) < 2:
        return "no kernel"
    us = dict(zip(names, tuning.timed(trial, names, 5), strict=True))
    best = min(names[1:], key=us.__getitem__)
    tag, kind, shape = key
    if not tag:
        run.rows.setdefault(kind, {})[shape] = f"{us[SEPARATE] / us[best]:.2f} {best}"
        if us[SEPARATE] >= choices.PAYS * us[best]:
            tuning.TABLE.add(trial.where, {trial.key: best})
    return f"{us[SEPARATE] / us[best]:.3f}  " + " ".join(f"{n}: {t:.0f} us" for n, t in us.items())


def step_times(model: te.Op, x: torch.Tensor, name: str) -> tuple[float, float]:
    """Milliseconds of a training step, without fused GEMMs and with those that pay; interleaved medians."""
    made, dy = RECIPES[name], torch.randn_like(x)

    def step() -> None:
        x.grad = None
        for p in model.parameters():
            p.grad = None
        with te.autocast(enabled=made is not None, recipe=made):
            y = model(x)
        y.backward(dy)

    samples: dict[str, list[float]] = {"off": [], "measured": []}
    for i in range(6):
        for mode in sorted(samples, reverse=bool(i % 2)):
            with choices.forced(mode):
                step()
                samples[mode].append(_milliseconds(step, 5))
    return statistics.median(samples["off"]), statistics.median(samples["measured"])


def _milliseconds(call: Callable[[], None], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


# -- the table


def table(rows: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The rows that are shipped: with a tiling where it pays, else the gain alone."""
    kept: dict[str, dict[str, str]] = {}
    for kind, classes in sorted(rows.items()):
        for shape, text in sorted(classes.items(), key=lambda row: _extents(row[0])):
            gained = float(text.partition(" ")[0])
            unsure = "plain" in kind and choices.PAYS <= gained < SURE
            if _rows(kind, shape) < FEWEST or unsure:
                continue
            kept.setdefault(kind, {})[shape] = text if gained >= choices.PAYS else f"{gained:.2f}"
    return kept


def merged(
    before: dict[str, dict[str, dict[str, str]]], made: dict[str, dict[str, str]]
) -> dict[str, dict[str, dict[str, str]]]:
    """A table with these rows in place of those it had."""
    kinds = before.get("sm_90", {})
    both = {k: {**kinds.get(k, {}), **made.get(k, {})} for k in sorted({*kinds, *made})}
    ordered = {
        k: dict(sorted(v.items(), key=lambda row: _extents(row[0]))) for k, v in both.items()
    }
    return {**before, "sm_90": ordered}


def _extents(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))


def _rows(kind: str, shape: str) -> int:
    """What a class says of the row count: K where rows are contracted."""
    m, _, k = _extents(shape)
    return k if "mnmn" in kind or "+=" in kind else m


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="without compiling")
    parser.add_argument("--write", type=Path, metavar="F", help="write the table here")
    options = parser.parse_args()
    reason = runtime.missing() or (None if torch.cuda.is_available() else "there is no GPU")
    if reason is not None:
        parser.error(reason)
    device = torch.device("cuda", 0)
    first = groups(SHAPES[0], device)
    specs = list(dict.fromkeys(s for t in first.values() for s in t.specs().values()))
    begin = time.monotonic()
    reasons = runtime.wait(specs, "sm_90", device)
    made = sum(r is None for r in reasons.values())
    print(
        f"{made} of {len(specs)} kernels compiled in {time.monotonic() - begin:.0f} s", flush=True
    )
    run = Run(options.seconds)
    for (tag, kind, _), t in groups(SMALL, device).items():
        print("checked", tag, kind, run.attempt(kind, lambda t=t: check(t)), flush=True)
    for shape in SHAPES:
        for key, t in (first if shape is SHAPES[0] else groups(shape, device)).items():
            print(*key, run.attempt(" ".join(key), lambda k=key, t=t: gain(run, k, t)), flush=True)
        first = {}
    hidden, inside, rows = SHAPES[0]
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    for kind in MODELS:
        for name in RECIPES:
            model = mlp(kind, hidden, inside, device)
            found = run.attempt(f"{kind} {name}", lambda m=model, n=name: step_times(m, x, n))
            if found is not None:
                print(f"step {kind} {name}: {found[0]:.3f} ms, fused {found[1] / found[0]:.3f}")
    if options.write:
        before = json.loads(options.write.read_text()) if options.write.exists() else {}
        options.write.write_text(json.dumps(merged(before, table(run.rows)), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
