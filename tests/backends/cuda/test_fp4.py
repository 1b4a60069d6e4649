"""FP4 by FP32 arithmetic, emulated: every tie with its neighbours, tiny and huge numbers, special values."""

from __future__ import annotations

import math

import pytest
import torch

from te_ops.backends.cuda import launch
from te_ops.quantizers.e2m1 import encode_e2m1
from tests.backends.cuda import emulator

pytestmark = pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")

HEAD = """#include <te_ops/fp4.cuh>
struct Parameters { const float* y; const te::u32* words; te::u32* nearest; te::u32* random; te::i64 count; };
"""
BODY = """for (te::i64 i = te::thread(); i < p.count; i += 32) {
    const float a = te::magnitude(p.y[i]);
    p.nearest[i] = te::e2m1_nearest(a) & 15u;
    p.random[i] = te::e2m1_stochastic(a, p.words[i]) & 15u;
  }"""
PACK_HEAD = """#include <te_ops/fp4.cuh>
struct Parameters { const te::u32* pairs; te::u32* signs; };
"""
PACK_BODY = """te::u32 even, odd;
  te::sign_bytes(p.pairs[0], p.pairs[1], p.pairs[2], p.pairs[3], even, odd);
  if (te::thread() == 0) *p.signs = te::e2m1_signs(even, odd);"""


def magnitudes() -> torch.Tensor:
    """Numbers in FP32 around all codes and ties, over the whole range, and random ones."""
    steps = torch.arange(0.0, 16.25, 0.25)
    bits = steps.view(torch.int32)
    near = torch.cat([bits + k for k in range(-3, 4)]).clamp(min=0).view(torch.float32)
    powers = torch.tensor([2.0**k for k in range(-149, 128)])
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand(20000, generator=generator) * 8.0
    tiny = torch.rand(2000, generator=generator) * 2.0**-20
    special = torch.tensor([0.0, math.inf, 3.4028234663852886e38, 1e-45, 3e-45])
    return torch.cat([near, powers, 1.5 * powers[:-1], drawn, tiny, special])


def codes(y: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    text = launch.text_of(name="fp4", head=HEAD, body=BODY, threads=32)
    nearest, random = torch.empty_like(words), torch.empty_like(words)
    pointers = [t.data_ptr() for t in (y, words, nearest, random)]
    emulator.build("fp4", text, "sm_90", 32, 5)(torch.device("cpu"), 1, *pointers, y.numel())
    return nearest, random


@pytest.mark.parametrize("word", [0, 0xFF, 0x100, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, None])
def test_codes_are_the_reference_s(word: int | None) -> None:
    y = magnitudes()
    if word is None:
        generator = torch.Generator().manual_seed(6)
        wide = torch.randint(0, 1 << 32, y.shape, generator=generator)
    else:
        wide = torch.full(y.shape, word)
    words = (wide - ((wide >> 31) << 32)).to(torch.int32)  # the same bits
    nearest, random = codes(y, words)
    assert torch.equal(nearest, encode_e2m1(y).int())
    uniform = (wide >> 8).float() * 2.0**-24
    assert torch.equal(random, encode_e2m1(y, uniform).int())


def test_signs_go_beside_their_codes() -> None:
    text = launch.text_of(name="signs", head=PACK_HEAD, body=PACK_BODY, threads=32)
    kernel = emulator.build("signs", text, "sm_90", 32, 2)
    for i in range(8):
        pairs = torch.full((8,), 0x7FFF, dtype=torch.int16)
        pairs[i] = -1
        signs = torch.zeros(1, dtype=torch.int32)
        kernel(torch.device("cpu"), 1, pairs.data_ptr(), signs.data_ptr())
        assert signs.item() & 0xFFFFFFFF == 8 << 4 * i
