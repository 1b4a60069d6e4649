"""Rules around heads that lie side by side in one tensor: they are normalised and turned there, and backward their
gradients are packed, turned back and quantized in one pass."""

from __future__ import annotations

from collections.abc import Hashable

from te_ops.basic.heads import UNPACK_HEADS
from te_ops.basic.heads_norm import NORM_HEADS
from te_ops.basic.norm import L2NORM, RMSNORM
from te_ops.basic.rope import ROPE, ROPE_HEADS
from te_ops.compiler.rewrite import Rewriter
from te_ops.compiler.work import Work
from te_ops.graph import DIM, LEAVES, SHAPE_OF, Graph, Node, Prim, Value
from te_ops.registry import Rule

_NORMS = (RMSNORM, L2NORM)


def in_packed_heads(work: Work) -> None:
    """Where heads that are views of one packed tensor are turned or normalised, do it in that tensor: `rope_heads`,
    `norm_heads`.

    What attention reads are then views of one tensor, which is saved as it is and need not be turned again in backward;
    and their gradients turn back, and are quantized, in one pass over the packed gradient.
    """
    while _rewrite(work, (ROPE,)) or _rewrite(work, _NORMS):
        pass


def _rewrite(work: Work, prims: tuple[Prim, ...]) -> bool:
    """Take these nodes to the packed tensors whose parts they read; whether there was one."""
    found = _on_parts(work, prims)
    if not found:
        return False
    home = {n.id: unpack for unpack, nodes in found for n in nodes}
    mine = {unpack.id: nodes for unpack, nodes in found}
    rewriter = Rewriter(work.g)
    alive = work.g.live(work.roots())
    for node in work.g.nodes:
        unpack = home.get(node.id)
        if unpack is None:
            if alive[node.id]:
                rewriter.copy(node)
        elif node.id == mine[unpack.id][0].id:
            _replace(rewriter, unpack, mine[unpack.id])
    work.replace_graph(rewriter.finish(), rewriter.map)
    return True


def _on_parts(work: Work, prims: tuple[Prim, ...]) -> list[tuple[Node, list[Node]]]:
    """Nodes that unpack, with those of these primitives that read their parts, alike among themselves."""
    g = work.g
    alive = g.live(work.roots())
    readers: dict[Value, list[Node]] = {}
    for node in g.nodes:
        if alive[node.id]:
            for value in dict.fromkeys(node.inputs):
                readers.setdefault(value, []).append(node)
    roots = set(work.roots())
    found: list[tuple[Node, list[Node]]] = []
    for unpack in g.nodes:
        if unpack.prim is not UNPACK_HEADS or not alive[unpack.id]:
            continue
        nodes: list[Node] = []
        for value in outs_of(g, unpack):
            mine = [n for n in readers.get(value, ()) if n.prim not in (SHAPE_OF, DIM)]
            # Read by others too, the part would have to exist both as it is and as they make it.
            if len(mine) == 1 and mine[0].prim in prims and value not in roots:
                nodes.append(mine[0])
        nodes.sort(key=lambda n: n.id)
        alike = len({_kind(n) for n in nodes}) == 1
        together = all(n.scope == unpack.scope for n in nodes)
        if alike and together and _ready(g, nodes) and not _statistics(readers, nodes):
            found.append((unpack, nodes))
    return found


def _kind(node: Node) -> Hashable:
    """What nodes that become one must agree in."""
    return node.prim, node.attrs.key, node.inputs[1:] if node.prim is ROPE else None


def _ready(g: Graph, nodes: list[Node]) -> bool:
    """Whether all that they read besides the parts is there before the first of them, or needs nothing."""
    others = [v for n in nodes for v in n.inputs[1:]]
    return all(v.node < nodes[0].id or g.node(v).prim in LEAVES for v in others)


def _statistics(readers: dict[Value, list[Node]], nodes: list[Node]) -> bool:
    """Whether a norm's statistic is read: the packed norm has another form of it."""
    return any(readers.get(Value(n.id, 1)) for n in nodes if n.prim in _NORMS)


def _replace(rewriter: Rewriter, unpack: Node, nodes: list[Node]) -> None:
    """Work on these parts in the packed tensor; all parts are views of the result from here on."""
    first, g = nodes[0], rewriter.new
    for value in (v for n in nodes for v in n.inputs[1:]):
        if value not in rewriter.map:  # a leaf that comes later
            rewriter.copy(rewriter.old.node(value))
    touched = {n.inputs[0].index for n in nodes}
    marks = tuple(i in touched for i in range(len(unpack.parts)))
    x = rewriter.map[unpack.inputs[0]]
    with g.position(first):
        if first.prim is ROPE:
            table = rewriter.map[first.inputs[1]]
            packed = g.call(ROPE_HEADS, x, table, parts=unpack.parts, turned=marks, **first.attrs)
        else:
            ordered = sorted(nodes, key=lambda n: n.inputs[0].index)
            gammas = [rewriter.map[v] for n in ordered for v in n.inputs[1:]]
            attrs = {"zero_centered": False, **first.attrs}
            packed, _ = g.calls(NORM_HEADS, x, *gammas, parts=unpack.parts, normed=marks, **attrs)
    with g.position(unpack):
        made = g.calls(UNPACK_HEADS, packed, parts=unpack.parts)
    rewriter.map.update(zip(outs_of(rewriter.old, unpack), made, strict=True))
    rewriter.map.update((n.out, made[n.inputs[0].index]) for n in nodes)


def outs_of(g: Graph, node: Node) -> tuple[Value, ...]:
    """All outputs of a node."""
    return tuple(Value(node.id, i) for i in range(len(g.specs[node.id])))


_QUANTIZED = ("pack_heads?", "rope_heads?", "quantize")

RULES = (
    Rule("packed_heads", ("unpack_heads",), stage="joint", rewrite=in_packed_heads),
    Rule("heads_quantize", _QUANTIZED),
    # Current scaling reads its values again, as they were written: rounded. Blocks keep theirs that way too.
    Rule("heads_quantize_rounded", _QUANTIZED, exact=True),
    Rule("pack_rope", ("pack_heads", "rope_heads")),
    Rule("norm_rope_heads", ("norm_heads", "rope_heads")),
    # What FP8 attention reads: each part under a scale of its own, rounded as the steps one by one would.
    Rule(
        "heads_quantize_each",
        ("norm_heads?", "rope_heads?", "unpack_heads"),
        follow=("quantize",),
        exact=True,
    ),
    Rule(
        "heads_norm_back_quantize",
        ("pack_heads", "rope_heads?", "norm_heads_backward"),
        follow=("quantize", "reduce"),
        exact=True,
    ),
)
