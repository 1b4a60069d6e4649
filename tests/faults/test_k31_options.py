"""K31 (B153): no option of an op is accepted and then ignored, and no unknown one is accepted.

For every keyword of every op's constructor two values are given that must differ in something a
user can see: numbers, gradients, shapes, dtypes, devices, the plan, or an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from tests.faults import cases
from tests.faults.options import Inputs, differs, keywords, observe

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
