"""The norm kernels: text, threads and registers for a width, and launches with everything given.

`norm` and `norm_quantize` decide what the calls of a plan need of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.source import CTYPES, INCLUDE, Source, flag, literal
from te_ops.graph import Node

FILES = 65536
"""Registers of a processor, from sm_80 on."""
SHARED = {80: 164, 86: 100, 89: 100}
"""KiB of shared memory of a processor; 228 from sm_90 on."""


@functools.cache
def processors(index: int | None) -> int:
    """How many processors a device has (a few for a CPU, where kernels are emulated)."""
    if index is None:
        return 3
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def number_of(arch: str) -> int:
    """90 for "sm_90"."""
    return int(arch.removeprefix("sm_").rstrip("af"))


@dataclass(frozen=True)
class Shape:
    """How rows are dealt out.

    Attributes:
        group: threads a row; chunks: chunks of eight columns a thread holds (0: rows too long to be held).
        threads: of a block; stages: rows in shared memory, all but one of them on their way (0: registers).
        resident: blocks of a processor.
        turns: rows that a group goes through, at least; 0: as many blocks as a device holds share all rows.
        cluster: blocks that share a row; each has group * chunks chunks of it (backward only).
        at_once: rows that a group has at a time, all of them in registers: of a part of a warp (forward only).
    """

    group: int
    chunks: int
    threads: int
    stages: int
    resident: int
    turns: int = 0
    cluster: int = 1
    at_once: int = 1

    @property
    def rows(self) -> int:
        """Rows a block has at a time."""
        return self.threads // self.group * self.at_once


@dataclass(frozen=True)
class Norm:
    """What a forward kernel is made for: the source, the dtype in which it is normalised, y's, gamma's."""

    source: Source
    held: torch.dtype
    out: torch.dtype
    gamma: torch.dtype
    centered: bool
    zero_centered: bool
    eps: float

    @property
    def copied(self) -> int:
        """Bytes of a chunk of all operands if they can be copied asynchronously, else 0."""
        ready = self.source.aligned and self.source.ctype.startswith(("te::Plain", "te::Added"))
        return 8 * self.source.in_bytes if ready else 0


def centered(node: Node) -> bool:
    """Whether the node belongs to a LayerNorm."""
    return bool(node.prim.name.startswith("layernorm"))


def norm_of(node: Node, source: Source, held: torch.dtype, gamma: torch.dtype) -> Norm:
    """The forward kernel of a node."""
    zero_centered = bool(node.zero_centered)
    return Norm(source, held, held, gamma, centered(node), zero_centered, float(node.eps))


def shared_kib(arch: str) -> int:
    """KiB of shared memory of a processor; a block has one less."""
    number = number_of(arch)
    return SHARED.get(number, 228 if number < 120 else 100)


def resident(threads: int, registers: int, shared: int, arch: str) -> int:
    """Blocks that a processor can hold, 0 if none."""
    number = number_of(arch)
    registers = -(-registers // 8) * 8
    if registers > 255:
        return 0
    warps = 48 if number in (86, 89) or number >= 120 else 64
    by_shared = shared_kib(arch) * 1024 // (shared + 1024)
    taken = -(-threads // 128) * 128 * registers  # four warps at a time
    return min(FILES // taken, 32 * warps // threads, by_shared, 16)


def spread(width: int, held: int, least: int = 4) -> tuple[int, int, int]:
    """(group, chunks, threads) with at most `held` chunks a thread: part of a warp, or whole warps, a row."""
    chunks = max(1, -(-width // 8))
    group = least
    while group < 32 and group * held < chunks:
        group *= 2
    if group * held < chunks:
        group = -(-chunks // (32 * held)) * 32
    return group, -(-chunks // group), group * max(1, 128 // group)


FORWARD = {
    False: (
        (128, Shape(16, 1, 128, 0, 10, 1, at_once=2)),
        (4096, Shape(256, 2, 256, 1, 6, 1)),
        (8192, Shape(256, 4, 256, 1, 5, 1)),
        (14336, Shape(224, 8, 224, 2, 3, 2)),
        (16384, Shape(512, 4, 512, 1, 3, 1)),
    ),
    True: (
        (4096, Shape(128, 4, 128, 1, 8, 1)),
        (12288, Shape(256, 6, 256, 1, 3, 1)),
    ),
}
"""Best of an H200 for 16-bit rows of so many columns (docs/performance); True: LayerNorm."""
BACKWARD = {
    False: (
        (128, Shape(16, 1, 256, 2, 4)),
        (4096, Shape(256, 2, 256, 3, 2)),
        (8192, Shape(512, 2, 512, 3, 1)),
        (14336, Shape(224, 8, 224, 2, 1)),
        (16384, Shape(256, 2, 256, 3, 2, cluster=4)),
    ),
    True: (
        (4096, Shape(256, 2, 512, 2, 1)),
        (12288, Shape(128, 3, 256, 2, 2, cluster=4)),
    ),
}
"""The same of the gradients of input and weights."""


def measured(
    table: dict[bool, tuple[tuple[int, Shape], ...]], layer: bool, width: int
) -> Shape | None:
    """The table's shape for a width."""
    return next((shape for columns, shape in table[layer] if columns == width), None)


def forward_shape(norm: Norm, arch: str) -> Shape:
    """Threads and stages for a width."""
    known = measured(FORWARD, norm.centered, norm.source.width)
    if known is not None and norm.copied == 16 and norm.gamma.itemsize == 2 and arch == "sm_90":
        return known
    for held in (4, 2, 1):
        group, chunks, threads = spread(norm.source.width, held)
        registers = 36 + chunks * (4 + 4 * norm.centered + (0 if norm.copied else 12))
        for stages in (2, 1) if norm.copied else (0,):
            shared = forward_shared(norm, Shape(group, chunks, threads, stages, 1))
            blocks = resident(threads, registers, shared, arch) if threads <= 1024 else 0
            if blocks:
                return Shape(group, chunks, threads, stages, min(blocks, max(1, 768 // threads)))
    return Shape(1024, 0, 1024, 0, 1)


def forward_shared(norm: Norm, shape: Shape) -> int:
    """Bytes of dynamic shared memory: rows, and gamma and beta."""
    weights = 8 * norm.gamma.itemsize * (1 + norm.centered) if shape.stages else 0
    return shape.chunks * shape.threads * (shape.stages * norm.copied + weights)


Forward = Callable[..., None]
"""run(device, rows, *slots of the source, gamma, beta, stream, y, rstd, mean, amax): 0 for what is not wanted."""


def forward_kernel(norm: Norm, arch: str, shape: Shape | None = None) -> Forward:
    """The kernel of a norm over a source."""
    shape = shape or forward_shape(norm, arch)
    source = norm.source
    types = f"{source.ctype}, {CTYPES[norm.held]}, {CTYPES[norm.out]}, {CTYPES[norm.gamma]}"
    head = (
        f"#include <kernels/norm.cuh>\n{source.head}"
        f"typedef te::NormArguments<{types}> Parameters;\n"
    )
    first = (source.aligned, norm.centered, norm.zero_centered)
    if shape.chunks:
        name, last = ("norm", shape.stages) if shape.at_once == 1 else ("short_norm", shape.at_once)
        flags = flags_of(*first, shape.group, shape.chunks, shape.threads, last)
        body = f"te::{name}<{types}, {flags}>(p, {literal(norm.eps)});"
    else:
        body = f"te::long_norm<{types}, {flags_of(*first, shape.threads)}>(p, {literal(norm.eps)});"
    text = launch.text_of(
        name="norm", head=head, body=body, threads=shape.threads, blocks=shape.resident
    )
    shared = forward_shared(norm, shape)
    function = launch.build("norm", text, arch, shape.threads, source.count + 9, shared=shared)
    width = source.width

    def run(device: torch.device, rows: int, *slots: int) -> None:
        if rows:
            function(device, grid_of(shape, rows, device), *slots, rows, width)

    return run


def grid_of(shape: Shape, rows: int, device: torch.device) -> int:
    """Blocks (clusters of them) for so many rows: what the device holds, or a row each for rows that are not held."""
    if not shape.chunks:
        return rows
    steps = -(-rows // shape.rows)
    most = clusters_held(processors(device.index) * shape.resident, shape.cluster)
    return max(min(steps, most), -(-steps // shape.turns) if shape.turns else 0)


def clusters_held(blocks: int, cluster: int) -> int:
    """Clusters that run at once where so many blocks do: beyond pairs not all processors take part, and a sixteenth
    less than fit by number are sure to."""
    return max(1, blocks // cluster if cluster <= 2 else blocks * 15 // (16 * cluster))


def flags_of(*values: bool | int) -> str:
    """Template arguments."""
    return ", ".join(flag(v) if isinstance(v, bool) else str(v) for v in values)


# -- backward


@dataclass(frozen=True)
class Backward:
    """What a backward kernel is made for.

    Attributes:
        other: whether a gradient is added to dx.
        sums: gradients of weights: 0, 1 (gamma) or 2 (gamma and beta).
    """

    width: int
    x: torch.dtype
    dy: torch.dtype
    gamma: torch.dtype
    centered: bool
    zero_centered: bool
    other: bool
    sums: int

    @property
    def copied(self) -> int:
        """Bytes of a chunk of all operands if they can be copied asynchronously, else 0."""
        each = self.dy.itemsize + (1 + self.other) * self.x.itemsize
        return 0 if self.width % 8 else 8 * each


def backward_shape(made: Backward, arch: str) -> Shape | None:
    """Threads and stages for a width; None: no block holds such rows together with their sums."""
    known = measured(BACKWARD, made.centered, made.width)
    if (
        known is not None
        and made.copied in (32, 48)
        and made.gamma.itemsize == 2
        and arch == "sm_90"
    ):
        return known
    for held in (2, 3, 4, 8, 1) if made.sums == 2 else (2, 4, 3, 8, 1):
        group, chunks, threads = spread(made.width, held)
        if threads > 1024:
            continue
        if group <= 32 and not made.centered:  # fewer partial sums
            threads = max(threads, 256)
        registers = 40 + 29 * chunks if made.sums == 2 else 64 + 8 * made.centered + 16 * chunks
        registers += 8 if made.x.itemsize == 4 else 0
        registers += 0 if made.copied else 12 * chunks
        for stages in (2, 1) if made.copied else (0,):
            shared = backward_shared(made, Shape(group, chunks, threads, stages, 1))
            blocks = resident(threads, registers, shared, arch)
            if blocks:
                return Shape(group, chunks, threads, stages, blocks)
    return None


def backward_shared(made: Backward, shape: Shape) -> int:
    """Bytes of dynamic shared memory: rows and gamma, and later the sums of a block's groups."""
    weights = 8 * made.gamma.itemsize if shape.stages else 0
    copies = shape.chunks * shape.threads * (shape.stages * made.copied + weights)
    return max(copies, shape.threads * shape.chunks * 32 if made.sums and shape.rows > 1 else 0)


def backward_mail(made: Backward, shape: Shape) -> int:
    """Bytes behind them for the sums of a cluster (ClusterSums::bytes)."""
    return 8 * shape.cluster * shape.rows * (1 + made.centered) + 16 if shape.cluster > 1 else 0


def backward_kernel(
    made: Backward, arch: str, shape: Shape | None = None
) -> Callable[[torch.device, int, tuple[int, ...]], torch.Tensor | None]:
    """run(device, rows, (dy, x, other, gamma, rstd, mean, dx)) -> sums of clusters [clusters, sums, width] or None."""
    shape = shape or backward_shape(made, arch) or Shape(512, 0, 512, 0, 1)
    names = [CTYPES[made.x], CTYPES[made.dy], CTYPES[made.gamma]]
    types = ", ".join(names)
    head = (
        "#include <kernels/norm_backward.cuh>\n"
        f"typedef te::NormBackwardArguments<{types}, {flag(made.other)}> Parameters;\n"
    )
    first = (made.width % 8 == 0, made.centered, made.zero_centered, made.other)
    if shape.chunks:
        flags = flags_of(
            *first, made.sums, shape.group, shape.chunks, shape.threads, shape.stages, shape.cluster,
            backward_shared(made, shape),
        )  # fmt: skip
        body = f"te::norm_backward<{types}, {flags}>(p);"
    else:
        body = f"te::long_norm_backward<{types}, {flags_of(*first, shape.threads)}>(p);"
    text = launch.text_of(
        name="norm_backward",
        head=head,
        body=body,
        threads=shape.threads,
        blocks=shape.resident,
        cluster=shape.cluster,
    )
    shared = backward_shared(made, shape) + backward_mail(made, shape)
    function = launch.build("norm_backward", text, arch, shape.threads, 11, shared=shared)
    width, sums = made.width, made.sums

    def run(device: torch.device, rows: int, pointers: tuple[int, ...]) -> torch.Tensor | None:
        dy, x, other, gamma, rstd, mean, dx = pointers
        grid = max(1, grid_of(shape, rows, device))
        partial = launch.empty((grid, sums, width), torch.float32, device) if sums else None
        if rows or sums:
            to = 0 if partial is None else partial.data_ptr()
            function(
                device,
                grid * shape.cluster,
                dy,
                x,
                other,
                width,
                gamma,
                rstd,
                mean,
                dx,
                to,
                rows,
                width,
            )
        return partial

    return run


def sums_kernel(
    dtype: torch.dtype, arch: str, threads: int = 256
) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """total(sums of blocks [blocks, n, width]) -> n gradients [width] of a dtype, added up in a fixed order."""
    ctype = CTYPES[dtype]
    head = (
        "#include <kernels/norm_backward.cuh>\n"
        f"struct Parameters {{ const float* partial; {ctype} *dgamma, *dbeta; "
        "te::i64 slices, width, total; };\n"
    )
    body = (
        f"te::norm_sums<{ctype}, {threads}>"
        "(p.partial, p.dgamma, p.dbeta, p.slices, p.width, p.total);"
    )
    text = launch.text_of(name="norm_sums", head=head, body=body, threads=threads)
    function = launch.build("norm_sums", text, arch, threads, 6, early=True)

    def run(partial: torch.Tensor) -> tuple[torch.Tensor, ...]:
        slices, count, width = partial.shape
        made = tuple(launch.empty((width,), dtype, partial.device) for _ in range(count))
        pointers = [y.data_ptr() for y in (*made, made[0])[:2]]
        total = count * width
        function(
            partial.device, -(-total // 32), partial.data_ptr(), *pointers, slices, width, total
        )
        return made

    return run


def added(dtype: torch.dtype, width: int) -> Source:
    """The sum of two tensors of one dtype, in FP32."""
    return Source(
        INCLUDE + "#include <kernels/norm_feed.cuh>\n",
        f"te::Added<{CTYPES[dtype]}>",
        1,
        width,
        3,
        lambda xs: [xs[0].data_ptr(), xs[1].data_ptr(), width],
        width % 8 == 0,
        in_bytes=2 * dtype.itemsize,
    )


def slot(x: torch.Tensor | int | None) -> int:
    """A kernel's 8 bytes: a pointer (null for None) or a number."""
    return 0 if x is None else x if isinstance(x, int) else x.data_ptr()
