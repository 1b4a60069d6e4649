"""Bias: values and gradients against float64, FP32 sums, empty work, strides, frozen parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_ops.basic.bias import Bias
from te_ops.errors import PlanError, ShapeError

from .interp import DTYPES, check, forward, layouts, program

bf16 = torch.bfloat16


def filled(size: int, dtype: torch.dtype) -> Bias:
    torch.manual_seed(1)
    op = Bias(size, dtype=dtype)
    with torch.no_grad():
        op.bias.normal_()
    return op


def _add(x: Any, *, bias: Any) -> Any:
    return x + bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 7), (0, 8), (2, 0, 8), (1,), (9,), (3, 1)])
def test_matches_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    op = filled(shape[-1], dtype)
    for name, x in layouts(torch.randn(shape, dtype=dtype)):
        check(op, [x], _add, masks=name == "contiguous")


def test_gradient_sums_in_fp32() -> None:
    x = torch.zeros(4096, 3, dtype=bf16)
    _, _, db = program(filled(3, bf16), x).run(x, dys=[torch.full_like(x, 1.0)])
    assert db.tolist() == [4096.0] * 3  # a BF16 sum stops at 256


def test_zero_rows_give_a_zero_gradient() -> None:
    x = torch.randn(0, 4, dtype=bf16)
    y, dx, db = program(filled(4, bf16), x).run(x, dys=[x])
    assert y.shape == dx.shape == (0, 4)
    assert db.dtype is bf16
    assert db.tolist() == [0.0] * 4


def test_output_has_the_inputs_dtype() -> None:
    x = torch.randn(3, 4, dtype=bf16)
    op = filled(4, torch.float32)
    y, dx, db = program(op, x).run(x, dys=[torch.ones_like(x)])
    assert (y.dtype, dx.dtype, db.dtype) == (bf16, bf16, torch.float32)
    assert torch.equal(y, (x.float() + op.bias).to(bf16))


def test_expanded_gradient() -> None:
    x = torch.randn(5, 4)
    dy = torch.tensor(2.0).expand(5, 4)
    _, dx, db = program(filled(4, torch.float32), x).run(x, dys=[dy])
    assert torch.equal(dx, dy)
    assert db.tolist() == [10.0] * 4


def test_nothing_is_saved_and_a_frozen_bias_costs_nothing() -> None:
    x = torch.randn(5, 4)
    made = program(Bias(4), x, wanted=lambda name: name == "0")
    made.run(x, dys=[x])
    assert made.ran == ["pointwise"]
    assert made.saved == []
    trained = program(Bias(4), x)
    trained.run(x, dys=[x])
    assert trained.saved == []


def test_plan_serves_other_row_counts() -> None:
    op = filled(4, torch.float32)
    made = program(op, torch.randn(6, 4))
    for rows in (3, 0):
        x = torch.randn(rows, 4)
        assert torch.equal(made.run(x, dys=[x])[2], x.sum(0))


def test_start_and_reset() -> None:
    assert Bias(4, dtype=bf16).bias.tolist() == [0.0] * 4
    op = Bias(4, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        op.bias.fill_(3.0)
    op.reset_parameters()
    assert not op.bias.any()
    assert repr(op) == "Bias(4)"


def test_forward_does_not_write_the_bias() -> None:
    op = filled(4, torch.float32)
    before = op.bias.clone()
    forward(op, torch.randn(0, 4))
    forward(op, torch.randn(2, 4))
    assert torch.equal(op.bias, before)


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", True, None])
def test_bad_sizes(size: Any) -> None:
    with pytest.raises(ShapeError, match="size"):
        Bias(size)


def test_bad_inputs_and_options() -> None:
    with pytest.raises(ShapeError, match=r"Bias: .*\(3, 5\).*4 features"):
        program(Bias(4), torch.randn(3, 5))
    with pytest.raises(ShapeError, match="4 features"):
        program(Bias(4), torch.tensor(1.0))
    with pytest.raises(PlanError, match="dtype"):
        Bias(4, dtype=torch.int64)
    with pytest.raises(TypeError):
        Bias(4, tensor_parallel=True)  # type: ignore[call-arg]
