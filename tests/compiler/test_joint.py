"""Pointwise neighbours become one expression before differentiation (core contract 8)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te
from te_ops.compiler import Plan
from te_ops.compiler.joint import MAX_INPUTS
from te_ops.registry import REGISTRY, Rule


@te.pointwise
def own(x, k: float):  # type: ignore[no-untyped-def]
    return te.math.tanh(k * x) + x


def steps(plan: Plan, phase: str = "forward") -> list[str]:
    found = []
    for segment in plan.segments:
        for step in segment.forward_steps if phase == "forward" else segment.backward_steps:
            found.append(step.name)
    return found


def test_a_chain_is_one_expression_and_saves_its_input_once() -> None:
    model = te.Sequential(te.Linear(8, 8, bias=False), te.GELU(), te.ReLU(), te.GELU(), te.ReLU())
    plan = model.plan(torch.randn(4, 8))
    assert steps(plan) == ["gemm", "pointwise"]
    saved = [s for s in plan.segments[0].saved_values if not s.value.startswith("input")]
    assert len(saved) == 1


def test_a_users_function_matches_like_gelu() -> None:
    def shape(op: te.Op) -> list[tuple[str, tuple[str, ...]]]:
        plan = te.Sequential(te.Linear(8, 8), op, te.Linear(8, 8)).plan(torch.randn(4, 8))
        return [(n.rule, n.kernel) for n in plan.notes] + [
            (s.name, s.phase) for s in plan.segments[0].forward_steps
        ]

    assert shape(own(k=2.0)) == shape(te.GELU())


def test_two_functions_of_one_name_stay_apart() -> None:
    def make(factor: float) -> Any:
        @te.pointwise
        def softcap(x):  # type: ignore[no-untyped-def]
            return factor * x

        return softcap()

    class Both(te.Op):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = make(2.0), make(3.0)

        def emit(self, g: te.graph.Graph, x: te.graph.Value) -> te.graph.Value:
            return te.basic.structure.add(g, self.a.emit(g, x), self.b.emit(g, x))

    assert float(Both()(torch.ones(()).reshape(1, 1))) == 5.0


def test_composition_rounds_once() -> None:
    """BF16: x * 1.01 + 1 rounds at the end only, whatever the number of ops."""

    @te.pointwise
    def scaled(x):  # type: ignore[no-untyped-def]
        return x * 1.01

    @te.pointwise
    def shifted(x):  # type: ignore[no-untyped-def]
        return x + 1.0

    x = torch.linspace(-4, 4, 512).reshape(32, 16).bfloat16()
    y = te.Sequential(scaled(), shifted())(x)
    assert torch.equal(y, (x.float() * 1.01 + 1.0).bfloat16())
    assert not torch.equal(y, ((x.float() * 1.01).bfloat16().float() + 1.0).bfloat16())


def test_a_value_with_other_readers_is_not_absorbed() -> None:
    model = te.Sequential(te.GELU(), te.Branch(te.SiLU(), te.Linear(8, 8, bias=False)), te.Add())
    plan = model.plan(torch.randn(4, 8))
    assert sorted(steps(plan)) == ["gemm", "pointwise", "pointwise"]


def test_an_output_of_the_pipeline_is_not_absorbed() -> None:
    model = te.Sequential(te.GELU(), te.MakeExtraOutput(), te.SiLU())
    x = torch.randn(4, 8)
    y, h = model(x)
    assert torch.equal(h, te.GELU()(x))
    assert torch.equal(y, te.SiLU()(h))


def test_diamond_of_one_input_is_one_expression() -> None:
    model = te.Sequential(te.Branch(te.GELU(), te.SiLU()), te.Add())
    x = torch.randn(4, 8, requires_grad=True)
    assert steps(model.plan(x)) == ["pointwise"]
    model(x).sum().backward()
    y = x.detach().clone().requires_grad_()
    (torch.nn.functional.gelu(y, approximate="tanh") + torch.nn.functional.silu(y)).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_scopes_do_not_mix() -> None:
    model = te.Sequential(te.GELU(), te.Recompute(te.SiLU()), te.ReLU())
    assert steps(model.plan(torch.randn(4, 8))) == ["pointwise"] * 3


@pytest.mark.parametrize("gate", [te.SwiGLU, te.GEGLU, te.ReGLU])
def test_neighbours_of_a_gate_compose(gate: Any) -> None:
    """Bias, gate, scale and a residual are one step, with the right gradients."""
    model = te.Sequential(te.Bias(16), gate(), te.ConstantScale(0.5))
    torch.nn.init.normal_(model[0].bias)
    x = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    model.double()
    assert steps(model.plan(x)) == ["pointwise"]
    assert torch.autograd.gradcheck(lambda t: model(t), (x,), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleave", [None, 4])
def test_value_function_before_a_gate(interleave: int | None) -> None:
    options = {} if interleave is None else {"glu_interleave_size": interleave}
    try:
        gate = te.SwiGLU(**options)
    except TypeError:
        pytest.skip("the gate has no such option")
    model = te.Sequential(te.GELU(), te.ConstantScale(1.5), gate, te.SiLU())
    x = torch.randn(4, 16)
    h = x
    for op in model:
        h = op(h)
    torch.testing.assert_close(model(x), h)


def test_number_of_inputs_of_an_expression_is_limited() -> None:
    ops: list[te.Op] = []
    for _ in range(2 * MAX_INPUTS):
        ops.append(te.Bias(8))
    model = te.Sequential(*ops)
    plan = model.plan(torch.randn(4, 8))
    assert len(steps(plan)) >= 2
    for segment in plan.segments:
        for step in segment.forward_steps:
            assert len(step.reads) <= MAX_INPUTS
    x = torch.randn(4, 8)
    model(x).sum().backward()
    assert all(torch.equal(op.bias.grad, torch.full((8,), 4.0)) for op in ops)  # type: ignore[union-attr]


def test_gradients_of_composed_chains() -> None:
    chain = [
        te.GELU(),
        te.ConstantScale(0.7),
        own(k=1.5),
        te.Bias(8),
        te.SiLU(),
        te.Dropout(0.3, seed=1),
    ]
    model = te.Sequential(*chain).double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: model(t), (x,))
    model(x).sum().backward()
    separate = x.detach().clone().requires_grad_()
    h: Tensor = separate
    for op in chain:
        h = op(h)
    h.sum().backward()
    torch.testing.assert_close(x.grad, separate.grad)


# -- joint rules


def test_a_joint_rule_rewrites_before_differentiation() -> None:
    calls: list[str] = []

    def rewrite(work: Any) -> None:
        calls.append(work.name)
        assert not any(n.phase.is_backward for n in work.g.nodes)

    with REGISTRY.temporary(
        Rule("test.joint", ("gemm", "pointwise"), stage="joint", rewrite=rewrite)
    ):
        te.Sequential(te.Linear(8, 8), te.GELU()).plan(torch.randn(4, 8))
    assert calls == [""]


def test_joint_rules_need_a_rewrite_and_phase_rules_take_none() -> None:
    with pytest.raises(te.PlanError, match="rewrite"):
        Rule("test.joint", ("gemm",), stage="joint")
    with pytest.raises(te.PlanError, match="rewrite"):
        Rule("test.phase", ("gemm",), rewrite=lambda work: None)
