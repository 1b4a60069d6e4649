"""The driver: cases in order of importance, within a budget, results as plain data that grows as it goes."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from te_ops import warmup
from te_ops.runtime.tune import tune

from . import attention, data, fused, machine, measure, peers, streams
from .attention import Attend
from .data import Case, Stream
from .fused import Fused
from .peers import Arm, Data, Provider, Unsupported

VERSION = 1
"""Of the JSON's layout."""
WARM = 4  # steps before anything is checked or timed: delayed scaling has its scales by then


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        cases: names of cases, streams or presets.
        recipes: which recipes, for pipelines and for streams.
        peers: names of providers and of stream peers; None: all that are not `extra`.
        regime: "sustained" (heated before) or "burst" (the device rests before every sample).
        budget: seconds for everything; what does not fit is said to be out of time.
        rounds: interleaved rounds a case, fewer if its share of the budget is over.
    """

    cases: tuple[str, ...]
    device: torch.device
    recipes: tuple[str, ...] = data.NATIVE
    peers: tuple[str, ...] | None = None
    regime: str = "sustained"
    budget: float = 600.0
    rounds: int = 20
    json: Path | None = None
    tune: bool = False


@dataclass
class Run:
    """A run under way."""

    settings: Settings
    say: Callable[[str], None]
    watch: machine.Watch = field(default_factory=machine.Watch)
    results: dict[str, Any] = field(default_factory=dict)
    start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds of the budget."""
        return self.settings.budget - (time.monotonic() - self.start)

    def save(self) -> None:
        """Write what there is, in one step."""
        path = self.settings.json
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            part.write_text(json.dumps(self.results, indent=1) + "\n")
            part.replace(path)


def expand(names: Iterable[str]) -> list[Case | Stream | Fused | Attend]:
    """Cases, streams, fused groups and attentions by name or preset, in the order given, each once.

    Raises:
        KeyError: a name is none.
    """
    known: dict[str, Case | Stream | Fused | Attend] = {c.name: c for c in data.CASES}
    known |= {s.name: s for s in data.STREAMS} | {f.name: f for f in fused.CASES}
    known |= {a.name: a for a in attention.CASES}
    presets = {**data.PRESETS, "fused": tuple(f.name for f in fused.CASES)}
    presets["attention"] = tuple(a.name for a in attention.CASES)
    wanted: dict[str, Case | Stream | Fused | Attend] = {}
    for name in names:
        if name not in known and name not in presets:
            raise KeyError(name)
        wanted |= {n: known[n] for n in presets.get(name, (name,))}
    return list(wanted.values())


def run(settings: Settings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run everything; a case that fails is reported in the results, and the rest runs."""
    device = settings.device
    chosen = expand(settings.cases)
    peers.preload()
    current = Run(settings, say)
    with current.watch.running(device.type == "cuda"):
        shown = asdict(settings)
        shown |= {"device": str(device), "json": str(settings.json) if settings.json else None}
        current.results = {
            "version": VERSION,
            "settings": shown,
            "machine": machine.describe(device),
            "ceilings": None,
            "providers": {},
            "pipelines": {},
            "streams": {},
            "fused": {},
            "attention": {},
        }
        sustained = settings.regime == "sustained"
        machine.heat(device, min(3.0, settings.budget / 20) if sustained else 0.0)
        found = machine.ceilings(device)
        current.results["ceilings"] = {"products": dict(found.products), "copy": found.copy}
        for case in chosen:
            if isinstance(case, Case):
                table, entry = "pipelines", _guarded(current, case, _pipeline)
            elif isinstance(case, Fused):
                table, entry = "fused", _guarded(current, case, _fused)
            elif isinstance(case, Attend):
                table, entry = "attention", _guarded(current, case, _attention)
            else:
                table, entry = "streams", _guarded(current, case, _stream)
            if entry is None:
                continue
            current.results[table][case.name] = entry
            current.results["seconds"] = time.monotonic() - current.start
            current.save()
            _free(device)
    return current.results


def _guarded(current: Run, case: Any, function: Callable[[Run, Any], Any]) -> Any:
    begin = time.monotonic()
    if current.left() <= 0:
        return {"case": case.name, "failed": "out of time"}
    try:
        entry = function(current, case)
    except Exception as error:  # noqa: BLE001  (the rest of the run goes on)
        where = traceback.extract_tb(error.__traceback__)[-1]
        entry = {"case": case.name, "failed": f"{_words(error)} ({where.name}:{where.lineno})"}
    if entry is not None:
        entry["took"] = time.monotonic() - begin
        if "failed" in entry:
            current.say(f"{case.name}: {entry['failed']}")
    return entry


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:240]}"


def _free(device: torch.device) -> None:
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:  # else it stops compiling after a few cases that share code
        compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- pipelines


def _wanted(current: Run, case: Case) -> list[Provider]:
    names = current.settings.peers
    return [
        p
        for p in peers.PROVIDERS
        if (case.graphs or not p.graph)
        and (p.name in names if names is not None else not p.extra)
        and not (p.graph and current.settings.device.type != "cuda")
    ]


def _pipeline(current: Run, case: Case) -> dict[str, Any] | None:
    """Build, check, time, count."""
    settings, device = current.settings, current.settings.device
    if device.type != "cuda":
        case = case.smaller(32, 64)  # correct, and of no use as a figure
    shared = Data.draw(case, device)
    entry: dict[str, Any] = {
        "case": case.name,
        "about": case.about,
        "rows": case.rows,
        "layers": [asdict(x) for x in case.layers],
        "flops": data.flops(case),
        "floor_ms": {},
        "arms": {},
    }
    arms: list[Arm] = []
    checked = _Checked(shared, peers.reference(shared), entry["arms"])
    for recipe in settings.recipes:
        for provider in _wanted(current, case):
            made = _make(current, provider, recipe, checked)
            if made is not None:
                arms.append(made)
    del checked
    _free(device)
    _time_arms(current, case, arms, entry)
    _count_arms(current, case, arms, entry)
    return entry


@dataclass(frozen=True)
class _Checked:
    """What arms are checked with, and where their entries go."""

    shared: Data
    right: dict[str, torch.Tensor]
    entries: dict[str, Any]


def _make(current: Run, provider: Provider, recipe: str, checked: _Checked) -> Arm | None:
    """A checked arm, or None with the reason in the results."""
    shared, entry = checked.shared, checked.entries
    name = f"{provider.name}/{recipe}"
    status = current.results["providers"]
    try:
        arm = provider.build(shared, recipe)
        arm.provider = provider.name
        if current.settings.tune and provider.name.startswith("te_ops"):
            _tune(arm)
        if provider.name == "te_ops":
            _warm(arm)
        for _ in range(WARM):
            arm.step()
        found = peers.errors(arm.results(), checked.right)
    except Unsupported:
        return None
    except ImportError as error:
        status[provider.name] = f"absent ({error.name or error})"
        return None
    except Exception as error:  # noqa: BLE001  (a peer may fail as it likes)
        entry[name] = {"failed": _words(error)}
        current.say(f"  {name} failed: {_words(error)}")
        return None
    finally:
        shared.x.grad = None
    status[provider.name] = "here"
    limit = peers.tolerance(shared.case, recipe)
    entry[name] = {"errors": found, "tolerance": limit, "note": arm.note}
    if not all(e <= limit for e in found.values()):
        entry[name]["failed"] = f"results are wrong: errors {found}, at most {limit:.3g}"
        current.say(f"  {name}: {entry[name]['failed']}")
        return None
    return arm


def _tune(arm: Arm) -> None:
    """Let te_ops time the GEMMs of this model, as a user would before training."""
    tune(arm.keep, arm.data.x, recipe=peers.te_recipe(arm.recipe))


def _warm(arm: Arm) -> None:
    """Kernels that are compiled in the background are there after a few steps of a training program, which are not
    what is timed."""
    with arm.context():
        warmup(arm.keep, arm.data.x)


_PRODUCT = "product "  # before the names of the plain products that are timed in the same rounds


def _time_arms(current: Run, case: Case, arms: list[Arm], entry: dict[str, Any]) -> None:
    settings, device = current.settings, current.settings.device
    burst = settings.regime == "burst"
    steps = 1 if burst else case.steps
    # Where the device is the slower one, as in training, it does not wait for the first launch.
    ahead = 0.0 if case.graphs else 1e-3
    calls: dict[str, Callable[[], Any]] = {arm.name: arm.step for arm in arms}
    plain = {} if case.graphs else machine.products(device)
    calls |= {f"{_PRODUCT}{name}": call for name, call in plain.items()}
    machine.heat(device, 0.0 if burst else min(2.0, settings.budget / 60))
    seen = len(current.watch.seen)

    def rest() -> None:
        measure.synchronize(device)
        time.sleep(0.05)

    samples = measure.rounds(
        calls,
        lambda _, step: measure.timed(step, steps, device, ahead),
        least=settings.rounds,
        seconds=min(15.0, max(1.0, 0.3 * current.left())),
        between=rest if burst else None,
    )
    entry["clock"] = current.watch.since(seen)
    found = {n: statistics.median(samples[f"{_PRODUCT}{n}"]) for n in plain}
    rates = machine.rates(found, device) or current.results["ceilings"]["products"]
    limits = data.Ceilings(rates, current.results["ceilings"]["copy"])
    entry["products"] = rates
    entry["floor_ms"] = {r: data.floor_ms(case, r, limits) for r in settings.recipes}
    for arm in arms:
        arm.clear()
        entry["arms"][arm.name]["time"] = measure.summary(samples[arm.name])


def _count_arms(current: Run, case: Case, arms: list[Arm], entry: dict[str, Any]) -> None:
    """Host time, memory, kernels, growth: each guarded, since none of them may cost the times."""
    calls = 20 if case.graphs else 2
    looks: dict[str, Callable[[Arm], Any]] = {
        "host_us": lambda arm: measure.host_us(arm, calls),
        "memory": measure.memory,
        "saved": measure.saved,
        "kernels": measure.kernels,
        "growth": lambda arm: measure.growth(arm, case.growth),
    }
    for key, look in looks.items():
        for arm in arms:
            if key == "growth" and (arm.provider != "te_ops" or not case.growth):
                continue
            if current.left() <= 0:
                return
            try:
                entry["arms"][arm.name][key] = look(arm)
            except Exception as error:  # noqa: BLE001
                entry["arms"][arm.name][key] = None
                current.say(f"  {arm.name}: no {key}: {_words(error)}")
            arm.clear()


# -- streams


def _stream(current: Run, stream: Stream) -> dict[str, Any] | None:
    settings = current.settings
    emulated = stream.recipe in ("mxfp8", "nvfp4")
    if stream.recipe not in settings.recipes and not (emulated and settings.recipes == data.NATIVE):
        return None
    if settings.device.type != "cuda":
        stream = stream.smaller(256, 64)
    named = settings.peers
    if named is None:
        named = streams.DEFAULT if settings.device.type == "cuda" else ()
    return streams.measure(
        stream,
        settings.device,
        [p for p in streams.PEERS if p in named],
        least=settings.rounds,
        seconds=min(1.5, max(0.3, 0.2 * current.left())),
    )


__all__ = ["Settings", "expand", "run"]


# -- fused GEMMs


def _fused(current: Run, case: Fused) -> dict[str, Any] | None:
    settings = current.settings
    if case.recipe not in settings.recipes:
        return None
    if settings.device.type != "cuda":
        current.say(f"{case.name}: left out, it needs a Hopper GPU")
        return None
    seconds = min(2.0, max(0.5, 0.2 * current.left()))
    return fused.measure(case, settings.device, least=settings.rounds, seconds=seconds)


# -- attention


def _attention(current: Run, case: Attend) -> dict[str, Any]:
    device = current.settings.device
    if device.type != "cuda":
        case = case.smaller(64)  # correct, and of no use as a figure
    seconds = min(2.0, max(0.5, 0.2 * current.left()))
    return attention.measure(case, device, least=current.settings.rounds, seconds=seconds)
