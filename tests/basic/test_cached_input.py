"""`cache_quantized_input`: backward gets an activation's input as FP8 in 1x128 blocks, forward the input itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te
from te_ops.backends.reference import composed
from te_ops.basic.activation import CACHE_FORMAT
from te_ops.fused import RULES
from te_ops.runtime import engines
from tests.compiler.isolation import only
from tests.runtime.cases import RECIPES, assert_same, gradients, state, step, twin
from tests.runtime.graph_engine import Rerun

PLAIN: dict[str, Callable[..., te.Op]] = {
    "gelu": te.GELU,
    "gelu exact": lambda **kw: te.GELU("none", **kw),
    "relu": te.ReLU,
    "srelu": te.SReLU,
    "qgelu": te.QGELU,
    "silu": te.SiLU,
    "glu": te.GLU,
    "geglu": te.GEGLU,
    "qgeglu": te.QGEGLU,
    "reglu": te.ReGLU,
    "sreglu": te.SReGLU,
    "swiglu": te.SwiGLU,
    "swiglu, interleaved": lambda **kw: te.SwiGLU(glu_interleave_size=2, **kw),
    "clamped": lambda **kw: te.ClampedSwiGLU(1.0, **kw),
    "situ": te.SiTUGLU,
}
SCALED: dict[str, Callable[..., te.Op]] = {
    "scaled swiglu": te.ScaledSwiGLU,
    "scaled srelu": te.ScaledSReLU,
    "scaled clamped": te.ScaledClampedQGeGLU,
    "scaled situ": te.ScaledSiTUGLU,
}
WIDTHS = (20, 128, 300)


def decoded(x: Tensor) -> Tensor:
    return te.quantize(x, CACHE_FORMAT).dequantize()


def mlp(*, cached: bool = True, width: int = 256, inner: int = 128) -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(
        te.Linear(width, 2 * inner, bias=False),
        te.SwiGLU(cache_quantized_input=cached),
        te.Linear(inner, width, bias=False),
    )


def steps(plan: Any, way: str) -> list[str]:
    return [n.partition("(")[0] for s in plan.segments for x in getattr(s, way) for n in x.nodes]


def saved(plan: Any) -> dict[str, int]:
    """Bytes that backward keeps, without parameters and their copies (attention_contracts 15)."""
    kept = [v for segment in plan.segments for v in segment.saved_values]
    return {v.value: v.bytes for v in kept if "weight" not in v.format + v.value}


# -- one op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", PLAIN)
def test_the_gradient_is_that_at_the_decoded_input(name: str, dtype: torch.dtype) -> None:
    for shape in [(7, w) for w in WIDTHS] + [(2, 3, 40), (0, 256), (2, 0), (60,)]:
        x, ours = (
            torch.randn(shape).to(dtype).requires_grad_(),
            PLAIN[name](cache_quantized_input=True),
        )
        plain = PLAIN[name]()
        y = ours(x)
        assert torch.equal(y, plain(x.detach())), "forward reads x itself"
        dy = torch.randn(y.shape).to(dtype)
        leaf = decoded(x.detach()).requires_grad_()
        (expected,) = torch.autograd.grad(plain(leaf), leaf, dy)
        (found,) = torch.autograd.grad(y, x, dy)
        assert found.dtype is dtype
        assert torch.equal(found, expected), shape


@pytest.mark.parametrize("name", SCALED)
def test_the_scale_is_kept_as_it_is(name: str) -> None:
    x, scale = torch.randn(6, 40, requires_grad=True), torch.rand(6, requires_grad=True)
    ours, plain = SCALED[name](cache_quantized_input=True), SCALED[name]()
    y = ours(x, scale)
    assert torch.equal(y, plain(x.detach(), scale.detach()))
    dy = torch.randn_like(y)
    leaf, factor = decoded(x.detach()).requires_grad_(), scale.detach().clone().requires_grad_()
    expected = torch.autograd.grad(plain(leaf, factor), (leaf, factor), dy)
    found = torch.autograd.grad(y, (x, scale), dy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert ours.plan(x, scale).saved_bytes == 6 * 40 + 6 * 4 + 6 * 4


def test_special_values_never_hide() -> None:
    """A NaN stays one, an Inf becomes the largest value of its block; neither touches another block (numerics 1)."""
    x = torch.randn(2, 256)
    x[0, 3], x[1, 200] = torch.nan, torch.inf
    leaf = x.clone().requires_grad_()
    y = te.GELU(cache_quantized_input=True)(leaf)
    assert y.isnan().nonzero().tolist() == [[0, 3]]
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isnan().nonzero().tolist() == [[0, 3]]
    assert leaf.grad[1, 200] == 1


def test_a_cast_composes() -> None:
    """An FP32 input of a BF16 region is kept as it came; nothing is cast on its own."""
    x = torch.randn(4, 128, requires_grad=True)
    op = te.SiLU(cache_quantized_input=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, plan = op(x), op.plan(x)
    assert y.dtype is torch.bfloat16
    assert steps(plan, "forward_steps") == ["quantize", "cast + silu"]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


def test_as_an_op() -> None:
    op = te.SwiGLU(cache_quantized_input=True)
    assert op.config() != te.SwiGLU().config()
    assert repr(op) == "SwiGLU(cache_quantized_input=True)"
    assert repr(te.ClampedSwiGLU(2.0)) == "ClampedSwiGLU(limit=2.0)"
    assert repr(te.GELU()) == "GELU()"
    assert not op.state_dict()
    x = torch.randn(3, 8, requires_grad=True)
    for again in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert again.plan(x).saved_bytes == op.plan(x).saved_bytes
    with pytest.raises(te.PlanError, match="SwiGLU: cache_quantized_input"):
        te.SwiGLU(cache_quantized_input=1)  # type: ignore[arg-type]
    with pytest.raises(te.ShapeError, match="takes floating point"):
        op(torch.ones(3, 8, dtype=torch.int64))


def test_the_switch_is_part_of_the_key() -> None:
    op, x = te.GELU(), torch.randn(4, 128, requires_grad=True)
    before = op.plan(x).saved_bytes
    op.cache_quantized_input = True
    assert op.plan(x).saved_bytes == 4 * 128 + 4 * 4 < before


def test_nothing_is_kept_where_nobody_asks() -> None:
    op = te.GELU(cache_quantized_input=True)
    assert steps(op.plan(torch.randn(4, 8)), "forward_steps") == ["gelu"]
    with torch.no_grad():
        assert steps(op.plan(torch.randn(4, 8, requires_grad=True)), "forward_steps") == ["gelu"]


# -- in a pipeline


@pytest.mark.parametrize("name", RECIPES)
def test_products_read_what_they_read_without(name: str) -> None:
    """Only what goes through the activation's gradient changes: the second weight's gradient does not, bit for bit."""
    ours, plain = mlp(), mlp(cached=False)
    x = torch.randn(24, 256)
    seeds = []
    for model in (ours, plain):
        torch.manual_seed(1)
        for _ in range(2):  # delayed scaling has its scales at the second
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            y = step(model, leaf, RECIPES[name])
        seeds.append((y, gradients(model), state(model)))
    assert torch.equal(seeds[0][0], seeds[1][0])
    a, b = (s[1] for s in seeds)
    assert torch.equal(a["2.weight"], b["2.weight"])
    assert not torch.equal(a["0.weight"], b["0.weight"])
    forward = {n: t for n, t in seeds[0][2].items() if "grad_output" not in n}
    assert_same(forward, {n: seeds[1][2][n] for n in forward})


@pytest.mark.parametrize("name", RECIPES)
def test_the_record_is_all_that_stays(name: str) -> None:
    model, x = mlp(), torch.randn(24, 256, requires_grad=True)
    with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
        plan, text = model.plan(x), model.explain(x)
    formats = [v.format for s in plan.segments for v in s.saved_values]
    assert "e4m3 block 1x128 row" in formats
    assert 24 * 256 + 24 * 2 * 4 in saved(plan).values()
    assert "e4m3 block 1x128 row" in text
    assert "dequantize at 1 (recomputed)" in text
    backward = steps(plan, "backward_steps")
    assert backward.count("dequantize") == 1
    assert backward.index("dswiglu") == backward.index("dequantize") + 1, "dense for one step only"


def test_the_activation_is_not_rebuilt_from_the_record() -> None:
    """Rules that would rebuild the FP8 copy of h beside its gradient do not: the values would be others."""
    kernels = [composed(r) for r in RULES if r.stage == "phase" and not r.name.startswith("gemm")]
    x = torch.randn(32, 256, requires_grad=True)
    kept = {}
    for cached in (False, True):
        with only(*RULES, *kernels), te.autocast(recipe=te.recipe.DelayedScaling()):
            plan = mlp(cached=cached).plan(x)
        kept[cached] = sorted(saved(plan).values())
        assert steps(plan, "backward_steps").count("swiglu") == (not cached)
    h, gate_up = 32 * 128, 32 * 256
    assert kept[False] == [4, gate_up + 4, 4 * gate_up]  # the scale of h, x, gate and up
    assert kept[True] == [h + 4, gate_up + 4, gate_up + 32 * 2 * 4]


def test_a_record_in_the_same_format_is_shared() -> None:
    """With block scaling, the Linear beside the activation has quantized x already."""
    model = te.Sequential(
        te.Linear(128, 256),
        te.Branch(te.GELU(cache_quantized_input=True), te.Linear(256, 256)),
        te.Add(),
    )
    x = torch.randn(16, 128, requires_grad=True)
    with te.autocast(recipe=te.recipe.Float8BlockScaling()):
        plan = model.plan(x)
    texts = [n for s in plan.segments for f in s.forward_steps for n in f.nodes]
    assert sum("1x128" in n for n in texts) == 2, texts  # of x and of the first Linear's result


@pytest.mark.parametrize(
    "quantizer",
    [CACHE_FORMAT, te.MXFP8Quantizer(), te.NVFP4Quantizer(), te.Float8CurrentScalingQuantizer()],
)
def test_what_was_a_record_is_not_rounded_twice(quantizer: te.Quantizer) -> None:
    x = torch.randn(16, 128, requires_grad=True)
    ours, plain = (
        te.Sequential(te.Quantize(quantizer=quantizer), te.SiLU(cache_quantized_input=c))
        for c in (True, False)
    )
    assert steps(ours.plan(x), "forward_steps").count("quantize") == 1
    dy = torch.randn(16, 128)
    found, expected = (torch.autograd.grad(op(x), x, dy)[0] for op in (ours, plain))
    assert torch.equal(found, expected)


def test_a_dense_value_that_stays_anyway_is_enough() -> None:
    """Another reader of backward keeps x: the record is made from it again, and not saved."""
    model = te.Sequential(
        te.Linear(64, 128), te.Branch(te.GELU(cache_quantized_input=True), te.SiLU()), te.Add()
    )
    x = torch.randn(16, 64, requires_grad=True)
    kept = saved(model.plan(x))
    assert sorted(kept.values()) == [16 * 64 * 4, 16 * 128 * 4]


@pytest.mark.parametrize(
    ("recipe", "te_bytes"), [("delayed", 1), ("current", 1), ("block", 1 + 4 / 128)]
)
def test_bytes_of_a_llama_mlp(recipe: str, te_bytes: float) -> None:
    """Saved for backward, of what Transformer Engine's FP8 MLP saves (attention_contracts 15): BF16 of gate and up, and
    the copies that both products read, `te_bytes` an element. With the norm in front, both keep its input besides."""
    tokens, hidden, ffn = 8192, 4096, 14336
    with torch.device("meta"):
        mlp = [
            te.Linear(hidden, 2 * ffn, bias=False),
            te.SwiGLU(cache_quantized_input=True),
            te.Linear(ffn, hidden, bias=False),
        ]
        normed = te.Sequential(te.RMSNorm(hidden), *mlp).bfloat16()
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    theirs = tokens * (2 * 2 * ffn + te_bytes * (hidden + ffn))
    with te.autocast(recipe=RECIPES[recipe]):
        ours = sum(saved(te.Sequential(*mlp).plan(x)).values())
        ours_normed = sum(saved(normed.plan(x)).values())
    assert ours / theirs <= 0.65
    assert ours_normed / (theirs + tokens * 2 * hidden) == pytest.approx(0.67, abs=0.005)


def by_layer(model: te.Op, recipe: te.Recipe | None, cached: bool) -> dict[str, Tensor]:
    """Gradients of a language model's second step, one vector a layer."""
    for op in model.modules():
        if isinstance(op, te.SwiGLU):
            op.cache_quantized_input = cached
    tokens = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    for _ in range(2):  # delayed scaling has its scales at the second
        model.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
        loss.backward()
    layers: dict[str, list[Tensor]] = {}
    for name, gradient in gradients(model).items():
        layers.setdefault(".".join(name.split(".")[:2]), []).append(gradient.flatten().double())
    return {layer: torch.cat(parts) for layer, parts in layers.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_of_layers(name: str) -> None:
    """They point where they did to 0.999. Where the recipe itself rounds them coarser than that (E5M2, E2M1), a small
    change turns codes over; then the distance to the exact gradient says it, most of which is the recipe's."""
    torch.manual_seed(0)
    model = te.layers.llama_model(te.layers.LlamaConfig(64, 96, 256, 2, 4))
    exact = by_layer(twin(model), None, False)
    dense, cached = (by_layer(twin(model), RECIPES[name], on) for on in (False, True))
    assert len(exact) >= 4

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(a, b, dim=0))

    for layer, gradient in exact.items():
        if name in ("none", "block", "mxfp8"):
            assert cosine(cached[layer], dense[layer]) >= 0.999, layer
        by_recipe = 1 - cosine(dense[layer], gradient)
        assert 1 - cosine(cached[layer], gradient) <= 1.5 * by_recipe + 2e-4, layer


# -- recompute, segments, the runtime


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("way", ["Recompute", "checkpoint"])
def test_recompute_changes_no_bit(name: str, way: str) -> None:
    plain, again = mlp(), mlp()
    run = te.Recompute(again) if way == "Recompute" else lambda x: te.checkpoint(again, x)
    x = torch.randn(24, 256)
    for i in range(3):
        results = []
        for model, call in ((plain, plain), (again, run)):
            torch.manual_seed(i)
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            y = step(model, leaf, RECIPES[name], call)
            assert leaf.grad is not None
            results.append({"y": y, "x": leaf.grad} | gradients(model))
        assert_same(*results)
    assert_same(state(plain), state(again))


def test_a_region_keeps_no_record_and_makes_it_in_backward() -> None:
    x = torch.randn(24, 256, requires_grad=True)
    plan = te.Recompute(mlp()).plan(x)
    assert list(saved(plan).values()) == [24 * 256 * 4]
    assert "quantize" not in steps(plan, "forward_steps")
    assert steps(plan, "backward_steps").count("quantize") == 1


def test_segments_change_no_bit() -> None:
    x, ours, again = torch.randn(24, 256), mlp(), mlp()
    cut = te.Sequential(again[0], te.Cut(), again[1], te.Cut(), again[2])
    assert len(cut.plan(x).segments) == 3
    for model in (ours, cut):
        model(x).square().sum().backward()
    assert_same(gradients(ours), gradients(again))


def test_double_backward_is_an_error_that_says_so() -> None:
    x = torch.randn(4, 128, requires_grad=True)
    y = te.GELU(cache_quantized_input=True)(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(te.PlanError, match="double backward"):
        dx.sum().backward()


def test_backward_twice_and_two_forwards_in_flight() -> None:
    model, x = mlp(), torch.randn(2, 24, 256)
    first, second = (model(v.requires_grad_()).square().sum() for v in x)
    (a,) = torch.autograd.grad(first, model[0].weight, retain_graph=True)
    (b,) = torch.autograd.grad(second, model[0].weight)
    (c,) = torch.autograd.grad(first, model[0].weight)
    assert torch.equal(a, c)
    assert not torch.equal(a, b)


@pytest.fixture
def engine() -> Iterator[None]:
    """Within the test, the CPU has graphs: recordings are run again."""
    engines.ENGINES["cpu"] = Rerun()
    yield
    del engines.ENGINES["cpu"]


@pytest.mark.parametrize("name", ["none", "delayed", "block"])
def test_graphs_change_no_bit(name: str, engine: None) -> None:
    eager, model = mlp(), mlp()
    graphed = te.make_graphed(model)
    for i in range(4):
        results = []
        for module, run in ((eager, eager), (model, graphed)):
            module.zero_grad(set_to_none=True)
            leaf = torch.randn(24, 256, generator=torch.Generator().manual_seed(i)).requires_grad_()
            y = step(module, leaf, RECIPES[name], run)
            assert leaf.grad is not None
            results.append({"y": y.clone(), "x": leaf.grad.clone()} | gradients(module))
        assert_same(*results)
    assert graphed.captured == 1


def test_behind_attention_in_fp8() -> None:
    """Its output is a record already; that is what backward decodes."""
    recipe = te.recipe.DelayedScaling(fp8_dpa=True, fp8_mha=True)
    x = torch.randn(1, 16, 96, requires_grad=True)
    found = []
    for cached in (False, True):
        torch.manual_seed(0)
        model = te.Sequential(te.Attention(2, packed=True), te.SiLU(cache_quantized_input=cached))
        with te.autocast(recipe=recipe):
            y, plan = model(x), model.plan(x)
        formats = [v.format for s in plan.segments for v in s.saved_values]
        assert not any("block" in f for f in formats)
        found.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert torch.equal(*found)


def test_layers_hand_it_on() -> None:
    for activation in ("gelu", "swiglu", "clamped_swiglu"):
        layer = te.layers.LayerNormMLP(
            64, 128, activation=activation, activation_params={"cache_quantized_input": True}
        )
        plan = layer.plan(torch.randn(4, 64, requires_grad=True))
        assert "e4m3 block 1x128 row" in [v.format for s in plan.segments for v in s.saved_values]
