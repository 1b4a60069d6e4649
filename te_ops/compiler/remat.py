"""remat: a saved value is dropped when rebuilding it from values saved anyway costs nothing, or next to nothing.

Moved data costs next to nothing: heads that are split, merged or rotated, the transposed FP8 copy of a dense value that
is saved. What is computed (pointwise, sum: activations, the widest values of a layer) is rebuilt only in a step that
backward runs anyway, next to its own gradient, and only if forward then need not write it; a pass of its own would cost
more time than the bytes are worth, and `te.Recompute` is there to ask for it. Views and random masks are never saved.
The rebuilt nodes run in phase recompute, with the same scale and seed (attention_contracts 15).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from te_ops.attrs import Attrs
from te_ops.basic.pointwise import POINTWISE, SUM
from te_ops.compiler.fuse import groups_of
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
from te_ops.quantizers import Float8CurrentScalingQuantizer

MAX_NODES = 12
ALWAYS = frozenset(
    {BUFFER, SEED, SHAPE_OF, DIM, PARAM, SCALAR}
)  # there in backward whatever is saved


@dataclass(frozen=True)
class _Choice:
    """Values that are not saved, each with the nodes that rebuild it; `free`: whatever they cost."""

    paths: dict[Value, frozenset[int]]
    free: frozenset[Value]

    @property
    def cone(self) -> frozenset[int]:
        """All nodes that are rebuilt."""
        return frozenset().union(*self.paths.values())


def remat(work: Work) -> None:
    """Move what costs nothing to rebuild from the saved set into phase recompute."""
    costly: set[Value] = set()
    while (choice := _choose(work, costly)).paths:
        rewriter, clones = _rebuild(work, choice)
        new = rewriter.finish()
        found = _costly(work, choice, rewriter, new, clones)
        if not found:
            work.replace_graph(new, rewriter.map)
            return
        costly |= found


def _rebuild(work: Work, choice: _Choice) -> tuple[Rewriter, dict[int, int]]:
    """The graph with these values rebuilt, and the new node of each rebuilt one."""
    g, cone = work.g, choice.cone
    rewriter = Rewriter(g)
    clones: dict[Value, Value] = {}

    def clone(value: Value) -> Value:
        node = g.node(value)
        if node.id not in cone:
            return rewriter.map[value]
        if value not in clones:
            inputs = tuple(clone(v) for v in node.inputs)
            twin = replace(node, phase=Phase.RECOMPUTE)
            if isinstance(node.attrs.get("quantizer"), Float8CurrentScalingQuantizer):
                inputs = (
                    *inputs,
                    rewriter.map[Value(node.id, 2)],
                )  # the same amax, so the same scale
                twin = replace(twin, attrs=Attrs({**node.attrs, "known": True}))
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
                node,
                tuple(clone(v) if v in choice.paths else rewriter.map[v] for v in node.inputs),
            )
        else:
            rewriter.copy(node)
    return rewriter, {value.node: twin.node for value, twin in clones.items()}


def _costly(
    work: Work, choice: _Choice, rewriter: Rewriter, new: Graph, clones: dict[int, int]
) -> set[Value]:
    """Dropped values with a rebuilding node outside the steps that backward runs anyway."""
    if choice.paths.keys() <= choice.free:
        return set()
    trial = replace(work, notes=[])
    trial.replace_graph(new, rewriter.map)
    shared = {
        node.id
        for group in groups_of(trial)
        if any(n.phase in (Phase.DGRAD, Phase.WGRAD) for n in group.nodes)
        for node in group.nodes
    }
    return {
        value
        for value, path in choice.paths.items()
        if value not in choice.free
        and any(
            clones[i] not in shared and work.g.nodes[i].prim.nature != "view"
            for i in path
            if i in clones
        )
    }


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


def _choose(work: Work, costly: set[Value]) -> _Choice:
    """Values that are not saved, and the nodes that rebuild them; not those known to be costly."""
    g = work.g
    outputs = set(work.outputs)
    kept = {v for v in crossing(work) if not g.node(v).scope}
    pinned: set[Value] = set()
    paths: dict[Value, frozenset[int]] = {}
    free: set[Value] = set()
    for value in list(kept):  # a view keeps its base alive anyway: the base is what is saved, once
        base, views = _base(g, value)
        if views and value not in outputs:
            kept.add(base)
            pinned.add(base)
            paths[value] = frozenset(views)
            free.add(value)
    written = _read_in_forward(work)
    for value in sorted(kept, key=lambda v: (-g.spec(v).nbytes, v)):
        node = g.node(value)
        if (
            value in paths
            or value in pinned
            or value in outputs
            or value in costly
            or node.prim in LEAVES
            or not _is_cheap(node)
        ):
            continue
        path: set[int] = {node.id}
        sources = _sources(g, node, kept - paths.keys() - {value}, path)
        # From parameters alone: a weight's column copy is made with its row copy in one pass, so it is kept.
        # A random mask comes from the call's seed and a shape: nothing need be kept for it.
        if sources is None or not (sources & kept or node.prim.nature == "random"):
            continue
        computed = any(g.nodes[i].prim in (POINTWISE, SUM) for i in path)
        if computed and value in written:
            continue
        pinned |= sources
        paths[value] = frozenset(path)
        if not computed:
            free.add(value)
    return _Choice(paths, frozenset(free))


def _read_in_forward(work: Work) -> set[Value]:
    """What a forward node reads, and so what forward writes."""
    alive = work.g.live(work.roots())
    return {
        value
        for node in work.g.nodes
        if alive[node.id] and node.phase is Phase.FORWARD
        for value in node.inputs
    }


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
