"""remat: a saved value is dropped when cheap primitives rebuild it from values saved anyway.

The rebuilt nodes run in phase recompute, with the same scale and seed (attention_contracts 15).
"""

from __future__ import annotations

from dataclasses import replace

from te_ops.compiler.rewrite import Rewriter
from te_ops.compiler.work import Work
from te_ops.graph import (
    BUFFER,
    DIM,
    LEAVES,
    PARAM,
    SCALAR,
    SEED,
    SHAPE_OF,
    Graph,
    Node,
    Phase,
    Value,
)

MAX_NODES = 12
ALWAYS = frozenset(
    {BUFFER, SEED, SHAPE_OF, DIM, PARAM, SCALAR}
)  # there in backward whatever is saved


def remat(work: Work) -> None:
    """Move what is cheap to rebuild from the saved set into phase recompute."""
    rebuilt, cone = _choose(work)
    if not rebuilt:
        return
    g = work.g
    rewriter = Rewriter(g)
    clones: dict[Value, Value] = {}

    def clone(value: Value) -> Value:
        node = g.node(value)
        if node.id not in cone:
            return rewriter.map[value]
        if value not in clones:
            inputs = tuple(clone(v) for v in node.inputs)
            twin = replace(node, phase=Phase.RECOMPUTE)
            kept = {v: rewriter.map[v] for v in _outs(g, node) if v in rewriter.map}
            outs = rewriter.copy(twin, inputs)
            rewriter.map.update(kept)
            clones.update(zip(_outs(g, node), outs, strict=True))
        return clones[value]

    alive = g.live(work.roots())
    for node in g.nodes:
        if not alive[node.id]:
            continue
        if node.phase.is_backward and node.prim not in LEAVES:
            rewriter.copy(
                node, tuple(clone(v) if v in rebuilt else rewriter.map[v] for v in node.inputs)
            )
        else:
            rewriter.copy(node)
    work.replace_graph(rewriter.finish(), rewriter.map)


def _outs(g: Graph, node: Node) -> tuple[Value, ...]:
    return tuple(Value(node.id, i) for i in range(len(g.specs[node.id])))


def crossing(work: Work) -> list[Value]:
    """Forward values that backward nodes read, in order: what would be saved."""
    g = work.g
    alive = g.live(work.roots())
    found: dict[Value, None] = {}
    for node in g.nodes:
        if alive[node.id] and node.phase.is_backward:
            for value in node.inputs:
                if g.node(value).phase is Phase.FORWARD and g.node(value).prim.name != "grad":
                    found[value] = None
    for value in work.grads.values():  # a gradient that is a forward value as it is
        if g.node(value).phase is Phase.FORWARD and g.node(value).prim.name != "grad":
            found[value] = None
    return list(found)


def _choose(work: Work) -> tuple[set[Value], set[int]]:
    """Values that are not saved, and the nodes that rebuild them."""
    g = work.g
    outputs = set(work.outputs)
    kept = {v for v in crossing(work) if not g.node(v).scope}
    pinned: set[Value] = set()
    dropped: set[Value] = set()
    cone: set[int] = set()
    for value in list(kept):  # a view keeps its base alive anyway: the base is what is saved, once
        base, views = _base(g, value)
        if views and value not in outputs:
            kept.add(base)
            pinned.add(base)
            dropped.add(value)
            cone |= views
    for value in sorted(kept, key=lambda v: (-g.spec(v).nbytes, v)):
        node = g.node(value)
        if (
            value in dropped
            or value in pinned
            or value in outputs
            or node.prim in LEAVES
            or not _is_cheap(node)
        ):
            continue
        path: set[int] = {node.id}
        sources = _sources(g, node, kept - dropped - {value}, path)
        # From parameters alone: a weight's column copy is made with its row copy in one pass, so it is kept.
        # A random mask comes from the call's seed and a shape: nothing need be kept for it.
        if sources is not None and (sources & kept or node.prim.nature == "random"):
            dropped.add(value)
            pinned |= sources
            cone |= path
    return dropped, cone


def _base(g: Graph, value: Value) -> tuple[Value, set[int]]:
    """The value that a chain of views starts from, and the views."""
    views: set[int] = set()
    node = g.node(value)
    while node.prim.nature == "view" and node.prim not in (SHAPE_OF, DIM) and not node.scope:
        views.add(node.id)
        value = node.inputs[0]
        node = g.node(value)
    return value, views


def _is_cheap(node: Node) -> bool:
    return (node.prim.cheap or node.prim.nature == "view") and node.prim not in (SHAPE_OF, DIM)


def _sources(g: Graph, node: Node, kept: set[Value], path: set[int]) -> set[Value] | None:
    """The kept values from which cheap nodes (added to path) rebuild this node; None if others are needed."""
    found: set[Value] = set()
    for value in node.inputs:
        source = g.node(value)
        if value in kept or source.prim in ALWAYS:
            found.add(value)
            continue
        cheap = source.prim not in LEAVES and _is_cheap(source) and source.phase is Phase.FORWARD
        if not cheap or source.scope or len(path) >= MAX_NODES:
            return None
        path.add(source.id)
        below = _sources(g, source, kept, path)
        if below is None:
            return None
        found |= below
    return found
