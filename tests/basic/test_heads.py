from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_ops.basic.heads import (
    PACK,
    PACK_HEADS,
    merge_heads,
    split,
    split_heads,
    unpack_heads,
)
from te_ops.errors import ShapeError
from te_ops.graph import Graph, Value
from te_ops.op import Op

from .interp import forward, program


class Emit(Op):
    """An op of one function."""

    num_inputs = None

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def emit(self, g: Graph, *xs: Value) -> Value | tuple[Value, ...]:
        made: Value | tuple[Value, ...] = self.function(g, *xs)
        return made


def run(function: Callable[..., Any], *xs: torch.Tensor) -> Any:
    return forward(Emit(function), *xs)


def run_backward(
    function: Callable[..., Any], xs: list[torch.Tensor], dys: list[torch.Tensor | None]
) -> tuple[list[Any], list[Any]]:
    made = program(Emit(function), *xs, given=[dy is not None for dy in dys])
    results = made.run(*xs, dys=dys)
    return results[: len(dys)], results[len(dys) :]


def test_split_and_heads_are_views_of_the_packed_tensor() -> None:
    x = torch.randn(2, 3, 24)

    def emit(g: Graph, v: Value) -> tuple[Value, ...]:
        a, b, c = split(g, v, (12, 4, 8))
        return split_heads(g, a, 3), b, split_heads(g, c, 1)

    parts = run(emit, x)
    assert torch.equal(torch.cat([p.flatten(2) for p in parts], -1), x)
    assert [tuple(p.shape) for p in parts] == [(2, 3, 3, 4), (2, 3, 4), (2, 3, 1, 8)]
    assert all(p.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for p in parts)


def test_merge_is_a_view_and_undoes_split() -> None:
    x = torch.randn(2, 3, 24)
    y = run(lambda g, v: merge_heads(g, split_heads(g, v, 6)), x)
    assert torch.equal(x, y)
    assert y.data_ptr() == x.data_ptr()


def test_gradients_of_slices_are_packed_side_by_side() -> None:
    x, a, c = torch.randn(2, 24), torch.randn(2, 12), torch.randn(2, 8)

    def emit(g: Graph, v: Value) -> tuple[Value, ...]:
        return split(g, v, (12, 4, 8))

    _, (dx,) = run_backward(emit, [x], [a, torch.ones(2, 4), c])
    assert torch.equal(dx, torch.cat([a, torch.ones(2, 4), c], -1))
    _, (dx,) = run_backward(emit, [x], [a, None, c])
    assert torch.equal(dx, torch.cat([a, torch.zeros(2, 4), c], -1))


def test_pack_and_its_gradient_on_another_axis() -> None:
    a, b = torch.randn(2, 1, 3), torch.randn(2, 4, 3)

    def emit(g: Graph, x: Value, y: Value) -> Value:
        return g.call(PACK, y, x, sizes=(4, 2, 1), filled=(0, 2), axis=1)

    dy = torch.randn(2, 7, 3)
    (y,), (da, db) = run_backward(emit, [a, b], [dy])
    assert torch.equal(y, torch.cat([b, torch.zeros(2, 2, 3), a], 1))
    assert torch.equal(da, dy[:, 6:])
    assert torch.equal(db, dy[:, :4])


@pytest.mark.parametrize("shape", [(0, 3, 24), (2, 0, 24)])
def test_zero_rows(shape: tuple[int, ...]) -> None:
    def emit(g: Graph, v: Value) -> tuple[Value, ...]:
        a, b = split(g, v, (16, 8))
        return merge_heads(g, split_heads(g, a, 4)), b

    x = torch.randn(shape)
    (a, b), (dx,) = run_backward(emit, [x], [torch.ones(*shape[:2], 16), None])
    assert (a.shape, b.shape, dx.shape) == ((*shape[:2], 16), (*shape[:2], 8), shape)


def test_one_part_is_the_value_itself() -> None:
    made = program(Emit(lambda g, v: split(g, v, (24,))), torch.randn(2, 24), given=[False])
    assert made.outputs == (Value(0),)
    assert len(made.g.nodes) == 1


def test_mistakes() -> None:
    x = torch.randn(2, 24)
    with pytest.raises(ShapeError, match="make 23, the axis has 24"):
        run(lambda g, v: split(g, v, (12, 11)), x)
    with pytest.raises(ShapeError, match="5 heads"):
        run(lambda g, v: split_heads(g, v, 5), x)
    with pytest.raises(ShapeError, match="merge_heads"):
        run(merge_heads, torch.randn(4))
    with pytest.raises(ShapeError, match="does not fit"):
        run(
            lambda g, a, b: g.call(PACK, a, b, sizes=(24, 8), filled=(0, 1)),
            x,
            torch.randn(3, 8),
        )


PARTS = ((3, 4), (2, 4), (1, 6))


def packed(g: Graph, *xs: Value) -> Value:
    return g.call(PACK_HEADS, *xs, parts=PARTS, filled=(0, 1, 2))


def test_heads_of_several_kinds_are_views_of_the_packed_tensor() -> None:
    x = torch.randn(2, 5, 26)
    parts = run(lambda g, v: unpack_heads(g, v, PARTS), x)
    assert [tuple(p.shape) for p in parts] == [(2, 5, 3, 4), (2, 5, 2, 4), (2, 5, 1, 6)]
    assert all(p.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for p in parts)
    assert torch.equal(run(packed, *parts), x)


@pytest.mark.parametrize("given", [(0, 1, 2), (0, 2), (1,)])
def test_gradients_of_heads_meet_in_one_tensor(given: tuple[int, ...]) -> None:
    x = torch.randn(2, 5, 26)
    dys = [torch.randn(2, 5, *part) if i in given else None for i, part in enumerate(PARTS)]
    _, (dx,) = run_backward(lambda g, v: unpack_heads(g, v, PARTS), [x], list(dys))
    zeros = [torch.zeros(2, 5, *part) for part in PARTS]
    filled = [z if dy is None else dy for dy, z in zip(dys, zeros, strict=True)]
    assert torch.equal(dx, torch.cat([t.flatten(2) for t in filled], -1))


def test_packing_splits_its_gradient() -> None:
    xs = [torch.randn(2, *part) for part in PARTS]
    dy = torch.randn(2, 26)
    _, dxs = run_backward(packed, xs, [dy])
    assert torch.equal(torch.cat([d.flatten(1) for d in dxs], -1), dy)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ShapeError, match=r"does not hold 3 heads of 4 \+ 2 heads of 4 \+ 1 heads of 6"
    ):
        run(lambda g, v: unpack_heads(g, v, PARTS), torch.randn(2, 25))
    with pytest.raises(ShapeError, match="does not fit beside"):
        run(packed, torch.randn(2, 3, 4), torch.randn(2, 2, 4), torch.randn(2, 2, 6))
    assert PACK_HEADS.nature == "placement"
