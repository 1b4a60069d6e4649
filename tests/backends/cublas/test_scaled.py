"""FP8 products: one library call for every layout and extent, scales as the library wants them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import te_ops as te
from te_ops.backends.cublas.scaled import tile_scale, vector_scale
from te_ops.quantizers import Record, Usage
from te_ops.testing import assert_no_worse
from tests.backends.cublas.library import Library
from tests.backends.cublas.problems import (
    E5M2,
    FORMATS,
    FUSED,
    NATIVE,
    exact,
    fused,
    operands,
    record,
    run,
    shapes,
    single,
)

EXTENTS = [(1, 16, 32), (7, 48, 16), (24, 1, 50), (50, 130, 272), (32, 144, 640)]


def _scaled(library: Library) -> list[dict]:
    return [c for c in library.calls if c["name"].startswith("_scaled_mm")]


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("pair", FORMATS)
def test_every_layout_and_extent_is_one_library_call(library, pair, layout, extents) -> None:
    a, b = operands(layout, extents, FORMATS[pair])
    call = single(a, b, layout)
    y = run(NATIVE, call, a, b)
    (made,) = _scaled(library)
    assert len(library.calls) == 1
    assert y.dtype is torch.bfloat16
    assert y.is_contiguous()
    assert_no_worse(y, call.node.prim.reference(a, b, layout, torch.bfloat16), exact(a, b, layout))
    rows, columns, k = extents
    padded = [-(-n // 16) * 16 for n in (rows, columns, k)]
    assert list(made["a"].shape) == [padded[0] if " x " in pair else rows, padded[2]]
    assert list(made["b"].shape) == [padded[2], padded[1]]


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("pair", ["current", "1x128 x 128x128", "1x128 x 1x128"])
def test_leading_dimensions_are_rows(library, pair, layout) -> None:
    first, second = FORMATS[pair]
    small, (columns, k) = torch.randn(2, 3, 32).bfloat16(), (48, 32)
    a = record(small, first, Usage.COL if layout == "tn" else Usage.ROW)
    if layout == "tn":
        b = record(torch.randn(2, 3, columns).bfloat16(), second, Usage.COL)
    else:
        shape = shapes(layout, 6, columns, k)[1]
        b = record(
            torch.randn(shape).bfloat16(), second, Usage.ROW if layout == "nt" else Usage.COL
        )
    y = run(NATIVE, single(a, b, layout), a, b)
    expected = exact(a, b, layout)
    assert y.shape == expected.shape
    torch.testing.assert_close(
        y.double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())
    )


@pytest.mark.parametrize("pair", ["current", "1x128 x 1x128"])
def test_a_vector_is_one_row(library, pair) -> None:
    first, second = FORMATS[pair]
    x, w = torch.randn(32).bfloat16(), torch.randn(48, 32).bfloat16()
    a, b = record(x, first, Usage.ROW), record(w, second, Usage.ROW)
    assert run(NATIVE, single(a, b, "nt"), a, b).shape == (48,)
    dy = record(torch.randn(48).bfloat16(), second, Usage.COL)
    col = record(x, first, Usage.COL)
    dw = run(NATIVE, single(dy, col, "tn"), dy, col)
    torch.testing.assert_close(
        dw.double(),
        torch.outer(dy.dequantize().double(), col.dequantize().double()),
        rtol=1e-2,
        atol=1e-2,
    )


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("pair", ["current", "1x128 x 1x128"])
def test_zero_rows_never_reach_the_library(library, pair, layout) -> None:
    extents = (16, 32, 0) if layout == "tn" else (0, 32, 16)
    a, b = operands(layout, extents, FORMATS[pair])
    y = run(NATIVE, single(a, b, layout), a, b)
    assert not library.calls
    assert y.shape == exact(a, b, layout).shape
    assert not y.any()


def test_zero_rows_with_a_bias(library) -> None:
    a, b = operands("nt", (0, 32, 16), FORMATS["current"])
    bias = torch.randn(32).bfloat16()
    assert run(FUSED, fused(a, b, "nt", "bias", bias), a, b, bias).shape == (0, 32)


@pytest.mark.parametrize("pair", FORMATS)
def test_one_launch_serves_other_row_counts(library, pair) -> None:
    (a, b), (c, _) = (operands("nt", (rows, 32, 64), FORMATS[pair]) for rows in (16, 23))
    launch = NATIVE.bind(single(a, b, "nt"))
    for x in (a, c):
        torch.testing.assert_close(launch(x, b).double(), exact(x, b, "nt"), rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("extents", [(16, 32, 64), (7, 24, 50)], ids=str)
@pytest.mark.parametrize("pair", ["hybrid", "1x128 x 128x128"])
def test_the_bias_is_added_inside(library, pair, extents) -> None:
    a, b = operands("nt", extents, FORMATS[pair])
    bias = torch.randn(extents[1]).bfloat16()
    y = run(FUSED, fused(a, b, "nt", "bias", bias), a, b, bias)
    assert len(library.calls) == 1
    expected = exact(a, b, "nt") + bias.double()
    assert_no_worse(y, expected.float().bfloat16(), expected)


@pytest.mark.parametrize("pair", ["hybrid", "1x128 x 1x128"])
def test_a_weight_gradient_is_written_in_fp32(library, pair) -> None:
    a, b = operands("tn", (32, 48, 24), FORMATS[pair])
    y = run(FUSED, fused(a, b, "tn", "cast", result=torch.float32), a, b)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y.double(), exact(a, b, "tn"), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("accumulation", ["fast", "split", None])
def test_accumulation_is_the_nodes(library, accumulation) -> None:
    a, b = operands("nt", (16, 32, 64), FORMATS["current"])
    run(NATIVE, single(a, b, "nt", accumulation=accumulation), a, b)
    assert library.calls[0]["fast"] is (accumulation == "fast")


def test_block_scales_always_sum_in_two_levels(library) -> None:
    a, b = operands("nt", (16, 32, 64), FORMATS["1x128 x 128x128"])
    run(NATIVE, single(a, b, "nt", accumulation="fast"), a, b)
    assert len(library.named("_scaled_mm_v2")) == 1  # which fails where it is asked to be fast


def test_codes_off_a_16_byte_address_are_copied(library) -> None:
    a, b = operands("nt", (16, 32, 64), FORMATS["current"])
    assert isinstance(a, Record)
    buffer = torch.zeros(a.data.numel() + 1, dtype=torch.uint8)
    buffer[1:].copy_(a.data.view(torch.uint8).flatten())
    moved = replace(a, data=buffer[1:].view(a.data.dtype).view(a.data.shape))
    call = single(a, b, "nt")
    assert torch.equal(run(NATIVE, call, moved, b), run(NATIVE, call, a, b))


def test_a_hybrid_is_what_its_usage_is(library) -> None:
    hybrid = te.HybridQuantizer(te.Float8CurrentScalingQuantizer(), te.Float8BlockQuantizer())
    x, w = torch.randn(16, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    a, b = record(x, hybrid, Usage.ROW), record(w, te.Float8CurrentScalingQuantizer(), Usage.ROW)
    call = single(replace(a, quantizer=hybrid), b, "nt")
    run(NATIVE, call, a, b)
    assert library.named("_scaled_mm")
    c, d = record(x, hybrid, Usage.COL), record(x, te.Float8BlockQuantizer(), Usage.COL)
    run(NATIVE, single(replace(c, quantizer=hybrid), d, "tn"), c, d)
    assert library.named("_scaled_mm_v2")


# -- scales


@pytest.mark.parametrize(("m", "blocks", "rows"), [(5, 3, 0), (5, 3, 11), (16, 1, 0), (1, 2, 15)])
def test_vector_scales_are_contiguous_along_rows(m, blocks, rows) -> None:
    scale = torch.randn(m, blocks)
    made = vector_scale(scale, rows)
    assert made.shape == (m + rows, blocks)
    assert made.stride(0) == 1
    assert blocks == 1 or made.stride(1) == m + rows
    assert torch.equal(made[:m], scale)
    assert not made[m:].any()


def test_vector_scales_in_the_librarys_order_are_not_copied() -> None:
    scale = torch.randn(3, 16).t()
    assert vector_scale(scale, 0).data_ptr() == scale.data_ptr()


@pytest.mark.parametrize(("m", "k", "tall"), [(3, 4, 4), (3, 5, 8), (1, 8, 8), (2, 1, 4)])
def test_tile_scales_are_contiguous_along_k_in_fours(m, k, tall) -> None:
    scale = torch.randn(m, k)
    made = tile_scale(scale)
    assert made.shape == (tall, m)
    assert made.stride() == (1, tall)
    assert torch.equal(made[:k].t(), scale)
    assert not made[k:].any()
    assert (made.data_ptr() == scale.data_ptr()) is (k % 4 == 0)


# -- what is refused


def test_a_record_along_the_other_dimension_is_refused() -> None:
    a, b = operands("nt", (32, 32, 32), FORMATS["current"], usages=(Usage.ROW, Usage.COL))
    reason = NATIVE.reason(single(a, b, "nt"))
    assert reason == "gemm nt reads a row record here, this one is col"


def test_two_e5m2_operands_are_refused() -> None:
    wide = te.Float8CurrentScalingQuantizer(E5M2)
    a, b = operands("nt", (16, 16, 16), (wide, wide))
    assert "E5M2 by E5M2" in str(NATIVE.reason(single(a, b, "nt")))


def test_block_scaled_e5m2_is_refused() -> None:
    a, b = operands("nt", (16, 16, 128), (te.Float8BlockQuantizer(E5M2), te.Float8BlockQuantizer()))
    assert "E4M3 only" in str(NATIVE.reason(single(a, b, "nt")))


def test_fp64_results_are_refused() -> None:
    a, b = operands("nt", (16, 16, 16), FORMATS["current"], dtype=torch.float64)
    assert "torch.float64" in str(NATIVE.reason(single(a, b, "nt", dtype=torch.float64)))


@pytest.mark.parametrize(
    ("pair", "arch", "takes"),
    [
        ("current", "sm_80", False),
        ("current", "sm_89", True),
        ("current", "sm_100", True),
        ("1x128 x 1x128", "sm_89", False),
        ("1x128 x 1x128", "sm_90", True),
        ("1x128 x 1x128", "sm_100", False),
    ],
)
def test_where_a_format_runs(pair, arch, takes) -> None:
    a, b = operands("nt", (16, 16, 16), FORMATS[pair])
    reason = NATIVE.reason(single(a, b, "nt", arch=arch))
    assert (reason is None) is takes
    assert takes or f"the tensors are on {arch}" in str(reason)


def test_block_scales_need_cuda_12_9(monkeypatch) -> None:
    a, b = operands("nt", (16, 16, 16), FORMATS["1x128 x 1x128"])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA 12.9" in str(NATIVE.reason(single(a, b, "nt")))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert NATIVE.reason(single(a, b, "nt")) is None


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        ((te.MXFP8Quantizer(), te.MXFP8Quantizer()), "no mxfp8 e4m3 x mxfp8 e4m3 product"),
        ((te.Float8CurrentScalingQuantizer(), te.Float8BlockQuantizer()), "no tensor x 1x128"),
        ((te.Float8CurrentScalingQuantizer(), None), "no tensor x dense product"),
        (
            (te.Float8BlockQuantizer(block_scaling_dim=2),) * 2,
            "no 128x128 x 128x128 product",
        ),
    ],
)
def test_other_pairs_are_refused_by_name(formats, words) -> None:
    a, b = operands("nt", (32, 32, 32), formats)
    assert words in str(NATIVE.reason(single(a, b, "nt")))


def test_no_bias_on_an_fp32_result() -> None:
    a, b = operands("nt", (16, 16, 16), FORMATS["current"], dtype=torch.float32)
    call = fused(a, b, "nt", "bias", torch.randn(16), dtype=torch.float32)
    assert "no bias to an FP32 result" in str(FUSED.reason(call))
