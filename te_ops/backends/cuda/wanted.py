"""What quantize kernels of every format share: what is wanted of one, what it made, the text of formats and scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.backends.cuda.source import flag, literal
from te_ops.quantizers import Float8Quantizer, Quantizer, Record
from te_ops.quantizers.state import largest_scale

FORMATS = {torch.float8_e4m3fn: "te::e4m3", torch.float8_e5m2: "te::e5m2"}
THREADS = 256


@dataclass(frozen=True)
class Wanted:
    """What a quantize kernel writes.

    Attributes:
        row, col, amax: outputs of the quantize node.
        dense: dtype of the values that are written too, or None.
        rounds: dtype that values are rounded to before they are quantized (None: they stay FP32).
        source_dtype: dtype that the record names.
        sums: dtype of the sums over rows that are written too, or None.
    """

    row: bool
    col: bool
    amax: bool
    dense: torch.dtype | None
    rounds: torch.dtype | None
    source_dtype: torch.dtype
    sums: torch.dtype | None = None


@dataclass(frozen=True)
class Results:
    """What it has written."""

    row: Record | None
    col: Record | None
    amax: torch.Tensor | None
    dense: torch.Tensor | None
    sums: torch.Tensor | None = None


Run = Callable[[Sequence[int], tuple[int, ...], torch.device, torch.Tensor | None], Results]
"""run(slots of the source, logical shape, device, scale or seed) -> Results."""


def template(*values: Any) -> str:
    """Arguments of a C++ template: truth values, numbers and types."""
    return ", ".join(flag(v) if isinstance(v, bool) else str(v) for v in values)


def scale_rule(quantizer: Quantizer | None, dtype: torch.dtype, name: str = "Rule") -> str:
    """The C++ struct that turns an amax (or, delayed, the scale) into the scale."""
    scale = "x"
    if not isinstance(quantizer, Float8Quantizer):
        q: Any = quantizer
        largest = f"{FORMATS[q.dtype]}::largest"
        numbers = f"{literal(q.amax_epsilon)}, {literal(largest_scale(dtype))}"
        scale = f"te::scale_of(x, {largest}, {numbers}, {flag(q.force_pow_2_scales)})"
    return f"struct {name} {{ static TE_DEVICE float scale(float x) {{ return {scale}; }} }};\n"
