"""Chains of nodes as one function."""

from __future__ import annotations

import pytest
import torch

from te_ops.backends.chains import compose_chain, sum_fn
from te_ops.basic.pointwise import SUM, pointwise
from te_ops.graph import Graph, Spec, Value
from te_ops.pointwise import Fn, activations, evaluate
from te_ops.registry import Call

BF16 = torch.bfloat16


class Chain:
    """Nodes over inputs [8, 16], with a bias [16]."""

    def __init__(self) -> None:
        self.g = Graph()
        self.x, self.y = (self.g.input(i, Spec((8, 16), BF16)) for i in range(2))
        self.bias = self.g.input(2, Spec((16,), BF16))

    def call(self, *made: Value, writes: tuple[Value, ...] = ()) -> Call:
        nodes = tuple(self.g.node(v) for v in made)
        specs = {v: self.g.spec(v) for n in nodes for v in (*n.inputs, n.out)}
        reads = tuple(v for v in specs if v not in made)
        return Call(nodes, reads, (*writes, made[-1]), specs, torch.device("cpu"), "sm_90", 8)


def fn(name: str) -> Fn:
    return activations[name]()


def test_a_residual_joins_the_activation_before_it() -> None:
    c = Chain()
    biased = pointwise(c.g, fn("bias"), c.x, c.bias)
    act = pointwise(c.g, fn("gelu"), biased)
    total = c.g.call(SUM, act, c.y, dtype=BF16)
    call = c.call(biased, act, total)
    chain = compose_chain(call, call.nodes)
    assert not isinstance(chain, str)
    assert (chain.values, chain.kinds) == ((c.x, c.bias, c.y), ("full", "row", "full"))
    assert chain.dtype is BF16
    xs = torch.randn(8, 16), torch.randn(16), torch.randn(8, 16)
    wanted = torch.nn.functional.gelu(xs[0] + xs[1], approximate="tanh") + xs[2]
    assert torch.allclose(evaluate(chain.fn, *xs), wanted, atol=1e-6)


def test_a_value_that_is_read_twice_is_one_operand() -> None:
    c = Chain()
    act = pointwise(c.g, fn("silu"), c.x)
    product = pointwise(c.g, fn("mul"), act, c.x)
    call = c.call(act, product)
    chain = compose_chain(call, call.nodes)
    assert not isinstance(chain, str)
    assert chain.values == (c.x,)


def test_reasons() -> None:
    c = Chain()
    act = pointwise(c.g, fn("silu"), c.x)
    other = pointwise(c.g, fn("gelu"), c.y)
    twice = pointwise(c.g, fn("gelu"), act)
    written = c.call(act, twice, writes=(act,))
    assert "read elsewhere" in str(compose_chain(written, written.nodes))
    apart = c.call(act, other)
    assert "does not read" in str(compose_chain(apart, apart.nodes))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_sum_adds_in_order(count: int) -> None:
    xs = [torch.randn(4) for _ in range(count)]
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    assert torch.equal(evaluate(sum_fn(count), *xs), total)
