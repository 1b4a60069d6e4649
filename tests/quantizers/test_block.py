from __future__ import annotations

import numpy as np
import pytest
import torch

from te_ops.errors import RecipeError
from te_ops.quantizers import Float8BlockQuantizer, Usage
from tests.quantizers import oracle

# numpy reports what the formats define: overflow to Inf, Inf - Inf.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

SHAPES = [(), (3,), (0, 5), (5, 0), (1, 1), (128, 256), (130, 131), (2, 70, 45)]


def transposed(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.moveaxis(a.reshape(shape), -1, 0) if len(shape) > 1 else a.reshape(shape)


@pytest.mark.parametrize("kind", ["normal", "wide", "special", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("pow2", [True, False])
def test_matches_the_oracle(dim, pow2, dtype, kind):
    fp8 = torch.float8_e4m3fn if kind != "wide" else torch.float8_e5m2
    quantizer = Float8BlockQuantizer(
        fp8, block_scaling_dim=dim, force_pow_2_scales=pow2, amax_epsilon=1e-20 if pow2 else 0.0
    )
    rule = {
        "pow2": pow2,
        "eps": quantizer.amax_epsilon,
        "largest": min(torch.finfo(dtype).max, oracle.FP32_MAX),
    }
    for shape in SHAPES:
        x = oracle.sample(shape, dtype, kind)
        a = oracle.matrix(x)
        row, col, amax = quantizer.records(x, row=True, col=True)
        assert amax == 0
        tile = (128, 128) if dim == 2 else (1, 128)
        codes, scales = oracle.block_fp8(a, tile, fp8, **rule)
        oracle.same(row.data, codes.reshape(shape))
        oracle.same(row.scale_inv, scales)
        check_values(row, a.shape, tile, codes, scales)
        if dim == 1:
            tile = (128, 1)
            codes, scales = oracle.block_fp8(a, tile, fp8, **rule)
        oracle.same(col.data, transposed(codes, shape))
        oracle.same(col.scale_inv, scales.T)
        check_values(col, a.shape, tile, codes, scales)


def check_values(record, size, tile, codes, scales):
    values = codes.astype(np.float32)
    for where, part in oracle.tiles(size, tile):
        values[part] *= scales[where]
    oracle.same(record.dequantize(torch.float32), values.reshape(record.shape))


def test_single_outlier_touches_its_block_only():
    x = torch.randn(4, 256)
    y = x.clone()
    y[1, 200] = 1e6
    a, b = (Float8BlockQuantizer().records(t, row=True, col=False)[0].dequantize() for t in (x, y))
    changed = (a != b).nonzero()
    assert len(changed)
    assert set(changed[:, 0].tolist()) == {1}
    assert int(changed[:, 1].min()) >= 128


def test_only_tiles_can_be_transposed():
    x = torch.randn(140, 150)
    row, _, _ = Float8BlockQuantizer().records(x, row=True, col=False)
    assert row.transposed() is None
    assert not Float8BlockQuantizer().exact_other_usage()
    quantizer = Float8BlockQuantizer(block_scaling_dim=2)
    row, col, _ = quantizer.records(x, row=True, col=True)
    assert quantizer.exact_other_usage()
    for made, wanted in ((row.transposed(), col), (col.transposed(), row)):
        assert made.usage is wanted.usage
        assert oracle.same_bytes(made.data, wanted.data)
        assert torch.equal(made.scale_inv, wanted.scale_inv)


def test_col_alone_equals_col_beside_row():
    x = torch.randn(140, 150)
    for dim in (1, 2):
        quantizer = Float8BlockQuantizer(block_scaling_dim=dim)
        none, alone, _ = quantizer.records(x, row=False, col=True)
        _, beside, _ = quantizer.records(x, row=True, col=True)
        assert none is None
        assert alone.usage is Usage.COL
        assert oracle.same_bytes(alone.data, beside.data)


def test_refusals():
    with pytest.raises(RecipeError, match="must be 1 or 2"):
        Float8BlockQuantizer(block_scaling_dim=3)
    with pytest.raises(RecipeError, match="FP8"):
        Float8BlockQuantizer(torch.int8)
    with pytest.raises(TypeError):
        Float8BlockQuantizer(torch.float8_e4m3fn, 2)
