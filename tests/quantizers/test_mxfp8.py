from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from te_ops.errors import RecipeError
from te_ops.quantizers import MXFP8Quantizer, quantize
from te_ops.quantizers.mxfp8 import e8m0_from_amax
from tests.quantizers import oracle

# numpy reports what the formats define: overflow to Inf, Inf - Inf.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

SHAPES = [(), (3,), (0, 5), (5, 0), (1, 1), (64, 96), (33, 47), (2, 3, 40)]
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("kind", ["normal", "wide", "special", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("two_d", [False, True])
def test_matches_the_oracle(two_d, fp8, dtype, kind):
    quantizer = MXFP8Quantizer(fp8, with_2d_quantization=two_d)
    for shape in SHAPES:
        x = oracle.sample(shape, dtype, kind)
        a = oracle.matrix(x)
        row, col, _ = quantizer.records(x, row=True, col=True)
        for record, thin in ((row, (1, 32)), (col, (32, 1))):
            tile = (32, 32) if two_d else thin
            codes, scales = oracle.mxfp8(a, tile, fp8)
            for axis, (wide, narrow) in enumerate(zip(tile, thin, strict=True)):
                if wide != narrow:
                    scales = np.repeat(scales, wide, axis)
            scales = scales[tuple(slice(-(-s // t)) for s, t in zip(a.shape, thin, strict=True))]
            oracle.same(record.data, codes.reshape(shape))
            oracle.same(record.scale_inv, scales)
            check_values(record, a.shape, thin, codes, scales)


def check_values(record, size, tile, codes, scales):
    values = codes.astype(np.float32)
    for where, part in oracle.tiles(size, tile):
        code = int(scales[where])
        values[part] *= np.float32(np.nan) if code == 255 else np.float32(2.0 ** (code - 127))
    oracle.same(record.dequantize(torch.float32), values.reshape(record.shape))


def test_the_exponent_rule_over_all_magnitudes():
    g = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 0x7F800001, (4000,), generator=g, dtype=torch.int32)
    powers = torch.tensor([2.0**e for e in range(-140, 128)])
    near = torch.cat([powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(powers * 2)])
    edges = torch.tensor([0.0, math.inf, math.nan, 2.0**-149, torch.finfo(torch.float32).max])
    for limit in (448.0, 57344.0):
        # Times the limit, so that the product of the rule meets the powers of two.
        amax = torch.cat([bits.view(torch.float32), near, near * limit, edges])
        ours = e8m0_from_amax(amax, limit).tolist()
        assert ours == [oracle.e8m0(np.float32(v), limit) for v in amax.numpy()]


def test_special_codes():
    x = torch.zeros(4, 32)
    x[1] = 1e-45
    x[2, 3] = math.inf
    x[3, 3] = math.nan
    x[2:, 4] = 1.0
    q = quantize(x, MXFP8Quantizer())
    assert q.rowwise.scale_inv.view(torch.uint8).reshape(-1).tolist() == [0, 0, 0xFE, 0xFF]
    assert q.dequantize()[0].tolist() == [0.0] * 32
    assert q.rowwise.data.view(torch.uint8)[2, 3] == 0x7E
    assert torch.isnan(q.dequantize()[3]).all()
    assert not torch.isnan(q.dequantize()[:3]).any()


def test_code_zero_encodes_with_2_to_127_and_decodes_to_2_to_minus_127():
    x = torch.full((1, 32), 2.0**-130)
    q = quantize(x, MXFP8Quantizer())
    assert q.rowwise.scale_inv.view(torch.uint8).item() == 0
    assert q.rowwise.data.float()[0, 0] == 2.0**-3
    assert torch.equal(q.dequantize(), x)


def test_padding_is_not_part_of_a_block():
    """A block cut by the edge has the scale of its own elements, whatever lies beyond in memory."""
    wide = torch.full((5, 64), math.nan)
    wide[:, :40] = torch.randn(5, 40)
    part = wide[:, :40]
    q = quantize(part, MXFP8Quantizer(), columnwise=True)
    assert torch.equal(
        q.dequantize(), quantize(part.clone(), MXFP8Quantizer(), columnwise=True).dequantize()
    )
    assert torch.isfinite(q.dequantize()).all()
    assert q.rowwise.scale_inv.shape == (5, 2)
    assert q.columnwise.scale_inv.shape == (1, 40)


def test_tiles_transpose_exactly():
    quantizer = MXFP8Quantizer(with_2d_quantization=True)
    for shape in ((64, 96), (33, 47), (2, 3, 40), (7,)):
        x = torch.randn(shape)
        row, col, _ = quantizer.records(x, row=True, col=True)
        _, alone, _ = quantizer.records(x, row=False, col=True)
        for made, wanted in ((row.transposed(), col), (col.transposed(), row), (alone, col)):
            assert made.usage is wanted.usage
            for a, b in zip(made.tensors(), wanted.tensors(), strict=True):
                assert oracle.same_bytes(a, b)
    assert MXFP8Quantizer().records(torch.ones(3), row=True, col=False)[0].transposed() is None


def test_refusals():
    with pytest.raises(RecipeError):
        MXFP8Quantizer(torch.float32)
    with pytest.raises(TypeError):
        MXFP8Quantizer(torch.float8_e4m3fn, True)
