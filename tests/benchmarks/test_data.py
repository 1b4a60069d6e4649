"""Cases and the arithmetic of their floors."""

from __future__ import annotations

import pytest

from benchmarks.suite import data

MLP = next(c for c in data.CASES if c.name == "mlp")


def test_names_are_unique_and_presets_name_cases() -> None:
    names = [x.name for x in (*data.CASES, *data.STREAMS)]
    assert len(set(names)) == len(names)
    assert all(set(cases) <= set(names) for cases in data.PRESETS.values())
    assert set(data.PRESETS["hopper"]) == set(names)


def test_flops_of_the_mlp() -> None:
    # 3 products of 2 x 8192 x 4096 x 28672 and of 2 x 8192 x 14336 x 4096
    assert data.flops(MLP) == 6 * 8192 * (4096 * 28672 + 14336 * 4096)
    assert data.flops(MLP) == pytest.approx(8.66e12, rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "megabytes"),
    [
        # norm, weights, SwiGLU, its gradient, the last gradient, the norm's gradient
        ("delayed", 134 + 705 + 705 + 1174 + 134 + 201),
        ("block", 134 + 705 + 705 + 1174 + 134 + 201),
        ("current", 201 + 1057 + 1174 + 1879 + 201 + 201),
        ("none", 134 + 705 + 1174 + 201),
    ],
)
def test_bytes_around_the_products(recipe: str, megabytes: float) -> None:
    assert data.stream_bytes(MLP, recipe) / 1e6 == pytest.approx(megabytes, abs=4)


def test_floor() -> None:
    ceilings = data.Ceilings({"none": 700e12, "delayed": 1250e12}, 4.2e12)
    dense, delayed = (data.floor_ms(MLP, r, ceilings) for r in ("none", "delayed"))
    assert dense == pytest.approx(1e3 * (8.66e12 / 700e12 + 2.214e9 / 4.2e12), rel=2e-3)
    assert delayed is not None
    assert delayed < dense
    assert data.floor_ms(MLP, "block", ceilings) is None  # no rate of block products is known
    assert data.floor_ms(MLP, "mxfp8", ceilings) is not None  # emulated: at least a BF16 product


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("norm-16384x4096", 268),
        ("norm_backward-16384x4096", 403),
        ("norm_quantize-delayed", 134),
        ("add_norm_quantize-delayed", 268),
        ("quantize-delayed", 470),
        ("quantize-current", 705),
        ("gated_quantize-delayed", 705),
        ("gated_backward_quantize-delayed", 1174),
        ("weights-delayed", 705),
        ("quantize-mxfp8", 171),
    ],
)
def test_bytes_of_streams(name: str, megabytes: float) -> None:
    stream = next(s for s in data.STREAMS if s.name == name)
    assert stream.bytes / 1e6 == pytest.approx(megabytes, abs=1)


@pytest.mark.parametrize("case", data.CASES, ids=lambda case: case.name)
def test_a_smaller_pipeline_still_fits_together(case: data.Case) -> None:
    small = case.smaller(32, 64)
    for before, after in zip(small.layers, small.layers[1:], strict=False):
        assert before.out == after.width
        assert after.kind != "swiglu" or after.width == 2 * after.out


def test_fp8_attention_has_a_lower_floor() -> None:
    layer = next(c for c in data.CASES if c.name == "layer")
    ceilings = data.Ceilings({"none": 700e12, "delayed": 1400e12, "current": 1400e12}, 4.2e12)
    for recipe in ("delayed", "current"):
        apart = [data.floor_ms(layer, r, ceilings) for r in (recipe + data.DPA, recipe)]
        assert apart[0] is not None
        assert apart[1] is not None
        # Two of seven products of attention at twice the rate, and four bytes of a feature less.
        attention = data.attention_flops(layer) / 700e12 * 1e3
        assert apart[1] - apart[0] == pytest.approx(attention / 7 + 0.028, abs=0.01)
