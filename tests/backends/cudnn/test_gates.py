"""Every gate refuses what it says, with its reason, and takes what lies next to it."""

from __future__ import annotations

import dataclasses

import pytest

from te_ops.backends.cudnn.gates import GATES, refuse
from te_ops.basic.band import Band
from tests.backends.cudnn.problems import LENS, PAIRS, SEED, SLOPES, Case, with_slopes

REASONS = {gate.name: gate.reason for gate in GATES}


def test_every_gate_has_a_pair() -> None:
    assert set(REASONS) == {*PAIRS, *SLOPES}
    assert len(set(REASONS.values())) == len(GATES)


@pytest.mark.parametrize("name", PAIRS)
def test_both_directions(name: str) -> None:
    refused, taken = PAIRS[name]
    assert refuse(refused.problem()) == REASONS[name]
    assert refuse(taken.problem()) is None


def test_slopes() -> None:
    assert refuse(with_slopes(4)) is None
    assert refuse(with_slopes(4, ours=False)) == REASONS["slopes"]
    assert refuse(with_slopes(6)) == REASONS["slopes"], (
        "its own slopes are the paper's for powers of two"
    )
    assert refuse(with_slopes(4, band=Band())) == REASONS["slopes band"]
    problem = with_slopes(4)
    late = dataclasses.replace(problem.form, slope_diagonal="bottom_right")
    assert refuse(dataclasses.replace(problem, form=late)) == REASONS["slopes diagonal"]
    slopes = (("slopes", (4,), Case().dtype),)
    back = Case(more=slopes, backward=True, attrs={"band": Band(right=0)}).problem()
    assert refuse(dataclasses.replace(back, alibi=True)) == REASONS["slopes gradient"]


def test_dropout_is_taken_in_both_directions_or_in_none() -> None:
    attrs = {"dropout": 0.5, "band": Band(right=0)}
    for more in (SEED, (*SEED, *LENS), (*SEED, ("bias", (1, 4, 1, 256), Case().dtype))):
        answers = {
            refuse(Case(more=more, attrs=attrs, backward=back, writes=writes).problem())
            for back, writes in ((False, (0, 1)), (False, (0, 1, 2)), (True, ()))
        }
        assert len(answers) == 1, more


def test_spellings_of_a_mask_are_one_problem() -> None:
    bands = [Band(right=0), Band(255, 0), Band(400, 0), Band(right=0, diagonal="bottom_right")]
    made = {Case(attrs={"band": band}).problem().band for band in bands}
    assert len(made) == 1
    one = Case(s=(1, 256), attrs={"band": Band(right=0, diagonal="bottom_right")}).problem()
    assert (one.band.left, one.band.right) == (None, None), "one last query sees every key"
