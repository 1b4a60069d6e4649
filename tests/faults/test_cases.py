"""K32 (B163): the generator draws the unfriendly cases too, and its oracles agree with the ops."""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from tests.faults import cases
from tests.faults.cases import CASES, DTYPES, QUANTIZERS, RECIPES, VALUES, Case, every_case


def test_every_exported_op_class_has_a_case() -> None:
    covered = {kind.__name__ for case in CASES for kind in case.kinds}
    assert covered >= set(cases.op_classes())


def test_every_quantizer_and_every_usage_option_is_drawn() -> None:
    assert {type(q).__name__ for q in QUANTIZERS} == set(cases.quantizer_classes())
    dtypes = {(type(q), getattr(q, "dtype", None)) for q in QUANTIZERS}
    for kind in (
        te.Float8Quantizer,
        te.Float8CurrentScalingQuantizer,
        te.Float8BlockQuantizer,
        te.MXFP8Quantizer,
    ):
        assert {(kind, torch.float8_e4m3fn), (kind, torch.float8_e5m2)} <= dtypes
    assert any(q.stochastic for q in QUANTIZERS)
    assert any(q.stateful for q in QUANTIZERS)


def test_every_recipe_class_and_both_formats_are_drawn() -> None:
    assert {type(r).__name__ for r in RECIPES.values()} == set(cases.recipe_classes())
    for kind in (
        te.recipe.DelayedScaling,
        te.recipe.Float8CurrentScaling,
        te.recipe.Float8BlockScaling,
        te.recipe.MXFP8BlockScaling,
    ):
        formats = {r.fp8_format for r in RECIPES.values() if type(r) is kind}  # type: ignore[attr-defined]
        assert formats == set(te.recipe.Format), kind.__name__
    assert {r.backward_override for r in RECIPES.values()} == {
        None,
        "high_precision",
        "dequantized",
    }


def test_hard_rows_dtypes_and_values_are_drawn() -> None:
    assert {0, 1} <= set(cases.ROWS)
    assert any(rows % 8 for rows in cases.ROWS if rows > 8)
    assert set(DTYPES) == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    filled = {v.name: v.fill((4, 32)) for v in VALUES}
    assert any(x.isnan().any() for x in filled.values())
    assert any(x.isinf().any() for x in filled.values())
    assert any(not x.any() for x in filled.values())
    assert any(0 < x.abs().amax() < torch.finfo(torch.float32).tiny for x in filled.values())
    assert any(torch.finfo(torch.float16).max < x.abs().amax() < torch.inf for x in filled.values())


@every_case
def test_every_gradient_mask_is_drawn(case: Case) -> None:
    op, xs = case.fresh(), case.data(2)
    masks = cases.grad_masks(op, xs)
    count = sum(x.is_floating_point() for x in xs) + len(list(op.parameters()))
    assert any(not any(a + b) for a, b in masks)
    assert any(sum(a + b) == count for a, b in masks)
    for i in range(count):
        assert any(sum(a + b) == 1 for a, b in masks), i


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_case
def test_op_equals_its_oracle(case: Case, dtype: torch.dtype) -> None:
    op, xs = case.fresh(dtype), case.data(24, dtype)
    actual = cases.run(op, xs)
    tolerance = cases.tolerance_of(dtype) * (4 if case.name in DEEP else 1)
    cases.compare(actual, case.expected(op, xs), tolerance)
    for x, grad in zip(xs, actual.input_grads, strict=True):
        assert grad is None or grad.dtype == x.dtype
    for name, p in op.named_parameters():
        grad = actual.param_grads[name]
        assert grad is not None
        assert grad.dtype == p.dtype


DEEP = (
    "MLP",
    "Residual",
    "Recompute",
    "Attention",
    "Attention_bias_sink",
    "Attention_packed_rope",
    "ForeignModule",
    "Extras",
    "Head",
)
