"""The clock: order of rounds, statistics, limits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.suite import data, measure, peers

CPU = torch.device("cpu")


def test_rounds_go_forwards_and_backwards() -> None:
    seen: list[str] = []
    calls = {name: (lambda name=name: seen.append(name)) for name in "abc"}

    def sample(name: str, call: Any) -> float:
        call()
        return 1.0

    samples = measure.rounds(calls, sample, least=4, seconds=60)
    assert "".join(seen) == "abccbaabccba"
    assert {name: len(values) for name, values in samples.items()} == {"a": 4, "b": 4, "c": 4}


def test_out_of_time_ends_after_a_whole_pair_of_rounds() -> None:
    count = [0]

    def sample(_: str, call: Any) -> float:
        count[0] += 1
        return 0.0

    measure.rounds({"a": time.time, "b": time.time}, sample, least=50, seconds=0.0)
    assert count[0] == 4  # each order once
    rests: list[int] = []
    measure.rounds({"a": time.time}, sample, least=2, between=lambda: rests.append(1))
    assert len(rests) == 2


@pytest.mark.parametrize("count", [1, 2, 5, 20, 21])
def test_statistics_are_those_of_numpy(count: int) -> None:
    samples = np.random.default_rng(count).random(count)
    found = measure.summary(list(samples))
    assert found["ms"] == pytest.approx(1e3 * np.median(samples))
    assert found["p10"] == pytest.approx(1e3 * np.percentile(samples, 10))
    assert found["p90"] == pytest.approx(1e3 * np.percentile(samples, 90))
    assert found["rounds"] == count


def test_timed_is_per_call() -> None:
    assert measure.timed(lambda: time.sleep(0.01), 3, CPU) == pytest.approx(0.01, rel=0.5)


def test_a_step_leaves_one_gradient_each() -> None:
    case = data.CASES[0].smaller(8, 256)
    arm = peers.PROVIDERS[0].build(peers.Data.draw(case, CPU), "none")
    once = {k: t.clone() for k, t in arm.results().items()}
    again = arm.results()  # gradients were None before: nothing adds up
    assert all(torch.equal(once[k], again[k]) for k in once)
    assert measure.host_us(arm, 2) > 0
    assert measure.kernels(arm) is None
    assert measure.memory(arm) is None
    assert measure.growth(arm, 3) == {"steps": 3, "bytes_grown": 0, "kernels_grown": 0}
