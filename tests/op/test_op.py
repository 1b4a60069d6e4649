"""What an Op is: config, emit, epoch, errors with paths (core contracts 4, 17, 24)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_ops as te
from te_ops.errors import Error, NoKernelError, PlanError, RecipeError, ShapeError
from te_ops.graph import Graph, Value
from te_ops.op import Epoch, Op, Runtime, Scalar, config_key


class Plain(Op):
    def __init__(self) -> None:
        super().__init__()
        self.p = 0.5
        self.names = ["a", "b"]
        self.table = {"k": (1, 2)}
        self.cap = te.scalar(3.0)
        self.weight = nn.Parameter(torch.ones(2))

    def emit(self, g: Graph, x: Value) -> Value:
        return x


def test_config_is_every_plain_attribute() -> None:
    names = [name for name, _ in Plain().config()]
    assert names == ["p", "names", "table", "cap"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("p", 1),
        ("p", 0.25),
        ("p", -0.5),
        ("names", ["a"]),
        ("names", ("a", "b")),
        ("table", {"k": (1, 3)}),
        ("cap", 3.0),
        ("new", None),
    ],
)
def test_config_follows_attributes(name: str, value: Any) -> None:
    op = Plain()
    before = op.config()
    setattr(op, name, value)
    assert op.config() != before


def test_value_of_a_scalar_is_not_configuration() -> None:
    op = Plain()
    before = op.config()
    op.cap.set(7.0)
    assert op.config() == before
    assert float(op.cap.value) == 7.0


@pytest.mark.parametrize("value", [{1: {2}}, [[]] and bytearray(b"x"), nn.ModuleList])
def test_attributes_that_cannot_be_keys(value: Any) -> None:
    if value is nn.ModuleList:
        with pytest.raises(PlanError, match="registered"):
            config_key(nn.Linear(1, 1), "Op.child")
        return
    with pytest.raises(PlanError, match=r"Op\.x"):
        config_key(value, "Op.x")


def test_an_op_may_write_its_own_config() -> None:
    class Own(Op):
        def __init__(self) -> None:
            super().__init__()
            self.data = bytearray(b"x")

        def config(self) -> tuple[Any, ...]:
            return (bytes(self.data),)

        def emit(self, g: Graph, x: Value) -> Value:
            return te.basic.structure.add(g, x, x)

    assert torch.equal(Own()(torch.ones(2)), torch.full((2,), 2.0))


# -- epoch: every change is counted


def changes() -> dict[str, Any]:
    return {
        "set": lambda op: setattr(op, "p", 1.0),
        "delete": lambda op: delattr(op, "p"),
        "parameter": lambda op: setattr(op, "weight", nn.Parameter(torch.zeros(2))),
        "register_parameter": lambda op: op.register_parameter("other", None),
        "register_buffer": lambda op: op.register_buffer("other", torch.ones(1)),
        "add_module": lambda op: op.add_module("child", nn.Identity()),
        "register_module": lambda op: op.register_module("child", nn.Identity()),
        "train": lambda op: op.train(),
        "eval": lambda op: op.eval(),
        "to": lambda op: op.double(),
        "load": lambda op: op.load_state_dict(op.state_dict(), assign=True),
    }


@pytest.mark.parametrize("name", changes())
def test_changes_move_the_epoch(name: str) -> None:
    op = Plain()
    before = Epoch.now
    changes()[name](op)
    assert Epoch.now > before


# -- emit and forward


def test_forward_may_not_be_overridden() -> None:
    with pytest.raises(PlanError, match="overrides forward"):

        class Bad(Op):
            def forward(self, x: Tensor) -> Tensor:
                return x


def test_forward_in_a_base_class_beside_op_is_not_ours() -> None:
    """Python would take a mixin's forward; it is refused like one in the class itself."""

    class Mixin:
        def forward(self, x: Tensor) -> Tensor:
            return x * 0

    with pytest.raises(PlanError, match="forward"):

        class Bad(Mixin, Op):
            def emit(self, g: Graph, x: Value) -> Value:
                return x


def test_number_of_inputs_from_the_signature() -> None:
    class Two(Op):
        def emit(self, g: Graph, x: Value, y: Value) -> Value:
            return te.basic.structure.add(g, x, y)

    class Any_(Op):
        def emit(self, g: Graph, *xs: Value) -> Value:
            return xs[0]

    class Child(Two):
        pass

    assert (Plain.num_inputs, Two.num_inputs, Any_.num_inputs, Child.num_inputs) == (1, 2, None, 2)


def test_op_without_emit() -> None:
    class Nothing(Op):
        pass

    with pytest.raises(PlanError, match="Nothing has no emit"):
        Nothing()(torch.ones(2))


def test_super_emit() -> None:
    class Twice(te.GELU):
        def emit(self, g: Graph, x: Value) -> Value:
            return super().emit(g, super().emit(g, x))

    x = torch.randn(2, 4)
    torch.testing.assert_close(Twice()(x), te.GELU()(te.GELU()(x)))


def test_runtime_slots() -> None:
    saved = Runtime.run
    Runtime.run = None
    try:
        with pytest.raises(PlanError, match="import te_ops"):
            Plain()(torch.ones(2))
    finally:
        Runtime.run = saved


# -- errors name the op


def test_errors_carry_the_path_once() -> None:
    model = te.Sequential({"a": te.GELU(), "b": te.Sequential(te.Linear(8, 4), te.Linear(8, 4))})
    with pytest.raises(ShapeError) as caught:
        model(torch.ones(2, 8))
    text = str(caught.value)
    assert text.startswith("Sequential.b.1 (Linear): input has 4 features, weight expects 8")
    assert text.count("Sequential") == 1
    assert isinstance(caught.value, ValueError)


def test_hierarchy() -> None:
    assert issubclass(ShapeError, PlanError)
    assert issubclass(NoKernelError, PlanError)
    assert issubclass(PlanError, Error)
    assert issubclass(RecipeError, Error)
    assert not issubclass(RecipeError, PlanError)


def test_no_kernel_lists_candidates_and_reasons() -> None:
    from te_ops.registry import REGISTRY, Kernel

    saved = dict(REGISTRY._kernels)
    REGISTRY.remove("reference")
    try:
        REGISTRY.add(
            Kernel(
                "pointwise", "test.picky", lambda call: None, refuse=lambda call: "only on Sundays"
            )
        )
        with pytest.raises(NoKernelError, match=r"gelu.*test\.picky: only on Sundays"):
            te.GELU()(torch.ones(2, 2))
    finally:
        REGISTRY._kernels = saved
        REGISTRY.version += 1


# -- copies


def test_copies_and_pickles_have_no_plans() -> None:
    op = te.Linear(4, 4)
    x = torch.randn(2, 4)
    want = op(x)
    assert "_te_cache" in op.__dict__
    for made in (copy.deepcopy(op), copy.copy(op), pickle.loads(pickle.dumps(op))):
        assert "_te_cache" not in made.__dict__
        assert torch.equal(made(x), want)


def test_repr_of_a_scalar() -> None:
    assert repr(Scalar(2)) == "te.scalar(2.0)"


def test_scalar_in_two_ops_is_one_slot_each() -> None:
    cap = te.scalar(2.0)
    model = te.Sequential(te.ConstantScale(cap), te.ConstantScale(cap))
    assert float(model(torch.ones(1, 1))) == 4.0
    cap.set(3.0)
    assert float(model(torch.ones(1, 1))) == 9.0


def test_attribute_scalar_parameter() -> None:
    """A number may be an attribute, a run-time slot or a trained parameter: same values."""

    @te.pointwise
    def scaled(x, k: float):  # type: ignore[no-untyped-def]
        return x * k

    x = torch.randn(2, 4)
    for k in (2.0, te.scalar(2.0), nn.Parameter(torch.tensor(2.0))):
        op = scaled(k=k)
        y = op(x)
        torch.testing.assert_close(y, 2 * x)
        if isinstance(k, nn.Parameter):
            y.sum().backward()
            torch.testing.assert_close(op.k.grad, x.sum())
            assert [n for n, _ in op.named_parameters()] == ["k"]
