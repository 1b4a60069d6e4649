"""Groups that become one launch, on the host: every output equals the group's reference."""

from __future__ import annotations

import pytest

from te_ops.backends.cuda import targets
from tests.backends.cuda import cases as single
from tests.backends.cuda.cases import Case, check, drawer
from tests.backends.cuda.cases_pointwise import cases

pytestmark = pytest.mark.usefixtures("on_the_host")
BY_NAME = {case.name: case for case in single.cases()}
SHAPES = ((0, 300), (67, 40), (130, 131))


@pytest.mark.parametrize("case", tuple(cases()), ids=lambda case: case.name)
def test_equals_the_reference(case: Case) -> None:
    for shape in SHAPES:
        assert check(case.make(drawer(5, "cpu"), shape), "sm_90", "cpu") == [], shape


def test_a_tensor_without_dimensions() -> None:
    for name in ("e4m3 per-tensor delayed-bf16-rca", "e4m3 per-tensor current-bf16-rca"):
        assert check(BY_NAME[f"quantize-{name}"].make(drawer(5, "cpu"), ()), "sm_90", "cpu") == []


@pytest.mark.parametrize("cut", [(4, 4, 32, True, 1), (4, 2, 192, False, 2), (8, 3, 64, True, 16)])
def test_every_cut_gives_the_same(
    cut: tuple[int, int, int, bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How tiles are cut is a choice for speed alone."""
    monkeypatch.setattr(targets, "shape_of", lambda *_: targets.Shape(*cut))
    case = next(c for c in cases() if c.name.startswith("pointwise_together-dgelu"))
    for shape in ((150, 200), (0, 300)):
        assert check(case.make(drawer(6, "cpu"), shape), "sm_90", "cpu") == [], shape
