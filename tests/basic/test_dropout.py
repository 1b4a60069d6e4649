"""Dropout: which elements, how often, with what seed, forward and backward, and when none are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_ops.basic.dropout import DROPOUT_MASK, Dropout
from te_ops.basic.structure import Add
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph
from te_ops.op import Op, Scalar
from te_ops.quantizers.philox import philox_uniform

from .interp import DTYPES, check, forward, layouts, program

bf16 = torch.bfloat16


def kept(shape: Any, p: float, seed: int, stream: int = 0) -> torch.Tensor:
    return philox_uniform(tuple(shape), torch.tensor(seed), stream, "cpu") >= p


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.25, 0.875, 1.0])
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 7), (0, 8), (1,), (), (3, 1)])
def test_matches_float64_with_the_same_mask(dtype: Any, p: float, shape: Any) -> None:
    mask = kept(shape, p, seed=3)
    factor = 1 / (1 - p) if p < 1 else 0.0
    for _, x in layouts(torch.randn(shape, dtype=dtype)) if shape else [("", torch.randn(()))]:
        for op in (Dropout(p), Dropout(Scalar(p))):
            check(op, [x], lambda x: torch.where(mask, x * factor, 0.0), seed=3, live=False)
        check(Dropout(p, seed=3), [x], lambda x: torch.where(mask, x * factor, 0.0))


def test_share_and_mean() -> None:
    x = torch.ones(200, 500)
    for p in (0.1, 0.5, 0.9):
        y = forward(Dropout(p), x, seed=11)
        assert abs((y == 0).float().mean() - p) < 5e-3
        assert abs(y.mean() - 1) < 2e-2
        torch.testing.assert_close(y[y != 0].unique(), torch.tensor([1 / (1 - p)]))


def test_mask_depends_on_the_global_index_only() -> None:
    x = torch.ones(6, 10)
    flat = forward(Dropout(0.5), x.reshape(60), seed=5)
    assert torch.equal(forward(Dropout(0.5), x, seed=5).reshape(60), flat)
    longer = forward(Dropout(0.5), torch.ones(9, 10), seed=5)
    assert torch.equal(longer[:6].reshape(60), flat)


def test_backward_drops_the_same_elements_and_saves_no_tensor() -> None:
    x = torch.randn(8, 16)
    made = program(Dropout(0.5), x)
    y, dx = made.run(x, dys=[torch.ones_like(x)], seed=7)
    assert torch.equal(dx == 0, y == 0)
    # The mask can be made again from the seed, which is all that must be kept; x is not read.
    assert DROPOUT_MASK.cheap
    assert [name for name, _, _ in made.saved] == ["dropout_mask"]
    assert made.ran.count("dropout_mask") == 1


def test_what_is_dropped_is_zero_whatever_it_was() -> None:
    x = torch.full((4, 64), torch.nan)
    y, dx = program(Dropout(0.5), x).run(x, dys=[torch.full_like(x, torch.inf)], seed=1)
    mask = kept(x.shape, 0.5, 1)
    assert torch.equal(y.isnan(), mask)
    assert torch.equal(dx.isinf(), mask)
    assert not y[~mask].any()
    assert not dx[~mask].any()


def test_eval_mode_and_p_zero_emit_nothing() -> None:
    x = torch.randn(3, 4)
    for op in (Dropout(0.5).eval(), Dropout(0.0), Dropout(0, seed=3), Dropout(Scalar(0.5)).eval()):
        made = program(op, x)
        y, dx = made.run(x, dys=[x])
        assert y is x
        assert dx is x
        assert made.ran == []


def test_calls_differ_by_the_calls_seed() -> None:
    x = torch.ones(8, 64)
    made = program(Dropout(0.5), x, wanted=lambda _: False)
    first, again, other = (made.run(x, seed=s)[0] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Both(Op):
    """Two dropouts of one input, side by side."""

    def __init__(self, a: Dropout, b: Dropout) -> None:
        super().__init__()
        self.a, self.b = a, b

    def emit(self, g: Graph, x: Any) -> Any:
        return self.a.emit(g, x), self.b.emit(g, x)


def test_draws_of_one_call_differ() -> None:
    x = torch.ones(8, 64)
    a, b = forward(Both(Dropout(0.5), Dropout(0.5)), x)
    assert not torch.equal(a, b)
    drop = Dropout(0.5)  # one op used twice draws twice
    a, b = forward(Both(drop, drop), x)
    assert not torch.equal(a, b)


def test_chosen_seed_repeats_wherever_it_stands() -> None:
    x = torch.ones(8, 64)
    mask = kept(x.shape, 0.5, 1234)
    for call in (0, 1):
        assert torch.equal(forward(Dropout(0.5, seed=1234), x, seed=call) != 0, mask)
    a, b = forward(Both(Dropout(0.5), Dropout(0.5, seed=1234)), x)
    assert torch.equal(b != 0, mask)
    assert not torch.equal(a, b)
    assert not torch.equal(forward(Dropout(0.5, seed=1235), x) != 0, mask)


def test_offset_moves_the_mask_without_a_new_program() -> None:
    x = torch.ones(8, 64)
    offset = Scalar(0)
    op = Dropout(0.5, seed=1234, offset=offset)
    made, key = program(op, x, wanted=lambda _: False), op.config()
    masks = []
    for step in (0, 1, 2, 2**24 - 1):
        offset.set(step)
        masks.append(made.run(x)[0])
        assert torch.equal(masks[-1], forward(Dropout(0.5, seed=1234, offset=step), x))
    assert torch.equal(masks[0] != 0, kept(x.shape, 0.5, 1234))
    for i, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:i])
    assert op.config() == key


def test_scalar_seed() -> None:
    x = torch.ones(8, 64)
    seed = Scalar(77)
    op = Dropout(0.5, seed=seed)
    made = program(op, x, wanted=lambda _: False)
    assert torch.equal(made.run(x)[0], forward(Dropout(0.5, seed=77), x))
    seed.set(78)
    assert torch.equal(made.run(x)[0], forward(Dropout(0.5, seed=78), x))
    both = Dropout(0.5, seed=Scalar(5), offset=Scalar(9))
    assert torch.equal(forward(both, x), forward(Dropout(0.5, seed=5, offset=9), x))


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_any_int64_is_a_seed(seed: int) -> None:
    x = torch.ones(64)
    assert torch.equal(forward(Dropout(0.5, seed=seed), x) != 0, kept((64,), 0.5, seed))
    forward(Dropout(0.5, seed=seed, offset=2**63 - 1), x)


def test_scalar_p_moves_without_a_new_program() -> None:
    x = torch.ones(100, 100)
    p = Scalar(0.1)
    op = Dropout(p)
    made, key = program(op, x), op.config()
    for value in (0.1, 0.0, 0.8, 1.0):
        p.set(value)
        y, dx = made.run(x, dys=[x])
        assert torch.equal(y, dx)
        assert abs((y == 0).float().mean() - value) < 2e-2
        assert y.isfinite().all()
    assert op.config() == key


def test_plan_serves_other_row_counts() -> None:
    made = program(Dropout(0.5), torch.ones(4, 3, 8))
    for lead in ((7, 3), (0, 3), (4, 1)):
        x = torch.ones(*lead, 8)
        y, dx = made.run(x, dys=[x], seed=9)
        assert torch.equal(y != 0, kept(x.shape, 0.5, 9))
        assert torch.equal(y, dx)


def test_dropout_of_a_sum_keeps_the_dtype() -> None:
    class Path(Op):
        num_inputs = 2

        def __init__(self) -> None:
            super().__init__()
            self.add, self.drop = Add(), Dropout(0.5)

        def emit(self, g: Graph, *xs: Any) -> Any:
            return self.drop.emit(g, self.add.emit(g, *xs))

    x = torch.randn(4, 8, dtype=bf16)
    y, da, db = program(Path(), x, x + 1).run(x, x + 1, dys=[x], seed=2)
    assert y.dtype is da.dtype is db.dtype is bf16
    assert torch.equal(da, db)


def test_calls_draw_new_masks_and_follow_torchs_generator() -> None:
    op, x = Dropout(0.5), torch.ones(16, 64, requires_grad=True)
    torch.manual_seed(3)
    first, second = op(x), op(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(op(x), first)
    (dx,) = torch.autograd.grad(second.sum(), x)  # the mask of its own call
    assert torch.equal(dx, second.detach())


def test_changes_after_a_call_count() -> None:
    op, x = Dropout(0.9), torch.ones(16, 64)
    assert (op(x) == 0).any()
    assert torch.equal(op.eval()(x), x)
    op.train().p = 0.1
    assert (op(x) == 0).float().mean() < 0.3
    op.p = 0.0
    assert torch.equal(op(x), x)


def test_offset_scalar_through_calls() -> None:
    step = Scalar(0)
    op, x = Dropout(0.5, seed=7, offset=step), torch.ones(16, 64)
    first = op(x)
    assert torch.equal(op(x), first)
    step.set(1)
    assert torch.equal(op(x), Dropout(0.5, seed=7, offset=1)(x))
    assert not torch.equal(op(x), first)


@pytest.mark.parametrize(
    "bad",
    [
        {"p": -0.1},
        {"p": 1.1},
        {"p": float("nan")},
        {"p": "0.1"},
        {"p": None},
        {"p": True},
        {"p": Scalar(2.0)},
        {"seed": Scalar(0.5)},
        {"seed": Scalar(2.0**24)},
        {"offset": 3},
        {"offset": Scalar(0)},
        {"seed": 2**63},
        {"seed": 1, "offset": -(2**63) - 1},
    ],
)
def test_bad_arguments(bad: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="Dropout"):
        Dropout(**bad)


def test_bad_types_and_inputs() -> None:
    with pytest.raises(ShapeError, match="seed"):
        Dropout(0.5, seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Dropout(0.5, inplace=True)  # type: ignore[call-arg]
    with pytest.raises(ShapeError, match="int64"):
        program(Dropout(0.5), torch.zeros(3, dtype=torch.int64))


def test_mode_and_options_are_part_of_the_key() -> None:
    op = Dropout(0.5)
    keys = {str(op.config())}
    op.p = 0.9
    keys.add(str(op.config()))
    keys.add(str(Dropout(0.5, seed=1).config()))
    keys.add(str(Dropout(0.5, seed=1, offset=2).config()))
    assert len(keys) == 4
    op.p = 2.0
    with pytest.raises(PlanError, match="p must be"):
        program(op, torch.randn(3))
    assert repr(Dropout(0.5)) == "Dropout(p=0.5)"
    assert repr(Dropout(0.5, seed=1)) == "Dropout(p=0.5, seed=1, offset=0)"
