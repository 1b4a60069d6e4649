"""K21: rows that are picked by number, and long sums of them: what routing will stand on."""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from tests.faults import cases
from tests.faults.attention import DEVICES
from tests.faults.cases import Case
from tests.faults.test_cases import DEEP


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("bad", [-1, -100, 11, 2**31 - 1])
@pytest.mark.parametrize("device", DEVICES)
def test_b114_a_number_that_names_no_row_picks_none(
    device: str, bad: int, dtype: torch.dtype
) -> None:
    """An error on the CPU; on a GPU, which would have to wait, NaN in that row, and no gradient from it."""
    torch.manual_seed(0)
    op = te.Embedding(11, 16).to(device)
    index = torch.tensor([[0, bad], [1, 0], [bad, 10]], dtype=dtype, device=device)
    if device == "cpu":
        with pytest.raises(te.ShapeError, match=f"{bad} is out of range"):
            op(index)
        assert op.weight.grad is None
        return
    y = op(index)
    hidden = index == bad
    assert torch.equal(y.isnan().all(-1), hidden)
    assert torch.equal(y[~hidden], op.weight[index[~hidden].long()])
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted = torch.zeros_like(op.weight).index_add_(0, index[~hidden].long(), dy[~hidden])
    torch.testing.assert_close(op.weight.grad, wanted)


@pytest.mark.parametrize("bad", [-1, 17, 2**31 - 1])
@pytest.mark.parametrize("device", DEVICES)
def test_b114_a_target_that_names_no_class(device: str, bad: int) -> None:
    """Only `ignore_index` is left out; another number is an error, or NaN in its row alone."""
    torch.manual_seed(0)
    logits = torch.randn(4, 17, device=device, requires_grad=True)
    targets = torch.tensor([3, bad, -100, 7], device=device)
    op = te.CrossEntropy(reduction="none")
    if device == "cpu":
        with pytest.raises(te.ShapeError, match=f"{bad} is out of range"):
            op(logits, targets)
        return
    loss = op(logits, targets)
    loss.backward(torch.ones_like(loss))
    assert loss.isnan().tolist() == [False, True, False, False]
    assert logits.grad is not None
    assert logits.grad.isnan().any(-1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("order", [[-1, 0], [0, 2], [0, -2]], ids=str)
def test_b114_sequences_of_a_cache(order: list[int]) -> None:
    cache = te.KVCache(2, 8, 2, 8)
    with pytest.raises(te.ShapeError, match="there is no sequence"):
        cache.reorder(order)


SUMMED = [case for case in cases.CASES if not case.name.startswith("Attention")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SUMMED, ids=lambda c: c.name)
def test_b118_long_sums_are_not_those_of_the_dtype(device: str, case: Case) -> None:
    """Gradients of 4096 rows in BF16, many of them into one: as near to FP64 as those of 24 in test_cases.py."""
    cpu, xs = case.fresh(torch.bfloat16), case.data(4096, torch.bfloat16)
    expected = case.expected(cpu, xs)
    op = case.fresh(torch.bfloat16).to(device)
    mine = tuple(x.detach().to(device).requires_grad_(x.requires_grad) for x in xs)
    outputs = cases.outputs_of(op(*mine))
    live = [y for y in outputs if y.requires_grad]
    weights = cases.loss_weights([y.detach().cpu() for y in live])
    torch.autograd.backward(live, [w.to(device) for w in weights])
    found = cases.Result(
        [y.detach().cpu() for y in outputs],
        [None if x.grad is None else x.grad.cpu() for x in mine],
        {n: None if p.grad is None else p.grad.cpu() for n, p in op.named_parameters()},
    )
    bound = cases.tolerance_of(torch.bfloat16) * (4 if case.name in DEEP else 1)
    cases.compare(found, expected, bound)


def test_b118_a_sum_in_the_dtype_is_beyond_that_bound() -> None:
    terms = 0.1 + 0.01 * torch.randn(4096, 8)
    total = torch.zeros(8, dtype=torch.bfloat16)
    for term in terms.bfloat16():
        total += term
    assert cases.relative_error(total, terms.double().sum(0)) > 10 * cases.tolerance_of(
        torch.bfloat16
    )
