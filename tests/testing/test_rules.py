"""check_rule passes on right rules, says why one did not fire, and fails on rewrites that change
values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.reference.kernels import bind_composed
from te_ops.compiler.rewrite import Rewriter
from te_ops.compiler.work import Work
from te_ops.graph import Graph, Value, prim, same
from te_ops.registry import ArchRange, Call, Kernel, Rule, rules
from te_ops.testing import cases, check_rule


@prim("test_rule_cap", infer=same)
def CAP(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap)


class Cap(te.Op):
    def __init__(self, cap: float = 2.0) -> None:
        super().__init__()
        self.cap = cap

    def emit(self, g: Graph, x: Value) -> Value:
        return g.call(CAP, x, cap=self.cap)


RULE = Rule("test_gemm_cap", ("gemm", "pointwise*", "test_rule_cap"))


def model() -> te.Sequential:
    return te.Sequential(te.Linear(32, 32), Cap())


def test_a_rule_of_ones_own() -> None:
    with rules.temporary(RULE):
        plan = check_rule("test_gemm_cap", model(), rows=8)
        assert plan.forward[0].name == "test_gemm_cap"
        assert plan.forward[0].kernel == "reference.composed.test_gemm_cap"
    assert not any(
        step.name == "test_gemm_cap" for step in model().plan(torch.randn(2, 32)).forward
    )


@pytest.mark.parametrize(
    ("name", "pipeline", "recipe"),
    [
        ("gemm_epilogue", "mlp", "dense"),
        ("gemm_epilogue", "mlp", "mxfp8"),
        ("gemm_epilogue", "residual", "nvfp4"),
        ("gemm_together", "together", "dense"),
        ("wgrad_dbias", "linear", "dense"),
        ("norm_quantize", "norm_linear", "delayed"),
        ("norm_backward_sum", "residual", "current"),
        ("pointwise_quantize", "dropout", "nvfp4"),
    ],
)
def test_the_rules_of_the_package(name: str, pipeline: str, recipe: str) -> None:
    case = next(p for p in cases.PIPELINES if p.name == pipeline)
    plan = check_rule(
        name, case.make(), *((8, w) for w in case.widths), recipe=cases.RECIPES[recipe]
    )
    assert name in {step.name for step in (*plan.forward, *plan.backward)}


def test_exact_rules_are_compared_bit_for_bit() -> None:
    with rules.temporary(dataclasses.replace(RULE, exact=True)):
        check_rule("test_gemm_cap", model(), rows=(8, 3))


def test_a_rule_that_does_not_fire_fails_with_the_reason() -> None:
    with (
        rules.temporary(RULE),
        pytest.raises(AssertionError, match=r"did not fire.*Nothing matched the chain"),
    ):
        check_rule("test_gemm_cap", te.Linear(32, 32))
    refusing = Kernel(
        "test_gemm_cap", "test.refuses", bind_composed, refuse=lambda call: "never on Mondays"
    )
    with (
        rules.temporary(RULE, refusing),
        pytest.raises(AssertionError, match=r"did not fire.*never on Mondays"),
    ):
        check_rule("test_gemm_cap", model(), kernel="test.refuses")


def test_names_are_checked() -> None:
    with pytest.raises(
        AssertionError, match=r"no rule is named 'nope'; registered: .*gemm_epilogue"
    ):
        check_rule("nope", te.Linear(8, 8))
    with pytest.raises(AssertionError, match="is not a kernel of rule gemm_epilogue"):
        check_rule("gemm_epilogue", te.Linear(8, 8), kernel="reference")
    with pytest.raises(AssertionError, match="pass inputs or their shapes"):
        check_rule("pointwise_quantize", te.GELU())


def perturbed(factor: float, *, last: bool = True) -> Kernel:
    def bind(call: Call) -> Any:
        launch = bind_composed(call)

        def run(*xs: Any) -> Any:
            result = launch(*xs)
            if isinstance(result, tuple):
                i = len(result) - 1 if last else 0
                return tuple(r * factor if k == i else r for k, r in enumerate(result))
            return result * factor

        return run

    return Kernel("test_gemm_cap", "test.perturbed", bind, ArchRange("any"))


@pytest.mark.parametrize("factor", [1.01, 0.99, float("nan")])
@pytest.mark.parametrize("last", [True, False])
def test_a_kernel_off_by_one_percent_fails(factor: float, last: bool) -> None:
    with rules.temporary(RULE):
        with pytest.raises(AssertionError, match=r"test.perturbed at gemm"):
            check_rule("test_gemm_cap", model(), rows=8, kernel=perturbed(factor, last=last))
        check_rule("test_gemm_cap", model(), rows=8, kernel=perturbed(1.0))


def scaling(factor: float) -> Any:
    """A rewrite: test_rule_cap becomes test_rule_cap2, the same times `factor`."""

    def rewrite(work: Work) -> None:
        rewriter = Rewriter(work.g)
        for node in work.g.nodes:
            if node.prim is CAP:
                x = rewriter.map[node.inputs[0]]
                with rewriter.new.position(node):
                    rewriter.map[node.out] = rewriter.new.call(
                        CAP2, x, cap=node.attrs["cap"], factor=factor
                    )
            else:
                rewriter.copy(node)
        work.replace_graph(rewriter.finish(), rewriter.map)

    return rewrite


@prim("test_rule_cap2", infer=same)
def CAP2(x: torch.Tensor, cap: float, factor: float) -> torch.Tensor:
    return factor * cap * torch.tanh(x / cap)


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_joint_rules(recipe: str | None) -> None:
    value = cases.RECIPES[recipe] if recipe else None
    with rules.temporary(
        Rule("test_joint", ("test_rule_cap",), stage="joint", rewrite=scaling(1.0))
    ):
        plan = check_rule("test_joint", model(), rows=8, recipe=value)
        assert "test_rule_cap2" in {step.name for step in plan.forward}
    for factor in (1.01, 0.99):
        rule = Rule("test_joint", ("test_rule_cap",), stage="joint", rewrite=scaling(factor))
        with rules.temporary(rule), pytest.raises(AssertionError, match="rule test_joint"):
            check_rule("test_joint", model(), rows=8, recipe=value)
    idle = Rule("test_joint", ("test_rule_cap",), stage="joint", rewrite=lambda work: None)
    with rules.temporary(idle), pytest.raises(AssertionError, match="did not fire"):
        check_rule("test_joint", model(), rows=8)


def test_an_exact_joint_rule_must_keep_every_bit() -> None:
    rule = Rule(
        "test_joint", ("test_rule_cap",), stage="joint", exact=True, rewrite=scaling(1.0 + 2**-22)
    )
    with rules.temporary(rule), pytest.raises(AssertionError, match="fused against unfused"):
        check_rule("test_joint", model(), rows=8, dtypes=(torch.float32,))
