"""K31 (B155): what is asked of a product (sides, what it is added to, bias, dtype) holds on every path."""

from __future__ import annotations

import copy

import pytest
import torch

import te_ops as te
from tests.faults import cases
from tests.faults.attention import DEVICES
from tests.faults.cases import some_modes

# Random rounding would draw other numbers in each backward.
NEAREST = (
    "none",
    "delayed",
    "current_high",
    "block_hybrid",
    "mxfp8_hybrid",
    "nvfp4_plain",
    "custom",
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("recipe", [cases.MODES[name] for name in NEAREST], ids=NEAREST)
def test_b155_gradients_are_added_to_what_is_there(
    device: str, dtype: torch.dtype, bias: bool, recipe: te.Recipe | None
) -> None:
    """main_grad, FP32 and not 0 before, gets the sum over microbatches of what .grad would get, each scaled."""
    torch.manual_seed(0)
    plain = te.Linear(64, 96, bias=bias, dtype=dtype).to(device)
    added = te.Linear(64, 96, bias=bias, dtype=dtype, accumulate_into_main_grad=True).to(device)
    added.load_state_dict(plain.state_dict())
    start = torch.randn(96, 64, device=device)
    main = added.weight.main_grad = start.clone()
    wanted = start.double()
    for scale in (1.0, -0.5, 8.0):
        x, dy = torch.randn(48, 64).to(device, dtype), scale * torch.randn(48, 96).to(device, dtype)
        for op in (plain, added):
            op.zero_grad()
            mine = x.clone().requires_grad_()
            with cases.within(recipe):
                y = op(mine)
            assert y.dtype is dtype
            y.backward(dy)
            if op is plain:
                kept = [
                    y.detach(),
                    mine.grad,
                    *[p.grad for n, p in op.named_parameters() if n == "bias"],
                ]
        assert plain.weight.grad is not None
        wanted += plain.weight.grad.double()
        same = [
            y.detach(),
            mine.grad,
            *[p.grad for n, p in added.named_parameters() if n == "bias"],
        ]
        torchs = recipe is None and device == "cuda"  # a linear alone: it sums the bias's gradient
        for a, b in zip(same, kept, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5 * torchs, atol=1e-4 * torchs)
    assert added.weight.main_grad is main
    assert added.weight.grad is None
    error = (main.double() - wanted).norm() / (wanted - start.double()).norm()
    assert float(error) <= (1e-6 if dtype is torch.float32 and device == "cpu" else 8e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", ["x", "weight", "both"])
@pytest.mark.parametrize("shape", [(48, 64, 96), (1, 64, 16), (17, 33, 5)], ids=str)
@some_modes
def test_b155_each_side_of_a_product_counts(
    device: str, given: str, shape: tuple[int, int, int], recipe: te.Recipe | None
) -> None:
    """Products for the output, dx and dw, alone and together, against plain torch in FP64."""
    rows, k, n = shape
    torch.manual_seed(0)
    op = te.Linear(k, n, bias=False)
    twin = copy.deepcopy(op).double()
    op = op.to(device)
    x, dy = torch.randn(rows, k), torch.randn(rows, n)
    wide = x.double().requires_grad_()
    wanted = torch.nn.functional.linear(wide, twin.weight)
    wanted.backward(dy.double())
    mine = x.to(device).requires_grad_(given != "weight")
    op.weight.requires_grad_(given != "x")
    with cases.within(recipe):
        y = op(mine)
    y.backward(dy.to(device))
    tolerance = (
        2e-5
        if recipe is None
        else 0.45
        if isinstance(recipe, te.recipe.NVFP4BlockScaling)
        else 0.15
    )
    found = [(y, wanted), (mine.grad, wide.grad), (op.weight.grad, twin.weight.grad)]
    for (a, b), there in zip(found, (True, given != "weight", given != "x"), strict=True):
        assert (a is not None) == there
        assert a is None or cases.relative_error(a.detach().cpu(), b.detach()) <= tolerance  # type: ignore[union-attr]
