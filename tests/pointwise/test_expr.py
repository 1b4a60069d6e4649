"""Expressions are interned: structure is identity; the key is the same in every process."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading

import pytest

import te_ops.math as tm
from te_ops.errors import PlanError
from te_ops.pointwise import Const, Expr, Input, activations
from te_ops.pointwise import expr as expr_module
from te_ops.pointwise.expr import walk

X, Y = Input(0), Input(1)


def test_equal_structure_is_one_object() -> None:
    assert tm.tanh(X * 2.0) + Y is tm.tanh(X * 2.0) + Y
    assert Input(0, "gate") is not Input(0, "linear")
    assert Input(0) is not Input(1)


def test_commutative_arguments_are_ordered() -> None:
    assert X + Y is Y + X
    assert X * Y is Y * X
    assert 2.0 * X is X * 2.0
    assert X - Y is not Y - X
    assert X / Y is not Y / X


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1.0, 1.0000000000000002)])
def test_constants_differ_by_their_bits(a: float, b: float) -> None:
    assert Const(a) is not Const(b)
    assert Const(a) is Const(a)
    assert X + a is not X + b


def test_nan_is_found_again() -> None:
    assert Const(float("nan")) is Const(float("nan"))
    assert X * float("nan") is X * float("nan")


def test_an_integer_is_the_float() -> None:
    assert X * 3 is X * 3.0


def test_copies_and_pickles_are_the_node() -> None:
    node = tm.gelu_tanh(X) * Y
    assert copy.copy(node) is node
    assert copy.deepcopy({"at": node})["at"] is node
    assert pickle.loads(pickle.dumps(node)) is node
    for _ in range(3000):
        node = tm.sin(node)
    assert pickle.loads(pickle.dumps(node)) is node


def test_nodes_are_immutable_and_not_made_by_hand() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        X.op = "const"
    with pytest.raises(PlanError, match=r"te_ops\.math"):
        Expr()


def test_unused_nodes_are_released() -> None:
    gc.collect()
    before = len(expr_module._table)
    for k in range(200):
        tm.tanh(X * (1.0 + k / 7919))
    gc.collect()
    assert len(expr_module._table) <= before + 20


def test_threads_get_one_object() -> None:
    found: list[list[Expr]] = [[] for _ in range(4)]

    def work(mine: list[Expr]) -> None:
        mine.extend(tm.tanh(X * (2.0 + k)) for k in range(300))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a is b for mine in found[1:] for a, b in zip(found[0], mine, strict=True))


def test_key_is_readable_and_holds_each_node_once() -> None:
    inner = X + 1.0
    assert (inner * inner).key == "add x0 0x1.0000000000000p+0;square %0>%1"
    assert Input(1, "gate").key == ">x1.gate"


def test_key_and_order_are_the_same_in_another_process() -> None:
    program = (
        "from te_ops.pointwise import activations as a\n"
        "print([f().grad(0).key for f in (a['clamped_swiglu'], a['gelu'], a['situglu'])])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    names = ("clamped_swiglu", "gelu", "situglu")
    assert outputs == {str([activations[name]().grad(0).key for name in names])}


def test_walk_visits_shared_nodes_once_and_needs_no_recursion() -> None:
    node: Expr = X
    for _ in range(5000):
        node = tm.sin(node)
    assert len(walk((node,))) == 5001
    node = X
    for _ in range(200):
        node = tm.sin(node) * tm.cos(node)  # as a tree: 2^200 nodes
    assert len(walk((node,))) == 601


@pytest.mark.parametrize("condition", [lambda: bool(X > 0), lambda: bool(X), lambda: max(X, 0.0)])
def test_a_truth_value_is_refused_with_the_way_out(condition: object) -> None:
    with pytest.raises(PlanError, match=r"te_ops\.math\.where"):
        condition()


def test_the_math_module_is_refused_with_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"te_ops\.math"):
        float(X)


@pytest.mark.parametrize(("index", "part"), [(-1, "value"), (0, "up")])
def test_an_unknown_input_is_refused(index: int, part: str) -> None:
    with pytest.raises(PlanError, match="part"):
        Input(index, part)
