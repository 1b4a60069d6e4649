"""What changes scores: bias, ALiBi, masks, modifiers, sinks, dropout; the LSE, and who may not combine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.basic.attention import ATTENTION
from te_ops.basic.attention_core import add_sink, attention
from te_ops.basic.sequences import alibi_slopes
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Value
from te_ops.op import Op
from te_ops.quantizers.philox import philox_uniform

from .attention_full_oracle import Meaning, dense_spans, oracle
from .attention_oracle import CAUSAL, CAUSAL_BR, FULL
from .interp import program
from .test_attention import Largest

F64 = torch.float64


def whole(b: int, s_q: int, s_kv: int) -> list[Any]:
    return dense_spans(b, ([0] * b, [s_q] * b), ([0] * b, [s_kv] * b))


def inputs(b: int, s_q: int, s_kv: int, h: int, hk: int) -> list[torch.Tensor]:
    d = 8
    shapes = ((b, s_q, h, d), (b, s_kv, hk, d), (b, s_kv, hk, d))
    return [torch.randn(shape, dtype=F64).requires_grad_() for shape in shapes]


def check(op: Op, xs: list[torch.Tensor], extras: list[torch.Tensor], meaning: Any) -> torch.Tensor:
    """o and the gradients of everything that has one; `meaning` gets the exact leaves."""
    leaves = [*xs, *(x for x in extras if x.requires_grad), *op.parameters()]
    o = op(*xs, *extras)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want, _, _ = oracle(*exact[:3], meaning(*exact[3:]))
    torch.testing.assert_close(o, want, rtol=1e-11, atol=1e-11)
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, leaves, do)
    for x, a, b in zip(leaves, got, torch.autograd.grad(want, exact, do), strict=True):
        assert (a.shape, a.dtype) == (x.shape, x.dtype)
        torch.testing.assert_close(a.double(), b, rtol=1e-10, atol=1e-10)
    return o.detach()


# -- bias


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 70, 9),
        (1, 4, 70, 9),
        (2, 1, 70, 9),
        (1, 1, 70, 9),
        (1, 1, 1, 9),
        (4, 1, 9),
        (70, 9),
        (70, 1),
    ],
)
def test_bias_of_every_shape_has_its_gradient(kind: Any, shape: tuple[int, ...]) -> None:
    xs = inputs(2, 70, 9, 4, 2)
    bias = torch.randn(shape, dtype=F64).requires_grad_()
    op = te.Attention(
        4, 2, attn_mask_type="no_mask", core_attention_bias_type=kind, softmax_scale=0.3
    )
    name = "pre_bias" if kind.startswith("pre") else "bias"
    check(op, xs, [bias], lambda b: Meaning(whole(2, 70, 9), scale=0.3, **{name: b}))


def test_a_half_precision_bias_and_one_without_gradient() -> None:
    xs = inputs(1, 5, 5, 2, 2)
    op = te.Attention(2, core_attention_bias_type="post_scale_bias")
    half = [torch.randn(1, 2, 5, 5).to(dtype) for dtype in (torch.bfloat16, torch.float16)]
    for bias in half:
        meaning = Meaning(whole(1, 5, 5), CAUSAL, bias=bias.double())
        assert check(op, xs, [bias], lambda m=meaning: m).isfinite().all()
    plan = op.plan(*xs, half[0])
    backward = [s for segment in plan.to_dict()["segments"] for s in segment["backward"]]
    step = next(s for s in backward if s["name"] == "attention_backward")
    assert len(step["writes"]) == 3  # dbias is dead


def test_only_the_bias_is_trained() -> None:
    xs = [x.detach() for x in inputs(1, 5, 5, 2, 2)]
    bias = torch.randn(1, 1, 5, 5, dtype=F64, requires_grad=True)
    op = te.Attention(2, core_attention_bias_type="post_scale_bias")
    o = op(*xs, bias)
    do = torch.randn_like(o)
    (got,) = torch.autograd.grad(o, [bias], do)
    exact = bias.detach().clone().requires_grad_()
    want, _, _ = oracle(*xs, Meaning(whole(1, 5, 5), CAUSAL, bias=exact))
    torch.testing.assert_close(got, torch.autograd.grad(want, exact, do)[0])
    backward = [
        s for segment in op.plan(*xs, bias).to_dict()["segments"] for s in segment["backward"]
    ]
    assert len(next(s for s in backward if s["name"] == "attention_backward")["writes"]) == 1


def test_minus_infinity_in_a_bias_hides_and_rows_of_it_are_empty() -> None:
    xs = inputs(1, 4, 4, 2, 2)
    bias = torch.zeros(1, 1, 4, 4, dtype=F64)
    bias[..., 1, :] = -math.inf
    bias[..., 2, 1] = -math.inf
    op = te.Attention(
        2, attn_mask_type="no_mask", core_attention_bias_type="post_scale_bias", return_lse=True
    )
    o, lse = op(*xs, bias)
    want, _, _ = oracle(*xs, Meaning(whole(1, 4, 4), mask=bias == -math.inf))
    torch.testing.assert_close(o, want)
    assert torch.equal(lse[:, :, 1], torch.full((1, 2), -math.inf, dtype=F64))
    grads = torch.autograd.grad([o, lse], xs, [torch.randn_like(o), torch.randn_like(lse)])
    assert all(bool(g.isfinite().all()) for g in grads)


# -- ALiBi


def test_slopes_of_the_paper() -> None:
    assert alibi_slopes(8) == tuple(2.0**-k for k in range(1, 9))
    assert alibi_slopes(1) == (2.0**-8,)
    twelve = alibi_slopes(12)
    assert twelve[:8] == alibi_slopes(8)
    assert twelve[8:] == tuple(2.0 ** (-0.5 - k) for k in range(4))


@pytest.mark.parametrize("mask", ["causal", "causal_bottom_right", "no_mask"])
@pytest.mark.parametrize("lengths", [(6, 6), (4, 7), (7, 4), (1, 5)])
def test_alibi_counts_from_its_diagonal(mask: Any, lengths: tuple[int, int]) -> None:
    xs = inputs(1, *lengths, 3, 1)
    op = te.Attention(
        3, 1, attn_mask_type=mask, core_attention_bias_type="alibi", alibi_slopes=(0.5, 2.0, -1.0)
    )
    slopes = torch.tensor([0.5, 2.0, -1.0], dtype=F64)
    check(op, xs, [], lambda: Meaning(
        whole(1, *lengths), op.band, slopes=slopes, slopes_bottom_right=mask != "causal"
    ))  # fmt: skip


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_slopes_as_an_input_have_a_gradient(shape: tuple[int, ...]) -> None:
    xs = inputs(2, 6, 6, 4, 2)
    slopes = torch.rand(shape, dtype=F64).requires_grad_()
    op = te.Attention(4, 2, core_attention_bias_type="alibi", alibi_slopes="input")
    check(op, xs, [slopes], lambda s: Meaning(whole(2, 6, 6), CAUSAL, slopes=s))


# -- masks


@pytest.mark.parametrize(
    "shape", [(2, 4, 6, 9), (2, 1, 6, 9), (1, 1, 6, 9), (2, 1, 1, 9), (6, 9), (4, 1, 9)]
)
def test_masks_broadcast_and_combine_with_windows(shape: tuple[int, ...]) -> None:
    xs = inputs(2, 6, 9, 4, 2)
    mask = torch.rand(shape) < 0.4
    op = te.Attention(4, 2, attn_mask_type="arbitrary", window_size=(4, 2))
    assert op.band.diagonal == "bottom_right"
    check(op, xs, [mask], lambda: Meaning(whole(2, 6, 9), op.band, mask=mask))


def test_a_mask_that_hides_everything() -> None:
    xs = inputs(1, 3, 3, 2, 2)
    op = te.Attention(2, attn_mask_type="arbitrary", return_lse=True, return_max_logit=True)
    o, lse, top = op(*xs, torch.ones(1, 1, 3, 3, dtype=torch.bool))
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
    assert torch.equal(top, torch.full_like(top, -math.inf))
    grads = torch.autograd.grad(o, xs, torch.randn_like(o))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


# -- modifiers


@te.pointwise
def cap_and_tilt(s, i, j, cap: float, tilt: float):  # type: ignore[no-untyped-def]
    """A soft cap with a slope that may be learned."""
    return cap * te.math.tanh(s / cap) + tilt * (j - i)


@te.pointwise
def two_tensors(s, other):  # type: ignore[no-untyped-def]
    """Not a modifier: `other` is no place."""
    return s + other


@te.pointwise
def constant(s):  # type: ignore[no-untyped-def]
    """Forgets its score."""
    return 0.0


def test_soft_cap_near_saturation() -> None:
    xs = inputs(1, 70, 70, 2, 2)
    with torch.no_grad():
        xs[0].mul_(40.0)
    op = te.Attention(2, logits_soft_cap=2.0)
    capped = lambda s, *_: 2.0 * torch.tanh(s / 2.0)  # noqa: E731
    check(op, xs, [], lambda: Meaning(whole(1, 70, 70), CAUSAL, score=capped))


@pytest.mark.parametrize("learned", ["number", "vector", "scalar slot"])
def test_captured_numbers_have_derived_gradients(learned: str) -> None:
    xs = inputs(2, 66, 6, 4, 2)
    tilt: Any = {
        "number": torch.nn.Parameter(torch.tensor(0.1, dtype=F64)),
        "vector": torch.nn.Parameter(torch.randn(4, dtype=F64)),
        "scalar slot": te.scalar(0.25),
    }[learned]
    op = te.Attention(4, 2, attn_mask_type="no_mask", score_mod=cap_and_tilt(1.5, tilt))

    def meaning(*leaves: Any) -> Meaning:
        def score(s: Any, i: Any, j: Any, h: float, _: float) -> Any:
            t = leaves[0] if leaves else tilt.value
            t = t[int(h)] if leaves and t.dim() else t
            return 1.5 * torch.tanh(s / 1.5) + t * (j - i)

        return Meaning(whole(2, 66, 6), score=score)

    check(op, xs, [], meaning)
    if learned == "scalar slot":
        plan = op.plan(*xs)
        tilt.set(0.5)
        assert op.plan(*xs) is plan
        check(op, xs, [], meaning)


def test_a_modifier_that_forgets_the_score() -> None:
    xs = inputs(1, 5, 5, 2, 2)
    op = te.Attention(2, score_mod=constant())
    o = op(*xs)
    uniform, _, _ = oracle(xs[0] * 0.0, xs[1], xs[2], Meaning(whole(1, 5, 5), CAUSAL))
    torch.testing.assert_close(o, uniform)
    dq, dk, _ = torch.autograd.grad(o, xs, torch.randn_like(o))
    assert torch.equal(dq, torch.zeros_like(dq))
    assert torch.equal(dk, torch.zeros_like(dk))


def test_wrong_modifiers() -> None:
    with pytest.raises(PlanError, match=r"takes s, other; its tensors are the score"):
        te.Attention(2, score_mod=two_tensors())
    with pytest.raises(PlanError, match=r"must be a @te.pointwise op"):
        te.Attention(2, score_mod=te.GELU())
    with pytest.raises(PlanError, match="both change the score"):
        te.Attention(2, logits_soft_cap=3.0, score_mod=cap_and_tilt(1.0, 0.0))
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(PlanError, match="logits_soft_cap"):
            te.Attention(2, logits_soft_cap=cap)
    xs = inputs(1, 5, 5, 4, 4)
    op = te.Attention(4, score_mod=cap_and_tilt(1.0, torch.nn.Parameter(torch.zeros(3, dtype=F64))))
    with pytest.raises(ShapeError, match=r"tilt of the score modifier .* 0-dim or with 4 numbers"):
        op(*xs)


# -- sinks


@pytest.mark.parametrize("value", [20.0, -20.0, 0.0])
@pytest.mark.parametrize("lengths", [(1, 9), (9, 9), (5, 3)])
def test_learnable_sinks(value: float, lengths: tuple[int, int]) -> None:
    """Also of a single query (decode) and of rows without a key."""
    xs = inputs(2, *lengths, 4, 2)
    op = te.Attention(
        4, 2, attn_mask_type="causal_bottom_right", softmax_type="learnable", dtype=F64
    )
    with torch.no_grad():
        op.softmax_offset.copy_(value + torch.arange(4))
    o = check(op, xs, [], lambda sink: Meaning(whole(2, *lengths), CAUSAL_BR, sink=sink))
    if lengths == (5, 3):
        assert torch.equal(o[:, :2], torch.zeros_like(o[:, :2]))


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_the_gradient_of_the_lse_reaches_the_sink(layout: str) -> None:
    xs = inputs(2, 6, 6, 4, 2)
    op = te.Attention(4, 2, qkv_format=layout, softmax_type="learnable", return_lse=True, dtype=F64)
    dlse = torch.randn(2, 4, 6, dtype=F64)
    flat = {
        "bshd": lambda x: x,
        "sbhd": lambda x: x.transpose(0, 1),
        "thd": lambda x: x.flatten(0, 1),
    }[layout]
    extras = [te.PackedSequences([0, 6, 12])] if layout == "thd" else []
    _, lse = op(*(flat(x) for x in xs), *extras)
    given = dlse.transpose(0, 1).flatten(1) if layout == "thd" else dlse
    got = torch.autograd.grad(lse, [*xs, op.softmax_offset], given, materialize_grads=True)
    exact = [x.detach().clone().requires_grad_() for x in (*xs, op.softmax_offset)]
    _, want, _ = oracle(*exact[:3], Meaning(whole(2, 6, 6), CAUSAL, sink=exact[3]))
    for a, b in zip(
        got, torch.autograd.grad(want, exact, dlse, materialize_grads=True), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_sink_is_algebra_on_o_and_lse() -> None:
    """o and lse of plain attention become those with a sink, and its backward reads them as they are."""
    q, k, v = (x.detach() for x in inputs(2, 6, 6, 4, 2))
    names: dict[str, Any] = {"layout": "bshd", "kv_layout": "bshd", "band": CAUSAL, "scale": 0.3}
    sink = torch.randn(4, dtype=F64)
    o, lse, _ = ATTENTION.reference(q, k, v, operands=("q", "k", "v"), **names)
    fused = ATTENTION.reference(q, k, v, sink, operands=("q", "k", "v", "sink"), **names)
    got = add_sink(o.transpose(1, 2).reshape(4, 2, 6, 8), lse.view(4, 2, 6), sink)
    torch.testing.assert_close(got[0].view(2, 4, 6, 8).transpose(1, 2), fused[0])
    torch.testing.assert_close(got[1].view(2, 4, 6), fused[1])

    class Both(Op):
        """With and without a sink, on the same values: two nodes, one of which has no sink in backward."""

        num_inputs = 3

        def __init__(self) -> None:
            super().__init__()
            self.sink = torch.nn.Parameter(sink)

        def emit(self, g: Graph, *xs: Value) -> Value:
            return attention(g, *xs, operands={"sink": g.param(self.sink)})[0]

    made = program(Both(), q, k, v, given=[True])
    backward = next(n for n in made.g.nodes if n.prim.name == "attention_backward")
    assert "sink" not in backward.operands


def test_off_by_one_adds_one_to_the_denominator() -> None:
    q, k, v = (x.detach() for x in inputs(1, 4, 4, 2, 2))
    o = te.Attention(2, attn_mask_type="no_mask", softmax_type="off-by-one")(q, k, v)
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8)
    p = s.exp() / (1.0 + s.exp().sum(-1, keepdim=True))
    torch.testing.assert_close(o, torch.einsum("bhij,bjhd->bihd", p, v), rtol=1e-6, atol=1e-7)


# -- dropout


def drawn(op: Op, *xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The seed that a call draws, and its output."""
    state = torch.get_rng_state()
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    torch.set_rng_state(state)
    return seed, op(*xs)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.95])
def test_dropout_is_that_of_the_dumped_mask(p: float) -> None:
    xs = inputs(2, 70, 20, 4, 2)
    op = te.Attention(4, 2, attn_mask_type="no_mask", attention_dropout=p)
    seed, o = drawn(op, *xs)
    keep = philox_uniform((2, 4, 70, 20), seed, 0) >= p
    count = keep.numel()
    assert abs(int(keep.sum()) - count * (1 - p)) <= 4 * math.sqrt(count * p * (1 - p))
    exact = [x.detach().clone().requires_grad_() for x in xs]
    want, _, _ = oracle(*exact, Meaning(whole(2, 70, 20), keep=keep, p=p))
    torch.testing.assert_close(o, want)
    do = torch.randn_like(o)
    for a, b in zip(
        torch.autograd.grad(o, xs, do), torch.autograd.grad(want, exact, do), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_dropout_at_its_ends_and_in_eval() -> None:
    xs = inputs(1, 5, 5, 2, 2)
    op = te.Attention(2, attention_dropout=1.0)
    o = op(*xs)
    assert torch.equal(o, torch.zeros_like(o))
    assert all(
        torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(o, xs, torch.randn_like(o))
    )
    plain = te.Attention(2)(*xs)
    assert torch.equal(op.eval()(*xs), plain)
    assert torch.equal(te.Attention(2, attention_dropout=0.0)(*xs), plain)
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(PlanError, match="attention_dropout"):
            te.Attention(2, attention_dropout=p)


def test_two_layers_drop_differently_and_recompute_drops_the_same() -> None:
    x = torch.randn(1, 6, 48, dtype=F64, requires_grad=True)
    layer = lambda: te.Attention(2, packed=True, attention_dropout=0.5)  # noqa: E731
    two = te.Branch(layer(), layer())
    a, b = two(x)
    assert not torch.equal(a, b)

    do = torch.randn(1, 6, 16, dtype=F64)
    results = []
    for wrap in (te.Sequential, te.Recompute):
        op = te.Sequential(wrap(layer()))
        torch.manual_seed(3)
        y = op(x)
        results.append((y, *torch.autograd.grad(y, x, do)))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_dropout_does_not_depend_on_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = inputs(2, 70, 70, 4, 2)
    op = te.Attention(4, 2, attention_dropout=0.5)
    torch.manual_seed(1)
    want = op(*xs)
    for tile, rows in ((1, 64), (5000, 64), (1 << 20, 7)):
        monkeypatch.setattr("te_ops.basic.tiles.TILE", tile)
        monkeypatch.setattr("te_ops.basic.tiles.ROW_BLOCK", rows)
        torch.manual_seed(1)
        torch.testing.assert_close(op(*xs), want)


# -- statistics, memory


def test_max_logit_is_a_statistic() -> None:
    xs = inputs(2, 6, 6, 4, 2)
    op = te.Attention(4, 2, return_lse=True, return_max_logit=True, softmax_scale=0.5)
    o, lse, top = op(*xs)
    assert op.num_extra_outputs == 2
    _, _, want = oracle(*(x.detach() for x in xs), Meaning(whole(2, 6, 6), CAUSAL, scale=0.5))
    torch.testing.assert_close(top, want)
    assert (top.requires_grad, o.requires_grad, lse.requires_grad) == (False, True, True)


@pytest.mark.parametrize("kind", ["dropout", "alibi", "modifier", "packed"])
def test_memory_stays_linear(kind: str) -> None:
    s = 1024
    q = torch.randn(1, s, 2, 8)
    k = torch.randn(1, s, 1, 8)
    keywords: dict[str, Any] = {
        "dropout": {"attention_dropout": 0.1},
        "alibi": {"core_attention_bias_type": "alibi"},
        "modifier": {"score_mod": cap_and_tilt(2.0, 0.1)},
        "packed": {"qkv_format": "thd"},
    }[kind]
    xs: list[torch.Tensor] = [q, k, k.clone()]
    extras = []
    if kind == "packed":
        xs, extras = [x[0] for x in xs], [te.PackedSequences([0, 500, 500, s])]
    op = te.Attention(2, 1, attn_mask_type="no_mask", **keywords)
    for x in xs:
        x.requires_grad_()
    with Largest() as seen:
        o = op(*xs, *extras)
        torch.autograd.grad(o.sum(), xs)
    assert seen.numel <= 64 * s * 2 * 4 < s * s  # a row block, four words of the generator each


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"core_attention_bias_type": "bias"}, "core_attention_bias_type must be one of"),
        ({"softmax_type": "sink"}, "softmax_type must be one of"),
        ({"attention_type": "both"}, "attention_type must be one of"),
        ({"packed": "qkv"}, "packed must be one of"),
        ({"alibi_slopes": (1.0, 2.0)}, "need core_attention_bias_type='alibi'"),
        (
            {"core_attention_bias_type": "alibi", "alibi_slopes": (1.0,)},
            "1 alibi_slopes for 2 heads",
        ),
        ({"core_attention_bias_type": "alibi", "alibi_slopes": (1.0, math.inf)}, "alibi_slopes"),
        ({"core_attention_bias_type": "alibi", "alibi_slopes": "none"}, "numbers or 'input'"),
        ({"attn_mask_type": "padding_causal", "window_size": (2, 1)}, "sees keys after the query"),
        (
            {"attn_mask_type": "padding_causal_bottom_right", "bottom_right_diagonal": False},
            "contradicts",
        ),
        ({"return_max_logit": 1}, "return_max_logit"),
        ({"dtype": torch.int32}, "floating-point dtype"),
    ],
)
def test_constructor_mistakes(keywords: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        te.Attention(2, **keywords)


def test_input_mistakes() -> None:
    q = torch.randn(2, 4, 2, 8)
    op = te.Attention(2, core_attention_bias_type="post_scale_bias")
    with pytest.raises(ShapeError, match="takes 4 inputs, got 3"):
        op(q, q, q)
    for shape in ((2, 3, 4, 4), (4, 5), (1, 1, 1, 4, 4)):
        with pytest.raises(ShapeError, match=r"bias is .* broadcast to"):
            op(q, q, q, torch.zeros(shape))
    with pytest.raises(ShapeError, match="floating point and broadcast"):
        op(q, q, q, torch.zeros(1, 1, 4, 4, dtype=torch.int64))
    slopes = te.Attention(2, core_attention_bias_type="alibi", alibi_slopes="input")
    with pytest.raises(ShapeError, match="slopes are"):
        slopes(q, q, q, torch.zeros(3))
    late = te.Attention(2)
    late.softmax_type = "learnable"
    with pytest.raises(PlanError, match="assigned after construction"):
        late(q, q, q)


def test_full_band_is_the_default_of_the_emission() -> None:
    xs = [x.detach() for x in inputs(1, 4, 6, 2, 2)]

    class Plain(Op):
        """No options at all."""

        num_inputs = 3

        def emit(self, g: Graph, *values: Value) -> Value:
            return attention(g, *values)[0]

    want, _, _ = oracle(*xs, Meaning(whole(1, 4, 6), FULL))
    torch.testing.assert_close(Plain()(*xs), want)
