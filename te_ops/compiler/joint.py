"""joint: compose neighbouring pointwise nodes before differentiation, then apply the joint rules.

A chain of pointwise nodes becomes one expression that saves its inputs once and rounds once.
"""

from __future__ import annotations

from typing import Literal

from te_ops.basic.pointwise import POINTWISE
from te_ops.compiler.rewrite import Rewriter
from te_ops.compiler.work import Work
from te_ops.graph import CUT, Graph, Node, Value
from te_ops.pointwise import Fn, Input, InputKind, compose, merge_inputs
from te_ops.pointwise.expr import Expr, substitute
from te_ops.registry import REGISTRY

MAX_INPUTS = 8
MAX_OPERATORS = 200  # beyond, a composed derivative costs more registers than the tensor it saves


def joint(work: Work) -> None:
    """Compose pointwise neighbours; rewrite by the registered joint rules."""
    rewriter = Rewriter(work.g)
    readers = count_readers(work)
    alive = work.g.live(work.roots())
    for node in work.g.nodes:
        if not alive[node.id]:
            continue
        copied = rewriter.copy(node)
        if node.prim is POINTWISE:
            rewriter.map[node.out] = _absorb(rewriter, node, copied[0], readers)
    work.replace_graph(rewriter.finish(), rewriter.map)
    for rule in REGISTRY.rules("joint"):
        assert rule.rewrite is not None
        rule.rewrite(work)


def count_readers(work: Work) -> dict[Value, int]:
    """Readers of each value in the live graph, outputs of the pipeline included."""
    counts: dict[Value, int] = {}
    alive = work.g.live(work.roots())
    for node in work.g.nodes:
        if alive[node.id]:
            for value in node.inputs:
                counts[value] = counts.get(value, 0) + 1
    for value in work.roots():
        counts[value] = counts.get(value, 0) + 1
    return counts


def _absorb(rewriter: Rewriter, old: Node, made: Value, readers: dict[Value, int]) -> Value:
    """Replace the new node by its composition with each producer that only it reads."""
    g = rewriter.new
    sole = {rewriter.map[v] for v in old.inputs if readers.get(v, 0) == 1}
    changed = True
    while changed:
        changed = False
        node = g.node(made)
        for i, value in enumerate(node.inputs):
            source = g.node(value)
            if value not in sole or source.prim is not POINTWISE or source.scope != node.scope:
                continue
            composed = _compose(g, node, i, source)
            if composed is not None:
                sole.discard(value)
                made, changed = composed, True
                break
    return made


def _compose(g: Graph, node: Node, i: int, source: Node) -> Value | None:
    outer: Fn = node.fn
    inner: Fn = source.fn
    kinds, inner_kinds = node.broadcast, source.broadcast
    if kinds[i] != "full" or len(node.inputs) + len(source.inputs) - 1 > MAX_INPUTS:
        return None
    if inner.out_kind == "pair" and outer.inputs[i] != "pair":
        return None
    gates = {node.interleave, source.interleave} - {None}
    if len(gates) > 1:
        return None
    if outer.inputs[i] == "pair" and inner.out_kind == "value":
        if "pair" in inner.inputs:  # a gated result that is split again: halves of halves
            return None
        inner = paired(inner, tuple(kind in ("full", "row") for kind in inner_kinds))
    if outer.size + inner.size > MAX_OPERATORS:
        return None
    fn = compose(outer, i, inner)
    inputs = (*node.inputs[:i], *source.inputs, *node.inputs[i + 1 :])
    broadcast = (*kinds[:i], *inner_kinds, *kinds[i + 1 :])
    unique: list[tuple[Value, str, str]] = []
    mapping = []
    for entry in zip(inputs, broadcast, fn.inputs, strict=True):
        if entry not in unique:
            unique.append(entry)
        mapping.append(unique.index(entry))
    with g.position(node):
        return g.call(
            POINTWISE,
            *(v for v, _, _ in unique),
            fn=merge_inputs(fn, mapping),
            dtype=node.attrs["dtype"],
            broadcast=tuple(kind for _, kind, _ in unique),
            interleave=next(iter(gates), None),
        )


def paired(fn: Fn, wide: tuple[bool, ...]) -> Fn:
    """A value function applied to both halves of a pair; inputs marked wide are pairs, the others are shared."""

    def half(part: Literal["gate", "linear"]) -> Expr:
        def replace(node: Expr) -> Expr | None:
            if node.op != "input" or not wide[node.payload[0]]:
                return None
            return Input(node.payload[0], part)

        return substitute(fn.out, replace)[0]

    kinds: list[InputKind] = [
        "pair" if w else kind for w, kind in zip(wide, fn.inputs, strict=True)
    ]
    return Fn(fn.name, kinds, (half("gate"), half("linear")))


def drop_cuts(work: Work, keep: set[int]) -> None:
    """Remove the cut nodes that are not kept."""
    rewriter = Rewriter(work.g)
    alive = work.g.live(work.roots())
    for node in work.g.nodes:
        if node.prim is CUT and node.id not in keep:
            rewriter.map[node.out] = rewriter.map[node.inputs[0]]
        elif alive[node.id]:
            rewriter.copy(node)
    work.replace_graph(rewriter.finish(), rewriter.map)
