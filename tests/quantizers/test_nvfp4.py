from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from te_ops.errors import RecipeError
from te_ops.quantizers import NVFP4Quantizer, Usage, philox_uniform, quantize
from te_ops.quantizers.nvfp4 import hadamard_16, inverse_hadamard_16
from tests.quantizers import oracle

# numpy reports what the formats define: overflow to Inf, Inf - Inf.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

SHAPES = [(), (3,), (0, 5), (5, 0), (1, 1), (32, 48), (18, 35), (2, 3, 20)]
OPTIONS = [
    {},
    {"row_scaled": True},
    {"with_rht": True},
    {"with_rht": True, "row_scaled": True},
    {"with_2d_quantization": True},
    {"four_over_six": True},
    {"four_over_six": True, "four_over_six_bound": 448, "four_over_six_error": "MSE"},
    {"four_over_six": True, "with_2d_quantization": True},
    {"four_over_six": True, "row_scaled": True, "four_over_six_error": "MSE"},
]


def expected(a, usage, options):
    """Nibbles, scales, amax, and the values in the orientation of the usage's matrix."""
    quantizer = NVFP4Quantizer(**options)
    two_d = quantizer.with_2d_quantization
    bound = quantizer.four_over_six_bound if quantizer.four_over_six else 448
    rule = {
        "tile": (16, 16) if two_d else (1, 16),
        "four_over_six": quantizer.four_over_six_error if quantizer.four_over_six else None,
        "bound": bound,
        "row_scaled": quantizer.row_scaled,
    }
    turned = a.T if usage is Usage.COL and not two_d else a
    if quantizer.with_rht and usage is Usage.COL:
        turned = oracle.rht(turned)
    codes, scales, amax = oracle.nvfp4(turned, **rule)
    if two_d and usage is Usage.COL:
        codes = codes.T
        scales = np.repeat(scales[::16].T, 16, 0)[: codes.shape[0]]
    return codes, scales, amax, oracle.nvfp4_decode(codes, scales, amax, bound=bound)


@pytest.mark.parametrize("kind", ["normal", "wide", "special", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o)) or "plain")
def test_matches_the_oracle(options, dtype, kind):
    quantizer = NVFP4Quantizer(**options)
    for shape in SHAPES if kind == "normal" else [(18, 35)]:
        x = oracle.sample(shape, dtype, kind)
        row, col, _ = quantizer.records(x, row=True, col=True)
        for record in (row, col):
            check(record, oracle.matrix(x), options)
            if not options.get("with_2d_quantization"):
                continue
            made, wanted = record.transposed(), col if record is row else row
            for ours, theirs in zip(made.tensors(), wanted.tensors(), strict=True):
                assert oracle.same_bytes(ours, theirs)


def check(record, a, options):
    codes, scales, amax, values = expected(a, record.usage, options)
    oracle.same(record.amax, amax)
    oracle.same(record.scale_inv, scales)
    nibbles = oracle.unpack(record.data.view(len(codes), -(-codes.shape[1] // 2)), codes.shape[1])
    # A block without a scale has NaN for values, whatever its codes are.
    lost = np.isnan(np.repeat(scales.astype(np.float32), 16, 1)[:, : codes.shape[1]])
    np.testing.assert_array_equal(nibbles[~lost], codes[~lost])
    assert (nibbles[lost] == 7).all()
    ours = record.dequantize(torch.float32)
    assert ours.shape == record.shape
    if record.usage is Usage.ROW or not options.get("with_rht"):
        turned = values.T if record.usage is Usage.COL else values
        oracle.same(ours, turned.reshape(record.shape))


@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-37, 7e-36, 9e-36, 1e-3, 1e4, 7e35, 3e38])
def test_extreme_amaxes(scale):
    x = (torch.rand(4, 32) + 0.5) * torch.tensor([1.0, -1.0, 0.3, 0.01]).view(4, 1)
    x = x / x.abs().max() * scale
    row, _, _ = NVFP4Quantizer().records(x, row=True, col=False)
    check(row, oracle.matrix(x), {})
    values = row.dequantize()
    assert torch.isfinite(values).all()
    if scale >= 1e-37:
        # The clamped global scale loses range, not sign or finiteness, far below this.
        error = (values.double() - x.double()).norm() / x.double().norm()
        assert error < 0.2


def test_inf_and_nan():
    x = torch.ones(4, 32)
    x[0, 0] = math.inf
    x[1, 20] = -math.inf
    x[2, 17] = math.nan
    q = quantize(x, NVFP4Quantizer())
    assert q.rowwise.amax == math.inf
    values = q.dequantize()
    # Inf sets S to 1: it becomes 6 * 448 and its block is lost in its shadow.
    assert values[0, 0] == 2688
    assert values[1, 20] == -2688
    assert torch.isnan(values[2, 16:]).all()
    assert torch.isfinite(values[2, :16]).all()
    assert q.rowwise.scale_inv.view(torch.uint8)[2, 1] == 0x7F
    x[:2] = 1.0
    q = quantize(x, NVFP4Quantizer())
    assert q.rowwise.amax == 1.0  # the NaN does not count
    assert torch.isnan(q.dequantize()).sum() == 16


@pytest.mark.parametrize("shape", [(32, 8), (21, 5), (3, 7, 4), (5,), ()])
def test_rht_col_holds_whole_groups_and_comes_back(shape):
    x = torch.randn(shape)
    quantizer = NVFP4Quantizer(with_rht=True)
    _, col, _ = quantizer.records(x, row=False, col=True)
    rows = math.prod(shape[:-1]) if shape else 1
    assert col.data.shape == (shape[-1] if shape else 1, -(-rows // 16) * 8)
    decoded = col.dequantize()
    assert decoded.shape == x.shape
    if x.numel() > 1:
        assert (decoded - x).norm() / x.norm() < 0.2
    # The oracle's values, through the inverse in FP64.
    *_, values = expected(oracle.matrix(x), Usage.COL, {"with_rht": True})
    back = inverse_hadamard_16(torch.from_numpy(values).double())[:, :rows].t().reshape(x.shape)
    torch.testing.assert_close(decoded.double(), back, rtol=1e-5, atol=1e-6)


def test_the_transform_is_d_h_over_4():
    """Against the matrix, in FP64; and its rounding to BF16 alone."""
    signs = torch.tensor(oracle.SIGNS, dtype=torch.float64)
    index = torch.arange(16)
    parity = [[bin(int(i & j)).count("1") % 2 for j in index] for i in index]
    h = signs[:, None] * (1.0 - 2.0 * torch.tensor(parity, dtype=torch.float64)) / 4
    torch.testing.assert_close(h @ h.t(), torch.eye(16, dtype=torch.float64))
    x = torch.randn(20, 32)
    exact = (x.double().view(20, 2, 16) @ h).view(20, 32)
    ours = hadamard_16(x)
    assert torch.equal(ours, ours.bfloat16().float())
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(inverse_hadamard_16(exact), x.double())


def test_rht_cancels_between_two_operands():
    """Both operands of a weight gradient are transformed along the rows they contract over."""
    quantizer = NVFP4Quantizer(with_rht=True)
    x, dy = torch.randn(40, 16), torch.randn(40, 8)
    a, b = (quantizer.records(t, row=False, col=True)[1].dequantize() for t in (x, dy))
    wanted = dy.t() @ x
    assert (b.t() @ a - wanted).norm() / wanted.norm() < 0.3


def test_stochastic_rounding_is_between_neighbours_and_unbiased():
    quantizer = NVFP4Quantizer(stochastic_rounding=True)
    x = torch.randn(16, 32)
    nearest = quantize(x, NVFP4Quantizer()).dequantize()
    draws = torch.stack(
        [quantize(x, quantizer, seed=torch.tensor(s)).dequantize() for s in range(50)]
    )
    mean = draws.mean(0)
    assert (mean - x).norm() < 0.5 * (nearest - x).norm()
    assert len(draws.unique(dim=0)) == 50
    again = quantize(x, quantizer, seed=torch.tensor(3)).dequantize()
    assert torch.equal(again, draws[3])


def test_stochastic_rounding_follows_the_documented_numbers():
    """Element (r, c) of the usage's matrix reads number r * C + c; row and col are streams."""
    quantizer = NVFP4Quantizer(stochastic_rounding=True)
    x, seed = torch.randn(6, 40), torch.tensor(11)
    row, col, _ = quantizer.records(x, row=True, col=True, seed=seed)
    for record, a, stream in ((row, x, 0), (col, x.t(), 1)):
        _, scales, amax = oracle.nvfp4(a.numpy())
        oracle.same(record.scale_inv, scales)
        u = philox_uniform(tuple(a.shape), seed, stream).numpy()
        ours = oracle.unpack(record.data, a.shape[1])
        s_global = oracle.global_scale(amax, 2688.0)
        for i, j in np.ndindex(*a.shape):
            s8 = np.float32(scales[i, j // 16])
            encode = np.float32(1) / (s8 * (np.float32(1) / s_global))
            y = min(max(a[i, j].numpy() * encode, np.float32(-6)), np.float32(6))
            ladder = [oracle.e2m1_value(c) for c in range(8)]
            low = max(c for c in range(8) if ladder[c] <= abs(y))
            gap = ladder[min(low + 1, 7)] - ladder[low]
            fraction = (abs(y) - ladder[low]) / gap if gap else 0.0
            if abs(fraction - u[i, j]) < 1e-5:
                continue  # a draw so near that the rounding of the fraction decides
            code = low + int(u[i, j] < fraction)
            assert ours[i, j] == code + (8 if np.signbit(y) else 0)


def test_stochastic_tiles_transpose_exactly():
    quantizer = NVFP4Quantizer(stochastic_rounding=True, with_2d_quantization=True)
    x, seed = torch.randn(20, 33), torch.tensor(5)
    row, col, _ = quantizer.records(x, row=True, col=True, seed=seed)
    _, alone, _ = quantizer.records(x, row=False, col=True, seed=seed)
    assert torch.equal(row.dequantize(), col.dequantize())
    assert torch.equal(alone.data, col.data)


def test_a_seed_is_needed():
    with pytest.raises(RecipeError, match="seed="):
        quantize(torch.ones(3), NVFP4Quantizer(stochastic_rounding=True))


def test_four_over_six_lowers_the_error():
    x = torch.randn(64, 64)
    plain = quantize(x, NVFP4Quantizer()).dequantize()
    for mode, power in (("MAE", 1), ("MSE", 2)):
        better = quantize(
            x, NVFP4Quantizer(four_over_six=True, four_over_six_error=mode)
        ).dequantize()
        assert (better - x).abs().pow(power).sum() < (plain - x).abs().pow(power).sum()


@pytest.mark.parametrize(
    "options",
    [
        {"with_rht": True, "with_2d_quantization": True},
        {"with_rht": True, "four_over_six": True},
        {"stochastic_rounding": True, "four_over_six": True},
        {"row_scaled": True, "with_2d_quantization": True},
        {"four_over_six_bound": 300},
        {"four_over_six_error": "max"},
        {"four_over_six": "none"},
        {"with_rht": 1},
    ],
)
def test_refusals(options):
    with pytest.raises(RecipeError):
        NVFP4Quantizer(**options)


def test_arguments_are_keywords():
    with pytest.raises(TypeError):
        NVFP4Quantizer(True)
    with pytest.raises(TypeError):
        NVFP4Quantizer(rht=True)


def test_all_legal_combinations_quantize():
    names = ("with_2d_quantization", "with_rht", "stochastic_rounding", "row_scaled")
    legal = 0
    for flags in itertools.product((False, True), repeat=5):
        options = dict(zip((*names, "four_over_six"), flags, strict=True))
        try:
            quantizer = NVFP4Quantizer(**options)
        except RecipeError:
            continue
        legal += 1
        x = torch.randn(17, 33)
        for record in quantizer.records(x, row=True, col=True, seed=torch.tensor(1))[:2]:
            assert (record.dequantize() - x).norm() / x.norm() < 0.2
    assert legal == 13
