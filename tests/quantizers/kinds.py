"""Every kind of quantizer, for the tests of what all of them share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    quantize,
)

QUANTIZERS: list[Quantizer] = [
    Float8Quantizer(),
    Float8Quantizer(torch.float8_e5m2),
    Float8CurrentScalingQuantizer(force_pow_2_scales=True, amax_epsilon=0.125),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False),
    MXFP8Quantizer(torch.float8_e5m2),
    MXFP8Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(),
    NVFP4Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    NVFP4Quantizer(row_scaled=True),
    NVFP4Quantizer(four_over_six=True, four_over_six_error="MSE"),
    HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer(with_rht=True)),
    HybridQuantizer(IdentityQuantizer(torch.bfloat16), Float8CurrentScalingQuantizer()),
    IdentityQuantizer(),
    IdentityQuantizer(torch.bfloat16),
]

every = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q.describe())
usages = pytest.mark.parametrize(
    ("rowwise", "columnwise"),
    [(True, False), (False, True), (True, True)],
    ids=["row", "col", "both"],
)


def needs(quantizer: Quantizer) -> dict[str, Any]:
    """The state and seed that `quantizer` wants."""
    state = torch.tensor([3.0]) if quantizer.stateful else None
    seed = torch.tensor(17) if quantizer.stochastic else None
    return {"state": state, "seed": seed}


def make(x: torch.Tensor, quantizer: Quantizer, **usage: bool) -> QuantizedTensor:
    """`x` quantized."""
    return quantize(x, quantizer, **usage, **needs(quantizer))
