"""Every recipe and quantizer, and a step under one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from tests.faults.cases.results import Result, backward, outputs_of


def mixed(role: te.Role) -> Any:
    """A custom recipe: another format for each operand and usage."""
    return {
        "input": te.HybridQuantizer(te.MXFP8Quantizer(), te.Float8CurrentScalingQuantizer()),
        "weight": te.recipe.DelayedScaling(amax_history_len=3),
        "grad_output": te.HybridQuantizer(te.IdentityQuantizer(), te.Float8BlockQuantizer()),
    }.get(role.operand)


_HYBRID, _E4M3 = te.recipe.Format.HYBRID, te.recipe.Format.E4M3
RECIPES: dict[str, te.Recipe] = {
    "delayed": te.recipe.DelayedScaling(fp8_format=_HYBRID),
    "delayed_short": te.recipe.DelayedScaling(
        fp8_format=_E4M3, margin=1, amax_history_len=2, amax_compute_algo="most_recent"
    ),
    "current": te.recipe.Float8CurrentScaling(fp8_format=_HYBRID),
    "current_e4m3": te.recipe.Float8CurrentScaling(
        fp8_format=_E4M3, use_power_2_scales=True, amax_epsilon=1e-4
    ),
    "current_high": te.recipe.Float8CurrentScaling(backward_override="high_precision"),
    "current_dequantized": te.recipe.Float8CurrentScaling(backward_override="dequantized"),
    "block": te.recipe.Float8BlockScaling(fp8_format=_E4M3),
    "block_hybrid": te.recipe.Float8BlockScaling(
        fp8_format=_HYBRID, use_f32_scales=True, w_block_scaling_dim=1
    ),
    "mxfp8": te.recipe.MXFP8BlockScaling(fp8_format=_E4M3),
    "mxfp8_hybrid": te.recipe.MXFP8BlockScaling(fp8_format=_HYBRID, enable_2d_quantization=True),
    "nvfp4": te.recipe.NVFP4BlockScaling(),
    "nvfp4_plain": te.recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "nvfp4_4over6": te.recipe.NVFP4BlockScaling(nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"),
    "nvfp4_row": te.recipe.NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
    "custom": te.recipe.CustomRecipe(qfactory=mixed),
    "per_layer": te.recipe.PerLayer(
        layers={
            "0": te.recipe.MXFP8BlockScaling(),
            "1*": te.recipe.DelayedScaling(amax_history_len=4),
        },
        default=te.recipe.Float8CurrentScaling(),
    ),
}
STOCHASTIC = ("nvfp4", "nvfp4_4over6", "nvfp4_row")
DELAYED = ("delayed", "delayed_short", "custom", "per_layer")
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
MODES: dict[str, te.Recipe | None] = {"none": None, **RECIPES}
every_mode = pytest.mark.parametrize("recipe", MODES.values(), ids=list(MODES))
# One mode a recipe class and both gradient formats, for matrices with further axes.
SOME = ("none", "delayed", "current_high", "block_hybrid", "mxfp8_hybrid", "nvfp4", "custom")
some_modes = pytest.mark.parametrize("recipe", [MODES[n] for n in SOME], ids=SOME)


def within(recipe: te.Recipe | None) -> te.autocast:
    """The autocast of a mode."""
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def step(
    op: nn.Module, xs: Sequence[torch.Tensor], recipe: te.Recipe | None, seed: int = 3
) -> Result:
    """One training step under a recipe with fresh gradients; stochastic rounding starts from `seed`."""
    for tensor in (*xs, *op.parameters()):
        tensor.grad = None
    torch.manual_seed(seed)
    with within(recipe):
        outputs = outputs_of(op(*xs))
    if any(y.requires_grad for y in outputs):
        backward(outputs)
    return Result(
        [y.detach() for y in outputs],
        [x.grad for x in xs],
        {n: p.grad for n, p in op.named_parameters()},
    )


QUANTIZERS: list[te.Quantizer] = [
    te.Float8Quantizer(),
    te.Float8Quantizer(torch.float8_e5m2),
    te.Float8CurrentScalingQuantizer(),
    te.Float8CurrentScalingQuantizer(torch.float8_e5m2),
    te.Float8CurrentScalingQuantizer(force_pow_2_scales=True, amax_epsilon=0.125),
    te.Float8BlockQuantizer(),
    te.Float8BlockQuantizer(torch.float8_e5m2, force_pow_2_scales=False),
    te.Float8BlockQuantizer(block_scaling_dim=2),
    te.MXFP8Quantizer(),
    te.MXFP8Quantizer(torch.float8_e5m2),
    te.MXFP8Quantizer(with_2d_quantization=True),
    te.NVFP4Quantizer(),
    te.NVFP4Quantizer(with_2d_quantization=True),
    te.NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    te.NVFP4Quantizer(row_scaled=True),
    te.NVFP4Quantizer(four_over_six=True),
    te.HybridQuantizer(te.MXFP8Quantizer(), te.NVFP4Quantizer(with_rht=True)),
    te.HybridQuantizer(
        te.Float8CurrentScalingQuantizer(),
        te.Float8BlockQuantizer(),
        columnwise_source="rowwise_dequantized",
    ),
    te.IdentityQuantizer(),
    te.IdentityQuantizer(torch.bfloat16),
]
every_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q.describe())
every_usage = pytest.mark.parametrize(
    ("rowwise", "columnwise"),
    [(True, False), (False, True), (True, True)],
    ids=["row", "col", "both"],
)


def quantizer_classes() -> dict[str, type]:
    """Every concrete quantizer that te_ops exports."""
    return {
        name: thing
        for name, thing in vars(te).items()
        if inspect.isclass(thing)
        and issubclass(thing, te.Quantizer)
        and not inspect.isabstract(thing)
    }


def recipe_classes() -> dict[str, type]:
    """Every recipe that te_ops.recipe offers: none that others are made of."""
    found = {
        name: thing
        for name, thing in vars(te.recipe).items()
        if inspect.isclass(thing) and issubclass(thing, te.Recipe)
    }
    bases = {base for kind in found.values() for base in kind.__mro__[1:]}
    return {name: kind for name, kind in found.items() if kind not in bases}


def make_quantized(x: torch.Tensor, quantizer: te.Quantizer, **usage: bool) -> te.QuantizedTensor:
    """`x` quantized with the state and seed that the quantizer wants."""
    state = torch.tensor([3.0]) if quantizer.stateful else None
    seed = torch.tensor(17) if quantizer.stochastic else None
    return te.quantize(x, quantizer, **usage, state=state, seed=seed)
