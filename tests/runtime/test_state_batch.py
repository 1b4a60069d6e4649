"""States that roll together get the numbers that each would get alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import te_ops as te
from te_ops.runtime.state import DelayedState, Observation, commit


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_batch_rolls_like_single_states(algo, margin, length) -> None:
    config = te.recipe.DelayedScaling(
        amax_history_len=length, amax_compute_algo=algo, margin=margin
    )
    batch = [DelayedState(length) for _ in range(5)]
    alone = [copy.deepcopy(s) for s in batch]
    values = [
        [1.0, 7.0, 0.0, 3.5, 2.0],
        [math.nan, 9.0, 0.0, math.inf, 1e-38],
        [4.0, 1.0, 0.0, 2.0, 1e-44],
    ]
    for step in values:
        observed = {
            s: Observation(torch.tensor(v), config, 448.0, None)
            for s, v in zip(batch, step, strict=True)
        }
        commit(observed)
        for s, v in zip(alone, step, strict=True):
            s.advance(torch.tensor(v), config, 448.0)
    for s, t in zip(batch, alone, strict=True):
        for name, buffer in s.named_buffers():
            assert torch.equal(buffer, dict(t.named_buffers())[name]), name
        assert (s.version, s.maker) == (t.version, t.maker)


def test_states_of_different_formats_and_lengths_do_not_mix() -> None:
    long = te.recipe.DelayedScaling(amax_history_len=4)
    short = te.recipe.DelayedScaling(amax_history_len=2)
    states = [DelayedState(4), DelayedState(4), DelayedState(4), DelayedState(2)]
    maxima, configs = [448.0, 448.0, 57344.0, 448.0], [long, long, long, short]
    commit(
        {
            s: Observation(torch.tensor(2.0), c, m, None)
            for s, c, m in zip(states, configs, maxima, strict=True)
        }
    )
    assert [s.scale.item() for s in states] == [224.0, 224.0, 28672.0, 224.0]
    assert [len(s.amax_history) for s in states] == [4, 4, 4, 2]
