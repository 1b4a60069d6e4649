"""Bound steps over slots: what is loaded, kept and dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te
from te_ops.compiler.bind import Leaf
from te_ops.registry import REGISTRY, Call, Kernel


def test_a_plan_holds_leaves_by_path_only() -> None:
    model = te.Sequential(te.Linear(4, 4), te.ConstantScale(te.scalar(2.0)), te.Dropout(0.5))
    (segment,) = model.plan(torch.randn(2, 4)).segments
    assert segment.forward is not None
    leaves = [leaf for leaf, _ in segment.forward.loads]
    assert set(leaves) == {
        Leaf("input", 0),
        Leaf("param", 0, "0", "weight"),
        Leaf("param", 0, "0", "bias"),
        Leaf("scalar", 0, "1", "scale"),
        Leaf("seed"),
    }
    assert segment.leaves == (
        Leaf("input", 0),
        Leaf("param", 0, "0", "bias"),
        Leaf("param", 0, "0", "weight"),
    )


def test_values_are_dropped_at_their_last_reader() -> None:
    """Slots of a call without gradients are empty in the end, but for the results."""
    model = te.Sequential(te.Linear(4, 4), te.RMSNorm(4), te.Linear(4, 4), te.RMSNorm(4))
    x = torch.randn(2, 4)
    with torch.no_grad():
        (segment,) = model.plan(x).segments
    bound = segment.forward
    assert bound is not None
    slots: list[Any] = [None] * bound.size
    for leaf, slot in bound.loads:
        slots[slot] = (
            x if leaf.kind == "input" else getattr(model.get_submodule(leaf.path), leaf.name)
        )
    for step in bound.steps:
        step(slots)
    assert [i for i, s in enumerate(slots) if s is not None] == list(bound.results)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_steps_of_every_arity(count: int) -> None:
    class Sum(te.Op):
        num_inputs = count

        def emit(self, g: te.graph.Graph, *xs: te.graph.Value) -> te.graph.Value:
            return g.call(te.basic.pointwise.SUM, *xs, dtype=torch.float32)

    xs = [torch.full((2, 2), 2.0**i) for i in range(count)]
    assert torch.equal(Sum()(*xs), torch.full((2, 2), 2.0**count - 1))
    assert torch.equal(Sum()(*[xs[0]] * count), torch.full((2, 2), float(count)))


def test_a_value_read_twice_by_one_step() -> None:
    class Twice(te.Op):
        def emit(self, g: te.graph.Graph, x: te.graph.Value) -> te.graph.Value:
            return g.call(te.basic.pointwise.SUM, x, x, x, dtype=torch.float32)

    x = torch.ones(2, 2, requires_grad=True)
    y = Twice()(x)
    assert torch.equal(y.detach(), torch.full((2, 2), 3.0))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 3.0))


def test_kernels_are_bound_once_per_plan() -> None:
    bound: list[str] = []

    def bind(call: Call) -> Any:
        bound.append(call.node.prim.name)
        return REGISTRY.find("reference").bind(call)

    model = te.Sequential(te.Linear(4, 4), te.GELU())
    with REGISTRY.temporary(Kernel("*", "test.bind", bind, priority=99)):
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
        once = list(bound)
        te.Sequential(te.Linear(4, 4), te.GELU())(torch.randn(2, 4)).sum().backward()
    assert bound == once
    assert once.count("gemm") == 2


def test_a_kernel_must_return_what_it_writes() -> None:
    def bind(call: Call) -> Any:
        def launch(*xs: Tensor) -> tuple[Tensor, ...]:
            return (xs[0],)  # one result for two writes

        return launch

    op = te.RMSNorm(4)
    short = Kernel("rmsnorm", "test.short", bind, priority=99)
    with REGISTRY.temporary(short), pytest.raises(ValueError, match="shorter"):
        op(torch.randn(2, 4))
