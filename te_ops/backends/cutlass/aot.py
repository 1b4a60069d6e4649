"""Compile GEMMs ahead of time, without a GPU: `python -m te_ops.backends.cutlass.aot --arch sm_90a --out DIR`.

A program finds them with `TE_OPS_AOT_DIR=DIR`, or without it where DIR is left out. What is there already is not
compiled again; kernels are those of known models (`--model`), or of specs in a file (`--spec`, as the .json files
beside compiled kernels hold them, or a list of such), and those of the self-test, without which none is used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from te_ops.backends.cutlass import cache, manifest, versions
from te_ops.backends.cutlass.family import FAMILIES
from te_ops.backends.cutlass.pool import Pool, workers
from te_ops.backends.cutlass.spec import GemmSpec
from te_ops.backends.cutlass.status import read
from te_ops.errors import Error, PlanError
from te_ops.runtime.disk import own_folder, put

INDEX = "manifest.json"
"""What lies in a folder, by architecture: name -> key."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 if every kernel is there."""
    try:
        options = _parser().parse_args(arguments)
        reason = versions.missing()
        specs = {arch: _specs(options, arch) for arch in options.arch}
        if options.list:
            return _list(specs, _folder(options, make=False))
        if reason is not None:
            raise PlanError(reason)
        return _compile(specs, _folder(options, make=True), options.processes)
    except Error as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m te_ops.backends.cutlass.aot", description=__doc__
    )
    parser.add_argument("--arch", nargs="+", default=["sm_90a"], choices=manifest.ARCHES)
    parser.add_argument("--out", type=Path, help="folder; by default te_ops' own for this user")
    parser.add_argument(
        "--model", nargs="+", default=list(manifest.MODELS), choices=manifest.MODELS
    )
    parser.add_argument("--spec", type=Path, help="a file with specs, instead of models")
    parser.add_argument("--all-tilings", action="store_true", help="all that te.tune tries")
    parser.add_argument(
        "--list", action="store_true", help="show them and what is there; compile nothing"
    )
    parser.add_argument("--processes", type=count, default=workers())
    return parser


def count(text: str) -> int:
    """A whole number from 1 on, of a command's arguments."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, got {text!r}")
    return int(text)


def _specs(options: argparse.Namespace, arch: str) -> dict[str, Any]:
    if options.spec is None:
        return manifest.rows(options.model, arch=arch, every=options.all_tilings)
    try:
        found = json.loads(options.spec.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"--spec {options.spec}: {error}") from error
    made = list(_listed(found))
    return {**manifest.rows((), arch=arch), **{_name(spec): spec for spec in made}}


def _name(spec: Any) -> str:
    return manifest.name_of(spec) if isinstance(spec, GemmSpec) else f"{spec.text} {spec.key[:8]}"


def _listed(found: Any) -> Iterator[Any]:
    """The specs of a file: as they are, or as they lie beside a compiled kernel."""
    for each in found if isinstance(found, list) else [found]:
        family, values = "gemm", each
        if isinstance(each, dict) and "spec" in each:
            family, values = each.get("family", family), each["spec"]
        if family not in FAMILIES:
            raise PlanError(
                f"a spec of the family {family!r}, of which there are {', '.join(FAMILIES)}"
            )
        yield FAMILIES[family].read(values)


def _folder(options: argparse.Namespace, *, make: bool) -> Path | None:
    if options.out is None:
        return own_folder("AOT_DIR", "aot", make=make)
    folder: Path = options.out
    try:
        if make:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"--out {folder}: {error.strerror}") from error
    return folder


def _list(specs: dict[str, dict[str, Any]], folder: Path | None) -> int:
    for arch, rows in specs.items():
        for name, spec in rows.items():
            there = folder is not None and cache.whole(folder, cache.key_of(spec, arch)) is not None
            print(f"{versions.target(arch)} {'compiled' if there else 'missing '} {name}")  # noqa: T201
    return 0


def _compile(specs: dict[str, dict[str, Any]], folder: Path | None, processes: int) -> int:
    if folder is None:
        raise PlanError("TE_OPS_AOT_DIR is off: name a folder by --out")
    failed = 0
    for arch, rows in specs.items():
        pool, began = Pool(arch, processes), time.monotonic()
        try:
            missing = _finish(arch, folder, compile_all(rows, arch, folder, pool))
        finally:
            pool.close()
        failed += missing
        took, made = time.monotonic() - began, len(rows) - missing
        said = f"{made}" if not missing else f"{made} of {len(rows)}"
        print(f"{said} kernels for {versions.target(arch)} in {folder}, {took:.0f} s")  # noqa: T201
    return int(failed > 0)


def compile_all(
    specs: dict[str, Any], arch: str, folder: Path, pool: Pool
) -> dict[str, tuple[Any, Future[Path]]]:
    """Start to compile what is not in the folder yet."""

    def start(spec: Any) -> Future[Path]:
        return pool.submit(lambda compiler: cache.make(spec, arch, folder, compiler))

    return {name: (spec, start(spec)) for name, spec in specs.items()}


def _finish(arch: str, folder: Path, started: dict[str, tuple[Any, Future[Path]]]) -> int:
    """Wait, write the index, and say which failed; how many."""
    keys: dict[str, str] = {}
    for name, (spec, future) in started.items():
        error = future.exception()
        if error is None:
            keys[name] = cache.key_of(spec, arch)
        else:
            print(f"{versions.target(arch)} {name}: {error}", file=sys.stderr)  # noqa: T201
    path = folder / INDEX
    known = read(path)
    known[versions.target(arch)] = {**known.get(versions.target(arch), {}), **keys}
    put(path, json.dumps(known, indent=1, sort_keys=True).encode())
    path.chmod(0o644)
    return len(started) - len(keys)


if __name__ == "__main__":
    sys.exit(main())
