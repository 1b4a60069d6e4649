"""`te_ops.math`: what users write inside `@te.pointwise`."""

from __future__ import annotations

import inspect

import pytest
import torch

import te_ops.math as tm
from te_ops.pointwise import Expr, Fn, Input, evaluate, functions
from te_ops.pointwise.expr import call
from te_ops.pointwise.table import OPERATORS

X, Y = Input(0), Input(1)

# Written as Python operators.
SYMBOLS = {"add", "sub", "mul", "div", "neg", "lt", "le", "gt", "ge", "and", "or", "not"}


def test_every_operator_can_be_written() -> None:
    assert set(OPERATORS) - SYMBOLS <= set(tm.__all__)
    public = {name for name, value in vars(functions).items() if inspect.isfunction(value)}
    assert {name for name in public if not name.startswith("_")} == {*tm.__all__, "call"}


@pytest.mark.parametrize("name", sorted(set(OPERATORS) - SYMBOLS - {"where"}))
def test_functions_build_their_operator(name: str) -> None:
    args = [X, Y][: OPERATORS[name].arity]
    function = getattr(tm, name)
    assert function(*args) is call(name, *args)
    assert function.__name__ == name
    assert function.__doc__
    assert getattr(functions, name) is function


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (X + 1, [0.0, 1.5]),
        (1 - X, [2.0, 0.5]),
        (2 * X, [-2.0, 1.0]),
        (1 / X, [-1.0, 2.0]),
        (+X, [-1.0, 0.5]),
        (abs(X), [1.0, 0.5]),
        (tm.clamp(X, low=0.0), [0.0, 0.5]),
        (tm.clamp(X, high=0.0), [-1.0, 0.0]),
        (tm.where(X <= -1.0, 9.0, X), [9.0, 0.5]),
        (tm.where(X >= 0.5, 9.0, X), [-1.0, 9.0]),
        (tm.where((X > 0) & (X < 0.4), 9.0, 1.0), [1.0, 1.0]),
        (tm.where((X < 0) | tm.eq(X, 0.5), 9.0, X), [9.0, 9.0]),
        (tm.where(~(X < 0) & tm.ne(X, 0.7), 9.0, X), [-1.0, 9.0]),
        (tm.sign(X), [-1.0, 1.0]),
        (tm.floor(X), [-1.0, 0.0]),
    ],
)
def test_values(node: Expr, expected: list[float]) -> None:
    assert evaluate(Fn("f", ("value",), node), torch.tensor([-1.0, 0.5])).tolist() == expected
