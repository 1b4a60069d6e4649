"""Compile the fused GEMMs of the manifest, without a GPU, and look at the machine code: tensor cores used, no spills.

    python -m scripts.cutlass_report [--arch sm_90a sm_100a] [--model NAME ...] [--only TEXT] [--all-tilings]
                                     [--processes 2] [--out FILE.md]

Exits with 1 if a kernel does not compile, does without its tensor-core instruction, or touches local memory (what the
registers do not hold lies there), and with 2 if the compiler is not installed. Objects are those of the cache
(`TE_OPS_CUTLASS_CACHE`): what is compiled already, in this version and of this text, is only read.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from scripts.kernel_report import resources
from te_ops.backends.cutlass import cache, gemm, manifest, versions
from te_ops.backends.cutlass.aot import compile_all, count
from te_ops.backends.cutlass.pool import Pool
from te_ops.backends.cutlass.spec import GemmSpec
from te_ops.errors import Error, PlanError

TENSOR = {
    "sm_90a": {16: "HGMMA", 8: "QGMMA"},
    "sm_100a": {16: "UTCHMMA", 8: "UTCQMMA", 4: "UTCOMMA"},
}
"""The instruction of products, by the bits of an element."""
BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4}
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE
)


@dataclass(frozen=True)
class Report:
    """One kernel for one architecture; `failed`: why there is no machine code."""

    name: str
    arch: str
    registers: int = 0
    stack: int = 0
    tensor: int = 0
    local: int = 0
    code: int = 0
    failed: str = ""

    @property
    def wrong(self) -> str:
        """What is wrong with it; empty if nothing is."""
        if self.failed:
            return self.failed
        if not self.tensor:
            return "no tensor-core instruction"
        if self.local or self.stack:
            return f"{self.local} accesses to local memory, {self.stack} bytes of stack frame"
        return ""


def disassembler() -> str:
    """The path of nvdisasm: on the path, or in the package that brings it.

    Raises:
        PlanError: it is nowhere.
    """
    package = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = shutil.which("nvdisasm") or next(map(str, package.glob("*/bin/nvdisasm")), None)
    if found is None:
        raise PlanError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    return found


_SCALED = re.compile(r"\s(UTC[QO]MMA)\b[^\n]* idesc\[\w+\], tmem\[")
"""A product that reads scales of blocks, which lie in the tensor cores' memory."""


def listing(code: bytes) -> str:
    """The text of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run(
            [disassembler(), "-c", file.name],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
    if done.returncode:
        raise PlanError(f"nvdisasm fails: {done.stderr.strip()}")
    return done.stdout


def examine(name: str, spec: GemmSpec, arch: str, data: bytes) -> Report:
    """What an object holds."""
    target = versions.target(arch)
    code = gemm.device_code(data)
    registers, stack, _ = resources(code)
    text = listing(code)
    found = _INSTRUCTION.findall(text)
    wanted = TENSOR[target][BITS.get(spec.a, 16)]
    return Report(
        name,
        target,
        registers,
        stack,
        sum(each == wanted for each in (_SCALED.findall(text) if spec.blocks else found)),
        sum(each in ("STL", "LDL") for each in found),
        len(code),
    )


def report(name: str, spec: GemmSpec, arch: str, made: Future[Path]) -> Report:
    """What became of a kernel that was started to compile."""
    try:
        return examine(name, spec, arch, made.result().read_bytes())
    except Error as error:
        return Report(name, versions.target(arch), failed=str(error))


def collect(options: argparse.Namespace) -> Iterator[Report]:
    """Reports of the kernels that the options name, as they come."""
    folder = cache.cache_folder()
    with tempfile.TemporaryDirectory() as scratch:
        for arch in options.arch:
            rows = manifest.rows(options.model, arch=arch, every=options.all_tilings)
            rows = {name: spec for name, spec in rows.items() if options.only in name}
            pool = Pool(arch, options.processes)
            try:
                started = compile_all(rows, arch, folder or Path(scratch), pool)
                for name, (spec, made) in started.items():
                    yield report(name, spec, arch, made)
            finally:
                pool.close()


def markdown(reports: list[Report]) -> str:
    """A row a kernel."""
    lines = ["| kernel | arch | registers | tensor-core instructions | local memory | code bytes |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for r in reports:
        figures = (r.registers, r.tensor, r.local, r.code)
        lines.append(f"| {r.name} | {r.arch} | " + " | ".join(map(str, figures)) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", nargs="+", default=list(manifest.ARCHES), choices=manifest.ARCHES)
    parser.add_argument(
        "--model", nargs="+", default=list(manifest.MODELS), choices=manifest.MODELS
    )
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    parser.add_argument("--all-tilings", action="store_true", help="all that te.tune tries")
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument("--out", type=Path, help="the table as Markdown")
    options = parser.parse_args()
    reason = versions.missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    reports = []
    for each in collect(options):
        reports.append(each)
        print(
            f"{each.arch} {each.registers} registers, {each.wrong or 'as it should be'}: {each.name}",
            flush=True,
        )
    bad = sum(bool(r.wrong) for r in reports)
    print(f"{len(reports)} kernels, {bad} not as they should be")
    if options.out:
        options.out.write_text(markdown(reports))
    return int(bool(bad) or not reports)


if __name__ == "__main__":
    sys.exit(main())
