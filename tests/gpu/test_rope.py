"""RoPE, norms of heads and heads to FP8 on a GPU against their references there; layers with them against the CPU's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import layers
from te_ops.backends.cuda import compile as compiler
from tests.backends.cuda.cases import Case, check, drawer
from tests.backends.cuda.cases_heads_quantize import heads_back_cases, heads_quantize_cases
from tests.backends.cuda.cases_norm_heads import norm_heads_cases
from tests.backends.cuda.cases_rope import Table, rope_cases, table_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing())),
]


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


CASES = [*rope_cases(), *norm_heads_cases(), *heads_quantize_cases(), *heads_back_cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for shape in ((0, 32), (1, 32), (77, 32), (1024, 32)):
        assert check(case.make(drawer(3, device), shape), arch(), device) == [], shape


@pytest.mark.parametrize("case", [*table_cases()], ids=lambda case: case.name)
def test_the_table_is_that_of_fp64(case: Table) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for shape in ((0,), (1,), (900,)):
        assert case.check(drawer(3, "cpu"), shape, arch(), device) == [], shape


RECIPES = {
    "bf16": (None, 0.02),
    "delayed": (te.recipe.DelayedScaling(), 0.1),
    "delayed fp8_dpa": (te.recipe.DelayedScaling(fp8_dpa=True), 0.15),
    "current fp8_dpa": (te.recipe.Float8CurrentScaling(fp8_dpa=True), 0.15),
}


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize(
    "keywords",
    [
        {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True},
        {"qk_norm_type": "L2Normalization"},
        {"bias": True},
    ],
    ids=str,
)
def test_a_layer_has_the_cpus_numbers(name: str, keywords: dict[str, Any]) -> None:
    torch.manual_seed(0)
    recipe, limit = RECIPES[name]
    op = layers.TransformerLayer(
        128, 256, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", activation="swiglu",
        attn_input_format="bshd", rotary=te.RoPE(32), params_dtype=torch.bfloat16, **{"bias": False, **keywords},
    )  # fmt: skip
    x = torch.randn(2, 64, 128).bfloat16()
    found: list[list[torch.Tensor]] = []
    for device in ("cpu", "cuda"):
        made, leaf = copy.deepcopy(op).to(device), x.detach().to(device, copy=True).requires_grad_()
        for _ in range(2):
            made.zero_grad()
            leaf.grad = None
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = made(leaf)
            y.float().square().sum().backward()
        assert leaf.grad is not None
        grads = [p.grad for p in made.parameters() if p.grad is not None]
        found.append([t.detach().cpu().double() for t in (y - leaf, leaf.grad, *grads)])
    for a, b in zip(*found, strict=True):
        assert float((b - a).norm() / a.norm()) < limit
