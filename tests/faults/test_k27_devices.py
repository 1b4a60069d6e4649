"""K27: the meta device, however it is named, and state that belongs to its op's device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_ops as te
from tests.faults import cases


def assert_on_meta(op: nn.Module) -> None:
    tensors = [*op.parameters(), *op.buffers()]
    assert tensors
    assert all(t.is_meta for t in tensors)


@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=repr)
def test_the_meta_device_by_string_and_by_object(device: str | torch.device) -> None:
    """B141: nothing is allocated."""
    assert_on_meta(te.Linear(8, 8, device=device))
    assert_on_meta(te.RMSNorm(8, device=device))
    assert_on_meta(te.Embedding(8, 8, device=device))


def test_every_op_under_the_meta_device() -> None:
    """B141, over all ops with parameters: `with torch.device("meta")`."""
    for case in cases.CASES:
        with torch.device("meta"):
            op = case.make(torch.float32)
        assert all(p.is_meta for p in op.parameters()), case.name


def test_to_empty_and_reset_give_the_distribution_of_eager_construction() -> None:
    torch.manual_seed(4)
    eager = te.Linear(256, 256)
    op = te.Linear(256, 256, device=torch.device("meta")).to_empty(device="cpu")
    torch.manual_seed(4)
    op.reset_parameters()
    assert torch.equal(op.weight, eager.weight)
    assert torch.equal(op.bias, eager.bias)


def test_a_call_with_parameters_on_meta_names_them() -> None:
    model = te.Sequential(te.Linear(8, 8), te.Linear(8, 8, device="meta"))
    with pytest.raises(te.PlanError, match=r"1 \(Linear\): weight is on meta.*to_empty"):
        model(torch.randn(2, 8))


def test_state_moves_with_its_op() -> None:
    """B139 on one machine: delayed-scaling state is made, and kept, where the op is."""
    model = te.Sequential(te.Linear(8, 8), te.Linear(8, 8))
    te.prepare(model, te.recipe.DelayedScaling())
    model[1].to("meta")
    assert all(not b.is_meta for b in model[0].buffers())
    assert_on_meta(model[1])
