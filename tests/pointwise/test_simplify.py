"""Simplification is exact: it neither hides a non-finite value nor the sign of a zero."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import te_ops.math as tm
from te_ops.errors import PlanError
from te_ops.pointwise import Const, Expr, Fn, Input, evaluate
from te_ops.pointwise.expr import call

X, Y = Input(0), Input(1)
SPECIAL = torch.tensor(
    [0.0, -0.0, 1.5, -1.5, math.inf, -math.inf, math.nan, 3e38], dtype=torch.float64
)


def value(node: Expr, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    return evaluate(Fn("f", ("value", "value"), node), x, x if y is None else y)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, all NaN being equal."""
    a, b = torch.broadcast_tensors(a, b)
    nan = a.isnan() & b.isnan()
    return bool(((a == b) & (a.signbit() == b.signbit()) | nan).all())


@pytest.mark.parametrize(
    ("node", "simple"),
    [
        (X * 1.0, X),
        (X / 1.0, X),
        (X - 0.0, X),
        (X + -0.0, X),
        (X.__neg__().__neg__(), X),
        (X * -1.0, -X),
        (X - (-Y), X + Y),
        (X + (-Y), X - Y),
        (X * X, tm.square(X)),
        (1.0 / X, tm.reciprocal(X)),
        (-(X * 3.0), X * -3.0),
        (tm.abs(-X), tm.abs(X)),
        (tm.abs(tm.abs(X)), tm.abs(X)),
        (tm.minimum(X, X), X),
        (tm.minimum(2.0, X), tm.minimum(X, 2.0)),
        (tm.where(X > 0, Y, Y), Y),
        (tm.where(~(X > 0), X, Y), tm.where(X > 0, Y, X)),
        (tm.where(X > 0, tm.where(X > 0, X, 1.0), Y), tm.where(X > 0, X, Y)),
        (tm.where(X > 0, X, tm.where(X > 0, 1.0, Y)), tm.where(X > 0, X, Y)),
        (tm.clamp(X), X),
    ],
)
def test_rewrites(node: Expr, simple: Expr) -> None:
    assert node is simple


@pytest.mark.parametrize(
    ("node", "reference"),
    [
        (X * 0.0, lambda x: x * 0.0),
        (0.0 * X, lambda x: x * 0.0),
        (X + 0.0, lambda x: x + 0.0),
        (0.0 - X, lambda x: 0.0 - x),
        (X - X, lambda x: x - x),
        (X / X, lambda x: x / x),
        (0.0 / X, lambda x: 0.0 / x),
        (X / 0.0, lambda x: x / 0.0),
        (X / -0.0, lambda x: x / -0.0),
        (X * -1.0, lambda x: x * -1.0),
        (-(X * 3.0), lambda x: -(x * 3.0)),
        (X + (-Y), lambda x: x + (-x)),
        ((-X) - Y, lambda x: (-x) - x),
        (X**3, lambda x: x * x * x),
        (X**-2, lambda x: 1.0 / (x * x)),
        (tm.clamp(X, -1.0, 1.0), lambda x: x.clamp(-1.0, 1.0)),
        (tm.minimum(1.0, X), lambda x: torch.minimum(torch.ones_like(x), x)),
    ],
)
def test_special_values_survive(node: Expr, reference: object) -> None:
    assert same(value(node, SPECIAL), reference(SPECIAL))


@pytest.mark.parametrize(
    ("node", "recognised"),
    [
        (1.0 / (1.0 + tm.exp(-X)), tm.sigmoid(X)),
        (tm.reciprocal(tm.exp(-X) + 1), tm.sigmoid(X)),
        (X / (1.0 + tm.exp(-X)), tm.silu(X)),
        (X * (1.0 / (1.0 + tm.exp(-X))), tm.silu(X)),
        (X * tm.sigmoid(X), tm.silu(X)),
        (Y / (1.0 + tm.exp(-X)), Y * tm.sigmoid(X)),
        (tm.exp(X) / (1.0 + tm.exp(X)), tm.sigmoid(X)),
        (X / (1.0 + tm.exp(-1.702 * X)), X * tm.sigmoid(1.702 * X)),
        (tm.log(1.0 + tm.exp(X)), tm.softplus(X)),
        (tm.log1p(tm.exp(X)), tm.softplus(X)),
    ],
)
def test_spellings_that_overflow_are_recognised(node: Expr, recognised: Expr) -> None:
    assert node is recognised
    x = torch.tensor([-1000.0, -90.0, 0.0, 90.0, 1000.0])
    assert value(node, x, torch.ones(5)).isfinite().all()


def test_constants_fold_in_fp64() -> None:
    assert tm.sqrt(2.0) is Const(math.sqrt(2.0))
    assert tm.minimum(1.0, 2.0) * 3.0 is Const(3.0)
    assert tm.where(tm.eq(1.0, 1.0), X, Y) is X
    assert tm.where(tm.ne(1.0, 1.0) & (X > 0), X, Y) is Y
    assert tm.where(tm.eq(1.0, 1.0) | (X > 0), X, Y) is X
    assert tm.where(~tm.eq(1.0, 1.0), X, Y) is Y
    assert (Const(1.0) / 0.0).payload == math.inf


def test_powers() -> None:
    assert X**1 is X
    assert X**2 is tm.square(X)
    assert X**0.5 is tm.sqrt(X)
    assert X**-0.5 is tm.rsqrt(X)
    assert X**0 is Const(1.0)
    assert tm.pow(X, 3) is X**3
    x = torch.tensor([1.5, -0.5], dtype=torch.float64)
    for n in (-5, 7, 12):
        torch.testing.assert_close(value(X**n, x), x**n)


def test_numpy_scalars_are_numbers() -> None:
    assert X * np.float32(0.5) is X * 0.5
    assert X * np.int64(2) is X * 2.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (X > 0) * X, "te.math.where"),
        (lambda: -(X > 0), "te.math.where"),
        (lambda: tm.where(X, 1.0, 0.0), "needs a mask"),
        (lambda: tm.where(X == 0, 1.0, 0.0), "te.math.eq"),
        (lambda: X & (X > 0), "needs a mask"),
        (lambda: X + torch.ones(1), "input of the function"),
        (lambda: X + "1", "expression or a number"),
        (lambda: X + True, "expression or a number"),
        (lambda: X**Y, "te.math.log"),
        (lambda: X**1.5, "te.math.exp"),
        (lambda: call("tanhh", X), "unknown operator"),
        (lambda: call("tanh", X, X), "1 arguments"),
    ],
)
def test_mistakes_name_the_way_out(make: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()
