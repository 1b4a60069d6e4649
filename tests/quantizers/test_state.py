from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from te_ops.errors import RecipeError
from te_ops.quantizers.state import (
    delayed_update,
    divide,
    join_nonfinite,
    observe_amax,
    resize_history,
    scale_from_amax,
    scale_from_history,
    split_nonfinite,
)
from tests.quantizers import oracle

FP32_MAX = float(torch.finfo(torch.float32).max)


def second_largest(history):
    return history.sort(0).values[-2] if len(history) > 1 else history[0]


class Model:
    """Delayed scaling, in ten lines of numpy."""

    def __init__(self, length, margin, algo):
        self.history, self.scale, self.bad = [np.float32(0)] * length, np.float32(1), 0
        self.margin, self.algo = margin, algo

    def step(self, amax):
        finite = np.isfinite(amax)
        self.bad += not finite
        self.history[0] = np.float32(amax) if finite else np.float32(0)
        picked = self.algo(self.history)
        if finite and picked > 0:
            scale = (np.float32(448) / np.float32(picked)) / np.float32(2.0**self.margin)
            self.scale = min(scale, oracle.FP32_MAX)
        self.history = [np.float32(0), *self.history[2:], self.history[0]][: len(self.history)]


ALGOS = {
    "max": ("max", max),
    "most_recent": ("most_recent", lambda h: h[0]),
    "function": (second_largest, lambda h: sorted(h)[-2] if len(h) > 1 else h[0]),
}
STEPS = [3.0, 100.0, 0.5, math.nan, 2.0, math.inf, 0.0, 7.5, 1e-40, 0.25, 0.0, 0.0, 1e38, 3.3]


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("length", [1, 2, 4, 1024])
@pytest.mark.parametrize("margin", [0, 1, 3, -2])
@pytest.mark.parametrize("algo", ALGOS)
def test_update_matches_the_model(algo, margin, length):
    ours, theirs = ALGOS[algo]
    model = Model(length, margin, theirs)
    state = (torch.ones(1), torch.zeros(length), torch.zeros(1, dtype=torch.int64))
    for amax in STEPS:
        kept = [t.clone() for t in state]
        new = delayed_update(*state, torch.tensor(amax), fp8_max=448.0, margin=margin, algo=ours)
        assert all(torch.equal(a, b) for a, b in zip(state, kept, strict=True))  # pure
        model.step(amax)
        assert [t.shape for t in new] == [t.shape for t in state]
        assert [t.dtype for t in new] == [t.dtype for t in state]
        state = new
        assert state[0].item() == model.scale
        assert state[1].tolist() == model.history
        assert state[2].item() == model.bad
        assert math.isfinite(state[0].item())


def test_a_bad_step_keeps_the_scale_and_leaves_the_window_usable():
    state = (torch.ones(()), torch.zeros(3), torch.zeros((), dtype=torch.int64))
    state = delayed_update(*state, torch.tensor(4.0), fp8_max=448.0)
    assert state[0] == 112.0
    state = delayed_update(*state, torch.tensor(math.inf), fp8_max=448.0)
    assert state[0] == 112.0
    assert state[2] == 1
    state = delayed_update(*state, torch.tensor(8.0), fp8_max=448.0)
    assert state[0] == 56.0
    assert state[1].tolist() == [0.0, 0.0, 8.0]


def test_zero_steps_roll_and_an_empty_window_keeps_the_scale():
    state = (torch.tensor(5.0), torch.tensor([0.0, 0.0, 2.0]), torch.zeros(()))
    for expected in ([0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]):
        state = delayed_update(*state, torch.tensor(0.0), fp8_max=448.0)
        assert state[1].tolist() == expected
    assert state[0] == 224.0  # the window's last word


def test_margin_divides_after_the_quotient():
    """(fp8_max / amax) / 2**margin overflows where fp8_max / (amax * 2**margin) does not."""
    tiny = torch.tensor(1e-38)
    new, _, _ = delayed_update(
        torch.ones(()), torch.zeros(2), torch.zeros(()), tiny, fp8_max=448.0, margin=10
    )
    assert new == FP32_MAX


def test_a_scale_algorithm_replaces_the_formula():
    def halve(amax, scale, fp8_max):
        return scale * 0.5 + 0.0 * amax + 0.0 * fp8_max

    state = (torch.tensor(8.0), torch.zeros(2), torch.zeros(()))
    assert delayed_update(*state, torch.tensor(1.0), fp8_max=448.0, scale_algo=halve)[0] == 4.0
    bad = delayed_update(*state, torch.tensor(math.nan), fp8_max=448.0, scale_algo=halve)
    assert bad[0] == 8.0


def test_several_operands_at_once():
    amax = torch.tensor([1.0, 2.0, math.nan])
    scale, history, bad = delayed_update(
        torch.ones(3), torch.zeros(4, 3), torch.zeros(3), amax, fp8_max=448.0
    )
    assert scale.tolist() == [448.0, 224.0, 1.0]
    assert history[-1].tolist() == [1.0, 2.0, 0.0]
    assert bad.tolist() == [0.0, 0.0, 1.0]


def test_unknown_algorithm():
    with pytest.raises(RecipeError, match="most_recent"):
        delayed_update(
            torch.ones(1), torch.zeros(2), torch.zeros(1), torch.ones(()), fp8_max=1.0, algo="min"
        )


def test_nonfinite_is_seen_by_all_ranks_whichever_holds_it():
    """A MAX reduction that drops NaN when it comes second, as gloo does."""

    def reduce(a, b):
        return [torch.where(x > y, x, y) for x, y in zip(a, b, strict=True)]

    for bad in (math.nan, math.inf):
        for values in itertools.permutations([bad, 3.0, 5.0]):
            parts = [split_nonfinite(torch.tensor(v)) for v in values]
            reduced = reduce(reduce(parts[0], parts[1]), parts[2])
            assert torch.isnan(join_nonfinite(*reduced))
            assert reduced[0] == 5.0
    assert join_nonfinite(*split_nonfinite(torch.tensor([1.5, 0.0]))).tolist() == [1.5, 0.0]


def test_scale_from_history():
    history = torch.tensor([0.0, 1.0, 8.0, 2.0])  # 2 is the last finished step
    assert scale_from_history(history, fp8_max=448.0) == 56.0
    assert scale_from_history(history, fp8_max=448.0, margin=1) == 28.0
    assert scale_from_history(history, fp8_max=448.0, algo="most_recent") == 224.0
    assert scale_from_history(history, fp8_max=448.0, algo=lambda h: h[0]) == 224.0
    assert scale_from_history(torch.zeros(7), fp8_max=448.0) == 1.0


def test_resize_history():
    history = torch.tensor([0.0, 1.0, 2.0])  # 2 is the last finished step: it stays the last
    assert resize_history(history, 1).tolist() == [0.0]
    assert resize_history(history, 2).tolist() == [0.0, 2.0]
    assert resize_history(history, 5).tolist() == [0.0, 0.0, 0.0, 1.0, 2.0]
    assert resize_history(history, 3).tolist() == history.tolist()
    assert resize_history(history[:1], 3).tolist() == [0.0, 0.0, 0.0]
    assert resize_history(torch.ones(2, 3), 4).shape == (4, 3)
    with pytest.raises(RecipeError):
        resize_history(history, 0)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-3, 1e-42])
@pytest.mark.parametrize("limit", [448.0, 57344.0])
def test_scale_from_amax_matches_the_oracle(limit, eps, pow2):
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 0x7F800000, (3000,), generator=g, dtype=torch.int32)
    edges = torch.tensor([0.0, 1e-45, 1e-38, FP32_MAX, math.inf, math.nan, 448.0])
    amax = torch.cat([bits.view(torch.float32), edges])
    largest = float(torch.finfo(torch.bfloat16).max)
    ours = scale_from_amax(amax, limit, pow2, eps, largest)
    theirs = [oracle.scale_of(v, limit, pow2=pow2, eps=eps, largest=largest) for v in amax.numpy()]
    np.testing.assert_array_equal(ours.numpy(), np.array(theirs))
    assert torch.isfinite(divide(1.0, ours)).all()
    assert (divide(1.0, ours) > 0).all()


def test_divide_rounds_once():
    """torch computes ``448.0 / x`` as ``448.0 * (1 / x)``, which rounds twice."""
    x = torch.rand(5000) + 0.5
    exact = (np.float32(448.0) / x.numpy()).astype(np.float32)
    np.testing.assert_array_equal(divide(448.0, x).numpy(), exact)
    assert (448.0 / x != divide(448.0, x)).any()


def test_observed_amax():
    assert observe_amax(torch.zeros(0, 3)) == 0
    assert observe_amax(torch.tensor(-3.0)).shape == ()
    assert torch.isnan(observe_amax(torch.tensor([1.0, math.nan, math.inf])))
    assert observe_amax(torch.tensor([1.0, -math.inf])) == math.inf
    assert observe_amax(torch.randn(4, dtype=torch.float64)).dtype is torch.float32
    assert observe_amax(torch.full((2,), 1e300, dtype=torch.float64)) == math.inf


def test_scales_that_are_powers_of_two():
    state = torch.ones(1), torch.zeros(4), torch.zeros(1, dtype=torch.int64)
    for amax, scale in ((1.0, 256.0), (7.0, 64.0), (448.0, 1.0), (449.0, 0.5)):
        new = delayed_update(
            *state, torch.tensor(amax), fp8_max=448.0, algo="most_recent", pow2=True
        )
        assert new[0] == scale
    tiny = delayed_update(*state, torch.tensor(1e-45), fp8_max=448.0, pow2=True)
    assert tiny[0] == 2.0**127
    assert scale_from_history(torch.full((4,), 7.0), fp8_max=448.0, pow2=True) == 64.0
    assert scale_from_history(torch.zeros(4), fp8_max=448.0, pow2=True) == 1.0
