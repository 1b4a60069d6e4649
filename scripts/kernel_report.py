"""Compile every CUDA kernel for every architecture, without a GPU: registers, stack, spills, shared memory.

    python scripts/kernel_report.py [--arch sm_90 ...] [--only TEXT] [--out FILE.md] [--json FILE] [--processes 2]
                                     [--no-cache]

The kernels are those that the plans of the benchmark's pipelines ask for, and those of every test case at a width that
training has. What NVRTC's assembler says is read from its log; registers, stack frame and shared memory also from the
machine code, so that a compiler that says nothing hides nothing: without a stack frame there are no spills. Exits with
1 if a kernel does not compile or has a stack frame, or if no name holds `--only`. Results are cached beside the
kernels (`TE_OPS_CUDA_CACHE`), by text and version.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import te_ops as te
from te_ops.backends.cublas import lt
from te_ops.backends.cuda import KERNELS, around, gemm_block, launch, state, swizzle
from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda.source import CTYPES
from te_ops.errors import PlanError
from te_ops.registry import REGISTRY
from te_ops.runtime import cache

ROOT = Path(__file__).resolve().parents[1]
ARCHES = ("sm_80", "sm_90", "sm_100")
WIDTH = 4096


@dataclass(frozen=True)
class Report:
    """One kernel for one architecture; bytes, and 32-bit registers a thread.

    `spilled`: bytes of spill stores and loads, None if the compiler's log says nothing about it. `failed`: why there is
    no machine code. `instance`: what the kernel calls, with its template arguments.
    """

    kernel: str
    arch: str
    registers: int = 0
    stack: int = 0
    spilled: int | None = None
    shared: int = 0
    failed: str = ""
    instance: str = ""

    @property
    def wrong(self) -> str:
        """What is wrong with it: not compiled, spills, a stack frame; empty if nothing is."""
        if self.failed:
            return self.failed
        if self.stack or self.spilled:
            return f"{self.stack} bytes of stack frame, {self.spilled} bytes spilled"
        return ""


# -- what there is to compile


def instances(arch: str) -> dict[str, str]:
    """text -> name of every kernel to compile for `arch` ("sm_90")."""
    found: dict[str, str] = {}
    _add_plans(arch, found)
    _add_cases(arch, found)
    _add_alone(arch, found)
    return found


@contextlib.contextmanager
def _noting(found: dict[str, str]) -> Iterator[None]:
    """Within, kernels are noted instead of compiled."""

    def note(name: str, text: str, arch: str, *_: Any, **__: Any) -> Any:
        found.setdefault(text, name)
        return lambda *_: None

    saved, launch.build = launch.build, note
    try:
        yield
    finally:
        launch.build = saved


def _add_plans(arch: str, found: dict[str, str]) -> None:
    """Those of the plans of every pipeline of the benchmark under every recipe."""
    data, peers = (importlib.import_module(f"benchmarks.suite.{m}") for m in ("data", "peers"))
    streams = importlib.import_module("benchmarks.suite.streams")
    here = [dataclasses.replace(k, available=lambda: None) for k in KERNELS]
    saved = cache.arch_of
    setattr(cache, "arch_of", lambda device: arch)  # noqa: B010  (mypy knows it as a function)
    try:
        with _noting(found), REGISTRY.without("cublas."), REGISTRY.temporary(*here):
            for case in data.CASES:
                for recipe in data.RECIPES:
                    model = te.Sequential(*peers.modules(case.layers, torch.device("meta")))
                    _plan(model, peers.te_recipe(recipe), ((*case.shape, case.width),))
            for stream in data.STREAMS:
                model, shapes = streams.pipeline(stream, torch.device("meta"))
                _plan(model, streams.recipe_of(stream), shapes)
    finally:
        setattr(cache, "arch_of", saved)  # noqa: B010


def _plan(model: te.Op, recipe: te.Recipe | None, shapes: Sequence[tuple[int, ...]]) -> None:
    """A plan without any data."""
    xs = [torch.empty(s, device="meta", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        model.plan(*xs)


def _add_cases(arch: str, found: dict[str, str]) -> None:
    """Those of every test case that the kernels do not refuse there."""
    cases = importlib.import_module("tests.backends.cuda.cases")
    every = importlib.import_module("tests.backends.cuda.every")
    with _noting(found):
        for case in every.every_case():
            every.bound(case, cases.drawer(0, "cpu"), (2, WIDTH), arch, "cpu")


def _add_alone(arch: str, found: dict[str, str]) -> None:
    """Those that no node asks for: beside products, recorded graphs and commits, and products of block scales."""
    found.setdefault(swizzle.text(), "swizzle")
    found |= {around.text_of(size): "copy_several" for size in around.SIZES}
    found |= {state.text_of(*sizes): "update_state" for sizes in state.SIZES}
    if arch != gemm_block.ARCH:
        return
    with _noting(found):
        for scales, d, add in itertools.product(gemm_block.SCALES, CTYPES, (False, True)):
            e4m3 = torch.float8_e4m3fn
            gemm_block.kernel_of(
                lt.Product(WIDTH, WIDTH, WIDTH, e4m3, e4m3, d, scales=scales, accumulate=add), arch
            )


# -- what the compiler made of it


RESERVED = 1024
"""Bytes of shared memory that the system has in every block from sm_90 on."""
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def examine(job: tuple[str, str, str]) -> Report:
    """Compile (name, text, arch) and read the report."""
    name, text, arch = job
    try:
        made = compiler.compile_text(text, arch, options=("--ptxas-options=-v",))
    except PlanError as error:
        return Report(
            name, compiler.target(arch), failed=first_error(str(error)), instance=instance_of(text)
        )
    found = _SPILLS.search(made.log)
    registers, stack, shared = resources(made.code)
    if shared and int(arch.removeprefix("sm_")) >= 90:
        shared -= RESERVED
    spilled = None
    if found is not None:
        stack = max(stack, int(found.group(1)))
        spilled = int(found.group(2)) + int(found.group(3))
    return Report(
        name, compiler.target(arch), registers, stack, spilled, shared, instance=instance_of(text)
    )


def instance_of(text: str) -> str:
    """The call that a kernel's text makes."""
    calls = [line.strip() for line in text.splitlines() if line.strip().startswith("te::")]
    return calls[-1].rstrip(";") if calls else ""


def first_error(message: str) -> str:
    """The line of a compiler's log that says what is wrong."""
    lines = message.splitlines()
    return next((line for line in lines if "error:" in line), lines[0])


_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of .nv.info
_SIZED = 4  # an attribute whose payload follows its size


def resources(code: bytes) -> tuple[int, int, int]:
    """(registers a thread, bytes of stack frame, bytes of static shared memory) of the only kernel in machine code.

    Raises:
        ValueError: this is no 64-bit ELF file, or it does not say.
    """
    registers, stack, shared = 0, 0, 0
    for name, size, data in _sections(code):
        if name == ".nv.info":
            for attribute, payload in _attributes(data):
                if attribute == _REGISTERS:
                    registers = max(registers, struct.unpack("<II", payload)[1])
                elif attribute == _FRAME:
                    stack = max(stack, struct.unpack("<II", payload)[1])
        elif name.startswith(".nv.shared.") and not name.startswith(".nv.shared.reserved"):
            shared += size
    if not registers:
        raise ValueError("the machine code says nothing about registers")
    return registers, stack, shared


_EMPTY = 8  # a section without bytes in the file


def _sections(code: bytes) -> Iterator[tuple[str, int, bytes]]:
    """(name, size, bytes) of every section of a 64-bit ELF file."""
    if code[:5] != b"\x7fELF\x02":
        raise ValueError("this is no 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", code, 0x28)
    step, count, names = struct.unpack_from("<HHH", code, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", code, start + i * step) for i in range(count)]
    strings = heads[names][4]
    for label, kind, _, _, offset, size in heads:
        begin = strings + label
        name = code[begin : code.index(b"\0", begin)].decode()
        yield name, size, b"" if kind == _EMPTY else code[offset : offset + size]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield attribute, data[at : at + size]
            at += size


def collect(
    arches: Sequence[str], processes: int, use_cache: bool = True, only: str = ""
) -> list[Report]:
    """Reports of every kernel for these architectures whose name holds `only`, in order of name; cached ones are not
    compiled again."""
    jobs = {
        (compiler.cache_key(text, arch), arch, name): (name, text, arch)
        for arch in arches
        for text, name in instances(arch).items()
        if only in name
    }
    known = _load() if use_cache else {}
    todo = [(key, job) for (key, _, _), job in jobs.items() if key not in known]
    if todo:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["te_ops.backends.cuda.compile"])
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            made = pool.map(examine, [job for _, job in todo], chunksize=4)
            known |= {key: asdict(r) for (key, _), r in zip(todo, made, strict=True)}
        if use_cache:
            _store({key: r for key, r in known.items() if not r["failed"]})
    reports = [Report(**known[key]) for key, _, _ in jobs]
    return sorted(reports, key=lambda r: (r.kernel, r.registers, r.arch))


def _file() -> Path | None:
    folder = compiler.cache_folder()
    return None if folder is None else folder / "reports.json"


def _load() -> dict[str, Any]:
    path = _file()
    try:
        found: dict[str, Any] = {} if path is None else json.loads(path.read_text())
        return found
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _store(known: dict[str, Any]) -> None:
    path = _file()
    if path is not None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(known))
        part.replace(path)


# -- the table


def markdown(reports: Sequence[Report]) -> str:
    """A row for each kernel: how many instances, and the range of each figure by architecture."""
    arches = sorted({r.arch for r in reports}, key=lambda a: int(a.strip("sm_af")))
    head = ["kernel", "instances", *(f"registers {a.removeprefix('sm_')}" for a in arches),
            "shared bytes", "stack", "spilled"]  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for name in sorted({r.kernel for r in reports}):
        own = [r for r in reports if r.kernel == name]
        counts = {sum(r.arch == a for r in own) for a in arches}
        spilled = [r.spilled for r in own if r.spilled is not None]
        rows.append(
            [
                name,
                _range(counts),
                *(_range(r.registers for r in own if r.arch == a) for a in arches),
                _range(r.shared for r in own),
                _range(r.stack for r in own),
                _range(spilled) if spilled else "not told",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _range(numbers: Any) -> str:
    found = sorted(set(numbers))
    if not found:
        return ""
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=list(ARCHES))
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    parser.add_argument("--out", type=Path, help="the table as Markdown")
    parser.add_argument("--json", type=Path, help="every kernel")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-cache", action="store_true", help="compile everything again")
    options = parser.parse_args()
    reason = compiler.missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    reports = collect(options.arch, options.processes, not options.no_cache, options.only)
    table = markdown(reports)
    version = ".".join(map(str, compiler.nvrtc_version()))
    bad = [r for r in reports if r.wrong]
    print(f"{table}\n{len(reports)} kernels by NVRTC {version}, {len(bad)} not as they should be")
    for r in bad:
        print(f"  {r.kernel} for {r.arch}: {r.wrong}\n    {r.instance}")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in reports], indent=1) + "\n")
    if options.out:
        options.out.write_text(table)
    return int(bool(bad) or not reports)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
