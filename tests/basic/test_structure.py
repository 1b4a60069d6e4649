"""Reshape, Identity, Add, ConstantScale, extra inputs and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.attrs import Dim
from te_ops.basic.structure import (
    RESHAPE_TAIL,
    Add,
    AddExtraInput,
    ConstantScale,
    Identity,
    MakeExtraOutput,
    Reshape,
)
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Spec
from te_ops.op import Scalar

from .interp import DTYPES, check, forward, layouts, program, spec_of

bf16 = torch.bfloat16

RESHAPES = [
    ((6, 8), (-1, 4)),
    ((6, 8), (3, -1, 8)),
    ((6, 8), (48,)),
    ((6, 8), (6, 2, 4)),
    ((2, 3, 8), (-1, 8)),
    ((0, 8), (-1, 8)),
    ((0, 8), (0, 3)),
    ((5,), (-1,)),
    ((1,), ()),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("source", "shape"), RESHAPES)
def test_reshape_matches_torch(dtype: torch.dtype, source: Any, shape: Any) -> None:
    for _, x in layouts(torch.randn(source, dtype=dtype)):
        check(Reshape(shape), [x], lambda x: x.reshape(shape))


@pytest.mark.parametrize(
    ("shape", "rows"), [((-1, 8), (7, 0, 1)), ((4, -1, 8), (8, 4, 0)), ((-1,), (3, 0))]
)
def test_reshape_plan_serves_other_row_counts(shape: Any, rows: tuple[int, ...]) -> None:
    made = program(Reshape(shape), torch.randn(12, 8))
    for n in rows:
        x = torch.randn(n, 8)
        dy = torch.randn_like(x.reshape(shape) if n else x.reshape(_filled(shape)))
        y, dx = made.run(x, dys=[dy])
        assert y.shape == dy.shape
        assert torch.equal(y.flatten(), x.flatten())
        assert torch.equal(dx, dy.reshape(n, 8))


def _filled(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if n == -1 else n for n in shape)


def test_reshape_of_a_row_count_that_does_not_fit_is_our_error_at_a_replay_too() -> None:
    made = program(Reshape((4, -1, 8)), torch.randn(12, 8))
    with pytest.raises(ShapeError, match="multiple"):
        made.run(torch.randn(6, 8), dys=[None])


def test_reshape_saves_nothing() -> None:
    x = torch.randn(6, 8)
    made = program(Reshape((-1, 4)), x)
    made.run(x, dys=[torch.randn(12, 4)])
    assert made.saved == []


@pytest.mark.parametrize(
    ("source", "shape", "symbols"),
    [
        ((6, 8), (-1, 8), [True, False]),  # the rows as they are
        ((6, 8), (3, -1, 8), [False] * 3),  # a third of them
        ((2, 3, 8), (-1, 8), [False] * 2),  # a product of two
        ((6, 8), (1, -1, 8), [False, True, False]),
    ],
)
def test_reshape_keeps_the_symbol_where_it_is_certain(
    source: Any, shape: Any, symbols: list[bool]
) -> None:
    made = program(Reshape(shape), torch.randn(source))
    out = made.g.spec(made.outputs[0]).shape
    assert [isinstance(n, Dim) for n in out] == symbols
    if any(symbols):
        assert out[symbols.index(True)].source == (0, 0)


def test_reshape_tail() -> None:
    g = Graph()
    x = g.input(0, spec_of(torch.empty(5, 4, 6), 0))
    y = g.call(RESHAPE_TAIL, x, count=1, tail=(2, 3))
    assert g.spec(y) == Spec((5, 4, 2, 3), torch.float32)
    assert RESHAPE_TAIL.reference(torch.empty(5, 4, 6), 1, (2, 3)).shape == (5, 4, 2, 3)
    with pytest.raises(ShapeError, match="last 1"):
        g.call(RESHAPE_TAIL, x, count=1, tail=(2, 2))
    with pytest.raises(ShapeError, match="last 4"):
        g.call(RESHAPE_TAIL, x, count=4, tail=(120,))


@pytest.mark.parametrize("shape", [(-1, -1), (-2, 4), (0, -1), (2.0, 3), "ab", None])
def test_bad_reshapes(shape: Any) -> None:
    with pytest.raises(ShapeError, match="Reshape"):
        Reshape(shape)


def test_reshape_names_the_shapes() -> None:
    with pytest.raises(ShapeError, match=r"Reshape: .*\(6, 8\).*48.*\(5, -1\)"):
        program(Reshape((5, -1)), torch.randn(6, 8))
    with pytest.raises(ShapeError, match=r"\(6, 8\) has 48 elements"):
        program(Reshape((5, 9)), torch.randn(6, 8))
    assert Reshape(12).shape == (12,)
    assert repr(Reshape([2, -1])) == "Reshape((2, -1))"


def test_identity_emits_nothing() -> None:
    x = torch.randn(3, 4)
    made = program(Identity(), x)
    y, dx = made.run(x, dys=[x + 1])
    assert y is x
    assert torch.equal(dx, x + 1)
    assert made.ran == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 5), (0, 4), (1,), ()])
def test_add_matches_float64(dtype: torch.dtype, count: int, shape: Any) -> None:
    xs = [torch.randn(shape, dtype=dtype) for _ in range(count)]
    check(Add(), xs, lambda *xs: sum(xs), masks=count == 2)


def test_add_accumulates_in_fp32_and_rounds_once() -> None:
    xs = [torch.tensor([v], dtype=bf16) for v in (256.0, 1.0, 1.0)]
    assert forward(Add(), *xs).tolist() == [258.0]  # BF16 steps would give 256


@pytest.mark.parametrize("count", [2, 3])
def test_add_promotes_and_gradients_come_back_in_each_dtype(count: int) -> None:
    dtypes = (bf16, torch.float32, torch.float16)[:count]
    xs = [torch.randn(2, 3, dtype=d) for d in dtypes]
    y, *grads = program(Add(), *xs).run(*xs, dys=[torch.randn(2, 3)])
    assert y.dtype is torch.float32
    assert tuple(d.dtype for d in grads) == dtypes


def test_add_of_strided_inputs() -> None:
    plain = torch.randn(4, 4)
    for _, a in layouts(torch.randn(4, 4)):
        for _, b in layouts(plain):
            assert torch.equal(forward(Add(), a, b), a.contiguous() + b.contiguous())
            assert torch.equal(forward(Add(), a, b, b), a + b + b)


def test_add_of_one_value_twice() -> None:
    class Twice(Add):
        num_inputs = 1

        def emit(self, g: Graph, x: Any) -> Any:
            return super().emit(g, x, x)

    x = torch.randn(3, 4)
    y, dx = program(Twice(), x).run(x, dys=[torch.ones(3, 4)])
    assert torch.equal(y, 2 * x)
    assert (dx == 2).all()


@pytest.mark.parametrize("others", [[(4, 3)], [(3, 4), (3,)], [(4,)], []])
def test_add_refuses(others: list[Any]) -> None:
    with pytest.raises(ShapeError, match="Add"):
        program(Add(), torch.randn(3, 4), *(torch.randn(s) for s in others))
    with pytest.raises(ShapeError, match="floating"):
        program(Add(), torch.randn(3), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.5, -3, 1, 0.0])
@pytest.mark.parametrize("shape", [(4, 6), (0, 4), (1,), ()])
def test_constant_scale_both_ways(dtype: torch.dtype, scale: float, shape: Any) -> None:
    for _, x in layouts(torch.randn(shape, dtype=dtype)) if shape else [("", torch.randn(()))]:
        check(ConstantScale(scale), [x], lambda x: x * scale)
        check(ConstantScale(Scalar(scale)), [x], lambda x: x * scale)


def test_constant_scale_saves_nothing_and_keeps_nan() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf])
    made = program(ConstantScale(0.0), x)
    made.run(x, dys=[x])
    assert made.saved == []
    y = forward(ConstantScale(0.0), x)
    assert y[0] == 0
    assert y[1:].isnan().all()


def test_scalar_moves_without_a_new_program() -> None:
    scale = Scalar(2.0)
    op = ConstantScale(scale)
    x = torch.ones(2, 3)
    made = program(op, x)
    key = op.config()
    scale.set(5.0)
    y, dx = made.run(x, dys=[x])
    assert (y == 5).all()
    assert (dx == 5).all()
    assert op.config() == key
    op.scale = 7.0
    assert op.config() != key


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), "2", None, True])
def test_bad_scales(scale: Any) -> None:
    with pytest.raises(PlanError, match="scale"):
        ConstantScale(scale)
    with pytest.raises(ShapeError, match="int64"):
        program(ConstantScale(2.0), torch.zeros(3, dtype=torch.int64))


def test_make_extra_output_adds_both_gradients() -> None:
    x = torch.randn(3, 4)
    op = MakeExtraOutput()
    assert op.num_extra_outputs == 1
    y, extra, dx = program(op, x).run(x, dys=[x, torch.ones_like(x)])
    assert y is x
    assert extra is x
    torch.testing.assert_close(dx, x + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_extra_input(dtype: torch.dtype) -> None:
    op = AddExtraInput()
    assert op.num_inputs == 2
    x, extra = torch.randn(3, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    before = x.clone(), extra.clone()
    check(op, [x, extra], lambda x, extra: x + extra)
    assert torch.equal(x, before[0])
    assert torch.equal(extra, before[1])
    with pytest.raises(ShapeError, match="AddExtraInput"):
        program(op, x, extra[:1])


def test_extra_tensors_of_a_sequential() -> None:
    model = te.Sequential(MakeExtraOutput(), ConstantScale(2.0), AddExtraInput(), Identity())
    x, extra = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    y, tap = model(x, extra)
    assert torch.equal(y, 2 * x + extra)
    assert torch.equal(tap, x)
    dx, dextra = torch.autograd.grad([y, tap], [x, extra], [x.detach(), torch.ones(3, 4)])
    torch.testing.assert_close(dx, 2 * x.detach() + 1)
    assert torch.equal(dextra, x.detach())


def test_aliases_may_be_written_by_the_user() -> None:
    x = torch.randn(6, 8)
    for op in (Identity(), Reshape((-1, 4)), MakeExtraOutput()):
        outputs = op((x * 1).requires_grad_() * 1)
        for y in outputs if isinstance(outputs, tuple) else (outputs,):
            y.mul_(2.0).sum().backward(retain_graph=True)


@pytest.mark.parametrize("kind", [MakeExtraOutput, AddExtraInput])
def test_in_place_is_refused_with_the_reason(kind: Any) -> None:
    assert kind(in_place=False)
    with pytest.raises(PlanError, match=r"in_place=True is not needed: .*leave it out"):
        kind(in_place=True)
    with pytest.raises(TypeError):
        kind(inplace=True)
