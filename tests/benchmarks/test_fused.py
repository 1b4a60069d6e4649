"""The fused groups of the benchmark are groups of real plans, and their products are those that limits are about."""

from __future__ import annotations

import pytest
import torch

from benchmarks.suite import fused
from tests.backends.cutlass import standin

META = torch.device("meta")


@pytest.mark.parametrize("case", fused.CASES, ids=lambda case: case.name)
def test_each_case_is_a_group_of_a_plan(case: fused.Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    with standin.hopper(monkeypatch, "measured", emulated=False):
        trial = fused.group_of(case, META)
    spec = trial.match.spec
    assert spec.scaled == (case.split is not None)
    assert not spec.scaled or spec.fast == (not case.split)
    m, n, k = trial.match.extents(trial.call)[:3]
    shape = case.about.rpartition("; ")[2]
    assert shape.startswith("the same") or shape == f"{m} x {n} x {k}"
    assert 0 < case.aim <= case.limit


def test_names_are_unique_and_preset() -> None:
    names = [c.name for c in fused.CASES]
    assert len(set(names)) == len(names)
    assert all(name.startswith("fused-") for name in names)


def test_a_device_without_kernels_says_so() -> None:
    with pytest.raises(RuntimeError, match="Hopper"):
        fused.group_of(fused.CASES[0], META)
