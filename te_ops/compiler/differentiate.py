"""differentiate: walk back from the outputs; each primitive's rule appends the nodes of its gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from te_ops.basic.gemm import ACCUMULATE, GEMM
from te_ops.basic.pointwise import POINTWISE, SUM
from te_ops.compiler.rewrite import Rewriter
from te_ops.compiler.work import Work
from te_ops.errors import PlanError
from te_ops.graph import (
    BUFFER,
    GRAD,
    GRADIENTS,
    INPUT,
    LEAVES,
    Graph,
    Node,
    Phase,
    Prim,
    Spec,
    Value,
)
from te_ops.pointwise import Input


def differentiate(work: Work) -> None:
    """Fill `work.grads`: for each wanted leaf the value of its gradient. Adds one `grad` leaf per output."""
    if not work.wanted or not any(work.output_grads):
        return
    _on_a_copy(work)
    g = work.g
    needs = _needs(g, work.wanted)
    flows = _flows(g)
    chain: list[Value] = []  # gradients of activations
    work.g.phase = Phase.DGRAD
    parts = _given(work, needs)
    targets = _targets(work)
    for node in reversed(g.nodes[: len(needs)]):
        if not needs[node.id] or node.prim in LEAVES:
            continue
        dys = [_total(g, parts.pop(out, []), g.spec(out), node) for out in _outs(g, node)]
        if all(dy is None for dy in dys):
            continue
        if flows[node.id]:
            chain += [dy for dy in dys if dy is not None]
        with g.position(node, Phase.DGRAD):
            dxs = tuple(_rule(g, node, needs)(g, node, *dys))
        # Parts are kept last reader first: the sum turns them round.
        for value, dx in reversed(list(zip(node.inputs, dxs, strict=True))):
            if dx is not None and needs[value.node]:
                _keep(g, parts, value, dx, targets.get(value))
    for leaf in work.wanted:
        total = _total(g, parts.get(leaf, []), g.spec(leaf), g.node(leaf))
        if total is not None:
            work.grads[leaf] = total
    g.phase = Phase.FORWARD
    mark_wgrad(work, chain)


def _on_a_copy(work: Work) -> None:
    """The forward graph stays as it is: other gradient masks start from it again."""
    rewriter = Rewriter(work.g)
    for node in work.g.nodes:
        rewriter.copy(node)
    work.replace_graph(rewriter.finish(), rewriter.map)


def _given(work: Work, needs: list[bool]) -> dict[Value, list[Value]]:
    """The gradients that come in, by the output that they belong to."""
    parts: dict[Value, list[Value]] = {}
    for i, value in enumerate(work.outputs):
        spec = work.g.spec(value)
        if work.output_grads[i] and needs[value.node] and spec.dtype.is_floating_point:
            leaf = work.g.leaf(GRAD, Spec(spec.shape, spec.dtype), index=i)
            parts.setdefault(value, []).append(leaf)
    return parts


def _flows(g: Graph) -> list[bool]:
    """Which nodes depend on an input: their values are activations, the others are made from parameters alone."""
    flows = [False] * len(g.nodes)
    for node in g.nodes:
        flows[node.id] = node.prim is INPUT or any(flows[v.node] for v in node.inputs)
    return flows


def _outs(g: Graph, node: Node) -> tuple[Value, ...]:
    return tuple(Value(node.id, i) for i in range(len(g.specs[node.id])))


def _needs(g: Graph, wanted: tuple[Value, ...]) -> list[bool]:
    """Which nodes carry a gradient to a wanted leaf."""
    needs = [False] * len(g.nodes)
    for leaf in wanted:
        needs[leaf.node] = True
    for node in g.nodes:
        if node.prim not in LEAVES:
            needs[node.id] = node.prim.differentiable and any(
                needs[v.node] and g.spec(v).dtype.is_floating_point for v in node.inputs
            )
    return needs


def _total(g: Graph, parts: list[Value], spec: Spec, node: Node) -> Value | None:
    """The fan-in of a value's gradient: one sum in emission order (of the forward readers), rounded once."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    with g.position(node, Phase.DGRAD):
        return g.call(SUM, *reversed(parts), dtype=spec.dtype)


def _targets(work: Work) -> dict[Value, Value]:
    """What the gradients of parameters are added to, for those that autograd does not get."""
    g, found = work.g, {}
    for leaf in work.wanted:
        dtype = work.request.main_grad(g.node(leaf))
        if dtype is not None:
            path, name = g.node(leaf).attrs["slot"]
            slot = (path, f"{name}.main_grad")
            spec = Spec(g.spec(leaf).shape, dtype)
            found[leaf] = g.leaf(BUFFER, spec, slot=slot, phase=Phase.DGRAD)
    return found


def _keep(
    g: Graph, parts: dict[Value, list[Value]], value: Value, dx: Value, target: Value | None
) -> None:
    """One part more of a value's gradient; what has a target is added to it at once."""
    if target is None:
        parts.setdefault(value, []).append(dx)
    else:
        parts[value] = [_added(g, parts.get(value), dx, target)]


def _added(g: Graph, before: list[Value] | None, gradient: Value, target: Value) -> Value:
    """The terms of a parameter's gradient added to its main_grad as they come, a product before it is rounded.

    The result of an addition is what the next one adds to: that orders them.
    """
    total = before[0] if before else target
    wide = torch.float64 if g.spec(target).dtype is torch.float64 else torch.float32
    for part in _terms(g, gradient):
        node = g.node(part)
        with g.position(node, Phase.DGRAD):
            if node.prim is GEMM:
                part = g.call(GEMM, *node.inputs, **{**node.attrs, "dtype": wide})
            total = g.call(ACCUMULATE, total, part)
    return total


def _terms(g: Graph, value: Value) -> list[Value]:
    """What a value sums up, before the casts of the terms and of the sum."""
    node = g.node(value)
    if node.prim is SUM:
        return [term for v in node.inputs for term in _terms(g, v)]
    if node.prim is POINTWISE and node.attrs["fn"].out == (Input(0),) and len(node.inputs) == 1:
        return _terms(g, node.inputs[0])
    return [value]


def _rule(g: Graph, node: Node, needs: list[bool]) -> Any:
    rule = GRADIENTS.get(node.prim)
    return rule if rule is not None else _by_autograd(node.prim, needs)


_VJPS: dict[Prim, Prim] = {}


def _by_autograd(of: Prim, needs: list[bool]) -> Any:
    """A gradient rule that runs the reference under autograd in backward."""
    if of.nature == "random":
        raise PlanError(
            f"{of.name} is random and has no gradient rule; write one with te.graph.gradient"
        )

    def rule(g: Graph, node: Node, *dys: Value | None) -> tuple[Value | None, ...]:
        wanted = tuple(
            i
            for i, v in enumerate(node.inputs)
            if needs[v.node]
            and g.spec(v).kind.name == "dense"
            and g.spec(v).dtype.is_floating_point
        )
        given = tuple(i for i, dy in enumerate(dys) if dy is not None)
        if of not in _VJPS:
            _VJPS[of] = _vjp(of)
        inputs = (*node.inputs, *(dy for dy in dys if dy is not None))
        attrs = {f"_{k}": v for k, v in node.attrs.items()}
        made = g.calls(_VJPS[of], *inputs, wanted=wanted, given=given, n=len(node.inputs), **attrs)
        by_input = dict(zip(wanted, range(len(wanted)), strict=True))
        return tuple(made[by_input[i]] if i in by_input else None for i in range(len(node.inputs)))

    return rule


def _vjp(of: Prim) -> Prim:
    def reference(
        *xs: Any, wanted: tuple[int, ...], given: tuple[int, ...], n: int, **attrs: Any
    ) -> Any:
        with torch.enable_grad():
            inputs = [
                x.detach().requires_grad_() if i in wanted else x for i, x in enumerate(xs[:n])
            ]
            result = of.reference(*inputs, **{k[1:]: v for k, v in attrs.items()})
            outs = result if of.n_out > 1 else (result,)
            picked = [
                (outs[k], dy) for k, dy in zip(given, xs[n:], strict=True) if outs[k].requires_grad
            ]
            grads = (
                torch.autograd.grad(
                    [o for o, _ in picked],
                    [inputs[i] for i in wanted],
                    [dy for _, dy in picked],
                    allow_unused=True,
                )
                if picked
                else (None,) * len(wanted)
            )
        return tuple(  # a tuple for one gradient too: how many there are is known per node only
            torch.zeros_like(inputs[i]) if gr is None else gr.to(inputs[i].dtype)
            for i, gr in zip(wanted, grads, strict=True)
        )

    def infer(*specs: Spec, wanted: tuple[int, ...], **_: Any) -> tuple[Spec, ...]:
        return tuple(specs[i].like() for i in wanted)

    return Prim(f"{of.name}_vjp", reference, infer, n_out=2)


def mark_wgrad(work: Work, chain: list[Value]) -> None:
    """Backward nodes that only parameter gradients need, and no gradient of an activation, get phase WGRAD."""
    g = work.g
    dgrad = g.live([*chain, *(v for leaf, v in work.grads.items() if g.node(leaf).prim is INPUT)])
    for node in g.nodes:
        if node.phase is Phase.DGRAD and not dgrad[node.id] and node.prim is not GRAD:
            g.nodes[node.id] = replace(node, phase=Phase.WGRAD)
