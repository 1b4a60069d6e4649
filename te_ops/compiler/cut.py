"""cut: decide the segment borders and split the pipeline's graph into one graph per segment."""

from __future__ import annotations

from dataclasses import dataclass, field

from te_ops.compiler.joint import drop_cuts
from te_ops.compiler.rewrite import Rewriter
from te_ops.compiler.work import Work
from te_ops.graph import CUT, DIM, INPUT, LEAVES, PARAM, SHAPE_OF, Graph, Node, Value

CUT_BYTES = 25 * 2**20


def choose_cuts(work: Work) -> None:
    """Keep forced cuts, and the residual-stream (else child) values where 25 MB of parameters have gathered.

    Between children only a product is cut, and not from the cheap primitives that read it: the activation after a
    Linear stays with it, since its gradient is quantized for the Linear's backward in the pass that makes it.
    """
    g = work.g
    alive = g.live(work.roots())
    cuts = [n for n in g.nodes if n.prim is CUT and alive[n.id]]
    kind = "stream" if any(n.attrs["kind"] == "stream" for n in cuts) else "child"
    keep = {n.id for n in cuts if n.attrs["kind"] == "forced"}
    gathered = 0
    allowed = _between_products(g, alive, cuts) if kind == "child" else {n.id for n in cuts}
    for node in g.nodes:
        if not alive[node.id]:
            continue
        if node.prim is PARAM:
            gathered += g.specs[node.id][0].nbytes
        elif node.prim is CUT and node.id in keep:
            gathered = 0
        elif (
            node.prim is CUT
            and node.attrs["kind"] == kind
            and node.id in allowed
            and gathered >= CUT_BYTES
            and work.request.grad
        ):
            keep.add(node.id)
            gathered = 0
    drop_cuts(work, keep)


def _between_products(g: Graph, alive: list[bool], cuts: list[Node]) -> set[int]:
    """Cuts behind a primitive whose operands are quantized, with at most cheap ones of its own child between (a bias),
    and before none that is cheap."""
    readers: dict[Value, list[Node]] = {}
    for node in g.nodes:
        if alive[node.id]:
            for value in node.inputs:
                readers.setdefault(value, []).append(node)

    def product(value: Value) -> bool:
        node = g.node(value)
        if node.prim in LEAVES or node.prim is CUT:
            return False
        if node.prim.cheap or node.prim.nature == "view":
            return any(product(v) for v in node.inputs)
        return node.prim.roles is not None or node.prim.name == "module"

    def cheap(value: Value) -> bool:
        after = readers.get(value, ())
        return any(cheap(n.out) if n.prim is CUT else n.prim.cheap for n in after)

    return {n.id for n in cuts if product(n.inputs[0]) and not cheap(n.out)}


@dataclass
class Piece:
    """One segment before it is compiled: a graph of ours, or one call of a module."""

    level: int
    nodes: list[Node] = field(default_factory=list)
    module: Node | None = None
    imports: list[Value] = field(default_factory=list)  # values of the pipeline's graph
    exports: list[Value] = field(default_factory=list)
    graph: Graph | None = None
    map: dict[Value, Value] = field(default_factory=dict)


def split(work: Work) -> list[Piece]:
    """Segments in execution order; values that cross are dense tensors."""
    g = work.g
    alive = g.live(work.roots())
    levels = _levels(g, alive)
    pieces: dict[tuple[int, int], Piece] = {}
    home: dict[int, Piece] = {}
    for node in g.nodes:
        if not alive[node.id] or node.prim in LEAVES or node.prim in (SHAPE_OF, DIM):
            continue
        level = levels[node.id]
        key = (level, node.id if node.prim.name == "module" else -1)
        piece = home[node.id] = pieces.setdefault(key, Piece(level))
        if node.prim.name == "module":
            piece.module = node
        else:
            piece.nodes.append(node)
    if any(v.node not in home for _, v, _ in g.updates):  # state that takes an input as it is
        pieces.setdefault((0, -1), Piece(0))
    ordered = [pieces[key] for key in sorted(pieces)]
    outputs = set(work.roots())
    exported: dict[int, set[Value]] = {id(p): set() for p in ordered}
    for piece in ordered:
        _fill(g, piece, home, exported)
    for piece in ordered:
        made = [
            Value(n.id, i)
            for n in ([piece.module] if piece.module else piece.nodes)
            for i in range(len(g.specs[n.id]))
        ]
        piece.exports = [v for v in made if v in outputs or v in exported[id(piece)]]
    return ordered


def _levels(g: Graph, alive: list[bool]) -> list[int]:
    """Even levels are ours, odd ones module calls; a cut starts the next even level."""
    levels = [0] * len(g.nodes)
    for node in g.nodes:
        if not alive[node.id] or node.prim in LEAVES:
            continue
        top = max((levels[v.node] for v in node.inputs), default=0)
        if node.prim.name == "module":
            levels[node.id] = top + 1 + top % 2
        elif node.prim is CUT:
            levels[node.id] = top + 2 - top % 2
        else:
            levels[node.id] = top + top % 2
    _sink(g, alive, levels)
    return levels


def _sink(g: Graph, alive: list[bool], levels: list[int]) -> None:
    """What depends on no input (the cast of a weight) belongs to its first reader's segment: its gradient is then
    ready with that segment's."""
    readers: dict[int, int] = {}
    fixed = [False] * len(g.nodes)
    for node in g.nodes:
        fixed[node.id] = (
            node.prim is not INPUT
            and node.prim is not CUT
            and node.prim.name != "module"
            and all(fixed[v.node] for v in node.inputs)
        )
    for node in reversed(g.nodes):
        if not alive[node.id] or node.prim in LEAVES:
            continue
        if fixed[node.id] and node.id in readers:
            levels[node.id] = readers[node.id]
        # A module's inputs come from the segment before it.
        level = levels[node.id] - levels[node.id] % 2
        for value in node.inputs:
            readers[value.node] = min(level, readers.get(value.node, level))


def _fill(g: Graph, piece: Piece, home: dict[int, Piece], exported: dict[int, set[Value]]) -> None:
    """Build the segment's own graph: imports become inputs, leaves and shapes are made anew."""
    if piece.module is not None:
        piece.imports = list(dict.fromkeys(piece.module.inputs))
        for value in piece.imports:
            if value.node in home:
                exported[id(home[value.node])].add(value)
        return
    rewriter = Rewriter(g)

    def source(value: Value) -> Value:
        return _source(rewriter, piece, home, exported, value)

    for node in piece.nodes:
        for value in node.inputs:
            source(value)
        if node.prim is CUT:
            rewriter.map[node.out] = rewriter.map[node.inputs[0]]
        else:
            rewriter.copy(node)
    rewriter.new.updates.extend(
        (source(b), source(v), rule)
        for b, v, rule in g.updates
        if home.get(v.node) is piece or (v.node not in home and piece.level == 0)
    )
    piece.graph, piece.map = rewriter.new, rewriter.map


def _source(
    rewriter: Rewriter,
    piece: Piece,
    home: dict[int, Piece],
    exported: dict[int, set[Value]],
    value: Value,
) -> Value:
    """The segment's value for one of the pipeline's graph; an import if another segment makes it."""
    if value in rewriter.map:
        return rewriter.map[value]
    node = rewriter.old.node(value)
    if node.prim in (SHAPE_OF, DIM):
        _source(rewriter, piece, home, exported, node.inputs[0])
        return rewriter.copy(node)[0]
    if node.prim in LEAVES and node.prim is not INPUT:
        return rewriter.copy(node)[0]
    piece.imports.append(value)
    if node.id in home:
        exported[id(home[node.id])].add(value)
    made = rewriter.new.input(len(piece.imports) - 1, rewriter.old.spec(value))
    rewriter.map[value] = made
    return made
