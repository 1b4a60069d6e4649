"""What each recipe quantizes and saves, by gradient mask (contracts 3, 11, 22; numerics 24)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_ops as te
from te_ops.backends.reference.kernels import composed
from te_ops.compiler import Plan, Step
from te_ops.graph import Phase
from te_ops.recipe import Role
from te_ops.registry import REGISTRY
from tests.runtime.cases import RECIPES

QUANTIZED = {name: recipe for name, recipe in RECIPES.items() if recipe is not None}
ROWS, WIDTH, HIDDEN = 256, 256, 512


def plan(model: te.Op, x: Tensor, recipe: te.Recipe, **kwargs: Any) -> Plan:
    with te.autocast(recipe=recipe, **kwargs):
        return model.plan(x)


def pipeline() -> te.Sequential:
    """BF16; operands: x, W0, the norm's output (nothing cheap rebuilds it) and W1."""
    first, last = te.Linear(WIDTH, HIDDEN, bias=False), te.Linear(HIDDEN, WIDTH, bias=False)
    return te.Sequential(first, te.RMSNorm(HIDDEN), last).bfloat16()


def written(made: Plan, phase: str) -> list[tuple[str, frozenset[str]]]:
    """(path, usages) of each quantize step of a phase, in order."""
    found = []
    for segment in made.segments:
        steps: tuple[Step, ...] = (
            segment.forward_steps if phase == "forward" else segment.backward_steps
        )
        for step in steps:
            if step.name == "quantize":
                usages = frozenset(w.rpartition(".")[2] for w in step.writes) & {"row", "col"}
                found.append((step.path, usages))
    return found


ROW, COL, BOTH = frozenset({"row"}), frozenset({"col"}), frozenset({"row", "col"})
X = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", QUANTIZED)
def test_usages_with_all_gradients(name: str) -> None:
    made = plan(pipeline(), X.clone().requires_grad_(), QUANTIZED[name])
    assert written(made, "forward") == [("0", BOTH), ("0", BOTH), ("2", BOTH), ("2", BOTH)]
    assert written(made, "backward") == [("2", BOTH), ("0", BOTH)]


@pytest.mark.parametrize("name", QUANTIZED)
def test_usages_without_input_gradient(name: str) -> None:
    """The first dgrad is dead, and with it the column of its weight and the row of its dy."""
    made = plan(pipeline(), X, QUANTIZED[name])
    assert written(made, "forward") == [("0", BOTH), ("0", ROW), ("2", BOTH), ("2", BOTH)]
    assert written(made, "backward") == [("2", BOTH), ("0", COL)]


@pytest.mark.parametrize("name", QUANTIZED)
def test_usages_without_grad_mode(name: str) -> None:
    with torch.no_grad():
        made = plan(pipeline(), X, QUANTIZED[name])
    assert written(made, "forward") == [("0", ROW), ("0", ROW), ("2", ROW), ("2", ROW)]
    assert made.saved_bytes == 0
    assert made.segments[0].backward_steps == ()


@pytest.mark.parametrize("name", QUANTIZED)
def test_usages_with_frozen_weights(name: str) -> None:
    """No wgrad, no column of x or dy; the column of W is kept for dgrad."""
    model = pipeline().requires_grad_(False)
    made = plan(model, X.clone().requires_grad_(), QUANTIZED[name])
    assert written(made, "forward") == [("0", ROW), ("0", BOTH), ("2", ROW), ("2", BOTH)]
    assert written(made, "backward") == [("2", ROW), ("0", ROW)]
    gemms = [s.nodes for s in made.segments[0].backward_steps if s.name == "gemm"]
    assert [name.partition("(")[0] for (name,) in gemms] == ["gemm_nn", "gemm_nn"]


@pytest.mark.parametrize("name", QUANTIZED)
def test_usages_with_one_frozen_weight(name: str) -> None:
    model = pipeline()
    model[2].requires_grad_(False)
    made = plan(model, X, QUANTIZED[name])
    assert written(made, "forward") == [("0", BOTH), ("0", ROW), ("2", ROW), ("2", BOTH)]
    assert written(made, "backward") == [("2", ROW), ("0", COL)]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
def test_saved_operands_are_columns_of_half_the_bytes(name: str, frozen: bool) -> None:
    model = pipeline().requires_grad_(not frozen)
    made = plan(model, X.clone().requires_grad_(), QUANTIZED[name])
    operands = [
        s for segment in made.segments for s in segment.saved_values if s.reference_bytes != s.bytes
    ]
    assert len(operands) == (2 if frozen else 4)
    assert all("col" in s.format for s in operands)
    assert sum(s.bytes for s in operands) <= 0.55 * sum(s.reference_bytes for s in operands)
    shapes = {"weights": 2 * WIDTH * HIDDEN, "inputs": 0 if frozen else ROWS * (WIDTH + HIDDEN)}
    assert sum(s.reference_bytes for s in operands) == 2 * sum(shapes.values())


def test_what_backward_rebuilds_is_quantized_again_and_not_saved() -> None:
    """The gate's output comes cheaply from its input, which its own gradient needs anyway."""
    model = te.Sequential(
        te.Linear(WIDTH, 2 * HIDDEN, bias=False), te.SwiGLU(), te.Linear(HIDDEN, WIDTH, bias=False)
    )
    model = model.bfloat16()
    kept = plan(model, X, te.recipe.MXFP8BlockScaling())
    assert written(kept, "forward")[2] == ("2", BOTH)  # on its own it would cost a pass
    assert len(kept.segments[0].saved_values) == 4
    with REGISTRY.temporary(composed("pointwise_together")):
        made = plan(model, X, te.recipe.MXFP8BlockScaling())
    assert "quantize(mxfp8 e4m3, row)" in made.segments[0].forward_steps[3].nodes
    (step,) = [s for s in made.segments[0].backward_steps if s.name == "pointwise_together"]
    assert [n.partition("(")[0] for n in step.nodes] == [
        "swiglu",
        "quantize",
        "dswiglu",
        "quantize",
    ]
    saved = made.segments[0].saved_values
    assert [s.reference_bytes for s in saved if s.format == "bfloat16"] == [2 * ROWS * 2 * HIDDEN]
    assert len(saved) == 3  # x and W2 in columns, the gate's input in BF16


def test_a_value_quantized_for_two_readers_is_one_step() -> None:
    """q, k and v read one x: one quantize; with one of them in another format, two."""
    model = te.Sequential(
        te.Branch(te.Linear(64, 64), te.Linear(64, 64), te.Linear(64, 64)), te.Add()
    )
    x = torch.randn(64, 64)
    made = plan(model, x, te.recipe.MXFP8BlockScaling())
    assert len([s for s in written(made, "forward") if s[0] == "0.0"]) == 2  # x and W
    assert len([s for s in written(made, "forward") if s[0] == "0.1"]) == 1  # W
    mixed = te.recipe.PerLayer(
        layers={"0.1": te.recipe.Float8CurrentScaling()}, default=te.recipe.MXFP8BlockScaling()
    )
    assert len([s for s in written(plan(model, x, mixed), "forward") if s[0] == "0.1"]) == 2


def test_stochastic_rounding_quantizes_dy_once() -> None:
    made = plan(
        te.Linear(64, 64), torch.randn(64, 64, requires_grad=True), te.recipe.NVFP4BlockScaling()
    )
    assert written(made, "backward") == [("", BOTH)]


@pytest.mark.parametrize("between", [te.Identity, te.Cut])
def test_every_stochastic_quantize_has_a_seed_of_its_own(
    between: type[te.Op], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In deep pipelines too, and across segments, which share the seed of the call."""
    seeds: list[int] = []
    records = te.NVFP4Quantizer.records

    def spy(self: te.NVFP4Quantizer, x: Tensor, **options: Any) -> Any:
        if self.stochastic:
            seeds.append(int(options["seed"]))
        return records(self, x, **options)

    monkeypatch.setattr(te.NVFP4Quantizer, "records", spy)
    depth = 40
    model = te.Sequential(*(m for _ in range(depth) for m in (te.Linear(16, 16), between())))
    with te.autocast(recipe=te.recipe.NVFP4BlockScaling()):
        y = model(torch.randn(16, 16))
    y.sum().backward()
    assert len(seeds) == len(set(seeds)) == depth


def test_row_and_column_may_have_different_quantizers() -> None:
    hybrid = te.HybridQuantizer(te.MXFP8Quantizer(), te.Float8BlockQuantizer())
    recipe = te.recipe.CustomRecipe(
        qfactory=lambda role: hybrid if role.operand == "input" else te.MXFP8Quantizer()
    )
    made = plan(te.Linear(128, 128), torch.randn(128, 128), recipe)
    assert written(made, "forward")[0][1] == BOTH
    assert written(made, "backward") == [("", COL)]


# -- roles


def test_roles_of_a_linear() -> None:
    seen: set[Role] = set()

    def factory(role: Role) -> None:
        seen.add(role)

    model = te.Sequential(te.GELU(), te.Linear(32, 32))
    with te.autocast(recipe=te.recipe.CustomRecipe(qfactory=factory)):
        model(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert {(r.prim, r.phase, r.operand, r.path) for r in seen} == {
        ("gemm", Phase.FORWARD, "input", "1"),
        ("gemm", Phase.FORWARD, "weight", "1"),
        ("gemm", Phase.DGRAD, "grad_output", "1"),
        ("gemm", Phase.DGRAD, "weight", "1"),
        ("gemm", Phase.WGRAD, "grad_output", "1"),
        ("gemm", Phase.WGRAD, "input", "1"),
    }


@pytest.mark.parametrize("operand", ["q", "k", "v", "s", "p", "o", "do", "dp", "ds"])
def test_roles_hold_attention_operands(operand: str) -> None:
    role = Role(
        "attention_backward" if operand.startswith("d") else "attention",
        Phase.DGRAD,
        operand,
        "3.core",
    )
    for recipe in QUANTIZED.values():
        assert recipe.quantizer(role) is None  # attention operands stay dense unless a recipe asks
    custom = te.recipe.CustomRecipe(
        qfactory=lambda r: te.MXFP8Quantizer() if r.operand == operand else None
    )
    assert custom.quantizer(role) == te.MXFP8Quantizer()


def test_attention_operands_reach_the_recipe() -> None:
    seen: set[str] = set()

    def factory(role: Role) -> None:
        if role.prim.startswith("attention"):
            seen.add(role.operand)

    attention = te.Attention(2)
    qkv = [torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3)]
    with te.autocast(recipe=te.recipe.CustomRecipe(qfactory=factory)):
        attention(*qkv).sum().backward()
    assert {"q", "k", "v"} <= seen


def test_a_primitive_of_the_users_lists_its_roles() -> None:
    """A table of roles is all that a new primitive needs to be quantized."""

    @te.graph.prim(
        "test_scores", infer=lambda a, b: te.graph.Spec((*a.shape[:-1], b.shape[0]), a.dtype),
        roles=lambda node: (("q", "row"), ("k", "row")), replace=True,
    )  # fmt: skip
    def SCORES(a: Any, b: Any) -> Tensor:
        a, b = (t if isinstance(t, Tensor) else t.dequantize() for t in (a, b))
        return a @ b.t()

    class Scores(te.Op):
        def __init__(self) -> None:
            super().__init__()
            self.keys = nn.Parameter(torch.randn(32, 32))

        def emit(self, g: te.graph.Graph, x: te.graph.Value) -> te.graph.Value:
            return g.call(SCORES, x, g.param(self.keys))

    recipe = te.recipe.CustomRecipe(
        qfactory=lambda role: te.MXFP8Quantizer() if role.operand == "k" else None
    )
    op, x = Scores(), torch.randn(32, 32)
    with torch.no_grad(), te.autocast(recipe=recipe):
        y = op(x)
    torch.testing.assert_close(
        y, x @ te.quantize(op.keys.detach(), te.MXFP8Quantizer()).dequantize().t()
    )


# -- numerics 24 and backward_override


def linear_by_hand(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    return dy @ w, dy.t() @ x


@pytest.mark.parametrize("override", ["high_precision", "dequantized", None])
def test_operand_read_dense_in_backward(override: Any) -> None:
    """The backward GEMMs read dequantized records, or the originals if the recipe says so."""
    op, x, dy = (
        te.Linear(32, 32, bias=False),
        torch.randn(32, 32, requires_grad=True),
        torch.randn(32, 32),
    )
    if override is None:
        recipe: te.Recipe = te.recipe.CustomRecipe(
            qfactory=lambda role: None if role.phase.is_backward else te.MXFP8Quantizer()
        )
    else:
        recipe = te.recipe.MXFP8BlockScaling(backward_override=override)
    with te.autocast(recipe=recipe):
        y = op(x)
    y.backward(dy)
    q = te.MXFP8Quantizer()
    xq, wq = (te.quantize(t.detach(), q).dequantize() for t in (x, op.weight))
    torch.testing.assert_close(y.detach(), xq @ wq.t())
    xb, wb = (x.detach(), op.weight.detach()) if override == "high_precision" else (xq, wq)
    dx, dw = linear_by_hand(xb, wb, dy)
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(op.weight.grad, dw)


def test_dequantized_override_saves_the_records() -> None:
    x = X.clone().requires_grad_()
    for override, limit in (("dequantized", 0.55), ("high_precision", 1.0)):
        made = plan(pipeline(), x, te.recipe.MXFP8BlockScaling(backward_override=override))
        saved = [s for s in made.segments[0].saved_values if "gemm" not in s.value]
        total, reference = sum(s.bytes for s in saved), sum(s.reference_bytes for s in saved)
        assert total <= limit * reference


def test_quantize_then_linear_in_one_format_rounds_once() -> None:
    model = te.Sequential(te.Quantize(), te.Linear(32, 32, bias=False))
    plain = te.Linear(32, 32, bias=False)
    plain.weight = model[1].weight
    x = torch.randn(32, 32)
    for name, recipe in QUANTIZED.items():
        if name == "delayed":
            continue  # the explicit quantize and the linear have a state each
        with te.autocast(recipe=recipe):
            assert torch.equal(model(x), plain(x)), name
    text = "\n".join(str(s) for s in plan(model, x, te.recipe.Float8CurrentScaling()).notes)
    assert "second rounding" not in text


def test_bias_gradient_sums_the_unquantized_gradient() -> None:
    op, dy = te.Linear(32, 32), torch.randn(32, 32)
    with te.autocast(recipe=te.recipe.NVFP4BlockScaling()):
        y = op(torch.randn(32, 32))
    y.backward(dy)
    torch.testing.assert_close(op.bias.grad, dy.sum(0))


def test_accumulation_is_said_per_gemm() -> None:
    kinds: list[str] = []

    def bind(call: Any) -> Any:
        kinds.append(f"{call.node.attrs['layout']} {call.node.attrs['accumulation']}")
        return te.registry.REGISTRY.find("reference").bind(call)

    from te_ops.registry import REGISTRY, Kernel

    with REGISTRY.temporary(Kernel("gemm", "test.kinds", bind, priority=99)):
        for recipe, split in (
            (te.recipe.Float8CurrentScaling(), "fast"),
            (te.recipe.Float8BlockScaling(), "split"),
        ):
            kinds.clear()
            plan(te.Linear(128, 128), torch.randn(128, 128, requires_grad=True), recipe)
            assert sorted(kinds) == sorted([f"nt {split}", "nn split", "tn split"])


# -- effects (contract 11)


def test_frozen_weights_keep_no_gradient_quantize_alive() -> None:
    """Delayed scaling observes dy only where dy is read."""
    model = te.Sequential(te.Linear(32, 32).requires_grad_(False), te.Linear(32, 32))
    made = plan(model, torch.randn(32, 32), QUANTIZED["delayed"])
    assert [path for path, _ in written(made, "backward")] == ["1"]


def test_twice_used_weight_is_one_sum() -> None:
    op = te.Linear(16, 16, bias=False)
    made = te.Sequential(op, te.GELU(), op).plan(torch.randn(4, 16))
    sums = [s for s in made.segments[0].backward_steps if s.name == "sum"]
    assert len(sums) == 1
    assert sums[0].phase == "wgrad"
