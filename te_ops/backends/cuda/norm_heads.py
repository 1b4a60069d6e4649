"""The norm of queries and keys in a packed tensor, with the rotation behind it, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.reduce import slices_kernel
from te_ops.backends.cuda.rope import Member, Turn, by_of
from te_ops.backends.cuda.source import CTYPES, flag, literal
from te_ops.basic.heads import Parts
from te_ops.basic.heads_norm import NORM_HEADS_BACKWARD
from te_ops.graph import Node, Value
from te_ops.registry import Call, Launch

INCLUDE = "#include <kernels/norm_heads.cuh>\n"
THREADS = 256
LANES = 32
"""Threads that a head may lie in: those of a warp."""
BLOCKS = 1056
"""Of a backward pass: eight a multiprocessor of an H200. The gradients of gammas are sums of so many."""


@dataclass(frozen=True)
class Shape:
    """What the kernels are made for."""

    turn: Turn
    normed: tuple[bool, ...]
    gamma: torch.dtype | None  # None: L2
    zero_centered: bool
    turns: bool

    @property
    def lanes(self) -> int:
        """Threads of a head."""
        return self.turn.parts[0][1] // 8

    @property
    def heads(self) -> int:
        """Of a row."""
        return sum(heads for heads, _ in self.turn.parts)

    @property
    def count(self) -> int:
        """Heads of a row that are normalised."""
        return sum(h for (h, _), has in zip(self.turn.parts, self.normed, strict=True) if has)

    def layout(self) -> str:
        """The struct `Parts` of the text."""
        counts = [h * has for (h, _), has in zip(self.turn.parts, self.normed, strict=True)]
        members: tuple[Member, ...] = (
            ("bool", "normed", [flag(n) for n in self.normed]),
            ("int", "first", [sum(counts[:i]) for i in range(len(counts))]),
            ("int", "own", [h for h, _ in self.turn.parts]),
        )
        numbers = f", width = {self.turn.width}, heads = {self.heads}, count = {self.count}"
        return self.turn.layout(numbers, members)

    @property
    def types(self) -> str:
        """Template arguments that all texts begin with."""
        gamma = CTYPES[self.gamma or torch.float32]
        return f"{CTYPES[self.turn.dtype]}, {gamma}, Parts"

    @property
    def flags(self) -> str:
        """L2, and whether gammas are zero-centered."""
        return f"{flag(self.gamma is None)}, {flag(self.zero_centered)}"

    def spread(self, xs: Sequence[torch.Tensor]) -> list[int]:
        """Addresses by part, from one tensor for each normalised part (or none at all)."""
        given = iter(xs)
        return [next(given).data_ptr() if has and xs else 0 for has in self.normed]


def shape_of(call: Call, norm: Node, turn: Node | None) -> Shape:
    """Of a norm node, and of the rotation behind it."""
    backward = norm.prim is NORM_HEADS_BACKWARD
    x, gammas = call.spec(norm.inputs[0]), norm.inputs[3 if backward else 1 :]
    gamma = call.spec(gammas[0]).dtype if gammas else None
    made = Turn(norm.parts, (False,) * len(norm.parts), 0, False, False, "te::BY_ROW", x.dtype)
    if turn is not None:
        table = call.spec(turn.inputs[1])
        by = by_of(table, len(x.shape) - 1, turn.axis)
        half = int(table.shape[-1])
        made = Turn(turn.parts, turn.turned, half, turn.interleaved, turn.inverse, by, x.dtype)
    return Shape(made, norm.normed, gamma, bool(norm.zero_centered), turn is not None)


def _members(call: Call) -> tuple[Node, Node | None]:
    return call.nodes[0], call.nodes[1] if len(call.nodes) > 1 else None


def refuse(call: Call) -> str | None:
    """Dtypes without a kernel, heads that are no power of two of chunks, a norm that is read as it is too."""
    norm, turn = _members(call)
    reason = refuse_norm(call, norm)
    if reason is not None or turn is None:
        return reason
    if turn.inputs[0] != norm.out or norm.out in call.writes:
        return "the normalised heads are read before they turn too"
    if turn.inverse:
        return "heads turn back, behind a norm"
    return refuse_turn(call, turn)


def refuse_turn(call: Call, turn: Node) -> str | None:
    """Tables in other dtypes, and rotations whose pairs lie in chunks that do not meet."""
    table = call.spec(turn.inputs[1])
    if table.dtype is not torch.float32:
        return f"the table is {table.dtype}; FP32 is read"
    half = int(table.shape[-1])
    whole = half % 4 == 0 if turn.interleaved else half >= 8 and half & (half - 1) == 0
    return None if whole else f"{half} pairs of a head turn: chunks of eight features do not meet"


def refuse_norm(call: Call, norm: Node) -> str | None:
    """Dtypes, and heads that are no power of two of chunks."""
    dtypes = {call.spec(v).dtype for v in norm.inputs}
    if not dtypes <= CTYPES.keys():
        return f"reads FP32, BF16 and FP16, not {', '.join(sorted(str(d) for d in dtypes))}"
    gammas = norm.inputs[3 if norm.prim is NORM_HEADS_BACKWARD else 1 :]
    if len({call.spec(v).dtype for v in gammas}) > 1:
        return "gammas have different dtypes"
    return refuse_sizes(norm.parts)


def refuse_sizes(parts: Parts) -> str | None:
    """Heads that do not lie in adjacent threads of a warp, eight features each, all alike."""
    sizes = {size for _, size in parts}
    if len(sizes) > 1:
        return f"heads have {sorted(sizes)} features; all of one row have the same here"
    lanes, rest = divmod(sizes.pop(), 8)
    if rest or not 1 <= lanes <= LANES or lanes & (lanes - 1):
        return f"heads of {8 * lanes + rest} features; 8, 16, 32, 64, 128 and 256 fit a warp"
    return None


def refuse_backward(call: Call) -> str | None:
    """As for forward."""
    return refuse_norm(call, call.node)


def bind(call: Call) -> Launch:
    """The launch of a norm, or of a norm and the rotation behind it: (y[, scale])."""
    norm, turn = _members(call)
    shape = shape_of(call, norm, turn)
    turned = shape.turn
    # Rounding contract: a node of which something is written is rounded.
    rounds = turn is not None and Value(norm.id, 1) in call.writes
    arguments = f"te::NormHeadsArguments<{shape.types}>"
    flags = f"{shape.flags}, {flag(rounds)}, {flag(shape.turns)}, {flag(turned.interleaved)}"
    body = (
        f"te::norm_heads<{shape.types}, {flags}, {turned.by}, {THREADS}>(p.a, {literal(norm.eps)});"
    )
    head = f"{INCLUDE}{shape.layout()}struct Parameters {{ {arguments} a; }};\n"
    text = launch.text_of(name="norm_heads", head=head, body=body, threads=THREADS)
    function = launch.build("norm_heads", text, call.arch, THREADS, 6 + len(norm.parts))
    at, *places = (call.reads.index(v) for v in norm.inputs)
    table_at = None if turn is None else call.reads.index(turn.inputs[1])
    names = {(turn or norm).out: 0, Value(norm.id, 1): 1}
    picks = tuple(names[v] for v in call.writes)

    def run(*reads: torch.Tensor) -> Any:
        x, gammas = launch.ready(reads[at]), [launch.ready(reads[i]) for i in places]
        table = None if table_at is None else launch.ready(reads[table_at])
        lead = x.shape[:-1]
        y = launch.empty(x.shape, x.dtype, x.device) if 0 in picks else None
        scale = launch.empty((*lead, shape.count), torch.float32, x.device) if 1 in picks else None
        rows = math.prod(lead)
        if rows:
            slots = (
                x.data_ptr(), *shape.spread(gammas), _address(table), turned.places(lead),
                _address(y), _address(scale), rows,
            )  # fmt: skip
            function(x.device, -(-rows * shape.heads * shape.lanes // THREADS), *slots)
        outs = (y, scale)
        return outs[picks[0]] if len(picks) == 1 else tuple(outs[i] for i in picks)

    return run


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def bind_backward(call: Call) -> Launch:
    """The launch of a gradient: (dx, the gradients of the gammas), those that are wanted."""
    node = call.node
    shape = shape_of(call, node, None)
    arguments = f"te::NormHeadsBackward<{shape.types}>"
    head = f"{INCLUDE}{shape.layout()}struct Parameters {{ {arguments} a; }};\n"
    body = f"te::norm_heads_backward<{shape.types}, {shape.flags}, {THREADS}>(p.a);"
    text = launch.text_of(name="norm_heads_backward", head=head, body=body, threads=THREADS)
    count = 5 + 2 * len(node.parts)
    function = launch.build("norm_heads_backward", text, call.arch, THREADS, count)
    order = tuple(call.reads.index(v) for v in node.inputs)
    picks = tuple(v.index for v in call.writes)
    wanted = [i + 1 in picks for i in range(len(order) - 3)]  # by gamma
    total = None if shape.gamma is None else slices_kernel(shape.gamma, call.arch)
    size = node.parts[0][1]

    def run(*reads: torch.Tensor) -> Any:
        dy, x, scale, *gammas = (launch.ready(reads[i]) for i in order)
        rows = math.prod(x.shape[:-1])
        dx = launch.empty(x.shape, x.dtype, x.device) if 0 in picks else None
        blocks = min(BLOCKS, -(-rows * shape.heads * shape.lanes // THREADS))
        partial = [
            launch.empty((max(blocks, 1), size), torch.float32, x.device) if want else None
            for want in wanted
        ]
        if rows:
            given = iter(partial)
            places = [_address(next(given)) if has and partial else 0 for has in shape.normed]
            slots = (
                dy.data_ptr(),
                x.data_ptr(),
                scale.data_ptr(),
                *shape.spread(gammas),
                _address(dx),
            )
            function(x.device, blocks, *slots, *places, rows)
        outs: list[torch.Tensor | None] = [dx]
        for part in partial:
            if part is None or total is None:
                outs.append(None)
                continue
            y = launch.empty((size,), gammas[0].dtype, x.device)
            slices = blocks if rows else 0
            total(x.device, -(-size // 64), part.data_ptr(), y.data_ptr(), size, slices)
            outs.append(y)
        return outs[picks[0]] if len(picks) == 1 else tuple(outs[i] for i in picks)

    return run


__all__ = ["bind", "bind_backward", "refuse", "refuse_backward"]
