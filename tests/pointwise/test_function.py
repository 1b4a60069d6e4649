"""`Fn`: identity, gradient signatures, composition and merging of inputs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import te_ops.math as tm
from te_ops.errors import PlanError
from te_ops.pointwise import (
    Const,
    Fn,
    Input,
    Pair,
    activations,
    compose,
    elementwise,
    evaluate,
    merge_inputs,
)

X, Y = Input(0), Input(1)
GELU = activations["gelu"]()
SWIGLU = activations["swiglu"]()
ADD = activations["add"]()


def test_equal_functions_are_one_object() -> None:
    assert activations["gelu"]() is GELU
    assert Fn("f", ["value"], tm.exp(X)) is Fn("f", ("value",), (tm.exp(X),))
    assert Fn("g", ["value"], tm.exp(X)) is not Fn("f", ["value"], tm.exp(X))
    assert Fn("g", ["value"], tm.exp(X)).key == Fn("f", ["value"], tm.exp(X)).key
    assert Fn("f", ["value", "value"], tm.exp(X)).key != Fn("f", ["value"], tm.exp(X)).key


def test_copies_and_pickles_are_the_function() -> None:
    grad = SWIGLU.grad(0)
    assert copy.copy(grad) is grad
    assert copy.deepcopy([grad])[0] is grad
    assert pickle.loads(pickle.dumps(grad)) is grad


def test_functions_are_immutable() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        GELU.name = "other"


def test_gradient_signature_and_use() -> None:
    grad = SWIGLU.grad(0)
    assert grad.inputs == ("pair", "value")
    assert len(grad.out) == 2
    assert grad is SWIGLU.grad(0)
    assert ADD.grad(0).used == (False, False, True)
    assert ADD.grad(0).out == (Input(2),)
    assert activations["relu"]().grad(0).used == (True, True)
    assert activations["mul"]().grad(0).used == (False, True, True)
    assert activations["scale"](2.0).grad(0).used == (False, True)


def test_size_counts_shared_operators_once() -> None:
    shared = tm.exp(X) + 1.0
    assert Fn("f", ["value"], shared * shared).size == 3
    assert Fn("f", ["value"], X).size == 0


def test_composition_replaces_the_input_and_appends_in_place() -> None:
    outer = Fn("outer", ("value", "value", "value"), Input(0) - Input(1) * Input(2))
    inner = Fn("inner", ("value", "pair"), Input(0) * Input(1, "gate") + Input(1, "linear"))
    both = compose(outer, 1, inner)
    assert both.name == "inner + outer"
    assert both.inputs == ("value", "value", "pair", "value")
    product = Input(1) * Input(2, "gate") + Input(2, "linear")
    assert both is Fn("inner + outer", both.inputs, Input(0) - product * Input(3))


def test_composition_of_a_pair() -> None:
    swap = elementwise("swap", lambda p: Pair(p.linear, p.gate), "pair")
    both = compose(SWIGLU, 0, swap)
    assert both.out == (tm.silu(Input(0, "linear")) * Input(0, "gate"),)
    assert both.inputs == ("pair",)


def test_composition_saves_one_input_for_a_chain() -> None:
    """Linear, gelu, relu, gelu, relu: four activations if each one derives by itself."""
    chain = GELU
    for name in ("relu", "gelu", "relu"):
        chain = compose(activations[name](), 0, chain)
    assert chain.name == "gelu + relu + gelu + relu"
    assert chain.grad(0).used == (True, True)
    x = torch.linspace(-3, 3, 61, dtype=torch.float64).requires_grad_()
    y = x
    for name in ("gelu", "relu", "gelu", "relu"):
        y = evaluate(activations[name](), y)
    (truth,) = torch.autograd.grad(y.sum(), x)
    one = torch.ones(1, dtype=torch.float64)
    torch.testing.assert_close(evaluate(chain.grad(0), x.detach(), one), truth)


def test_merging_inputs() -> None:
    both = compose(ADD, 1, GELU)
    residual = merge_inputs(both, (0, 0))
    assert residual.inputs == ("value",)
    assert residual.out == (X + tm.gelu_tanh(X),)
    swapped = merge_inputs(both, (1, 0))
    assert swapped.out == (Input(1) + tm.gelu_tanh(X),)
    assert merge_inputs(both, (0, 1)) is both


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fn("f", ["value"], Y), "input 1"),
        (lambda: Fn("f", ["value"], Input(0, "gate")), "gate of input 0"),
        (lambda: Fn("f", ["pair"], X), "value of input 0"),
        (lambda: Fn("f", ["full"], X), "kind 'full'"),
        (lambda: Fn("f", ["value"], X > 0), "returns a mask"),
        (lambda: Fn("f", ["value"], (X, X, X)), "3 values"),
        (lambda: Fn("f", ["value"], ()), "0 values"),
        (lambda: Fn("f", ["value"], None), "returns a NoneType"),
        (lambda: Fn("f", ["value"], True), "returns a bool"),
        (lambda: GELU.grad(1), "no input 1"),
        (lambda: GELU.grad(-1), "no input -1"),
        (lambda: compose(GELU, 1, GELU), "no input 1"),
        (lambda: compose(SWIGLU, 0, GELU), "gelu gives a value"),
        (lambda: merge_inputs(ADD, (0, 2)), "without gaps"),
        (lambda: merge_inputs(ADD, (0,)), "each of 2 inputs"),
        (lambda: merge_inputs(activations["scaled_swiglu"](), (0, 0)), "pair and a value"),
    ],
)
def test_mistakes(make: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def test_a_number_is_an_output() -> None:
    assert Fn("one", ["value"], 1).out == (Const(1.0),)
