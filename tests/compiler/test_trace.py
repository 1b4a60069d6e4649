"""Tracing: paths, slots, foreign modules, leading dimensions (core contracts 2, 4, 24)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import te_ops as te
from te_ops.attrs import Dim, DynamicAttribute
from te_ops.compiler.trace import ModuleResolver, dynamic_dims, marked, meta_copy, owned, trace
from te_ops.compiler.work import Request
from te_ops.graph import PARAM, Graph, Spec, Value


def request(op: te.Op, *inputs: Tensor) -> Request:
    return Request(
        op=op,
        inputs=tuple(Spec(tuple(x.shape), x.dtype) for x in inputs),
        input_grads=tuple(x.requires_grad for x in inputs),
        grad=True,
        device=torch.device("cpu"),
        arch="cpu",
        align=1,
    )


def names(g: Graph) -> list[str]:
    return [n.prim.name for n in g.nodes if n.prim.name != "cut"]


def test_nodes_carry_the_path_of_their_op() -> None:
    model = te.Sequential(
        {"fc": te.Linear(8, 8), "inner": te.Sequential(te.GELU(), te.Linear(8, 4))}
    )
    g, (out,) = trace(request(model, torch.ones(2, 8)))
    assert names(g) == [
        "input",
        "param",
        "gemm",
        "param",
        "pointwise",
        "pointwise",
        "param",
        "gemm",
        "param",
        "pointwise",
    ]
    assert [n.path for n in g.nodes if n.prim.name == "gemm"] == ["fc", "inner.1"]
    assert [n.attrs["slot"] for n in g.nodes if n.prim is PARAM][2] == ("inner.1", "weight")
    assert g.spec(out) == Spec((2, 4), torch.float32)


def test_tied_parameters_are_one_leaf() -> None:
    a, b = te.Linear(8, 8, bias=False), te.Linear(8, 8, bias=False)
    b.weight = a.weight
    g, _ = trace(request(te.Sequential(a, b), torch.ones(2, 8)))
    assert names(g).count("param") == 1


def test_leading_dimensions_are_symbols_and_may_not_be_attributes() -> None:
    spec = marked(Spec((2, 3, 8), torch.float32), 0, 2)
    assert [type(d) for d in spec.shape] == [Dim, Dim, int]
    assert [d.source for d in spec.shape[:2]] == [(0, 0), (0, 1)]  # type: ignore[attr-defined]
    assert dynamic_dims(Spec((2, 3), torch.int64), 1) == (2, 3)

    class Bakes(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            return g.call(te.basic.structure.RESHAPE, x, shape=(g.spec(x).shape[0], 8))

    with pytest.raises(DynamicAttribute, match=r"Bakes.*leading dimension"):
        trace(request(Bakes(), torch.ones(2, 8)))


def test_dimension_values_of_equal_inputs_are_one_node() -> None:
    class Reads(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            h = te.basic.structure.add(g, x, x)
            assert g.dim(h, 0) == g.dim(x, 0)
            assert g.shape(h) != g.shape(x)
            return h

    trace(request(Reads(), torch.ones(2, 8)))


# -- foreign modules


def test_foreign_module_is_called_on_meta_without_effects() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    g, _ = trace(request(te.Sequential(te.GELU(), module, te.SiLU()), torch.ones(2, 8)))
    node = next(n for n in g.nodes if n.prim.name == "module")
    assert node.attrs["slot"] == "1"
    assert g.specs[node.id] == (Spec((2, 4), torch.float32),)
    assert isinstance(g.specs[node.id][0].shape[0], Dim)
    assert int(module[1].num_batches_tracked) == 0  # type: ignore[arg-type]


def test_foreign_module_with_several_outputs() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x[..., :4], x[..., 4:]

    model = te.Sequential(te.GELU(), Split(), te.Add())
    x = torch.randn(2, 8)
    h = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(model(x), h[:, :4] + h[:, 4:])


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.ModuleList(), "meta"),
        (nn.Linear(3, 3), "meta"),
        (type("Bad", (nn.Module,), {"forward": lambda self, x: [1, 2]})(), "int"),
    ],
)
def test_foreign_module_that_cannot_be_planned(module: nn.Module, reason: str) -> None:
    with pytest.raises(te.PlanError, match=rf"Sequential\.1 \({type(module).__name__}\).*{reason}"):
        te.Sequential(te.GELU(), module)(torch.ones(2, 8))


def test_unregistered_module_and_tensor() -> None:
    other = nn.Linear(8, 8)

    class Calls(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            return g.module(hidden[0], x)[0]

    class Reads(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            return g.call(
                te.basic.gemm.GEMM, x, g.param(other.weight), layout="nt", dtype=torch.float32
            )

    hidden = [other]
    with pytest.raises(te.PlanError, match="registered"):
        Calls()(torch.ones(2, 8))
    with pytest.raises(te.PlanError, match=r"Reads.*no op of the pipeline owns"):
        Reads()(torch.ones(2, 8))


def test_meta_copy_shares_nothing_that_matters() -> None:
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda *_: pytest.fail("the hook of the original ran"))
    twin = meta_copy(module, {})
    assert twin.weight.is_meta  # type: ignore[union-attr]
    twin(torch.empty(2, 4, device="meta"))
    assert not module.weight.is_meta


def test_modules_that_share_a_child_are_copied_once() -> None:
    shared = nn.Linear(4, 4)
    twin: Any = meta_copy(nn.Sequential(shared, shared), {})
    assert twin[0] is twin[1]


# -- slots


def test_owned_tensors() -> None:
    class Holds(te.Op):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.ones(3))
            self.plain = torch.ones(4)
            self.cap = te.scalar(1.0)

    op = Holds()
    assert [n for n, _ in owned(op)] == ["weight", "table", "plain", "cap"]
    model = te.Sequential(op)
    resolver = ModuleResolver(model)  # holds the model weakly
    assert resolver.slot(op.cap) == ("0", "cap")
    assert resolver.slot(op.plain) == ("0", "plain")
    assert resolver.slot(torch.ones(2)) is None
    assert resolver.describe("0") == "Sequential.0 (Holds)"
    assert resolver.describe("7.x") == "Sequential.7.x"


def test_plain_tensor_attributes_are_read_at_each_call() -> None:
    class Table(te.Op):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(4)

        def emit(self, g: Graph, x: Value) -> Value:
            return te.basic.bias.emit_bias(g, x, g.param(self.table))

    op = Table()
    assert torch.equal(op(torch.zeros(2, 4)), torch.ones(2, 4))
    op.table.fill_(2)
    assert torch.equal(op(torch.zeros(2, 4)), torch.full((2, 4), 2.0))
    op.table = torch.full((4,), 3.0)
    assert torch.equal(op(torch.zeros(2, 4)), torch.full((2, 4), 3.0))


def test_parametrized_weight_gets_gradients() -> None:
    op = te.Linear(4, 4, bias=False)

    class Double(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    parametrize.register_parametrization(op, "weight", Double())
    x = torch.randn(3, 4)
    y = te.Sequential(op, te.GELU())(x)
    y.sum().backward()
    inner = op.parametrizations.weight.original  # type: ignore[union-attr]
    w = inner.detach().clone().requires_grad_()
    torch.nn.functional.gelu(x @ (2 * w).t(), approximate="tanh").sum().backward()
    torch.testing.assert_close(inner.grad, w.grad)


# -- results


def test_emit_must_return_values() -> None:
    class Returns(te.Op):
        def emit(self, g: Graph, x: Value) -> Any:
            return 3

    with pytest.raises(te.PlanError, match=r"Returns\.emit returned a int"):
        Returns()(torch.ones(2))


def test_number_of_inputs_is_checked() -> None:
    with pytest.raises(te.ShapeError, match="takes 1 input, got 2"):
        te.GELU()(torch.ones(2), torch.ones(2))


def test_a_parameter_returned_as_it_is_is_refused() -> None:
    class Leaf(te.Op):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def emit(self, g: Graph, x: Value) -> Value:
            return g.param(self.weight)

    with pytest.raises(te.PlanError, match="leaf as it is"):
        Leaf()(torch.ones(2))
