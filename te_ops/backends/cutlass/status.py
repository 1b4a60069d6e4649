"""What there is of fused GEMMs on this machine, for `te-ops info`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from te_ops.backends.cutlass import cache, choices, pool, runtime, versions
from te_ops.backends.cutlass.family import FAMILIES
from te_ops.errors import Error


def collect() -> dict[str, Any]:
    """As plain data: what is missing, versions, the settings, the folder made ahead of time, self-tests."""
    found: dict[str, Any] = {"missing": versions.missing(), "versions": versions.versions()}
    try:
        found["jit"] = runtime.mode()
        found["choice"], found["workers"] = choices.mode(), pool.workers()
        found["ahead of time"] = _ahead()
        found["self-tests"] = _tests(cache.cache_folder(make=False))
    except Error as error:
        found["wrong"] = str(error)
    return found


def _ahead() -> dict[str, Any] | None:
    """The folder made ahead of time: how many kernels lie there, and how many of them are of these versions."""
    folder = cache.aot_folder()
    if folder is None:
        return None
    known = [read(path) for path in sorted(folder.glob("*.json"))]
    kernels = [info for info in known if "digest" in info]
    mine = [info for info in kernels if _current(info)]
    return {"folder": str(folder), "kernels": len(kernels), "of this version": len(mine)}


def _current(info: dict[str, Any]) -> bool:
    """Whether a kernel is one that this version would make."""
    family = info.get("family", "gemm")
    if family not in FAMILIES:
        return False
    now = (versions.versions(FAMILIES[family].packages), cache.source_hash(family))
    return (info.get("versions"), info.get("source")) == now


def _tests(folder: Path | None) -> list[dict[str, Any]]:
    """Verdicts on the disk for these versions."""
    paths = [] if folder is None else sorted(folder.glob("selftest-*.json"))
    found = [read(path) for path in paths]
    return [said for said in found if said.get("versions") == versions.versions()]


def read(path: Path) -> dict[str, Any]:
    """An object of a file; empty if it is damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def lines(found: dict[str, Any]) -> list[str]:
    """The same as text."""
    listed = ", ".join(
        f"{name} {version or 'missing'}" for name, version in found["versions"].items()
    )
    made = [f"Fused GEMMs: {found['missing'] or 'can be compiled here'} ({listed})"]
    if "wrong" in found:
        return [*made, f"  not used: {found['wrong']}"]
    ahead = found["ahead of time"]
    where = (
        "none"
        if ahead is None
        else f"{ahead['folder']}, {ahead['kernels']} kernels, {ahead['of this version']} of this version"
    )
    made.append(
        f"  TE_OPS_CUTLASS {found['choice']}, TE_OPS_JIT {found['jit']} in {found['workers']} processes, "
        f"compiled ahead of time: {where}"
    )
    for said in found["self-tests"]:
        verdict = "passed" if said["passed"] else said["why"]
        made.append(f"  self-test on {said['device']} ({said['arch']}): {verdict}")
    return made
