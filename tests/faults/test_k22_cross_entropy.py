"""K22: cross entropy with ignored rows, confident rows, and logits that stay the user's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import te_ops as te
from tests.faults import cases

TARGETS = [[3, -100, 7, -100], [-100, -100, -100, 2], [0, 16, 3, 4], [-100, 1, 1, 1]]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_ignored_rows(
    targets: list[int], reduction: str, smoothing: float, index: torch.dtype
) -> None:
    """B120."""
    logits = torch.randn(4, 17, dtype=torch.float64, requires_grad=True)
    twin = logits.detach().clone().requires_grad_()
    loss = te.CrossEntropy(smoothing, reduction=reduction)(
        logits, torch.tensor(targets, dtype=index)
    )
    wanted = F.cross_entropy(
        twin, torch.tensor(targets), reduction=reduction, label_smoothing=smoothing
    )
    torch.testing.assert_close(loss, wanted)
    weights = cases.loss_weights([loss])[0]
    loss.backward(weights)
    wanted.backward(weights)
    torch.testing.assert_close(logits.grad, twin.grad)
    assert logits.grad is not None
    assert not logits.grad[torch.tensor(targets) == -100].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("fill", [0.0, 1e30, float("inf"), float("nan")])
def test_all_ignored_is_zero_whatever_the_logits_hold(reduction: str, fill: float) -> None:
    logits = torch.full((3, 5), fill, requires_grad=True)
    loss = te.CrossEntropy(reduction=reduction)(logits, torch.full((3,), -100))
    assert not loss.any()
    loss.sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("confident", [True, False])
def test_gradient_is_rounded_once_and_logits_are_only_read(
    dtype: torch.dtype, confident: bool
) -> None:
    """B122."""
    vocabulary = 32000 if dtype is torch.bfloat16 else 1000
    logits = torch.randn(4, vocabulary).to(dtype)
    targets = torch.tensor([0, 5, vocabulary - 1, 77])
    if confident:
        logits[torch.arange(4), targets] = 30.0
    kept = logits.clone()
    leaf = logits.requires_grad_()
    te.CrossEntropy(reduction="none")(leaf, targets).backward(torch.tensor([1.0, 2.0, 0.5, 3.0]))
    assert torch.equal(leaf, kept)
    assert leaf._version == 1 if confident else leaf._version == 0
    twin = kept.double().requires_grad_()
    F.cross_entropy(twin, targets, reduction="none").backward(torch.tensor([1.0, 2.0, 0.5, 3.0]))
    assert leaf.grad is not None
    assert twin.grad is not None
    exact = twin.grad
    ulp = (
        torch.finfo(dtype).eps * exact.abs()
        + 2e-7 * (dtype is torch.float32)
        + torch.finfo(dtype).tiny
    )
    assert ((leaf.grad.double() - exact).abs() <= ulp + 4e-7).all()


@pytest.mark.parametrize("bad", [-1, 17, 10**6])
def test_target_out_of_range_is_refused(bad: int) -> None:
    with pytest.raises(te.ShapeError, match=str(bad)):
        te.CrossEntropy()(torch.randn(2, 17), torch.tensor([1, bad]))


def test_another_ignore_index() -> None:
    logits, targets = torch.randn(4, 9), torch.tensor([0, 3, 3, 8])
    for ignore in (3, -7, 0):
        loss = te.CrossEntropy(ignore_index=ignore)(logits, targets)
        torch.testing.assert_close(loss, F.cross_entropy(logits, targets, ignore_index=ignore))


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e3, 6e4])
def test_large_logits_do_not_cancel(offset: float) -> None:
    logits, targets = torch.randn(5, 9, dtype=torch.float64) + offset, torch.tensor([0, 1, 2, 3, 8])
    loss = te.CrossEntropy()(logits.float(), targets)
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.float().double(), targets).float(), rtol=1e-5, atol=1e-5
    )
