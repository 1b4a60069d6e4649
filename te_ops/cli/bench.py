"""te-ops bench: pipelines and kernels against their peers, in one process."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import te_ops
from te_ops.cli.devices import device_named
from te_ops.errors import Error

NAME = "te_ops._benchmarks"
"""What the suite is called, wherever it lies."""


def suite(part: str) -> Any:
    """A module of the suite: from `_benchmarks` in a wheel, or `benchmarks/suite` beside the package in a checkout.

    Raises:
        Error: neither is there.
    """
    package = Path(te_ops.__file__).resolve().parent
    folders = (package / "_benchmarks", package.parent / "benchmarks" / "suite")
    for folder in folders:
        if (folder / "__init__.py").is_file():
            _load(folder)
            return importlib.import_module(f"{NAME}.{part}")
    listed = " or ".join(map(str, folders))
    raise Error(f"the benchmark is missing: expected in {listed}; reinstall te_ops")


def _load(folder: Path) -> ModuleType:
    """The package in a folder, under `NAME`."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    spec = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="cases or presets; --list names them")
    add("--list", action="store_true", help="name cases, presets, recipes and peers, and stop")
    add("--recipe", action="append", default=[], help="only this recipe; may be repeated")
    add("--peers", help="comma-separated; te_ops is always there")
    add("--regime", choices=("sustained", "burst"), default="sustained")
    add("--budget", type=float, default=600.0, metavar="S", help="seconds for everything")
    add("--rounds", type=int, default=20, help="interleaved rounds a case")
    add("--tune", action="store_true", help="let te_ops choose its GEMMs by timing them first")
    add("--json", type=Path, metavar="F", help="write the results here, as they come")
    add("--plot", type=Path, metavar="F", help="draw the pipelines' times (PNG or SVG)")
    add("--device", help="cpu or cuda; default: cuda where there is one")


def run(options: argparse.Namespace) -> int:
    """Run the cases and print tables; 1 if a case failed or a result was wrong."""
    if options.list:
        print(_listing())
        return 0
    settings = _settings(options)
    runner, report = suite("run"), suite("report")
    results = runner.run(settings, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(report.text(results))
    if options.plot and not report.plot(results, options.plot):
        print("no plot: matplotlib is absent, or there is nothing to draw", file=sys.stderr)
    return int(_failed(results))


def _settings(options: argparse.Namespace) -> Any:
    """What the options ask for.

    Raises:
        Error: a name is none, or a number is not positive.
    """
    import torch

    data, runner = suite("data"), suite("run")
    if not options.cases:
        raise Error("name cases or a preset; te-ops bench --list shows them")
    try:
        runner.expand(options.cases)
    except KeyError as error:
        raise Error(f"{error} is no case and no preset; te-ops bench --list names them") from None
    for recipe in options.recipe:
        if recipe not in data.RECIPES:
            raise Error(f"--recipe {recipe}: choose from {', '.join(data.RECIPES)}")
    for name in ("budget", "rounds"):
        if not getattr(options, name) > 0:
            raise Error(f"--{name} must be positive, got {getattr(options, name)}")
    _places(options)
    named = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return runner.Settings(
        cases=tuple(options.cases),
        device=device_named(named),
        recipes=tuple(dict.fromkeys(options.recipe)) or data.NATIVE,
        peers=_peers(options.peers),
        regime=options.regime,
        budget=options.budget,
        rounds=options.rounds,
        json=options.json,
        tune=options.tune,
    )


def _places(options: argparse.Namespace) -> None:
    """Make the folders of what will be written: a benchmark must not fail at its end.

    Raises:
        Error: a path is a folder, its folder cannot be made, or the picture is no PNG or SVG.
    """
    if options.plot and options.plot.suffix not in (".png", ".svg"):
        raise Error(f"--plot {options.plot}: the name ends in .png or .svg")
    for name in ("json", "plot"):
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Error(f"--{name} {path}: {error}") from error
        if path.is_dir():
            raise Error(f"--{name} {path} is a folder; name a file")


def _peers(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(name for name in text.split(",") if name)
    known = {p.name for p in suite("peers").PROVIDERS} | set(suite("streams").PEERS)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Error(f"--peers {', '.join(unknown)}: choose from {', '.join(sorted(known))}")
    return ("te_ops", *names)


def _listing() -> str:
    names = ("attention", "data", "fused", "peers", "streams")
    attention, data, fused, peers, streams = (suite(n) for n in names)
    cases = [(c.name, f"{c.about}, {c.rows} rows") for c in data.CASES]
    cases += [(s.name, f"{s.about}, {s.rows} x {s.columns}") for s in data.STREAMS]
    cases += [(c.name, c.about) for c in (*fused.CASES, *attention.CASES)]
    presets = {**data.PRESETS, "fused": fused.CASES, "attention": attention.CASES}
    wide = max(len(name) for name in (*presets, *(name for name, _ in cases))) + 2
    lines = ["cases", *(f"  {name:<{wide}}{about}" for name, about in cases)]
    lines += ["presets", *(f"  {name:<{wide}}{len(held)} cases" for name, held in presets.items())]
    lines += ["recipes", "  " + ", ".join(data.RECIPES)]
    lines += ["providers of pipelines (* only when named)"]
    lines += ["  " + ", ".join(p.name + "*" * p.extra for p in peers.PROVIDERS)]
    lines += ["peers of memory-bound cases", "  " + ", ".join(streams.PEERS)]
    return "\n".join(lines)


def _failed(results: Any) -> bool:
    """Whether a case, or te_ops in one, failed; a peer's failure is the peer's."""
    entries = [
        found
        for table in ("pipelines", "streams", "fused", "attention")
        for found in results[table].values()
    ]
    arms = [
        found
        for entry in results["pipelines"].values()
        for name, found in entry.get("arms", {}).items()
        if name.startswith("te_ops")
    ]
    return any("failed" in x for x in (*entries, *arms))
