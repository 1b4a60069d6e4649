"""Formats that nothing multiplies: one BF16 product, no worse than FP32 arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import te_ops as te
from te_ops.quantizers import Usage
from te_ops.testing import assert_no_worse
from tests.backends.cublas.problems import (
    E5M2,
    EMULATED,
    NATIVE,
    exact,
    operands,
    record,
    run,
    single,
)

PAIRS = {
    "mxfp8": (te.MXFP8Quantizer(), te.MXFP8Quantizer(E5M2)),
    "nvfp4": (te.NVFP4Quantizer(), te.NVFP4Quantizer(with_2d_quantization=True)),
    "nvfp4 hadamard": (te.NVFP4Quantizer(with_rht=True),) * 2,
    "nvfp4 other limits": (te.NVFP4Quantizer(four_over_six=True), te.NVFP4Quantizer()),
    "one row": (te.NVFP4Quantizer(row_scaled=True), te.NVFP4Quantizer()),
    "half hadamard": (te.NVFP4Quantizer(with_rht=True), te.NVFP4Quantizer()),
    "e5m2": (te.Float8CurrentScalingQuantizer(E5M2),) * 2,
    "mixed": (te.Float8CurrentScalingQuantizer(), te.Float8BlockQuantizer()),
    "delayed": (te.Float8Quantizer(), te.MXFP8Quantizer()),
    "tiles": (te.Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False),) * 2,
    "half dense": (None, te.NVFP4Quantizer()),
    "identity": (te.IdentityQuantizer(torch.float32), te.Float8CurrentScalingQuantizer()),
}


@pytest.mark.parametrize("extents", [(64, 48, 96), (1, 16, 1), (5, 1, 300)], ids=str)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("pair", PAIRS)
def test_it_is_as_exact_as_fp32_arithmetic(library, pair, layout, extents) -> None:
    a, b = operands(layout, extents, PAIRS[pair])
    call = single(a, b, layout)
    assert NATIVE.reason(call) is not None
    y = run(EMULATED, call, a, b)
    assert y.dtype is torch.bfloat16
    assert len(library.calls) == 1
    reference = call.node.prim.reference(a, b, layout, torch.bfloat16)
    assert_no_worse(y, reference, exact(a, b, layout), factor=1.05)


@pytest.mark.parametrize(
    ("pair", "terms"),
    [
        ("mxfp8", 1),
        ("half dense", 1),
        ("delayed", 1),
        ("nvfp4", 1),
        ("nvfp4 hadamard", 1),
        ("half hadamard", 1),
        ("one row", 2),
        ("tiles", 3),
    ],
)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_only_what_bf16_cannot_hold_is_split(library, pair, terms, layout) -> None:
    a, b = operands(layout, (16, 48, 32), PAIRS[pair])
    run(EMULATED, single(a, b, layout), a, b)
    # One operand went through the Hadamard transform, and comes back by FP32 arithmetic.
    one_turned = (pair, layout) in {("nvfp4 hadamard", "nn"), ("half hadamard", "tn")}
    assert library.calls[0]["a"].shape[1] == (2 if one_turned else terms) * 32


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("pair", PAIRS)
def test_fp32_results_keep_17_bits(library, pair, layout) -> None:
    a, b = operands(layout, (16, 32, 64), PAIRS[pair])
    call = single(a, b, layout, dtype=torch.float32)
    y, expected = run(EMULATED, call, a, b), exact(a, b, layout)
    assert y.dtype is torch.float32
    assert float((y.double() - expected).norm()) <= 2**-17 * float(expected.norm())


@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_leading_dimensions_and_zero_rows(library, layout) -> None:
    quantizer = te.NVFP4Quantizer()
    for lead in ((2, 3), (0,), (2, 0)):
        usage = Usage.COL if layout == "tn" else Usage.ROW
        a = record(torch.randn(*lead, 32).bfloat16(), quantizer, usage)
        shape = (*lead, 48) if layout == "tn" else (48, 32)
        b = record(torch.randn(shape).bfloat16(), quantizer, usage)
        y = run(EMULATED, single(a, b, layout), a, b)
        expected = exact(a, b, layout)
        assert y.shape == expected.shape
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)


def test_the_largest_numbers_stay_finite(library) -> None:
    x = torch.full((16, 32), torch.finfo(torch.bfloat16).max).bfloat16()
    current = te.Float8CurrentScalingQuantizer(E5M2)
    a = record(x, current, Usage.ROW)
    b = record(torch.eye(32).bfloat16() * 0.75, current, Usage.ROW)
    y = run(EMULATED, single(a, b, "nt"), a, b)
    assert y.isfinite().all()
    torch.testing.assert_close(y.double(), exact(a, b, "nt"), rtol=1e-2, atol=0)


@pytest.mark.parametrize("amax", [0.0, math.inf, 2e-45, 1e-38, 1e-20, 1e20, 3e38])
def test_any_scale_of_a_tensor(library, amax: float) -> None:
    """The smaller of two multiplies first: nothing leaves the range before the result does."""
    nvfp4 = te.NVFP4Quantizer()
    a, b = operands("nt", (16, 32, 64), (nvfp4, nvfp4))
    a = replace(a, amax=torch.tensor(amax))
    b = replace(b, amax=torch.tensor(min(1.0 / amax, 3e38) if 0 < amax < math.inf else 1.0))
    y = run(EMULATED, single(a, b, "nt"), a, b)
    wanted = exact(a, b, "nt")
    assert wanted.isfinite().all()
    assert (y.double() - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.parametrize("scale", [1 / 3.4e38, 1e-38, 1e-30, 0.3, 1e30])
def test_any_scale_of_fp8(library, scale: float) -> None:
    current = te.Float8CurrentScalingQuantizer(E5M2)
    a, b = operands("nt", (16, 32, 64), (current, current))
    a = replace(a, scale_inv=torch.full_like(a.scale_inv, scale))
    b = replace(b, scale_inv=torch.full_like(b.scale_inv, min(1.0 / scale, 1e32)))
    y = run(EMULATED, single(a, b, "nt"), a, b)
    wanted = exact(a, b, "nt")
    assert (y.double() - wanted).norm() <= 4e-3 * wanted.norm()


def test_fp32_inputs_are_emulated_in_fp32() -> None:
    mxfp8 = te.MXFP8Quantizer()
    a, b = operands("nt", (32, 32, 32), (mxfp8, mxfp8), torch.float32)
    reason = EMULATED.reason(single(a, b, "nt", dtype=torch.float32))
    assert reason == "only BF16 operands are emulated in BF16, not torch.float32"


def test_dense_operands_are_not_emulated() -> None:
    a, b = operands("nt", (4, 4, 4), (None, None))
    assert EMULATED.reason(single(a, b, "nt")) == "nothing here is quantized"


def test_the_native_kernel_comes_first() -> None:
    current = te.Float8CurrentScalingQuantizer()
    a, b = operands("nt", (32, 32, 32), (current, current))
    call = single(a, b, "nt")
    assert NATIVE.reason(call) is None
    assert EMULATED.reason(call) is None
    assert NATIVE.priority > EMULATED.priority > 0
