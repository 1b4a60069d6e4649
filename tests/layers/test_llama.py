"""Llama-like weights by outputs: a layer loaded from either naming equals that checkpoint's own arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_ops as te
from te_ops import layers
from te_ops.errors import PlanError

F64 = torch.float64
N, FFN, H, HK, D = 16, 24, 4, 2, 8  # heads of 8 features although 16 / 4 is 4
NAMES = {
    "hugging_face": {
        "n1": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "n2": "post_attention_layernorm", "gate": "mlp.gate_proj",
        "up": "mlp.up_proj", "down": "mlp.down_proj", "qn": "self_attn.q_norm", "kn": "self_attn.k_norm",
    },
    "meta": {
        "n1": "attention_norm", "q": "attention.wq", "k": "attention.wk", "v": "attention.wv",
        "o": "attention.wo", "n2": "ffn_norm", "gate": "feed_forward.w1", "up": "feed_forward.w3",
        "down": "feed_forward.w2", "qn": "attention.q_norm", "kn": "attention.k_norm",
    },
}  # fmt: skip


def checkpoint(naming: str, *, bias: bool, qk_norm: bool) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    names = NAMES[naming]
    shapes = {
        "q": (H * D, N), "k": (HK * D, N), "v": (HK * D, N), "o": (N, H * D), "gate": (FFN, N), "up": (FFN, N),
        "down": (N, FFN), "n1": (N,), "n2": (N,),
    } | ({"qn": (D,), "kn": (D,)} if qk_norm else {})  # fmt: skip
    made = {
        f"{names[k]}.weight": torch.randn(shape, generator=gen, dtype=F64)
        for k, shape in shapes.items()
    }
    if bias:
        for key in ("q", "k", "v", "o", "gate", "up", "down"):
            made[f"{names[key]}.bias"] = torch.randn(shapes[key][0], generator=gen, dtype=F64)
    return made


def rotate(x: torch.Tensor, naming: str, dim: int) -> torch.Tensor:
    """RoPE of x [b, s, h, d] as the checkpoint's own model does it."""
    turned, rest = x[..., :dim], x[..., dim:]
    angle = torch.arange(x.shape[1], dtype=F64)[:, None] * 10000.0 ** (
        -torch.arange(0, dim, 2, dtype=F64) / dim
    )
    if naming == "meta":
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
        pairs = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([torch.view_as_real(pairs).flatten(-2), rest], -1)
    cos, sin = (torch.cat([t, t], -1)[:, None] for t in (angle.cos(), angle.sin()))
    halves = torch.cat([-turned[..., dim // 2 :], turned[..., : dim // 2]], -1)
    return torch.cat([turned * cos + halves * sin, rest], -1)


def model(x: torch.Tensor, state: dict[str, torch.Tensor], naming: str, dim: int) -> torch.Tensor:
    """One decoder layer in plain torch."""
    names = NAMES[naming]

    def dense(y: torch.Tensor, key: str) -> torch.Tensor:
        return F.linear(y, state[f"{names[key]}.weight"], state.get(f"{names[key]}.bias"))

    def norm(y: torch.Tensor, key: str) -> torch.Tensor:
        weight = state.get(f"{names[key]}.weight")
        return y if weight is None else F.rms_norm(y, y.shape[-1:], weight, 1e-5)

    n = norm(x, "n1")
    q, k, v = (dense(n, key).unflatten(-1, (-1, D)) for key in "qkv")
    q, k = (rotate(norm(t, key), naming, dim) for t, key in ((q, "qn"), (k, "kn")))
    k, v = (t.repeat_interleave(H // HK, 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
    s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    x = x + dense(torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v).flatten(2), "o")
    n = norm(x, "n2")
    return x + dense(F.silu(dense(n, "gate")) * dense(n, "up"), "down")


def make(*, interleaved: bool, bias: bool, qk_norm: bool, dim: int) -> layers.TransformerLayer:
    return layers.TransformerLayer(
        N, FFN, H, HK, kv_channels=D, normalization="RMSNorm", activation="swiglu", bias=bias,
        hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd", params_dtype=F64,
        rotary=te.RoPE(dim, interleaved=interleaved), qk_norm_type="RMSNorm" if qk_norm else None,
        qk_norm_eps=1e-5, qk_norm_before_rope=True,
    )  # fmt: skip


@pytest.mark.parametrize("naming", ["hugging_face", "meta"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("bias", "qk_norm", "dim"),
    [(False, False, 8), (True, False, 8), (False, True, 8), (True, True, 4)],
)
def test_a_layer_equals_the_checkpoints_model(
    naming: Any, interleaved: bool, bias: bool, qk_norm: bool, dim: int
) -> None:
    state = checkpoint(naming, bias=bias, qk_norm=qk_norm)
    x = torch.randn(2, 7, N, dtype=F64)
    want = model(x, state, naming, dim)
    op = make(interleaved=interleaved, bias=bias, qk_norm=qk_norm, dim=dim)
    named = {f"model.layers.3.{name}": t for name, t in state.items()}
    named["model.layers.3.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    named["model.layers.4.mlp.up_proj.weight"] = torch.zeros(1)
    op.load_state_dict(layers.from_llama(op, named, naming=naming, prefix="model.layers.3."))
    torch.testing.assert_close(op(x), want)
    back = layers.to_llama(op, naming=naming)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_one_naming_becomes_the_other() -> None:
    state = checkpoint("meta", bias=True, qk_norm=True)
    op = make(interleaved=False, bias=True, qk_norm=True, dim=8)
    op.load_state_dict(layers.from_llama(op, state, naming="meta"))
    x = torch.randn(2, 5, N, dtype=F64)
    torch.testing.assert_close(
        model(x, layers.to_llama(op), "hugging_face", 8), model(x, state, "meta", 8)
    )


def test_mistakes() -> None:
    state = checkpoint("hugging_face", bias=False, qk_norm=False)
    op = make(interleaved=False, bias=False, qk_norm=False, dim=8)
    some = {f"x.{n}": t for n, t in state.items() if "o_proj" not in n}
    with pytest.raises(PlanError, match=r"has no x\.self_attn\.o_proj\.weight"):
        layers.from_llama(op, some, prefix="x.")
    with pytest.raises(PlanError, match="has also more"):
        layers.from_llama(op, {**state, "more": torch.zeros(1)})
    with pytest.raises(PlanError, match="naming must be one of"):
        layers.to_llama(op, naming="gguf")  # type: ignore[arg-type]
    plain = layers.TransformerLayer(16, 24, 4)
    with pytest.raises(PlanError, match=r"rotary=te\.RoPE"):
        layers.from_llama(plain, state)
    odd = layers.TransformerLayer(
        16, 24, 4, rotary=te.RoPE(4, qkv_format="sbhd"), softmax_type="learnable"
    )
    with pytest.raises(PlanError, match=r"no place for .*softmax_offset"):
        layers.to_llama(odd)
