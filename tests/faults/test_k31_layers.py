"""K31 (B153): no keyword of a layer is accepted and then ignored, and no unknown one is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops import layers
from tests.faults import cases
from tests.faults.options import Inputs, differs, keywords, observe

H = 32


def _x(*more: tuple[int, ...]) -> Callable[[], Inputs]:
    def made() -> Inputs:
        torch.manual_seed(1)
        return tuple(torch.randn(shape) for shape in ((6, 2, H), *more))

    return made


def _qkv() -> Inputs:
    torch.manual_seed(1)
    return torch.randn(6, 2, 4, 8), torch.randn(9, 2, 4, 8), torch.randn(9, 2, 4, 8)


_META = {"device": ("cpu", "meta"), "params_dtype": (None, torch.bfloat16)}
_INIT = {"init_method": (None, nn.init.ones_)}
_OUT = {"output_layer_init_method": (None, nn.init.ones_)}
_NORM = {"normalization": ("LayerNorm", "RMSNorm"), "zero_centered_gamma": (False, True)}
_FUSED = {"fuse_wgrad_accumulation": (False, True), "bias": (True, False)}
_MORE = {"return_layernorm_output": (False, True), "return_bias": (False, True)}
_ACTIVATION = {
    "activation": ("gelu", "relu"),
    "activation_params": (None, {"alpha": 0.1}, {"activation": "clamped_swiglu"}),
}
NORMED = {"input_layernorm": True}
QK = {"qk_norm_type": "RMSNorm"}
_BEFORE = {
    "input_layernorm": True,
    "qk_norm_type": "LayerNorm",
    "rotary": te.RoPE(8, qkv_format="sbhd"),
}
_DECODER = {"layer_type": "decoder"}
_MEMORY = _x((4, 2, H))
_LONGER = _x((9, 2, H))

_ORDER = {"fuse_qkv_params": (True, False), "qkv_weight_interleaved": (True, False)}

# Further keywords of te.Attention, each with two values.
ATTENTION: dict[str, tuple[Any, ...]] = {
    "softmax_scale": (None, 3.0),
    "rotary": (None, te.RoPE(8, qkv_format="sbhd")),
    "return_lse": (False, True),
    "return_max_logit": (False, True),
    "core_attention_bias_type": ("no_bias", "alibi"),
    "alibi_slopes": (None, (1.0, 0.5, 2.0, 0.0), {"core_attention_bias_type": "alibi"}),
    "softmax_type": ("vanilla", "learnable"),
    "logits_soft_cap": (None, 0.5),
    "score_mod": (None, cases.softcap(cap=0.5)),
    "q_norm": (None, te.L2Normalization()),
    "k_norm": (None, te.L2Normalization()),
    "cache": (None, te.KVCache(2, 8, 4, 8)),
    "attn_mask_type": ("causal", "no_mask"),
    "window_size": (None, (1, 0)),
    "bottom_right_diagonal": (False, True, {"attention_type": "cross"}, _LONGER),
    "attention_dropout": (0.0, 0.5),
}

Table = dict[str, tuple[Any, ...]]
# Layer -> (fixed keywords, inputs, {keyword: (value, another, further keywords, other inputs)}).
LAYERS: dict[str, tuple[dict[str, Any], Callable[[], Inputs], Table]] = {
    "DotProductAttention": (
        {"num_attention_heads": 4},
        _qkv,
        {
            "num_attention_heads": (4, 2),
            "kv_channels": (None, 4),
            "num_gqa_groups": (None, 2),
            "qkv_format": ("sbhd", "bshd"),
            **ATTENTION,
            "bottom_right_diagonal": (False, True),
            "attention_type": ("self", "cross?"),
            "qk_norm_before_rope": (True, "no"),
            "dtype": (None, torch.bfloat16, {"softmax_type": "learnable"}),
            "device": ("cpu", "meta", {"softmax_type": "learnable"}),
        },
    ),
    "LayerNormLinear": (
        {"in_features": H, "out_features": H},
        _x(),
        {
            "in_features": (H, 16),
            "out_features": (H, 16),
            "eps": (1e-5, 1.0),
            **_META, **_INIT, **_NORM, **_FUSED, **_MORE,
        },
    ),
    "LayerNormMLP": (
        {"hidden_size": H, "ffn_hidden_size": 64},
        _x(),
        {
            "hidden_size": (H, 16),
            "ffn_hidden_size": (64, 48),
            "eps": (1e-5, 1.0),
            "checkpoint": (False, True),
            **_META, **_INIT, **_OUT, **_NORM, **_FUSED, **_MORE, **_ACTIVATION,
        },
    ),
    "MultiheadAttention": (
        {"hidden_size": H, "num_attention_heads": 4, "attention_dropout": 0.0},
        _x(),
        {
            "hidden_size": (H, 48),
            "num_attention_heads": (4, 2),
            "kv_channels": (None, 4),
            "layernorm_epsilon": (1e-5, 1.0, NORMED),
            "num_gqa_groups": (None, 2),
            "input_layernorm": (False, True),
            "attention_type": ("self", "cross"),
            "qkv_format": ("sbhd", "bshd"),
            "qk_norm_type": (None, "L2Normalization"),
            "qk_norm_eps": (1e-6, 1.0, QK),
            "qk_norm_before_rope": (False, True, _BEFORE),
            **{k: (*v, NORMED) for k, v in {**_NORM, **_MORE}.items() if k != "return_bias"},
            "return_bias": _MORE["return_bias"],
            **_META, **_INIT, **_OUT, **_FUSED, **_ORDER, **ATTENTION,
        },
    ),
    "TransformerLayer": (
        {
            "hidden_size": H, "ffn_hidden_size": 64, "num_attention_heads": 4, "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        },
        _x(),
        {
            "hidden_size": (H, 48),
            "ffn_hidden_size": (64, 48),
            "num_attention_heads": (4, 2),
            "num_gqa_groups": (None, 2),
            "layernorm_epsilon": (1e-5, 1.0),
            "hidden_dropout": (0.0, 0.5),
            "kv_channels": (None, 4),
            "self_attn_mask_type": ("causal", "no_mask"),
            "enc_dec_attn_mask_type": ("no_mask", "causal", _DECODER, _MEMORY),
            "enc_dec_attn_window_size": (None, (1, 1), _DECODER, _MEMORY),
            "enc_dec_bottom_right_diagonal": (
                False, True, {**_DECODER, "enc_dec_attn_window_size": (1, 0)}, _LONGER,
            ),
            "apply_residual_connection_post_layernorm": (False, True),
            "output_layernorm": (False, True),
            "parallel_attention_mlp": (False, True),
            "layer_type": ("encoder", "decoder"),
            "drop_path_rate": (0.0, 0.9),
            "attn_input_format": ("sbhd", "bshd"),
            "checkpoint_mlp": (False, True),
            "qk_norm_type": (None, "L2Normalization"),
            "qk_norm_eps": (1e-6, 1.0, QK),
            "qk_norm_before_rope": (False, True, {k: v for k, v in _BEFORE.items() if k != "input_layernorm"}),
            **_META, **_INIT, **_OUT, **_NORM, **_FUSED, **_ORDER, **_ACTIVATION,
            **{
                k: v for k, v in ATTENTION.items()
                if k not in ("attn_mask_type", "bottom_right_diagonal")
            },
        },
    ),
}  # fmt: skip
# Self attention has as many keys as queries, with a cache too: its diagonals are one.
SAME = {"TransformerLayer": {"bottom_right_diagonal"}}
KEYWORDS = [
    pytest.param(name, keyword, id=f"{name}-{keyword}")
    for name, (_, _, options) in LAYERS.items()
    for keyword in options
]


def test_every_layer_and_keyword_is_in_the_table() -> None:
    made = {n for n, c in vars(layers).items() if isinstance(c, type) and issubclass(c, te.Op)}
    assert made == {"Linear", *LAYERS}
    assert layers.Linear is te.Linear  # whose keywords are in the table of ops
    further = set(keywords(te.Attention)) - {"num_heads", "packed"}
    for name, (_, _, options) in LAYERS.items():
        assert set(keywords(getattr(layers, name))) <= set(options) | SAME.get(name, set()), name
    for name in ("DotProductAttention", "MultiheadAttention", "TransformerLayer"):
        named = set(LAYERS[name][2]) | (
            {"attention_type", "dtype"} if name != "DotProductAttention" else set()
        )
        masks = {"attn_mask_type", "qkv_format"} if name == "TransformerLayer" else set()
        assert further <= named | masks | SAME.get(name, set()), name


def _kept(op: Any, x: torch.Tensor) -> Any:
    plan = op.plan(x.requires_grad_())
    return [[v.value for v in segment.saved_values] for segment in plan.segments]


def _exported(op: Any, _: torch.Tensor) -> Any:
    torch.manual_seed(0)
    for p in op.parameters():
        nn.init.normal_(p)
    return [[n, x.tolist()] for n, x in layers.to_transformer_engine(op).items()]


# Where the second value shows beside the numbers, in what the plan keeps, or in checkpoints of others.
ELSEWHERE = {
    **{(n, k): _exported for n in ("MultiheadAttention", "TransformerLayer") for k in _ORDER},
    ("LayerNormMLP", "checkpoint"): _kept,
    ("TransformerLayer", "checkpoint_mlp"): _kept,
}


@pytest.mark.parametrize(("name", "keyword"), KEYWORDS)
def test_layer_keyword_changes_something(name: str, keyword: str) -> None:
    """Numbers, gradients, parameters, errors, or what the plan keeps."""
    fixed, inputs, options = LAYERS[name]
    a, b, *special = options[keyword]
    fixed = fixed | (special[0] if special else {})
    inputs = special[1] if len(special) > 1 else inputs
    kind: Any = getattr(layers, name)
    makes = [lambda v=v: kind(**{**fixed, keyword: v}) for v in (a, b)]
    seen = [observe(make, inputs) for make in makes]
    if (name, keyword) in ELSEWHERE:
        assert not differs(*seen)
        seen = [ELSEWHERE[name, keyword](make(), *inputs()) for make in makes]
    assert differs(*seen)
    assert seen[0][0] != "error", seen[0]


@pytest.mark.parametrize("name", LAYERS)
def test_layer_refuses_what_it_does_not_know(name: str) -> None:
    fixed = LAYERS[name][0]
    for unknown in ("interval", "cap", "tp_overlap"):
        with pytest.raises(TypeError):
            getattr(layers, name)(**fixed, **{unknown: 1})
    with pytest.raises(te.PlanError, match="tensor parallelism"):
        getattr(layers, name)(**fixed, tp_size=2)
