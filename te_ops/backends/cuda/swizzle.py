"""Scales of MXFP8 and NVFP4 blocks in the order in which the tensor cores of sm_100 read them.

One launch serves both operands of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.wanted import THREADS
from te_ops.quantizers import NVFP4Quantizer, Record, Usage

ROWS, BLOCKS = 128, 4
"""Of a piece of 512 bytes; tensors are filled up to whole pieces with zeros."""
_PIECES = THREADS // 32  # of a block of threads
_SLOTS = 10  # of an operand


class Swizzled(NamedTuple):
    """The scales of an operand.

    Attributes:
        blocks: [ceil(rows / 128), ceil(blocks / 4), 32, 4, 4] in the dtype of the record's scales: row r of a piece and
            its block k are at [r % 32, r // 32, k].
        tensor: FP32, one value: what everything is multiplied with besides (NVFP4); None if there is no such number.
    """

    blocks: torch.Tensor
    tensor: torch.Tensor | None


def text() -> str:
    """The device text."""
    return launch.text_of(
        name="swizzle",
        head="#include <kernels/swizzle.cuh>\ntypedef te::SwizzleArguments Parameters;\n",
        body="te::swizzle(p);",
        threads=THREADS,
    )


def make_swizzle(
    arch: str, *, paired: bool = False
) -> Callable[[Record, Record], tuple[Swizzled, Swizzled]]:
    """run(a, b) -> the scales of both records, MXFP8 or NVFP4 ones with at least one row and one block each.

    `paired`: rows of b come in pairs, of its first half and of its second.
    """
    kernel = launch.build("swizzle", text(), arch, THREADS, 2 * _SLOTS + 1)

    def run(a: Record, b: Record) -> tuple[Swizzled, Swizzled]:
        (made_a, slots_a, grid_a), (made_b, slots_b, grid_b) = (
            _operand(a, False),
            _operand(b, paired),
        )
        kernel(a.device, grid_a + grid_b, *slots_a, *slots_b, grid_a)
        return made_a, made_b

    return run


def _operand(record: Record, paired: bool) -> tuple[Swizzled, tuple[int, ...], int]:
    """Memory for the scales of a record, the slots that describe it, and its blocks of threads."""
    scale = record.scale_inv
    assert scale is not None
    scale = _by_rows(record, scale)
    rows, blocks = scale.shape
    down, across = -(-rows // ROWS), -(-blocks // BLOCKS)
    y = launch.empty((down, across, 32, 4, 4), scale.dtype, scale.device)
    amax, whole, limit = 0, None, 0
    if isinstance(record.quantizer, NVFP4Quantizer):
        assert record.amax is not None
        whole = launch.empty((1,), torch.float32, scale.device)
        amax, limit = record.amax.data_ptr(), int(record.quantizer.limit)
    address = 0 if whole is None else whole.data_ptr()
    slots = (
        scale.data_ptr(),
        y.data_ptr(),
        *scale.stride(),
        rows,
        blocks,
        paired,
        amax,
        address,
        limit,
    )
    return Swizzled(y, whole), slots, -(-down * across // _PIECES)


def _by_rows(record: Record, scale: torch.Tensor) -> torch.Tensor:
    """[rows, blocks]: col records of MXFP8 lie as the tensor does, blocks first."""
    lies = record.usage is Usage.COL and not isinstance(record.quantizer, NVFP4Quantizer)
    return scale.t() if lies else scale
