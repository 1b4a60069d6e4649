"""build: run the passes, split into segments, and assemble the plan."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_ops.basic.quantize import QUANTIZE
from te_ops.compiler.bind import bind_backward, bind_forward, leaf
from te_ops.compiler.cut import Piece, choose_cuts, split
from te_ops.compiler.differentiate import differentiate
from te_ops.compiler.fuse import fuse, select
from te_ops.compiler.joint import joint
from te_ops.compiler.legalize import legalize
from te_ops.compiler.passes import PIPELINE_SLOTS, SEGMENT_SLOTS, passes
from te_ops.compiler.plan import Backward, Plan, Result, Saved, Segment, Step
from te_ops.compiler.quantize import quantize, returns_record
from te_ops.compiler.remat import remat
from te_ops.compiler.schedule import schedule
from te_ops.compiler.trace import trace
from te_ops.compiler.work import Group, Request, Work, display
from te_ops.errors import PlanError
from te_ops.graph import CUT, INPUT, LEAVES, PARAM, SHAPE_OF, Graph, Node, Phase, Value

passes.add("parallel", choose_cuts)
passes.add("joint", joint)
passes.add("differentiate", differentiate)
passes.add("quantize", quantize)
passes.add("remat", remat)
passes.add("fuse", fuse)
passes.add("select", select)
passes.add("legalize", legalize)
passes.add("schedule", schedule)


def build(request: Request, key: dict[str, Any]) -> Plan:
    """Plan a pipeline.

    Raises:
        Error: what the ops' shape rules, the recipe or kernel selection refuse.
    """
    g, outputs = trace(request)
    return assemble(request, g, outputs, key)


def assemble(request: Request, g: Graph, outputs: tuple[Value, ...], key: dict[str, Any]) -> Plan:
    """From a traced graph to a plan."""
    single = len(outputs) == 1
    work = Work(request, g, outputs)
    passes.run(PIPELINE_SLOTS, work)
    work.outputs, views = _peel(work)
    needs = _needs(work)
    pieces = split(work)
    slots: dict[Value, int] = {}
    for node in work.g.nodes:
        if node.prim is INPUT:
            slots[node.out] = node.attrs["index"]
    size = len(request.inputs)
    segments: list[Segment] = []
    shared = {v for piece in pieces for v in piece.imports}
    shared |= {
        v
        for v, chain in zip(work.outputs, views, strict=True)
        if chain or work.outputs.count(v) > 1
    }
    flow = _Flow(needs, slots, shared)
    for piece in pieces:
        _pass_on(piece, slots)
        if not piece.exports and (piece.graph is None or not piece.graph.updates):
            continue
        for value in piece.exports:
            slots[value] = size
            size += 1
        segments.append(_segment(work, piece, flow, len(segments)))
    results = tuple(
        _result(work, v, chain, slots, work.outputs[:i])
        for i, (v, chain) in enumerate(zip(work.outputs, views, strict=True))
    )
    return Plan(
        title=type(request.op).__name__,
        segments=tuple(segments),
        size=size,
        results=results,
        single=single,
        notes=tuple(dict.fromkeys(work.notes)),
        key=key,
        inputs=request.inputs,
        dead=_dead(segments, results, size),
    )


def _pass_on(piece: Piece, slots: dict[Value, int]) -> None:
    """What a segment would return as it came in (a cut at the end) is no export: its readers take the import."""
    if piece.graph is None:
        return
    kept = []
    for value in piece.exports:
        node = piece.graph.node(piece.map[value])
        if node.prim is INPUT:
            slots[value] = slots[piece.imports[node.attrs["index"]]]
        else:
            kept.append(value)
    piece.exports = kept


def _peel(work: Work) -> tuple[tuple[Value, ...], list[tuple[Node, ...]]]:
    """Views at the end of the pipeline are taken outside the autograd node, so that users may write into them.

    Not those of a record, into which nobody writes.
    """
    g = work.g
    bases, chains = [], []
    for value in work.outputs:
        chain: list[Node] = []
        node = g.node(value)
        while node.prim is CUT or (
            node.prim.nature == "view"
            and node.prim.n_out == 1
            and len(node.inputs) == 1
            and not returns_record(work.request, g.node(node.inputs[0]))
        ):
            if node.prim is not CUT:
                chain.append(node)
            value = node.inputs[0]
            node = g.node(value)
        bases.append(value)
        chains.append(tuple(reversed(chain)))
    return tuple(bases), chains


def _result(
    work: Work,
    value: Value,
    chain: tuple[Node, ...],
    slots: dict[Value, int],
    before: tuple[Value, ...],
) -> Result:
    node = work.g.node(value)
    if value not in slots:
        raise PlanError(
            f"the pipeline returns a {node.prim.name} leaf as it is; compute something from it first"
        )
    views = tuple((n.prim.reference, dict(n.attrs)) for n in chain)
    taken = slots[value] < len(work.request.inputs) or any(slots[v] == slots[value] for v in before)
    return Result(slots[value], views, alias=not views and taken)


def _dead(
    segments: list[Segment], results: tuple[Result, ...], size: int
) -> tuple[tuple[int, ...], ...]:
    last: dict[int, int] = {}
    for i, segment in enumerate(segments):
        for slot in segment.imports:
            last[slot] = i
        for slot in segment.exports:
            last.setdefault(slot, i)
    kept = {r.slot for r in results}
    return tuple(
        tuple(s for s, at in last.items() if at == i and s not in kept)
        for i in range(len(segments))
    )


def _needs(work: Work) -> list[bool]:
    """Which nodes of the pipeline's graph carry gradients."""
    request = work.request
    needs = [False] * len(work.g.nodes)
    if not request.grad:
        return needs
    for node in work.g.nodes:
        if node.prim is INPUT:
            needs[node.id] = request.input_grads[node.attrs["index"]]
        elif node.prim is PARAM:
            path, name = node.attrs["slot"]
            needs[node.id] = bool(getattr(request.op.get_submodule(path), name).requires_grad)
        elif node.prim.name == "module":
            module = request.op.get_submodule(node.attrs["slot"])
            needs[node.id] = any(needs[v.node] for v in node.inputs) or any(
                p.requires_grad for p in module.parameters()
            )
        elif node.prim not in LEAVES and node.prim.differentiable and node.prim is not SHAPE_OF:
            needs[node.id] = any(
                needs[v.node] and work.g.spec(v).dtype.is_floating_point for v in node.inputs
            )
    return needs


@dataclass(frozen=True)
class _Flow:
    """How values of the pipeline reach its segments: environment slots, gradients, and who reads them."""

    needs: list[bool]
    slots: dict[Value, int]
    shared: set[Value]  # values that another segment, a view or a second result reads


def _segment(work: Work, piece: Piece, flow: _Flow, number: int) -> Segment:
    needs, slots = flow.needs, flow.slots
    imports = tuple(slots[v] for v in piece.imports)
    exports = tuple(slots[v] for v in piece.exports)
    if piece.module is not None:
        path = piece.module.attrs["slot"]
        order = tuple(slots[v] for v in piece.module.inputs)
        made = range(len(work.g.specs[piece.module.id]))
        all_exports = tuple(slots.get(Value(piece.module.id, i), -1) for i in made)
        returns = work.g.specs[piece.module.id]
        return Segment(f"module {path}", order, all_exports, module=path, returns=returns)
    assert piece.graph is not None
    part = Work(
        replace(work.request, op=_NoOp),
        piece.graph,
        tuple(piece.map[v] for v in piece.exports),
        work.notes,
        f"segment {number}",
        number,
    )
    part.g._resolver = None
    part.wanted = tuple(
        n.out for n in part.g.nodes if n.prim in (INPUT, PARAM) and _wanted(n, work, piece, needs)
    )
    part.output_grads = tuple(
        needs[v.node] and work.g.spec(v).dtype.is_floating_point for v in piece.exports
    )
    part.final = tuple(v not in flow.shared for v in piece.exports)
    return compile_segment(part, imports, exports)


_NoOp: Any = None


def _wanted(node: Node, work: Work, piece: Piece, needs: list[bool]) -> bool:
    if node.prim is INPUT:
        source = piece.imports[node.attrs["index"]]
        return needs[source.node] and work.g.spec(source).dtype.is_floating_point
    slot = node.attrs["slot"]
    return any(n.prim is PARAM and n.attrs["slot"] == slot and needs[n.id] for n in work.g.nodes)


@dataclass(frozen=True)
class _Derive:
    """Backward of a segment for any set of given output gradients; made once per set."""

    work: Work  # before differentiation
    finished: Work  # with every gradient given
    leaves: int
    cache: dict[tuple[bool, ...], Backward | None]

    def __call__(self, mask: tuple[bool, ...]) -> Backward | None:
        if mask not in self.cache:
            self.cache[mask] = self._make(mask)
        return self.cache[mask]

    def _make(self, mask: tuple[bool, ...]) -> Backward | None:
        """None if this backward would need values that the forward did not save."""
        work = replace(self.work, output_grads=mask, notes=[], grads={}, states=[], groups=[])
        passes.run(SEGMENT_SLOTS, work)
        _restore_leaves(self.work, work)
        ours, theirs = _structural(self.finished.g), _structural(work.g)
        places = {ours[v]: i for i, v in enumerate(self.finished.saved)}
        picks = [places.get(theirs[v]) for v in work.saved]
        if any(p is None for p in picks):
            return None
        leaves = _leaf_values(work)
        bound, loads = bind_backward(work, leaves)
        saved = tuple(p for p in picks if p is not None)
        return Backward(bound, loads, saved, _added(work, leaves))


def _added(work: Work, leaves: list[Value]) -> tuple[tuple[int, torch.dtype], ...]:
    """Leaves whose main_grad this backward writes, by position."""
    found = [(i, work.request.main_grad(work.g.node(v))) for i, v in enumerate(leaves)]
    return tuple((i, dtype) for i, dtype in found if dtype is not None and leaves[i] in work.grads)


def _structural(g: Graph) -> dict[Value, Any]:
    """An identity of each forward value that does not depend on node numbers."""
    table: dict[Any, int] = {}
    ids: dict[Value, Any] = {}
    for node in g.nodes:
        key = (node.prim, node.attrs.key, tuple(ids[v] for v in node.inputs), node.scope)
        number = table.setdefault(key, len(table))
        for i in range(len(g.specs[node.id])):
            ids[Value(node.id, i)] = (key, i) if node.prim in LEAVES else (number, i)
    return ids


def _leaf_values(work: Work) -> list[Value]:
    """Differentiable tensors of a segment in order: imports by index, then parameters by appearance."""
    nodes = [n for n in work.g.nodes if n.prim in (INPUT, PARAM)]
    inputs = sorted((n for n in nodes if n.prim is INPUT), key=lambda n: n.attrs["index"])
    params = sorted((n for n in nodes if n.prim is PARAM), key=lambda n: n.attrs["slot"])
    return [n.out for n in (*inputs, *params)]


def compile_segment(part: Work, imports: tuple[int, ...], exports: tuple[int, ...]) -> Segment:
    """Run the segment passes and bind both phases."""
    before = replace(part)
    for i in range(len(imports)):  # every import is a leaf, read or not
        assert any(n.prim is INPUT and n.attrs["index"] == i for n in part.g.nodes)
    passes.run(SEGMENT_SLOTS, part)
    _restore_leaves(before, part)
    forward, saved = bind_forward(part)
    leaves = _leaf_values(part)
    derive = None
    names = _Names(part)
    shared = set(forward.prologue.steps) if forward.prologue is not None else set()
    places = itertools.count()
    forward_steps = tuple(
        replace(_step(part, s, names), shared=bool(s.writes) and next(places) in shared)
        for s in part.forward
    )
    backward_steps: tuple[Step, ...] = ()
    if part.wanted and any(part.output_grads):
        bound, loads = bind_backward(part, leaves)
        picks = tuple(range(len(part.saved)))
        full = Backward(bound, loads, picks, _added(part, leaves))
        derive = _Derive(before, part, len(leaves), {part.output_grads: full})
        backward_steps = tuple(_step(part, s, names, backward=True) for s in part.backward)
    kinds = tuple(n.prim.name if (n := part.g.node(v)).prim in LEAVES else "" for v in part.saved)
    return Segment(
        name=part.name,
        imports=imports,
        exports=exports,
        leaves=tuple(leaf(part.g.node(v)) for v in leaves),
        forward=forward,
        saved=saved,
        saves_tensors=all(part.g.spec(v).kind.name == "dense" for v in part.saved),
        saved_leaf=kinds,
        full=part.output_grads,
        derive=derive,
        forward_steps=forward_steps,
        backward_steps=backward_steps,
        saved_values=tuple(
            _saved(part, v, names)
            for v in part.saved
            if part.g.node(v).prim not in (PARAM, SHAPE_OF)
        ),
        needs_grad=derive is not None,
        copies=tuple(
            i
            for i, v in enumerate(part.outputs)
            if part.g.node(v).prim in LEAVES or v in part.outputs[:i]
        ),
        states=tuple(part.states),
    )


def _restore_leaves(before: Work, part: Work) -> None:
    """Leaves that the passes found dead stay: the autograd node gives them no gradient, but takes them as inputs."""
    for node in before.g.nodes:
        if node.prim is INPUT:
            part.g.input(node.attrs["index"], before.g.specs[node.id][0])


class _Names:
    """Readable names of values: inputs and parameters by what they are, others by what makes them and a number."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.made: dict[int, str] = {}
        self.counts: dict[str, int] = {}

    def __call__(self, value: Value) -> str:
        if value.node not in self.made:
            self.made[value.node] = self._name(self.work.g.node(value))
        kind = self.work.g.spec(value).kind
        usage = (
            f".{kind.usage.value}"
            if kind.name == "record"
            else (f".{value.index}" if value.index else "")
        )
        return self.made[value.node] + usage

    def _name(self, node: Node) -> str:
        made = leaf(node)
        if made is not None:
            if made.path or made.name:
                return f"{made.path}.{made.name}".lstrip(".")
            names = {"grad": f"grad{made.index}", "input": f"input{made.index}"}
            return names.get(made.kind, str(made.kind))
        fn: Any = node.attrs.get("fn")
        base = str(fn.name) if fn is not None and str(fn.name).isidentifier() else node.prim.name
        count = self.counts.setdefault(base, 0)
        self.counts[base] += 1
        return f"{base}{count}"


def _step(work: Work, group: Group, names: _Names, backward: bool = False) -> Step:
    quantized = any(  # arithmetic on records: prims with roles; moving or decoding their bytes is exact anywhere
        n.prim.roles is not None and any(work.g.spec(v).kind.name == "record" for v in n.inputs)
        for n in group.nodes
    )
    phases = {n.phase for n in group.nodes}
    phase = min(phases - {Phase.RECOMPUTE} or phases)  # what is rebuilt in a step that runs anyway
    if backward and phase is Phase.FORWARD:  # a recompute region runs again
        phase = Phase.RECOMPUTE
    return Step(
        name=group.rule.name if group.rule else group.nodes[0].prim.name,
        kernel=group.kernel.name,
        nodes=tuple(_shown(group, n) for n in group.nodes),
        reads=tuple(names(v) for v in group.reads),
        writes=tuple(names(v) for v in group.writes),
        phase=phase.name.lower(),
        path=group.nodes[0].path,
        emulated=quantized
        and (group.kernel.name.startswith("reference") or "emulated" in group.kernel.name),
        view=all(n.prim.nature == "view" for n in group.nodes),
    )


def _shown(group: Group, node: Node) -> str:
    """A member as explain() names it: a quantize with the usages read, a GEMM with how FP8 products are summed."""
    text = display(node)
    if node.prim.name == "gemm" and node.attrs.get("accumulation") is not None:
        return f"{text}({node.attrs['accumulation']})"
    if node.prim is not QUANTIZE or group.call is None:
        return text
    usages = [u for u, live in zip(("row", "col"), group.call.live(node), strict=False) if live]
    return f"{text[:-1]}, {'+'.join(usages)})" if usages else text


def _saved(work: Work, value: Value, names: _Names) -> Saved:
    spec = work.g.spec(value)
    node = work.g.node(value)
    if spec.kind.name == "record":
        text = f"{spec.kind.quantizer.describe()} {spec.kind.usage.value}"
        dense = spec.like().nbytes
        if any(work.g.node(v).prim is PARAM for v in node.inputs):
            text += " (weight)"
    else:
        text, dense = str(spec.dtype).removeprefix("torch."), spec.nbytes
    return Saved(names(value), text, spec.nbytes, dense)


__all__ = ["assemble", "build", "compile_segment"]
