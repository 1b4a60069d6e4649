"""te-ops info: versions, devices, backends, rules and kernels, why some are not available, and what lies in caches."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import sys
import warnings
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import te_ops
from te_ops import config, registry
from te_ops.backends.cublas.choices import shipped
from te_ops.backends.cutlass import status
from te_ops.errors import Error
from te_ops.registry import REGISTRY, Kernel, Rule
from te_ops.runtime.cache import arch_of
from te_ops.runtime.disk import own_folder

# What each backend needs to be importable. They are imported here and nowhere before.
BACKENDS: dict[str, tuple[str, ...]] = {
    "reference": (),
    "cublas": ("nvmath.bindings",),  # without it, through torch
    "cuda": ("cuda.bindings",),
    "cutlass": ("cutlass", "quack"),
    "cudnn": ("cudnn",),
    "flash": ("flash_attn",),
}

CACHES = {
    "compiled kernels": ("CUDA_CACHE", "cuda", "*.cubin"),
    "fused GEMMs": ("CUTLASS_CACHE", "cutlass", "*.o"),
    "tuned products": ("TUNE_CACHE", "tune", "*.json"),
    "attention plans": ("PLAN_CACHE", "plans", "*.plan"),
}
"""The variable that names a folder, its default in the user's cache, and the files in it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(options: argparse.Namespace) -> int:
    """Print what is here."""
    found = collect()
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    return 0


def collect() -> dict[str, Any]:
    """Everything that the command shows, as plain data."""
    devices = _devices()
    REGISTRY.prepare()  # also what waits for a device that is not here: the table says why
    return {
        "versions": {
            "te_ops": te_ops.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": sys.version.split()[0],
        },
        "threads": torch.get_num_threads(),
        "devices": devices,
        "backends": {name: _backend(name, modules) for name, modules in BACKENDS.items()},
        "rules": [_rule(r) for r in REGISTRY.all() if isinstance(r, Rule)],
        "kernels": [
            _kernel(k, [d["arch"] for d in devices])
            for k in REGISTRY.all()
            if isinstance(k, Kernel)
        ],
        "caches": {name: _cache(*where) for name, where in CACHES.items()},
        "fused GEMMs": status.collect(),
        "measured": {place: len(found) for place, found in shipped().items()},
        "plugins": dict(registry.PLUGINS),
        "variables": config.variables(),
        "unknown variables": config.unknown(),
    }


def _devices() -> list[dict[str, str]]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [{"device": str(d), "name": _device_name(d), "arch": arch_of(d)} for d in devices]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _backend(name: str, modules: tuple[str, ...]) -> dict[str, Any]:
    """Whether the backend is part of this te_ops, and what its libraries say."""
    part = importlib.util.find_spec(f"te_ops.backends.{name}") is not None
    return {
        "included": part,
        "kernels": sum(k.name.split(".")[0] == name for k in _kernels()),
        "libraries": {module: _importable(module) for module in modules},
    }


def _kernels() -> list[Kernel]:
    return [k for k in REGISTRY.all() if isinstance(k, Kernel)]


def _importable(module: str) -> str | None:
    """None, or why the module cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        return "not installed" if module.startswith(missing) else f"{missing} is missing"
    except Exception as error:  # noqa: BLE001  (a vendor's library may raise anything)
        return f"{type(error).__name__}: {error}"
    return None


def _rule(rule: Rule) -> dict[str, Any]:
    return {"name": rule.name, "stage": rule.stage, "chain": list(rule.chain)}


def _kernel(kernel: Kernel, archs: list[str]) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "runs": kernel.runs,
        "arch": kernel.arch.text,
        "priority": kernel.priority,
        "refused": {arch: kernel.arch.refuse(arch) or kernel.available() for arch in archs},
    }


def _cache(variable: str, name: str, pattern: str) -> dict[str, Any]:
    """The folder (None: off, or not made yet), what lies in it, and why it is not used."""
    found: dict[str, Any] = {"variable": f"TE_OPS_{variable}", "folder": None, "refused": None}
    try:
        folder = own_folder(variable, name, make=False)
    except Error as error:
        folder, found["refused"] = None, str(error)
    files = [] if folder is None else list(folder.glob(pattern))
    found["folder"] = None if folder is None else str(folder)
    return found | {"files": len(files), "bytes": sum(f.stat().st_size for f in files)}


# -- as text


def _show(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items() if v)
    console.print(f"{versions}, {found['threads']} threads")
    for d in found["devices"]:
        console.print(f"  {d['device']}: {d['name']} ({d['arch']})")
    console.print(_backend_table(found["backends"]))
    console.print(_kernel_table(found["kernels"]))
    rules = Table("rule", "stage", "chain", title="Rules", title_justify="left")
    for rule in found["rules"]:
        rules.add_row(rule["name"], rule["stage"], " ".join(rule["chain"]))
    console.print(rules)
    for name, c in found["caches"].items():
        console.print(f"Cache of {name} ({c['variable']}): {_where(c)}")
    for line in status.lines(found["fused GEMMs"]):
        console.print(line)
    measured = ", ".join(f"{place}: {n} products" for place, n in found["measured"].items())
    console.print(f"Measured algorithms in the package: {measured or 'none'}")
    for title, items in (("Plugins", found["plugins"]), ("Variables", found["variables"])):
        shown = ", ".join(f"{k}: {v or 'loaded'}" for k, v in items.items())
        console.print(f"{title}: {shown or 'none'}")
    if found["unknown variables"]:
        console.print(f"  not read by this version: {', '.join(found['unknown variables'])}")


def _where(cache: dict[str, Any]) -> str:
    if cache["folder"] is None:
        return cache["refused"] or "none, or off"
    return f"{cache['folder']}, {cache['files']} files, {cache['bytes'] / 2**20:.1f} MiB"


def _backend_table(backends: dict[str, Any]) -> Table:
    table = Table("backend", "kernels", "libraries", title="Backends", title_justify="left")
    for name, b in backends.items():
        libraries = ", ".join(f"{m}: {why or 'yes'}" for m, why in b["libraries"].items())
        count = str(b["kernels"]) if b["included"] else "not in this te_ops"
        table.add_row(name, count, libraries or "none needed")
    return table


def _kernel_table(kernels: list[dict[str, Any]]) -> Table:
    table = Table("kernel", "runs", "available here", title="Kernels", title_justify="left")
    for k in sorted(kernels, key=lambda k: (k["runs"], -k["priority"])):
        reasons = {arch: why for arch, why in k["refused"].items() if why}
        shown = "; ".join(dict.fromkeys(reasons.values())) if reasons else "yes"
        if reasons and len(reasons) < len(k["refused"]):
            shown = "on " + ", ".join(a for a in k["refused"] if a not in reasons)
        table.add_row(k["name"], k["runs"], shown)
    return table
