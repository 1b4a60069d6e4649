"""The library's GEMMs in FP32 on the CPU, with the conditions that the CUDA versions check.

Conditions: aten/src/ATen/native/cuda/ScaledBlas.cpp (what is contiguous, extents that divide by 16,
shapes and strides of scales), and cuBLASLt's own for block scales (rows that divide by 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

BLOCK_1 = ScalingType.BlockWise1x128.value
BLOCK_2 = ScalingType.BlockWise128x128.value
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class RefusedError(RuntimeError):
    """The library would have raised this."""


def must(condition: bool, message: str) -> None:
    if not condition:
        raise RefusedError(message)


@dataclass
class Library:
    """Stands for torch's functions; keeps what each call was given."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def mm(self, a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        self.calls.append({"name": "mm", "a": a, "b": b, "out_dtype": out_dtype})
        if out_dtype is None:
            return torch.ops.aten.mm.default(a, b)
        must(out_dtype is torch.float32, "out_dtype must be float32")
        must(a.dtype in (torch.bfloat16, torch.float16) and a.dtype is b.dtype, "operands")
        must(a.numel() > 0 and b.numel() > 0, "nothing to multiply")
        return torch.ops.aten.mm.default(a.float(), b.float())

    def addmm(self, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        self.calls.append({"name": "addmm", "a": a, "b": b, "bias": bias})
        must(bias.dtype is a.dtype is b.dtype, "one dtype")
        wide = torch.ops.aten.addmm.default(bias.float(), a.float(), b.float())
        return wide.to(a.dtype)

    def _scaled_mm(  # noqa: PLR0917
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        self.calls.append(
            {"name": "_scaled_mm", "a": a, "b": b, "fast": use_fast_accum, "bias": bias}
        )
        must(scale_result is None, "not asked for")
        for scale in (scale_a, scale_b):
            must(scale.dtype is torch.float32 and scale.numel() == 1, "one FP32 scale")
        return _product(a, b, (scale_a, scale_b), bias, out_dtype)

    def _scaled_mm_v2(  # noqa: PLR0917
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Sequence[Tensor],
        recipe_a: Sequence[int],
        swizzle_a: Sequence[int],
        scale_b: Sequence[Tensor],
        recipe_b: Sequence[int],
        swizzle_b: Sequence[int],
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
        contraction_dim: Sequence[int] = (),
        use_fast_accum: bool = False,
    ) -> Tensor:
        self.calls.append({"name": "_scaled_mm_v2", "a": a, "b": b, "bias": bias})
        must(not (swizzle_a or swizzle_b or contraction_dim or use_fast_accum), "not asked for")
        must(a.shape[0] % 4 == 0, "rows must divide by 4")
        pair = (*recipe_a, *recipe_b)
        must(
            pair in ((BLOCK_1, BLOCK_1), (BLOCK_1, BLOCK_2), (BLOCK_2, BLOCK_1)), f"recipes {pair}"
        )
        left = _stretched(scale_a[0], pair[0], a.shape[0], a.shape[1])
        right = _stretched(scale_b[0], pair[1], b.shape[1], b.shape[0])
        return _product(a, b, (left, right.t()), bias, out_dtype)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["name"] == name]


def _stretched(scale: Tensor, recipe: int, rows: int, k: int) -> Tensor:
    """One scale an element [rows, k], from what the library is given."""
    blocks = -(-k // 128)
    must(scale.dtype is torch.float32, "FP32 scales")
    if recipe == BLOCK_1:
        must(tuple(scale.shape) == (rows, blocks), f"scale {tuple(scale.shape)} of {rows} x {k}")
        major = scale.stride(1) == rows or (blocks == 1 and scale.stride(1) == 1)
        must(scale.stride(0) == 1 and major, f"scale strides {scale.stride()}")
        must(rows % 4 == 0, "scales on 16 bytes")
        return scale.repeat_interleave(128, 1)[:, :k]
    tall, wide = -(-blocks // 4) * 4, -(-rows // 128)
    must(tuple(scale.shape) == (tall, wide), f"scale {tuple(scale.shape)}, not {(tall, wide)}")
    major = scale.stride(1) == tall or (wide == 1 and scale.stride(1) == 1)
    must(scale.stride(0) == 1 and major, f"scale strides {scale.stride()}")
    each = scale[:blocks].t()
    return each.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]


def _product(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    must(a.dtype in FP8 and b.dtype in FP8, "FP8 operands")
    must(not (a.dtype is b.dtype is torch.float8_e5m2), "E5M2 by E5M2")
    must(min(a.numel(), b.numel()) > 0, "nothing to multiply")
    must(a.stride(1) == 1 and a.stride(0) == a.shape[1], f"a has strides {a.stride()}")
    must(b.stride(0) == 1 and b.stride(1) == b.shape[0], f"b has strides {b.stride()}")
    must(a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0, f"{tuple(a.shape)} x {tuple(b.shape)}")
    must(a.storage_offset() % 16 == 0 and b.storage_offset() % 16 == 0, "addresses")
    y = (a.float() * scales[0]) @ (b.float() * scales[1])
    if bias is not None:
        must(out_dtype in (torch.bfloat16, torch.float16), "no bias on FP32")
        must(bias.dtype is out_dtype and bias.numel() == b.shape[1], "bias")
        must(bias.is_contiguous(), "bias strides")
        y += bias.float()
    assert out_dtype is not None
    return y.to(out_dtype)
