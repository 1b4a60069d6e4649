"""Heads of a packed tensor to FP8 in one pass, each part under a scale of its own: what FP8 attention reads.

They are normalised and turned on the way; a packed tensor is read once, and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.norm_heads import (
    THREADS,
    Shape,
    refuse_norm,
    shape_of,
)
from te_ops.backends.cuda.pointwise import check_chunks
from te_ops.backends.cuda.quantize import is_known, refuse_state
from te_ops.backends.cuda.rope import MAX_PARTS, Turn, by_of
from te_ops.backends.cuda.source import CTYPES, literal
from te_ops.backends.cuda.targets import PER_TENSOR, cleared
from te_ops.backends.cuda.wanted import FORMATS, scale_rule, template
from te_ops.basic.heads import UNPACK_HEADS, Parts
from te_ops.basic.heads_norm import NORM_HEADS
from te_ops.basic.rope import ROPE_HEADS
from te_ops.graph import Node, Spec, Value
from te_ops.quantizers import Float8CurrentScalingQuantizer, Record, Usage
from te_ops.registry import Call, Launch

GROUP = 4
"""Heads of a thread, which share the angles that it reads: the fastest of 1, 2 and 4 on an H200."""
FEATURES = 16
"""Of a head, in a thread."""
OUT_SLOTS = 5
"""Of a `te::HeadsOut`."""


@dataclass(frozen=True)
class Members:
    """The nodes of a call: what normalises, what turns, what unpacks, and what quantizes each part."""

    norm: Node | None
    turn: Node | None
    unpack: Node
    quantize: tuple[Node, ...]

    @property
    def first(self) -> Node:
        """The node that reads the packed tensor."""
        return self.norm or self.turn or self.unpack

    @property
    def parts(self) -> Parts:
        """Heads side by side."""
        parts: Parts = self.unpack.parts
        return parts

    @property
    def waits(self) -> bool:
        """Whether scales are known only when all values are."""
        return isinstance(self.quantize[0].quantizer, Float8CurrentScalingQuantizer)


def members_of(call: Call) -> Members | str:
    """The members of a call, or why it is none of this kernel."""
    nodes = list(call.nodes)
    norm = nodes.pop(0) if nodes[0].prim is NORM_HEADS else None
    turn = nodes.pop(0) if nodes[0].prim is ROPE_HEADS else None
    unpack, *quantize = nodes
    if unpack.prim is not UNPACK_HEADS or not quantize:
        return "no parts of a packed tensor are quantized"
    chain = [n for n in (norm, turn, unpack) if n is not None]
    for before, after in pairwise(chain):
        if after.inputs[0] != before.out or after.parts != before.parts:
            return "the heads are not what comes before"
    inner = {*(n.out for n in chain), *(Value(unpack.id, i) for i in range(len(unpack.parts)))}
    if not inner.isdisjoint(call.writes):
        return "the heads are read as they are too"
    by_part = {n.inputs[0]: n for n in quantize}
    wanted = [Value(unpack.id, i) for i in range(len(unpack.parts))]
    if len(quantize) != len(wanted) or set(by_part) != set(wanted):
        return "each part is quantized once here, and all of them"
    return Members(norm, turn, unpack, tuple(by_part[v] for v in wanted))


def refuse(call: Call) -> str | None:
    """Other formats than FP8 with one scale, transposed copies, dtypes and heads without a kernel."""
    members = members_of(call)
    if isinstance(members, str):
        return members
    if len(members.parts) > MAX_PARTS:
        return f"{len(members.parts)} parts; up to {MAX_PARTS} are quantized at once"
    dtype = call.spec(members.first.inputs[0]).dtype
    if dtype not in CTYPES:
        return f"reads FP32, BF16 and FP16, not {dtype}"
    sizes = sorted({size for _, size in members.parts})
    if len(sizes) > 1 or sizes[0] % FEATURES or not FEATURES <= sizes[0] <= FEATURES * THREADS:
        return f"heads of {sizes} features; all of one row have the same here, a multiple of {FEATURES}"
    reason = _refuse_quantize(call, members.quantize)
    if reason is None and members.norm is not None:
        reason = refuse_norm(call, members.norm)
    return reason or (None if members.turn is None else _refuse_turn(call, members.turn))


def _refuse_turn(call: Call, turn: Node) -> str | None:
    table = call.spec(turn.inputs[1])
    if turn.inverse:
        return "heads turn back before they are quantized"
    if table.dtype is not torch.float32:
        return f"the table is {table.dtype}; FP32 is read"
    half = int(table.shape[-1])
    return f"{half} pairs of a head turn; multiples of eight do here" if half % 8 else None


def _refuse_quantize(call: Call, nodes: tuple[Node, ...]) -> str | None:
    first = nodes[0]
    for node in nodes:
        if type(node.quantizer) not in PER_TENSOR or is_known(node):
            return (
                f"no kernel for {node.quantizer.describe()}: one scale a tensor, which is made here"
            )
        if node.quantizer != first.quantizer:
            return "the formats of the parts differ"
        if Value(node.id, 1) in call.writes:
            return "a transposed copy is wanted of a part"
        if (reason := refuse_state(call, node)) is not None:
            return reason
    return None


def _shape(call: Call, members: Members) -> Shape:
    if members.norm is not None:
        return shape_of(call, members.norm, members.turn)
    parts, turn = members.parts, members.turn
    x = call.spec(members.first.inputs[0])
    still = (False,) * len(parts)
    made = Turn(parts, still, 0, False, False, "te::BY_ROW", x.dtype)
    if turn is not None:
        table: Spec = call.spec(turn.inputs[1])
        by = by_of(table, len(x.shape) - 1, turn.axis)
        made = Turn(
            parts, turn.turned, int(table.shape[-1]), turn.interleaved, False, by, x.dtype
        )  # fmt: skip
    return Shape(made, still, None, False, turn is not None)


def _kernel(
    call: Call, members: Members, shape: Shape, *, codes: bool, amax: bool
) -> launch.Function:
    """A pass over all heads, that writes codes or finds amaxes; the second of two goes from the end, which L2 holds."""
    quantizer, turn, norm = members.quantize[0].quantizer, shape.turn, members.norm
    arguments = f"te::HeadsQuantizeArguments<{shape.types}>"
    rule = scale_rule(quantizer, turn.dtype) if codes else "typedef void Rule;\n"
    head = (
        f"#include <kernels/heads_quantize.cuh>\n{shape.layout()}{rule}"
        f"struct Parameters {{ {arguments} a; }};\n"
    )
    gamma = shape.gamma is None
    flags = template(
        norm is not None, gamma, shape.zero_centered, shape.turns, turn.interleaved, turn.by,
        codes, amax, GROUP, THREADS,
    )  # fmt: skip
    epsilon = literal(norm.eps if norm is not None else 0.0)
    index = "te::blocks() - 1 - te::block()" if codes and members.waits else "te::block()"
    body = (
        f"te::heads_quantize<{shape.types}, {FORMATS[quantizer.dtype]}, Rule, {flags}>"
        f"(p.a, {epsilon}, {index});"
    )
    text = launch.text_of(name="heads_quantize", head=head, body=body, threads=THREADS)
    slots = 5 + len(members.parts) * (1 + OUT_SLOTS)
    return launch.build("heads_quantize", text, call.arch, THREADS, slots)


def _ends(shape: Shape, rows: int) -> list[int]:
    """The last block plus one of every part; a part has one where there are no rows, which writes its scale."""
    ends, end = [], 0
    for heads, size in shape.turn.parts:
        units = rows * -(-heads // GROUP)
        end += max(-(-units // (THREADS // (size // FEATURES))), 1)
        ends.append(end)
    return ends


def bind(call: Call) -> Launch:
    """The launch of a call; current scaling has a pass for the amaxes before that for the codes."""
    members = members_of(call)
    assert isinstance(members, Members)
    shape, nodes, waits = _shape(call, members), members.quantize, members.waits
    observed = any(Value(n.id, 2) in call.writes for n in nodes)
    find = _kernel(call, members, shape, codes=False, amax=True) if waits else None
    write = _kernel(call, members, shape, codes=True, amax=observed and not waits)
    inputs = _inputs(call, members, shape)
    states = [None if waits else call.reads.index(n.inputs[1]) for n in nodes]
    numbers = {n.id: k for k, n in enumerate(nodes)}
    picks = [(numbers.get(v.node, -1), v.index) for v in call.writes]
    statistic = any(k < 0 for k, _ in picks)
    turn, quantizer, clear = shape.turn, nodes[0].quantizer, waits or observed

    def run(*reads: torch.Tensor) -> Any:
        x, front, kept = inputs(reads)
        lead, device = x.shape[:-1], x.device
        rows = math.prod(lead)
        check_chunks(x.numel() // 8, x)
        words = cleared(8 * len(nodes), device, clear)
        scale = None
        if statistic:
            scale = launch.empty((*lead, shape.count), torch.float32, device)
        data = [launch.empty((*lead, *part), quantizer.dtype, device) for part in turn.parts]
        ends, base = _ends(shape, rows), words.data_ptr()
        outs: list[int] = []
        for k, (codes, state, end) in enumerate(zip(data, states, ends, strict=True)):
            amax = base + 32 * k
            known = amax if state is None else reads[state].data_ptr()
            outs += (known, amax, amax + 16, codes.data_ptr(), end)
        slots = (*front, turn.places(lead), 0 if scale is None else scale.data_ptr(), rows, *outs)
        if find is not None:
            find(device, ends[-1], *slots)
        write(device, ends[-1], *slots)
        del kept  # copies, if any, until the launches are issued
        made: list[Any] = []
        for k, index in picks:
            if k < 0:
                made.append(scale)
            elif index == 2:
                made.append(words[8 * k])
            else:
                made.append(
                    Record(
                        data[k], words[8 * k + 4], None, quantizer, Usage.ROW, tuple(data[k].shape), x.dtype
                    )
                )  # fmt: skip
        return made[0] if len(made) == 1 else tuple(made)

    return run


Front = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, tuple[int, ...], list[Any]]]


def _inputs(call: Call, members: Members, shape: Shape) -> Front:
    """The packed tensor, the slots of what is read (it, gammas by part, the table), and whose memory these are."""
    at = call.reads.index(members.first.inputs[0])
    gammas = [call.reads.index(v) for v in (members.norm.inputs[1:] if members.norm else ())]
    table_at = None if members.turn is None else call.reads.index(members.turn.inputs[1])

    def front(
        reads: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, tuple[int, ...], list[Any]]:
        x, weights = launch.ready(reads[at]), [launch.ready(reads[i]) for i in gammas]
        table = None if table_at is None else launch.ready(reads[table_at])
        address = 0 if table is None else table.data_ptr()
        return x, (x.data_ptr(), *shape.spread(weights), address), [weights, table]

    return front


__all__ = ["bind", "refuse"]
