"""Nodes, identity, specs, phases and the rewriter (core contracts 2, 8, 10, 13, 16)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te
from te_ops.attrs import Attrs, Dim, DynamicAttribute, attr_key
from te_ops.compiler import SLOTS, Work, passes
from te_ops.compiler.rewrite import Rewriter
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import (
    BUFFER,
    CUT,
    DENSE,
    GRAD,
    PRIMS,
    Graph,
    Kind,
    Phase,
    Prim,
    Spec,
    Value,
    gradient,
    prim,
    require,
    same,
    signature_arity,
    verify,
)
from te_ops.quantizers import Usage
from te_ops.registry import REGISTRY, Call, Kernel

F32 = torch.float32


@prim("test_graph_copysign", infer=same)
def COPYSIGN(x: Tensor, k: float) -> Tensor:
    return torch.copysign(x, torch.tensor(k))


@prim("test_graph_pair", infer=lambda x: (x.like(), x.like(dtype=torch.float64)), n_out=2)
def PAIR(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.double()


@prim("test_graph_random", infer=same, nature="random")
def RANDOM(x: Tensor, stream: int) -> Tensor:
    return x + stream


@prim("test_graph_effect", infer=same, nature="effect")
def EFFECT(x: Tensor) -> Tensor:
    return x


def graph(*shape: int) -> tuple[Graph, Value]:
    g = Graph()
    return g, g.input(0, Spec(shape or (4, 8), F32))


# -- identity


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Frozen:
    x: float
    y: tuple[int, ...] = ()


@dataclass
class Loose:
    x: float


DISTINCT = [
    *(1, True, 1.0, 0, False, 0.0, -0.0, "1", None, float("inf"), -1),
    *((1,), (True,), (1.0,), (0.0,), (-0.0,), ((1,),)),
    *(Colour.RED, torch.float32, torch.bfloat16),
    *(Frozen(1.0), Frozen(1), Frozen(0.0), Frozen(-0.0)),
]


def test_attribute_values_are_told_apart_by_type_and_bits() -> None:
    keys = [attr_key(v) for v in DISTINCT]
    assert len(set(keys)) == len(keys)
    for value, key in zip(DISTINCT, keys, strict=True):
        assert attr_key(value) == key


def test_nan_is_found_again() -> None:
    assert attr_key(float("nan")) == attr_key(float("nan"))
    assert attr_key((float("nan"), 1)) == attr_key((float("nan"), 1))


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, {1}, torch.ones(2), Loose(1.0), (1, [2]), object(), bytearray(b"x")]
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(PlanError, match="thing"):
        attr_key(value, "thing")


def test_order_of_attributes_does_not_matter() -> None:
    assert Attrs({"a": 1, "b": 2}).key == Attrs({"b": 2, "a": 1}).key


def test_equal_pure_nodes_are_one() -> None:
    g, x = graph()
    assert g.call(COPYSIGN, x, k=1.0) == g.call(COPYSIGN, x, k=1.0)
    assert g.call(COPYSIGN, x, k=0.0) != g.call(COPYSIGN, x, k=-0.0)
    assert g.call(COPYSIGN, x, k=1.0) != g.call(COPYSIGN, x, k=True)
    assert g.call(COPYSIGN, x, k=float("nan")) == g.call(COPYSIGN, x, k=float("nan"))
    assert g.calls(PAIR, x) == g.calls(PAIR, x)


def test_signed_zero_in_a_pipeline() -> None:
    """copysign(x, 0.0) - copysign(x, -0.0) = 2 |x|, not 0."""

    class Both(te.Op):
        def emit(self, g: Graph, x: Value) -> tuple[Value, Value]:
            return g.call(COPYSIGN, x, k=0.0), g.call(COPYSIGN, x, k=-0.0)

    a, b = Both()(torch.ones(1, 1))
    assert float(a - b) == 2.0


def test_primitives_are_identified_by_object_not_by_name() -> None:
    one = Prim("same", lambda x: x, same)
    two = Prim("same", lambda x: 2 * x, same)
    g, x = graph()
    assert g.call(one, x) != g.call(two, x)


def test_a_second_primitive_of_a_name_is_refused() -> None:
    with pytest.raises(PlanError, match="test_graph_pair"):
        prim("test_graph_pair", infer=same)(lambda x: x)
    made = prim("test_graph_replaced", infer=same)(lambda x: x)
    again = prim("test_graph_replaced", infer=same, replace=True)(lambda x: x)
    assert PRIMS["test_graph_replaced"] is again is not made


def test_effects_are_never_merged_random_by_stream() -> None:
    g, x = graph()
    assert g.call(EFFECT, x) != g.call(EFFECT, x)
    assert g.call(RANDOM, x, stream=g.stream()) != g.call(RANDOM, x, stream=g.stream())
    assert g.call(RANDOM, x, stream=7) == g.call(RANDOM, x, stream=7)


def test_scopes_keep_nodes_apart() -> None:
    g, x = graph()
    outside = g.call(COPYSIGN, x, k=1.0)
    with g.recompute():
        inside = g.call(COPYSIGN, x, k=1.0)
        assert inside == g.call(COPYSIGN, x, k=1.0)
    with g.recompute():
        other = g.call(COPYSIGN, x, k=1.0)
    assert len({outside, inside, other}) == 3
    assert g.node(inside).scope != g.node(other).scope


# -- specs


def test_every_value_has_a_spec_while_emitting() -> None:
    g, x = graph(2, 8)
    a, b = g.calls(PAIR, x)
    assert (g.spec(a), g.spec(b)) == (Spec((2, 8), F32), Spec((2, 8), torch.float64))


def test_default_inference_runs_on_meta() -> None:
    made = prim("test_graph_meta", n_out=2, replace=True)(lambda x, k: (x[..., :k], x.sum(-1)))
    g, x = graph(3, 8)
    a, b = g.calls(made, x, k=2)
    assert (g.spec(a).shape, g.spec(b).shape) == ((3, 2), (3,))


def test_nbytes() -> None:
    assert Spec((3, 4), torch.bfloat16).nbytes == 24
    assert Spec((), F32).nbytes == 4
    assert Spec((0, 4), F32).nbytes == 0
    assert Spec((2,), torch.int64, Kind("shape")).nbytes == 0
    q = te.MXFP8Quantizer()
    assert Spec((32, 64), F32, Kind("record", q, Usage.ROW)).nbytes == 32 * 64 + 32 * 2


def test_leading_dimensions_may_not_be_attributes() -> None:
    dim = Dim(8, (0, 0))
    for value in (dim, (dim, 2), Frozen(1.0, (dim,))):
        with pytest.raises(DynamicAttribute, match=r"g\.shape"):
            attr_key(value)
    assert dim == 8
    assert type(dim + 0) is int


def test_shape_readers_do_not_make_a_forward_value_of_backward() -> None:
    g, x = graph()
    with g._in_phase(Phase.DGRAD):
        shape = g.shape(x)
    assert g.node(shape).phase is Phase.FORWARD
    assert g.spec(shape).kind.name == "shape"


def test_require_and_messages() -> None:
    require(True, "fine")
    with pytest.raises(ShapeError, match="bad"):
        require(False, "bad")
    g, x = graph(2, 8)
    with pytest.raises(PlanError, match="2 outputs"):
        g.call(PAIR, x)
    with g.at("layers.3"), pytest.raises(ShapeError, match=r"layers\.3: input has 8 features"):
        g.call(
            te.basic.gemm.GEMM,
            x,
            g.leaf(BUFFER, Spec((4, 4), F32), slot=("", "w")),
            layout="nt",
            dtype=F32,
        )


def test_a_graph_without_modules_has_no_parameters() -> None:
    g, x = graph()
    with pytest.raises(PlanError, match="without modules"):
        g.param(torch.ones(2))
    with pytest.raises(PlanError, match="without modules"):
        g.module(torch.nn.Linear(8, 8), x)


# -- phases and leaves


def test_phases_are_ordered() -> None:
    assert Phase.FORWARD < Phase.RECOMPUTE < Phase.DGRAD < Phase.WGRAD
    assert [p.is_backward for p in Phase] == [False, True, True, True]


def test_leaves_are_one_each() -> None:
    g, _ = graph()
    assert g.seed() == g.seed()
    a = g.leaf(GRAD, Spec((2,), F32), index=0)
    assert a == g.leaf(GRAD, Spec((2,), F32), index=0) != g.leaf(GRAD, Spec((2,), F32), index=1)


def test_liveness() -> None:
    g, x = graph()
    a = g.call(COPYSIGN, x, k=1.0)
    b = g.call(COPYSIGN, a, k=2.0)
    dead = g.call(COPYSIGN, a, k=3.0)
    alive = g.live([b])
    assert [alive[v.node] for v in (x, a, b, dead)] == [True, True, True, False]


def test_attributes_read_as_fields() -> None:
    g, x = graph()
    node = g.node(g.call(COPYSIGN, x, k=1.5))
    assert node.k == 1.5
    with pytest.raises(AttributeError, match="no attribute 'z'"):
        _ = node.z


# -- verify


def test_verify() -> None:
    g, x = graph()
    g.calls(PAIR, x)
    verify(g)


def test_verify_refuses_a_later_input() -> None:
    bad = Graph()
    bad.append(COPYSIGN, (Value(3),), Attrs({"k": 1.0}), (Spec((1,), F32),))
    with pytest.raises(PlanError, match="comes later"):
        verify(bad)


def test_verify_refuses_an_output_that_is_not_there() -> None:
    bad, x = graph()
    bad.append(COPYSIGN, (Value(x.node, 2),), Attrs({"k": 1.0}), (Spec((1,), F32),))
    with pytest.raises(PlanError, match="which has fewer"):
        verify(bad)


def test_verify_refuses_a_forward_reader_of_backward() -> None:
    bad, x = graph()
    with bad._in_phase(Phase.DGRAD):
        dx = bad.call(COPYSIGN, x, k=1.0)
    bad.call(COPYSIGN, dx, k=2.0)
    with pytest.raises(PlanError, match="reads a backward value"):
        verify(bad)


@pytest.mark.parametrize("slot", [s for s in SLOTS if s not in ("trace", "bind")])
def test_every_pass_leaves_a_graph_that_verifies(slot: str) -> None:
    seen: list[int] = []

    def check(work: Work) -> None:
        verify(work.g)
        seen.append(len(work.g.nodes))

    added = passes.add(slot, check)
    try:
        model = te.Sequential(
            te.RMSNorm(32),
            te.Linear(32, 64),
            te.SwiGLU(),
            te.Cut(),
            te.Recompute(te.Linear(32, 32), te.Dropout(0.5)),
        )
        for recipe in (te.recipe.DelayedScaling(), te.recipe.NVFP4BlockScaling()):
            with te.autocast(recipe=recipe):
                model.plan(torch.randn(32, 32, requires_grad=True))
    finally:
        passes.remove(slot, added)
    assert seen


# -- the rewriter


def test_rewriter_copies_everything() -> None:
    g, x = graph()
    with g.at("0"), g.recompute():
        a, _b = g.calls(PAIR, x)
        c = g.call(EFFECT, g.call(COPYSIGN, a, k=-0.0))
    old = g.leaf(BUFFER, Spec((4, 8), F32), slot=("", "seen"), phase=Phase.FORWARD)
    g.update(old, c, "max")
    rewriter = Rewriter(g)
    for node in g.nodes:
        if node.prim is not BUFFER:
            rewriter.copy(node)
    new = rewriter.finish()
    assert new.structure() == g.structure()
    assert [n.path for n in new.nodes] == [n.path for n in g.nodes]
    ((buffer, value, rule),) = new.updates
    assert new.node(buffer).prim is BUFFER
    assert (value, rule) == (rewriter.map[c], "max")
    assert new.stream() == g.stream()
    verify(new)


def test_structure_ignores_shapes_only() -> None:
    def build(rows: int, k: float) -> Graph:
        g, x = graph(rows, 8)
        g.call(COPYSIGN, x, k=k)
        return g

    assert build(2, 1.0).structure() == build(16, 1.0).structure()
    assert build(2, 1.0).structure() != build(2, -1.0).structure()


def test_signature_arity() -> None:
    assert signature_arity(lambda self, g, x, y: 0, 2) == 2
    assert signature_arity(lambda self, g, x, y=1: 0, 2) == 1
    assert signature_arity(lambda self, g, *xs: 0, 2) is None


# -- collectives: a pair of effect nodes from a plug-in pass (contract 13)


@prim(
    "test_gather_start",
    infer=lambda x: Spec((2 * x.shape[0], *x.shape[1:]), x.dtype),
    nature="effect",
)
def START(x: Tensor) -> Tensor:
    return torch.cat([x, x])


@prim("test_gather_wait", infer=same, nature="effect")
def WAIT(x: Tensor) -> Tensor:
    return x


@gradient(START)
def _start_gradient(g: Graph, node: Any, dy: Value) -> tuple[Value]:
    return (g.call(SCATTER, dy),)


@gradient(WAIT)
def _wait_gradient(g: Graph, node: Any, dy: Value) -> tuple[Value]:
    return (g.call(WAIT, dy),)


@prim(
    "test_scatter",
    infer=lambda x: Spec((x.shape[0] // 2, *x.shape[1:]), x.dtype),
    nature="effect",
    differentiable=False,
)
def SCATTER(x: Tensor) -> Tensor:
    return x.chunk(2)[0] + x.chunk(2)[1]


def test_a_pass_in_slot_parallel_may_insert_start_and_wait() -> None:
    """Gather the rows of two ranks (here: the same rank twice) in front of the first linear."""

    def gather(work: Work) -> None:
        rewriter = Rewriter(work.g)
        for node in work.g.nodes:
            if node.prim.name == "gemm":
                x, w = (rewriter.map[v] for v in node.inputs)
                with rewriter.new.position(node):
                    x = rewriter.new.call(WAIT, rewriter.new.call(START, x))
                    out = rewriter.new.call(node.prim, x, w, **node.attrs)
                rewriter.map[node.out] = out
            elif node.prim is CUT or node.inputs:
                inputs = tuple(rewriter.map[v] for v in node.inputs)
                with rewriter.new.position(node):
                    outs = rewriter.new.calls(node.prim, *inputs, **node.attrs)
                for i, out in enumerate(outs):
                    rewriter.map[Value(node.id, i)] = out
            else:
                rewriter.copy(node)
        work.replace_graph(rewriter.finish(), rewriter.map)

    order: list[str] = []

    def bind(call: Call) -> Any:
        function = REGISTRY.find("reference").bind(call)

        def launch(*xs: Any) -> Any:
            order.append(call.node.prim.name)
            return function(*xs)

        return launch

    model = te.Sequential(te.Linear(8, 8), te.GELU())
    x = torch.randn(4, 8, requires_grad=True)
    want = torch.cat([model(x.detach())] * 2)
    added = passes.add("parallel", gather)
    try:
        with REGISTRY.temporary(Kernel("*", "test.order", bind, priority=99)):
            y = model(x)
            y.sum().backward()
    finally:
        passes.remove("parallel", added)
    torch.testing.assert_close(
        y.detach(), want.detach()
    )  # twice the rows: a GEMM may sum otherwise
    assert [n for n in order if n.startswith("test_")] == [
        "test_gather_start", "test_gather_wait", "test_gather_wait", "test_scatter",
    ]  # fmt: skip
    alone = x.detach().clone().requires_grad_()
    (2 * model(alone).sum()).backward()
    torch.testing.assert_close(x.grad, alone.grad)


def test_slots_are_named() -> None:
    assert " ".join(SLOTS) == (
        "trace parallel joint differentiate quantize remat fuse select legalize schedule bind"
    )
    with pytest.raises(PlanError, match="parallel"):
        passes.add("nowhere", lambda work: None)


@pytest.mark.parametrize("slot", SLOTS)
def test_every_slot_runs_its_passes(slot: str) -> None:
    seen: list[Work] = []
    added = passes.add(slot, seen.append)
    try:
        te.Sequential(te.Linear(8, 8), te.GELU()).plan(torch.randn(2, 8))
    finally:
        passes.remove(slot, added)
    assert len(seen) == 1


def test_kinds() -> None:
    assert Kind("dense") == DENSE
    assert Spec((1,), F32).kind is DENSE
