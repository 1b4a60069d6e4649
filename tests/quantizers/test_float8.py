from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from te_ops.errors import Error, RecipeError
from te_ops.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, Usage, quantize
from tests.quantizers import oracle

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
# numpy reports what the formats define: overflow to Inf, Inf - Inf.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

SHAPES = [(), (1,), (0,), (0, 5), (5, 0), (13,), (33, 20), (2, 3, 7)]
FP32_MAX = torch.finfo(torch.float32).max


def transposed(codes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    codes = codes.reshape(shape)
    return np.moveaxis(codes, -1, 0) if len(shape) > 1 else codes


@pytest.mark.parametrize("kind", ["normal", "wide", "special", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fp8", FORMATS)
def test_current_scaling_matches_the_oracle(fp8, dtype, kind):
    for pow2, eps in ((False, 0.0), (True, 0.0), (False, 0.5), (True, 1e-30)):
        quantizer = Float8CurrentScalingQuantizer(fp8, force_pow_2_scales=pow2, amax_epsilon=eps)
        for shape in SHAPES:
            x = oracle.sample(shape, dtype, kind)
            a = oracle.matrix(x)
            row, col, amax = quantizer.records(x, row=True, col=True)
            expected = oracle.amax_of(a)
            oracle.same(amax, expected)
            largest = min(torch.finfo(dtype).max, FP32_MAX)
            scale = oracle.scale_of(
                expected, oracle.FP8_MAX[fp8], pow2=pow2, eps=eps, largest=largest
            )
            codes = oracle.cast(a * scale, fp8)
            oracle.same(row.data, codes.reshape(shape))
            oracle.same(col.data, transposed(codes, shape))
            oracle.same(row.scale_inv, np.float32(1) / scale)
            values = (codes.astype(np.float32) * (np.float32(1) / scale)).reshape(shape)
            for record in (row, col):
                if dtype is not torch.float64:  # which computes the product in FP64
                    oracle.same(record.dequantize(torch.float32), values)
                assert record.dequantize().dtype is dtype


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e5, FP32_MAX])
def test_delayed_scaling_uses_the_scale_given(fp8, scale):
    x = oracle.sample((17, 31), torch.bfloat16, "special")
    state = torch.tensor([scale])
    row, _, amax = Float8Quantizer(fp8).records(x, row=True, col=False, state=state)
    assert math.isnan(amax)
    codes = oracle.cast(oracle.matrix(x) * np.float32(scale), fp8)
    oracle.same(row.data, codes)
    oracle.same(row.scale_inv, np.float32(1) / np.float32(scale))


def test_scale_inv_is_a_copy_that_a_new_scale_cannot_reach():
    scale = torch.ones(())
    x = torch.randn(4, 4)
    row, _, _ = Float8Quantizer().records(x, row=True, col=False, state=scale)
    before = row.dequantize()
    scale.mul_(7.0)
    assert torch.equal(row.dequantize(), before)


@pytest.mark.parametrize("state", [None, torch.ones(2)])
def test_delayed_scaling_without_its_scale_is_refused(state):
    with pytest.raises(RecipeError, match=r"state=.*Float8CurrentScalingQuantizer"):
        Float8Quantizer().records(torch.ones(2), row=True, col=False, state=state)


@pytest.mark.parametrize("amax", [1e-38, 1e-44, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiny_amax_gives_a_finite_scale(amax, dtype):
    x = torch.full((32, 32), amax, dtype=dtype)
    q = quantize(x, Float8CurrentScalingQuantizer())
    scale_inv = q.rowwise.scale_inv
    assert torch.isfinite(scale_inv)
    assert scale_inv > 0
    if float(x.max()) == 0.0:
        assert scale_inv == 1.0
    else:
        assert scale_inv == torch.tensor(1.0) / torch.tensor(float(torch.finfo(dtype).max))
    assert torch.isfinite(q.dequantize()).all()


def test_fp16_input_has_fp32_scales():
    x = torch.tensor([[0.1, 0, 0, 0.2]], dtype=torch.float16)
    quantizer = Float8CurrentScalingQuantizer(torch.float8_e5m2)
    a, b = quantize(x, quantizer), quantize(x.float(), quantizer)
    assert oracle.same_bytes(a.rowwise.data, b.rowwise.data)
    assert a.rowwise.scale_inv == b.rowwise.scale_inv
    assert torch.isfinite(a.dequantize()).all()


@pytest.mark.parametrize("fp8", FORMATS)
def test_inf_saturates_and_nan_stays(fp8):
    x = torch.tensor([math.inf, -math.inf, math.nan, 2.0])
    values = quantize(x, Float8CurrentScalingQuantizer(fp8)).dequantize()
    top = torch.finfo(fp8).max
    assert values[:2].tolist() == [top, -top]
    assert math.isnan(values[2])
    assert values[3] == 2.0


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_has_one_code(fp8, dtype):
    bits = torch.tensor([0x7FC00000, 0x7F810000], dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32).to(dtype)
    x = torch.cat([x, -x, torch.full((40,), math.nan, dtype=dtype)])
    codes = quantize(x, Float8CurrentScalingQuantizer(fp8)).rowwise.data.view(torch.uint8)
    assert set(codes.tolist()) == {0x7F}


def test_strided_and_expanded_inputs():
    base = torch.randn(6, 8)
    quantizer = Float8CurrentScalingQuantizer()
    for x in (base.t(), base[::2, 1::3], base[:1].expand(5, 8), base[0, 0].expand(3, 4)):
        for usage in ({"rowwise": True}, {"rowwise": False, "columnwise": True}):
            ours = quantize(x, quantizer, **usage).dequantize()
            assert torch.equal(ours, quantize(x.contiguous(), quantizer, **usage).dequantize())
            assert ours.is_contiguous()


def test_transposed_is_the_other_usage_both_ways():
    x = torch.randn(3, 5, 7)
    row, col, _ = Float8CurrentScalingQuantizer().records(x, row=True, col=True)
    assert col.data.shape == (7, 3, 5)
    assert oracle.same_bytes(row.transposed().data, col.data)
    back = col.transposed()
    assert back.usage is Usage.ROW
    assert oracle.same_bytes(back.data, row.data)


def test_fp64_values_are_computed_in_fp64():
    x = torch.randn(50, dtype=torch.float64)
    row, _, _ = Float8CurrentScalingQuantizer().records(x, row=True, col=False)
    exact = row.data.double() * row.scale_inv.double()
    assert torch.equal(row.dequantize(), exact)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Float8Quantizer(torch.float16),
        lambda: Float8CurrentScalingQuantizer(torch.float32),
        lambda: Float8CurrentScalingQuantizer(amax_epsilon=-1.0),
        lambda: Float8CurrentScalingQuantizer(amax_epsilon=math.nan),
        lambda: Float8CurrentScalingQuantizer(amax_epsilon=math.inf),
    ],
)
def test_values_that_make_no_sense_are_refused(make):
    with pytest.raises(RecipeError) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, Error)


def test_options_are_keywords():
    with pytest.raises(TypeError):
        Float8CurrentScalingQuantizer(torch.float8_e4m3fn, True)
    with pytest.raises(TypeError):
        Float8CurrentScalingQuantizer(power_2_scale=True)
