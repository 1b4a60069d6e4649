"""K15: fusing changes no answer and drops no operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.compiler.passes import passes
from te_ops.registry import REGISTRY
from tests.faults import cases
from tests.faults.cases import Case, some_modes

W = cases.WIDTH

PIPELINES: dict[str, Callable[[], list[nn.Module]]] = {
    "linear_gelu": lambda: [te.Linear(W, W), te.GELU()],
    "linear_swiglu": lambda: [te.Linear(W, 2 * W), te.SwiGLU()],
    "norm_linear": lambda: [te.RMSNorm(W), te.Linear(W, W)],
    "layernorm_linear_bias": lambda: [te.LayerNorm(W), te.Linear(W, W, bias=False), te.Bias(W)],
    "linear_bias_act_linear": lambda: [te.Linear(W, W), te.Bias(W), te.SReLU(), te.Linear(W, W)],
    "act_chain": lambda: [
        te.SiLU(),
        te.ConstantScale(0.5),
        te.Bias(W),
        te.GELU(),
        te.ConstantScale(2.0),
    ],
    "linear_dropout": lambda: [te.Linear(W, W), te.Dropout(0.3, seed=3), te.Bias(W)],
    "linear_softcap": lambda: [te.Linear(W, W), cases.softcap(cap=1.5), te.Linear(W, W)],
    "quantize_between": lambda: [
        te.Linear(W, W),
        te.Quantize(backward=True),
        te.GELU(),
        te.Linear(W, W),
    ],
    "double_linear": lambda: [te.Linear(W, W), te.Linear(W, W)],
    "residual": lambda: [
        te.Residual(te.RMSNorm(W), te.Linear(W, W), te.SiLU(), te.Linear(W, W)),
        te.RMSNorm(W),
    ],
    "shared_input": lambda: [te.Branch(te.Linear(W, W), te.Linear(W, W), te.GELU()), te.Add()],
    "l2_scale": lambda: [te.L2Normalization(), te.ConstantScale(3.0), te.Linear(W, W)],
}
every_pipeline = pytest.mark.parametrize("name", PIPELINES)


def one_by_one(modules: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """Every op is a plan of its own: nothing can fuse across them."""
    y: Any = x
    for m in modules:
        y = m(*y) if isinstance(y, tuple) else m(y)
        if isinstance(y, te.QuantizedTensor):  # alone, a Quantize returns the record
            y = y.dequantize()
    result: torch.Tensor = y
    return result


def results(name: str, recipe: te.Recipe | None, fused: bool, scale: float = 1.0) -> cases.Result:
    torch.manual_seed(0)
    modules = PIPELINES[name]()
    with torch.no_grad():
        for m in modules:
            for p in m.parameters():
                p.copy_(0.3 * torch.randn_like(p) + 0.1)
    s = te.Sequential(*modules)
    for _ in range(2):
        torch.manual_seed(1)
        x = (scale * torch.randn(5, W)).requires_grad_()
        s.zero_grad()
        with cases.within(recipe):
            y = s(x) if fused else one_by_one(modules, x)
        cases.backward([y])
    return cases.Result([y.detach()], [x.grad], {n: p.grad for n, p in s.named_parameters()})


@every_pipeline
@some_modes
def test_fused_equals_op_by_op(name: str, recipe: te.Recipe | None) -> None:
    """B081, with HYBRID and E4M3 gradients among the modes: format noise at most, not another format."""
    fused, alone = results(name, recipe, True), results(name, recipe, False)
    if recipe is None:
        cases.compare(fused, alone, 1e-6, dtypes=True)
        return
    noisy = isinstance(
        recipe, te.recipe.NVFP4BlockScaling
    )  # a code that flips is a third of a value
    if recipe in [cases.RECIPES[n] for n in (*cases.STOCHASTIC, "per_layer")]:
        # Other plans draw other random numbers, and an op alone has another path: see the next test.
        assert [t.shape for t in fused.outputs] == [t.shape for t in alone.outputs]
        return
    twice = name == "quantize_between"  # op by op, its gradient is rounded under two scales
    cases.compare(fused, alone, 0.25 if noisy else 0.12 if twice else 0.04, dtypes=True)


@every_pipeline
@some_modes
def test_rules_change_nothing(name: str, recipe: te.Recipe | None) -> None:
    """With every fusion rule switched off, the same numbers (an inner value may be rounded once less)."""
    fused = results(name, recipe, True)
    kept = passes._slots["fuse"][:]
    for made in kept:
        passes.remove("fuse", made)
    try:
        plain = results(name, recipe, True)
    finally:
        for made in kept:
            passes.add("fuse", made)
    cases.compare(fused, plain, 1e-6 if recipe is None else 0.04, dtypes=True)
    assert REGISTRY.rules  # there is something to switch off


@every_pipeline
def test_no_operand_is_dropped(name: str) -> None:
    """Every parameter of every pipeline moves the output and has a gradient that finite differences agree with."""
    torch.manual_seed(0)
    s = te.Sequential(*PIPELINES[name]()).double()
    x = torch.randn(3, W, dtype=torch.float64)
    with torch.no_grad():
        for p in s.parameters():
            p.copy_(0.3 * torch.randn_like(p) + 0.1)
    y = s(x)
    y.square().sum().backward()
    for pname, p in s.named_parameters():
        assert p.grad is not None
        direction = torch.randn_like(p)
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                p.add_(sign * 1e-5 * direction)
                values.append(s(x).square().sum())
                p.sub_(sign * 1e-5 * direction)
        slope = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close(
            (p.grad * direction).sum(), slope, rtol=1e-4, atol=1e-6, msg=pname
        )
        assert slope != 0, pname


@pytest.mark.parametrize("fp8_format", list(te.recipe.Format))
@pytest.mark.parametrize("kind", ["delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("case", cases.QUANTIZED, ids=lambda c: c.name)
def test_gradient_format_is_the_recipes(
    case: Case, kind: str, fp8_format: te.recipe.Format
) -> None:
    """B081: E5M2 gradients read as E4M3 would be off by far more than the format's noise."""
    make: Any = {
        "delayed": te.recipe.DelayedScaling,
        "current": te.recipe.Float8CurrentScaling,
        "block": te.recipe.Float8BlockScaling,
        "mxfp8": te.recipe.MXFP8BlockScaling,
    }[kind]
    recipe = make(fp8_format=fp8_format)
    op, xs = case.fresh(), case.data(16)
    for _ in range(2):
        actual = cases.step(op, xs, recipe)
    cases.compare(actual, case.expected(op, xs), 0.2)


@some_modes
def test_b083_a_returned_bias_is_added_once(recipe: te.Recipe | None) -> None:
    """(y + bias) is what a Linear that adds its bias gives, and the bias has the gradient of one sum."""
    torch.manual_seed(0)
    adds, returns = te.layers.Linear(W, W), te.layers.Linear(W, W, return_bias=True)
    with torch.no_grad():
        adds.bias.normal_()
    returns.load_state_dict(adds.state_dict())
    x, dy = torch.randn(5, W), torch.randn(5, W)
    with cases.within(recipe):
        wanted = adds(x)
        y, bias = returns(x)
    y = y + bias
    if recipe is None or not any(recipe is cases.RECIPES[n] for n in cases.STOCHASTIC):
        torch.testing.assert_close(y, wanted)
    y.backward(dy)
    wanted.backward(dy)
    torch.testing.assert_close(returns.bias.grad, dy.sum(0))
    torch.testing.assert_close(adds.bias.grad, dy.sum(0))


# -- B087


@pytest.mark.parametrize("recipe", cases.RECIPES.values(), ids=list(cases.RECIPES))
def test_norm_inside_a_recipe_keeps_its_statistics(recipe: te.Recipe) -> None:
    """Small x and a zero row: rstd is FP32 whatever the recipe, and gradients are those of plain training."""
    torch.manual_seed(0)
    s = te.Sequential(te.RMSNorm(64), te.Linear(64, 64))
    x = 1e-3 * torch.randn(6, 64)
    x[2] = 0
    x.requires_grad_()
    plain = cases.step(s, (x,), None)
    for _ in range(2):
        made = cases.step(s, (x,), recipe)
    cases.compare(made, plain, 0.5 if isinstance(recipe, te.recipe.NVFP4BlockScaling) else 0.15)
    for dtype in (torch.float32, torch.bfloat16):
        m = te.Sequential(te.RMSNorm(64, dtype=dtype), te.Linear(64, 64, dtype=dtype))
        with te.autocast(recipe=recipe):
            plan = m.plan(x.detach().to(dtype).requires_grad_())
        formats = {v.value: v.format for segment in plan.segments for v in segment.saved_values}
        rstd = [f for v, f in formats.items() if v.startswith("rmsnorm") and v.endswith(".1")]
        assert rstd == ["float32"], formats
