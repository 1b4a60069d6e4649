"""Gradients as nodes: dead code, fan-in order, phases (core contracts 2, 16, 26)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_ops as te
from te_ops.compiler import Plan, Work, passes
from te_ops.graph import Graph, Phase, Value
from te_ops.registry import REGISTRY, Call, Kernel


def backward(plan: Plan) -> list[tuple[str, str, str]]:
    return [(s.name, s.phase, s.path) for segment in plan.segments for s in segment.backward_steps]


def test_wgrad_nodes_carry_their_phase() -> None:
    plan = te.Sequential(te.Linear(8, 8), te.GELU(), te.Linear(8, 8)).plan(
        torch.randn(4, 8, requires_grad=True)
    )
    gemms = [(phase, path) for name, phase, path in backward(plan) if name == "gemm"]
    assert sorted(gemms) == [("dgrad", "0"), ("dgrad", "2"), ("wgrad", "0"), ("wgrad", "2")]
    reduces = {phase for name, phase, _ in backward(plan) if name == "reduce"}
    assert reduces == {"wgrad"}


def test_dgrad_never_reads_wgrad() -> None:
    """So a pass or an executor may run the wgrads later."""
    found: list[tuple[Phase, Phase]] = []

    def check(work: Work) -> None:
        for node in work.g.nodes:
            for value in node.inputs:
                found.append((node.phase, work.g.node(value).phase))

    for slot in ("differentiate", "quantize", "remat"):
        added = passes.add(slot, check)
        try:
            with te.autocast(recipe=te.recipe.NVFP4BlockScaling()):
                te.Sequential(
                    te.RMSNorm(32), te.Linear(32, 64), te.SwiGLU(), te.Residual(te.Linear(32, 32))
                ).plan(torch.randn(32, 32, requires_grad=True))
        finally:
            passes.remove(slot, added)
    assert (Phase.WGRAD, Phase.DGRAD) in found
    assert (Phase.DGRAD, Phase.WGRAD) not in found
    assert (Phase.FORWARD, Phase.DGRAD) not in found


def test_first_layer_without_input_gradient_has_no_dgrad() -> None:
    plan = te.Sequential(te.Linear(8, 8), te.GELU()).plan(torch.randn(4, 8))
    assert [p for n, p, _ in backward(plan) if n == "gemm"] == ["wgrad"]


def test_phases_do_not_depend_on_the_gradient_of_the_input() -> None:
    """Recipes and split accumulation go by phase: an input's gradient may not change it."""
    model = te.Sequential(te.Linear(8, 8), te.GELU(), te.Linear(8, 8))
    found = [backward(model.plan(torch.randn(4, 8, requires_grad=grad))) for grad in (True, False)]
    assert [s for s in found[0] if s != ("gemm", "dgrad", "0")] == found[1]


@pytest.mark.parametrize("layers", [1, 3])
def test_frozen_pipeline_has_no_wgrad_and_saves_no_activation_of_a_linear(layers: int) -> None:
    model = te.Sequential(*(te.Linear(8, 8, bias=False) for _ in range(layers))).requires_grad_(
        False
    )
    plan = model.plan(torch.randn(4, 8, requires_grad=True))
    assert backward(plan) == [("gemm", "dgrad", str(i)) for i in reversed(range(layers))]
    assert plan.saved_bytes == 0  # weights are parameters, kept anyway


def test_frozen_below_a_trainable_layer() -> None:
    model = te.Sequential(
        te.Linear(8, 8).requires_grad_(False), te.GELU(), te.Linear(8, 8, bias=False)
    )
    assert backward(model.plan(torch.randn(4, 8))) == [("gemm", "wgrad", "2")]


# -- fan-in


def fan_in(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = values[0].float()
    for value in values[1:]:
        total = total + value.float()
    return total.to(dtype)


class Scaled(te.Op):
    """Its gradient is its factor times dy: readers that can be told apart."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def emit(self, g: Graph, x: Value) -> Value:
        return g.call(SCALED, x, factor=self.factor)


@te.graph.prim("test_scaled", infer=te.graph.same)
def SCALED(x: Tensor, factor: float) -> Tensor:
    return x * factor


@te.graph.gradient(SCALED)
def _scaled_gradient(g: Graph, node: te.graph.Node, dy: Value) -> tuple[Value]:
    return (g.call(SCALED, dy, factor=node.factor),)


def test_fan_in_is_one_sum_in_emission_order_rounded_once() -> None:
    factors = [1.0, 1.0 / 3.0, 1e-2, -0.97, 0.3]
    model = te.Branch(*(Scaled(f) for f in factors))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 64, dtype=dtype, requires_grad=True)
        dys = [torch.randn(64, 64, dtype=dtype) for _ in factors]
        torch.autograd.backward(model(x), dys)
        parts = [dy * f for dy, f in zip(dys, factors, strict=True)]
        assert torch.equal(x.grad, fan_in(parts, dtype))
        if dtype is torch.float32:
            assert not torch.equal(x.grad, fan_in(parts[::-1], dtype))
        else:
            assert not torch.equal(x.grad, sum(parts[1:], parts[0]))
    plan = model.plan(x)
    assert [n for n, _, _ in backward(plan)].count("sum") == 1


def test_fan_in_with_an_output_and_a_repeated_operand() -> None:
    """One reader takes the value three times, and it is an output too: that part comes last."""

    @te.graph.prim("test_three", infer=lambda a, b, c: a.like(), replace=True)
    def THREE(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a + b + c

    @te.graph.gradient(THREE)
    def rule(g: Graph, node: te.graph.Node, dy: Value) -> tuple[Value, ...]:
        return tuple(g.call(SCALED, dy, factor=f) for f in (1.0, 1e-2, -0.987))

    class Op(te.Op):
        def emit(self, g: Graph, x: Value) -> tuple[Value, Value]:
            h = g.call(SCALED, x, factor=1.0)
            return g.call(THREE, h, h, h), h

    x = torch.randn(64, 64, requires_grad=True)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    torch.autograd.backward(Op()(x), [a, b])
    assert torch.equal(x.grad, fan_in([a * 1.0, a * 1e-2, a * -0.987, b], torch.float32))


def test_grouping_does_not_change_the_fan_in() -> None:
    model = te.Sequential(
        te.Branch(te.Linear(32, 32), te.Linear(32, 32), te.Linear(32, 32)), te.Add()
    ).bfloat16()
    x = torch.randn(32, 32).bfloat16()

    def gradient() -> Tensor:
        leaf = x.clone().requires_grad_()
        model(leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    plain = gradient()
    from te_ops.backends.reference import composed

    with REGISTRY.temporary(composed("gemm_sum"), composed("gemm_together")):
        torch.testing.assert_close(gradient().float(), plain.float(), atol=2e-2, rtol=2e-2)


# -- user rules


def test_a_gradient_rule_may_leave_inputs_out() -> None:
    @te.graph.prim("test_weighted", infer=lambda x, w: x.like(), replace=True)
    def WEIGHTED(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    @te.graph.gradient(WEIGHTED)
    def rule(g: Graph, node: te.graph.Node, dy: Value) -> tuple[Value | None, ...]:
        return g.call(WEIGHTED, dy, node.inputs[1]), None

    class Op(te.Op):
        def emit(self, g: Graph, x: Value, w: Value) -> Value:
            return g.call(WEIGHTED, x, w)

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    Op()(x, w).sum().backward()
    assert torch.equal(x.grad, w.detach())
    assert w.grad is None


def test_random_primitives_need_a_rule() -> None:
    @te.graph.prim("test_noise", infer=lambda x, seed, **_: x.like(), nature="random", replace=True)
    def NOISE(x: Tensor, seed: Tensor, stream: int) -> Tensor:
        return x + stream

    class Op(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            return g.call(NOISE, x, g.seed(), stream=g.stream())

    with pytest.raises(te.PlanError, match="test_noise is random and has no gradient rule"):
        Op()(torch.ones(2, requires_grad=True))
    assert torch.equal(Op()(torch.ones(2)), torch.ones(2))


def test_shape_only_readers_save_nothing() -> None:
    """The gradient of a Reshape needs the shape of its input, not the input."""
    model = te.Sequential(
        te.Linear(8, 8, bias=False), te.Reshape((-1, 4)), te.Linear(4, 4, bias=False)
    )
    x = torch.randn(6, 8)
    plan = model.plan(x)
    assert sorted(s.bytes for s in plan.segments[0].saved_values) == [
        6 * 8 * 4,
        6 * 8 * 4,
    ]  # x and the second input
    first = model(x)
    again = model(torch.randn(10, 8))  # another row count of the class: nothing was baked in
    (first.sum() + again.sum()).backward()


def test_mean_reduced_loss_follows_the_row_count() -> None:
    class Mean(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            return g.call(MEAN, x)

    model, op = te.Sequential(te.Linear(4, 4), Mean()), nn.Linear(4, 4)
    op.load_state_dict(model[0].state_dict())
    for rows in (2, 6, 10):
        x = torch.randn(rows, 4)
        model.zero_grad()
        op.zero_grad()
        model(x).backward()
        op(x).mean().backward()
        torch.testing.assert_close(model[0].weight.grad, op.weight.grad)


@te.graph.prim("test_mean", infer=lambda x: te.graph.Spec((), x.dtype))
def MEAN(x: Tensor) -> Tensor:
    return x.mean()


def test_integer_inputs_get_no_gradient() -> None:
    class Pick(te.Op):
        def emit(self, g: Graph, x: Value, index: Value) -> Value:
            return g.call(PICK, x, index)

    x, index = torch.randn(4, 4, requires_grad=True), torch.tensor([2, 0])
    Pick()(x, index).sum().backward()
    assert x.grad is not None
    assert x.grad.sum() == 8


@te.graph.prim("test_pick", infer=lambda x, i: te.graph.Spec((*i.shape, x.shape[1]), x.dtype))
def PICK(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


def test_kernels_see_backward_calls_like_forward_ones() -> None:
    seen: list[tuple[str, bool]] = []

    def bind(call: Call) -> Any:
        seen.append((call.node.attrs["layout"], call.node.phase.is_backward))
        return REGISTRY.find("reference").bind(call)

    with REGISTRY.temporary(Kernel("gemm", "test.gemm", bind, priority=99)):
        te.Linear(8, 8)(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert sorted(seen) == [("nn", True), ("nt", False), ("tn", True)]
