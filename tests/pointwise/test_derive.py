"""Derivatives: against FP64 autograd at special values, against finite differences, and in size."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import te_ops.math as tm
from te_ops.pointwise import Const, Expr, Fn, Input, Pair, activations, elementwise, evaluate
from te_ops.pointwise.expr import walk

X = Input(0)
TensorFn = Callable[..., torch.Tensor]

POINTS = [
    *(0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 1.0, -1.0, 7.0, -7.0, 20.0, -20.0, 50.0, -50.0),
    *(120.0, -120.0, 1e4, -1e4, 1e20, -1e20, 1e38, -1e38, math.inf, -math.inf, math.nan),
]


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, linear = x.chunk(2, -1)
    return gate, linear


def qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def gated(act: TensorFn) -> TensorFn:
    def function(x: torch.Tensor) -> torch.Tensor:
        gate, linear = split(x)
        return act(gate) * linear

    return function


def clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, linear = split(x)
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (linear.clamp(-7.0, 7.0) + 1.0)


def situglu(x: torch.Tensor) -> torch.Tensor:
    gate, linear = split(x)
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(linear / 25)


# Written with torch's own functions, independent of the expressions.
REFERENCES: dict[str, TensorFn] = {
    "gelu": gelu,
    "gelu_erf": F.gelu,
    "relu": torch.relu,
    "srelu": srelu,
    "qgelu": qgelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": lambda x: F.softplus(x, 1.0, 50.0),
    "glu": gated(torch.sigmoid),
    "geglu": gated(gelu),
    "qgeglu": gated(qgelu),
    "reglu": gated(torch.relu),
    "sreglu": gated(srelu),
    "swiglu": gated(F.silu),
    "clamped_swiglu": clamped_swiglu,
    "situglu": situglu,
}


def points(fn: Fn, dtype: torch.dtype) -> torch.Tensor:
    """Every point, or every pair of points."""
    base = torch.tensor(POINTS, dtype=dtype)
    if fn.inputs[0] == "value":
        return base
    gate, linear = torch.meshgrid(base, base, indexing="ij")
    return torch.stack((gate.flatten(), linear.flatten()), -1)


def autograd(function: TensorFn, *inputs: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """FP64 gradient with respect to the first input, one row at a time so that rows cannot mix."""
    x = inputs[0].double().requires_grad_()
    y = function(x, *(t.double() for t in inputs[1:]))
    (grad,) = torch.autograd.grad(y, x, dy.double().expand_as(y))
    return grad


def agree(actual: torch.Tensor, truth: torch.Tensor, rtol: float, atol: float) -> None:
    """Equal where the truth is finite; the same Inf; where torch gives NaN any value is as good."""
    known = ~truth.isnan()
    torch.testing.assert_close(
        actual[known].double(), truth[known], rtol=rtol, atol=atol, equal_nan=True
    )


@pytest.mark.parametrize("name", REFERENCES)
def test_values_at_special_points(name: str) -> None:
    fn = activations[name]()
    x = points(fn, torch.float64)
    actual, truth = evaluate(fn, x), REFERENCES[name](x)
    torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("upstream", [1.0, -3.0])
def test_gradients_at_special_points(name: str, upstream: float) -> None:
    fn = activations[name]()
    x = points(fn, torch.float64)
    x = x[~x.isnan().reshape(len(x), -1).any(-1)]  # torch.clamp has gradient 0 there; see below
    dy = torch.full((1,), upstream, dtype=torch.float64)
    truth = autograd(REFERENCES[name], x, dy=dy)
    actual = evaluate(fn.grad(0), x, dy)
    # torch's own s (1 - s) cancels, which the linear half magnifies.
    finite = torch.where(x.isfinite(), x.abs(), 0.0).reshape(len(x), -1).amax(-1)
    noise = 1e-12 * (1.0 + finite).reshape(-1, *[1] * (x.dim() - 1)).expand_as(x)
    known = truth.isfinite()
    error = (actual - truth).abs()[known]
    assert (error <= 1e-9 * truth[known].abs() + noise[known]).all()
    assert torch.equal(actual[truth.isinf()], truth[truth.isinf()])


@pytest.mark.parametrize("name", REFERENCES)
def test_a_finite_point_has_a_finite_fp32_gradient(name: str) -> None:
    """And it is the FP64 one: nothing overflows or cancels on the way."""
    fn = activations[name]()
    x = points(fn, torch.float64)
    x = x[(x.abs() <= 1e4).reshape(len(x), -1).all(-1)]
    dy = torch.ones(1)
    truth = evaluate(fn.grad(0), x, dy.double())
    actual = evaluate(fn.grad(0), x.float(), dy)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual.double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFERENCES)
def test_nan_reaches_the_gradient(name: str) -> None:
    """A NaN input passes a gradient that is NaN, or for a kink the whole gradient; never 0."""
    fn = activations[name]()
    x = torch.full((1,) if fn.inputs[0] == "value" else (2,), math.nan)
    grad = evaluate(fn.grad(0), x, torch.ones(1))
    assert (grad.isnan() | (grad == 1.0)).all()


@pytest.mark.parametrize("name", ["scaled_swiglu", "scaled_srelu", "scaled_clamped_swiglu"])
def test_scaled_variants(name: str) -> None:
    fn = activations[name]()
    act = REFERENCES[name.removeprefix("scaled_")]
    x = torch.randn(5, 8, dtype=torch.float64)
    p = torch.rand(5, 1, dtype=torch.float64)
    dy = torch.randn_like(act(x))
    agree(evaluate(fn, x, p), act(x) * p, 1e-12, 1e-14)
    agree(
        evaluate(fn.grad(0), x, p, dy), autograd(lambda x, p: act(x) * p, x, p, dy=dy), 1e-9, 1e-12
    )
    agree(evaluate(fn.grad(1), x, p, dy), act(x) * dy, 1e-9, 1e-12)


def unary(function: Callable[[Expr], Expr]) -> Fn:
    return Fn("f", ("value",), function(X))


# Contract 19 of the core: every spelling that a naive derivation turns into NaN or noise.


def test_a_selection_stays_outermost() -> None:
    grad = unary(lambda x: tm.sqrt(tm.relu(x))).grad(0)
    x = torch.tensor([-2.0, -0.0, 0.0, 4.0])
    assert evaluate(grad, x, torch.ones(4)).tolist() == [0.0, 0.0, 0.0, 0.25]
    assert grad.out[0].op == "where"


def test_what_a_selection_discards_cannot_reach_the_gradient() -> None:
    x = torch.tensor([-2.0, -1.0, 3.0])
    dy = torch.tensor([math.inf, math.nan, 2.0])
    assert evaluate(activations["relu"]().grad(0), x, dy).tolist() == [0.0, 0.0, 2.0]
    sums = unary(lambda x: tm.sqrt(tm.relu(x) + tm.relu(-x))).grad(0)
    assert evaluate(sums, torch.zeros(1), torch.ones(1)).tolist() == [0.0]
    dropped = activations["dropout"](0.5).grad(0)
    keep = torch.tensor([0, 0, 1], dtype=torch.uint8)
    assert evaluate(dropped, None, keep, dy).tolist() == [0.0, 0.0, 4.0]


def test_softplus_written_with_where_is_finite_everywhere() -> None:
    grad = unary(lambda x: tm.where(x > 20.0, x, tm.log1p(tm.exp(x)))).grad(0)
    naive = unary(lambda x: tm.where(x > 20.0, x, tm.log(tm.exp(x) + 1.0 + 0.0 * x))).grad(0)
    x = torch.linspace(-120.0, 120.0, 20001)
    for fn in (grad, naive):
        actual = evaluate(fn, x, torch.ones(1))
        torch.testing.assert_close(actual, torch.sigmoid(x), rtol=1e-5, atol=3e-7)


def test_silu_written_out_is_finite_below_minus_88() -> None:
    grad = unary(lambda x: x / (1.0 + tm.exp(-x))).grad(0)
    assert grad.out[0] is activations["silu"]().grad(0).out[0]
    assert evaluate(grad, torch.tensor([-1000.0, -90.0]), torch.ones(1)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "softplus"])
def test_slopes_do_not_cancel(name: str) -> None:
    fn = activations[name]()
    x = torch.linspace(-40.0, 40.0, 4001)
    truth = evaluate(fn.grad(0), x.double(), torch.ones(1).double())
    actual = evaluate(fn.grad(0), x, torch.ones(1)).double()
    assert ((actual - truth).abs() / truth).max() < 1e-6


@pytest.mark.parametrize(
    ("function", "x", "slope"),
    [
        (lambda x: tm.minimum(x, 7.0), 7.0, 1.0),
        (lambda x: tm.minimum(7.0, x), 7.0, 1.0),
        (lambda x: tm.maximum(-7.0, x), -7.0, 1.0),
        (lambda x: tm.clamp(x, -7.0, 7.0), -7.0, 1.0),
        (lambda x: tm.clamp(x, -7.0, 7.0), 7.0, 1.0),
        (lambda x: tm.clamp(x, -7.0, 7.0), 7.5, 0.0),
        (tm.relu, 0.0, 0.0),
        (tm.abs, 0.0, 0.0),
        (tm.abs, -0.0, 0.0),
        (tm.floor, 0.5, 0.0),
        (tm.sign, 0.5, 0.0),
    ],
)
def test_kinks(function: Callable[[Expr], Expr], x: float, slope: float) -> None:
    grad = unary(function).grad(0)
    assert evaluate(grad, torch.tensor([x]), torch.ones(1)).tolist() == [slope]


def test_a_tie_of_two_tensors_gives_its_gradient_once() -> None:
    a = b = torch.tensor([1.0])
    for fn in (
        Fn("min", ("value", "value"), tm.minimum(Input(0), Input(1))),
        Fn("max", ("value", "value"), tm.maximum(Input(0), Input(1))),
    ):
        assert evaluate(fn.grad(0), a, b, torch.ones(1)).item() == 1.0
        assert evaluate(fn.grad(1), a, b, torch.ones(1)).item() == 0.0


def test_a_product_with_a_zero_constant_keeps_nan() -> None:
    grad = unary(lambda x: 0.0 * tm.exp(x)).grad(0)
    assert math.isnan(evaluate(grad, torch.tensor([1000.0]), torch.ones(1)).item())


def test_an_unread_input_has_gradient_zero() -> None:
    fn = Fn("f", ("value", "value"), X * 2.0)
    assert fn.grad(1).out == (Const(0.0),)
    assert fn.grad(1).used == (False, False, False)
    assert unary(tm.floor).grad(0).out == (Const(0.0),)


def nested(function: Callable[[Expr], Expr], depth: int) -> Fn:
    node: Expr = X
    for _ in range(depth):
        node = function(node)
    return Fn("nested", ("value",), node)


def test_nested_gelus_stay_small() -> None:
    # As trees: 68, 717, 5492, 37017 nodes.
    sizes = [len(walk(nested(tm.gelu_tanh, depth).grad(0).out)) for depth in (1, 2, 3, 4)]
    assert sizes[0] <= 25
    assert all(b - a <= 25 for a, b in pairwise(sizes))
    assert activations["clamped_swiglu"]().grad(0).size <= 22


def test_long_chains() -> None:
    """No recursion, and no doubling per level where clamps are added up."""
    x = torch.tensor([0.3, -0.3])
    assert evaluate(nested(tm.relu, 2000).grad(0), x, torch.ones(1)).tolist() == [1.0, 0.0]
    steps = nested(lambda y: abs(y - 0.01), 600).grad(0)
    assert evaluate(steps, x, torch.ones(1)).abs().tolist() == [1.0, 1.0]
    deep = nested(lambda y: tm.clamp(y * 0.9999, -1.0, 1.0), 600)
    slopes = evaluate(deep.grad(0), x, torch.ones(1))
    torch.testing.assert_close(slopes, torch.full((2,), 0.9999**600), rtol=1e-4, atol=0.0)
    forked = nested(lambda y: tm.relu(y) + tm.relu(0.5 - y), 12)
    assert forked.grad(0).size < 2000
    z = torch.linspace(-2, 2, 41, dtype=torch.float64)
    truth = autograd(lambda z: evaluate(forked, z), z, dy=torch.ones(1))
    agree(evaluate(forked.grad(0), z, torch.ones(1)), truth, 1e-12, 1e-12)


def test_a_zero_slope_stays_zero_beyond_the_term_limit() -> None:
    """Where a sum of selections is too long to be multiplied out, 0 * Inf is still 0."""
    node: Expr = X
    for _ in range(12):
        node = tm.relu(node) + tm.relu(node - 0.5)
    grad = unary(lambda _x: tm.sqrt(node)).grad(0)
    x = torch.tensor([-1.0, 0.3])
    assert evaluate(grad, x, torch.ones(1))[0] == 0.0
    assert evaluate(grad, x, torch.ones(1))[1] > 0.0


@pytest.mark.parametrize(
    "name", ["gelu", "gelu_erf", "silu", "qgelu", "relu", "softplus", "tanh", "sigmoid"]
)
def test_slopes_of_huge_fp32_inputs_are_their_limits(name: str) -> None:
    fn = activations[name]()
    x = torch.tensor([-1e38, -1e20, 1e20, 1e38])
    right = 0.0 if name in {"tanh", "sigmoid"} else 1.0
    assert evaluate(fn.grad(0), x, torch.ones(1)).tolist() == [0.0, 0.0, right, right]


def test_the_slope_of_a_quotient_does_not_square_its_divisor() -> None:
    fn = Fn("div", ("value", "value"), Input(0) / Input(1))
    a, b = torch.tensor([1e30]), torch.tensor([1e25])
    slope = evaluate(fn.grad(1), a, b, torch.ones(1))
    torch.testing.assert_close(slope, torch.tensor([-1e-20]), rtol=1e-5, atol=0.0)
    assert fn.grad(0).used == (False, True, True)


def test_a_pair_output_sums_over_both_halves() -> None:
    swap = elementwise("swap", lambda p: Pair(p.linear * p.gate, tm.exp(p.gate)), "pair")
    assert swap.grad(0).inputs == ("pair", "pair")
    x = torch.randn(3, 4, dtype=torch.float64)
    dy = torch.randn(3, 4, dtype=torch.float64)

    def reference(x: torch.Tensor) -> torch.Tensor:
        gate, linear = split(x)
        return torch.cat((linear * gate, gate.exp()), -1)

    agree(evaluate(swap.grad(0), x, dy), autograd(reference, x, dy=dy), 1e-12, 1e-14)


def test_second_derivatives() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64).requires_grad_()
    for name in ("gelu", "gelu_erf", "silu", "softplus", "tanh", "sigmoid", "qgelu"):
        (first,) = torch.autograd.grad(REFERENCES[name](x).sum(), x, create_graph=True)
        (truth,) = torch.autograd.grad(first.sum(), x)
        second = activations[name]().grad(0).grad(0)
        one = torch.ones(1, dtype=torch.float64)
        agree(evaluate(second, x.detach(), one, one), truth, 1e-9, 1e-11)


# Random expressions. The constants keep values moderate, so that finite differences are accurate.

SMOOTH: list[Callable[[Expr], Expr]] = [
    tm.tanh,
    tm.sigmoid,
    tm.silu,
    tm.softplus,
    tm.gelu_tanh,
    tm.gelu_erf,
    tm.sin,
    tm.cos,
    tm.erf,
    tm.erfc,
    lambda x: tm.exp(tm.sin(x)),
    lambda x: tm.expm1(tm.cos(x)),
    lambda x: tm.log(1.5 + tm.sin(x)),
    lambda x: tm.log1p(tm.square(x)),
    lambda x: tm.sqrt(1.0 + tm.square(x)),
    lambda x: tm.rsqrt(1.0 + tm.square(x)),
    lambda x: 1.0 / (1.0 + x * x),
    lambda x: (tm.tanh(x)) ** 3,
    lambda x: -x,
]
KINKED: list[Callable[[Expr], Expr]] = [
    tm.relu,
    tm.abs,
    lambda x: tm.clamp(x, -0.7, 0.9),
    lambda x: tm.where(x > 0.1, tm.sin(x), 2.0 * x),
    lambda x: tm.where((x < -0.3) | tm.isnan(x), 0.0, x * x),
    lambda x: tm.sqrt(tm.relu(x)),
]
BINARY: list[Callable[[Expr, Expr], Expr]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: tm.sin(a) * tm.cos(b),
    lambda a, b: tm.tanh(a) * b,
    lambda a, b: a / (1.5 + tm.sin(b)),
]
KINKED_BINARY: list[Callable[[Expr, Expr], Expr]] = [
    tm.minimum,
    tm.maximum,
    lambda a, b: tm.where(a < b, a, tm.sin(b)),
]


def expressions(
    one: list[Callable[[Expr], Expr]], two: list[Callable[[Expr, Expr], Expr]]
) -> st.SearchStrategy[Expr]:
    leaves = st.sampled_from([Input(0), Input(1, "gate"), Input(1, "linear"), Const(0.7)])
    return st.recursive(
        leaves,
        lambda inner: (
            st.builds(lambda f, a: f(a), st.sampled_from(one), inner)
            | st.builds(lambda f, a, b: f(a, b), st.sampled_from(two), inner, inner)
        ),
        max_leaves=8,
    )


@settings(max_examples=120)
@given(expressions(SMOOTH, BINARY))
def test_random_smooth_expressions_match_finite_differences(out: Expr) -> None:
    fn = Fn("random", ("value", "pair"), out)
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(16, 1, generator=generator, dtype=torch.float64) * 3 - 1.5
    p = torch.rand(16, 2, generator=generator, dtype=torch.float64) * 3 - 1.5
    one = torch.ones(1, dtype=torch.float64)
    h = 1e-5
    actual = torch.cat((evaluate(fn.grad(0), x, p, one), evaluate(fn.grad(1), x, p, one)), -1)
    for k in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[k] = h
        high = evaluate(fn, x + step[:1], p + step[1:])
        low = evaluate(fn, x - step[:1], p - step[1:])
        slope = (high - low) / (2 * h)
        torch.testing.assert_close(actual[:, k : k + 1], slope, rtol=1e-5, atol=1e-6)


@settings(max_examples=120)
@given(expressions(SMOOTH + KINKED, BINARY + KINKED_BINARY))
def test_random_expressions_match_autograd(out: Expr) -> None:
    """Where autograd is finite; it makes NaN of what a selection discards."""
    fn = Fn("random", ("value", "pair"), out)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(32, 1, generator=generator, dtype=torch.float64).requires_grad_()
    p = torch.randn(32, 2, generator=generator, dtype=torch.float64).requires_grad_()
    dy = torch.randn(32, 1, generator=generator, dtype=torch.float64)
    y = evaluate(fn, x, p)
    grads = torch.autograd.grad(y, (x, p), dy, materialize_grads=True) if y.requires_grad else None
    for i, t in enumerate((x, p)):
        actual = evaluate(fn.grad(i), x.detach(), p.detach(), dy)
        truth = torch.zeros_like(t) if grads is None else grads[i]
        agree(actual, truth, 1e-8, 1e-10)
        assert actual.isfinite().all()


def test_broadcast_inputs_have_the_unreduced_gradient() -> None:
    bias = activations["bias"]()
    dy = torch.randn(3, 4)
    assert torch.equal(evaluate(bias.grad(1), None, None, dy), dy)
    act = Fn("act", ("value", "value"), tm.silu(Input(0) + Input(1)))
    x, b = torch.randn(3, 4), torch.randn(4)
    grad = evaluate(act.grad(1), x, b, dy)
    assert grad.shape == (3, 4)
    torch.testing.assert_close(grad, evaluate(act.grad(0), x, b, dy), rtol=0, atol=0)


def test_the_whole_table_has_derivatives_that_hold_at_one_point() -> None:
    """Each operator that computes, at a point where it is smooth."""
    x = torch.tensor([0.37], dtype=torch.float64).requires_grad_()
    for name in tm.__all__:
        function = getattr(tm, name)
        if name in {"where", "pow", "clamp", "eq", "ne", "isnan", "minimum", "maximum"}:
            continue
        fn = unary(function)
        y = evaluate(fn, x)
        (truth,) = torch.autograd.grad(y, x)
        actual = evaluate(fn.grad(0), x.detach(), torch.ones(1, dtype=torch.float64))
        torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-14)


RISKY: list[Callable[[Expr], Expr]] = [
    lambda x: tm.exp(30.0 * x),
    tm.log,
    tm.sqrt,
    tm.rsqrt,
    lambda x: 1.0 / x,
    lambda x: tm.log1p(-x),
    lambda x: x * x,
    lambda x: x / (1.0 + tm.exp(-x)),
    lambda x: x + 1.0,
    tm.relu,
    lambda x: tm.minimum(x, 0.5),
]


@settings(max_examples=150)
@given(*[st.lists(st.sampled_from(RISKY), max_size=3)] * 3)
def test_the_gradient_is_that_of_the_selected_branch(
    outer: list[Callable[[Expr], Expr]],
    left: list[Callable[[Expr], Expr]],
    right: list[Callable[[Expr], Expr]],
) -> None:
    """Whatever the other branch overflows to, and whatever stands around the selection."""

    def through(steps: list[Callable[[Expr], Expr]], node: Expr) -> Expr:
        for step in steps:
            node = step(node)
        return node

    a, b = through(left, X), through(right, X)
    chosen = unary(lambda x: through(outer, tm.where(x > 0.0, a, b)))
    x = torch.tensor([-3.0, -1.0, -0.1, 0.0, 0.1, 1.0, 3.0, 20.0])
    dy = torch.tensor([1.0, -2.0, 0.5, 1.0, 3.0, 1.0, 1.0, 1.0])
    actual = evaluate(chosen.grad(0), x, dy)
    alone = [evaluate(unary(lambda _x, n=n: through(outer, n)).grad(0), x, dy) for n in (a, b)]
    expected = torch.where(x > 0.0, *alone)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
