"""Chains of nodes as one function: what every backend compiles behind, or in front of, its own work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from te_ops.errors import PlanError
from te_ops.graph import Node, Value
from te_ops.pointwise import Fn, Input, InputKind, compose, merge_inputs
from te_ops.registry import Call


@dataclass(frozen=True)
class Chain:
    """A composed function over values of the graph, each read as `kinds` says, in FP32.

    `interleave` is that of its pairs, `dtype` what the last node rounds to.
    """

    fn: Fn
    values: tuple[Value, ...]
    kinds: tuple[str, ...]
    interleave: int | None
    dtype: torch.dtype


def sum_fn(count: int) -> Fn:
    """x0 + x1 + ... in operand order."""
    total: Any = Input(0)
    for i in range(1, count):
        total = total + Input(i)
    kinds: list[InputKind] = ["value"] * count
    return Fn("sum", kinds, (total,))


def _link(node: Node) -> tuple[Fn, tuple[str, ...]]:
    """The function of a pointwise or sum node, and how it reads its inputs."""
    if node.prim.name == "sum":
        count = len(node.inputs)
        return sum_fn(count), ("full",) * count
    return node.fn, node.broadcast


def compose_chain(call: Call, nodes: Sequence[Node]) -> Chain | str:
    """The nodes, each reading the one before it, as one function in FP32; or why not."""
    first = nodes[0]
    fn, broadcast = _link(first)
    values, kinds = list(first.inputs), list(broadcast)
    gated = [n for n in nodes if "pair" in _link(n)[0].inputs or len(_link(n)[0].out) == 2]
    interleaves = {node.interleave for node in gated}
    if len(interleaves) > 1:
        return f"the chain mixes interleaves {interleaves}"
    for before, node in pairwise(nodes):
        outer, broadcast = _link(node)
        if before.out in call.writes:
            return f"{fn.name} inside the chain is read elsewhere"
        places = [i for i, v in enumerate(node.inputs) if v == before.out]
        if not places:
            return f"{outer.name} does not read {fn.name}"
        if any(broadcast[i] != "full" for i in places):
            return f"{outer.name} broadcasts the output of {fn.name}"
        whole, all_values, all_kinds = outer, list(node.inputs), list(broadcast)
        for i in reversed(places):
            try:
                whole = compose(whole, i, fn)
            except PlanError as error:
                return str(error)
            all_values[i : i + 1], all_kinds[i : i + 1] = values, kinds
        fn, values, kinds = whole, all_values, all_kinds
    return _merged(fn, values, kinds, next(iter(interleaves), None), nodes[-1].dtype)


def _merged(
    fn: Fn, values: list[Value], kinds: list[str], interleave: int | None, dtype: torch.dtype
) -> Chain:
    """Operands that are the same value, read the same way, once."""
    keys = list(zip(values, kinds, fn.inputs, strict=True))
    unique = list(dict.fromkeys(keys))
    fn = merge_inputs(fn, [unique.index(key) for key in keys])
    return Chain(fn, tuple(k[0] for k in unique), tuple(k[1] for k in unique), interleave, dtype)


def rounding(call: Call, written: bool, dtype: torch.dtype) -> torch.dtype | None:
    """What an inner value is rounded to (rounding contract): its dtype if it is written or the rule
    is exact, else nothing."""
    exact = call.rule is not None and call.rule.exact
    return dtype if written or exact or dtype is torch.float32 else None
