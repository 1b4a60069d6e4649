"""te.tune: time every candidate of a model's GEMMs on its own shapes, and remember the best.

A backend whose kernel has several ways to run a problem offers a `Trial` while plans are made for tuning, and looks
into `TABLE` when it prepares the problem. What was measured is kept in memory and on disk, by device and library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from te_ops.context import autocast, current
from te_ops.errors import PlanError
from te_ops.op import Op
from te_ops.recipe import Recipe
from te_ops.registry import REGISTRY
from te_ops.runtime import plain
from te_ops.runtime.cache import plan_for
from te_ops.runtime.disk import locked, own_folder, put

FORMAT = 1
GAIN = 0.99  # of trials whose candidates are alike: measurements of one differ by as much
_WINDOW = 300.0  # us of work that one measurement takes at least
_MOST = 50  # calls in one measurement


class Trial(Protocol):
    """A problem with several ways to run it."""

    where: str  # device and library versions: what its measurements are valid for
    key: str  # the problem
    device: torch.device
    gain: float  # a candidate must need at most this part of the default's time

    def candidates(self) -> list[str]:
        """Ways to run it, the default first; none where nothing can be chosen."""

    def start(self) -> Callable[[str], Callable[[], None]]:
        """Allocates operands; gives a run for each candidate, which issues it once on the current stream."""


# -- what was measured


class Table:
    """The choices of every place, in memory and on disk."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def get(self, where: str, key: str) -> str | None:
        """The choice for a problem, None if it was not measured."""
        known = self._known.get(where)
        return (self.load(where) if known is None else known).get(key)

    def load(self, where: str) -> dict[str, str]:
        """Read the file of a place again."""
        path = self._path(where, make=False)
        found = {} if path is None else _read(path, where)
        with self._lock:
            self._known[where] = {**self._known.get(where, {}), **found}
            return self._known[where]

    def add(self, where: str, made: dict[str, str]) -> None:
        """Remember choices, and write them to disk together with what others have written meanwhile."""
        with self._lock:
            self._known[where] = {**self._known.get(where, {}), **made}
        path = self._path(where, make=True)
        if path is None:
            return
        with locked(path.with_suffix(".lock")):
            entries = {**_read(path, where), **made}
            text = {"format": FORMAT, "where": where, "choices": dict(sorted(entries.items()))}
            put(path, json.dumps(text, indent=1).encode())

    def forget(self) -> None:
        """Empty the memory: the next look reads the disk again."""
        with self._lock:
            self._known = {}

    @staticmethod
    def _path(where: str, *, make: bool) -> Path | None:
        folder = own_folder("TUNE_CACHE", "tune", make=make)
        if folder is None:
            return None
        return folder / f"{hashlib.blake2b(where.encode(), digest_size=8).hexdigest()}.json"


TABLE = Table()


def _read(path: Path, where: str) -> dict[str, str]:
    """The choices in a file; none if there is no file, or a damaged or foreign one."""
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT or found["where"] != where:
            return {}
        return {str(k): str(v) for k, v in found["choices"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        warnings.warn(f"{path} is damaged and is not used", RuntimeWarning, stacklevel=2)
        return {}


# -- which problems a model has

_OFFERED: ContextVar[list[Trial] | None] = ContextVar("te_ops_offered", default=None)


def collecting() -> bool:
    """Whether the plan that is being made is for tuning: backends then offer their problems."""
    return _OFFERED.get() is not None


def offer(trial: Trial) -> None:
    """Add a problem of the plan that is being made."""
    offered = _OFFERED.get()
    if offered is not None:
        offered.append(trial)


@contextlib.contextmanager
def collected() -> Iterator[list[Trial]]:
    """What is offered inside, where every plan is made anew."""
    found: list[Trial] = []
    token = _OFFERED.set(found)
    try:
        with REGISTRY.temporary():
            yield found
    finally:
        _OFFERED.reset(token)


class _Seen(Exception):
    """Leaves an autocast region so that it commits nothing."""


def _problems(model: nn.Module, inputs: Sequence[Any], recipe: Recipe | None) -> list[Trial]:
    """What the plans of one call offer. A pipeline of ops alone is planned only; another model is run forward once."""
    with collected() as found:
        region = autocast(enabled=recipe is not None, recipe=recipe)
        if isinstance(model, Op) and _only_ops(model):
            with region:
                plan_for(model, inputs)
            return found
        devices = {x.device.index or 0 for x in inputs if isinstance(x, torch.Tensor) and x.is_cuda}
        with torch.random.fork_rng(devices=sorted(devices)):
            try:
                with region:
                    model(*inputs)
                    raise _Seen
            except _Seen:
                return found


def _only_ops(model: nn.Module) -> bool:
    return all(
        isinstance(m, Op) or "quantizer" in path.split(".") for path, m in model.named_modules()
    )


# -- measuring


def _times(runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Median us of each run, interleaved: captured as graphs, so that the host's time is no part of it."""
    graphs = [_graph(run, 1) for run in runs]
    first = _timed(graphs, 1)[0][0]
    calls = max(1, min(_MOST, round(_WINDOW / max(first, 1e-3))))
    if calls > 1:
        graphs = [_graph(run, calls) for run in runs]
    _timed(graphs, 1)
    return [sorted(times)[len(times) // 2] / calls for times in _timed(graphs, rounds)]


def _graph(run: Callable[[], None], calls: int) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def _timed(graphs: Sequence[torch.cuda.CUDAGraph], rounds: int) -> list[list[float]]:
    """us of every graph in every round; the order turns round from one to the next, so that heat hits all alike."""
    events: list[list[tuple[Any, Any]]] = [[] for _ in graphs]
    for graph in graphs:  # the first work after a pause is slow
        graph.replay()
    for i in range(rounds):
        order = range(len(graphs)) if i % 2 == 0 else range(len(graphs) - 1, -1, -1)
        for k in order:
            start, end = _event(), _event()
            start.record()
            graphs[k].replay()
            end.record()
            events[k].append((start, end))
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) * 1e3 for start, end in pairs] for pairs in events]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Tuned:
    """One problem: how many candidates it has, and what the first and the best need in us (None: known before)."""

    where: str
    key: str
    choice: str
    candidates: int = 0
    first: float | None = None
    best: float | None = None

    def __str__(self) -> str:
        if self.first is None or self.best is None:
            return f"{self.key}: known"
        return f"{self.key}: {self.best:.1f} us of {self.first:.1f} ({self.candidates} candidates)"


@dataclass(frozen=True)
class Report:
    """What `te.tune` found, one entry a problem."""

    problems: tuple[Tuned, ...] = field(default=())

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems)) or "no problem has a choice"


def drawn(rows: int, k: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers like those of a model: the power that a GEMM draws, and so its speed, depends on them."""
    made = torch.empty(rows, k, dtype=dtype, device=device)
    step = max(1, (64 << 20) // max(k, 1))
    for start in range(0, rows, step):
        part = made[start : start + step]
        part.copy_(torch.randn(part.shape, device=device))
    return made


def timed(trial: Trial, names: Sequence[str], rounds: int) -> list[float]:
    """Median us of some ways to run a problem, interleaved."""
    on_cuda = trial.device.type == "cuda"
    with torch.cuda.device(trial.device) if on_cuda else contextlib.nullcontext():
        run = trial.start()
        return _times([run(name) for name in names], rounds)


def measured(trial: Trial, rounds: int) -> Tuned | None:
    """Time a problem's candidates; None where there is no choice."""
    names = trial.candidates()
    if not names:
        return None
    times = timed(trial, names, rounds)
    best = min(range(len(names)), key=times.__getitem__)
    if times[best] > trial.gain * times[0]:
        best = 0
    return Tuned(trial.where, trial.key, names[best], len(names), times[0], times[best])


def tune(
    model: nn.Module,
    *inputs: Any,
    recipe: Recipe | None = None,
    rounds: int = 7,
    measure: bool = True,
    again: bool = False,
) -> Report:
    """Time every candidate of the GEMMs of `model(*inputs)`, forward and backward, and use the best from now on.

    Each problem is timed over operands made up for it, on the model's own shapes. The model itself is only planned,
    or, if it holds modules that are no ops of te_ops, run forward once; no gradient, quantizer state or random state
    changes. The choices are kept on disk (`TE_OPS_TUNE_CACHE`, a folder of the user's own, or "off"), by device and
    library version, and other processes find them there. Another choice may sum in another order: results are not the
    same bits before and after.

    Nothing waits for other ranks: let one rank tune, and the others call `tune(..., measure=False)` afterwards, with
    the same folder.

    Args:
        model: an Op or a module with Ops inside.
        inputs: what the model is called with; the grad mode in force says whether the backward is tuned.
        recipe: of the region in which the model will run; None for none.
        rounds: measurements of each candidate; the median counts.
        measure: False takes what is on disk, and measures nothing.
        again: measure what is known already, too.

    Raises:
        PlanError: called inside `te.autocast`, in a backward pass or while a CUDA graph is captured: choices may
            change only between steps. No module, or no rounds.
    """
    _refuse_here()
    if not isinstance(model, nn.Module):
        raise PlanError(f"te.tune takes a module, got a {type(model).__name__}")
    if not isinstance(rounds, int) or rounds < 1:
        raise PlanError(f"te.tune: rounds must be a positive number, got {rounds!r}")
    trials = {(t.where, t.key): t for t in _problems(model, inputs, recipe)}
    places = {where for where, _ in trials}
    known = {where: dict(TABLE.load(where)) for where in sorted(places)}
    made: list[Tuned] = []
    fresh: dict[str, dict[str, str]] = {}
    for (where, key), trial in trials.items():
        choice = known[where].get(key)
        if choice is not None and not again:
            made.append(Tuned(where, key, choice))
        elif measure:
            tuned = measured(trial, rounds)
            if tuned is not None:
                made.append(tuned)
                fresh.setdefault(where, {})[key] = tuned.choice
    for where, choices in fresh.items():
        TABLE.add(where, choices)
    plain.keep_plans(model)
    REGISTRY.version += 1  # the next call plans anew, with these choices
    return Report(tuple(made))


def _refuse_here() -> None:
    where = None
    if current() is not None:
        where = "inside te.autocast (pass recipe= instead)"
    elif torch._C._current_graph_task_id() != -1:
        where = "in a backward pass"
    elif torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        where = "while a CUDA graph is captured"
    if where is not None:
        raise PlanError(f"te.tune is called {where}; call it between steps")
