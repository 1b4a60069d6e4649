"""No copy of a quantized weight outlives its call, however it is written (core contract 7)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_ops as te
from tests.runtime.cases import RECIPES

X = torch.linspace(-1.0, 1.0, 32 * 32).reshape(32, 32)


def optimizer(kind: Any, **options: Any) -> Callable[[te.Linear], None]:
    def write(op: te.Linear) -> None:
        kind(op.parameters(), lr=0.5, **options).step()

    return write


def flat_buffer(op: te.Linear) -> None:
    flat = torch.empty(op.weight.numel())
    flat.copy_(op.weight.detach().reshape(-1))
    op.weight.data = flat.view_as(op.weight)
    run(op)
    flat.mul_(3)


def through_numpy(op: te.Linear) -> None:
    op.weight.detach().numpy()[:] *= 3


def through_data(op: te.Linear) -> None:
    op.weight.data.mul_(3)


def load(assign: bool) -> Callable[[te.Linear], None]:
    return lambda op: (
        op.load_state_dict({k: 3 * v for k, v in op.state_dict().items()}, assign=assign) and None
    )


def swap(op: te.Linear) -> None:
    other = nn.Parameter(3 * op.weight.detach())
    torch.utils.swap_tensors(op.weight, other)


def resize_and_refill(op: te.Linear) -> None:
    """As FSDP2 does it: the storage goes and comes back, the version counter stands still."""
    storage, values = op.weight.untyped_storage(), 3 * op.weight.detach().clone()
    size = storage.size()
    with torch.autograd._unsafe_preserve_version_counter(op.weight):
        storage.resize_(0)
        storage.resize_(size)
        op.weight.detach().copy_(values)


WRITERS: dict[str, Callable[[te.Linear], None]] = {
    "sgd": optimizer(torch.optim.SGD),
    "sgd_fused": optimizer(torch.optim.SGD, fused=True),
    "sgd_foreach": optimizer(torch.optim.SGD, foreach=True),
    "adam_fused": optimizer(torch.optim.Adam, fused=True),
    "adamw_fused": optimizer(torch.optim.AdamW, fused=True),
    "adamw_foreach": optimizer(torch.optim.AdamW, foreach=True),
    "adagrad_fused": optimizer(torch.optim.Adagrad, fused=True),
    "data": through_data,
    "flat": flat_buffer,
    "numpy": through_numpy,
    "load": load(False),
    "load_assign": load(True),
    "swap": swap,
    "resize": resize_and_refill,
}


def run(op: te.Op) -> Tensor:
    with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        return op(X)


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_is_seen_by_the_next_call(name: str) -> None:
    op = te.Linear(32, 32, bias=False)
    before = run(op)
    before.sum().backward()
    WRITERS[name](op)
    fresh = te.Linear(32, 32, bias=False)
    with torch.no_grad():
        fresh.weight.copy_(op.weight)
    got = run(op)
    assert torch.equal(got, run(fresh))
    assert not torch.equal(got, before)


def test_a_step_between_forward_and_backward_is_refused() -> None:
    """A dense weight is saved as it is; torch's version counter guards it."""
    op = te.Linear(32, 32, bias=False)
    y = op(X.clone().requires_grad_())
    y.sum().backward(retain_graph=True)
    torch.optim.SGD(op.parameters(), lr=0.1).step()
    with pytest.raises(te.PlanError, match="changed in place"):
        y.sum().backward()


def test_a_quantized_weight_of_the_forward_serves_its_backward() -> None:
    """Around an unnoticed write, a backward multiplies with its own forward's bytes."""
    op = te.Linear(32, 32, bias=False)
    kept = copy.deepcopy(op)
    a, b = X.clone().requires_grad_(), X.clone().requires_grad_()
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        y, z = op(a), kept(b)
    op.weight.detach().numpy()[:] *= 3
    y.sum().backward()
    z.sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("columnwise", [False, True])
def test_quantized_parameters(name: str, columnwise: bool, autocast: bool) -> None:
    """A weight may be held in 8 bits: it is read as its values, whatever the recipe makes of them."""
    held = te.quantize(torch.randn(32, 32), te.MXFP8Quantizer(), columnwise=columnwise)
    gain = te.quantize(torch.randn(32), te.Float8CurrentScalingQuantizer())
    ours = te.Sequential(te.RMSNorm(32), te.Linear(32, 32), te.GELU())
    dense = copy.deepcopy(ours)
    for model, weights in ((ours, (gain, held)), (dense, (gain.dequantize(), held.dequantize()))):
        for op, weight in zip(model[:2], weights, strict=True):
            op.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(32, 32, requires_grad=True)
    recipe = RECIPES[name]
    results = []
    for model in (ours, dense):
        torch.manual_seed(0)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            te.autocast(recipe is not None, recipe=recipe),
        ):
            y = model(x)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (x, model[1].bias))))
    for got, expected in zip(*results, strict=True):
        # Bytes in the recipe's own format are not rounded again, which a dense copy is (to other bits, if at all).
        torch.testing.assert_close(
            got, expected, rtol=0.02, atol=0.02 * float(expected.detach().abs().max())
        )


def test_a_parameter_in_another_format_is_another_plan() -> None:
    op, x = te.Linear(32, 32, bias=False), torch.randn(4, 32)
    for quantizer in (None, te.MXFP8Quantizer(), te.Float8CurrentScalingQuantizer(), None):
        dense = torch.randn(32, 32)
        weight = dense if quantizer is None else te.quantize(dense, quantizer)
        op.weight = nn.Parameter(weight, requires_grad=False)
        values = dense if quantizer is None else te.quantize(dense, quantizer).dequantize()
        torch.testing.assert_close(op(x), x @ values.t())
