"""Transformer Engine's weights: equal shapes hide permutations, so outputs are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import layers
from te_ops.errors import PlanError

F64 = torch.float64
H, HK, D, N = 8, 2, 3, 12  # g = 4


def attention(**keywords: Any) -> layers.MultiheadAttention:
    given: dict[str, Any] = {
        "num_gqa_groups": HK, "attention_dropout": 0.0, "qkv_format": "bshd", "params_dtype": F64,
    }  # fmt: skip
    return layers.MultiheadAttention(N, H, D, **{**given, **keywords})


def parts_of(gen: torch.Generator, bias: bool) -> dict[str, torch.Tensor]:
    """query_weight, key_weight, value_weight and biases, as separate parameters."""
    made = {}
    for name, heads in (("query", H), ("key", HK), ("value", HK)):
        made[f"{name}_weight"] = torch.randn(heads * D, N, generator=gen, dtype=F64)
        if bias:
            made[f"{name}_bias"] = torch.randn(heads * D, generator=gen, dtype=F64)
    return made


def interleave(parts: dict[str, torch.Tensor], what: str) -> torch.Tensor:
    """Group by group: its query heads, its key head, its value head, written out row by row."""
    rows = []
    for group in range(HK):
        for head in range(group * H // HK, (group + 1) * H // HK):
            rows += [parts[f"query_{what}"][head * D + i] for i in range(D)]
        for name in ("key", "value"):
            rows += [parts[f"{name}_{what}"][group * D + i] for i in range(D)]
    return torch.stack(rows)


@pytest.mark.parametrize("norm", [False, True])
def test_every_order_of_qkv_makes_the_same_layer(norm: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    parts = parts_of(gen, bias=True)
    rest = {
        "proj.weight": torch.randn(N, H * D, generator=gen, dtype=F64),
        "proj.bias": torch.randn(N, generator=gen, dtype=F64),
    }
    first = "layernorm_qkv." if norm else "qkv."
    if norm:
        rest |= {
            f"{first}layer_norm_{w}": torch.randn(N, generator=gen, dtype=F64)
            for w in ("weight", "bias")
        }
    names = ("query", "key", "value")
    checkpoints = {
        "separate": {f"{first}{name}": x for name, x in parts.items()},
        "stacked": {
            f"{first}{w}": torch.cat([parts[f"{n}_{w}"] for n in names]) for w in ("weight", "bias")
        },
        "interleaved": {f"{first}{w}": interleave(parts, w) for w in ("weight", "bias")},
    }
    x = torch.randn(2, 5, N, generator=gen, dtype=F64)
    outputs = {}
    for kind, state in checkpoints.items():
        op = attention(input_layernorm=norm)
        order: Any = "interleaved" if kind == "separate" else kind
        state = {**state, **rest, "core_attention._extra_state": torch.empty(0)}
        op.load_state_dict(layers.from_transformer_engine(op, state, order=order))
        outputs[kind] = op(x)
        back = layers.to_transformer_engine(op, order=kind)  # type: ignore[arg-type]
        assert set(back) == set(state) - {"core_attention._extra_state"}
        assert all(torch.equal(back[name], state[name]) for name in back)
    assert torch.equal(outputs["separate"], outputs["stacked"])
    assert torch.equal(outputs["separate"], outputs["interleaved"])
    wrong = attention(input_layernorm=norm)
    state = {**checkpoints["interleaved"], **rest}
    wrong.load_state_dict(layers.from_transformer_engine(wrong, state, order="stacked"))
    assert not torch.allclose(wrong(x), outputs["separate"])  # it loads: shapes do not tell


@pytest.mark.parametrize(
    ("keywords", "order"),
    [
        ({}, None),
        ({"fuse_qkv_params": True}, "interleaved"),
        ({"fuse_qkv_params": True, "qkv_weight_interleaved": True}, "interleaved"),
        ({"fuse_qkv_params": True, "qkv_weight_interleaved": False}, "stacked"),
        ({"qkv_weight_interleaved": False}, "stacked"),
        ({"qkv_weight_interleaved": True}, "interleaved"),
        ({"fuse_qkv_params": False}, "separate"),
        ({"fuse_qkv_params": False, "qkv_weight_interleaved": True}, "separate"),
    ],
)
@pytest.mark.parametrize("decoder", [False, True])
def test_a_layer_may_say_how_its_checkpoint_is_ordered(
    keywords: dict[str, Any], order: Any, decoder: bool
) -> None:
    """Transformer Engine's keywords: the parameter stays, the mapping without `order` is theirs."""

    def make(**more: Any) -> layers.TransformerLayer:
        kind = "decoder" if decoder else "encoder"
        torch.manual_seed(3)
        made = layers.TransformerLayer(16, 24, 4, 2, params_dtype=F64, layer_type=kind, **more)
        return made.eval()

    plain, op = make(), make(**keywords)
    assert op.self_attention.checkpoint_order == order
    assert [n for n, _ in op.named_parameters()] == [n for n, _ in plain.named_parameters()]
    want = layers.to_transformer_engine(plain, order=order or "interleaved")
    got = layers.to_transformer_engine(op)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    torch.manual_seed(4)
    other = make(**keywords)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(layers.from_transformer_engine(other, got))
    xs = [torch.randn(5, 2, 16, dtype=F64) for _ in range(op.num_inputs)]
    assert torch.equal(other(*xs), plain(*xs))
    # What is said at the call goes first.
    stacked = layers.to_transformer_engine(op, order="stacked")
    other.load_state_dict(layers.from_transformer_engine(other, stacked, order="stacked"))
    assert torch.equal(other(*xs), plain(*xs))


def test_a_fused_weight_for_a_layer_with_three() -> None:
    state = layers.to_transformer_engine(attention())
    op = attention(fuse_qkv_params=False)
    with pytest.raises(PlanError, match=r"has one qkv\.weight for a layer .* by order="):
        layers.from_transformer_engine(op, state)
    op.load_state_dict(layers.from_transformer_engine(op, state, order="interleaved"))
    for keyword in ("fuse_qkv_params", "qkv_weight_interleaved"):
        with pytest.raises(PlanError, match=f"{keyword} must be True or False"):
            attention(**{keyword: 1})


@pytest.mark.parametrize(
    "keywords",
    [
        {"layer_type": "decoder"},
        {"output_layernorm": True, "bias": False},
        {"normalization": "RMSNorm", "activation": "swiglu", "qk_norm_type": "RMSNorm"},
        {"softmax_type": "learnable", "qk_norm_type": "LayerNorm"},
    ],
)
@pytest.mark.parametrize("order", ["interleaved", "stacked", "separate"])
def test_whole_layers_go_there_and_back(keywords: dict[str, Any], order: Any) -> None:
    def make() -> layers.TransformerLayer:
        return layers.TransformerLayer(16, 24, 4, 2, params_dtype=F64, dtype=F64, **keywords).eval()

    op, other = make(), make()
    with torch.no_grad():
        for p in op.parameters():
            p.add_(torch.randn_like(p))
    state = layers.to_transformer_engine(op, order=order, prefix="decoder.0.")
    assert all(name.startswith("decoder.0.") for name in state)
    loaded = layers.from_transformer_engine(
        other, state, order="stacked" if order == "separate" else order, prefix="decoder.0."
    )
    other.load_state_dict(loaded)
    xs = [torch.randn(5, 2, 16, dtype=F64) for _ in range(op.num_inputs)]
    assert torch.equal(op(*xs), other(*xs))
    short = {name.removeprefix("decoder.0.") for name in state}
    assert ("self_attention.core_attention.softmax_offset" in short) == ("softmax_type" in keywords)
    assert "layernorm_mlp.fc1_weight" in short


def test_the_other_layers() -> None:
    for op in (layers.LayerNormLinear(4, 6), layers.LayerNormMLP(4, 6)):
        state = layers.to_transformer_engine(op)
        assert "layer_norm_weight" in state
        loaded = layers.from_transformer_engine(op, state)
        assert loaded.keys() == op.state_dict().keys()


class Model(torch.nn.Module):
    """What a user of Transformer Engine writes: modules of several libraries, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        made = {
            "params_dtype": F64,
            "attn_input_format": "bshd",
            "dtype": F64,
            "softmax_type": "learnable",
        }
        self.embedding = torch.nn.Embedding(20, 16, dtype=F64)
        self.decoder = torch.nn.ModuleList(
            layers.TransformerLayer(16, 24, 4, 2, **made) for _ in range(2)
        )
        self.core = layers.DotProductAttention(
            4, qkv_format="bshd", softmax_type="learnable", dtype=F64
        )
        self.norm = te.RMSNorm(16, dtype=F64)
        self.proj = layers.Linear(16, 16, dtype=F64)
        self.head = layers.Linear(16, 20, bias=False, dtype=F64)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.decoder:
            x = layer(x)
        heads = x.unflatten(-1, (4, 4))
        made: torch.Tensor = self.head(self.proj(self.norm(self.core(heads, heads, heads))))
        return made


@pytest.mark.parametrize("order", ["interleaved", "stacked", "separate"])
def test_whole_models_of_modules(order: Any) -> None:
    torch.manual_seed(0)
    one, other = Model().eval(), Model().eval()
    with torch.no_grad():
        for p in one.parameters():
            p.add_(torch.randn_like(p))
    state = layers.to_transformer_engine(one, order=order, prefix="module.")
    names = {name.removeprefix("module.") for name in state}
    first = "query_weight" if order == "separate" else "weight"
    expected = {
        "embedding.weight", "head.weight", "proj.bias", "norm.weight", "core.softmax_offset",
        f"decoder.1.self_attention.layernorm_qkv.{first}", "decoder.0.layernorm_mlp.fc2_bias",
        "decoder.0.self_attention.core_attention.softmax_offset",
    }  # fmt: skip
    assert expected <= names
    assert state["module.core.softmax_offset"].shape == (1, 4, 1, 1)
    state["module.proj._extra_state"] = torch.zeros(3)
    loaded = layers.from_transformer_engine(
        other, state, order="stacked" if order == "separate" else order, prefix="module."
    )
    other.load_state_dict(loaded)
    tokens = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(0))
    assert torch.equal(one(tokens), other(tokens))


def test_mistakes() -> None:
    op = attention()
    state = layers.to_transformer_engine(op)
    with pytest.raises(PlanError, match=r"the checkpoint has no qkv\.weight"):
        layers.from_transformer_engine(op, {n: x for n, x in state.items() if n != "qkv.weight"})
    with pytest.raises(PlanError, match="has also another"):
        layers.from_transformer_engine(op, {**state, "another": torch.zeros(1)})
    with pytest.raises(PlanError, match="order must be one of"):
        layers.from_transformer_engine(op, state, order="separate")
