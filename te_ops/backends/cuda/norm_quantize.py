"""A norm with the sum before it and the quantize after it: add_norm_quantize, norm_quantize.

Per-tensor FP8 whose scale is known is made in the pass of the norm. Current scaling writes y with its amax, and
quantizes y; blocks are made from the statistics and the input, which is read again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_ops.backends.chains import compose_chain, rounding
from te_ops.backends.cuda import launch
from te_ops.backends.cuda.fused import refuse_chain
from te_ops.backends.cuda.norm import refuse_norm
from te_ops.backends.cuda.norm_kernels import Norm, added, centered, forward_kernel, slot
from te_ops.backends.cuda.norm_tiles import Wants, tile_for, tiles_kernel
from te_ops.backends.cuda.pointwise import FAST
from te_ops.backends.cuda.quantize import (
    is_known,
    make_run,
    refuse_quantizer,
    refuse_state,
    state_place,
    wanted_of,
)
from te_ops.backends.cuda.source import (
    CTYPES,
    INCLUDE,
    Source,
    flag,
    plain,
    pointwise_source,
    prepare,
)
from te_ops.backends.cuda.targets import PER_TENSOR
from te_ops.backends.cuda.wanted import FORMATS, Wanted, scale_rule
from te_ops.graph import Node, Value
from te_ops.pointwise import activations
from te_ops.quantizers import Float8CurrentScalingQuantizer, Record, Usage
from te_ops.registry import Call, Launch

OUTS = ("y", "rstd", "mean")


@dataclass(frozen=True)
class Group:
    """The members of a group."""

    front: Node | None
    norm: Node
    last: Node | None

    @property
    def waits(self) -> bool:
        """Whether the scale is known only when all values are."""
        last = self.last
        current = last is not None and isinstance(last.quantizer, Float8CurrentScalingQuantizer)
        return current and last is not None and not is_known(last)


def group_of(call: Call) -> Group | str:
    """The members, or why they do not belong together."""
    nodes = list(call.nodes)
    last = nodes.pop() if nodes[-1].prim.name == "quantize" else None
    norm = nodes.pop()
    front = nodes[0] if nodes else None
    if last is not None and last.inputs[0] != norm.out:
        return "the normalised value is not what is quantized"
    if front is not None and (norm.inputs[0] != front.out or front.out in norm.inputs[1:]):
        return "the value before the norm is not what is normalised"
    return Group(front, norm, last)


# -- what is normalised


@dataclass(frozen=True)
class Front:
    """The source of a norm.

    Attributes:
        values, kinds: operands, and how they are broadcast.
        held: dtype in which the sum is normalised; stream: whether it is written.
    """

    source: Source
    values: tuple[Value, ...]
    kinds: tuple[str, ...]
    held: torch.dtype
    stream: bool


def front_of(call: Call, group: Group) -> Front | str:
    """The source, or why there is none."""
    x = call.spec(group.norm.inputs[0])
    width, node = int(x.shape[-1]), group.front
    if node is None:
        return Front(plain(x.dtype, width), group.norm.inputs[:1], ("full",), x.dtype, False)
    stream = node.out in call.writes
    held = rounding(call, stream, x.dtype) or torch.float32
    dtypes = {call.spec(v).dtype for v in node.inputs}
    full = node.prim.name == "sum" or (
        node.fn is activations["add"]() and set(node.broadcast) == {"full"}
    )
    if full and len(node.inputs) == 2 and dtypes == {x.dtype} and x.dtype in CTYPES:
        return Front(added(x.dtype, width), node.inputs, ("full", "full"), held, stream)
    if node.prim.name == "sum":
        return f"a sum of {len(node.inputs)} operands in {', '.join(sorted(map(str, dtypes)))}"
    chain = compose_chain(call, (node,))
    reason = refuse_chain(call, chain)
    if isinstance(chain, str) or reason is not None:
        return reason or str(chain)
    specs = [call.spec(v) for v in chain.values]
    source = pointwise_source(chain.fn, specs, chain.kinds, chain.interleave, fast=held in FAST)
    if source.outs != 1 or source.scattered or chain.dtype is not x.dtype:
        return "the value before the norm is a pair, or lies scattered"
    return Front(source, chain.values, chain.kinds, held, stream)


def refuse(call: Call) -> str | None:
    """Members that do not belong together, and what the norm and the quantizer refuse."""
    group = group_of(call)
    if isinstance(group, str):
        return group
    reason = refuse_norm(call, group.norm)
    if reason is not None:
        return reason
    front = front_of(call, group)
    if isinstance(front, str):
        return front
    return None if group.last is None else _refuse_last(call, group)


def _refuse_last(call: Call, group: Group) -> str | None:
    last, rounds = group.last, _rounds(call, group)
    assert last is not None
    exact = call.rule is not None and call.rule.exact
    if exact and not group.waits:
        return "no value is read again"
    if not any(Value(last.id, i) in call.writes for i in range(2)):
        return "no copy is wanted"
    return refuse_state(call, last) or refuse_quantizer(
        last.quantizer, 0, 1, fused=group.waits and rounds is None
    )


# -- launches

Inner = Callable[
    [Sequence[int], torch.Size, Sequence[torch.Tensor], torch.Tensor | None], dict[str, Any]
]
"""run(slots of the source, shape, (gamma[, beta]), scale) -> results by name."""


def _rounds(call: Call, group: Group) -> torch.dtype | None:
    """What y is rounded to: the group's reference rounds it if any output of the norm is written, statistics too."""
    outs = (Value(group.norm.id, i) for i in range(2 + centered(group.norm)))
    written = any(v in call.writes for v in outs)
    return rounding(call, written, call.spec(group.norm.out).dtype)


def norm_of(call: Call, group: Group, front: Front) -> Norm:
    """The forward kernel of a group."""
    node = group.norm
    return Norm(
        front.source,
        front.held,
        call.spec(node.out).dtype,
        call.spec(node.inputs[1]).dtype,
        centered(node),
        bool(node.zero_centered),
        float(node.eps),
    )


def wants_of(call: Call, group: Group, front: Front) -> Wants | None:
    """What the one-pass kernel writes; None: not its format."""
    last = group.last
    if last is None or group.waits or not isinstance(last.quantizer, PER_TENSOR):
        return None
    wanted = wanted_of(call, last, None, None)
    rounds = _rounds(call, group) or torch.float32
    rule = scale_rule(last.quantizer, rounds)
    dense = group.norm.out in call.writes
    return Wants(
        FORMATS[last.quantizer.dtype], rounds, wanted.row, wanted.col, wanted.amax,
        front.stream, dense, rule,
    )  # fmt: skip


def bind(call: Call) -> Launch:
    """The launch of a group."""
    group = group_of(call)
    assert isinstance(group, Group)
    front = front_of(call, group)
    assert isinstance(front, Front)
    made = norm_of(call, group, front)
    inner = _one_pass(call, group, front, made)
    if inner is None:
        inner = (_dense if group.last is None or group.waits else _two_passes)(
            call, group, front, made
        )
    names = dict(zip((Value(group.norm.id, i) for i in range(3)), OUTS, strict=True))
    if group.front is not None:
        names[group.front.out] = "stream"
    if group.last is not None:
        names |= {Value(group.last.id, i): name for i, name in enumerate(("row", "col", "amax"))}
    order = [names[v] for v in call.writes]
    places = tuple(call.reads.index(v) for v in front.values)
    weights = tuple(call.reads.index(v) for v in group.norm.inputs[1:])
    state = None if group.last is None else state_place(call, group.last)
    full, run = front.kinds.index("full"), inner

    def launched(*reads: torch.Tensor) -> Any:
        xs = prepare([reads[i] for i in places], front.kinds)
        affine = [launch.ready(reads[i]) for i in weights]
        scale = None if state is None else reads[state]
        found = run(front.source.slots(xs), xs[full].shape, affine, scale)
        outs = tuple(found[name] for name in order)
        return outs[0] if len(outs) == 1 else outs

    return launched


@dataclass(frozen=True)
class Memory:
    """What a launch writes of the norm itself."""

    stream: torch.Tensor | None
    y: torch.Tensor | None
    rstd: torch.Tensor
    mean: torch.Tensor | None

    def named(self) -> dict[str, Any]:
        """By name."""
        return {"stream": self.stream, "y": self.y, "rstd": self.rstd, "mean": self.mean}


def _memory(
    shape: torch.Size, device: torch.device, front: Front, made: Norm, y: torch.dtype | None
) -> Memory:
    lead = shape[:-1]
    return Memory(
        launch.empty(shape, front.held, device) if front.stream else None,
        None if y is None else launch.empty(shape, y, device),
        launch.empty(lead, torch.float32, device),
        launch.empty(lead, torch.float32, device) if made.centered else None,
    )


def _affine(weights: Sequence[torch.Tensor]) -> tuple[int, int]:
    return weights[0].data_ptr(), weights[1].data_ptr() if len(weights) > 1 else 0


def _dense(call: Call, group: Group, front: Front, made: Norm) -> Inner:
    """The norm with what is before it; with current scaling, the amax of y, and y quantized after."""
    kernel = forward_kernel(made, call.arch)
    last = group.last
    y = made.out if last is not None or group.norm.out in call.writes else None
    second = None
    if last is not None:
        wanted = wanted_of(call, last, None, made.out)
        values = plain(made.out, made.source.width)
        asked = Wanted(wanted.row, wanted.col, False, None, made.out, wanted.source_dtype)
        second = make_run(values, last.quantizer, asked, call.arch, known=True)
    width = made.source.width

    def run(
        slots: Sequence[int], shape: torch.Size, weights: Any, _: torch.Tensor | None
    ) -> dict[str, Any]:
        device = weights[0].device
        memory = _memory(shape, device, front, made, y)
        amax = None
        if second is not None:
            amax = launch.empty((), torch.float32, device)
            launch.zero_word(amax)
        outs = (memory.stream, memory.y, memory.rstd, memory.mean, amax)
        kernel(device, math.prod(shape[:-1]), *slots, *_affine(weights), *map(slot, outs))
        found = memory.named()
        if second is not None:
            results = second([slot(memory.y), width], tuple(shape), device, amax)
            found |= {"row": results.row, "col": results.col, "amax": amax}
        return found

    return run


def _one_pass(call: Call, group: Group, front: Front, made: Norm) -> Inner | None:
    """Everything in one pass, where a cluster holds whole rows."""
    wants = wants_of(call, group, front)
    tile = None if wants is None else tile_for(made, wants, call.arch)
    if wants is None or tile is None:
        return None
    kernel = tiles_kernel(made, wants, tile, call.arch)
    y = wants.rounds if wants.dense else None
    quantizer = group.last.quantizer  # type: ignore[union-attr]
    kept = call.spec(group.norm.out).dtype

    def run(
        slots: Sequence[int], shape: torch.Size, weights: Any, scale: torch.Tensor | None
    ) -> dict[str, Any]:
        device, whole = weights[0].device, tuple(shape)
        memory = _memory(shape, device, front, made, y)
        numbers = launch.empty((8,), torch.float32, device)
        amax, scale_inv = numbers[0], numbers[4]  # cuBLASLt wants a scale on 16 bytes
        if wants.amax:
            launch.zero_word(amax)
        row = launch.empty(whole, quantizer.dtype, device) if wants.row else None
        turned = (*whole[-1:], *whole[:-1])
        col = launch.empty(turned, quantizer.dtype, device) if wants.col else None
        outs = (
            scale, amax, scale_inv, memory.stream, memory.y, memory.rstd, memory.mean, row, col,
        )  # fmt: skip
        kernel(device, math.prod(whole[:-1]), *slots, *_affine(weights), *map(slot, outs))
        records = {
            name: None
            if data is None
            else Record(data, scale_inv, None, quantizer, usage, whole, kept)
            for name, data, usage in (("row", row, Usage.ROW), ("col", col, Usage.COL))
        }
        return {**memory.named(), **records, "amax": amax}

    return run


def _two_passes(call: Call, group: Group, front: Front, made: Norm) -> Inner:
    """Statistics (and the sum), then a pass over the normalised input."""
    last = group.last
    assert last is not None
    statistics = forward_kernel(made, call.arch)
    dense = made.out if group.norm.out in call.writes else None
    wanted = wanted_of(call, last, dense, _rounds(call, group))
    again = normalised_source(group.norm, front.held, made)
    known = is_known(last)
    second = make_run(again, last.quantizer, wanted, call.arch, known=known)
    width = made.source.width
    front = replace(front, stream=group.front is not None)  # it is read again, wanted or not

    def run(
        slots: Sequence[int], shape: torch.Size, weights: Any, scale: torch.Tensor | None
    ) -> dict[str, Any]:
        device = weights[0].device
        memory = _memory(shape, device, front, made, None)
        outs = (memory.stream, None, memory.rstd, memory.mean, None)
        statistics(device, math.prod(shape[:-1]), *slots, *_affine(weights), *map(slot, outs))
        x = slots[0] if memory.stream is None else memory.stream.data_ptr()
        given = (x, *_affine(weights), slot(memory.rstd), slot(memory.mean), width)
        results = second(given, tuple(shape), device, scale)
        found = {"row": results.row, "col": results.col, "amax": results.amax, "y": results.dense}
        return {**memory.named(), **found}

    return run


def normalised_source(node: Node, dtype: torch.dtype, made: Norm) -> Source:
    """The output of a norm from its statistics and its input, which is of a dtype."""
    width = made.source.width
    flags = f"{flag(made.centered)}, {flag(bool(node.zero_centered))}"
    ctype = f"te::Normalised<{CTYPES[dtype]}, {CTYPES[made.gamma]}, {flags}>"
    return Source(INCLUDE, ctype, 1, width, 6, lambda xs: [], width % 8 == 0)
