"""Run every CUDA kernel at odd shapes under compute-sanitizer: memcheck and racecheck.

    python scripts/sanitize.py [--tool memcheck racecheck synccheck] [--only TEXT] [--part 0/4] [--seconds 300]

Each case of tests/backends/cuda is launched once at each odd shape, in a process of its own under the tool, which looks
at the kernels of te_ops alone. Exits with 1 if an error was found, with 3 if nothing could be checked: the tool is not
on this machine, or it cannot watch this device; the last line says which.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck")
NOT_CHECKED = 3
PLACES = (
    "/usr/local/cuda/bin/compute-sanitizer",
    "/opt/nvidia/compute-sanitizer/compute-sanitizer",
)
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_REFUSED = ("Device not supported", "Unable to find injection", "not compatible with")


def sanitizer() -> str | None:
    """The tool's path, None if it is not on this machine."""
    return shutil.which("compute-sanitizer") or next((p for p in PLACES if Path(p).exists()), None)


def launch_all(only: str, part: str, seconds: float) -> int:
    """Launch each once; what the watched process does."""
    import torch

    drawer = importlib.import_module("tests.backends.cuda.cases").drawer
    every = importlib.import_module("tests.backends.cuda.every")
    index, count = (int(x) for x in part.split("/"))
    pairs = [(case, shape) for case, shape in every.every_pair() if only in case.name]
    device = torch.device("cuda", torch.cuda.current_device())
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    end, done, left = time.monotonic() + seconds, 0, 0
    for seed, (case, shape) in enumerate(pairs[index::count]):
        if time.monotonic() > end:
            left += 1
        else:
            done += every.bound(case, drawer(seed, device), shape, arch, device)
    print(f"launched {done} groups" + (f", out of time for {left}" if left else ""))
    return int(not done)


def watch(tool: str, options: argparse.Namespace) -> tuple[int, str]:
    """(exit status, what to say) of one tool."""
    path = sanitizer()
    if path is None:
        return NOT_CHECKED, f"{tool}: not checked, compute-sanitizer is not on this machine"
    command = [path, "--tool", tool, "--kernel-regex", "kns=te_ops_kernel", "--error-exitcode", "9",
               # The bindings ask the driver for functions that an older one lacks: no fault of a kernel.
               "--report-api-errors", "no",
               sys.executable, __file__, "--launch", "--only", options.only, "--part", options.part,
               "--seconds", str(options.seconds)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    said = done.stdout + done.stderr
    if any(text in said for text in _REFUSED):
        return NOT_CHECKED, f"{tool}: not checked, it cannot watch this device"
    found = _SUMMARY.search(said)
    count = re.search(r"launched \d+ groups.*", said)
    if found is None or count is None:
        return 1, f"{tool}: no summary, exit status {done.returncode}\n{said[-4000:]}"
    if found.group(1) == "0" and not done.returncode:
        return 0, f"{tool}: clean, {count.group()}"
    return 1, f"{tool}: {found.group(1)} errors, {count.group()}\n{said[:8000]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", nargs="+", default=list(TOOLS))
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th from the i-th on")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each tool")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        return launch_all(options.only, options.part, options.seconds)
    statuses = []
    for tool in options.tool:
        status, text = watch(tool, options)
        statuses.append(status)
        print(text, flush=True)
    return 1 if 1 in statuses else max(statuses)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
