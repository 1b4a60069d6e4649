"""Explicit updates of buffers: how several of a call combine, and that recompute does not repeat them."""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from te_ops.graph import Graph, Value


class Average(te.Op):
    """Keeps the largest amax and the last sum of what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def emit(self, g: Graph, x: Value) -> Value:
        largest, last = g.buffer(self.largest), g.buffer(self.last)
        g.update(largest, g.call(te.basic.quantize.AMAX, x), "max")
        g.update(last, g.call(te.basic.pointwise.REDUCE, x, over="all", dtype=torch.float32))
        return te.basic.structure.add(g, x, x)


def test_updates_combine_by_their_rule() -> None:
    op = Average()
    model = te.Sequential(op, op)
    model(torch.full((2, 2), 3.0))
    assert float(op.largest) == 6.0
    assert float(op.last) == 24.0
    model(torch.ones(2, 2))
    assert float(op.largest) == 6.0
    assert float(op.last) == 8.0


def test_updates_survive_recompute_and_gradients() -> None:
    op = Average()
    model = te.Sequential(te.Linear(4, 4), te.Recompute(op, te.GELU()), te.Linear(4, 4))
    x = torch.randn(2, 4)
    model(x).sum().backward()
    torch.testing.assert_close(op.last, model[0](x).sum())
    before = float(op.last)
    torch.utils.checkpoint.checkpoint(op, x.requires_grad_(), use_reentrant=False).sum().backward()
    torch.testing.assert_close(op.last, x.detach().sum())
    assert before != float(op.last)


def test_update_of_something_else_is_an_error() -> None:
    class Wrong(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            return g.update(x, x)

    with pytest.raises(te.PlanError, match="not a buffer"):
        Wrong()(torch.ones(2, 2))
