"""Builds real plans for Hopper without a device, in a process of its own: python -m tests.backends.cudnn.builds FOLDER

The library's heuristics, support checks and run-time compilation need a description of the device and a driver library
to load; where there is no driver, a stub of it is made in FOLDER by `stub`. Prints one line of JSON per graph:
[name, plan or null, reason].
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from te_ops.backends.cudnn import graphs, library
from te_ops.backends.cudnn.gates import GATES
from te_ops.backends.cudnn.graphs import GraphSpec, Unsupported
from te_ops.backends.cudnn.specs import spec_of
from te_ops.basic.band import Band
from tests.backends.cudnn.problems import LENS, MASK, PAIRS, SEED, Case, with_slopes

H200 = {
    "deviceName": "NVIDIA H200", "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000, "isTccDriver": 0,
    "l2CacheSize": 62914560, "maxCtasPerSM": 32, "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
    "memClockRateKHz": 3201000, "multiProcessorCount": 132, "pciDeviceId": 0, "regsPerBlock": 65536,
    "reservedSharedMemoryPerBlock": 1024, "smClockRateKHz": 1980000, "supportCoopLaunch": 1,
    "totalGlobalMem": 150754820096, "warpSize": 32, "maxBlockSize": [1024, 1024, 64],
    "maxGridSize": [2147483647, 65535, 65535], "memoryBusWidth": 6144, "oversizedSharedMemoryPerBlock": 232448,
}  # fmt: skip
_MAKES = (
    "cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuModuleLoadData", "cuModuleLoadDataEx",
    "cuModuleGetFunction", "cuLibraryGetModule",
)  # fmt: skip
_TAKES = ("cuLibrary", "cuKernel", "cuFunc", "cuModule")


def stub(folder: Path, libraries: list[Path]) -> Path:
    """A driver library without a device: it loads modules, and answers "no device" (100) to everything else."""
    found: set[str] = set()
    for path in libraries:
        names = re.findall(rb"\bcu[A-Z][A-Za-z0-9_]{3,60}(?=\0)", path.read_bytes())
        found |= {name.decode() for name in names}
    lines = [
        "int cuInit(unsigned f) { return 100; }",
        "int cuDriverGetVersion(int *v) { *v = 13000; return 0; }",
    ]
    for name in sorted(found - {"cuInit", "cuDriverGetVersion"}):
        if name in _MAKES:
            lines.append(f"int {name}(void **p) {{ if (p) *p = (void *)16; return 0; }}")
        else:
            lines.append(
                f"int {name}(void *p) {{ return {0 if name.startswith(_TAKES) else 100}; }}"
            )
    source = folder / "driver.c"
    source.write_text("\n".join(lines))
    command = [
        "gcc",
        "-w",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(folder / "libcuda.so.1"),
    ]
    subprocess.run([*command, str(source)], check=True)
    return folder


BACK = {"backward": True}
CAUSAL = {"band": Band(right=0)}
_BIAS = (("bias", (1, 4, 256, 192), torch.bfloat16),)
TAKEN: dict[str, Case] = {
    "full": Case(), "causal": Case(attrs=CAUSAL), "fp16": Case(dtype=torch.float16, attrs=CAUSAL),
    "window": Case(attrs={"band": Band(31, 4)}), "only the diagonal": Case(attrs={"band": Band(0, 0)}),
    "last keys": Case(s=(100, 256), attrs={"band": Band(None, 0, "bottom_right")}),
    "lengths": Case(more=LENS, attrs=CAUSAL), "one query": Case(s=(1, 128)), "odd": Case(s=(77, 1000)),
    "bias": Case(s=(256, 192), more=_BIAS), "mask": Case(more=MASK),
    "mask of keys": Case(more=(("mask", (2, 1, 1, 256), torch.bool),)),
    "two head sizes": Case(d=(192, 128), h=(4, 4), attrs=CAUSAL),
    "dropout": Case(more=SEED, attrs={**CAUSAL, "dropout": 0.1}),
    "left padding": Case(more=(*LENS, ("q_starts", (2,), torch.int64), ("kv_starts", (2,), torch.int64)), attrs=CAUSAL),
}  # fmt: skip


FP8: dict[str, Case] = {
    "full": Case(), "causal": Case(attrs=CAUSAL), "window": Case(attrs={"band": Band(31, 4)}),
    "odd": Case(s=(77, 1000)),
    "lengths": Case(more=LENS, attrs=CAUSAL), "peaks": Case(writes=(0, 1, 2)), "few features": Case(d=(16, 16)),
    "two head sizes": Case(d=(192, 128), h=(4, 4), attrs=CAUSAL), "many features": Case(d=(256, 256)),
    "left padding": Case(more=(*LENS, ("q_starts", (2,), torch.int64), ("kv_starts", (2,), torch.int64)), attrs=CAUSAL),
}  # fmt: skip


def specs() -> dict[str, GraphSpec]:
    """Graphs that are taken, in both directions, then both sides of every gate that speaks for the library."""
    made: dict[str, GraphSpec] = {}
    for name, case in TAKEN.items():
        made[f"taken {name}"] = _spec(case)
        made[f"taken {name} backward"] = _spec(replace(case, **BACK))
    for name, case in FP8.items():
        made[f"taken fp8 {name}"] = _spec(replace(case, fp8=True))
    made["taken peaks"] = _spec(Case(writes=(0, 1, 2)))
    made["taken deterministic"] = replace(_spec(Case(**BACK)), deterministic=True)
    for side, pick in (("refused", 0), ("taken", 1)):
        for gate in GATES:
            if gate.library and gate.name in PAIRS:
                made[f"{side} {gate.name}"] = _spec(PAIRS[gate.name][pick])
    for side, band in (("refused", Band()), ("taken", Band(right=0))):
        problem = with_slopes(4, band=band)
        made[f"{side} slopes band"] = spec_of(problem, Case().operands())
    return made


def _spec(case: Case) -> GraphSpec:
    return spec_of(case.problem(), case.operands())


def main() -> None:
    """Build all."""
    lib = library.library()
    device: Any = lib.create_device_properties(json.dumps(H200))
    library.entered = lambda index: contextlib.nullcontext()
    for name, spec in specs().items():
        found: tuple[str, str | None, str] = (name, None, "")
        try:
            graph, uids = graphs.planned(0, spec, device_property=device, sm_version=90)
            built = graphs._built(0, spec, graph, uids, None)
            found = (
                name,
                built.name,
                "" if built.raw is not None else "the direct call does not fit",
            )
        except Unsupported as why:
            found = (name, None, str(why))
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
