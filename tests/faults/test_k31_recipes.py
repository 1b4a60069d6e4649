"""K31: no option of a quantizer, recipe or autocast is accepted and then ignored, and no unknown one is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_ops as te
from tests.faults import cases
from tests.faults.options import differs, keywords

W = 64


# -- quantizers

QUANTIZER_OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "Float8Quantizer": {"dtype": (torch.float8_e4m3fn, torch.float8_e5m2)},
    "Float8CurrentScalingQuantizer": {
        "dtype": (torch.float8_e4m3fn, torch.float8_e5m2),
        "force_pow_2_scales": (False, True),
        "amax_epsilon": (0.0, 100.0),
    },
    "Float8BlockQuantizer": {
        "dtype": (torch.float8_e4m3fn, torch.float8_e5m2),
        "block_scaling_dim": (1, 2),
        "force_pow_2_scales": (True, False),
        "amax_epsilon": (0.0, 100.0),
    },
    "MXFP8Quantizer": {
        "dtype": (torch.float8_e4m3fn, torch.float8_e5m2),
        "with_2d_quantization": (False, True),
    },
    "NVFP4Quantizer": {
        "with_2d_quantization": (False, True),
        "with_rht": (False, True),
        "stochastic_rounding": (False, True),
        "row_scaled": (False, True),
        "four_over_six": (False, True),
        "four_over_six_bound": (256, 448),
        "four_over_six_error": ("MAE", "MSE"),
    },
    "HybridQuantizer": {
        "rowwise_quantizer": (te.MXFP8Quantizer(), te.NVFP4Quantizer()),
        "columnwise_quantizer": (te.MXFP8Quantizer(), te.NVFP4Quantizer()),
        "columnwise_source": ("original", "rowwise_dequantized"),
    },
    "IdentityQuantizer": {"dtype": (None, torch.bfloat16)},
}
QUANTIZER_FIXED: dict[str, dict[str, Any]] = {
    "HybridQuantizer": {
        "rowwise_quantizer": te.NVFP4Quantizer(),
        "columnwise_quantizer": te.MXFP8Quantizer(),
    },
    "four_over_six_bound": {"four_over_six": True},
    "four_over_six_error": {"four_over_six": True},
}


def _bytes_of(quantizer: te.Quantizer) -> Any:
    torch.manual_seed(0)
    x = torch.randn(160, 192) * torch.rand(160, 1) * 10
    q = cases.make_quantized(x, quantizer, rowwise=True, columnwise=True)
    return [
        [(t.dtype, tuple(t.shape), t.float().numpy().tobytes()) for t in r.tensors()]
        for r in (q.rowwise, q.columnwise)
        if r is not None
    ]


def test_every_quantizer_and_keyword_is_in_the_table() -> None:
    assert set(QUANTIZER_OPTIONS) == set(cases.quantizer_classes())
    for name, options in QUANTIZER_OPTIONS.items():
        assert set(keywords(getattr(te, name))) == set(options), name


@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        pytest.param(n, k, id=f"{n}-{k}")
        for n, options in QUANTIZER_OPTIONS.items()
        for k in options
    ],
)
def test_quantizer_keyword_changes_the_bytes(name: str, keyword: str) -> None:
    fixed = {**QUANTIZER_FIXED.get(name, {}), **QUANTIZER_FIXED.get(keyword, {})}
    kind = getattr(te, name)
    a, b = (kind(**{**fixed, keyword: v}) for v in QUANTIZER_OPTIONS[name][keyword])
    assert a != b
    assert hash(a) != hash(b)
    assert differs(_bytes_of(a), _bytes_of(b))


@pytest.mark.parametrize("name", QUANTIZER_OPTIONS)
def test_quantizer_refuses_unknown_keywords(name: str) -> None:
    with pytest.raises(TypeError):
        getattr(te, name)(**QUANTIZER_FIXED.get(name, {}), interval=1)


def test_quantize_arguments() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    q = te.MXFP8Quantizer()
    assert te.quantize(x, q).columnwise is None
    assert te.quantize(x, q, columnwise=True).columnwise is not None
    assert te.quantize(x, q, rowwise=False, columnwise=True).rowwise is None
    with pytest.raises(te.Error):
        te.quantize(x, q, rowwise=False)
    f = te.Float8Quantizer()
    values = [te.quantize(x, f, state=torch.tensor([s])).dequantize() for s in (1.0, 3.0)]
    assert not torch.equal(*values)
    sr = te.NVFP4Quantizer(stochastic_rounding=True)
    values = [te.quantize(x, sr, seed=torch.tensor(s)).dequantize() for s in (1, 2)]
    assert not torch.equal(*values)
    with pytest.raises(te.Error):
        te.quantize(x, sr)
    with pytest.raises(te.Error):
        te.quantize(x, f)
    with pytest.raises(TypeError):
        te.quantize(x, q, transpose=True)  # type: ignore[call-arg]


# -- recipes


def _half(history: torch.Tensor) -> torch.Tensor:
    return history.amax(0) / 2


def _seven(amax: Any, scale: torch.Tensor, fp8_max: float, recipe: Any) -> torch.Tensor:
    return torch.full_like(scale, 7.0)


_F = te.recipe.Format
_SPLIT = ((False, True, True), (True, False, False))
_OVERRIDE = (None, "high_precision")
_ATTENTION: dict[str, tuple[Any, Any]] = {"fp8_dpa": (False, True), "fp8_mha": (False, True)}
RECIPE_OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "DelayedScaling": {
        "margin": (0, 2),
        "fp8_format": (_F.HYBRID, _F.E4M3),
        "amax_history_len": (1024, 1),
        "amax_compute_algo": ("max", _half),
        "scaling_factor_compute_algo": (None, _seven),
        "reduce_amax": (True, False),
        "use_power_2_scales": (False, True),
        "backward_override": _OVERRIDE,
        **_ATTENTION,
    },
    "Float8CurrentScaling": {
        "use_power_2_scales": (False, True),
        "amax_epsilon": (0.0, 100.0),
        "fp8_format": (_F.HYBRID, _F.E4M3),
        "split_accumulator": _SPLIT,
        "backward_override": _OVERRIDE,
        **_ATTENTION,
    },
    "Float8BlockScaling": {
        "use_f32_scales": (False, True),
        "fp8_format": (_F.E4M3, _F.HYBRID),
        "x_block_scaling_dim": (1, 2),
        "w_block_scaling_dim": (2, 1),
        "grad_block_scaling_dim": (1, 2),
        "backward_override": _OVERRIDE,
        **_ATTENTION,
    },
    "MXFP8BlockScaling": {
        "fp8_format": (_F.E4M3, _F.HYBRID),
        "enable_2d_quantization": (False, True),
        "backward_override": _OVERRIDE,
        **_ATTENTION,
    },
    "NVFP4BlockScaling": {
        "disable_rht": (False, True),
        "disable_stochastic_rounding": (False, True),
        "disable_2d_quantization": (False, True),
        "row_scaled_activation": (False, True),
        "nvfp4_4over6": ("none", "all"),
        "nvfp4_4over6_e4m3_use_256": ("all", "none"),
        "nvfp4_4over6_err_mode": ("MAE", "MSE"),
        "backward_override": _OVERRIDE,
        **_ATTENTION,
    },
    "CustomRecipe": {
        "qfactory": (lambda _: te.MXFP8Quantizer(), lambda _: None),
        "split_accumulator": _SPLIT,
        "backward_override": _OVERRIDE,
    },
    "PerLayer": {
        "layers": ({}, {"0": te.recipe.MXFP8BlockScaling()}),
        "default": (None, te.recipe.MXFP8BlockScaling()),
        "backward_override": _OVERRIDE,
    },
}
RECIPE_FIXED: dict[str, dict[str, Any]] = {
    "CustomRecipe": {"qfactory": lambda _: te.MXFP8Quantizer()},
    "fp8_mha": {"fp8_dpa": True},
    "x_block_scaling_dim": {"w_block_scaling_dim": 1},
    "grad_block_scaling_dim": {"w_block_scaling_dim": 1},
    "nvfp4_4over6_e4m3_use_256": {"nvfp4_4over6": "all"},
    "nvfp4_4over6_err_mode": {"nvfp4_4over6": "all"},
}


def _attended(recipe: te.Recipe) -> Any:
    """The output of attention that ends a pipeline: its type, and its numbers."""
    torch.manual_seed(0)
    with te.autocast(recipe=recipe):
        y = te.Attention(2)(*(torch.randn(1, 8, 2, 16) for _ in range(3)))
    quantized = isinstance(y, te.QuantizedTensor)
    return [quantized, (y.dequantize() if quantized else y).tolist()]


def _trained(make: Callable[[], te.Recipe]) -> Any:
    """Training steps of a model with larger numbers in between, and the plan's own words."""
    try:
        recipe = make()
    except te.Error as error:
        return ["error", str(error)]
    torch.manual_seed(0)
    model = te.Sequential(te.Linear(192, 160), te.Linear(160, 192), te.SReLU())
    x = torch.randn(160, 192, requires_grad=True)
    seen: list[Any] = []
    for factor in (1.0, 40.0, 2.0, 2.0):
        result = cases.step(model, ((factor * x.detach()).requires_grad_(),), recipe)
        seen.append(
            [None if t is None else t.double().numpy().tobytes() for _, t in result.tensors()]
        )
    with te.autocast(recipe=recipe):
        plan = model.plan(x)
    accumulation = [str(s.nodes) for segment in plan.segments for s in segment.forward_steps]
    gemms = [recipe.accumulation(p) for p in te.graph.Phase]
    return [seen, accumulation, gemms, _attended(recipe)]


def test_every_recipe_and_keyword_is_in_the_table() -> None:
    assert set(RECIPE_OPTIONS) == set(cases.recipe_classes())
    for name, options in RECIPE_OPTIONS.items():
        assert set(keywords(getattr(te.recipe, name))) == set(options), name


@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        pytest.param(n, k, id=f"{n}-{k}")
        for n, options in RECIPE_OPTIONS.items()
        for k in options
        if k != "reduce_amax"
    ],
)
def test_recipe_keyword_changes_training(name: str, keyword: str) -> None:
    """`reduce_amax` needs two ranks: see K04."""
    fixed = {**RECIPE_FIXED.get(name, {}), **RECIPE_FIXED.get(keyword, {})}
    kind = getattr(te.recipe, name)
    a, b = (
        _trained(lambda v=v: kind(**{**fixed, keyword: v})) for v in RECIPE_OPTIONS[name][keyword]
    )
    assert a[0] != "error", a
    assert differs(a, b)


@pytest.mark.parametrize("name", RECIPE_OPTIONS)
def test_recipe_refuses_unknown_keywords_and_positions(name: str) -> None:
    kind, fixed = getattr(te.recipe, name), RECIPE_FIXED.get(name, {})
    with pytest.raises(TypeError):
        kind(**fixed, interval=1)
    with pytest.raises(TypeError):
        kind(1)
    with pytest.raises(te.RecipeError):
        kind(**{**fixed, "backward_override": "sometimes"})


# -- autocast and functions


def _linear(make: Callable[[], te.autocast]) -> Any:
    torch.manual_seed(0)
    op = te.Linear(W, W)
    x = torch.randn(6, W)
    try:
        with make():
            y = op(x)
        y.sum().backward()
    except te.Error as error:
        return ["error", str(error)]
    return [y.tolist(), {k: v.tolist() for k, v in op.state_dict().items()}]


AUTOCAST: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "enabled": ({}, True, False),
    "calibrating": ({"enabled": False}, False, True),
    "recipe": ({}, te.recipe.MXFP8BlockScaling(), te.recipe.NVFP4BlockScaling()),
    "amax_reduction_group": ({}, None, "no group: torch.distributed is not initialised"),
    "dtype": ({}, torch.float8_e4m3fn, torch.float8_e5m2),
}


@pytest.mark.parametrize("keyword", AUTOCAST)
def test_autocast_keyword_changes_something(keyword: str) -> None:
    assert set(AUTOCAST) == set(keywords(te.autocast))
    fixed, a, b = AUTOCAST[keyword]
    seen = [_linear(lambda v=v: te.autocast(**{**fixed, keyword: v})) for v in (a, b)]
    assert seen[0][0] != "error"
    assert differs(*seen)


def test_autocast_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError):
        te.autocast(fp8=True)  # type: ignore[call-arg]
    with pytest.raises(te.RecipeError):
        te.autocast(recipe="fp8")  # type: ignore[arg-type]
    with pytest.raises(te.RecipeError):
        te.autocast(recipe=te.recipe.MXFP8BlockScaling)  # type: ignore[arg-type]
    with pytest.raises(te.RecipeError):
        te.autocast(dtype=torch.bfloat16)


def test_role_fields_reach_custom_recipes() -> None:
    seen: list[te.Role] = []

    def factory(role: te.Role) -> None:
        seen.append(role)

    s = te.Sequential(te.Linear(W, W), te.Quantize(backward=True))
    x = torch.randn(3, W, requires_grad=True)
    cases.step(s, (x,), te.recipe.CustomRecipe(qfactory=factory))
    got = {(r.prim, r.operand, r.path, r.is_grad) for r in seen}
    assert got >= {
        ("gemm", "input", "0", False),
        ("gemm", "weight", "0", False),
        ("gemm", "grad_output", "0", True),
        ("quantize", "input", "1", False),
        ("quantize", "grad_output", "1", True),
    }


def test_prepare_and_checkpoint_arguments() -> None:
    op = te.Linear(W, W)
    assert not te.prepare(op, te.recipe.MXFP8BlockScaling()).state_dict().keys() - {
        "weight",
        "bias",
    }
    te.prepare(op, te.recipe.DelayedScaling(amax_history_len=3))
    assert op.quantizer.delayed.input.amax_history.shape == (3,)  # type: ignore[union-attr]
    with pytest.raises(te.RecipeError):
        te.prepare(op, "delayed")  # type: ignore[arg-type]
    x = torch.randn(3, W, requires_grad=True)
    with pytest.raises(TypeError):
        te.checkpoint(op, x, use_reentrant=True)
