"""The same group by the kernels that would run it otherwise: what a fused one is measured against, and what runs at row
counts where it does not pay."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from te_ops.backends.reference.kernels import bind_composed
from te_ops.errors import NoKernelError
from te_ops.graph import Node, Value
from te_ops.registry import REGISTRY, Call, Kernel, Launch, Rule

PREFIX = "cutlass."
"""What the names of this backend's kernels start with: none of them is used here."""

_RULES = (
    "gemm_accumulate",
    "gemm_epilogue",
    "pointwise_quantize",
    "pointwise_quantize_rounded",
    "pointwise_together",
    "pointwise_together_rounded",
    "pointwise_reduce",
    "reduce_quantize",
)
"""Rules of what a fused GEMM replaces."""


def bind_separate(call: Call) -> Launch:
    """`launch(*reads)` of a group, the gemm first and then what follows it, each by its own kernel.

    Raises:
        NoKernelError: no other kernel takes a part.
    """
    steps = [(part, kernel.bind(part)) for part, kernel in _parts(call)]
    reads, writes = call.reads, call.writes

    def launched(*xs: Any) -> Any:
        values: dict[Value, Any] = dict(zip(reads, xs, strict=True))
        for part, launch in steps:
            made = launch(*(values[v] for v in part.reads))
            values.update(zip(part.writes, made if len(part.writes) > 1 else (made,), strict=True))
        outs = tuple(values[v] for v in writes)
        return outs[0] if len(outs) == 1 else outs

    return launched


def bind_empty(call: Call) -> Launch:
    """`launch(*reads)` of a group where no row is multiplied, or nothing is contracted."""
    return bind_composed(call)


def _parts(call: Call) -> list[tuple[Call, Kernel]]:
    """The fewest steps, by trying the longest parts first."""
    found: list[tuple[Call, Kernel]] = []
    left: Sequence[Node] = call.nodes
    while left:
        taken = _longest(call, left)
        found.append(taken)
        left = left[len(taken[0].nodes) :]
    return found


def _longest(call: Call, left: Sequence[Node]) -> tuple[Call, Kernel]:
    """The longest beginning of these nodes that a kernel takes; never all of the group by what is being replaced."""
    for count in range(len(left), 1, -1):
        for rule in filter(None, map(_rule, _RULES)):
            if not _fits(rule, left[:count]):
                continue
            part = part_of(call, left[:count], rule)
            kernel = taker(rule.name, part)
            if kernel is not None:
                return part, kernel
    part = part_of(call, left[:1], None)
    single = taker(left[0].prim.name, part) or taker("*", part)
    if single is None:
        raise NoKernelError(f"no other kernel takes {left[0].prim.name}")
    return part, single


def _rule(name: str) -> Rule | None:
    return next((r for r in REGISTRY.rules("phase") if r.name == name), None)


def _fits(rule: Rule, nodes: Sequence[Node]) -> bool:
    """Whether the matcher could have made a group of these nodes by a rule: kernels rely on it."""
    names = [n.prim.name for n in nodes]
    if rule.together:
        kinds = frozenset().union(*(e.names for e in rule.elements))
        needed = all(any(n in e.names for n in names) for e in rule.elements if not e.optional)
        return needed and all(n in kinds or n in rule.follow for n in names)
    linked = all(any(v.node == a.id for v in b.inputs) for a, b in pairwise(nodes))
    return linked and re.fullmatch(_pattern(rule), "".join(f"{n} " for n in names)) is not None


@functools.lru_cache(maxsize=64)
def _pattern(rule: Rule) -> str:
    parts = []
    for element in rule.elements:
        names = "|".join(sorted(element.names))
        parts.append(
            f"(?:(?:{names}) ){'*' if element.repeat else '?' if element.optional else ''}"
        )
    return "".join(parts)


def taker(runs: str, part: Call) -> Kernel | None:
    """The best kernel of another backend that takes a call."""
    for kernel in REGISTRY.kernels(runs):
        if not kernel.name.startswith(PREFIX) and kernel.reason(part) is None:
            return kernel
    return None


def part_of(call: Call, nodes: Sequence[Node], rule: Rule | None) -> Call:
    """Some nodes of a call, with what they read, and write for the others or the call."""
    inside = {n.id for n in nodes}
    reads = tuple(dict.fromkeys(v for n in nodes for v in n.inputs if v.node not in inside))
    others = {v for n in call.nodes if n.id not in inside for v in n.inputs}
    made = [Value(n.id, i) for n in nodes for i in range(len(call.specs_of(n)))]
    writes = tuple(v for v in made if v in call.writes or v in others)
    specs = {v: call.specs[v] for v in (*reads, *made)}
    return replace(call, nodes=tuple(nodes), reads=reads, writes=writes, specs=specs, rule=rule)
