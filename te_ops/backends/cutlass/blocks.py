"""Products of MXFP8 and NVFP4 records: which of them the tensor cores of sm_100 multiply, and how operands lie.

The scales of blocks go to the kernel in the order of `te_ops.backends.cuda.swizzle`; `unswizzled` reads it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from te_ops.backends.cuda import launch as device_launch
from te_ops.backends.cutlass.spec import Format, GemmSpec
from te_ops.graph import Node, Spec
from te_ops.quantizers import MXFP8Quantizer, NVFP4Quantizer, Quantizer, Record, Usage
from te_ops.quantizers.codec import decode_fp8, stretch
from te_ops.quantizers.e2m1 import unpack_e2m1

ARCH = "sm_100"
"""Which has such tensor cores."""
LAYOUTS = {
    "nt": (Usage.ROW, Usage.ROW),
    "nn": (Usage.ROW, Usage.COL),
    "tn": (Usage.COL, Usage.COL),
}
"""The usages of records that a gemm contracts."""
FORMATS: dict[torch.dtype, Format] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def has_blocks(quantizer: Quantizer) -> bool:
    """Whether it is a format whose blocks have scales that tensor cores read."""
    return isinstance(quantizer, MXFP8Quantizer | NVFP4Quantizer)


def product(gemm: Node, specs: Sequence[Spec]) -> GemmSpec | str:
    """The spec of a product of two records of such formats, or why there is none."""
    kinds = [spec.kind for spec in specs]
    quantizers = [kind.quantizer.of_usage(kind.usage) for kind in kinds]
    for kind, usage in zip(kinds, LAYOUTS[gemm.layout], strict=True):
        if kind.usage is not usage:
            return f"gemm {gemm.layout} reads a {usage.value} record here, this one is {kind.usage.value}"
    a, b = quantizers
    if isinstance(a, MXFP8Quantizer) and isinstance(b, MXFP8Quantizer):
        majors: list[Literal["k", "mn"]] = [
            "k" if kind.usage is Usage.ROW else "mn" for kind in kinds
        ]
        return GemmSpec(
            FORMATS[a.dtype], FORMATS[b.dtype], a_major=majors[0], b_major=majors[1], blocks=32
        )
    if isinstance(a, NVFP4Quantizer) and isinstance(b, NVFP4Quantizer):
        turned = [
            q.with_rht and kind.usage is Usage.COL for q, kind in zip((a, b), kinds, strict=True)
        ]
        if turned[0] != turned[1]:
            return "one operand went through the Hadamard transform and the other did not"
        if a.row_scaled or b.row_scaled:
            return "multiplies NVFP4 with one amax a tensor, not one a row"
        return GemmSpec("e2m1", "e2m1", scaled=True, blocks=16)
    return f"multiplies two operands of one format, not {a.describe()} and {b.describe()}"


def codes(record: Record) -> Tensor:
    """[rows, K] of a record, as its usage lies: contiguous along K, or (col of MXFP8) along the rows.

    E2M1 codes are pairs, `torch.float4_e2m1fn_x2`.
    """
    data, row = record.data, record.usage is Usage.ROW
    packed = isinstance(record.quantizer, NVFP4Quantizer)
    if data.dim() != 2:
        data = data.reshape((data.shape[0], -1) if packed and not row else (-1, data.shape[-1]))
    data = device_launch.ready(data)
    if packed:
        return data.view(torch.float4_e2m1fn_x2)
    return data if row else data.t()


# -- what a kernel reads, in torch


def swizzled(scales: Tensor) -> Tensor:
    """Scales [rows, blocks] as a kernel reads them: [ceil(rows / 128), ceil(blocks / 4), 32, 4, 4], 0 beyond."""
    rows, blocks = scales.shape
    down, across = -(-rows // 128), -(-blocks // 4)
    made = torch.zeros(down * 128, across * 4, dtype=torch.uint8, device=scales.device)
    made[:rows, :blocks] = scales.view(torch.uint8)
    pieces = made.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4)
    return pieces.contiguous().view(scales.dtype)


def unswizzled(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """The scales [rows, blocks] that `swizzled` was given."""
    down, across = scales.shape[:2]
    flat = scales.view(torch.uint8).permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)
    return flat[:rows, :blocks].contiguous().view(scales.dtype)


class Blocked(NamedTuple):
    """Codes [rows, K] and the swizzled scales of their blocks."""

    codes: Tensor
    scales: Tensor

    def values(self, size: int, *, paired: bool = False) -> Tensor:
        """What they stand for in FP32, without a scale of the tensor.

        `paired`: scales of two halves of rows alternate.
        """
        x = self.codes
        packed = x.dtype is torch.float4_e2m1fn_x2
        values = unpack_e2m1(x.view(torch.uint8)) if packed else decode_fp8(x.contiguous())
        rows, k = values.shape
        scales = unswizzled(self.scales, rows, -(-k // size))
        if paired:
            order = torch.arange(rows, device=scales.device).view(-1, 2).t().reshape(-1)
            scales = scales.view(torch.uint8)[order].view(scales.dtype)
        return values * stretch(scales.float(), 1, size, k)
