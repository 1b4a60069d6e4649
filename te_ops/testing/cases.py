"""What checks, tests and benchmarks draw from: row counts, shapes, dtypes, formats, recipes,
routings, pipelines.

They include the unfriendly ones on purpose: no rows, one row, odd and prime sizes, HYBRID formats,
expanded and strided inputs, special numbers, routings that overflow an expert or drop everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from te_ops import recipe as recipes
from te_ops.basic.activation import GELU, SReLU, SwiGLU
from te_ops.basic.bias import Bias
from te_ops.basic.dropout import Dropout
from te_ops.basic.gemm import Linear
from te_ops.basic.norm import LayerNorm, RMSNorm
from te_ops.basic.structure import Add, AddExtraInput, ConstantScale
from te_ops.op import Op
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_ops.recipe import Format, Recipe
from te_ops.sequential import Branch, Residual, Sequential

ROWS: tuple[int, ...] = (0, 1, 5, 7, 4, 12, 33, 128)
"""Row counts: none, one, odd, two of one class (5 and 7, 4 and 12), just above a power of two, a
full tile.
"""

REPLAYS: tuple[tuple[int, int], ...] = ((5, 7), (4, 12))
"""Row counts of one class (equal alignment, same power-of-4 bucket): the second replays the plan of
the first.
"""

SHAPES: tuple[tuple[int, ...], ...] = (
    (0, 32), (1,), (1, 1), (1, 32), (5, 7), (3, 33), (16, 16), (2, 3, 40), (129, 130), (4, 0),
)  # fmt: skip
"""Shapes for formats: empty, one element, odd, not a multiple of any block, several leading
dimensions.
"""

DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a model computes in."""

SPECIAL: tuple[float, ...] = (
    0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-3, -1e-3, 1e-30, -1e-30, 1e-45, 20.0, -20.0,
    100.0, -100.0, 1e4, -1e4, 3.38e38, -3.38e38, math.inf, -math.inf, math.nan,
)  # fmt: skip
"""Numbers where functions and formats break: signed zeros, subnormals, saturation, the largest
BF16, Inf and NaN.
"""

FORMATS: tuple[Format, ...] = (Format.E4M3, Format.HYBRID)

RECIPES: dict[str, Recipe | None] = {
    "dense": None,
    "delayed": recipes.DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4),
    "current": recipes.Float8CurrentScaling(fp8_format=Format.HYBRID),
    "current_e4m3_pow2": recipes.Float8CurrentScaling(
        fp8_format=Format.E4M3, use_power_2_scales=True
    ),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp8_hybrid_2d": recipes.MXFP8BlockScaling(
        fp8_format=Format.HYBRID, enable_2d_quantization=True
    ),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "high_precision_backward": recipes.MXFP8BlockScaling(backward_override="high_precision"),
}
"""A recipe of every family, HYBRID ones among them; None is no quantization."""

QUANTIZERS: tuple[Quantizer, ...] = (
    Float8Quantizer(),
    Float8Quantizer(torch.float8_e5m2),
    Float8CurrentScalingQuantizer(),
    Float8CurrentScalingQuantizer(torch.float8_e5m2, force_pow_2_scales=True),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False),
    MXFP8Quantizer(),
    MXFP8Quantizer(torch.float8_e5m2, with_2d_quantization=True),
    NVFP4Quantizer(),
    NVFP4Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer(with_rht=True)),
    IdentityQuantizer(torch.bfloat16),
)
"""Every format of the package in its main variants."""


# -- tensors


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with gaps between the elements of the last dimension (at least one
    dimension).
    """
    wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype, device=x.device)
    part = wide[..., ::2]
    part.copy_(x)
    return part


def row_strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as columns of a wider matrix: rows have gaps, elements of a row do not."""
    wide = torch.zeros((*x.shape[:-1], x.shape[-1] + 16), dtype=x.dtype, device=x.device)
    part = wide[..., : x.shape[-1]]
    part.copy_(x)
    return part


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, the last two dimensions laid out the other way (at least two
    dimensions).
    """
    return x.mT.contiguous().mT


def expanded(x: torch.Tensor) -> torch.Tensor:
    """The first row for all rows, with stride 0; other numbers than x's."""
    return x[:1].expand_as(x)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "strided": strided,
    "row_strided": row_strided,
    "transposed": transposed,
    "expanded": expanded,
}
"""Ways to lay an input out in memory that are not contiguous."""


def with_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x with another first dimension: its rows over and over."""
    return x[torch.arange(rows, device=x.device) % max(x.shape[0], 1)]


# -- routings


def routing(kind: str, tokens: int, experts: int, *, top_k: int = 2) -> torch.Tensor:
    """Router logits [tokens, experts], FP32, of a named kind (see `ROUTINGS`)."""
    if kind not in ROUTINGS:
        raise ValueError(f"routing kind {kind!r}; known: {', '.join(ROUTINGS)}")
    return ROUTINGS[kind](tokens, experts, top_k)


def _uniform(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.randn(tokens, experts)


def _balanced(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    first = (torch.arange(tokens)[:, None] + torch.arange(top_k)) % experts
    return torch.zeros(tokens, experts).scatter_(1, first, 4.0)


def _skewed(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.randn(tokens, experts) - 0.5 * torch.arange(experts)


def _all_to_one(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    logits = torch.randn(tokens, experts) - 20.0
    logits[:, experts - 1] = 20.0
    return logits


def _ties(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.zeros(tokens, experts)


ROUTINGS: dict[str, Callable[[int, int, int], torch.Tensor]] = {
    "uniform": _uniform,
    "balanced": _balanced,
    "skewed": _skewed,
    "all_to_one": _all_to_one,
    "ties": _ties,
}
"""How tokens choose experts. `all_to_one` sends every token to the last expert first."""

CAPACITY_FACTORS: tuple[float | None, ...] = (None, 0.0, 0.25, 1.0, 2.0)
"""Expert capacity as a factor of the mean load: unlimited, all dropped, over capacity, exact,
ample.
"""


# -- pipelines


@dataclass(frozen=True)
class Pipeline:
    """A small model and its input widths; `make()` builds it anew."""

    name: str
    make: Callable[[], Op]
    widths: tuple[int, ...]

    def inputs(
        self, rows: int, *, dtype: torch.dtype = torch.float32, device: Any = None
    ) -> tuple[torch.Tensor, ...]:
        """Random inputs of this many rows."""
        return tuple(torch.randn(rows, n, device=device).to(dtype) for n in self.widths)


PIPELINES: tuple[Pipeline, ...] = (
    Pipeline("linear", lambda: Sequential(Linear(32, 48)), (32,)),
    Pipeline("linear_odd", lambda: Sequential(Linear(33, 7), GELU()), (33,)),
    Pipeline("mlp", lambda: Sequential(Linear(32, 64), GELU(), Linear(64, 32, bias=False)), (32,)),
    Pipeline(
        "swiglu_mlp",
        lambda: Sequential(
            RMSNorm(32), Linear(32, 64, bias=False), SwiGLU(), Linear(32, 32, bias=False)
        ),
        (32,),
    ),
    Pipeline("norm_linear", lambda: Sequential(LayerNorm(32), Linear(32, 32)), (32,)),
    Pipeline(
        "residual",
        lambda: Sequential(Residual(RMSNorm(32), Linear(32, 32)), RMSNorm(32), Linear(32, 48)),
        (32,),
    ),
    Pipeline(
        "add_norm",
        lambda: Sequential(AddExtraInput(), RMSNorm(64), Linear(64, 32, bias=False)),
        (64, 64),
    ),
    Pipeline(
        "together",
        lambda: Sequential(Branch(Linear(32, 32, bias=False), Linear(32, 32, bias=False)), Add()),
        (32,),
    ),
    Pipeline(
        "pointwise",
        lambda: Sequential(Bias(32), SReLU(), ConstantScale(0.5), Linear(32, 32)),
        (32,),
    ),
    Pipeline("dropout", lambda: Sequential(Linear(32, 32), Dropout(0.25), Linear(32, 32)), (32,)),
)
"""Pipelines that hold every chain of the package's rules, but for `gemm_accumulate`, which writes memory of the caller,
and those of packed heads, which need attention."""


def pipelines(
    *,
    rows: tuple[int, ...] = (5, 7, 0, 1, 32),
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    recipes: tuple[str, ...] = ("dense", "current", "mxfp8"),
) -> Iterator[tuple[Pipeline, int, torch.dtype, str]]:
    """Every pipeline with every row count, dtype and recipe name."""
    for pipeline in PIPELINES:
        for dtype in dtypes:
            for recipe in recipes:
                for count in rows:
                    yield pipeline, count, dtype, recipe
