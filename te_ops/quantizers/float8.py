"""FP8 with one scale for the whole tensor: delayed and current scaling.

Row data has the tensor's shape; col data is its transpose [last, *leading], made from the same
bytes. ``scale_inv`` is FP32 with zero dimensions: the record's own copy, so that a later change of
the scale cannot reach bytes made with the old one.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from te_ops.errors import RecipeError
from te_ops.quantizers.base import (
    Layout,
    Quantizer,
    Record,
    Usage,
    check_epsilon,
    check_flags,
    check_fp8,
    fp8_max,
    short,
    source,
)
from te_ops.quantizers.codec import (
    decode_fp8,
    encode_fp8,
    transpose_bytes,
    untranspose_bytes,
)
from te_ops.quantizers.state import divide, largest_scale, observe_amax, scale_from_amax

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer"]


@dataclass(frozen=True)
class _PerTensor(Quantizer):
    """What the two per-tensor quantizers share: all but where the scale comes from."""

    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        check_fp8(self.dtype)

    @abstractmethod
    def _scale(self, x: Tensor, amax: Tensor, state: Tensor | None) -> Tensor:
        """The scale, FP32 with zero dimensions."""

    def records(
        self,
        x: Tensor,
        *,
        row: bool,
        col: bool,
        state: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Record | None, Record | None, Tensor]:
        """See `Quantizer.records`; the amax is that of the whole tensor."""
        x = source(x)
        amax = observe_amax(x)
        if not (row or col):
            return None, None, amax
        scale = self._scale(x, amax, state)
        data = encode_fp8(x.float().mul(scale).contiguous(), self.dtype)
        rowwise = Record(data, divide(1.0, scale), None, self, Usage.ROW, tuple(x.shape), x.dtype)
        columnwise = self.other_usage(rowwise) if col else None
        return (rowwise if row else None), columnwise, amax

    def decode(self, record: Record) -> Tensor:
        """code * scale_inv."""
        codes = record.data
        if record.usage is Usage.COL:
            codes = untranspose_bytes(codes)
        values = decode_fp8(codes)
        assert record.scale_inv is not None
        if record.dtype is torch.float64:
            return values.double().mul_(record.scale_inv)
        return values.mul_(record.scale_inv)

    def layout(
        self, shape: tuple[int, ...], usage: Usage, dtype: torch.dtype = torch.float32
    ) -> Layout:
        """data as described above, and a scalar ``scale_inv``."""
        size = tuple(shape) if usage is Usage.ROW else (*shape[-1:], *shape[:-1])
        return (size, self.dtype), ((), torch.float32)

    def other_usage(self, record: Record) -> Record:
        """The transposed bytes, under the same scale."""
        turn = transpose_bytes if record.usage is Usage.ROW else untranspose_bytes
        return replace(record, data=turn(record.data), usage=record.usage.other)

    def exact_other_usage(self) -> bool:
        """True: one scale serves both usages."""
        return True

    def reshapes_freely(self, usage: Usage) -> bool:
        """Row data is in the tensor's own order; a col transpose needs its last dimension."""
        return usage is Usage.ROW


@dataclass(frozen=True)
class Float8Quantizer(_PerTensor):
    """Delayed scaling: the scale comes from earlier steps and is passed as `state` (one FP32
    element). The amax that `records` returns feeds `te_ops.quantizers.state.delayed_update`.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    """

    name: ClassVar[str] = "float8_delayed"
    stateful: ClassVar[bool] = True

    def _scale(self, x: Tensor, amax: Tensor, state: Tensor | None) -> Tensor:
        if state is None or state.numel() != 1:
            got = "none" if state is None else f"a tensor of shape {tuple(state.shape)}"
            raise RecipeError(
                f"{self.describe()} needs its scale as state=, one FP32 element; got {got}. "
                "Use Float8CurrentScalingQuantizer for a scale made from the tensor itself."
            )
        return state.detach().float().reshape(())

    def describe(self) -> str:
        """E.g. "e4m3 per-tensor delayed"."""
        return f"{short(self.dtype)} per-tensor delayed"


@dataclass(frozen=True)
class Float8CurrentScalingQuantizer(_PerTensor):
    """The scale comes from the amax of the tensor itself, or of `state` where that is known already.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        force_pow_2_scales: round the scale down to a power of two.
        amax_epsilon: stands in for any smaller amax.
    """

    name: ClassVar[str] = "float8_current"

    _: KW_ONLY
    force_pow_2_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epsilon(self.amax_epsilon)
        check_flags(self)

    def _scale(self, x: Tensor, amax: Tensor, state: Tensor | None) -> Tensor:
        return scale_from_amax(
            amax if state is None else state.detach().float().reshape(()),
            fp8_max(self.dtype),
            self.force_pow_2_scales,
            self.amax_epsilon,
            largest_scale(x.dtype),
        )

    def describe(self) -> str:
        """E.g. "e4m3 per-tensor current, pow2 scale"."""
        return f"{short(self.dtype)} per-tensor current" + (
            ", pow2 scale" if self.force_pow_2_scales else ""
        )
