from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from te_ops.quantizers.e2m1 import (
    encode_e2m1,
    pack_e2m1,
    unpack_codes,
    unpack_e2m1,
    values_e2m1,
)
from tests.quantizers import oracle

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_rounding_matches_ml_dtypes_at_and_around_every_midpoint():
    middle = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(VALUES)])
    points = torch.cat([torch.tensor(VALUES), middle, torch.tensor([6.5, 1e9, 1e-45, math.inf])])
    up, down = points.nextafter(torch.tensor(math.inf)), points.nextafter(torch.tensor(-math.inf))
    g = torch.Generator().manual_seed(0)
    spread = torch.randn(20000, generator=g) * 3
    y = torch.cat([points, up, down, spread])
    y = torch.cat([y, -y, torch.tensor([math.nan, -math.nan])])
    assert encode_e2m1(y).tolist() == [oracle.e2m1(v) for v in y.numpy()]


def test_minus_zero_keeps_its_sign():
    assert encode_e2m1(torch.tensor([0.0, -0.0, -0.1])).tolist() == [0, 8, 8]


def test_values_of_codes():
    codes = torch.arange(16, dtype=torch.uint8)
    expected = VALUES + [-v for v in VALUES]
    assert values_e2m1(codes).tolist() == expected
    assert torch.signbit(values_e2m1(codes)).tolist() == [False] * 8 + [True] * 8


def test_low_nibble_is_the_lower_index():
    codes = torch.tensor([[1, 10, 15, 0], [2, 3, 4, 5]], dtype=torch.uint8)
    packed = pack_e2m1(codes)
    assert packed.tolist() == [[0xA1, 0x0F], [0x32, 0x54]]
    assert torch.equal(unpack_codes(packed), codes)
    assert torch.equal(unpack_e2m1(packed), values_e2m1(codes))


def test_every_byte_survives():
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert torch.equal(pack_e2m1(unpack_codes(packed)), packed)
    for shape in ((0, 8), (3, 0)):
        assert pack_e2m1(torch.zeros(shape, dtype=torch.uint8)).shape == (shape[0], shape[1] // 2)


def test_stochastic_rounding_takes_a_neighbour_in_proportion():
    y = torch.linspace(-6.5, 6.5, 53)
    grid = torch.linspace(0, 1, 1001)[:-1]
    values = values_e2m1(encode_e2m1(y.repeat(1000, 1), grid[:, None].expand(1000, 53)))
    ladder = np.array(sorted({*VALUES, *(-v for v in VALUES)}))
    for i, v in enumerate(y.clamp(-6, 6).tolist()):
        below, above = ladder[ladder <= v].max(), ladder[ladder >= v].min()
        assert set(values[:, i].tolist()) <= {below, above}
        # Over an even grid of uniforms the mean is the value itself, up to the grid's step.
        assert abs(float(values[:, i].double().mean()) - v) <= 0.0021


def test_stochastic_rounding_keeps_what_is_representable():
    y = torch.tensor(VALUES)
    almost_one = torch.full_like(y, 1 - 2.0**-24)
    assert values_e2m1(encode_e2m1(y, almost_one)).tolist() == VALUES
