"""The one-pass kernel of a norm and a per-tensor FP8 quantize: clusters of blocks along the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.norm_kernels import (
    Norm,
    clusters_held,
    flags_of,
    number_of,
    processors,
    resident,
)
from te_ops.backends.cuda.source import CTYPES, literal


@dataclass(frozen=True)
class Tile:
    """A cluster's share.

    Attributes:
        rows: rows of a cluster at a time; cols: columns of a block; cluster: blocks side by side.
        threads, resident: of a block, and blocks that a processor is to hold.
        stages: tiles in shared memory, all but one of them on their way.
        turns: row tiles that a cluster goes through, at least, where there are enough.
    """

    rows: int
    cols: int
    cluster: int
    threads: int
    resident: int
    stages: int
    turns: int


@dataclass(frozen=True)
class Wants:
    """What the kernel writes of an FP8 format (its C++ name); `rounds`: what y is rounded to; `rule`: of the scale.

    `stream`: what is normalised is written; `dense`: y is.
    """

    fp8: str
    rounds: torch.dtype
    row: bool
    col: bool
    amax: bool
    stream: bool = False
    dense: bool = False
    rule: str = "struct Rule { static TE_DEVICE float scale(float x) { return x; } };\n"


def tile_for(norm: Norm, wants: Wants, arch: str) -> Tile | None:
    """The share for a width, or None: too wide, not made of whole chunks, or no clusters here."""
    width, copied = norm.source.width, norm.copied
    if not copied or not 0 < width <= 8192:
        return None
    cols = 1024 if 1024 < width <= 2048 or width > 4096 else 512
    cluster = -(-width // cols)
    if cluster > 1 and number_of(arch) < 90:
        return None
    tile = _measured(norm, cols, cluster)
    if norm.centered and number_of(arch) != 90:  # whose registers would not do
        tile = replace(tile, resident=min(tile.resident, 2))
    shared = shared_of(norm, wants, tile)
    blocks = resident(tile.threads, 64, shared, arch)
    return replace(tile, resident=min(tile.resident, blocks)) if blocks else None


def _measured(norm: Norm, cols: int, cluster: int) -> Tile:
    """Best of an H200 (docs/performance): many blocks that have one tile or two, rather than few with the next one on
    its way."""
    if cols > 512:
        light = norm.copied == 16 and not norm.centered
        return Tile(32, cols, cluster, 256, 3 if light else 2, 1, 2 if light else 1)
    if norm.gamma.itemsize == 2 and norm.copied == 16:
        return Tile(32, cols, cluster, 128, 5, 1, 2)
    if norm.gamma.itemsize == 2 and norm.copied == 32:
        return Tile(32, cols, cluster, 128, 3, 1, 1)
    return Tile(32, cols, cluster, 256, 2, 1, 1)


def shared_of(norm: Norm, wants: Wants, tile: Tile) -> int:
    """Bytes of dynamic shared memory (NormTile::bytes)."""
    copies = tile.stages * tile.rows * tile.cols // 8 * norm.copied
    held = norm.held.itemsize
    # Codes go where the second operand was, or where rows of 16-bit values were.
    there = tile.stages == 1 and (norm.copied == 16 * held or norm.copied == 8 * held == 16)
    codes = tile.rows * tile.cols if wants.col and not there else 0
    return copies + codes + 2 * tile.cluster * tile.rows * 8 + 16


Tiles = Callable[..., None]
"""run(device, rows, *slots of the source, gamma, beta, scale, amax, scale_inv, stream, y, rstd, mean, row, col)"""


def tiles_kernel(norm: Norm, wants: Wants, tile: Tile, arch: str) -> Tiles:
    """The kernel of a tile."""
    source = norm.source
    types = f"{source.ctype}, {CTYPES[norm.held]}, {CTYPES[wants.rounds]}, {CTYPES[norm.gamma]}"
    all_types = types.replace(", ", f", {wants.fp8}, Rule, ", 1)
    whole = source.width if source.width == tile.cols * tile.cluster else 0
    flags = flags_of(
        norm.centered, norm.zero_centered, tile.rows, tile.cols, tile.cluster, tile.threads,
        tile.stages, whole, wants.stream, wants.dense, wants.row, wants.col, wants.amax,
    )  # fmt: skip
    head = (
        f"#include <kernels/norm_quantize.cuh>\n{source.head}{wants.rule}"
        f"typedef te::NormQuantizeArguments<{types}> Parameters;\n"
    )
    text = launch.text_of(
        name="norm_quantize",
        head=head,
        body=f"te::norm_quantize<{all_types}, {flags}>(p, {literal(norm.eps)});",
        threads=tile.threads,
        blocks=tile.resident,
        cluster=tile.cluster,
    )
    shared = shared_of(norm, wants, tile)
    function = launch.build(
        "norm_quantize", text, arch, tile.threads, source.count + 13, shared=shared
    )
    width = source.width

    def run(device: torch.device, rows: int, *slots: int) -> None:
        tiles = -(-rows // tile.rows)
        most = clusters_held(processors(device.index) * tile.resident, tile.cluster)
        clusters = max(1, min(tiles, most), -(-tiles // tile.turns))
        function(device, clusters * tile.cluster, *slots, rows, width)

    return run
