from __future__ import annotations

import pytest
import torch

from te_ops.errors import RecipeError
from te_ops.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Usage,
    quantize,
)
from tests.quantizers import oracle


def equal(a, b):
    return all(oracle.same_bytes(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))


def test_each_usage_has_its_own_format():
    x = torch.randn(48, 64)
    hybrid = HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer(with_rht=True))
    row, col, _ = hybrid.records(x, row=True, col=True)
    assert equal(row, MXFP8Quantizer().records(x, row=True, col=False)[0])
    assert equal(col, NVFP4Quantizer(with_rht=True).records(x, row=False, col=True)[1])
    assert row.quantizer == hybrid.of_usage(Usage.ROW) == MXFP8Quantizer()
    assert col.quantizer == hybrid.of_usage(Usage.COL)
    assert torch.equal(hybrid.decode(col), col.dequantize())


@pytest.mark.parametrize("row", [True, False])
def test_columns_from_the_dequantized_rows(row):
    x = torch.randn(48, 64, dtype=torch.bfloat16)
    rows, columns = NVFP4Quantizer(), MXFP8Quantizer()
    hybrid = HybridQuantizer(rows, columns, columnwise_source="rowwise_dequantized")
    made, col, _ = hybrid.records(x, row=row, col=True)
    assert (made is not None) == row
    seen = rows.records(x, row=True, col=False)[0].dequantize()
    assert equal(col, columns.records(seen, row=False, col=True)[1])
    assert not equal(col, columns.records(x, row=False, col=True)[1])


def test_one_part_may_be_stochastic_or_unquantized():
    hybrid = HybridQuantizer(IdentityQuantizer(), NVFP4Quantizer(stochastic_rounding=True))
    assert hybrid.stochastic
    assert not HybridQuantizer(IdentityQuantizer(), MXFP8Quantizer()).stochastic
    x = torch.randn(16, 16)
    with pytest.raises(RecipeError, match="seed="):
        quantize(x, hybrid, columnwise=True)
    q = quantize(x, hybrid, columnwise=True, seed=torch.tensor(1))
    assert torch.equal(q.dequantize(), x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: HybridQuantizer(Float8Quantizer(), MXFP8Quantizer()),
        lambda: HybridQuantizer(MXFP8Quantizer(), Float8Quantizer()),
        lambda: HybridQuantizer(MXFP8Quantizer(), None),
        lambda: HybridQuantizer(
            HybridQuantizer(MXFP8Quantizer(), MXFP8Quantizer()), MXFP8Quantizer()
        ),
        lambda: HybridQuantizer(MXFP8Quantizer(), MXFP8Quantizer(), columnwise_source="row"),
        lambda: IdentityQuantizer(torch.int8),
    ],
)
def test_refusals(make):
    with pytest.raises(RecipeError):
        make()


def test_descriptions_name_the_parts():
    hybrid = HybridQuantizer(
        MXFP8Quantizer(), Float8CurrentScalingQuantizer(), columnwise_source="rowwise_dequantized"
    )
    assert hybrid.describe() == "hybrid(row mxfp8 e4m3, col from row e4m3 per-tensor current)"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_identity_keeps_values(dtype):
    x = torch.randn(3, 4, 5)
    row, col, _ = IdentityQuantizer(dtype).records(x, row=True, col=True)
    wanted = x if dtype is None else x.to(dtype).float()
    for record in (row, col, row.transposed(), col.transposed()):
        assert torch.equal(record.dequantize(), wanted)
        assert record.scale_inv is None
        assert record.nbytes == x.numel() * (4 if dtype is None else 2)


def test_identity_aliases_in_a_plan_but_not_in_a_tensor():
    x = torch.randn(4)
    row, _, _ = IdentityQuantizer().records(x, row=True, col=False)
    assert row.data.data_ptr() == x.data_ptr()
    q = quantize(x, IdentityQuantizer())
    x.zero_()
    assert (q.dequantize() != 0).all()


def test_identity_in_fp64():
    x = torch.randn(5, dtype=torch.float64)
    assert torch.equal(quantize(x, IdentityQuantizer()).dequantize(), x)
    assert quantize(x, IdentityQuantizer(), columnwise=True).columnwise.data.dtype is torch.float64
