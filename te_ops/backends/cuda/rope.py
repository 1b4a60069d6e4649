"""Rotary position embedding: its table, and heads turned where they lie, alone or before a quantize.

One pass reads the parts of a packed tensor, or the tensors that are packed by it, and writes the packed result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from te_ops.backends.chains import rounding
from te_ops.backends.cuda import launch
from te_ops.backends.cuda.block import make_blocked, shape_of
from te_ops.backends.cuda.pointwise import THREADS, access, check_chunks
from te_ops.backends.cuda.quantize import (
    BLOCKED,
    is_known,
    make_run,
    refuse_quantizer,
    refuse_state,
    state_place,
    wanted_of,
)
from te_ops.backends.cuda.source import CTYPES, Source, flag, literal
from te_ops.backends.cuda.targets import Part
from te_ops.backends.cuda.wanted import Run, Wanted
from te_ops.basic.heads import PACK_HEADS, Parts, views_of, width_of
from te_ops.basic.rope import ROPE, ROPE_HEADS
from te_ops.basic.rope_scaling import frequencies
from te_ops.graph import Node, Spec, Value
from te_ops.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer
from te_ops.registry import Call, Launch
from te_ops.runtime.tape import recorder, unwatched

MAX_PARTS = 4
TILE_COLUMNS = 128
"""Of `te::Tile`, a row of which sixteen threads of a warp read."""
INCLUDE = "#include <kernels/rope.cuh>\n"
_BY_ROW, _BY_REMAINDER, _BY_QUOTIENT = "te::BY_ROW", "te::BY_REMAINDER", "te::BY_QUOTIENT"


# -- the table


def refuse_table(call: Call) -> str | None:
    """Starts and frequencies that are known at run time only, FP64."""
    node = call.node
    if len(node.inputs) > 1:
        return "the first position is known at run time only"
    if node.dtype is not torch.float32:
        return f"writes FP32, not {node.dtype}"
    scaling = node.attrs.get("scaling")
    if scaling is not None and scaling.needs_length:
        return f"frequencies of rope_type {scaling.kind!r} depend on the length"
    return None


def bind_table(call: Call) -> Launch:
    """The launch of a table: frequencies are made once."""
    node, device = call.node, call.device
    dim, base, scaling, start = node.dim, node.base, node.attrs.get("scaling"), int(node.start)
    amplitude = 1.0 if scaling is None else float(scaling.amplitude)
    head = f"{INCLUDE}struct Parameters {{ float* table; const float* frequency; te::i64 rows, half, start; }};\n"
    body = (
        f"te::rope_table<{THREADS}>(p.table, p.frequency, p.rows, p.half, p.start, "
        f"{literal(amplitude)});"
    )
    text = launch.text_of(name="rope_table", head=head, body=body, threads=THREADS)
    function = launch.build("rope_table", text, call.arch, THREADS, 5)
    with unwatched():
        like = torch.empty((), dtype=torch.float32, device=device)
        frequency = frequencies(dim, base, scaling, 0, like).contiguous()

    def run(length: Sequence[int]) -> torch.Tensor:
        rows, half = int(length[0]), dim // 2
        table = launch.empty((rows, 2, half), torch.float32, device)
        if rows:
            check_chunks(rows * half, table)
            blocks = -(-rows * half // THREADS)
            function(device, blocks, table.data_ptr(), frequency.data_ptr(), rows, half, start)
            if (tape := recorder()) is not None:
                tape.keep(frequency)
        return table

    return run


# -- the source

Member = tuple[str, str, Sequence[Any]]
"""C++ type, name, and the value for each part."""


@dataclass(frozen=True)
class Turn:
    """What is read, and what of it turns.

    Attributes:
        parts: heads side by side in the result.
        turned: which of them turn.
        half: pairs of a head.
        by: how rows find their place in the table.
    """

    parts: Parts
    turned: tuple[bool, ...]
    half: int
    interleaved: bool
    inverse: bool
    by: str
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Columns of the result."""
        return width_of(self.parts)

    @property
    def chunked(self) -> bool:
        """Whether eight columns lie in one head and all of them turn with eight others, or none."""
        rotated = 2 * self.half if self.interleaved else self.half
        return rotated % 8 == 0 and all(size % 8 == 0 for _, size in self.parts)

    @property
    def halved(self) -> bool:
        """Whether every head has two halves of chunks, each of which turns with its partner or not at all."""
        whole = all(
            n == 2 * self.half for (_, n), t in zip(self.parts, self.turned, strict=True) if t
        )
        return whole and not self.interleaved and all(n % 16 == 0 for _, n in self.parts)

    @property
    def apart(self) -> int:
        """How many chunks from one to its partners, where both lie in one row of a tile: 0 where they may not."""
        within = not TILE_COLUMNS % max(2 * self.half, 1) and self.half % 8 == 0
        whole = all(n % (2 * self.half or 1) == 0 for _, n in self.parts)
        return self.half // 8 if self.chunked and not self.interleaved and within and whole else 0

    @property
    def paired(self) -> bool:
        """Whether the left half of a row and the right one turn by the same angles, tile by tile; for two outputs in
        FP32 there is no room."""
        sizes, half = {n for _, n in self.parts}, self.width // 2
        alike = len(sizes) == 1 and not half % min(sizes) and self.dtype.itemsize == 2
        return self.apart > 0 and alike and not half % TILE_COLUMNS

    def layout(self, numbers: str = "", members: Sequence[Member] = ()) -> str:
        """The struct `Parts` of the text: what is known of each part, and more `numbers` and `members`."""
        ends = [width_of(self.parts[: i + 1]) for i in range(len(self.parts))]
        own: tuple[Member, ...] = (
            ("int", "end", ends),
            ("int", "size", [size for _, size in self.parts]),
            ("bool", "turned", [flag(t) for t in self.turned]),
        )
        functions = "".join(
            f"  static TE_DEVICE constexpr {kind} {name}(int p) {{ return {_chosen(values)}; }}\n"
            for kind, name, values in (*own, *members)
        )
        return (
            f"struct Parts {{\n  static constexpr int parts = {len(self.parts)}, half = {self.half}"
            f"{numbers};\n{functions}}};\n"
        )

    def source(self, apart: int = 0) -> Source:
        """The `Source`; its slots are those of `slots`. `apart`: partners come from the thread that read them."""
        head = f"{INCLUDE}{self.layout()}"
        ctype = (
            f"te::Heads<{CTYPES[self.dtype]}, Parts, {flag(self.interleaved)}, {flag(self.inverse)}, "
            f"{self.by}, {flag(self.chunked)}, {apart}>"
        )
        count = 3 * len(self.parts) + 2
        chunked = self.chunked
        return Source(
            head, ctype, 1, self.width, count, _no_slots, chunked, in_bytes=3 * self.dtype.itemsize
        )

    def pairs(self) -> Source:
        """The same as two outputs, beside each other."""
        ctype = f"te::HeadPairs<{CTYPES[self.dtype]}, Parts, {flag(self.inverse)}, {self.by}, {self.apart}>"
        one = self.source(self.apart)
        return replace(one, ctype=ctype, outs=2, width=self.width // 2)

    def slots(self, pieces: Sequence[torch.Tensor | None], table: torch.Tensor | None) -> list[int]:
        """The slots for pieces [.., heads, features] (None: zeros)."""
        there = next(piece for piece in pieces if piece is not None)
        found = [(0, 0, 0) if piece is None else _lying(piece) for piece in pieces]
        address = 0 if table is None else table.data_ptr()
        return [
            *(place[k] for k in range(3) for place in found),
            address,
            self.places(there.shape[:-2]),
        ]

    def places(self, lead: Sequence[int]) -> int:
        """What the row number is divided by to find its place in the table, see `te::BY_ROW`."""
        if len(lead) < 2 or self.by == _BY_ROW:
            return 1
        return max(int(lead[-1] if self.by == _BY_REMAINDER else lead[1]), 1)


def _no_slots(_: Sequence[torch.Tensor]) -> list[int]:
    raise AssertionError("the slots of heads come from Turn.slots")


def _chosen(values: Sequence[Any]) -> str:
    """A C++ expression for values[p]."""
    text = str(values[-1])
    for i in range(len(values) - 2, -1, -1):
        text = f"p == {i} ? {values[i]} : {text}"
    return text


def _lying(piece: torch.Tensor) -> tuple[int, int, int]:
    """Address, and elements from a row and from a head to the next."""
    rows = [s for n, s in zip(piece.shape[:-2], piece.stride()[:-2], strict=True) if n > 1]
    return piece.data_ptr(), rows[-1] if rows else 0, piece.stride(-2)


def fit(piece: torch.Tensor, chunked: bool) -> torch.Tensor:
    """The piece where it lies, if rows are one stride apart (and its chunks on 16 bytes); else a copy."""
    leads = [(n, s) for n, s in zip(piece.shape[:-2], piece.stride()[:-2], strict=True) if n > 1]
    flat = all(a[1] == b[0] * b[1] for a, b in pairwise(leads))
    together = piece.stride(-1) == 1 or piece.shape[-1] == 1
    whole = 16 // piece.element_size()
    strides = (*(s for _, s in leads), piece.stride(-2) if piece.shape[-2] > 1 else 0)
    placed = piece.data_ptr() % 16 == 0 and not any(s % whole for s in strides)
    if flat and together and (placed or not chunked):
        return piece
    made = piece.contiguous()
    return made.clone() if made.data_ptr() % 16 else made


# -- what a call reads


@dataclass(frozen=True)
class Members:
    """The nodes of a call: what packs, what turns (at least one of them), what quantizes."""

    pack: Node | None
    turn: Node | None
    quantize: Node | None

    @property
    def last(self) -> Node:
        """The node that makes the values."""
        made = self.turn or self.pack
        assert made is not None
        return made

    @property
    def pieces(self) -> tuple[Value, ...]:
        """The tensor whose heads turn, or the tensors that are packed."""
        return self.last.inputs[:1] if self.pack is None else self.pack.inputs

    @property
    def table(self) -> Value | None:
        """Of the angles."""
        return None if self.turn is None else self.turn.inputs[1]

    @property
    def whole(self) -> bool:
        """Whether one tensor of heads turns, with a result of its shape."""
        return self.last.prim is ROPE


def members_of(call: Call) -> Members | str:
    """The members of a call, or why it is none of these kernels."""
    nodes = list(call.nodes)
    pack = nodes.pop(0) if nodes[0].prim is PACK_HEADS else None
    turn = nodes.pop(0) if nodes and nodes[0].prim in (ROPE, ROPE_HEADS) else None
    quantize = nodes.pop(0) if nodes else None
    if pack is None and turn is None:
        return "no heads are packed or turned"
    made = Members(pack, turn, quantize)
    if pack is not None and turn is not None:
        if turn.inputs[0] != pack.out or pack.out in call.writes:
            return "the packed heads are read as they are too"
        if pack.parts != turn.parts:
            return f"heads are packed as {pack.parts} and turned as {turn.parts}"
    if quantize is not None and quantize.inputs[0] != made.last.out:
        return "the heads are not what is quantized"
    return made


def by_of(table: Spec, leads: int, axis: int) -> str:
    """How rows of so many leading dimensions find their place in a table."""
    if len(table.shape) != 3 or leads != 2:
        return _BY_ROW
    return _BY_REMAINDER if axis == 1 else _BY_QUOTIENT


def turn_of(call: Call, members: Members) -> Turn:
    """What the kernel is made for."""
    x = call.spec(members.pieces[0])
    if members.turn is None:
        assert members.pack is not None
        parts: Parts = members.pack.parts
        return Turn(parts, (False,) * len(parts), 0, False, False, _BY_ROW, x.dtype)
    node, table = members.turn, call.spec(members.turn.inputs[1])
    parts = ((int(x.shape[-2]), int(x.shape[-1])),) if members.whole else node.parts
    leads = len(x.shape) - (2 if members.whole or members.pack is not None else 1)
    by = by_of(table, leads, node.axis)
    turned = (True,) if members.whole else node.turned
    return Turn(parts, turned, int(table.shape[-1]), node.interleaved, node.inverse, by, x.dtype)


def refuse(call: Call) -> str | None:
    """Dtypes without a kernel, many parts, formats that are not quantized here."""
    members = members_of(call)
    if isinstance(members, str):
        return members
    x = call.spec(members.pieces[0])
    if x.dtype not in CTYPES:
        return f"reads FP32, BF16 and FP16, not {x.dtype}"
    if members.table is not None and call.spec(members.table).dtype is not torch.float32:
        return f"the table is {call.spec(members.table).dtype}; FP32 is read"
    turn = turn_of(call, members)
    if len(turn.parts) > MAX_PARTS:
        return f"{len(turn.parts)} parts; up to {MAX_PARTS} are read at once"
    if not turn.width:
        return "heads without features"
    return None if members.quantize is None else _refuse_quantize(call, members, members.quantize)


def _refuse_quantize(call: Call, members: Members, node: Node) -> str | None:
    rounds = rounding(call, members.last.out in call.writes, call.spec(members.last.out).dtype)
    waits = isinstance(node.quantizer, Float8CurrentScalingQuantizer) and not is_known(node)
    kept = isinstance(node.quantizer, BLOCKED)
    if call.rule is not None and call.rule.exact:
        if not (waits or kept):
            return "no value is read again"
    elif kept and rounds is None:
        return "a block's values wait for its scale as they would be written: rounded"
    turn = turn_of(call, members)
    if not turn.chunked:
        return "heads or halves that are no multiple of eight features are turned before they are quantized"
    width = turn.width
    return refuse_state(call, node) or refuse_quantizer(
        node.quantizer, width, 1, fused=waits and rounds is None
    )


def bind(call: Call) -> Launch:
    """The launch of a call."""
    members = members_of(call)
    assert isinstance(members, Members)
    turn = turn_of(call, members)
    read = _reader(call, members, turn)
    if members.quantize is None:
        return _bind_dense(call, members, turn, read)
    return _bind_quantize(call, members, turn, read)


Read = Any
"""read(tensors) -> (slots, leading dimensions, (device, and what must live until the launch is issued))."""


def _reader(call: Call, members: Members, turn: Turn) -> Read:
    places = tuple(call.reads.index(v) for v in members.pieces)
    at = None if members.table is None else call.reads.index(members.table)
    filled = members.pack.filled if members.pack is not None else ()
    chunked, whole = turn.chunked, members.whole

    def read(reads: Sequence[torch.Tensor]) -> Any:
        xs = [reads[i] for i in places]
        table = None if at is None else launch.ready(reads[at])
        pieces: list[torch.Tensor | None]
        if filled:
            pieces = [None] * len(turn.parts)
            for place, x in zip(filled, xs, strict=True):
                pieces[place] = fit(x, chunked)
            lead = tuple(xs[0].shape[:-2])
        elif whole:
            pieces, lead = [fit(xs[0], chunked)], tuple(xs[0].shape[:-2])
        else:
            packed = fit(xs[0].unsqueeze(-2), chunked).squeeze(-2)
            pieces, lead = list(views_of(packed, turn.parts)), tuple(packed.shape[:-1])
        return turn.slots(pieces, table), lead, (xs[0].device, pieces, table)

    return read


def _bind_dense(call: Call, members: Members, turn: Turn, read: Read) -> Launch:
    """One chunk of the result a thread, or one of each half of a head."""
    source, ctype = turn.source(), CTYPES[turn.dtype]
    head = (
        f"{source.head}struct Parameters {{ {source.ctype} source; {ctype}* y; te::i64 rows; "
        "te::PairLayout at; };\n"
    )
    body = (
        f"te::pointwise<{source.ctype}, {ctype}, {access(source)}, false, false, {THREADS}>"
        "(p.source, p.y, p.rows, p.at);"
    )
    each = 8
    if turn.halved:
        each = 16
        body = f"te::turn_halves<{source.ctype}, Parts, {ctype}, {THREADS}>(p.source, p.y, p.rows);"
    text = launch.text_of(name="rope", head=head, body=body, threads=THREADS)
    function = launch.build("rope", text, call.arch, THREADS, source.count + 4)
    width, tail = turn.width, turn.parts[0] if members.whole else (turn.width,)

    def run(*reads: torch.Tensor) -> torch.Tensor:
        slots, lead, kept = read(reads)
        device = kept[0]
        y = launch.empty((*lead, *tail), turn.dtype, device)
        if y.numel():
            rows = math.prod(lead)
            chunks = rows * -(-width // each)
            check_chunks(chunks, y)
            function(device, -(-chunks // THREADS), *slots, y.data_ptr(), rows, width, width)
        return y

    return run


def _bind_quantize(call: Call, members: Members, turn: Turn, read: Read) -> Launch:
    """One pass over tiles: FP8 copies, and the values if somebody reads them."""
    node = members.quantize
    assert node is not None
    dtype = call.spec(members.last.out).dtype
    dense = members.last.out in call.writes
    wanted = wanted_of(call, node, dtype if dense else None, rounding(call, dense, dtype))
    # MXFP8's tiles have rows of fewer threads.
    apart = 0 if isinstance(node.quantizer, MXFP8Quantizer) else turn.apart
    source = turn.pairs() if apart and turn.paired else turn.source(apart)
    run = _make_run(source, node, wanted, call.arch)
    state = state_place(call, node)
    names = {members.last.out: "dense"}
    names |= {Value(node.id, i): name for i, name in enumerate(("row", "col", "amax"))}
    order = tuple(names[v] for v in call.writes)

    def launched(*reads: torch.Tensor) -> Any:
        slots, lead, kept = read(reads)
        scale = None if state is None else reads[state]
        made = run(slots, (*lead, turn.width), kept[0], scale)
        outs = tuple(getattr(made, name) for name in order)
        return outs[0] if len(outs) == 1 else outs

    return launched


def _make_run(source: Source, node: Node, wanted: Wanted, arch: str) -> Run:
    """As `make_run`; where registers are scarcer fewer rows are loaded at once, since each comes with its angles."""
    quantizer = node.quantizer
    if not isinstance(quantizer, Float8BlockQuantizer) or int(arch.removeprefix("sm_")) >= 89:
        return make_run(source, quantizer, wanted, arch, known=is_known(node))
    cut = shape_of(source, (Part(quantizer, wanted, source.outs),), arch)
    return make_blocked(source, quantizer, wanted, arch, replace(cut, batch=1))


__all__ = ["bind", "bind_table", "refuse", "refuse_table"]
