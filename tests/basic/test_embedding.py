"""Embedding: rows and gradients against float64, FP32 sums, padding, bad indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from te_ops.basic.embedding import EMBEDDING, EMBEDDING_BACKWARD, Embedding
from te_ops.errors import PlanError, ShapeError

from .interp import DTYPES, check, forward, program

bf16 = torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(5,), (2, 7), (0,), (2, 0, 3), (), (40,)])
def test_matches_float64(dtype: torch.dtype, index: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 11, shape, dtype=index)
    op = Embedding(11, 6, dtype=dtype, init_std=1.0)
    check(op, [x], lambda x, weight: F.embedding(x, weight))


@pytest.mark.parametrize("padding", [0, 3, -1])
def test_padding_row_starts_at_zero_and_gets_no_gradient(padding: int) -> None:
    op = Embedding(5, 4, padding_idx=padding, init_std=1.0)
    assert op.padding_idx == padding % 5
    assert (op.weight == 0).all(-1).tolist() == [i == padding % 5 for i in range(5)]
    with torch.no_grad():
        op.weight[padding] = 2.0
    x = torch.tensor([[0, 3, 4], [3, 1, 4]])
    check(op, [x], lambda x, weight: F.embedding(x, weight, padding))
    assert (forward(op, torch.tensor([padding % 5])) == 2.0).all()  # read as any other row


@pytest.mark.parametrize("dtype", [bf16, torch.float16])
def test_gradient_sums_in_fp32(dtype: torch.dtype) -> None:
    x = torch.zeros(1000, dtype=torch.int64)
    op = Embedding(3, 2, dtype=dtype)
    _, dw = program(op, x).run(x, dys=[torch.ones(1000, 2, dtype=dtype)])
    assert dw.tolist() == [[1000.0, 1000.0], [0.0, 0.0], [0.0, 0.0]]
    assert dw.dtype is dtype


def test_strided_indices_and_expanded_gradients() -> None:
    op = Embedding(7, 4)
    grid = torch.randint(0, 7, (6, 4))
    dy = torch.randn(4).expand(4, 3, 4)
    x = grid.t()[:, ::2]
    y, dw = program(op, x).run(x, dys=[dy])
    flat = x.contiguous()
    want, dwant = program(op, flat).run(flat, dys=[dy.contiguous()])
    assert torch.equal(y, want)
    assert torch.equal(dw, dwant)
    one = torch.tensor([3]).expand(5)
    assert torch.equal(forward(op, one), op.weight[3].detach().expand(5, 4))


def test_only_the_indices_are_saved_and_a_frozen_table_costs_nothing() -> None:
    x = torch.tensor([1, 2])
    op = Embedding(4, 3)
    made = program(op, x)
    made.run(x, dys=[torch.ones(2, 3)])
    assert made.saved == [("input", 0, torch.int64)]
    frozen = program(op, x, wanted=lambda _: False)
    frozen.run(x)
    assert frozen.ran == ["embedding"]


def test_plan_serves_other_row_counts() -> None:
    op = Embedding(9, 4)
    made = program(op, torch.zeros(2, 3, dtype=torch.int64))
    for shape in ((5, 3), (0, 3), (2, 7)):
        x = torch.randint(0, 9, shape)
        dy = torch.randn(*shape, 4)
        y, dw = made.run(x, dys=[dy])
        assert torch.equal(y, op.weight.detach()[x])
        fresh = program(op, x).run(x, dys=[dy])
        assert torch.equal(dw, fresh[1])


def test_autocast_does_not_change_the_dtype() -> None:
    op = Embedding(4, 3)
    assert forward(op, torch.tensor([1]), autocast=bf16).dtype is torch.float32


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_bad_index(bad: int) -> None:
    with pytest.raises(ShapeError, match=rf"index {bad} is out of range.* 4 rows"):
        forward(Embedding(4, 3), torch.tensor([0, bad, 1]))


def test_bad_index_on_a_device_gives_nan_rows_and_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The path without a wait for the device, run on the CPU.
    import te_ops.basic.embedding as module

    monkeypatch.setattr(module, "checked_here", lambda index: False)
    index, weight = torch.tensor([0, 9, -1, 3, 0]), torch.randn(4, 3)
    y = EMBEDDING.reference(index, weight, padding_idx=None)
    assert y[1:3].isnan().all()
    assert torch.equal(y[[0, 3, 4]], weight[[0, 3, 0]])
    dw = EMBEDDING_BACKWARD.reference(
        torch.ones(5, 3), index, rows=4, padding_idx=None, dtype=torch.float32
    )
    assert dw[:, 0].tolist() == [2.0, 0.0, 0.0, 1.0]


def test_start_and_reset() -> None:
    torch.manual_seed(0)
    assert abs(Embedding(200, 50).weight.std().item() - 0.02) < 1e-3
    assert abs(Embedding(200, 50, init_std=0.5).weight.std().item() - 0.5) < 2e-2
    assert not Embedding(4, 3, init_std=0.0).weight.any()
    op = Embedding(4, 3, 1, device="meta", dtype=bf16).to_empty(device="cpu")
    with torch.no_grad():
        op.weight.fill_(5.0)
    op.reset_parameters()
    assert op.weight.dtype is bf16
    assert op.weight.abs().max() < 1
    assert not op.weight[1].any()
    assert repr(op) == "Embedding(4, 3, padding_idx=1)"


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"num_embeddings": 0}, ShapeError),
        ({"embedding_dim": 0}, ShapeError),
        ({"embedding_dim": 1.5}, ShapeError),
        ({"padding_idx": 4}, ShapeError),
        ({"padding_idx": -5}, ShapeError),
        ({"padding_idx": 0.0}, ShapeError),
        ({"init_std": -1.0}, PlanError),
        ({"dtype": torch.int8}, PlanError),
        ({"max_norm": 1.0}, TypeError),
    ],
)
def test_bad_arguments(bad: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Embedding(**({"num_embeddings": 4, "embedding_dim": 3} | bad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_bad_index_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ShapeError, match="int32 or int64"):
        program(Embedding(4, 3), torch.zeros(2, dtype=dtype))
