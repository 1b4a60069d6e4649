"""FP8 attention by recipe: what it multiplies, what backward reads, and what leaves it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te
from te_ops.basic.attention_form import Sizes
from te_ops.basic.attention_fp8 import slow_note
from te_ops.errors import RecipeError
from te_ops.recipe import Role
from te_ops.runtime.state import state_of

E4M3 = torch.float8_e4m3fn
R = te.recipe
RECIPES: dict[str, te.Recipe] = {
    "delayed": R.DelayedScaling(fp8_dpa=True),
    "current": R.Float8CurrentScaling(fp8_dpa=True),
    "block": R.Float8BlockScaling(fp8_dpa=True),
    "mxfp8": R.MXFP8BlockScaling(fp8_dpa=True),
    "nvfp4": R.NVFP4BlockScaling(fp8_dpa=True),
}
H, HK, S, D = 4, 2, 512, 128


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain() -> list[Tensor]:
    return [_draw(1, S, h, D, seed=i) for i, h in enumerate((H, HK, HK))]


def peaked() -> list[Tensor]:
    """Scores of about 10."""
    q, k, v = plain()
    return [q * 3.2, k * 3.2, v]


def outliers() -> list[Tensor]:
    q, k, v = plain()
    k[..., 5] *= 20
    return [q, k, v]


def shifted() -> list[Tensor]:
    """Values with a mean of 4 sigma."""
    q, k, v = plain()
    return [q, k, v + 4]


# Of the gradients of q, k and v, relative to float64: about a tenth above the table of attention_contracts 1.
DATA = {
    "plain": (plain, (0.06, 0.06, 0.04)),
    "peaked": (peaked, (0.27, 0.27, 0.135)),
    "outliers": (outliers, (0.15, 0.11, 0.10)),
    "shifted": (shifted, (0.21, 0.195, 0.04)),
}


def exact(qkv: list[Tensor], do: Tensor) -> tuple[Tensor, list[Tensor]]:
    """o and gradients in float64."""
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    s = (q @ k.transpose(2, 3) / math.sqrt(D)).masked_fill(
        torch.ones(S, S).triu(1).bool(), -math.inf
    )
    o = (s.softmax(-1) @ v).transpose(1, 2)
    return o.detach(), list(torch.autograd.grad(o, leaves, do.double()))


def off(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def run(recipe: te.Recipe, qkv: list[Tensor], do: Tensor, **options: Any) -> Any:
    op = te.Attention(H, HK, **options)
    leaves = [x.bfloat16().requires_grad_() for x in qkv]
    for _ in range(2 if isinstance(recipe, R.DelayedScaling) else 1):  # the first step makes scales
        with te.autocast(recipe=recipe):
            o = op(*leaves)
        grads = torch.autograd.grad(o, leaves, do.to(o.dtype))
    return op, o.detach(), grads


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("data", DATA)
def test_gradients_are_those_of_what_was_multiplied(recipe: str, data: str) -> None:
    make, bounds = DATA[data]
    qkv, do = make(), _draw(1, S, H, D, seed=9)
    wanted, grads = exact(qkv, do)
    _, o, made = run(RECIPES[recipe], qkv, do)
    assert off(o, wanted) < 0.14
    for got, grad, bound in zip(made, grads, bounds, strict=True):
        assert off(got, grad) < bound


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("data", DATA)
def test_rows_of_probabilities_sum_to_one(recipe: str, data: str) -> None:
    """In backward: v's gradient for a do of ones is the sum over rows of p, so its total is the number of rows."""
    qkv, ones = DATA[data][0](), torch.ones(1, S, H, D)
    op = te.Attention(H, HK, return_lse=True)
    leaves = [x.bfloat16().requires_grad_() for x in qkv]
    for _ in range(2):
        with te.autocast(recipe=RECIPES[recipe]):
            o, lse = op(*leaves)
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True)
    q, k = (te.quantize(x.detach(), quantizer).dequantize().double() for x in leaves[:2])
    k = k.repeat_interleave(H // HK, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D)
    s = s.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
    sums = (s - lse.detach().double().unsqueeze(-1)).exp().sum(-1)
    assert float((sums - 1).abs().max()) < 1e-3
    dv = torch.autograd.grad(o, leaves[2], ones.to(o.dtype))[0]
    assert float(dv.double().sum()) == pytest.approx(S * H * D, rel=5e-3)


def test_high_precision_reads_the_originals() -> None:
    """Which breaks on peaked rows: what the contract is for."""
    qkv, do = peaked(), _draw(1, S, H, D, seed=9)
    _, grads = exact(qkv, do)
    errors = []
    for override in (None, "high_precision"):
        recipe = R.Float8CurrentScaling(fp8_dpa=True, backward_override=override)
        errors.append(off(run(recipe, qkv, do)[2][0], grads[0]))
    assert errors[1] > 1.3 * errors[0]


def test_what_the_forward_computes() -> None:
    """Dequantized records, probabilities rounded under 448, the output under the scale of v."""
    qkv = [x.bfloat16() for x in plain()]
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True)
    records = [te.quantize(x, quantizer) for x in qkv]
    q, k, v = (r.dequantize(torch.float32).transpose(1, 2) for r in records)
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    s = q @ k.transpose(2, 3) / math.sqrt(D)
    s = s.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
    p = (s - s.amax(-1, keepdim=True)).exp()
    rounded = (p * 448).to(E4M3).float() / 448
    o = (rounded @ v / p.sum(-1, keepdim=True)).transpose(1, 2)
    scale = records[2].rowwise.scale_inv
    wanted = ((o / scale).to(E4M3).float() * scale).bfloat16()
    with torch.no_grad(), te.autocast(recipe=RECIPES["current"]):
        got = te.Attention(H, HK)(*qkv)
    different = (got != wanted).float().mean()
    assert different < 0.01, "by the order of sums alone, some numbers round to a neighbour"
    assert off(got, wanted.double()) < 0.01


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_projection_reads_the_output_as_it_is(recipe: str) -> None:
    """quantize(dequantize(r)) is r: there is no quantize between attention and projection, forward or backward."""
    model = te.Sequential(te.Attention(H, HK, packed=True), te.Linear(H * D, 64)).bfloat16()
    x = torch.randn(2, 32, (H + 2 * HK) * D, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(recipe=RECIPES[recipe]):
        plan = model.plan(x)
        model(x).float().sum().backward()
    (segment,) = plan.segments
    names = [s.name for s in segment.forward_steps]
    at = names.index("attention_fp8")
    assert "dequantize" not in names
    quantized = [s for s in segment.forward_steps[at:] if s.name == "quantize"]
    assert len(quantized) == 1, "the weight"
    dense = [s for s in segment.saved_values if s.format == "bfloat16"]
    assert not dense, "q, k, v and o are saved as records, each once"


def test_block_formats_round_a_second_time_and_say_so() -> None:
    model = te.Sequential(te.Attention(H, HK, packed=True), te.Linear(H * D, 64)).bfloat16()
    x = torch.randn(2, 32, (H + 2 * HK) * D, dtype=torch.bfloat16)
    with te.autocast(recipe=RECIPES["mxfp8"]):
        text = model.explain(x)
    assert "second rounding" in text


def test_states_of_q_k_and_v() -> None:
    recipe = R.DelayedScaling(fp8_dpa=True, amax_history_len=4)
    q, k, v = plain()
    op, _, _ = run(recipe, [q, 8 * k, v / 8], torch.randn(1, S, H, D))
    scales = {name: float(state_of(op, name).scale) for name in ("q", "k", "v")}
    for name, x in (("q", q), ("k", 8 * k), ("v", v / 8)):
        exact_scale = 448 / float(x.bfloat16().abs().max())
        assert scales[name] == 2.0 ** math.floor(math.log2(exact_scale))
        assert state_of(op, name).amax_history.count_nonzero() == 2
    assert state_of(op, "do") is None
    keys = [key for key in op.state_dict() if key.endswith(".scale")]
    assert keys == [f"quantizer.delayed.{name}.scale" for name in ("q", "k", "v")]
    fresh = te.Attention(H, HK)
    te.prepare(fresh, recipe)
    fresh.load_state_dict(op.state_dict())
    assert float(state_of(fresh, "k").scale) == scales["k"]


def test_a_prepared_module_loads_what_a_run_has_saved() -> None:
    """A run makes the states that it reads: none where the operand comes as a record, as from FP8 attention."""

    def made() -> te.Sequential:
        return te.Sequential(te.Attention(2, packed=True), te.Linear(32, 32))

    recipe = R.DelayedScaling(fp8_dpa=True, amax_history_len=4)
    model = made()
    with te.autocast(recipe=recipe):
        model(_draw(2, 8, 96, seed=0)).sum().backward()
    saved = model.state_dict()
    assert "1.quantizer.delayed.input.scale" not in saved
    prepared = te.prepare(made(), recipe)
    prepared.load_state_dict(saved, strict=True)
    assert all(torch.equal(prepared.state_dict()[name], value) for name, value in saved.items())
    with te.autocast(recipe=R.DelayedScaling(amax_history_len=4)):
        prepared(_draw(2, 8, 96, seed=0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.quantizer\.delayed\.input\.scale"):
        prepared.load_state_dict(saved, strict=True)  # by now a step has made it


def test_calibration_observes_attention() -> None:
    recipe = R.DelayedScaling(fp8_dpa=True)
    op = te.Attention(H, HK)
    xs = [x.bfloat16() for x in plain()]
    with torch.no_grad(), te.autocast(enabled=False, calibrating=True, recipe=recipe):
        op(*xs)
    assert float(state_of(op, "k").scale) > 1


def test_off_by_default() -> None:
    qkv, do = plain(), _draw(1, S, H, D, seed=9)
    wanted = run(R.Float8CurrentScaling(), qkv, do)[1]
    op = te.Attention(H, HK)
    assert torch.equal(op(*[x.bfloat16() for x in qkv]), wanted)
    for name in RECIPES:
        role = Role("attention", te.graph.Phase.FORWARD, "q", "")
        assert type(RECIPES[name])().quantizer(role) is None


def test_fp8_mha_returns_the_output_as_it_is() -> None:
    recipe = R.Float8CurrentScaling(fp8_dpa=True, fp8_mha=True)
    op = te.layers.DotProductAttention(H, num_gqa_groups=HK, qkv_format="bshd")
    xs = [x.bfloat16().requires_grad_() for x in plain()]
    with te.autocast(recipe=recipe):
        o = op(*xs)
    with te.autocast(recipe=R.Float8CurrentScaling(fp8_dpa=True)):
        wanted = op(*xs)
    assert isinstance(o, te.QuantizedTensor)
    assert not isinstance(wanted, te.QuantizedTensor)
    assert o.shape == wanted.shape
    assert torch.equal(o.dequantize(), wanted)
    projection = te.Linear(H * D, 16).bfloat16()
    with te.autocast(recipe=recipe):
        y = projection(o)
    grads = torch.autograd.grad(y.float().sum(), xs)
    assert all(float(g.float().norm()) > 0 for g in grads)


def test_fp8_mha_needs_fp8_dpa() -> None:
    for kind in (R.DelayedScaling, R.Float8CurrentScaling, R.MXFP8BlockScaling):
        with pytest.raises(RecipeError, match="it needs fp8_dpa=True"):
            kind(fp8_mha=True)
        with pytest.raises(RecipeError, match="fp8_dpa must be True or False, got 1"):
            kind(fp8_dpa=1)
    assert te.recipe.from_dict(RECIPES["delayed"].to_dict()) == RECIPES["delayed"]


def test_an_output_that_cannot_be_quantized() -> None:
    """It stays dense, which explain() says."""
    recipe = R.CustomRecipe(
        qfactory=lambda role: te.MXFP8Quantizer() if role.prim.startswith("attention") else None
    )
    op, xs = te.Attention(H, HK), [x.bfloat16() for x in plain()]
    with te.autocast(recipe=recipe):
        assert "the output stays dense: mxfp8 e4m3 is asked for it" in op.explain(*xs)


def test_a_factory_may_ask_for_it() -> None:
    recipe = R.CustomRecipe(
        qfactory=lambda role: (
            R.DelayedScaling(fp8_dpa=True) if role.prim.startswith("attention") else None
        )
    )
    op, o, _ = run(recipe, plain(), torch.randn(1, S, H, D))
    assert math.frexp(float(state_of(op, "q").scale))[0] == 0.5
    with te.autocast(recipe=recipe):
        assert "attention_fp8" in op.explain(*[x.bfloat16() for x in plain()])
    assert o.isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask_type": "causal_bottom_right", "window_size": (7, 0)},
        {"softmax_type": "learnable"},
        {"core_attention_bias_type": "alibi"},
        {"logits_soft_cap": 5.0},
        {"return_lse": True, "return_max_logit": True},
        {"qkv_format": "sbhd"},
    ],
    ids=str,
)
def test_every_feature_of_attention(options: dict[str, Any]) -> None:
    """What is around the products is as of dense attention over the records' numbers."""
    op = te.Attention(H, HK, **options)
    xs = [x.bfloat16() for x in plain()]
    if "qkv_format" in options:
        xs = [x.transpose(0, 1).contiguous() for x in xs]
    quantizer = te.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True)
    dense = op(*[te.quantize(x, quantizer).dequantize() for x in xs])
    with te.autocast(recipe=RECIPES["current"]):
        made = op(*xs)
    pairs = zip(made, dense, strict=True) if isinstance(made, tuple) else [(made, dense)]
    for i, (a, b) in enumerate(pairs):
        assert off(a.detach(), b.detach().double()) < (0.06 if i == 0 else 1e-5)


def test_packed_tokens_and_rows_without_keys() -> None:
    sequences = te.PackedSequences([0, 5, 5, 40], cu_q_padded=[0, 8, 8, 64])
    op = te.Attention(H, HK, qkv_format="thd")
    xs = [_draw(64, h, D, seed=i).bfloat16().requires_grad_() for i, h in enumerate((H, HK, HK))]
    with te.autocast(recipe=RECIPES["delayed"]):
        o = op(*xs, sequences)
    o.float().sum().backward()
    assert not o[5:8].any()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in xs)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_dropout_is_the_same_in_both_directions(recipe: str) -> None:
    """o is linear in v with the dropped probabilities, so <o, do> = <v, dv>, up to rounding."""
    qkv, do = plain(), _draw(1, S, H, D, seed=9)
    op = te.Attention(H, HK, attention_dropout=0.4)
    leaves = [x.bfloat16().requires_grad_() for x in qkv]
    with te.autocast(recipe=RECIPES[recipe]):
        o = op(*leaves)
    dv = torch.autograd.grad(o, leaves[2], do.bfloat16())[0]
    left = float((o.detach().double() * do.double()).sum())
    right = float((leaves[2].detach().double() * dv.double()).sum())
    assert abs(left - right) < 0.05 * float((o.detach().double() * do.double()).norm())


def test_attention_over_a_cache_stays_dense() -> None:
    op = te.Attention(H, HK).eval()
    op.cache = te.KVCache(1, S, HK, D, dtype=torch.bfloat16)
    xs = [x.bfloat16() for x in plain()]
    with torch.no_grad(), te.autocast(recipe=RECIPES["current"]):
        text = op.explain(*xs)
        made = op(*xs)
    assert "attention_fp8" not in text
    op.cache = None
    with torch.no_grad():
        torch.testing.assert_close(made, op(*xs))


def test_where_it_is_expected_to_lose() -> None:
    def note(s: int, h: int, hk: int, d: int) -> str | None:
        return slow_note(Sizes(1, s, s, h, hk, d, d))

    assert note(8192, 32, 8, 128) is None
    assert note(4096, 32, 8, 128) is None
    assert "features" in (note(8192, 32, 8, 64) or "")
    assert "2048" in (note(2048, 16, 16, 128) or "")
    assert "a key head" in (note(4096, 32, 32, 128) or "")
    op = te.Attention(H, HK)
    with te.autocast(recipe=RECIPES["current"]):
        assert "expected to be no faster than dense" in op.explain(*[x.bfloat16() for x in plain()])


def test_q_k_and_v_may_be_one_tensor() -> None:
    """Each has a record of its own in backward, whatever the scales are."""
    op = te.Attention(2)
    x = _draw(1, 24, 2, 16, seed=0).bfloat16().requires_grad_()
    with te.autocast(recipe=RECIPES["delayed"]):
        op(x, x, x).float().square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_second_plan_for_other_lengths() -> None:
    op = te.Attention(H, HK)
    with te.autocast(recipe=RECIPES["current"]):
        for s in (16, 48, 5, 1):
            xs = [_draw(2, s, h, D, seed=i).bfloat16() for i, h in enumerate((H, HK, HK))]
            assert op(*xs).shape == (2, s, H, D)
        for b, s in ((0, 4), (2, 0)):
            xs = [torch.zeros(b, s, h, D, dtype=torch.bfloat16) for h in (H, HK, HK)]
            assert op(*xs).shape == (b, s, H, D)
