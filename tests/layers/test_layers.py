"""Layers against plain torch in float64, forward and backward; each is one plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_ops as te
from te_ops import layers
from te_ops.errors import PlanError, ShapeError

F64 = torch.float64
Tensors = dict[str, torch.Tensor]


def scramble(op: te.Op) -> None:
    """Parameters away from their initial values, biases and gammas too."""
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in op.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=gen, dtype=F64))


def check(op: te.Op, xs: list[torch.Tensor], function: Callable[..., Any]) -> Any:
    """Outputs and all gradients equal those of `function(*xs, parameters)`."""
    scramble(op)
    floats = [x.requires_grad_() for x in xs if x.is_floating_point()]
    got = op(*xs)
    gots = got if isinstance(got, tuple) else (got,)
    named = {name: p.detach().clone().requires_grad_() for name, p in op.named_parameters()}
    exact = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in xs]
    wants = function(*exact, named)
    wants = wants if isinstance(wants, tuple) else (wants,)
    assert len(gots) == len(wants)
    dys = [torch.randn_like(y) for y in gots]
    for a, b in zip(gots, wants, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    leaves = [*floats, *op.parameters()]
    theirs = [*(x for x in exact if x.is_floating_point()), *named.values()]
    for a, b in zip(
        torch.autograd.grad(gots, leaves, dys), torch.autograd.grad(wants, theirs, dys), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    return got


def normed(
    x: torch.Tensor, p: Tensors, prefix: str, kind: str, *, centered: bool = False
) -> torch.Tensor:
    weight = p[f"{prefix}.weight"] + (1.0 if centered else 0.0)
    if kind == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], weight, 1e-5)
    return F.layer_norm(x, x.shape[-1:], weight, p[f"{prefix}.bias"], 1e-5)


def dense(x: torch.Tensor, p: Tensors, prefix: str) -> torch.Tensor:
    return F.linear(x, p[f"{prefix}.weight"], p.get(f"{prefix}.bias"))


def attend(q: Any, k: Any, v: Any, hk: int, *, causal: bool) -> torch.Tensor:
    """[b, s, h * d] of q [b, s, h, d]."""
    g = q.shape[2] // hk
    k, v = (x.repeat_interleave(g, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v).flatten(2)


def own_attention(x: torch.Tensor, p: Tensors, prefix: str, h: int, hk: int) -> torch.Tensor:
    """Causal self attention from qkv to proj of x [b, s, n]."""
    y = dense(x, p, f"{prefix}qkv")
    d = y.shape[-1] // (h + 2 * hk)
    q, k, v = (t.unflatten(-1, (-1, d)) for t in y.split([h * d, hk * d, hk * d], -1))
    return dense(attend(q, k, v, hk, causal=True), p, f"{prefix}proj")


def cross_attention(x: torch.Tensor, memory: Any, p: Tensors, prefix: str, h: int) -> torch.Tensor:
    q, kv = dense(x, p, f"{prefix}query"), dense(memory, p, f"{prefix}key_value")
    d = q.shape[-1] // h
    hk = kv.shape[-1] // d // 2
    k, v = (t.unflatten(-1, (hk, d)) for t in kv.chunk(2, -1))
    return dense(attend(q.unflatten(-1, (h, d)), k, v, hk, causal=False), p, f"{prefix}proj")


# -- norm + linear, norm + mlp


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("centered", [True, False])
def test_layer_norm_linear(kind: Any, bias: bool, centered: bool) -> None:
    op = layers.LayerNormLinear(
        6, 10, bias=bias, normalization=kind, zero_centered_gamma=centered, params_dtype=F64,
        return_layernorm_output=centered,
    )  # fmt: skip

    def function(x: Any, p: Tensors) -> Any:
        n = normed(x, p, "norm", kind, centered=centered)
        return (dense(n, p, "linear"), n) if centered else dense(n, p, "linear")

    check(op, [torch.randn(3, 4, 6, dtype=F64)], function)


ACTIVATIONS: dict[str, Any] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "srelu": lambda x: F.relu(x) ** 2,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "glu": lambda x: torch.sigmoid(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "reglu": lambda x: F.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("checkpoint", [True, False])
def test_layer_norm_mlp(name: str, checkpoint: bool) -> None:
    op = layers.LayerNormMLP(
        6,
        8,
        activation=name,
        checkpoint=checkpoint,
        params_dtype=F64,
        return_layernorm_output=checkpoint,
    )

    def function(x: Any, p: Tensors) -> Any:
        n = normed(x, p, "norm", "LayerNorm")
        y = dense(ACTIVATIONS[name](dense(n, p, "fc1")), p, "fc2")
        return (y, n) if checkpoint else y

    check(op, [torch.randn(5, 6, dtype=F64)], function)


def test_activation_params() -> None:
    x = torch.randn(4, 6, dtype=F64)
    made = [
        layers.LayerNormMLP(
            6, 8, activation="clamped_swiglu", activation_params=params, params_dtype=F64
        )
        for params in (None, {"limit": 0.1})
    ]
    made[1].load_state_dict(made[0].state_dict())
    for op in made:
        scramble(op)
    assert not torch.allclose(made[0](x), made[1](x))
    with pytest.raises(PlanError, match="activation_params of 'gelu'"):
        layers.LayerNormMLP(6, 8, activation_params={"limit": 1.0})


def test_initial_weights() -> None:
    torch.manual_seed(0)
    op = layers.LayerNormMLP(64, 256, init_method=lambda w: torch.nn.init.constant_(w, 2.0))
    assert bool((op.fc1.weight == 2.0).all())
    assert float(op.fc2.weight.detach().std()) == pytest.approx(0.023, rel=0.05)
    meta = layers.TransformerLayer(16, 32, 2, device="meta", init_method=torch.nn.init.zeros_)
    assert all(p.is_meta for p in meta.parameters())


# -- attention


def test_dot_product_attention() -> None:
    q, k, v = (
        torch.randn(5, 2, 4, 8, dtype=F64),
        *(torch.randn(5, 2, 2, 8, dtype=F64) for _ in range(2)),
    )
    op = layers.DotProductAttention(4, 8, 2)

    def function(q: Any, k: Any, v: Any, _: Tensors) -> Any:
        return attend(*(x.transpose(0, 1) for x in (q, k, v)), 2, causal=True).transpose(0, 1)

    check(op, [q, k, v], function)
    more = layers.DotProductAttention(
        4, 8, 2, qkv_format="bshd", return_lse=True, attn_mask_type="padding"
    )
    o, lse = more(*(x.transpose(0, 1) for x in (q, k, v)), torch.tensor([5, 3]))
    assert (o.shape, lse.shape) == ((2, 5, 32), (2, 4, 5))
    assert more.input_names == ("q", "k", "v", "padding")
    with pytest.raises(PlanError, match=r"te\.Attention takes packed"):
        layers.DotProductAttention(4, packed=True)
    with pytest.raises(TypeError):
        layers.DotProductAttention(4, tp_sizes=2)


@pytest.mark.parametrize("norm", [None, "LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_self_attention(norm: Any, bias: bool) -> None:
    op = layers.MultiheadAttention(
        12, 4, 6, num_gqa_groups=2, attention_dropout=0.0, bias=bias, qkv_format="bshd", params_dtype=F64,
        input_layernorm=norm is not None, normalization=norm or "LayerNorm",
        return_layernorm_output=norm is not None,
    )  # fmt: skip

    def function(x: Any, p: Tensors) -> Any:
        n = x if norm is None else normed(x, p, "norm", norm)
        y = own_attention(n, p, "", 4, 2)
        return y if norm is None else (y, n)

    check(op, [torch.randn(2, 5, 12, dtype=F64)], function)


def test_cross_attention() -> None:
    op = layers.MultiheadAttention(
        12, 2, attention_type="cross", attn_mask_type="no_mask", attention_dropout=0.0, qkv_format="bshd",
        num_gqa_groups=1, params_dtype=F64,
    )  # fmt: skip
    assert op.input_names == ("x", "memory")
    xs = [torch.randn(2, 5, 12, dtype=F64), torch.randn(2, 7, 12, dtype=F64)]
    check(op, xs, lambda x, m, p: cross_attention(x, m, p, "", 2))


@pytest.mark.parametrize("kind", ["L2Normalization", "RMSNorm", "LayerNorm"])
def test_qk_norm(kind: str) -> None:
    x = torch.randn(2, 5, 16, dtype=F64)
    op = layers.MultiheadAttention(
        16, 2, qk_norm_type=kind, attention_dropout=0.0, qkv_format="bshd", params_dtype=F64, bias=False,
        rotary=te.RoPE(8), qk_norm_before_rope=True,
    )  # fmt: skip
    scramble(op)
    q, k, v = (t.unflatten(-1, (2, 8)) for t in op.qkv(x).chunk(3, -1))
    rotary = te.RoPE(8)
    q, k = rotary(op.attention.q_norm(q)), rotary(op.attention.k_norm(k))
    torch.testing.assert_close(op(x), op.proj(attend(q, k, v, 2, causal=True)))
    with pytest.raises(PlanError, match="qk_norm_type must be one of"):
        layers.MultiheadAttention(16, 2, qk_norm_type="norm")


def test_attention_mistakes() -> None:
    with pytest.raises(PlanError, match="give kv_channels"):
        layers.MultiheadAttention(10, 4)
    with pytest.raises(PlanError, match="needs input_layernorm"):
        layers.MultiheadAttention(8, 4, return_layernorm_output=True)
    with pytest.raises(PlanError, match="normalization must be one of"):
        layers.LayerNormLinear(8, 4, normalization="BatchNorm")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="activation must be one of"):
        layers.LayerNormMLP(8, 4, activation="tanh")
    with pytest.raises(ShapeError, match="takes 1 input"):
        layers.MultiheadAttention(8, 4)(torch.randn(2, 3, 8), torch.randn(2, 3, 8))


# -- whole layers


def make(**keywords: Any) -> layers.TransformerLayer:
    given: dict[str, Any] = {
        "num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd",
        "params_dtype": F64,
    }  # fmt: skip
    return layers.TransformerLayer(16, 24, 4, **{**given, **keywords})


def mlp(
    x: torch.Tensor, p: Tensors, kind: str, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    n = normed(x, p, "mlp.norm", kind)
    return dense(ACTIVATIONS[activation](dense(n, p, "mlp.fc1")), p, "mlp.fc2"), n


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("form", ["pre", "post", "parallel", "residual after norm"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_encoder(kind: Any, form: str, activation: str) -> None:
    keywords: dict[str, Any] = {
        "pre": {},
        "post": {"output_layernorm": True},
        "parallel": {"parallel_attention_mlp": True},
        "residual after norm": {"apply_residual_connection_post_layernorm": True},
    }[form]
    op = make(normalization=kind, activation=activation, **keywords)

    def function(x: Any, p: Tensors) -> Any:
        n = x if form == "post" else normed(x, p, "self_attention.norm", kind)
        attended = own_attention(n, p, "self_attention.", 4, 2)
        if form == "parallel":
            return x + attended + mlp(x, p, kind, activation)[0]
        x = (n if form == "residual after norm" else x) + attended
        y, n = mlp(x, p, kind, activation)
        x = (n if form == "residual after norm" else x) + y
        return normed(x, p, "layernorm", kind) if form == "post" else x

    check(op, [torch.randn(2, 5, 16, dtype=F64)], function)


def test_decoder_inherits_nothing_for_its_cross_attention() -> None:
    """B090: causal self attention with a window; every query sees every key of the encoder."""
    op = make(layer_type="decoder", window_size=(-1, 0))
    assert op.input_names == ("x", "memory")

    def function(x: Any, memory: Any, p: Tensors) -> Any:
        n = normed(x, p, "self_attention.norm", "LayerNorm")
        x = x + own_attention(n, p, "self_attention.", 4, 2)
        n = normed(x, p, "inter_attention.norm", "LayerNorm")
        x = x + cross_attention(n, memory, p, "inter_attention.", 4)
        return x + mlp(x, p, "LayerNorm", "gelu")[0]

    memory = torch.randn(2, 6, 16, dtype=F64)
    y = check(op, [torch.randn(2, 4, 16, dtype=F64), memory], function)
    assert y.shape == (2, 4, 16)
    padded = make(layer_type="decoder", enc_dec_attn_mask_type="padding")
    assert padded.input_names == ("x", "memory", "cross q_padding", "cross kv_padding")


def test_packed_tokens_and_sequence_first_are_the_same_layer() -> None:
    op = make(rotary=te.RoPE(4))
    scramble(op)
    x = torch.randn(2, 5, 16, dtype=F64)
    want = op(x)
    first = make(attn_input_format="sbhd", rotary=te.RoPE(4, qkv_format="sbhd"))
    packed = make(attn_input_format="thd", rotary=te.RoPE(4, qkv_format="thd"))
    for other in (first, packed):
        other.load_state_dict(op.state_dict())
    torch.testing.assert_close(first(x.transpose(0, 1)).transpose(0, 1), want)
    assert packed.input_names == ("x", "sequences")
    got = packed(x.flatten(0, 1), te.PackedSequences([0, 5, 10]))
    torch.testing.assert_close(got, want.flatten(0, 1))


def test_generation() -> None:
    op = make(rotary=te.RoPE(4), activation="swiglu", normalization="RMSNorm").eval()
    x = torch.randn(2, 9, 16, dtype=F64)
    with torch.no_grad():
        want = op(x)
        op.self_attention.attention.cache = te.KVCache(2, 9, 2, 4, dtype=F64)
        got = torch.cat([op(part) for part in x.split([4, 1, 4], 1)], 1)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("recipe", [None, te.recipe.MXFP8BlockScaling()])
def test_generation_of_a_decoder_projects_its_memory_once(recipe: te.Recipe | None) -> None:
    op = make(layer_type="decoder", enc_dec_attn_mask_type="no_mask").eval()
    x, memory = torch.randn(2, 9, 16, dtype=F64), torch.randn(2, 6, 16, dtype=F64)
    with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
        want = op(x, memory)
        products = str(op.plan(x, memory).forward).count("gemm")
        op.self_attention.attention.cache = te.KVCache(2, 9, 2, 4, dtype=F64)
        projected = op.inter_attention.key_value(memory)
        op.inter_attention.memory_projected = True
        got = torch.cat([op(part, projected) for part in x.split([4, 1, 4], 1)], 1)
        torch.testing.assert_close(got, want)
        op.self_attention.attention.cache.reset()
        assert str(op.plan(x, projected).forward).count("gemm") < products
        with pytest.raises(ShapeError, match="packed input must have 3 dimensions and 16 features"):
            op(x, memory[..., :12])
    op.self_attention.memory_projected = True
    with pytest.raises(PlanError, match=r"self_attention .*is for attention_type='cross'"):
        op(x, projected)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_drop_path_drops_whole_samples(layout: str) -> None:
    torch.manual_seed(5)
    op = make(drop_path_rate=0.5, attn_input_format=layout)
    scramble(op)
    with torch.no_grad():
        x = torch.randn(40, 3, 16, dtype=F64)
        x = x.transpose(0, 1).contiguous() if layout == "sbhd" else x
        extras = [te.PackedSequences(list(range(0, 121, 3)))] if layout == "thd" else []
        y = op(x.flatten(0, 1) if layout == "thd" else x, *extras)
        y = y.view(40, 3, 16) if layout == "thd" else y
        kept = (y != x).any(-1)
        kept = kept.t() if layout == "sbhd" else kept
        assert torch.equal(kept.any(1), kept.all(1))  # a sample is changed as a whole
        assert 20 <= int(kept.any(1).sum()) <= 38  # 3 / 4 of 40 keep one branch at least
        op.eval()
        plain = make(attn_input_format=layout).eval()
        plain.load_state_dict(op.state_dict())
        flat = x.flatten(0, 1) if layout == "thd" else x
        assert torch.equal(op(flat, *extras), plain(flat, *extras))


def test_dropout_is_on_in_training_only() -> None:
    op = make(hidden_dropout=0.5, attention_dropout=0.5)
    x = torch.randn(2, 5, 16, dtype=F64)
    assert not torch.equal(op(x), op(x))
    op.eval()
    assert torch.equal(op(x), op(x))


def test_a_layer_is_one_plan_without_copies() -> None:
    op = make(rotary=te.RoPE(4), normalization="RMSNorm", activation="swiglu", bias=False)
    x = torch.randn(2, 5, 16, dtype=F64, requires_grad=True)
    plan = op.plan(x)
    assert len(plan.segments) == 1
    names = [step["name"] for segment in plan.to_dict()["segments"] for step in segment["forward"]]
    assert names.count("attention") == 1
    assert not {"cat", "copy", "contiguous", "pack"} & set(names)


@pytest.mark.parametrize("recipe", [te.recipe.DelayedScaling(), te.recipe.MXFP8BlockScaling()])
def test_layers_run_quantized(recipe: te.Recipe) -> None:
    torch.manual_seed(0)
    op = layers.TransformerLayer(64, 128, 4, attention_dropout=0.0, hidden_dropout=0.0)
    x = torch.randn(32, 2, 64, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = op(x)
    y.sum().backward()
    want = op(x)
    assert float((y - want).detach().norm() / (want - x).detach().norm()) < 0.1
    assert all(p.grad is not None for p in op.parameters())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"layer_type": "both"}, "layer_type must be"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "is for encoders"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "is for encoders"),
        (
            {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
            "moves behind",
        ),
        ({"hidden_dropout": 1.5}, "hidden_dropout"),
        ({"drop_path_rate": 1.0}, "must be below 1"),
        ({"return_lse": True}, r"options of te\.Attention"),
    ],
)
def test_layer_mistakes(keywords: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make(**keywords)
    with pytest.raises(TypeError):
        make(ub=True)
