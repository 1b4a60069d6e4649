"""Plans by their exact graph: built once under a lock, refusals remembered, choices measured by `te.tune`."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from te_ops.backends.cudnn import blobs, graphs, library
from te_ops.backends.cudnn.graphs import GraphSpec, Unsupported
from te_ops.backends.cudnn.library import Built
from te_ops.errors import PlanError
from te_ops.runtime.tune import GAIN, TABLE

WORKSPACE = 1 << 30
PART = 0.05
"""A plan may use that many bytes, or that part of the device's memory if it is more."""

_KNOWN: dict[tuple[int, GraphSpec], Built | Unsupported] = {}
_LOCK = threading.Lock()


@functools.cache
def place(index: int) -> str:
    """What measurements are valid for."""
    return f"{device_name(index)}, cuDNN {library.version()}"


def device_name(index: int) -> str:
    """ "NVIDIA H200" and the like."""
    return torch.cuda.get_device_name(index)


def device_of(index: int) -> torch.device:
    """The device of this number."""
    return torch.device("cuda", index)


@functools.cache
def limit(index: int) -> int:
    """Bytes of workspace that a plan may use on a device."""
    return max(WORKSPACE, int(PART * torch.cuda.get_device_properties(index).total_memory))


def plan(index: int, spec: GraphSpec) -> Built | None:
    """The plan of a spec; None where the library has none that fits, which is warned of once.

    Raises:
        PlanError: it is not built yet, and the stream is being captured.
    """
    found = _KNOWN.get((index, spec))
    if found is None:
        with _LOCK:
            found = _KNOWN.get((index, spec)) or _made(index, spec)
    return found if isinstance(found, Built) else None


def _made(index: int, spec: GraphSpec) -> Built | Unsupported:
    if library.capturing():
        raise PlanError(
            f"attention has no plan yet for {spec.text}, and none can be built while a CUDA graph is captured; "
            "run the same shapes once before the capture"
        )
    found: Built | Unsupported
    try:
        found = _stored_or_built(index, spec)
        if found.workspace > limit(index):
            text = f"{found.workspace >> 20} MiB of workspace are more than {limit(index) >> 20}"
            found = Unsupported(f"cuDNN's plan for {spec.text} is not used: {text}")
    except Unsupported as why:
        found = Unsupported(str(why))  # without the frames that it passed, and the graph in them
    if isinstance(found, Unsupported):
        warnings.warn(
            f"{found}; another kernel or the reference runs", RuntimeWarning, stacklevel=2
        )
    _KNOWN[index, spec] = found
    return found


def _stored_or_built(index: int, spec: GraphSpec) -> Built:
    choice = TABLE.get(place(index), spec.text)
    key = blobs.key_of(spec, place(index), choice)
    with library.entered(index):
        found = blobs.load(key, index)
        if found is None:
            found = graphs.build(index, spec, choice)
            blobs.save(key, found)
    return found


def forget() -> None:
    """Drop all plans and workspaces; those of launches that were prepared live on with them."""
    with _LOCK:
        _KNOWN.clear()
    library.release()


class Trial:
    """A graph with its plans, over operands made up for it (see `te_ops.runtime.tune.Trial`).

    Where sequences have lengths, all are full.
    """

    gain = GAIN

    def __init__(self, index: int, spec: GraphSpec) -> None:
        self.index, self.spec = index, spec
        self.where, self.key = place(index), spec.text
        self.device = device_of(index)

    def candidates(self) -> list[str]:
        """Names of the library's plans, its favourite first."""
        graph, _ = graphs.planned(self.index, self.spec)
        return list(dict.fromkeys(graphs.names(graph)))

    def start(self) -> Callable[[str], Callable[[], None]]:
        """Allocate operands; gives a run for each candidate."""
        operands = made_up(self.spec, self.device)

        def run(name: str) -> Callable[[], None]:
            built = graphs.build(self.index, self.spec, name)
            if built.name != name:
                raise Unsupported(f"cuDNN does not build {name} for {self.spec.text}")
            space = torch.empty(max(built.workspace, 1), dtype=torch.uint8, device=self.device)
            words = [operands[operand].data_ptr() for operand in built.operands]

            def once() -> None:
                assert operands  # they live as long as the run
                built.run([*words, space.data_ptr()], library.stream_of(self.index))

            return once

        return run


def made_up(spec: GraphSpec, device: torch.device) -> dict[str, torch.Tensor]:
    """Memory for every operand that a graph may have, with numbers that are safe to run on."""
    made: dict[str, Any] = {}
    for name, strides in spec.strides:
        dims = (
            1 if spec.ragged else spec.b,  # ragged sequences share the rows of the longest
            max(spec.h_q, spec.h_kv),
            max(spec.s_q, spec.s_kv),
            max(spec.d_qk, spec.d_v),
        )
        count = 1 + sum((n - 1) * s for n, s in zip(dims, strides, strict=True))
        if name == "stats":
            for statistic in ("stats", "peak", "total"):
                made[statistic] = torch.full((count,), 8.0, device=device)
        else:
            made[name] = torch.randn(count, dtype=spec.dtype, device=device)
    if spec.bias is not None:
        for name in ("bias", "dbias"):
            made[name] = torch.zeros(spec.bias, dtype=spec.bias_dtype, device=device)
    steps = torch.arange(spec.b + 1, device=device)
    for side, size in (("q", spec.s_q), ("kv", spec.s_kv)):
        rows = size // spec.b if spec.ragged else size
        made[f"{side}_lens"] = torch.full((spec.b,), rows, dtype=torch.int32, device=device)
    for name, strides in spec.strides:
        size = spec.s_kv if name in ("k", "v", "dk", "dv") else spec.s_q
        made[f"{name}_at"] = steps * (size // spec.b * strides[2])
    made["seed"] = made["offset"] = torch.zeros(1, dtype=torch.int64, device=device)
    return made
