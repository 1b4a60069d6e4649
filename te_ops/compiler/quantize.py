"""quantize: put a quantize node in front of each operand that the recipe quantizes, by role, and behind each value that
backward is to read as a record.

Nodes are hash-consed, so wgrad finds the forward's quantize; which usages exist is liveness.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from te_ops.attrs import Attrs
from te_ops.basic.attention_core import ATTENTION, ATTENTION_BACKWARD
from te_ops.basic.attention_form import Form, named, sizes
from te_ops.basic.attention_fp8 import (
    ATTENTION_FP8,
    MERGE_RECORD_HEADS,
    OUTPUT,
    is_per_tensor,
    over_a_cache,
    slow_note,
)
from te_ops.basic.heads import MERGE_HEADS
from te_ops.basic.quantize import AMAX, CACHED, DEQUANTIZE, MARK, QUANTIZE, TRANSPOSE_RECORD
from te_ops.compiler.rewrite import Rewriter
from te_ops.compiler.work import STATE_PREFIX, Request, StateUse, Work
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
    rewrite.outputs()
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
    attended: dict[int, dict[str, Value]] = field(
        default_factory=dict
    )  # old attention node -> row records of its operands
    made: dict[Value, Node] = field(
        default_factory=dict
    )  # records that stand for dense values -> the old node of these

    def node(self, node: Node) -> None:
        """Copy one node with its operands quantized."""
        if node.prim is MARK:
            self.rewriter.map[node.out] = self._mark(node)
            return
        if node.prim is CACHED:
            self._cache(node)
            return
        operands = [self._read(node, v) for v in node.inputs]
        roles = self._roles(node)
        if not any(roles):
            self._without_roles(node, operands)
            return
        for i, role in enumerate(roles):
            if role is None:
                operands[i] = self._dense(node, operands[i])
            else:
                operands[i] = self._operand(node, operands[i], *role)
        if node.prim is ATTENTION and self._attention(node, operands):
            return
        g = self.rewriter.new
        quantized = any(g.spec(v).kind.name == "record" for v in operands)
        recipe = self._recipe(node)
        if quantized and recipe is not None and "layout" in node.attrs and node.prim.name == "gemm":
            node = _with(node, accumulation=recipe.accumulation(node.phase))
        self.rewriter.copy(node, tuple(operands))

    def _roles(self, node: Node) -> Any:
        """The operands that the recipe is asked for."""
        if node.prim is ATTENTION and over_a_cache(self.work.g, node):
            return ()
        return node.prim.roles(node) if node.prim.roles is not None else ()

    def _without_roles(self, node: Node, operands: list[Value]) -> None:
        """Copy a node that the recipe has no say in: it reads records where it can, else dense values."""
        if node.prim is MERGE_HEADS and operands[0] in self.made:
            with self.rewriter.new.position(node):
                out = self.rewriter.new.call(MERGE_RECORD_HEADS, operands[0])
            self._stands_for(node, out)
            return
        if node.prim not in _READS_RECORDS:
            operands = [self._dense(node, v) for v in operands]
        self.rewriter.copy(node, tuple(operands))

    def _stands_for(self, node: Node, record: Value) -> None:
        """Who reads the node's first output gets the record, and decodes it if it must."""
        self.rewriter.map[node.out] = record
        self.made[record] = node

    def outputs(self) -> None:
        """What leaves the segment is dense, unless it ends the pipeline and the recipe keeps it as it is."""
        for i, value in enumerate(self.work.outputs):
            record = self.rewriter.map[value]
            if record not in self.made or i in self.returned:
                continue
            node = self.made[record]
            keeps = self.work.final[i] and _keeps(self.work.request, node)
            self.returned[i] = record if keeps else self._dense(node, record)

    def _attention(self, node: Node, operands: list[Value]) -> bool:
        """Attention in FP8, where the recipe quantizes its output too; False if it does not."""
        g, recipe = self.rewriter.new, self._recipe(node)
        if recipe is None or not self.work.request.quantized:
            return False
        given = dict(zip(node.operands, operands, strict=True))
        self.attended[node.id] = {name: given[name] for name in ("q", "k", "v")}
        wanted = recipe.quantizer(_output_role(node, self._place(node)))
        if wanted is None:
            return False
        records = all(is_per_tensor(g.spec(given[name])) for name in ("q", "k", "v"))
        if not (records and _same_format(wanted, OUTPUT)):
            self.work.note(
                ATTENTION_FP8.name,
                (node,),
                "",
                f"the output stays dense: {wanted.describe()} is asked for it; FP8 attention is E4M3 with one scale a "
                "tensor for q, k, v and o",
            )
            return False
        with g.position(node):
            outs = g.calls(ATTENTION_FP8, *operands, **node.attrs)
        self.rewriter.map.update(zip(node.outs, outs, strict=True))
        self._stands_for(node, outs[0])
        form = Form(**node.attrs)
        slow = slow_note(sizes(form, named(form, [self.work.g.spec(v) for v in node.inputs])))
        if slow is not None:
            text = f"expected to be no faster than dense: {slow}"
            self.work.note(ATTENTION_FP8.name, (node,), "", text)
        return True

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
            seen = self._forward_record(node, x, operand) if backward else None
            if seen is not None and recipe.backward_override != "high_precision":
                with g.position(node):
                    return g.call(DEQUANTIZE, seen, dtype=g.spec(x).dtype)
            return self._dense(node, x)
        record = self._quantize(node, x, quantizer, role, usage)
        if not backward:
            self.recorded.setdefault(x, self._quantize(node, x, quantizer, role, "row"))
        return record

    def _forward_record(self, node: Node, x: Value, operand: str) -> Value | None:
        """What the forward pass read of an operand that a backward node reads; None if that was dense."""
        if node.prim is not ATTENTION_BACKWARD:
            return self.recorded.get(x)
        lse = node.inputs[
            node.operands.index("lse")
        ]  # of q, k and v, which may be one value, each has its own
        seen = self.attended.get(lse.node, {}).get(operand)
        return (
            seen
            if seen is not None and self.rewriter.new.spec(seen).kind.name == "record"
            else None
        )

    def _dense(self, node: Node, x: Value) -> Value:
        """x decoded, if it is a record; backward decodes what it keeps as a record by itself."""
        g = self.rewriter.new
        if g.spec(x).kind.name != "record":
            return x
        again = x in self.made and node.phase.is_backward
        with g.position(node, Phase.RECOMPUTE if again else None):
            return g.call(DEQUANTIZE, x, dtype=g.spec(x).dtype)

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

    def _cache(self, node: Node) -> None:
        """Forward reads the value as it is; its record is made at once, so that the value need not stay. A recompute
        region makes it in backward, where the value is there again.
        """
        self.rewriter.map[node.out] = self.rewriter.map[node.inputs[0]]
        if not node.scope:
            self._cached(node)

    def _cached(self, mark: Node) -> Value:
        """The record that stands for a marked value in backward; what came from a record keeps that one."""
        g, x = self.rewriter.new, self.rewriter.map[mark.out]
        if g.spec(x).kind.name == "record":
            return x
        if g.node(x).prim is DEQUANTIZE:
            return g.node(x).inputs[0]
        with g.position(mark, Phase.RECOMPUTE if mark.scope else None):
            return g.calls(QUANTIZE, x, quantizer=mark.quantizer)[0]

    def _read(self, node: Node, value: Value) -> Value:
        """What a node reads of a value: backward gets the decoded record of a marked one."""
        mark = self.work.g.node(value)
        if mark.prim is not CACHED or not node.phase.is_backward:
            return self.rewriter.map[value]
        record, g = self._cached(mark), self.rewriter.new
        with g.position(node, Phase.RECOMPUTE):
            return g.call(DEQUANTIZE, record, dtype=self.work.g.spec(value).dtype)

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


def returns_record(request: Request, node: Node) -> bool:
    """Whether a node's first output leaves the pipeline as a record, if it ends there."""
    return request.quantized and node.prim is ATTENTION and _keeps(request, node)


def _keeps(request: Request, node: Node) -> bool:
    place = join_path(request.place, node.path)
    recipe = None if request.recipe is None else request.recipe.for_path(place)
    return recipe is not None and recipe.keeps_quantized(_output_role(node, place))


def _output_role(node: Node, place: str) -> Role:
    return Role(ATTENTION_FP8.name, node.phase, "o", place)


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
