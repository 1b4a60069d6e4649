"""RoPE against complex multiplication in float64, and the table against its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_ops.basic.rope import ROPE, ROPE_TABLE, RoPE, rope
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Value
from te_ops.op import Op, Scalar

from .interp import DTYPES, close, forward, layouts, program


def oracle(
    x: torch.Tensor, dim: int, base: float = 10000.0, interleaved: bool = False, start: int = 0
) -> torch.Tensor:
    """Pair i of position p times exp(i p base^(-2i/dim)), in float64."""
    x = x.double()
    half = dim // 2
    angle = torch.arange(start, start + x.shape[1], dtype=torch.float64)[:, None] * (
        base ** (-2.0 * torch.arange(half, dtype=torch.float64) / dim)
    )
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    rotated = x[..., :dim]
    if interleaved:
        pairs = torch.complex(rotated[..., ::2], rotated[..., 1::2]) * turn
        out = torch.stack([pairs.real, pairs.imag], -1).flatten(-2)
    else:
        pairs = torch.complex(rotated[..., :half], rotated[..., half:]) * turn
        out = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([out, x[..., dim:]], -1)


def gradient(op: Op, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    dx: torch.Tensor = program(op, x).run(x, dys=[dy])[1]
    return dx


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "start"), [(8, 0), (6, 0), (2, 17), (8, 1000)])
def test_values_and_gradient(dtype: torch.dtype, interleaved: bool, dim: int, start: int) -> None:
    x, dy = (torch.randn(2, 7, 3, 8).to(dtype) for _ in range(2))
    op = RoPE(dim, 500.0, interleaved=interleaved, start_position=start)
    # The FP32 angle of position 1000 is off by half a unit of 2^-14.
    scale = 8.0 if dtype is not torch.float32 or start < 1000 else 1000.0
    close(forward(op, x), oracle(x, dim, 500.0, interleaved, start), dtype, scale)
    exact = x.double().requires_grad_()
    loss = (oracle(exact, dim, 500.0, interleaved, start) * dy.double()).sum()
    close(gradient(op, x, dy), torch.autograd.grad(loss, exact)[0], dtype, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_half_precision_rounds_once(dtype: torch.dtype, interleaved: bool) -> None:
    x = torch.randn(2, 7, 3, 8).to(dtype)
    op = RoPE(6, interleaved=interleaved)
    assert torch.equal(forward(op, x), forward(op, x.float()).to(dtype))


def test_the_pairs_are_those_of_the_two_conventions() -> None:
    one = torch.zeros(1, 2, 1, 6)
    one[..., 0] = 1.0
    halves, neighbours = (forward(RoPE(6, interleaved=i), one)[0, 1, 0] for i in (False, True))
    assert halves.nonzero().flatten().tolist() == [0, 3]
    assert neighbours.nonzero().flatten().tolist() == [0, 1]
    permuted = torch.randn(1, 9, 2, 6)
    to_halves = permuted.unflatten(-1, (3, 2)).transpose(-1, -2).flatten(-2)
    turned = forward(RoPE(6, interleaved=True), permuted)
    want = turned.unflatten(-1, (3, 2)).transpose(-1, -2).flatten(-2)
    assert torch.equal(forward(RoPE(6), to_halves), want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone(interleaved: bool) -> None:
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64).expand(1, 40, 1, 16) for _ in range(2))
    op = RoPE(16, interleaved=interleaved)
    scores = forward(op, q)[0, :, 0] @ forward(op, k)[0, :, 0].T
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores.diagonal(0)[:10], scores.diagonal(1)[:10])


def test_position_zero_and_the_unrotated_tail_keep_their_bits() -> None:
    x = torch.randn(2, 5, 2, 8)
    y = forward(RoPE(4), x)
    assert torch.equal(y[:, 0], x[:, 0])
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert not bool((y[:, 1:, :, :4] == x[:, 1:, :, :4]).any())


def test_turning_back_is_the_inverse() -> None:
    x = torch.randn(2, 50, 2, 8, dtype=torch.float64)
    op = RoPE(8)
    torch.testing.assert_close(gradient(op, x, forward(op, x)), x, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("start", [3, Scalar(3.0)], ids=["int", "scalar"])
def test_a_start_is_an_offset(start: Any) -> None:
    x = torch.randn(2, 9, 2, 8)
    y = forward(RoPE(8), x)
    assert torch.equal(forward(RoPE(8, start_position=start), x[:, 3:]), y[:, 3:])


def test_a_scalar_start_moves_without_a_new_graph() -> None:
    x = torch.randn(1, 9, 2, 8)
    op = RoPE(8, start_position=Scalar(0.0))
    made = program(op, x[:, :4])
    whole = forward(RoPE(8), x)
    for start in (0, 1, 5):
        op.start_position.set(start)  # type: ignore[union-attr]
        y, dx = made.run(x[:, start : start + 4], dys=[whole[:, start : start + 4]])
        assert torch.equal(y, whole[:, start : start + 4])
        torch.testing.assert_close(dx, x[:, start : start + 4], rtol=1e-5, atol=1e-6)


def test_one_graph_serves_other_lengths() -> None:
    op = RoPE(8)
    made = program(op, torch.randn(2, 4, 2, 8))
    for shape in ((2, 9, 2, 8), (1, 1, 5, 8), (0, 3, 2, 8), (2, 0, 2, 8)):
        x = torch.randn(shape)
        y, dx = made.run(x, dys=[x])
        assert (y.shape, dx.shape) == (shape, shape)
        close(y, oracle(x, 8), torch.float32)


def test_strides_change_no_bit() -> None:
    for name, x in layouts(torch.randn(2, 7, 3, 8)):
        y = forward(RoPE(6), x)
        assert torch.equal(y, forward(RoPE(6), x.contiguous())), name
        assert y.is_contiguous(), name


def test_sequence_first_layout() -> None:
    x = torch.randn(2, 7, 3, 8)
    y = forward(RoPE(6, qkv_format="sbhd"), x.transpose(0, 1))
    assert torch.equal(y.transpose(0, 1), forward(RoPE(6), x))


def test_the_table_is_the_usual_formula_bit_for_bit() -> None:
    dim, base, s = 128, 500000.0, 300
    inverse = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    angle = torch.outer(torch.arange(s).float(), inverse)
    table = ROPE_TABLE.reference((s,), dim=dim, base=base, start=0, dtype=torch.float32)
    assert torch.equal(table[:, 0], angle.cos())
    assert torch.equal(table[:, 1], angle.sin())


def test_far_positions_keep_the_accuracy_of_an_fp32_angle() -> None:
    attrs: dict[str, Any] = {"dim": 128, "base": 10000.0, "start": 131000}
    exact, single = (
        ROPE_TABLE.reference((72,), dtype=dtype, **attrs)
        for dtype in (torch.float64, torch.float32)
    )
    worst = float((single.double() - exact).abs().max())
    assert 1e-4 < worst < 131071 * 2**-24 * 2  # half a unit of inv_freq, and one of the product


def test_equal_tables_are_one_value() -> None:
    class Four(Op):
        """Two inputs of one length, each rotated in two layers; and one other table."""

        num_inputs = 1

        def emit(self, g: Graph, *xs: Value) -> Value:
            x = rope(g, rope(g, xs[0], 8), 8)
            return rope(g, rope(g, x, 8, base=500.0), 8)

    made = program(Four(), torch.randn(1, 5, 2, 8))
    names = [node.prim.name for node in made.g.nodes]
    assert (names.count("rope_table"), names.count("rope"), names.count("dim")) == (2, 8, 1)
    reads = [made.g.node(v).prim.name for n in made.g.nodes if n.prim is ROPE for v in n.inputs]
    assert set(reads) == {"input", "rope", "grad", "rope_table"}
    tables = [node for node in made.g.nodes if node.prim is ROPE_TABLE]
    assert all(made.g.node(v).prim.name == "dim" for node in tables for v in node.inputs)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"dim": 7}, "even int"),
        ({"dim": 0}, "even int"),
        ({"dim": 8.0}, "even int"),
        ({"dim": 8, "base": 0.0}, "base"),
        ({"dim": 8, "base": float("inf")}, "base"),
        ({"dim": 8, "start_position": -1}, "start_position"),
        ({"dim": 8, "start_position": 1.5}, "start_position"),
        ({"dim": 8, "qkv_format": "bhsd"}, "qkv_format"),
    ],
)
def test_constructor_mistakes(keywords: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        RoPE(**keywords)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 4, 2, 6), "rotates 8 features, heads have 6"),
        (torch.zeros(1, 4, 16), r"\(1, 4, 16\)"),
        (torch.zeros(1, 4, 2, 8, dtype=torch.int64), "int64"),
    ],
)
def test_input_mistakes(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        forward(RoPE(8), x)
