"""Sums over rows, columns or everything, of a tensor or of a source, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.pointwise import access
from te_ops.backends.cuda.source import CTYPES, Source, flag, plain
from te_ops.registry import Call, Launch

THREADS = 256
TARGET_BLOCKS = 1056
"""Blocks that fill the largest device several times over."""
MAX_SLICES = 256

RowSum = Callable[[Sequence[int], int, torch.device], torch.Tensor]
"""total(slots of the source, rows, device) -> [outs * width]."""


def refuse(call: Call) -> str | None:
    """Dtypes beyond FP32, BF16 and FP16."""
    node = call.node
    for dtype in (call.spec(node.inputs[0]).dtype, node.dtype):
        if dtype not in CTYPES:
            return f"reads and writes FP32, BF16 and FP16, not {dtype}"
    return None


def bind(call: Call) -> Launch:
    """The launch of one reduce node."""
    node = call.node
    spec = call.spec(node.inputs[0])
    width = int(spec.shape[-1]) if spec.shape else 1
    source = plain(spec.dtype, width)
    if node.over == "rows":
        total = row_sum(source, node.dtype, call.arch)

        def run(x: torch.Tensor) -> torch.Tensor:
            x = launch.ready(x)
            return total([x.data_ptr(), width], math.prod(x.shape[:-1]), x.device)

        return run
    make = column_sum if node.over == "cols" else whole_sum
    inner = make(source, node.dtype, call.arch)

    def run_other(x: torch.Tensor) -> torch.Tensor:
        x = launch.ready(x)
        return inner([x.data_ptr(), width], tuple(x.shape[:-1]), x.device)

    return run_other


def row_sum(source: Source, dtype: torch.dtype, arch: str) -> RowSum:
    """Sum over rows, each column in a fixed order."""
    columns = cluster_columns(source.width, arch)
    if columns is None:
        return _slice_sum(source, dtype, arch)
    return _cluster_sum(source, dtype, arch, columns)


CLUSTER = 8
"""Blocks that share the rows of a tile of columns: as many as every device with clusters has."""


def cluster_columns(width: int, arch: str) -> int | None:
    """Columns of a cluster's tile, or None: no clusters here, or so many columns that a second launch costs less than
    clusters do. Narrow tiles keep more processors busy, wide ones read longer runs; measured on sm_90.
    """
    if int(arch.removeprefix("sm_")) < 90 or width > 8192:
        return None
    return 64 if width <= 2048 else 128


def _cluster_sum(source: Source, dtype: torch.dtype, arch: str, cols: int) -> RowSum:
    """One launch: the blocks of a cluster give their sums to the first of them."""
    head = (
        f"#include <kernels/reduce.cuh>\n{source.head}"
        f"struct Parameters {{ {source.ctype} source; {CTYPES[dtype]}* y; te::i64 rows, width; }};\n"
    )
    body = (
        f"te::sum_rows_of_cluster<{source.ctype}, {CTYPES[dtype]}, {flag(source.aligned)}, {cols}, "
        f"{CLUSTER}>(p.source, p.y, p.rows, p.width);"
    )
    text = launch.text_of(name="sum_rows", head=head, body=body, threads=THREADS, cluster=CLUSTER)
    shared = 16 + 4 * cols * (THREADS // 32 + CLUSTER * source.outs)
    function = launch.build("sum_rows", text, arch, THREADS, source.count + 3, shared=shared)
    across, total = -(-source.width // cols), source.outs * source.width

    def run(slots: Sequence[int], rows: int, device: torch.device) -> torch.Tensor:
        y = launch.empty((total,), dtype, device)
        if total:
            function(device, across * CLUSTER, *slots, y.data_ptr(), rows, source.width)
        return y

    return run


def _slice_sum(source: Source, dtype: torch.dtype, arch: str) -> RowSum:
    """Two launches: slices of rows first, then the slices."""
    head = (
        f"#include <kernels/reduce.cuh>\n{source.head}"
        f"struct Parameters {{ {source.ctype} source; float* partial; "
        "te::i64 rows, width, slices; };\n"
    )
    body = (
        f"te::sum_rows<{source.ctype}, {flag(source.aligned)}>"
        "(p.source, p.partial, p.rows, p.width, p.slices);"
    )
    text = launch.text_of(name="sum_rows", head=head, body=body, threads=THREADS)
    first = launch.build("sum_rows", text, arch, THREADS, source.count + 4)
    second = slices_kernel(dtype, arch)
    across, total = -(-source.width // 256), source.outs * source.width

    def run(slots: Sequence[int], rows: int, device: torch.device) -> torch.Tensor:
        y = launch.empty((total,), dtype, device)
        if not total:
            return y
        slices = max(1, min(MAX_SLICES, TARGET_BLOCKS // across, -(-rows // 32)))
        partial = launch.empty((slices, total), torch.float32, device)
        first(device, across * slices, *slots, partial.data_ptr(), rows, source.width, slices)
        second(device, -(-total // 64), partial.data_ptr(), y.data_ptr(), total, slices)
        return y

    return run


def slices_kernel(dtype: torch.dtype, arch: str) -> launch.Function:
    """y[c] = sum over k of partial[k, c]: slots partial, y, width, slices; 64 columns a block."""
    head = (
        "#include <kernels/reduce.cuh>\n"
        f"struct Parameters {{ const float* partial; {CTYPES[dtype]}* y; "
        "te::i64 width, slices; };\n"
    )
    body = f"te::sum_slices<{CTYPES[dtype]}>(p.partial, p.y, p.width, p.slices);"
    text = launch.text_of(name="sum_slices", head=head, body=body, threads=THREADS)
    return launch.build("sum_slices", text, arch, THREADS, 4)


Total = Callable[[Sequence[int], tuple[int, ...], torch.device], torch.Tensor]


def column_sum(source: Source, dtype: torch.dtype, arch: str) -> Total:
    """Sum over columns: a warp a row."""
    ctype = CTYPES[dtype]
    head = (
        f"#include <kernels/reduce.cuh>\n{source.head}"
        f"struct Parameters {{ {source.ctype} source; {ctype}* y; te::i64 rows, width; }};\n"
    )
    body = (
        f"te::sum_columns<{source.ctype}, {ctype}, {flag(source.aligned)}>"
        "(p.source, p.y, p.rows, p.width);"
    )
    text = launch.text_of(name="sum_columns", head=head, body=body, threads=THREADS)
    function = launch.build("sum_columns", text, arch, THREADS, source.count + 3)

    def run(slots: Sequence[int], lead: tuple[int, ...], device: torch.device) -> torch.Tensor:
        y = launch.empty(lead, dtype, device)
        rows = y.numel()
        if rows:
            function(device, -(-rows // 8), *slots, y.data_ptr(), rows, source.width)
        return y

    return run


def whole_sum(source: Source, dtype: torch.dtype, arch: str) -> Total:
    """Sum over everything: blocks first, then their sums."""
    first = _all_kernel(source, torch.float32, arch)
    second = _all_kernel(plain(torch.float32, 8), dtype, arch)
    flat = source.flat

    def run(slots: Sequence[int], lead: tuple[int, ...], device: torch.device) -> torch.Tensor:
        rows, width = math.prod(lead), source.width
        if flat:
            rows, width = 1, rows * width
        chunks = rows * -(-width // 8)
        blocks = max(1, min(TARGET_BLOCKS, -(-chunks // THREADS)))
        partial = launch.empty((blocks,), torch.float32, device)
        y = launch.empty((), dtype, device)
        first(device, blocks, *slots, partial.data_ptr(), rows, width)
        second(device, 1, partial.data_ptr(), blocks, y.data_ptr(), 1, blocks)
        return y

    return run


def _all_kernel(source: Source, dtype: torch.dtype, arch: str) -> launch.Function:
    ctype = CTYPES[dtype]
    head = (
        f"#include <kernels/reduce.cuh>\n{source.head}"
        f"struct Parameters {{ {source.ctype} source; {ctype}* y; te::i64 rows, width; }};\n"
    )
    flags = f"{access(source)}, {flag(source.flat)}"
    body = f"te::sum_all<{source.ctype}, {ctype}, {flags}>(p.source, p.y, p.rows, p.width);"
    text = launch.text_of(name="sum_all", head=head, body=body, threads=THREADS)
    return launch.build("sum_all", text, arch, THREADS, source.count + 3)
