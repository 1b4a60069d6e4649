"""Scales of blocks in the order that tensor cores of sm_100 read, by the device text on the host."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import subprocess
import sys

import pytest
import torch

from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda import swizzle
from te_ops.backends.cutlass import blocks
from te_ops.quantizers import MXFP8Quantizer, NVFP4Quantizer, Quantizer, Record

SHAPES = ((130, 200, 272), (1, 16, 16), (256, 512, 128), (33, 96, 40), (128, 130, 300))
"""Rows of a, what is contracted, rows of b: pieces that are full, begun, and fewer than a block of threads has."""
QUANTIZERS: dict[str, Quantizer] = {
    "mxfp8": MXFP8Quantizer(),
    "nvfp4": NVFP4Quantizer(),
    "4over6": NVFP4Quantizer(four_over_six=True),
}


def by_the_formula(scales: torch.Tensor) -> torch.Tensor:
    """Where each scale lies, byte by byte, as the layout is published."""
    rows, count = scales.shape
    down, across = -(-rows // 128), -(-count // 4)
    found = torch.zeros(down * across * 512, dtype=torch.uint8)
    r, k = torch.meshgrid(torch.arange(rows), torch.arange(count), indexing="ij")
    at = (r // 128 * across + k // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + k % 4
    found[at] = scales.view(torch.uint8)
    return found.view(down, across, 32, 4, 4)


def records(quantizer: Quantizer, usage: str, sizes: tuple[int, int, int]) -> tuple[Record, Record]:
    drawn = torch.Generator().manual_seed(0)
    m, k, n = sizes
    found = []
    for rows in (m, n):
        x = torch.randn(rows, k, generator=drawn) * 10
        x = x if usage == "row" else x.t().contiguous()
        made = quantizer.records(x, row=usage == "row", col=usage == "col")
        found.append(made[usage == "col"])
    return found[0], found[1]  # type: ignore[return-value]


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("usage", ["row", "col"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_scale_is_in_its_place(
    name: str, usage: str, sizes: tuple[int, int, int], on_the_host: None
) -> None:
    a, b = records(QUANTIZERS[name], usage, sizes)
    made = swizzle.make_swizzle("sm_100")(a, b)
    for record, found in zip((a, b), made, strict=True):
        assert record.scale_inv is not None
        wanted = record.scale_inv
        wanted = wanted.t() if usage == "col" and name == "mxfp8" else wanted
        assert same(found.blocks, by_the_formula(wanted))
        assert same(found.blocks, blocks.swizzled(wanted))
        assert same(blocks.unswizzled(found.blocks, *wanted.shape), wanted.contiguous())
        values = blocks.Blocked(blocks.codes(record), found.blocks).values(
            32 if name == "mxfp8" else 16
        )
        whole = record.dequantize(torch.float32)
        whole = whole.t() if usage == "col" else whole
        scaled = values[:, : whole.shape[1]] * (1.0 if found.tensor is None else found.tensor)
        assert torch.allclose(scaled, whole, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_halves_of_b_alternate_for_a_paired_accumulator(name: str, on_the_host: None) -> None:
    a, b = records(QUANTIZERS[name], "row", (130, 200, 272))
    made = swizzle.make_swizzle("sm_100", paired=True)(a, b)
    assert a.scale_inv is not None
    assert b.scale_inv is not None
    codes = b.scale_inv.view(torch.uint8)
    pairs = torch.stack([codes[:136], codes[136:]], 1).reshape(272, -1)
    assert same(made[0].blocks, blocks.swizzled(a.scale_inv))
    assert same(made[1].blocks, blocks.swizzled(pairs))
    size = 32 if name == "mxfp8" else 16
    alone = swizzle.make_swizzle("sm_100")(a, b)[1].blocks
    values = blocks.Blocked(blocks.codes(b), made[1].blocks).values(size, paired=True)
    assert torch.equal(values, blocks.Blocked(blocks.codes(b), alone).values(size))


@pytest.mark.parametrize("amax", [0.0, math.inf, 1e-37, 2e-45, 1.0, 448.0, 3e38])
def test_the_scale_of_a_tensor_is_what_its_numbers_decode_with(
    amax: float, on_the_host: None
) -> None:
    record, _ = records(QUANTIZERS["nvfp4"], "row", (33, 96, 40))
    ones = torch.ones_like(record.scale_inv, dtype=torch.float32).to(torch.float8_e4m3fn)
    data = torch.full_like(record.data, 0x22)  # all 1
    made = dataclasses.replace(record, amax=torch.tensor(amax), scale_inv=ones, data=data)
    found = swizzle.make_swizzle("sm_100")(made, made)[0].tensor
    wanted = made.dequantize(torch.float32)[0, 0]
    assert found is not None
    assert torch.allclose(found[0], wanted, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles(arch: str) -> None:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs NVRTC (cuda-bindings)")
    assert compiler.cubin(swizzle.text(), arch)[:4] == b"\x7fELF"


def test_quack_packs_the_same_order() -> None:
    """The layout by the library whose kernel reads it; in a process of its own, since it imports its compilers."""
    if importlib.util.find_spec("quack") is None or importlib.util.find_spec("triton") is None:
        pytest.skip("quack is not installed")
    program = (
        "import torch\n"
        "from quack.blockscaled.quantize import pack_scale_2d_to_blocked_contig as pack\n"
        "from te_ops.backends.cutlass.blocks import swizzled\n"
        "x = torch.randint(0, 255, (3 * 128, 12), dtype=torch.uint8).view(torch.float8_e8m0fnu)\n"
        "theirs, ours = pack(x.unsqueeze(0))[0], swizzled(x)\n"
        "assert theirs.shape == ours.shape, theirs.shape\n"
        "assert torch.equal(theirs.view(torch.uint8), ours.view(torch.uint8))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-800:]
