"""K31: no option is accepted and then ignored, and no unknown one is accepted.

For every keyword of every public constructor two values are given that must differ in something a
user can see: numbers, gradients, shapes, dtypes, devices, the plan, or an error.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from tests.faults import cases

Inputs = tuple[torch.Tensor, ...]
W = 64


def _x(*shape: int) -> Callable[[], Inputs]:
    def made() -> Inputs:
        torch.manual_seed(1)
        return (2 * torch.randn(*shape),)

    return made


def _targets() -> Inputs:
    torch.manual_seed(1)
    return torch.randn(6, 8), torch.tensor([0, 1, -100, 3, 7, 2])


def _two() -> Inputs:
    torch.manual_seed(1)
    return torch.randn(6, W), torch.randn(6, W)


def _qkv(kv: int = 4, d_v: int = 16, s_kv: int = 5) -> Callable[[], Inputs]:
    def made() -> Inputs:
        torch.manual_seed(1)
        return torch.randn(2, 5, 4, 16), torch.randn(2, s_kv, kv, 16), torch.randn(2, s_kv, kv, d_v)

    return made


def _scaled(n: int = 2 * W) -> Callable[[], Inputs]:
    def made() -> Inputs:
        torch.manual_seed(1)
        return 3 * torch.randn(6, n), torch.rand(6)

    return made


def _beside_a_large_one() -> Inputs:
    """The sign of a value is lost where another one takes the whole range of its block."""
    return (torch.tensor([[1e9, 1.0, -1.0]]),)


ROWS = _x(6, W)
PAIR = _x(6, 2 * W)
_D = torch.bfloat16
_META = {"device": ("cpu", "meta"), "dtype": (torch.float32, _D)}
_CACHE = {"cache_quantized_input": (False, True)}
_GATE = {"glu_interleave_size": (None, 4), **_CACHE}
_CLAMP = {"limit": (7.0, 0.5), "alpha": (1.702, 1.0), "glu_linear_offset": (1.0, 0.0), **_GATE}
_SITU = {"beta1": (4.0, 1.0), "beta2": (25.0, 1.0), **_GATE}
_NORM = {
    "normalized_shape": (W, (1, W)),
    "eps": (1e-5, 1.0),
    "zero_centered_gamma": (False, True),
    "residual": (False, True),
    **_META,
}

# Op -> (fixed keywords, inputs, {keyword: (value, another)}). A callable instead of inputs per
# keyword: {keyword: (value, another, inputs)}.
OPS: dict[str, tuple[dict[str, Any], Callable[[], Inputs], dict[str, tuple[Any, ...]]]] = {
    "Linear": (
        {"in_features": W, "out_features": W},
        ROWS,
        {
            "in_features": (W, 32),
            "out_features": (W, 32),
            "bias": (True, False),
            "init_std": (None, 3.0),
            "init_method": (None, nn.init.ones_),
            "params_dtype": (None, _D),
            "accumulate_into_main_grad": (False, True),  # without a main_grad: an error
            "fuse_wgrad_accumulation": (False, True),
            "return_bias": (False, True),
            **_META,
        },
    ),
    "Bias": ({"size": W}, ROWS, {"size": (W, 32), **_META}),
    "RMSNorm": ({"normalized_shape": W}, ROWS, _NORM),
    "LayerNorm": ({"normalized_shape": W}, ROWS, _NORM),
    "L2Normalization": ({}, ROWS, {"eps": (1e-6, 1.0)}),
    "GELU": ({}, ROWS, {"approximate": ("tanh", "none"), **_CACHE}),
    **{name: ({}, ROWS, _CACHE) for name in ("SReLU", "QGELU", "SiLU")},
    "ReLU": ({}, _beside_a_large_one, _CACHE),
    **{name: ({}, ROWS, {}) for name in ("Identity", "Cut")},
    **{name: ({}, PAIR, _GATE) for name in ("GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU")},
    "ClampedSwiGLU": ({}, PAIR, _CLAMP),
    "SiTUGLU": ({}, PAIR, _SITU),
    "ScaledSwiGLU": ({}, _scaled(), _GATE),
    "ScaledSReLU": ({}, _scaled(W), _CACHE),
    "ScaledClampedQGeGLU": ({}, _scaled(), _CLAMP),
    "ScaledSiTUGLU": ({}, _scaled(), _SITU),
    "Dropout": ({"seed": 1}, ROWS, {"p": (0.5, 0.2), "seed": (1, 2), "offset": (0, 1)}),
    "Embedding": (
        {"num_embeddings": 9, "embedding_dim": 8},
        lambda: (torch.tensor([0, 3, 8]),),
        {
            "num_embeddings": (9, 5),
            "embedding_dim": (8, 4),
            "padding_idx": (None, 3),
            "init_std": (0.02, 3.0),
            **_META,
        },
    ),
    "CrossEntropy": (
        {},
        _targets,
        {"label_smoothing": (0.0, 0.3), "ignore_index": (-100, 3), "reduction": ("mean", "sum")},
    ),
    "Add": ({}, _two, {}),
    "AddExtraInput": ({}, _two, {"in_place": (False, True)}),
    "MakeExtraOutput": ({}, ROWS, {"in_place": (False, True)}),
    "ConstantScale": ({"scale": 2.0}, ROWS, {"scale": (2.0, 3.0)}),
    "Reshape": ({"shape": (-1, 8)}, ROWS, {"shape": ((-1, 8), (-1, 4))}),
    "Quantize": (
        {},
        ROWS,
        {
            "forward": (True, False),
            "backward": (False, True),
            "quantizer": (None, te.NVFP4Quantizer()),
        },
    ),
    "Dequantize": ({}, ROWS, {"dtype": (None, _D)}),
    "RoPE": (
        {"dim": 8},
        _x(2, 5, 4, 16),
        {
            "dim": (8, 16),
            "base": (10000.0, 10.0),
            "interleaved": (False, True),
            "start_position": (0, 3),
            "qkv_format": ("bshd", "sbhd"),
            "positions": ("start", "offsets"),
            "rope_scaling": (None, {"rope_type": "linear", "factor": 2.0}),
        },
    ),
    "Attention": (
        {"num_heads": 4, "softmax_type": "learnable"},
        _qkv(),
        {
            "num_heads": (4, 2),
            "num_gqa_groups": (2, 4, _qkv(2)),
            "kv_channels": (None, 8),
            "attn_mask_type": ("causal", "no_mask"),
            "window_size": (None, (1, 0)),
            "bottom_right_diagonal": (None, True, _qkv(s_kv=7)),
            "softmax_scale": (None, 3.0),
            "qkv_format": ("bshd", "sbhd"),
            "packed": (False, True),
            "rotary": (None, te.RoPE(8)),
            "return_lse": (False, True),
            "return_max_logit": (False, True),
            "attention_type": ("self", "cross?"),
            "attention_dropout": (0.0, 0.5),
            "core_attention_bias_type": ("no_bias", "alibi"),
            "alibi_slopes": (None, "input"),
            "softmax_type": ("learnable", "vanilla"),
            "logits_soft_cap": (None, 0.5),
            "score_mod": (None, cases.softcap(cap=0.5)),
            "q_norm": (None, te.L2Normalization()),
            "k_norm": (None, te.L2Normalization()),
            "qk_norm_before_rope": (True, "no"),
            "cache": (None, te.KVCache(2, 8, 4, 16)),
            **_META,
        },
    ),
}


def keywords(kind: type) -> list[str]:
    """The constructor's keywords, without *args and **kwargs."""
    return [
        n
        for n, p in inspect.signature(kind).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def observe(
    make: Callable[[], nn.Module], inputs: Callable[[], Inputs], recipe: te.Recipe | None = None
) -> Any:
    """All that a user can see of a training step, or the error."""
    try:
        torch.manual_seed(7)
        op = make()
        if any(p.is_meta for p in op.parameters()):
            return ["meta"]
        xs = tuple(x.requires_grad_() if x.is_floating_point() else x for x in inputs())
        result = cases.step(op, xs, recipe, seed=5)
    except te.Error as error:
        return ["error", type(error).__name__, str(error)]
    seen: list[Any] = []
    for name, t in result.tensors():
        t = t.dequantize() if isinstance(t, te.QuantizedTensor) else t
        seen.append(
            (name, None if t is None else (t.dtype, tuple(t.shape), t.double().numpy().tobytes()))
        )
    return [
        *seen,
        [
            (n, tuple(p.shape), p.dtype, p.detach().double().numpy().tobytes())
            for n, p in op.named_parameters()
        ],
    ]


def differs(a: Any, b: Any) -> bool:
    return a != b and repr(a) != repr(b)  # NaN is not itself


def test_every_op_and_keyword_is_in_the_table() -> None:
    missing = set(cases.op_classes()) - set(OPS) - set(PIPELINES)
    assert missing == set()
    for name, (_, _, options) in OPS.items():
        assert set(keywords(getattr(te, name))) == set(options), name


PIPELINES = {"Sequential", "Residual", "Branch", "Recompute"}  # they take modules only


OPTIONS = [
    pytest.param(name, keyword, id=f"{name}-{keyword}")
    for name, (_, _, options) in OPS.items()
    for keyword in options
]


@pytest.mark.parametrize(("name", "keyword"), OPTIONS)
def test_op_keyword_changes_something(name: str, keyword: str) -> None:
    fixed, inputs, options = OPS[name]
    a, b, *special = options[keyword]
    inputs = special[0] if special else inputs
    kind = getattr(te, name)
    recipe = te.recipe.MXFP8BlockScaling() if name == "Quantize" else None
    made = [observe(lambda v=v: kind(**{**fixed, keyword: v}), inputs, recipe) for v in (a, b)]
    assert differs(*made)
    assert made[0][0] != "error", made[0]


@pytest.mark.parametrize("name", [*OPS, *sorted(PIPELINES)])
def test_op_refuses_unknown_keywords(name: str) -> None:
    fixed = OPS[name][0] if name in OPS else {}
    theirs = () if name == "Linear" else ("fuse_wgrad_accumulation", "return_bias")
    for unknown in (*theirs, "interval", "x"):
        with pytest.raises(TypeError):
            getattr(te, name)(**fixed, **{unknown: 1})


def test_user_op_refuses_unknown_keywords_and_uses_known_ones() -> None:
    with pytest.raises(TypeError):
        cases.softcap(cap=1.0, cup=2.0)
    with pytest.raises(TypeError):
        cases.softcap()
    seen = [observe(lambda c=c: cases.softcap(cap=c), ROWS) for c in (1.0, 2.0)]
    assert differs(*seen)

    @te.pointwise
    def gate(x: te.Pair):  # type: ignore[no-untyped-def]
        return x.gate * x.linear

    assert differs(*(observe(lambda i=i: gate(interleave=i), PAIR) for i in (None, 4)))


@pytest.mark.parametrize("scalar", [False, True])
def test_scalar_slots_read_their_number(scalar: bool) -> None:
    def slot(value: float) -> Any:
        return te.scalar(value) if scalar else value

    for make in (
        lambda v: te.ConstantScale(slot(v)),
        lambda v: te.Dropout(slot(v / 10), seed=1),
        lambda v: cases.softcap(slot(v)),
    ):
        assert differs(observe(lambda m=make: m(2.0), ROWS), observe(lambda m=make: m(3.0), ROWS))
    for make in (
        lambda v: te.RoPE(8, start_position=te.scalar(v) if scalar else int(v)),
        lambda v: te.Attention(4, packed=True, softmax_scale=slot(v)),
    ):
        x = _x(2, 5, 12, 16) if isinstance(make(1.0), te.RoPE) else _x(2, 5, 12 * 16)
        assert differs(observe(lambda m=make: m(2.0), x), observe(lambda m=make: m(3.0), x))


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


def test_constructor_values_out_of_range_are_refused() -> None:
    bad: list[Callable[[], Any]] = [
        lambda: te.Linear(0, 4),
        lambda: te.Linear(4, -1),
        lambda: te.Linear(4.0, 4),  # type: ignore[arg-type]
        lambda: te.Linear(4, 4, dtype=torch.int32),
        lambda: te.Linear(4, 4, init_std=-1.0),
        lambda: te.Bias(0),
        lambda: te.RMSNorm(4, eps=-1.0),
        lambda: te.RMSNorm(4, zero_centered_gamma=1),  # type: ignore[arg-type]
        lambda: te.GELU("exact"),
        lambda: te.SwiGLU(0),
        lambda: te.SwiGLU(True),
        lambda: te.ClampedSwiGLU(limit=-1.0),
        lambda: te.SiTUGLU(beta1=0.0),
        lambda: te.Dropout(1.5),
        lambda: te.Embedding(4, 4, padding_idx=4),
        lambda: te.CrossEntropy(reduction="avg"),
        lambda: te.ConstantScale(float("nan")),
        lambda: te.RoPE(7),
        lambda: te.Attention(4, 3),
        lambda: te.Quantize(quantizer=te.Float8Quantizer()),
        lambda: te.Quantize(quantizer="mxfp8"),  # type: ignore[arg-type]
        lambda: te.Quantize(forward=1),  # type: ignore[arg-type]
        lambda: te.Dequantize(dtype=torch.int32),
        lambda: te.MXFP8Quantizer(torch.float16),
        lambda: te.recipe.DelayedScaling(margin=0.5),  # type: ignore[arg-type]
        lambda: te.recipe.DelayedScaling(amax_history_len=True),
        lambda: te.recipe.Float8CurrentScaling(amax_epsilon=-1.0),
        lambda: te.recipe.MXFP8BlockScaling(enable_2d_quantization="yes"),  # type: ignore[arg-type]
        lambda: te.Sequential(3),  # type: ignore[arg-type]
        lambda: te.Branch(te.GELU()),
    ]
    accepted = []
    for i, make in enumerate(bad):
        try:
            made = make()
        except (te.Error, TypeError, ValueError):
            continue
        accepted.append((i, repr(made)))
    assert accepted == []


def test_options_of_ops_are_independent_of_the_order_of_construction() -> None:
    kinds = [
        lambda: te.SwiGLU(),
        lambda: te.SwiGLU(4),
        lambda: te.ClampedSwiGLU(0.5),
        lambda: te.ClampedSwiGLU(),
    ]
    x = PAIR()[0]
    for order in itertools.islice(itertools.permutations(range(4)), 6):
        made = {i: kinds[i]()(x) for i in order}
        assert not torch.equal(made[0], made[1])
        assert not torch.equal(made[2], made[3])
