"""RMSNorm, LayerNorm: forward, backward, gradient of gamma."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.reduce import RowSum, row_sum
from te_ops.backends.cuda.source import CTYPES, INCLUDE, Source, flag, literal, plain
from te_ops.graph import Node
from te_ops.registry import Call, Launch

HELD = 4
"""Chunks of eight columns that a thread of a norm holds, of one tensor."""


@dataclass(frozen=True)
class Shape:
    """Threads and registers for rows of a width."""

    group: int  # threads a row
    chunks: int  # chunks a thread; 0: rows too long to be held
    threads: int

    @property
    def rows(self) -> int:
        """Rows a block."""
        return self.threads // self.group


def shape_for(width: int, held: int = HELD, limit: int = 2 * HELD, most: int = 1024) -> Shape:
    """At most `most` threads for `width` columns, with about `held` chunks each, at most `limit`."""
    chunks = max(1, -(-width // 8))
    group = 4
    while group < most and group * held < chunks:
        group *= 2
    each = -(-chunks // group)
    if each > limit:
        return Shape(most, 0, most)
    return Shape(group, each, max(group, 128))


def centered(node: Node) -> bool:
    """Whether the node belongs to a LayerNorm."""
    return bool(node.prim.name.startswith("layernorm"))


def refuse(call: Call) -> str | None:
    """Dtypes that are not FP32, BF16 or FP16; no columns."""
    for value in call.node.inputs:
        if call.spec(value).dtype not in CTYPES:
            return f"reads FP32, BF16 and FP16, not {call.spec(value).dtype}"
    if not int(call.spec(call.node.inputs[0]).shape[-1]):
        return "rows without columns have no statistic"
    return None


def _flags(*values: bool | int) -> str:
    return ", ".join(flag(v) if isinstance(v, bool) else str(v) for v in values)


def norm_kernel(
    source: Source, node: Node, dtype: torch.dtype, gamma: torch.dtype, arch: str
) -> tuple[launch.Function, Shape]:
    """The forward kernel over a source: (function, threads)."""
    shape = shape_for(source.width)
    types = f"{source.ctype}, {CTYPES[dtype]}, {CTYPES[gamma]}"
    head = (
        f"#include <kernels/norm.cuh>\n{source.head}"
        f"typedef te::NormArguments<{types}> Parameters;\n"
    )
    flags = _flags(
        source.aligned,
        centered(node),
        bool(node.zero_centered),
        shape.group,
        shape.chunks,
        shape.threads,
    )
    body = f"te::norm<{types}, {flags}>(p, {literal(node.eps)});"
    text = launch.text_of(name="norm", head=head, body=body, threads=shape.threads)
    return launch.build("norm", text, arch, shape.threads, source.count + 8), shape


def bind(call: Call) -> Launch:
    """The launch of a forward norm: (y, rstd[, mean])."""
    node = call.node
    x_spec, gamma_spec = call.spec(node.inputs[0]), call.spec(node.inputs[1])
    width, dtype = int(x_spec.shape[-1]), x_spec.dtype
    function, shape = norm_kernel(plain(dtype, width), node, dtype, gamma_spec.dtype, call.arch)
    order = tuple(call.reads.index(v) for v in node.inputs)
    picks, center = tuple(v.index for v in call.writes), centered(node)

    def run(*reads: torch.Tensor) -> Any:
        x, gamma, *rest = (launch.ready(reads[i]) for i in order)
        if center:
            rest = [same_dtype(rest[0], gamma)]
        y = launch.empty(x.shape, dtype, x.device) if 0 in picks else None
        rstd = launch.empty(x.shape[:-1], torch.float32, x.device)
        mean = launch.empty(x.shape[:-1], torch.float32, x.device) if center else None
        rows = math.prod(x.shape[:-1])
        if rows:
            pointers = (x, width, gamma, rest[0] if center else None, None, y, rstd, mean)
            function(x.device, -(-rows // shape.rows), *map(slot, pointers), rows, width)
        outs = (y, rstd, mean)
        return outs[picks[0]] if len(picks) == 1 else tuple(outs[i] for i in picks)

    return run


def same_dtype(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """x in the dtype of another: the kernels read gamma and beta in one."""
    return x if x.dtype is other.dtype else x.to(other.dtype)


def slot(x: torch.Tensor | int | None) -> int:
    """A kernel's 8 bytes: a pointer (null for None) or a number."""
    return 0 if x is None else x if isinstance(x, int) else x.data_ptr()


def refuse_affine(call: Call) -> str | None:
    """As `refuse`; and gamma and beta have one dtype."""
    dtypes = {call.spec(v).dtype for v in call.node.inputs[1:3]}
    if centered(call.node) and len(dtypes) > 1:
        return f"gamma and beta have different dtypes: {', '.join(sorted(map(str, dtypes)))}"
    return refuse(call)


# -- backward


def bind_backward(call: Call) -> Launch:
    """The launch of a norm's input gradient."""
    node = call.node
    return backward_launch(call, node, tuple(call.reads.index(v) for v in node.inputs), None)


def backward_launch(call: Call, node: Node, order: tuple[int, ...], other: int | None) -> Launch:
    """dx, plus the value at position `other` of the reads."""
    dy_spec, x_spec, gamma_spec = (call.spec(v) for v in node.inputs[:3])
    width, dtype = int(x_spec.shape[-1]), x_spec.dtype
    center = centered(node)
    shape = shape_for(width, 2, 3, 512)
    types = ", ".join(CTYPES[s.dtype] for s in (x_spec, dy_spec, gamma_spec))
    flags = _flags(
        width % 8 == 0, center, bool(node.zero_centered), shape.group, shape.chunks, shape.threads
    )
    head = f"#include <kernels/norm.cuh>\ntypedef te::NormBackwardArguments<{types}> Parameters;\n"
    text = launch.text_of(
        name="norm_backward",
        head=head,
        body=f"te::norm_backward<{types}, {flags}>(p);",
        threads=shape.threads,
    )
    function = launch.build("norm_backward", text, call.arch, shape.threads, 9)

    def run(*reads: torch.Tensor) -> torch.Tensor:
        dy, x, gamma, rstd, *rest = (launch.ready(reads[i]) for i in order)
        dx = launch.empty(x.shape, dtype, x.device)
        added = None if other is None else launch.ready(reads[other])
        rows = math.prod(x.shape[:-1])
        if rows:
            pointers = (dy, x, gamma, rstd, rest[0] if center else None, added, dx)
            function(x.device, -(-rows // shape.rows), *map(slot, pointers), rows, width)
        return dx

    return run


def gamma_source(node: Node, call: Call) -> Source:
    """dy * xhat, to be summed over rows."""
    dy, x = (call.spec(v) for v in node.inputs[:2])
    center, width = centered(node), int(x.shape[-1])
    ctype = f"te::GammaTerm<{CTYPES[dy.dtype]}, {CTYPES[x.dtype]}, {_flags(center)}>"

    def slots(xs: Any) -> list[int]:
        return [*(t.data_ptr() for t in xs[:3]), xs[3].data_ptr() if center else 0, width]

    return Source(
        INCLUDE,
        ctype,
        1,
        width,
        5,
        slots,
        width % 8 == 0,
        in_bytes=dy.dtype.itemsize + x.dtype.itemsize,
    )


def bind_dgamma(call: Call) -> Launch:
    """The launch of the gradient of gamma: a sum over rows in two stages, in a fixed order."""
    node = call.node
    source = gamma_source(node, call)
    total: RowSum = row_sum(source, node.dtype, call.arch)
    order = tuple(call.reads.index(v) for v in node.inputs)

    def run(*reads: torch.Tensor) -> torch.Tensor:
        xs = [launch.ready(reads[i]) for i in order]
        return total(source.slots(xs), math.prod(xs[1].shape[:-1]), xs[1].device)

    return run


def refuse_dgamma(call: Call) -> str | None:
    """As `refuse`, and the dtype of the gradient."""
    if call.node.dtype not in CTYPES:
        return f"writes FP32, BF16 and FP16, not {call.node.dtype}"
    return refuse(call)
