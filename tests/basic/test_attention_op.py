"""The Attention op: packed and plain inputs, RoPE, masks, the LSE, mistakes, and real plans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import te_ops as te
from te_ops.basic.attention import Attention, band_of
from te_ops.basic.band import Band
from te_ops.basic.rope import RoPE
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Value
from te_ops.op import Op

from .attention_oracle import (
    BF16,
    CAUSAL,
    CAUSAL_BR,
    FULL,
    Core,
    Tensors,
    gradients,
    oracle,
    oracle_gradients,
    tensors,
    values,
)
from .interp import forward, program


def pack(xs: Tensors) -> torch.Tensor:
    return torch.cat([x.flatten(2) for x in xs], -1)


def test_packed_is_the_same_attention() -> None:
    xs = tensors(2, (30, 30), (4, 2), (8, 6), torch.float32)
    do = torch.randn(2, 30, 4, 6)
    plain = Attention(4, 2)
    packed = Attention(4, 2, kv_channels=(8, 6), packed=True)
    (o,), grads = gradients(plain, xs, [do])
    (y,), (dx,) = gradients(packed, (pack(xs),), [do.flatten(2)])
    assert (plain.num_inputs, packed.num_inputs) == (3, 1)
    assert torch.equal(o.flatten(2), y)
    assert torch.equal(pack(tuple(grads)), dx)
    assert torch.equal(o, values(Core(), *xs)[0])


def test_packed_attention_makes_no_copies_but_the_gradients_placement() -> None:
    x = torch.randn(2, 30, 60)
    made = program(Attention(6, 2, packed=True), x, given=[True])
    kinds = [n.prim.nature for n in made.g.nodes if n.prim.name not in ("input", "grad")]
    names = [n.prim.name for n in made.g.nodes if n.prim.nature not in ("view", "effect")]
    assert names == ["attention", "attention_backward", "pack_heads"]
    assert set(kinds) == {"view", "pure", "placement"}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_q_and_k(packed: bool, interleaved: bool) -> None:
    rotary = RoPE(6, interleaved=interleaved, start_position=3)
    xs = tensors(2, (10, 10), (4, 2), (8, 8), torch.float64)
    turned = (forward(rotary, xs[0]), forward(rotary, xs[1]), xs[2])
    want = oracle(*turned, CAUSAL)[0]
    op = Attention(4, 2, packed=packed, rotary=rotary)
    ins = (pack(xs),) if packed else xs
    do = torch.randn_like(want)
    (o,), grads = gradients(op, ins, [do.flatten(2) if packed else do])
    torch.testing.assert_close(o.reshape(want.shape), want, rtol=1e-12, atol=1e-12)

    dq, dk, dv = oracle_gradients(turned, CAUSAL, do, None)
    back = (gradients(rotary, (xs[0],), [dq])[1][0], gradients(rotary, (xs[1],), [dk])[1][0], dv)
    got = grads[0] if packed else pack(tuple(grads))
    torch.testing.assert_close(got, pack(back), rtol=1e-11, atol=1e-11)


def test_two_layers_share_one_table() -> None:
    class Two(Op):
        """Two attention layers."""

        def __init__(self) -> None:
            super().__init__()
            self.a = Attention(2, packed=True, rotary=RoPE(8))
            self.b = Attention(2, packed=True, rotary=RoPE(8))

        def emit(self, g: Graph, *xs: Value) -> Value:
            o = self.a.emit(g, xs[0])
            assert isinstance(o, Value)
            self.b.emit(g, xs[0])
            return o

    Two.num_inputs = 1
    made = program(Two(), torch.randn(1, 5, 48), given=[True])
    names = [node.prim.name for node in made.g.nodes]
    assert names.count("rope_table") == 1
    assert names.count("dim") == 1


def test_sequence_first_op() -> None:
    x = torch.randn(2, 9, 48)
    op = Attention(2, packed=True, rotary=RoPE(8))
    turned = Attention(2, packed=True, rotary=RoPE(8, qkv_format="sbhd"), qkv_format="sbhd")
    y = forward(op, x)
    assert torch.equal(y, forward(turned, x.transpose(0, 1).contiguous()).transpose(0, 1))


@pytest.mark.parametrize(
    ("keywords", "band"),
    [
        ({"attn_mask_type": "no_mask"}, FULL),
        ({}, CAUSAL),
        ({"attn_mask_type": "causal_bottom_right"}, CAUSAL_BR),
        ({"window_size": (2, 0)}, Band(2, 0)),
        ({"attn_mask_type": "no_mask", "window_size": (2, 1)}, Band(2, 1, "bottom_right")),
        ({"bottom_right_diagonal": True}, CAUSAL_BR),
    ],
)
def test_op_masks(keywords: Any, band: Band) -> None:
    xs = tensors(1, (4, 7), (2, 2), (8, 8), torch.float64)
    torch.testing.assert_close(forward(Attention(2, **keywords), *xs), oracle(*xs, band)[0])
    names = ("attn_mask_type", "window_size", "bottom_right_diagonal")
    given = {"attn_mask_type": "causal"} | keywords
    assert band_of(*(given.get(n) for n in names)).normalized(None, None) == band  # type: ignore[arg-type]


def test_lse_for_users() -> None:
    xs = tensors(1, (5, 3), (2, 2), (4, 4), torch.float64)
    op = Attention(2, attn_mask_type="causal_bottom_right", return_lse=True)
    assert op.num_extra_outputs == 1
    o, want, _ = oracle(*xs, CAUSAL_BR)
    dlse = torch.randn_like(want)
    (got, lse), grads = gradients(op, xs, [torch.zeros_like(o), dlse])
    torch.testing.assert_close(got, o)
    torch.testing.assert_close(lse, want.masked_fill(want == math.inf, -math.inf))
    assert bool((lse[:, :, :2] == -math.inf).all())
    for a, b in zip(grads, oracle_gradients(xs, CAUSAL_BR, None, dlse), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 4, "num_gqa_groups": 3}, "not a multiple"),
        ({"num_heads": 4, "kv_channels": (8, 8, 8)}, "kv_channels"),
        ({"num_heads": 4, "kv_channels": 0}, "kv_channels"),
        ({"num_heads": 4, "softmax_scale": math.inf}, "softmax_scale"),
        ({"num_heads": 4, "qkv_format": "bhsd"}, "qkv_format must be one of"),
        ({"num_heads": 4, "attn_mask_type": "causal_top"}, "attn_mask_type must be one of"),
        ({"num_heads": 4, "rotary": RoPE(4, qkv_format="sbhd")}, "qkv_format"),
        ({"num_heads": 4, "packed": 1}, "packed"),
        ({"num_heads": 4, "attn_mask_type": ["causal"]}, "attn_mask_type must be one of"),
        ({"num_heads": 4, "bottom_right_diagonal": 1}, "bottom_right_diagonal must be True or"),
        ({"num_heads": 4, "window_size": (1.0, 0)}, "window_size must be two ints"),
        ({"num_heads": 4, "rotary": "rope"}, "rotary must be a te.RoPE or None, got 'rope'"),
        ({"num_heads": 4, "q_norm": "RMSNorm"}, "q_norm must be a te.Op or None"),
        ({"num_heads": 4, "cache": 1}, "cache must be a te.KVCache or None"),
        ({"num_heads": 4, "return_lse": 1}, "return_lse must be True or False"),
    ],
)
def test_constructor_mistakes(keywords: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Attention(**keywords)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("softmax_scale", math.inf, "softmax_scale must be finite, got inf"),
        ("return_lse", "x", "return_lse must be"),
        ("rotary", 3, "rotary must be a te.RoPE"),
        ("k_norm", 3, "k_norm must be a te.Op"),
        ("kv_channels", (8, 8, 8), "kv_channels must be d or"),
    ],
)
def test_options_assigned_later_are_checked_too(name: str, value: Any, message: str) -> None:
    xs = tensors(1, (4, 4), (2, 2), (8, 8), torch.float32)
    op = Attention(2)
    setattr(op, name, value)
    with pytest.raises(PlanError, match=message):
        op(*xs)
    setattr(op, name, False if name == "return_lse" else None)
    assert torch.equal(op(*xs), Attention(2)(*xs))


def test_sizes_may_be_those_of_numpy() -> None:
    xs = tensors(1, (4, 4), (2, 2), (8, 8), torch.float32)
    one, two = np.int64(1), np.int64(2)
    op = Attention(two, window_size=(one, one - 1))  # type: ignore[arg-type]
    assert torch.equal(op(*xs), Attention(2, window_size=(1, 0))(*xs))


def test_input_mistakes() -> None:
    xs = tensors(1, (4, 4), (2, 2), (8, 8), torch.float32)
    with pytest.raises(ShapeError, match="q must be bshd with 4 heads"):
        forward(Attention(4), *xs)
    with pytest.raises(ShapeError, match="heads of 16"):
        forward(Attention(2, kv_channels=16), *xs)
    with pytest.raises(ShapeError, match="takes q, k and v, got 1"):
        forward(Attention(2), xs[0])
    with pytest.raises(ShapeError, match="heads of one size"):
        forward(Attention(2, packed=True), torch.zeros(1, 4, 50))
    with pytest.raises(ShapeError, match="96 features"):
        forward(Attention(2, packed=True, kv_channels=16), torch.zeros(1, 4, 48))
    with pytest.raises(ShapeError, match="3 dimensions"):
        forward(Attention(2, packed=True), torch.zeros(4, 48))


# -- through plans


def block(dtype: torch.dtype) -> te.Sequential:
    """The attention half of a decoder layer."""
    return te.Sequential(
        te.RMSNorm(32, dtype=dtype),
        te.Linear(32, 64, bias=False, dtype=dtype),
        te.Attention(4, 2, packed=True, rotary=te.RoPE(8)),
        te.Linear(32, 32, bias=False, dtype=dtype),
    )


@pytest.mark.parametrize("rows", [(2, 30), (3, 64), (1, 1), (0, 5), (2, 0)])
def test_a_block_matches_autograd(rows: tuple[int, int]) -> None:
    torch.manual_seed(1)
    model = block(torch.float64)
    x = torch.randn(*rows, 32, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(*rows, 32, dtype=torch.float64)
    y = model(x)
    leaves = (x, *model.parameters())
    got = torch.autograd.grad(y, leaves, dy)

    norm, qkv, _, out = model
    scaled = torch.nn.functional.rms_norm(x, (32,), norm.weight, norm.eps)
    parts = (scaled @ qkv.weight.T).split([32, 16, 16], -1)
    q, k, v = (
        part.unflatten(-1, (-1, 8)) if part.numel() else part.view(*rows, h, 8)
        for part, h in zip(parts, (4, 2, 2), strict=True)
    )
    rotary = te.RoPE(8)
    want = oracle(rotary(q), rotary(k), v, CAUSAL)[0].flatten(2) @ out.weight.T
    torch.testing.assert_close(y, want)
    for a, b in zip(got, torch.autograd.grad(want, leaves, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_plan_serves_other_lengths_of_its_class() -> None:
    op = te.Attention(2, packed=True, rotary=te.RoPE(8))
    long, short = torch.randn(2, 65, 48), torch.randn(2, 81, 48)
    assert op.plan(long) is op.plan(short)
    for x in (long, short):
        torch.testing.assert_close(op(x), forward(op, x))


def test_autocast_computes_in_its_dtype() -> None:
    model = block(torch.float32)
    x = torch.randn(2, 16, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    assert y.dtype is BF16
    assert x.grad is not None
    torch.testing.assert_close(y.float(), model(x), rtol=0.05, atol=0.05)


def test_the_lse_leaves_a_pipeline_as_an_extra_output() -> None:
    model = te.Sequential(
        te.Linear(16, 48), te.Attention(2, packed=True, return_lse=True), te.Linear(16, 4)
    )
    y, lse = model(torch.randn(3, 5, 16))
    assert (y.shape, lse.shape) == ((3, 5, 4), (3, 2, 5))


@dataclass(frozen=True, kw_only=True)
class ForwardOnly(te.Recipe):
    """FP8 operands in the forward of attention, nothing else."""

    def quantizer(self, role: te.Role) -> te.Quantizer | None:
        is_forward = role.prim == "attention"
        return te.Float8CurrentScalingQuantizer() if is_forward else None


def quantized_data(kind: str) -> Tensors:
    """q, k, v for which scores are peaked, keys have outlying channels, or values a mean of 4 sigma."""
    q, k, v = tensors(2, (160, 160), (4, 2), (64, 64), torch.float32)
    if kind == "scores around 10":
        q = q * 10.0
    elif kind == "outlying channels of k":
        k[..., :2] *= 20.0
    elif kind == "mean of v":
        v = v + 4.0
    return q, k, v


# Worst relative errors of dq, dk and dv against the unquantized definition, by data, with room for other draws.
NOISE = {
    "gaussian": (0.08, 0.08, 0.05),
    "scores around 10": (0.35, 0.35, 0.2),
    "outlying channels of k": (0.25, 0.2, 0.2),
    "mean of v": (0.25, 0.25, 0.05),
}


@pytest.mark.parametrize("kind", list(NOISE))
def test_backward_differentiates_the_quantized_forward(kind: str) -> None:
    """Saved are the records, and p = exp(s - lse) of what they hold sums to 1 even where rows are peaked."""
    xs = quantized_data(kind)
    do = torch.randn(xs[0].shape)
    op, leaves = Attention(4, 2, return_lse=True), [x.requires_grad_() for x in xs]
    with te.autocast(recipe=ForwardOnly()):
        o, lse = op(*leaves)
        saved = [v.format for segment in op.plan(*leaves).segments for v in segment.saved_values]
    got = torch.autograd.grad(o, leaves, do)

    quantizer = te.Float8CurrentScalingQuantizer()
    read = tuple(te.quantize(x.detach(), quantizer).dequantize().double() for x in xs)
    torch.testing.assert_close(o.double(), oracle(*read, CAUSAL)[0], rtol=1e-5, atol=1e-4)
    for a, b in zip(got, oracle_gradients(read, CAUSAL, do, None), strict=True):
        assert float((a - b).norm()) <= 1e-4 * float(b.norm())
    assert sum("e4m3" in name for name in saved) == 3
    assert len(saved) == 5  # and o, lse

    s = torch.einsum("bihd,bjhd->bhij", read[0], read[1].repeat_interleave(2, 2)) / 8.0
    s = s.masked_fill(torch.ones(160, 160, dtype=torch.bool).triu(1), -math.inf)
    assert float((torch.exp(s - lse.detach()[..., None]).sum(-1) - 1.0).abs().max()) < 1e-3
    exact = oracle_gradients(tuple(x.detach() for x in xs), CAUSAL, do, None)
    for a, b, bound in zip(got, exact, NOISE[kind], strict=True):
        assert float((a - b).norm()) <= bound * float(b.norm())


# -- norms, key/value packing, options


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["rms", "l2", "layer"])
def test_norms_of_q_and_k_before_and_after_rope(before: bool, kind: str) -> None:
    make = {
        "rms": lambda: te.RMSNorm(8, dtype=torch.float64),
        "l2": te.L2Normalization,
        "layer": lambda: te.LayerNorm(8, dtype=torch.float64),
    }[kind]
    q_norm, k_norm, rotary = make(), make(), te.RoPE(6)
    for norm in (q_norm, k_norm):
        for p in norm.parameters():
            torch.nn.init.uniform_(p, 0.5, 1.5)
    xs = tensors(2, (10, 10), (4, 2), (8, 8), torch.float64)
    xs = tuple(x.requires_grad_() for x in xs)
    op = Attention(4, 2, rotary=rotary, q_norm=q_norm, k_norm=k_norm, qk_norm_before_rope=before)
    o = op(*xs)

    def through(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return rotary(norm(x)) if before else norm(rotary(x))

    want = oracle(through(xs[0], q_norm), through(xs[1], k_norm), xs[2], CAUSAL)[0]
    torch.testing.assert_close(o, want)
    do, leaves = torch.randn_like(o), [*xs, *op.parameters()]
    got, wants = (torch.autograd.grad(y, leaves, do) for y in (o, want))
    for a, b in zip(got, wants, strict=True):
        torch.testing.assert_close(a, b)


def test_keys_and_values_in_one_input() -> None:
    """Cross attention on a fused [K | V] projection."""
    q, k, v = tensors(2, (5, 7), (4, 2), (8, 6), torch.float64)
    op = te.Attention(
        4, 2, packed="kv", kv_channels=(8, 6), attn_mask_type="no_mask", attention_type="cross"
    )
    assert op.num_inputs == 2
    ins = (
        q.flatten(2).requires_grad_(),
        torch.cat([k.flatten(2), v.flatten(2)], -1).requires_grad_(),
    )
    y = op(*ins)
    torch.testing.assert_close(y, oracle(q, k, v, Band(None, None, "bottom_right"))[0].flatten(2))
    dy = torch.randn_like(y)
    dq, dkv = torch.autograd.grad(y, ins, dy)
    wants = oracle_gradients((q, k, v), FULL, dy.unflatten(-1, (4, 6)), None)
    torch.testing.assert_close(dq, wants[0].flatten(2))
    torch.testing.assert_close(dkv, torch.cat([w.flatten(2) for w in wants[1:]], -1))
    with pytest.raises(ShapeError, match="does not hold 2 \\+ 2 heads"):
        te.Attention(4, 2, packed="kv")(torch.zeros(1, 3, 32), torch.zeros(1, 3, 30))


def test_inputs_are_named() -> None:
    op = Attention(
        4, attn_mask_type="padding", attention_type="cross", core_attention_bias_type="alibi",
        alibi_slopes="input", rotary=RoPE(8, positions="ids"),
    )  # fmt: skip
    names = ("q", "k", "v", "q_padding", "kv_padding", "slopes", "positions")
    assert op.input_names == names
    assert op.num_inputs == len(names)
    op.attn_mask_type = "arbitrary"
    assert op.input_names == ("q", "k", "v", "mask", "slopes", "positions")


@pytest.mark.parametrize("positions", ["offsets", "ids"])
def test_positions_reach_the_rotary_of_q_and_k(positions: Any) -> None:
    xs = tensors(2, (6, 6), (4, 2), (8, 8), torch.float64)
    given = torch.tensor([3, 11]) if positions == "offsets" else torch.randint(0, 40, (2, 6))
    rotary = te.RoPE(8, positions=positions)
    o = te.Attention(4, 2, rotary=rotary)(*xs, given)
    turned = (rotary(xs[0], given), rotary(xs[1], given), xs[2])
    torch.testing.assert_close(o, oracle(*turned, CAUSAL)[0])


@pytest.mark.parametrize(
    ("spellings", "lengths"),
    [
        (
            [
                {"attn_mask_type": "causal"},
                {"attn_mask_type": "causal_bottom_right"},
                {"attn_mask_type": "no_mask", "window_size": (-1, 0)},
                {"window_size": (-1, 0)},
                {"window_size": (-1, -1)},
                {"attn_mask_type": "causal", "bottom_right_diagonal": True},
            ],
            "one",
        ),
        (
            [{"attn_mask_type": "no_mask"}, {"attn_mask_type": "no_mask", "window_size": (-1, -1)}],
            "two",
        ),
    ],
)
def test_every_spelling_of_a_mask_is_one_node(spellings: list[Any], lengths: str) -> None:
    """On one input, whose length is one; and where nothing is hidden at all."""
    seen = set()
    for keywords in spellings:
        if lengths == "one":
            made = program(
                Attention(2, packed=True, **keywords), torch.zeros(1, 6, 48), given=[False]
            )
        else:
            made = program(
                Attention(2, **keywords), *tensors(1, (3, 5), (2, 2), (8, 8), BF16), given=[False]
            )
        seen.add(next(n.attrs.key for n in made.g.nodes if n.prim.name == "attention"))
    assert len(seen) == 1


# Sizes are small; the combinations are those of Transformer Engine's own attention tests.
TE_CONFIGURATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "base": ({}, {}),
    "mla": ({"d": (24, 16)}, {}),
    "mla, 192 and 128": ({"d": (192, 128), "s": (17, 17)}, {}),
    "d 256": ({"d": (256, 256), "s": (9, 9)}, {}),
    "gqa": ({"heads": (8, 2)}, {}),
    "mqa": ({"heads": (8, 1)}, {}),
    "cross, no mask": ({"s": (9, 14)}, {"attn_mask_type": "no_mask"}),
    "cross, causal": ({"s": (9, 14)}, {"attn_mask_type": "causal"}),
    "cross, bottom right": ({"s": (9, 14)}, {"attn_mask_type": "causal_bottom_right"}),
    "one query": ({"s": (1, 14)}, {"attn_mask_type": "causal_bottom_right"}),
    "window": ({}, {"window_size": (4, 0)}),
    "window, no mask": ({}, {"attn_mask_type": "no_mask", "window_size": (4, 4)}),
    "window, bottom right": (
        {"s": (9, 14)},
        {"attn_mask_type": "causal_bottom_right", "window_size": (4, 0)},
    ),
    "alibi": ({}, {"core_attention_bias_type": "alibi"}),
    "dropout off in eval": ({}, {"attention_dropout": 0.1}),
    "sink": ({"heads": (8, 1)}, {"softmax_type": "learnable"}),
    "off by one": ({"heads": (8, 1)}, {"softmax_type": "off-by-one"}),
}


@pytest.mark.parametrize("name", list(TE_CONFIGURATIONS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_configurations_of_transformer_engine(name: str, dtype: torch.dtype) -> None:
    from .attention_full_oracle import Meaning, dense_spans
    from .attention_full_oracle import oracle as full

    sizes, keywords = TE_CONFIGURATIONS[name]
    h, hk = sizes.get("heads", (4, 4))
    s_q, s_kv = sizes.get("s", (14, 14))
    xs = tensors(2, (s_q, s_kv), (h, hk), sizes.get("d", (16, 16)), dtype)
    op = te.Attention(h, hk, **keywords).eval()
    slopes = "core_attention_bias_type" in keywords
    meaning = Meaning(
        dense_spans(2, ([0] * 2, [s_q] * 2), ([0] * 2, [s_kv] * 2)),
        op.band,
        slopes=torch.tensor([2.0 ** (-2 * k) for k in range(1, 5)]) if slopes else None,
        sink=torch.zeros(h) if "softmax_type" in keywords else None,
    )
    leaves = [x.requires_grad_() for x in xs]
    o = op(*leaves)
    exact = [x.detach().double().requires_grad_() for x in xs]
    want, _, _ = full(*exact, meaning)
    do = torch.randn(o.shape).to(dtype)
    pairs = [(o, want)]
    pairs += zip(
        torch.autograd.grad(o, leaves, do),
        torch.autograd.grad(want, exact, do.double()),
        strict=True,
    )
    for got, right in pairs:
        error = (got.double() - right).norm()
        rounding = (right.to(dtype).double() - right).norm()
        assert error <= 2 * rounding + torch.finfo(dtype).eps
