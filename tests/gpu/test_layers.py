"""Layers on a CUDA device: the CPU's numbers, what real kernels save, and generation token by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import layers
from te_ops.cli.arms import arm
from te_ops.cli.blocks import ModelSizes, language_model
from te_ops.cli.decoding import decoding
from te_ops.cli.models import LanguageModel
from tests.layers.test_plans import HIDDEN, moves, saved, transformer_engine
from tests.layers.test_plans import layer as llama_layer

RECIPES = {
    "bf16": None,
    "delayed": te.recipe.DelayedScaling(),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
}
CUDA = torch.device("cuda")


def norm_of_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_has_the_cpus_numbers(name: str) -> None:
    """Up to BF16 sums in another order, which FP8 may round to the next code."""
    torch.manual_seed(0)
    op = layers.TransformerLayer(
        128, 256, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", activation="swiglu",
        bias=False, attn_input_format="bshd", rotary=te.RoPE(32), params_dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16)
    results: list[list[torch.Tensor]] = []
    for device in ("cpu", "cuda"):
        made = copy.deepcopy(op).to(device)
        leaf = x.detach().to(device, copy=True).requires_grad_()
        recipe = RECIPES[name]
        for _ in range(2):  # delayed scaling has seen values at the second
            made.zero_grad()
            leaf.grad = None
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = made(leaf)
            y.float().square().sum().backward()
        assert leaf.grad is not None
        results.append([y - leaf, leaf.grad, *(p.grad for p in made.parameters())])
    for a, b in zip(*results, strict=True):
        assert norm_of_difference(b, a) < (0.02 if name == "bf16" else 0.1)


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_saved_bytes_and_copies(name: str) -> None:
    """With the kernels of the device, the attention's FP8 output and the activation are rebuilt in backward."""
    op = llama_layer(device="cuda")
    x = torch.randn(2, 64, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with te.autocast(recipe=RECIPES[name]):
        plan: dict[str, Any] = op.plan(x).to_dict()
    kept = saved(plan)
    kept.pop("rope_table0", None)
    assert sum(kept.values()) / transformer_engine(2 * 64) <= 0.86
    assert not [*moves(plan, "forward"), *moves(plan, "backward")]


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("fp32", None, 1e-4),
        ("bf16", torch.bfloat16, 0.03),
        ("delayed", torch.bfloat16, 0.08),
        ("block", torch.bfloat16, 0.08),
        ("mxfp8", torch.bfloat16, 0.08),
        ("current", torch.bfloat16, 0.12),
    ],
)
def test_token_by_token_is_the_full_forward(
    name: str, dtype: torch.dtype | None, tolerance: float
) -> None:
    torch.manual_seed(0)
    sizes = ModelSizes(layers=2, dim=128, heads=4, ffn=256, context=32, batch=2)
    way = arm(name, dtype).sparing("head")
    model = language_model(sizes).to(CUDA)
    tokens = torch.randint(256, (2, 32), device=CUDA)
    with way.active(CUDA):
        model(tokens, tokens.roll(-1, 1)).backward()
    model.eval()
    with torch.no_grad(), way.active(CUDA):
        want = model[:-1](tokens)
    with decoding(LanguageModel(model, sizes, way), 32, CUDA, batch=2) as decoder:
        got = torch.cat([decoder(part) for part in tokens.split([9, *[1] * 23], 1)], 1)
    assert norm_of_difference(got, want.float()) < tolerance
