"""Quantize and Dequantize ops: marks, folding, records as inputs and outputs."""

from __future__ import annotations

import pytest
import torch

import te_ops as te

CURRENT = te.recipe.Float8CurrentScaling()


def names(steps) -> list[str]:
    return [s.nodes[0].split("(")[0] for s in steps]


def test_outside_autocast_quantize_is_nothing() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    y = te.Sequential(te.Quantize(backward=True))(x)
    assert torch.equal(y, x)
    assert not te.Sequential(te.GELU(), te.Quantize()).plan(x).segments[0].saved_values[1:]


def test_a_reader_in_the_same_format_reuses_the_record() -> None:
    model = te.Sequential(te.Linear(32, 32), te.Quantize(), te.Linear(32, 32))
    x = torch.randn(8, 32, requires_grad=True)
    with te.autocast(recipe=CURRENT):
        plan, plain = model.plan(x), te.Sequential(model[0], model[2]).plan(x)
    count = [names(p.segments[0].forward_steps).count("quantize") for p in (plan, plain)]
    assert count == [4, 4]  # the mark's quantize serves the second GEMM: nothing is rounded twice
    assert not [n for n in plan.notes if "second rounding" in n.reason]


def test_another_format_is_a_second_rounding_and_says_so() -> None:
    quantizer = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    model = te.Sequential(te.Quantize(quantizer=quantizer), te.Linear(64, 32))
    x = torch.randn(8, 64)
    with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        notes = [n.reason for n in model.plan(x).notes]
    assert any("second rounding" in n for n in notes)


def test_explicit_quantizer_applies_outside_autocast_and_backward() -> None:
    quantizer = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    x = torch.randn(8, 16, requires_grad=True)
    y = te.Sequential(te.Quantize(True, True, quantizer=quantizer), te.ConstantScale(1.0))(x)
    assert torch.equal(y, te.quantize(x.detach(), quantizer).dequantize())
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, te.quantize(dy, quantizer).dequantize())
    with pytest.raises(te.PlanError, match="delayed"):
        te.Quantize(quantizer=te.Float8Quantizer(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    "recipe",
    [
        te.recipe.DelayedScaling(),
        CURRENT,
        te.recipe.MXFP8BlockScaling(),
        te.recipe.NVFP4BlockScaling(),
    ],
    ids=lambda r: type(r).__name__,
)
def test_a_pipeline_that_ends_in_quantize_returns_a_quantized_tensor(recipe) -> None:
    first, second = (
        te.Sequential(te.Linear(32, 32), te.Quantize()),
        te.Sequential(te.Linear(32, 16)),
    )
    x = torch.randn(8, 32, requires_grad=True)
    with te.autocast(recipe=recipe):
        q = first(x)
        y = second(q)
    assert isinstance(q, te.QuantizedTensor)
    assert q.shape == (8, 32)
    assert q.requires_grad
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    # Without autocast a record is read as what it stands for.
    torch.testing.assert_close(second(q.detach()), second(q.detach().dequantize()))
    assert te.GELU()(q.detach()).shape == (8, 32)
    assert torch.equal(
        te.Dequantize(torch.float64)(q.detach()), q.detach().dequantize(torch.float64)
    )


def test_dequantize_of_a_dense_tensor_is_a_cast() -> None:
    x = torch.randn(4)
    assert te.Dequantize(torch.float64)(x).dtype is torch.float64
    assert torch.equal(te.Dequantize()(x), x)


def test_integers_are_not_quantized() -> None:
    with pytest.raises(te.ShapeError, match="int64"):
        te.Quantize(
            quantizer=CURRENT.quantizer(te.Role("gemm", te.graph.Phase.FORWARD, "input", ""))
        )(torch.arange(4).reshape(2, 2))
