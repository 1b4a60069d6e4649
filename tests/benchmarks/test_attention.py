"""Attention alone in the benchmark: what its work is, which calls it makes, and its figures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.suite import attention, targets
from benchmarks.suite.attention import CASES, TILE, Attend
from te_ops.basic.band import Band

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [1, 128, 129, 700])
@pytest.mark.parametrize("band", [Band(), Band(right=0), Band(130, 0), Band(5, 300)], ids=str)
def test_tiles_are_those_with_something_in_them(length: int, band: Band) -> None:
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = torch.ones(length, length, dtype=torch.bool)
    if band.left is not None:
        seen &= j >= i - band.left
    if band.right is not None:
        seen &= j <= i + band.right
    wanted = sum(bool(part.any()) for rows in seen.split(TILE) for part in rows.split(TILE, 1))
    assert attention.tiles(length, band) == wanted


def test_cases_are_named_and_limited() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.name.startswith("attention-") for case in CASES)
    for case in CASES:
        assert not case.lengths or (sum(case.lengths) == case.sizes[3] and case.sizes[0] == 1)
        assert all(n >= 512 for n in case.lengths), "what the limits are about"
        assert case.limits[0] is not None


@pytest.mark.parametrize("of", ["peer", "fp8", "tile", "host"])
def test_a_case_of_each_kind_runs(of: str) -> None:
    case = [case for case in CASES if case.of == of][-1].smaller(32)
    entry = attention.measure(case, CPU, least=2, seconds=0.05)
    assert set(entry["kernels"].values()) == {"reference"}
    figures = [side for side in attention.SIDES if side in entry]
    assert figures == {"peer": [], "fp8": ["forward"]}.get(of, list(attention.SIDES))
    assert all(entry[side] > 0 for side in figures)


def test_a_tile_costs_what_it_takes_of_causal_attention() -> None:
    case = Attend("x", "", (2, 4, 4, 512, 64), "tile", (1.1, 1.1), left=128)
    causal, window = 4 * 2 * 10, 4 * 2 * 7
    assert attention.work(case) == window
    us = {"te_ops": 14.0, "causal": 10.0}
    assert attention._figure(case, us) == pytest.approx(14.0 / window * causal / 10.0)
    packed = Attend("y", "", (1, 4, 4, 512, 64), "tile", (1.1, 1.1), lengths=(256, 256))
    assert attention.work(packed) == 4 * 2 * 3
    assert attention.work(attention._causal(packed)) == 4 * 10


def test_targets() -> None:
    name = "attention-window-512"
    found = {
        "attention": {name: {"forward": 1.05, "backward": 1.3}, "attention-host": {"forward": 20.0}}
    }
    verdicts = {v["target"]: v for v in targets.judge(found, measured_only=True)}
    assert {k: v["verdict"] for k, v in verdicts.items()} == {
        f"{name}, forward: time a tile of causal attention's": "ok",
        f"{name}, backward: time a tile of causal attention's": "missed",
        "attention-host, forward: time of the host": "ok",
    }
