"""One primitive outside a plan, for kernels that are made of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_ops.compiler.fuse import choose
from te_ops.errors import NoKernelError
from te_ops.graph import Graph, Prim, Spec, Value
from te_ops.registry import Call, Launch


def launch_of(
    prim: Prim, inputs: Sequence[Spec], device: torch.device, arch: str, **attrs: Any
) -> Launch:
    """`launch(*inputs)` of the best kernel that takes the primitive, all its outputs wanted.

    Raises:
        NoKernelError: none does.
    """
    g = Graph()
    reads = tuple(g.input(i, spec) for i, spec in enumerate(inputs))
    g.calls(prim, *reads, **attrs)
    node = g.nodes[-1]
    writes = tuple(Value(node.id, i) for i in range(len(g.specs[node.id])))
    specs = {v: g.spec(v) for v in (*reads, *writes)}
    call = Call((node,), reads, writes, specs, device, arch, 1)
    for runs in (prim.name, "*"):
        kernel, reasons = choose(runs, call)
        if kernel is not None:
            return kernel.bind(call)
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons) or "none is registered"
    raise NoKernelError(f"no kernel takes {prim.name} ({listed})")
