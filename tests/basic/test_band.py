from __future__ import annotations

from itertools import product

import pytest
import torch

from te_ops.basic.attention import band_of
from te_ops.basic.band import Band
from te_ops.errors import PlanError

SIDES = (None, 0, 1, 2, 3, 4, 5)
DIAGONALS = ("top_left", "bottom_right")
SPELLINGS = [Band(*spelled) for spelled in product(SIDES, SIDES, DIAGONALS)]


def seen(band: Band, s_q: int, s_kv: int) -> list[list[bool]]:
    """The definition, one pair at a time."""
    shift = 0 if band.diagonal == "top_left" else s_kv - s_q
    return [
        [
            (band.left is None or j >= i + shift - band.left)
            and (band.right is None or j <= i + shift + band.right)
            for j in range(s_kv)
        ]
        for i in range(s_q)
    ]


@pytest.mark.parametrize("s_q", range(1, 6))
@pytest.mark.parametrize("s_kv", range(1, 6))
def test_normalizing_keeps_every_mask(s_q: int, s_kv: int) -> None:
    for band in SPELLINGS:
        known = product((s_q, None), (s_kv, None))
        for given in known:
            assert seen(band.normalized(*given), s_q, s_kv) == seen(band, s_q, s_kv)
        if s_q == s_kv:
            assert seen(band.normalized(None, None, equal=True), s_q, s_kv) == seen(band, s_q, s_kv)


def test_normalizing_gives_one_form_per_spelling_class() -> None:
    assert len(SPELLINGS) == 98
    assert len({band.normalized(5, 5) for band in SPELLINGS}) == 25
    assert len({band.normalized(1, 5) for band in SPELLINGS}) == 9


def test_normalizing_twice_changes_nothing() -> None:
    for band, s_q, s_kv in product(SPELLINGS, (1, 3, None), (1, 4, None)):
        once = band.normalized(s_q, s_kv)
        assert once.normalized(s_q, s_kv) == once


def test_decoding_one_token_drops_its_band() -> None:
    assert Band(None, 0, "bottom_right").normalized(1, None) == Band()
    assert Band(4, 0, "bottom_right").normalized(1, 5) == Band()
    assert Band(3, 0, "bottom_right").normalized(1, 5) == Band(3, None, "bottom_right")


@pytest.mark.parametrize("s_q", range(6))
@pytest.mark.parametrize("s_kv", range(6))
def test_ranges_and_bias_are_the_mask(s_q: int, s_kv: int) -> None:
    for band in SPELLINGS:
        mask = torch.tensor(seen(band, s_q, s_kv), dtype=torch.bool).reshape(s_q, s_kv)
        first, last = band.rows(s_q, s_kv)
        live = [i for i in range(s_q) if bool(mask[i].any())]
        assert list(range(first, last)) == live
        for start, stop in ((i, j) for i in live for j in live if i <= j):
            rows = (start, stop + 1)
            low, high = band.keys(rows, s_q, s_kv)
            columns = mask[start : stop + 1].any(0).nonzero().flatten().tolist()
            assert (low, high) == (columns[0], columns[-1] + 1)
            bias = band.bias(rows, (low, high), band.shift(s_q, s_kv), torch.empty(()))
            tile = mask[start : stop + 1, low:high]
            assert bool(tile.all()) if bias is None else torch.equal(bias == 0, tile)
            assert bias is None or not bool(tile.all())


@pytest.mark.parametrize(
    ("keywords", "band"),
    [
        (("no_mask",), Band(None, None, "bottom_right")),
        (("no_mask", (-1, -1)), Band(None, None, "bottom_right")),
        (("no_mask", (3, 2)), Band(3, 2, "bottom_right")),
        (("no_mask", (3, 2), False), Band(3, 2)),
        (("causal",), Band(None, 0)),
        (("causal", (-1, 0)), Band(None, 0)),
        (("causal", (-1, -1)), Band(None, 0)),
        (("causal", (7, 0)), Band(7, 0)),
        (("causal", (7, -1)), Band(7, 0)),
        (("causal", None, True), Band(None, 0, "bottom_right")),
        (("causal_bottom_right",), Band(None, 0, "bottom_right")),
        (("causal_bottom_right", (7, 0), True), Band(7, 0, "bottom_right")),
    ],
)
def test_mask_keywords(keywords: tuple[object, ...], band: Band) -> None:
    assert band_of(*keywords) == band  # type: ignore[arg-type]


def test_every_spelling_of_causal_is_one_form() -> None:
    spelled = [
        band_of("causal"),
        band_of("causal", (-1, 0)),
        band_of("causal", (8, 0)),
        band_of("causal", (7, -1)),
        band_of("causal_bottom_right"),
        band_of("no_mask", (-1, 0)),
        band_of("no_mask", (7, 0), False),
    ]
    assert {band.normalized(8, 8) for band in spelled} == {Band(None, 0)}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (("padding_causal", (3, 1)), r"use \(3, 0\)"),
        (("padding_causal_bottom_right", None, False), "use 'padding_causal'"),
        (("casual",), "must be one of no_mask, causal"),
        (("causal", (3, 1)), r"use \(3, 0\)"),
        (("no_mask", (3,)), "two ints"),
        (("no_mask", (-2, 0)), "two ints"),
        (("no_mask", 3), "two ints"),
        (("causal_bottom_right", None, False), "use 'causal'"),
    ],
)
def test_mask_keywords_that_cannot_be(keywords: tuple[object, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        band_of(*keywords)  # type: ignore[arg-type]


def test_sides_are_checked() -> None:
    with pytest.raises(PlanError, match="left"):
        Band(-1, 0)
    with pytest.raises(PlanError, match="diagonal"):
        Band(0, 0, "bottom_left")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "right", "bottom_right"),
    [
        ("no_mask", None, True),
        ("padding", None, True),
        ("arbitrary", None, True),
        ("causal", 0, False),
        ("padding_causal", 0, False),
        ("padding,causal", 0, False),
        ("causal,padding", 0, False),
        ("causal_bottom_right", 0, True),
        ("padding_causal_bottom_right", 0, True),
    ],
)
def test_every_mask_type_has_its_side_and_its_diagonal(
    name: str, right: int | None, bottom_right: bool
) -> None:
    diagonal = "bottom_right" if bottom_right else "top_left"
    assert band_of(name) == Band(None, right, diagonal)  # type: ignore[arg-type]
    assert band_of(name, (2, 0)) == Band(2, 0, diagonal)  # type: ignore[arg-type]
    if bottom_right and not name.endswith("bottom_right"):
        assert band_of(name, None, False).diagonal == "top_left"
    assert band_of(name, None, True).diagonal == "bottom_right"
