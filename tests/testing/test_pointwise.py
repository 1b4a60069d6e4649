from __future__ import annotations

import pytest
import torch

import te_ops as te
from te_ops.pointwise import Fn, activations, elementwise
from te_ops.testing import cases, check_pointwise
from te_ops.testing.pointwise import functions_of

tm = te.math


@pytest.mark.parametrize("name", list(activations))
def test_the_activation_table_passes(name: str) -> None:
    arguments = {"scale": (0.5,), "dropout": (0.25,)}.get(name, ())
    check_pointwise(activations[name](*arguments), points=cases.SPECIAL)


def wrong_gradient(name: str, factor: float) -> Fn:
    fn = elementwise(name, lambda x: 3.0 * tm.tanh(x / 3.0), "value")
    grad = fn.grad(0)
    fn.__dict__["_grads"][0] = Fn(grad.name, grad.inputs, tuple(factor * out for out in grad.out))
    return fn


@pytest.mark.parametrize("factor", [1.01, 0.99, 0.0])
def test_a_derivative_off_by_one_percent_fails(factor: float) -> None:
    with pytest.raises(AssertionError, match="derivative by input 0 at"):
        check_pointwise(wrong_gradient(f"wrong{factor}", factor))


def test_a_function_that_overflows_inside_fails() -> None:
    naive = elementwise("naive", lambda x: tm.sqrt(tm.exp(x)), "value")
    with pytest.raises(
        AssertionError, match=r"naive: FP32 and FP64 disagree at \(100\.0\): got inf"
    ):
        check_pointwise(naive)
    check_pointwise(naive, points=(-3.0, 0.0, 3.0))
    far = elementwise("far", lambda x: tm.sqrt(tm.square(x) + 1.0), "value")
    check_pointwise(far)
    with pytest.raises(AssertionError, match="far: FP32"):
        check_pointwise(far, points=(3.38e38,))


def test_kinks_pass() -> None:
    check_pointwise(elementwise("kinks", lambda x: tm.abs(x) + tm.relu(x - 1.0), "value"))
    check_pointwise(elementwise("larger", lambda x, y: tm.maximum(x, y), "value", "value"))


def test_the_functions_of_an_op_are_found() -> None:
    op = te.Sequential(te.Linear(8, 8), te.GELU())
    names = [fn.name for fn in functions_of(op, [torch.randn(2, 8)])]
    assert any("gelu" in name for name in names)
    assert any("bias" in name for name in names)
