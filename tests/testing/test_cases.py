"""The generators themselves must hold the unfriendly cases, or every check above them is blind to
those.
"""

from __future__ import annotations

import math

import pytest
import torch

import te_ops as te
from te_ops.recipe import Format, Recipe
from te_ops.registry import REGISTRY, Rule
from te_ops.runtime.shapes import row_class
from te_ops.testing import cases


def test_row_counts() -> None:
    assert {0, 1} <= set(cases.ROWS)
    assert any(n % 2 and n > 1 for n in cases.ROWS)
    assert any(n % 128 == 0 and n for n in cases.ROWS)
    for first, second in cases.REPLAYS:
        assert first != second
        assert row_class(first) == row_class(second)


def test_shapes() -> None:
    assert any(0 in s for s in cases.SHAPES)
    assert any(math.prod(s) == 1 for s in cases.SHAPES)
    assert any(s[-1] % 2 for s in cases.SHAPES)
    assert any(len(s) > 2 for s in cases.SHAPES)
    assert any(len(s) == 1 for s in cases.SHAPES)
    assert any(s[0] > 128 and s[-1] > 128 and s[-1] % 16 for s in cases.SHAPES)


def test_formats_and_recipes() -> None:
    assert Format.HYBRID in cases.FORMATS
    found = [r for r in cases.RECIPES.values() if r is not None]
    assert {getattr(r, "fp8_format", None) for r in found} >= {Format.HYBRID, Format.E4M3}
    families = {
        "DelayedScaling",
        "Float8CurrentScaling",
        "Float8BlockScaling",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
    }
    assert {type(r).__name__ for r in found} >= families
    assert None in cases.RECIPES.values()
    assert any(isinstance(r, Recipe) and r.backward_override for r in found)


def test_quantizers() -> None:
    kinds = {type(q) for q in cases.QUANTIZERS}
    assert kinds == {
        te.Float8Quantizer, te.Float8CurrentScalingQuantizer, te.Float8BlockQuantizer,
        te.MXFP8Quantizer, te.NVFP4Quantizer, te.HybridQuantizer, te.IdentityQuantizer,
    }  # fmt: skip
    assert any(q.stateful for q in cases.QUANTIZERS)
    assert any(q.stochastic for q in cases.QUANTIZERS)
    dtypes = {getattr(q, "dtype", None) for q in cases.QUANTIZERS}
    assert {torch.float8_e4m3fn, torch.float8_e5m2} <= dtypes


def test_special_values() -> None:
    assert any(math.isnan(x) for x in cases.SPECIAL)
    assert {math.inf, -math.inf} <= set(cases.SPECIAL)
    assert any(x == 0 and math.copysign(1, x) < 0 for x in cases.SPECIAL)
    assert any(0 < x < torch.finfo(torch.float32).smallest_normal for x in cases.SPECIAL)
    assert max(x for x in cases.SPECIAL if math.isfinite(x)) > 1e38


def test_layouts() -> None:
    x = torch.randn(4, 6)
    for name, arrange in cases.LAYOUTS.items():
        y = arrange(x)
        assert y.shape == x.shape
        assert not y.is_contiguous(), name
        if name != "expanded":
            assert torch.equal(x, y)
    assert cases.expanded(x).stride(0) == 0
    assert torch.equal(cases.with_rows(x, 9)[4:8], x)


@pytest.mark.parametrize("kind", list(cases.ROUTINGS))
def test_routings_have_their_shape(kind: str) -> None:
    assert cases.routing(kind, 12, 4).shape == (12, 4)
    assert cases.routing(kind, 0, 4).shape == (0, 4)


def test_routings_cover_overflow_and_emptiness() -> None:
    loads = {}
    for kind in cases.ROUTINGS:
        chosen = cases.routing(kind, 64, 8).topk(2, dim=-1).indices
        loads[kind] = torch.bincount(chosen.reshape(-1), minlength=8)
    assert loads["balanced"].max() == loads["balanced"].min()
    assert loads["skewed"].max() > 2 * loads["skewed"].float().mean()
    assert loads["all_to_one"][7] == 64
    assert (cases.routing("ties", 4, 8) == 0).all()
    assert 0.0 in cases.CAPACITY_FACTORS  # all dropped
    assert any(f is not None and 0 < f < 1 for f in cases.CAPACITY_FACTORS)  # over capacity
    assert 1.0 in cases.CAPACITY_FACTORS
    assert None in cases.CAPACITY_FACTORS
    with pytest.raises(ValueError, match="known: uniform"):
        cases.routing("friendly", 4, 8)


def test_pipelines_hold_the_chain_of_every_rule() -> None:
    seen: set[str] = set()
    for pipeline in cases.PIPELINES:
        op = pipeline.make()
        xs = [x.requires_grad_() for x in pipeline.inputs(8)]
        for recipe in (None, cases.RECIPES["mxfp8"]):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                plan = op.plan(*xs)
            seen |= {note.rule for note in plan.notes} | {
                step.name for step in (*plan.forward, *plan.backward)
            }
    ours = {
        rule.name for rule in REGISTRY.all() if isinstance(rule, Rule) and rule.stage == "phase"
    }
    heads = {"heads_quantize", "heads_quantize_rounded", "pack_rope", "norm_rope_heads"}
    heads |= {"heads_quantize_each", "heads_norm_back_quantize"}
    # The first needs main_grad (tests/runtime/test_main_grad.py), the others attention
    # (tests/registry/test_rounding.py, tests/backends/cuda/test_layer_plans.py).
    assert ours - seen == {"gemm_accumulate"} | heads


def test_pipelines_generator_crosses_everything() -> None:
    drawn = list(cases.pipelines())
    assert {p.name for p, *_ in drawn} == {p.name for p in cases.PIPELINES}
    assert {rows for _, rows, *_ in drawn} >= {0, 1, 5}
    assert {recipe for *_, recipe in drawn} == {"dense", "current", "mxfp8"}
    assert len(drawn) == len(cases.PIPELINES) * 5 * 2 * 3


def test_the_package_offers_the_checks() -> None:
    assert te.testing.cases is cases
    wanted = [
        "check_op",
        "check_rule",
        "check_kernel",
        "check_quantizer",
        "assert_close",
        "tolerance",
    ]
    assert all(callable(getattr(te.testing, name)) for name in wanted)
    with pytest.raises(AttributeError, match="no attribute 'testings'"):
        te.testings  # noqa: B018
