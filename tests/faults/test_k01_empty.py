"""K01: zero rows anywhere, forward and backward, and an emptiness test that looks at sizes only."""

from __future__ import annotations

import copy

import pytest
import torch

import te_ops as te
from tests.faults import cases
from tests.faults.cases import Case, every_case, every_mode, every_quantizer
from tests.faults.experts import experts, routed

PAIRS = [
    pytest.param(case, recipe, id=f"{case.name}-{name}")
    for case in cases.CASES
    for name, recipe in cases.MODES.items()
    if recipe is None or case.name in cases.CORE
]


@pytest.mark.parametrize(("case", "recipe"), PAIRS)
def test_zero_rows(case: Case, recipe: te.Recipe | None) -> None:
    """B003: right shapes and dtypes, zero gradients (not None, not garbage), parameters untouched."""
    op = case.fresh()
    full = cases.step(op, case.data(4), recipe)
    before = [p.detach().clone() for p in op.parameters()]
    xs = case.data(0)
    empty = cases.step(op, xs, recipe)
    for a, b in zip(empty.outputs, full.outputs, strict=True):
        assert a.dtype is b.dtype
        assert a.numel() == 0
        assert a.shape[1:] == b.shape[1:]
    for x, g in zip(xs, empty.input_grads, strict=True):
        assert not x.requires_grad or (g is not None and g.shape == x.shape and g.dtype is x.dtype)
    for name, p in op.named_parameters():
        grad = empty.param_grads[name]
        assert grad is not None, name
        assert grad.shape == p.shape
        assert grad.dtype is p.dtype
        assert not grad.any()
    assert all(torch.equal(a, b) for a, b in zip(before, op.parameters(), strict=True))
    cases.same(cases.step(case.fresh(), case.data(4), recipe), full) if recipe is None else None


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64), (2, 3, 0, 64)], ids=str)
@every_mode
def test_zero_rows_of_every_rank(shape: tuple[int, ...], recipe: te.Recipe | None) -> None:
    op = cases.BY_NAME["MLP"].fresh()
    x = torch.zeros(shape, requires_grad=True)
    result = cases.step(op, (x,), recipe)
    assert result.outputs[0].shape == shape
    assert result.input_grads[0] is not None
    assert result.input_grads[0].shape == shape
    assert all(g is not None and not g.any() for g in result.param_grads.values())


@every_mode
@pytest.mark.parametrize("case", [cases.BY_NAME[n] for n in cases.CORE], ids=lambda c: c.name)
def test_full_after_empty_equals_full(case: Case, recipe: te.Recipe | None) -> None:
    """An empty call leaves nothing behind: no plan, no scale, no gradient."""
    op, twin = case.fresh(), case.fresh()
    with torch.no_grad():  # (a training step would move the weights' scale, and they are not empty)
        cases.step(op, case.data(0), recipe)
    cases.same(cases.step(op, case.data(5), recipe), cases.step(twin, case.data(5), recipe))


@pytest.mark.parametrize("rows", [0, 1, 5])
@every_mode
def test_bias_gradient_is_the_sum_of_dy_whatever_the_gemm_does(
    rows: int, recipe: te.Recipe | None
) -> None:
    """B003's other half: of the unquantized dy, also where x needs no gradient or holds only zeros."""
    op = te.Linear(64, 32)
    for x in (torch.zeros(rows, 64), torch.randn(rows, 64)):
        op.zero_grad()
        with cases.within(recipe):
            y = op(x)
        dy = torch.randn(rows, 32)
        y.backward(dy)
        torch.testing.assert_close(op.bias.grad, dy.sum(0))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0), (2, 0, 64), (0,)], ids=str)
@every_quantizer
def test_quantizers_take_empty_tensors(quantizer: te.Quantizer, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    q = cases.make_quantized(x, quantizer, rowwise=True, columnwise=True)
    assert q.shape == x.shape
    for record in (q.rowwise, q.columnwise):
        assert record is not None
        assert record.dequantize().shape == x.shape
        if record.scale_inv is not None and record.scale_inv.numel():
            assert torch.isfinite(record.scale_inv.float()).all()
        if record.amax is not None:
            assert not record.amax.any()


# -- experts, as a composition of ops


@pytest.mark.parametrize("splits", [(8, 8, 0), (0, 0, 0), (0, 16, 0), (0, 0, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_mode
def test_experts_without_tokens(
    splits: tuple[int, ...], dtype: torch.dtype, recipe: te.Recipe | None
) -> None:
    """B001, B005: gradients of zeros with shapes and dtypes; those with tokens give what they give alone."""
    torch.manual_seed(0)
    every = experts(3, 64, 128, dtype=dtype)
    alone = copy.deepcopy(every)
    x = torch.randn(sum(splits), 64, dtype=dtype, requires_grad=True)
    torch.manual_seed(1)
    with cases.within(recipe):
        y = routed(every, x, splits)
    assert y.shape == (sum(splits), 128)
    assert y.dtype is dtype
    cases.backward([y])
    assert x.grad is not None
    assert x.grad.shape == x.shape
    (dy,) = cases.loss_weights([y])
    for expert, part, mine, grad, xg in zip(
        alone, x.detach().split(splits), every, dy.split(splits), x.grad.split(splits), strict=True
    ):
        for p in mine.parameters():
            assert p.grad is not None
            assert (p.grad.shape, p.grad.dtype) == (p.shape, p.dtype)
            assert len(part) or not p.grad.any()
        if len(part) and recipe not in [cases.RECIPES[name] for name in cases.STOCHASTIC]:
            part = part.clone().requires_grad_()
            with cases.within(recipe):
                expert(part).backward(grad)
            assert torch.equal(part.grad, xg)
            assert all(map(torch.equal, grads(expert), grads(mine)))


def grads(op: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in op.parameters() if p.grad is not None]


FEW = ("none", "delayed", "mxfp8")


@pytest.mark.parametrize("ends", [(3, 255), (100, 101)], ids=str)
@pytest.mark.parametrize("recipe", [cases.MODES[n] for n in FEW], ids=FEW)
def test_most_of_many_experts_have_no_tokens(
    ends: tuple[int, int], recipe: te.Recipe | None
) -> None:
    """B007: 256 experts, 12 tokens, all of two of them."""
    torch.manual_seed(0)
    every = experts(256, 64, 32)
    splits = [5 if i == ends[0] else 7 if i == ends[1] else 0 for i in range(256)]
    x = torch.randn(12, 64, requires_grad=True)
    with cases.within(recipe):
        y = routed(every, x, splits)
    y.sum().backward()
    for i, (expert, part) in enumerate(zip(every, x.detach().split(splits), strict=True)):
        assert expert.weight.grad is not None
        assert bool(expert.weight.grad.any()) == (i in ends), i
        if len(part):
            wanted = torch.nn.functional.linear(part, expert.weight, expert.bias)
            error = cases.relative_error(y.detach().split(splits)[i], wanted)
            assert error <= (2e-5 if recipe is None else 0.3)
    assert x.grad is not None
    assert bool(x.grad.any(1).all())


@every_case
def test_rows_of_one(case: Case) -> None:
    op, xs = case.fresh(), case.data(1)
    cases.compare(cases.run(op, xs), case.expected(op, xs), 1e-4)


def test_losses_of_nothing() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    for reduction, shape in (("mean", ()), ("sum", ()), ("none", (0,))):
        logits.grad = None
        loss = te.CrossEntropy(reduction=reduction)(logits, targets)
        assert loss.shape == shape
        assert not loss.any()
        loss.sum().backward()
        assert logits.grad is not None
        assert logits.grad.shape == (0, 5)
