"""Scales of blocks on a GPU: their order, which any device makes, and the products that sm_100 multiplies with them."""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from te_ops import recipe
from te_ops.backends.cuda.swizzle import make_swizzle
from te_ops.backends.cutlass import blocks, choices, runtime, selftest
from te_ops.quantizers import MXFP8Quantizer, NVFP4Quantizer, Quantizer

CUDA = torch.device("cuda", 0)
QUANTIZERS: dict[str, Quantizer] = {"mxfp8": MXFP8Quantizer(), "nvfp4": NVFP4Quantizer()}


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


needs_blackwell = pytest.mark.skipif(
    not torch.cuda.is_available() or arch() != blocks.ARCH,
    reason="tensor cores that multiply with scales of blocks: needs an sm_100 device",
)


@pytest.mark.parametrize("usage", ["row", "col"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_scales_are_put_in_order(name: str, usage: str) -> None:
    quantizer = QUANTIZERS[name]
    made = []
    for rows in (1000, 4096):
        x = torch.randn(rows, 1056, device=CUDA)
        x = x if usage == "row" else x.t().contiguous()
        record = quantizer.records(x, row=usage == "row", col=usage == "col")[usage == "col"]
        assert record is not None
        made.append(record)
    found = make_swizzle(arch())(*made)
    for record, swizzled in zip(made, found, strict=True):
        assert record.scale_inv is not None
        scales = record.scale_inv.cpu()
        scales = scales.t().contiguous() if usage == "col" and name == "mxfp8" else scales
        wanted = blocks.swizzled(scales)
        assert torch.equal(swizzled.blocks.cpu().view(torch.uint8), wanted.view(torch.uint8))
        assert (swizzled.tensor is not None) is (name == "nvfp4")


@needs_blackwell
@pytest.mark.parametrize("name", selftest.BLOCK_KINDS)
def test_a_product_is_right_to_the_bit(name: str) -> None:
    spec = selftest.BLOCK_KINDS[name]
    assert runtime.wait([spec], arch(), CUDA) == {spec: None}
    assert selftest.check(spec, runtime.kernel(spec, arch(), CUDA), CUDA) is None


@needs_blackwell
@pytest.mark.parametrize(
    "made",
    [recipe.MXFP8BlockScaling(), recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)],
    ids=["mxfp8", "nvfp4"],
)
def test_a_training_step_equals_the_emulated_one(
    made: te.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_OPS_JIT", "sync")
    torch.manual_seed(0)
    model = te.Linear(512, 768, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(256, 512, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(256, 768, device=CUDA, dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        with te.autocast(recipe=made):
            y = model(x)
        return [y.detach(), *torch.autograd.grad(y, (x, *model.parameters()), dy)]

    with choices.forced("off"):
        wanted = step()
    with choices.forced("prefer"):
        with te.autocast(recipe=made):
            assert "cutlass." in model.explain(x)
        found = step()
    for a, b in zip(found, wanted, strict=True):
        assert (a.float() - b.float()).norm() <= 4e-3 * b.float().norm()
