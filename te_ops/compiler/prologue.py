"""prologue: the forward steps that depend on parameters and scales only, whose results calls may share.

Inside `te.weights_frozen()` the first call runs them and the others take the copies; elsewhere they are steps like all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from te_ops.compiler.work import STATE_PREFIX, Group, Work
from te_ops.context import Key
from te_ops.graph import BUFFER, LEAVES, PARAM, Node, Phase, Value


@dataclass(frozen=True)
class Prologue:
    """Which steps of a bound forward it is made of, and what they leave for the others."""

    steps: tuple[int, ...]  # positions among the bound steps
    rest: tuple[int, ...]  # the other positions
    results: tuple[int, ...]  # slots that later steps, outputs or the backward read
    observed: frozenset[int]  # slots of the amaxes of its quantizations
    params: tuple[tuple[str, str], ...]  # (path, name) of the parameters that it reads
    key: Key  # equal for plans that make the same copies


def prologue_of(
    work: Work, groups: Sequence[Group], kept: Collection[Value], slots: Mapping[Value, int]
) -> Prologue | None:
    """The prologue of a segment's forward; None if it quantizes no parameter."""
    pure: set[Value] = set()
    params: dict[tuple[str, str], None] = {}
    for node in work.g.nodes:
        if node.prim is PARAM or _is_scale(node):
            pure.add(node.out)
    chosen: list[tuple[int, Group]] = []
    others: set[Value] = set()
    running = [g for g in groups if g.writes]
    for i, group in enumerate(running):
        if group.reads and pure.issuperset(group.reads):
            chosen.append((i, group))
            pure.update(group.writes)
        else:
            others.update(group.reads)
    made = {v for _, group in chosen for v in group.writes}
    amaxes = {s.amax for s in work.states if s.amax is not None} & made
    results = [
        v
        for v in dict.fromkeys(v for _, g in chosen for v in g.writes)
        if v in others or (v in kept and v not in amaxes)
    ]
    if not any(work.g.spec(v).kind.name == "record" for v in results):
        return None
    for _, group in chosen:
        for value in group.reads:
            node = work.g.node(value)
            if node.prim is PARAM:
                params[node.attrs["slot"]] = None
    places = tuple(i for i, _ in chosen)
    return Prologue(
        steps=places,
        rest=tuple(i for i in range(len(running)) if i not in places),
        results=tuple(slots[v] for v in results),
        observed=frozenset(slots[v] for v in amaxes),
        params=tuple(params),
        key=_key(work, [g for _, g in chosen], results),
    )


def _is_scale(node: Node) -> bool:
    """Whether it is a scale of delayed scaling. Other buffers (the lengths of a cache) change from call to call."""
    return (
        node.prim is BUFFER
        and node.attrs.get("phase", Phase.FORWARD) is Phase.FORWARD
        and node.attrs["slot"][1].startswith(STATE_PREFIX)
    )


def _key(work: Work, groups: Sequence[Group], results: Sequence[Value]) -> Key:
    """What the copies are, without node numbers: kernels, primitives, attributes, leaves."""
    names: dict[Value, Any] = {}

    def name(value: Value) -> Any:
        if value not in names:
            names[value] = _leaf(work.g.node(value))
        return names[value]

    steps = []
    for group in groups:
        nodes = []
        for node in group.nodes:
            nodes.append(
                (node.prim.name, node.attrs.key, tuple(name(v) for v in node.inputs), len(names))
            )
            for i in range(len(work.g.specs[node.id])):
                names[Value(node.id, i)] = (len(names), i)
        steps.append((group.kernel.name, tuple(nodes)))
    return Key((tuple(steps), tuple(name(v) for v in results)))


def _leaf(node: Node) -> Any:
    assert node.prim in LEAVES, node.prim.name
    return (node.prim.name, node.attrs.key)
