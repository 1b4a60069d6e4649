"""pointwise, sum: any expression, one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from te_ops.backends.chains import sum_fn
from te_ops.backends.cuda import launch
from te_ops.backends.cuda.source import (
    CTYPES,
    Source,
    flag,
    pointwise_source,
    prepare,
    refuse_pointwise,
)
from te_ops.errors import ShapeError
from te_ops.graph import Node
from te_ops.registry import Call, Launch

THREADS = 256
FAST = frozenset({torch.bfloat16})
"""Output dtypes that hide the error of approximate functions."""


def refuse(call: Call) -> str | None:
    """Operands that the text does not read."""
    node = call.node
    specs = [call.spec(v) for v in node.inputs]
    return refuse_pointwise(node.fn, specs, node.broadcast, node.interleave, node.dtype)


def bind(call: Call) -> Launch:
    """The launch of one pointwise node."""
    node = call.node
    specs = [call.spec(v) for v in node.inputs]
    source = pointwise_source(
        node.fn, specs, node.broadcast, node.interleave, fast=node.dtype in FAST
    )
    return elementwise_launch(source, picked(call, node), node.broadcast, node.dtype, call.arch)


def picked(call: Call, node: Node) -> tuple[int, ...]:
    """Where each input of a node is among what the call reads."""
    return tuple(call.reads.index(v) for v in node.inputs)


def elementwise_launch(
    source: Source, order: Sequence[int], broadcast: Sequence[str], dtype: torch.dtype, arch: str
) -> Launch:
    """Write the outputs of a source to a new tensor."""
    flags = f"{access(source)}, {flag(source.scattered)}, {flag(source.flat)}"
    head = (
        f"{source.head}struct Parameters {{ {source.ctype} source; {CTYPES[dtype]}* y; "
        "te::i64 rows; te::PairLayout at; };\n"
    )
    body = (
        f"te::pointwise<{source.ctype}, {CTYPES[dtype]}, {flags}, {THREADS}>"
        "(p.source, p.y, p.rows, p.at);"
    )
    text = launch.text_of(name="pointwise", head=head, body=body, threads=THREADS)
    function = launch.build("pointwise", text, arch, THREADS, source.count + 4)
    full = next(i for i, kind in enumerate(broadcast) if kind == "full")
    flat, outs = source.flat, source.outs
    block = source.block or source.width

    def run(*reads: torch.Tensor) -> torch.Tensor:
        xs = prepare([reads[i] for i in order], broadcast)
        x = xs[full]
        shape, rows, width = output_shape(x, source)
        y = launch.empty(shape, dtype, x.device)
        if y.numel() == 0:
            return y
        if flat:
            rows, width = 1, y.numel() // outs
        chunks = rows * -(-width // 8)
        check_chunks(chunks, x)
        slots = source.slots(xs)
        function(
            x.device,
            -(-chunks // THREADS),
            *slots,
            y.data_ptr(),
            rows,
            width,
            width if flat else block,
        )
        return y

    return run


def output_shape(x: torch.Tensor, source: Source) -> tuple[tuple[int, ...], int, int]:
    """Shape of the result of a full operand, and it as a matrix (rows, width of one output)."""
    width = source.width
    if not x.dim():
        return (), 1, 1
    lead = x.shape[:-1]
    return (*lead, width * source.outs), math.prod(lead), width


def check_chunks(chunks: int, x: torch.Tensor) -> None:
    """Chunks are numbered in 32 bits."""
    if chunks >= 1 << 32:
        raise ShapeError(
            f"a tensor of shape {tuple(x.shape)} is too large for one kernel; split it"
        )


def access(source: Source) -> str:
    """How the chunks of a source lie."""
    return "te::TAILED" if source.flat else "te::WHOLE" if source.aligned else "te::ANYWHERE"


# -- sum


def refuse_sum(call: Call) -> str | None:
    """As for pointwise."""
    node = call.node
    if len(node.inputs) > 8:
        return f"{len(node.inputs)} operands; up to 8 are read at once"
    specs = [call.spec(v) for v in node.inputs]
    return refuse_pointwise(sum_fn(len(specs)), specs, ("full",) * len(specs), None, node.dtype)


def bind_sum(call: Call) -> Launch:
    """Fan-in sums, in operand order."""
    node = call.node
    specs = [call.spec(v) for v in node.inputs]
    kinds = ("full",) * len(specs)
    source = pointwise_source(sum_fn(len(specs)), specs, kinds, None, fast=False)
    return elementwise_launch(source, picked(call, node), kinds, node.dtype, call.arch)
