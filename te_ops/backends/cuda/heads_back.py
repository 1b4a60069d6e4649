"""The gradient of normalised heads, quantized in the pass that makes it: gradients by part are packed, turned back,
taken through the norm, and written as FP8, row and column, with their sums over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.norm_heads import INCLUDE, Shape, refuse_norm, refuse_turn, shape_of
from te_ops.backends.cuda.pointwise import check_chunks
from te_ops.backends.cuda.quantize import is_known, refuse_state, state_place, wanted_of
from te_ops.backends.cuda.reduce import slices_kernel
from te_ops.backends.cuda.rope import MAX_PARTS, Turn, by_of, fit
from te_ops.backends.cuda.source import CTYPES, Source, flag
from te_ops.backends.cuda.targets import (
    PER_TENSOR,
    TILE_COLS,
    Part,
    lead_of,
    parts_kernel,
)
from te_ops.backends.cuda.wanted import Wanted
from te_ops.basic.heads import PACK_HEADS
from te_ops.basic.heads_norm import NORM_HEADS_BACKWARD
from te_ops.basic.rope import ROPE_HEADS
from te_ops.graph import Node, Value
from te_ops.registry import Call, Launch


@dataclass(frozen=True)
class Members:
    """The nodes of a call: what packs, what turns back, the norm's gradient, what quantizes it and sums its rows."""

    pack: Node
    turn: Node | None
    norm: Node
    quantize: Node | None
    reduce: Node | None


def members_of(call: Call) -> Members | str:
    """The members of a call, or why it is none of this kernel."""
    pack, *nodes = call.nodes
    turn = nodes.pop(0) if nodes[0].prim is ROPE_HEADS else None
    norm, *readers = nodes
    if pack.prim is not PACK_HEADS or norm.prim is not NORM_HEADS_BACKWARD:
        return "no packed gradients go through a norm"
    chain = [n for n in (pack, turn) if n is not None]
    for before, after in zip(chain, (*chain[1:], norm), strict=True):
        if after.inputs[0] != before.out or after.parts != pack.parts or before.out in call.writes:
            return "the packed gradients are not what comes next, or are read as they are too"
    by_name: dict[str, Node] = {}
    for node in readers:
        if node.inputs[0] != norm.out or node.prim.name in by_name:
            return "the gradient is quantized or summed twice, or something else is"
        by_name[node.prim.name] = node
    if "quantize" not in by_name:
        return "the gradient is not quantized"
    return Members(pack, turn, norm, by_name["quantize"], by_name.get("reduce"))


def refuse(call: Call) -> str | None:
    """Formats with more than one scale, heads that cross tiles, dtypes and rotations without a kernel."""
    members = members_of(call)
    if isinstance(members, str):
        return members
    parts, norm, turn = members.norm.parts, members.norm, members.turn
    if len(parts) > MAX_PARTS:
        return f"{len(parts)} parts; up to {MAX_PARTS} are read at once"
    if any(size > TILE_COLS for _, size in parts):
        return f"heads of more than {TILE_COLS} features do not lie in one tile"
    if len({call.spec(v).dtype for v in (*members.pack.inputs, norm.inputs[1])}) > 1:
        return "the gradients and what was normalised have different dtypes"
    reason = refuse_norm(call, norm) or _refuse_readers(call, members)
    if reason is None and turn is not None:
        reason = refuse_turn(call, turn) if turn.inverse else "the gradients turn forward"
    return reason


def _refuse_readers(call: Call, members: Members) -> str | None:
    quantize, reduce = members.quantize, members.reduce
    assert quantize is not None
    if type(quantize.quantizer) not in PER_TENSOR or is_known(quantize):
        return (
            f"no kernel for {quantize.quantizer.describe()}: one scale a tensor, which is made here"
        )
    if reduce is not None and (reduce.over != "rows" or reduce.dtype not in CTYPES):
        return f"a sum over {reduce.over} in {reduce.dtype}; over rows, in FP32, BF16 and FP16"
    return refuse_state(call, quantize)


def _shape(call: Call, members: Members) -> Shape:
    """As of the norm alone, with the rotation."""
    made, turn = shape_of(call, members.norm, None), members.turn
    if turn is None:
        return made
    table = call.spec(turn.inputs[1])
    by = by_of(table, len(call.spec(members.norm.out).shape) - 1, turn.axis)
    half = int(table.shape[-1])
    turned = Turn(turn.parts, turn.turned, half, turn.interleaved, True, by, made.turn.dtype)
    return replace(made, turn=turned, turns=True)


def _source(shape: Shape, sums: bool) -> Source:
    turn, parts = shape.turn, len(shape.turn.parts)
    ctype = (
        f"te::HeadsNormBack<{shape.types}, {shape.flags}, {flag(sums)}, {flag(shape.turns)}, "
        f"{flag(turn.interleaved)}, {turn.by}>"
    )
    return Source(
        INCLUDE + shape.layout(), ctype, 1 + sums, turn.width, 4 * parts + 4, _no_slots, True,
        in_bytes=2 * turn.dtype.itemsize + 8,
    )  # fmt: skip


def _no_slots(_: Sequence[torch.Tensor]) -> list[int]:
    raise AssertionError("the slots of heads are made by their launch")


def bind(call: Call) -> Launch:
    """The launch of a call: one pass, and sums of the tiles' sums."""
    members = members_of(call)
    assert isinstance(members, Members)
    shape, norm, quantize = _shape(call, members), members.norm, members.quantize
    assert quantize is not None
    gammas = [Value(norm.id, i) in call.writes for i in range(1, len(norm.inputs) - 2)]
    dtype, dense = call.spec(norm.out).dtype, norm.out in call.writes
    wanted = wanted_of(call, quantize, dtype if dense else None, dtype)
    if members.reduce is not None:
        wanted = replace(wanted, sums=members.reduce.dtype)
    parts = [Part(quantize.quantizer, wanted)]
    if any(gammas):
        parts.append(Part(None, Wanted(False, False, False, None, None, dtype, sums=torch.float32)))
    run_parts = parts_kernel(_source(shape, any(gammas)), parts, call.arch)
    by_heads = _by_heads(shape, call.arch) if any(gammas) else None
    front = _inputs(call, members, shape)
    state = state_place(call, quantize)
    names = {norm.out: "dense"} | {
        Value(quantize.id, i): name for i, name in enumerate(("row", "col", "amax"))
    }
    if members.reduce is not None:
        names[members.reduce.out] = "sums"
    order = [names.get(v, v.index - 1) for v in call.writes]  # a number: of a gamma

    def run(*reads: torch.Tensor) -> Any:
        x, slots, kept = front(reads)
        check_chunks(x.numel() // 8, x)
        scales = [None if state is None else reads[state], None][: len(parts)]
        made = run_parts(slots, lead_of(x.shape), x.device, scales)
        del kept  # copies, if any, until the launches are issued
        totals = by_heads(made[1].sums, gammas) if by_heads is not None else []
        outs = tuple(getattr(made[0], n) if isinstance(n, str) else totals[n] for n in order)
        return outs[0] if len(outs) == 1 else outs

    return run


def _by_heads(shape: Shape, arch: str) -> Callable[[Any, Sequence[bool]], list[Any]]:
    """The gradients of gammas that are wanted, from sums over rows: those of a part's heads are added."""
    assert shape.gamma is not None
    dtype, kernel = shape.gamma, slices_kernel(shape.gamma, arch)
    starts, begin = [], 0
    for (heads, size), has in zip(shape.turn.parts, shape.normed, strict=True):
        if has:
            starts.append((begin, heads, size))
        begin += heads * size

    def run(sums: torch.Tensor, gammas: Sequence[bool]) -> list[Any]:
        made: list[Any] = []
        for (begin, heads, size), want in zip(starts, gammas, strict=True):
            made.append(launch.empty((size,), dtype, sums.device) if want else None)
            if want:
                at = sums.data_ptr() + 4 * begin
                kernel(sums.device, -(-size // 64), at, made[-1].data_ptr(), size, heads)
        return made

    return run


Front = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, list[int], list[Any]]]


def _inputs(call: Call, members: Members, shape: Shape) -> Front:
    """What was normalised, the slots of the source, and whose memory these are."""
    pack, norm, turn = members.pack, members.norm, members.turn
    places = [call.reads.index(v) for v in pack.inputs]
    x_at, scale_at, *gamma_at = (call.reads.index(v) for v in norm.inputs[1:])
    table_at = None if turn is None else call.reads.index(turn.inputs[1])

    def front(reads: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int], list[Any]]:
        x, scale = launch.ready(reads[x_at]), launch.ready(reads[scale_at])
        weights = [launch.ready(reads[i]) for i in gamma_at]
        table = None if table_at is None else launch.ready(reads[table_at])
        pieces: list[torch.Tensor | None] = [None] * len(pack.parts)
        for place, at in zip(pack.filled, places, strict=True):
            pieces[place] = fit(reads[at], True)
        *strides, address, count = shape.turn.slots(pieces, table)
        slots = [*strides, x.data_ptr(), scale.data_ptr(), *shape.spread(weights), address, count]
        return x, slots, [scale, weights, table, pieces]

    return front


__all__ = ["bind", "refuse"]
