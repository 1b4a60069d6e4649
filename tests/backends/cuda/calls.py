"""Calls as the planner makes them: a few nodes, their reads and what is wanted of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_ops.graph import Graph, Node, Spec, Value
from te_ops.registry import Call, Rule


class Inputs:
    """A graph whose inputs are given tensors."""

    def __init__(self) -> None:
        self.g = Graph()
        self.tensors: dict[Value, torch.Tensor] = {}

    def __call__(self, x: torch.Tensor) -> Value:
        value = self.g.input(len(self.tensors), Spec(tuple(x.shape), x.dtype))
        self.tensors[value] = x
        return value


def make_call(
    inputs: Inputs,
    nodes: Sequence[Node],
    writes: Sequence[Value],
    *,
    arch: str = "sm_90",
    device: torch.device | str = "cpu",
    rule: Rule | None = None,
) -> Call:
    inside = {n.id for n in nodes}
    reads = tuple(dict.fromkeys(v for n in nodes for v in n.inputs if v.node not in inside))
    made = [Value(n.id, i) for n in nodes for i in range(len(inputs.g.specs[n.id]))]
    specs = {v: inputs.g.spec(v) for v in (*reads, *made)}
    return Call(tuple(nodes), reads, tuple(writes), specs, torch.device(device), arch, 1, rule)


def run(inputs: Inputs, call: Call, bind: Callable[[Call], Any]) -> tuple[Any, ...]:
    """What the bound launch gives, always a tuple."""
    launched = bind(call)
    made = launched(*(inputs.tensors[v] for v in call.reads))
    return made if len(call.writes) > 1 else (made,)


def dense_strides(x: torch.Tensor) -> bool:
    """Contiguous; scales may also be transposed, or have rows filled up to 16 bytes: as the library reads them."""
    if x.is_contiguous():
        return True
    return x.dim() == 2 and (x.t().is_contiguous() or x.stride() == (-(-x.shape[1] // 4) * 4, 1))
