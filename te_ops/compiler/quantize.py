"""quantize: put a quantize node in front of each operand that the recipe quantizes, by role.

Nodes are hash-consed, so wgrad finds the forward's quantize; which usages exist is liveness.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from te_ops.attrs import Attrs
from te_ops.basic.quantize import AMAX, DEQUANTIZE, MARK, QUANTIZE, TRANSPOSE_RECORD
from te_ops.compiler.rewrite import Rewriter
from te_ops.compiler.work import STATE_PREFIX, StateUse, Work
from te_ops.context import join_path
from te_ops.graph import BUFFER, DIM, SHAPE_OF, Node, Phase, Spec, Value
from te_ops.quantizers import Quantizer, Usage
from te_ops.recipe import Recipe, Role

_STREAMS_PER_SEGMENT = 2**20

_READS_RECORDS = frozenset({DEQUANTIZE, TRANSPOSE_RECORD, SHAPE_OF, DIM})


def quantize(work: Work) -> None:
    """Rewrite the operands with roles; replace or drop the marks of `te.Quantize`."""
    alive = work.g.live(work.roots())
    rewrite = _Quantize(work, Rewriter(work.g))
    for node in work.g.nodes:
        if alive[node.id]:
            rewrite.node(node)
    work.replace_graph(rewrite.rewriter.finish(), rewrite.rewriter.map)
    work.states = list(rewrite.states.values())
    work.outputs = tuple(rewrite.returned.get(i, v) for i, v in enumerate(work.outputs))


@dataclass
class _Quantize:
    work: Work
    rewriter: Rewriter
    states: dict[tuple[str, str], StateUse] = field(default_factory=dict)
    streams: dict[tuple[Value, Quantizer], int] = field(default_factory=dict)
    returned: dict[int, Value] = field(default_factory=dict)
    recorded: dict[Value, Value] = field(
        default_factory=dict
    )  # dense value -> row record of its forward quantize

    def node(self, node: Node) -> None:
        """Copy one node with its operands quantized."""
        if node.prim is MARK:
            self.rewriter.map[node.out] = self._mark(node)
            return
        roles = node.prim.roles(node) if node.prim.roles is not None else ()
        operands = [self.rewriter.map[v] for v in node.inputs]
        if not any(roles):
            if node.prim not in _READS_RECORDS:
                operands = [self._dense(node, v) for v in operands]
            self.rewriter.copy(node, tuple(operands))
            return
        for i, role in enumerate(roles):
            if role is not None:
                operands[i] = self._operand(node, operands[i], *role)
        g = self.rewriter.new
        quantized = any(g.spec(v).kind.name == "record" for v in operands)
        recipe = self._recipe(node)
        if quantized and recipe is not None and "layout" in node.attrs and node.prim.name == "gemm":
            node = _with(node, accumulation=recipe.accumulation(node.phase))
        self.rewriter.copy(node, tuple(operands))

    def _place(self, node: Node) -> str:
        """The op's path in the outermost pipeline, for the recipe."""
        return join_path(self.work.request.place, node.path)

    def _recipe(self, node: Node) -> Recipe | None:
        recipe = self.work.request.recipe
        return None if recipe is None else recipe.for_path(self._place(node))

    def _operand(self, node: Node, x: Value, operand: str, usage: str) -> Value:
        """The operand as the recipe wants it: a record, the dense value, or a dequantized record."""
        g = self.rewriter.new
        recipe = self._recipe(node)
        if recipe is None or not g.spec(x).dtype.is_floating_point:
            return self._dense(node, x)
        role = Role(node.prim.name, node.phase, operand, self._place(node))
        backward = node.phase.is_backward
        quantizer = recipe.quantizer(role) if self.work.request.quantized else None
        if backward and recipe.backward_override is not None:
            quantizer = None
        if quantizer is None:
            self._calibrate(node, x, recipe, role)
            if backward and x in self.recorded and recipe.backward_override != "high_precision":
                with g.position(node):
                    return g.call(DEQUANTIZE, self.recorded[x], dtype=g.spec(x).dtype)
            return self._dense(node, x)
        record = self._quantize(node, x, quantizer, role, usage)
        if not backward:
            self.recorded.setdefault(x, self._quantize(node, x, quantizer, role, "row"))
        return record

    def _dense(self, node: Node, x: Value) -> Value:
        g = self.rewriter.new
        if g.spec(x).kind.name == "record":
            with g.position(node):
                return g.call(DEQUANTIZE, x, dtype=g.spec(x).dtype)
        return x

    def _quantize(
        self, node: Node, x: Value, quantizer: Quantizer, role: Role, usage: str
    ) -> Value:
        """The record of x in this usage: folded, found, or made."""
        g = self.rewriter.new
        folded = self._fold(node, x, quantizer, usage)
        if folded is not None:
            return folded
        x = self._dense(
            node, x
        )  # a record in another format comes in: a second rounding, noted by _fold
        index = 0 if usage == "row" else 1
        extras: list[Value] = []
        attrs: dict[str, object] = {"quantizer": quantizer}
        with g.position(node):
            if quantizer.stateful:
                extras.append(self._scale(node, role))
            if quantizer.stochastic:
                extras.append(g.seed())
                attrs["stream"] = self._stream(x, quantizer)
            outs = g.calls(QUANTIZE, x, *extras, **attrs)
        if quantizer.stateful:
            self._observe(node, role, quantizer, outs[2])
        return outs[index]

    def _stream(self, x: Value, quantizer: Quantizer) -> int:
        """A number of the (value, quantizer) in the whole plan: its segments share the seed of the call."""
        first = self.work.number * _STREAMS_PER_SEGMENT + 1
        return self.streams.setdefault((x, quantizer), first + len(self.streams))

    def _fold(self, node: Node, x: Value, quantizer: Quantizer, usage: str) -> Value | None:
        """quantize(dequantize(r)) in r's own format is r; its other usage is r's transpose. Bytes are rounded once."""
        g = self.rewriter.new
        source = g.node(x)
        if g.spec(x).kind.name == "record":
            record = x
        elif source.prim is DEQUANTIZE:
            record = source.inputs[0]
        else:
            return None
        kind = g.spec(record).kind
        wanted = Usage.ROW if usage == "row" else Usage.COL
        have, want = (
            kind.quantizer.of_usage(kind.usage),
            quantizer.of_usage(wanted),
        )  # a hybrid has one a usage
        if not _same_format(have, want):
            self.work.note(
                "quantize", (node,), "", f"second rounding: {have.describe()} to {want.describe()}"
            )
            return None
        if kind.usage is wanted:
            return record
        if not have.exact_other_usage():
            self.work.note(
                "quantize",
                (node,),
                "",
                f"second rounding: {have.describe()} has no exact other usage",
            )
            return None
        with g.position(node):
            return g.call(TRANSPOSE_RECORD, record)

    def _scale(self, node: Node, role: Role) -> Value:
        """The scale of the op's state for this operand, as it is at entry of the phase."""
        phase = Phase.FORWARD if not role.is_grad else Phase.DGRAD
        slot = (node.path, f"{STATE_PREFIX}.{role.operand}.scale")
        return self.rewriter.new.leaf(BUFFER, Spec((1,), torch.float32), slot=slot, phase=phase)

    def _observe(self, node: Node, role: Role, quantizer: Any, amax: Value) -> None:
        """Remember the state; its amax is observed iff grad mode is on or the region calibrates."""
        recipe = self.work.request.recipe
        assert recipe is not None
        config = recipe.delayed(role)
        assert config is not None
        g = self.rewriter.new
        seen = g.spec(g.node(amax).inputs[0]).shape
        # Nothing is seen of an empty tensor: its state stays (a plan for zero rows serves no other count).
        observe = 0 not in seen and (self.work.request.grad or self.work.request.calibrating)
        phase = Phase.DGRAD if role.is_grad else Phase.FORWARD
        key = (node.path, role.operand)
        old = self.states.get(key)
        if old is not None and old.amax is not None and old.amax != amax:
            key = (node.path, f"{role.operand}#{amax.node}")  # the op used twice: both are observed
        operand = key[1]
        fp8_max = torch.finfo(quantizer.dtype).max
        self.states[key] = StateUse(
            node.path, operand, config, phase, amax if observe else None, fp8_max
        )

    def _calibrate(self, node: Node, x: Value, recipe: Recipe, role: Role) -> None:
        """calibrating without quantizing: observe what the operand would have been quantized by."""
        request = self.work.request
        if not request.calibrating or request.quantized:
            return
        quantizer = recipe.quantizer(role)
        if quantizer is None or recipe.delayed(role) is None:
            return
        g = self.rewriter.new
        with g.position(node):
            self._observe(node, role, quantizer, g.call(AMAX, self._dense(node, x)))

    def _mark(self, node: Node) -> Value:
        """An explicit Quantize: the dequantized record flows on."""
        x = self.rewriter.map[node.inputs[0]]
        assert node.prim.roles is not None
        (operand,) = node.prim.roles(node)
        quantizer: Quantizer | None = node.attrs["quantizer"]
        recipe = self._recipe(node)
        if operand is None:
            return x
        role = Role("quantize", node.phase, operand[0], self._place(node))
        if quantizer is None and recipe is not None and self.work.request.quantized:
            overridden = node.phase.is_backward and recipe.backward_override is not None
            quantizer = None if overridden else recipe.quantizer(role)
        g = self.rewriter.new
        if quantizer is None:
            if recipe is not None and node.attrs["quantizer"] is None:
                self._calibrate(node, x, recipe, role)
            return x
        record = self._quantize(node, x, quantizer, role, "row")
        for i, out in enumerate(self.work.outputs):
            if out == node.out and self.work.final[i]:
                self.returned[i] = record  # a pipeline that ends in Quantize returns the record
        with g.position(node):
            return g.call(DEQUANTIZE, record, dtype=g.spec(x).dtype)


def _same_format(a: Quantizer, b: Quantizer) -> bool:
    """Whether bytes of one are bytes of the other: equal, or both one scale per tensor in the same dtype."""
    if a == b:
        return True
    per_tensor = ("float8_delayed", "float8_current")
    return (
        a.name in per_tensor
        and b.name in per_tensor
        and getattr(a, "dtype", None) == getattr(b, "dtype", 0)
    )


def _with(node: Node, **attrs: object) -> Node:
    return replace(node, attrs=Attrs({**node.attrs, **attrs}))
