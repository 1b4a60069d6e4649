"""Norms: values and gradients against float64, statistics, dtypes, strides, frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_ops as te
from te_ops.basic.norm import L2Normalization, LayerNorm, RMSNorm
from te_ops.errors import PlanError, ShapeError

from .interp import DTYPES, check, close, forward, layouts, program

bf16 = torch.bfloat16


def _rms(x: Any, *, weight: Any, eps: float, shift: float = 0.0) -> Any:
    return F.rms_norm(x, weight.shape, weight + shift, eps)


def _layer(x: Any, *, weight: Any, bias: Any, eps: float, shift: float = 0.0) -> Any:
    # Not F.layer_norm, whose float64 gradient of a row of one element is 1e-14 off 0.
    dims = tuple(range(-weight.dim(), 0))
    centred = x - x.mean(dims, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    return centred * rstd * (weight + shift) + bias


NORMS: tuple[tuple[type, Callable[..., Any]], ...] = ((RMSNorm, _rms), (LayerNorm, _layer))
BOTH = pytest.mark.parametrize(("kind", "exact"), NORMS, ids=["rms", "layer"])
SHAPES = [((5, 24), 24), ((2, 3, 7), 7), ((0, 8), 8), ((2, 0, 8), 8), ((1,), 1), ((9,), 9)]
SHAPES += [((3, 1), 1), ((3, 4, 5), (4, 5)), ((2, 2, 3, 2), (2, 3, 2)), ((4, 5), (4, 5))]


def filled(op: Any, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in op.parameters():
            p.normal_(0.5, 1.0)
    return op


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "normalized"), SHAPES)
def test_matches_float64(kind: Any, exact: Any, dtype: Any, shape: Any, normalized: Any) -> None:
    x = torch.randn(shape, dtype=dtype)
    check(filled(kind(normalized, dtype=dtype)), [x], partial(exact, eps=1e-5))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, bf16])
def test_zero_centered_gamma_adds_one_in_fp32(kind: Any, exact: Any, dtype: Any) -> None:
    op = filled(kind(24, 1e-3, dtype=dtype, zero_centered_gamma=True))
    x = torch.randn(5, 24, dtype=dtype)
    check(op, [x], partial(exact, eps=1e-3, shift=1.0))
    with torch.no_grad():
        op.weight.fill_(2.0**-12)  # 1 + gamma is not a BF16 number: rounding it would lose gamma
    y = forward(op, x)
    plain = kind(24, 1e-3, dtype=torch.float32)
    with torch.no_grad():
        plain.weight.fill_(1 + 2.0**-12)
        if kind is LayerNorm:
            plain.bias.copy_(op.bias)
    want = forward(plain, x.float())
    assert torch.equal(y, want.to(dtype)) or dtype is torch.float64


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_residual_returns_the_rounded_sum_and_its_norm(kind: Any, exact: Any, dtype: Any) -> None:
    op = filled(kind(24, dtype=dtype, residual=True))
    x, r = torch.randn(2, 3, 24, dtype=dtype), torch.randn(2, 3, 24, dtype=dtype)

    def function(x: Any, r: Any, **parameters: Any) -> Any:
        return exact(x + r, eps=1e-5, **parameters), x + r

    assert (op.num_inputs, op.num_extra_outputs) == (2, 1)
    # A BF16 sum is rounded before it is normalised, which the float64 function does not do.
    check(op, [x, r], function, scale=16.0, masks=dtype is torch.float32)
    made = program(op, x, r)
    y, total = made.run(x, r, dys=[torch.ones_like(x), torch.ones_like(x)])[:2]
    assert torch.equal(total, x + r)
    alone = filled(kind(24, dtype=dtype))
    assert torch.equal(y, forward(alone, total))


def test_residual_stream_keeps_the_wider_dtype() -> None:
    op = RMSNorm(8, dtype=bf16, residual=True)
    x, r = torch.randn(3, 8, dtype=bf16), torch.randn(3, 8)
    y, total = forward(op, x, r)
    assert (y.dtype, total.dtype) == (bf16, torch.float32)
    assert torch.equal(total, x.float() + r)


def test_residual_gradients_add_up_and_may_be_missing() -> None:
    op = RMSNorm(8, residual=True)
    x, r = torch.randn(3, 8), torch.randn(3, 8)
    dy, ds = torch.randn(3, 8), torch.randn(3, 8)
    both = program(op, x, r).run(x, r, dys=[dy, ds])
    norm_only = program(op, x, r, given=[True, False]).run(x, r, dys=[dy])
    torch.testing.assert_close(both[2], norm_only[2] + ds)
    stream_only = program(op, x, r, given=[False, True], wanted=lambda n: n == "0")
    out = stream_only.run(x, r, dys=[None, ds])
    assert torch.equal(out[2], ds)
    assert "rmsnorm_backward" not in stream_only.ran


@BOTH
@pytest.mark.parametrize("which", ["contiguous", "transposed", "expanded", "strided"])
def test_strides(kind: Any, exact: Any, which: str) -> None:
    x = dict(layouts(torch.randn(6, 6)))[which]
    dy = dict(layouts(torch.randn(6, 6)))[which]
    op = filled(kind(6))
    plain = program(op, x).run(x.contiguous(), dys=[dy.contiguous()])
    for a, b in zip(program(op, x).run(x, dys=[dy]), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [bf16, torch.float16, torch.float32])
def test_statistics_are_fp32_and_saved(dtype: torch.dtype) -> None:
    x = torch.randn(4, 16, dtype=dtype)
    for op, stats in ((RMSNorm(16, dtype=dtype), 1), (LayerNorm(16, dtype=dtype), 2)):
        made = program(op, x)
        made.run(x, dys=[x])
        kept = [(i, d) for name, i, d in made.saved if name in ("rmsnorm", "layernorm")]
        assert sorted(kept) == [(i + 1, torch.float32) for i in range(stats)]


def test_small_rows_and_a_zero_row_have_finite_gradients() -> None:
    x = torch.randn(4, 64, dtype=bf16) * 1e-3
    x[1] = 0.0
    for op in (RMSNorm(64, dtype=bf16), LayerNorm(64, dtype=bf16), L2Normalization()):
        for result in program(op, x).run(x, dys=[torch.ones_like(x)]):
            assert result.isfinite().all()
        check(op, [x], _function_of(op), scale=16.0, masks=False)


def _function_of(op: Any) -> Callable[..., Any]:
    if isinstance(op, L2Normalization):
        return partial(_l2, eps=op.eps)
    return partial(_rms if isinstance(op, RMSNorm) else _layer, eps=op.eps)


RECIPES = {
    "delayed": te.recipe.DelayedScaling,
    "current": te.recipe.Float8CurrentScaling,
    "block": te.recipe.Float8BlockScaling,
    "mxfp8": te.recipe.MXFP8BlockScaling,
    "nvfp4": te.recipe.NVFP4BlockScaling,
}


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_leave_statistics_and_gradients_alone(kind: Any, name: str) -> None:
    torch.manual_seed(0)
    model = te.Sequential(kind(64, dtype=bf16), te.Linear(64, 64, dtype=bf16))
    x = torch.randn(32, 64, dtype=bf16) * 1e-3
    x[5] = 0.0
    x.requires_grad_()
    dy = torch.randn(32, 64, dtype=bf16)
    leaves = [x, *model.parameters()]
    plain = torch.autograd.grad(model(x), leaves, dy)
    with te.autocast(recipe=RECIPES[name]()):
        saved = [v for s in model.plan(x).segments for v in s.saved_values]
        quantized = torch.autograd.grad(model(x), leaves, dy)
    stats = [v.format for v in saved if v.value.startswith(("rmsnorm0.", "layernorm0."))]
    assert stats == ["float32"] * (1 if kind is RMSNorm else 2)
    for a, b in zip(quantized, plain, strict=True):
        noise = (a.float() - b.float()).norm() / b.float().norm()
        assert noise < (0.3 if name == "nvfp4" else 0.1)


def test_one_plan_serves_all_row_counts_and_fixes_the_normalised_dimensions() -> None:
    op = filled(RMSNorm((2, 4)))
    assert op.feature_dims == 2
    for rows in (8, 16, 8, 0, 3):
        x = torch.randn(rows, 2, 4)
        torch.testing.assert_close(op(x), F.rms_norm(x, (2, 4), op.weight, 1e-5))
    with pytest.raises(ShapeError, match=r"\(8, 3, 4\)"):
        op(torch.randn(8, 3, 4))


def test_variance_survives_a_large_mean() -> None:
    x = torch.randn(4, 64) + 1000.0
    want = F.layer_norm(x.double(), (64,))
    y = forward(LayerNorm(64), x)
    assert (y - want).abs().max() < 2e-4  # E[x^2] - E[x]^2 in FP32 is off by 1e-1


def test_frozen_parameters_and_inputs_cost_nothing() -> None:
    x = torch.randn(3, 8)
    cost = {
        ("0",): {"layernorm", "layernorm_backward"},
        ("weight",): {"layernorm", "layernorm_dgamma"},
        ("bias",): {"layernorm", "reduce"},
        (): {"layernorm"},
    }
    for names, prims in cost.items():
        made = program(LayerNorm(8), x, wanted=lambda name, names=names: name in names)
        made.run(x, dys=[x])
        assert set(made.ran) == prims
    frozen = program(LayerNorm(8), x, wanted=lambda name: name == "bias")
    frozen.run(x, dys=[x])
    assert frozen.saved == []


@pytest.mark.parametrize("autocast", [None, bf16, torch.float16])
def test_computes_in_autocast_else_weight_dtype(autocast: Any) -> None:
    x = torch.randn(3, 8)
    for op in (RMSNorm(8, dtype=bf16), LayerNorm(8, dtype=bf16)):
        made = program(op, x, autocast=autocast)
        want = autocast or bf16
        y, *grads = made.run(x, dys=[torch.ones(3, 8, dtype=want)])
        assert y.dtype is want
        assert [d.dtype for d in grads] == [torch.float32, *(bf16 for _ in grads[1:])]
        exact = {name: p.detach().double() for name, p in op.named_parameters()}
        close(y, _function_of(op)(x.double(), **exact), want)


def test_autocast_reads_an_fp32_weight_unrounded() -> None:
    op = filled(RMSNorm(16))
    x = torch.randn(3, 16, dtype=bf16)
    y, _, dgamma = program(op, x, autocast=bf16).run(x, dys=[torch.ones_like(x)])
    want = F.rms_norm(x.double(), (16,), op.weight.double(), 1e-5)
    assert dgamma.dtype is torch.float32
    assert torch.equal(y, want.detach().to(bf16))


@pytest.mark.parametrize("normalized", [8, (2, 8)])
def test_plan_serves_other_row_counts(normalized: Any) -> None:
    shape = (normalized,) if isinstance(normalized, int) else normalized
    for kind in (RMSNorm, LayerNorm):
        op = filled(kind(normalized))
        made = program(op, torch.randn(4, *shape))
        for rows in (7, 0, 1):
            x = torch.randn(rows, *shape)
            fresh = program(op, x).run(x, dys=[x])
            for a, b in zip(made.run(x, dys=[x]), fresh, strict=True):
                assert torch.equal(a, b)


def test_nan_and_inf_do_not_hide() -> None:
    x = torch.randn(3, 8)
    x[0, 1], x[1, 2] = torch.nan, torch.inf
    for op in (RMSNorm(8), LayerNorm(8), L2Normalization()):
        y = forward(op, x)
        assert y[0].isnan().all()
        assert y[1].isnan().any()
        assert y[2].isfinite().all()


def _l2(x: Any, eps: float) -> Any:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 7), (0, 8), (1,), (3, 1)])
def test_l2_matches_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for name, x in layouts(torch.randn(shape, dtype=dtype)):
        check(L2Normalization(), [x], partial(_l2, eps=1e-6), masks=name == "contiguous")
    check(L2Normalization(0.5), [torch.randn(shape, dtype=dtype)], partial(_l2, eps=0.5))


def test_l2_dtype_is_autocast_else_input() -> None:
    x = torch.randn(3, 8)
    for autocast, want in ((None, torch.float32), (bf16, bf16)):
        made = program(L2Normalization(), x, autocast=autocast)
        y, dx = made.run(x, dys=[torch.ones(3, 8, dtype=want)])
        assert (y.dtype, dx.dtype) == (want, torch.float32)


def test_meta_device_then_reset() -> None:
    for kind in (RMSNorm, LayerNorm):
        for zero_centered in (False, True):
            op = kind(8, device="meta", dtype=bf16, zero_centered_gamma=zero_centered)
            assert op.weight.is_meta
            op = op.to_empty(device="cpu")
            with torch.no_grad():
                for p in op.parameters():
                    p.fill_(7.0)
            op.reset_parameters()
            assert op.weight.dtype is bf16
            assert (op.weight == float(not zero_centered)).all()
            assert kind is RMSNorm or not op.bias.any()


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"normalized_shape": 0}, ShapeError),
        ({"normalized_shape": ()}, ShapeError),
        ({"normalized_shape": (4, -1)}, ShapeError),
        ({"normalized_shape": 4.0}, ShapeError),
        ({"normalized_shape": True}, ShapeError),
        ({"eps": -1e-5}, PlanError),
        ({"eps": float("nan")}, PlanError),
        ({"eps": "1e-5"}, PlanError),
        ({"dtype": torch.int32}, PlanError),
        ({"dtype": torch.float8_e4m3fn}, PlanError),
        ({"zero_centered_gamma": 1}, PlanError),
        ({"residual": "yes"}, PlanError),
        ({"sm_margin": 0}, TypeError),
    ],
)
def test_bad_arguments(kind: Any, bad: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        kind(**({"normalized_shape": 8} | bad))


def test_bad_inputs() -> None:
    with pytest.raises(ShapeError, match=r"RMSNorm: .*\(3, 7\).*\(8,\)"):
        program(RMSNorm(8), torch.randn(3, 7))
    with pytest.raises(ShapeError, match="last dimensions"):
        program(LayerNorm((4, 8)), torch.randn(8))
    with pytest.raises(ShapeError, match="int64"):
        program(LayerNorm(8), torch.zeros(2, 8, dtype=torch.int64))
    with pytest.raises(ShapeError):
        program(RMSNorm(8, residual=True), torch.randn(3, 8), torch.randn(2, 8))
    with pytest.raises(PlanError, match="two inputs"):
        program(RMSNorm(8, residual=True), torch.randn(3, 8))
    with pytest.raises(ShapeError, match="no dimension"):
        program(L2Normalization(), torch.tensor(1.0))
    with pytest.raises(PlanError, match="eps"):
        L2Normalization(-1.0)


def test_options_are_part_of_the_key() -> None:
    configs = {
        str(RMSNorm(8, **options).config())
        for options in (
            {},
            {"eps": 1e-6},
            {"zero_centered_gamma": True},
            {"residual": True},
        )
    }
    assert len(configs) == 4
    op = RMSNorm(8)
    op.residual = True
    assert (op.num_inputs, op.num_extra_outputs) == (2, 1)
    assert repr(LayerNorm(8, zero_centered_gamma=True)) == (
        "LayerNorm((8,), eps=1e-05, zero_centered_gamma)"
    )
