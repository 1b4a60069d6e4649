"""The device text that transposes codes run on the host equals the reference; what is refused."""

from __future__ import annotations

import pytest

from te_ops.quantizers import Float8BlockQuantizer, Usage
from tests.backends.cuda.cases import drawer
from tests.backends.cuda.cases_transpose import Transposed, transpose_cases

SOME = ((0, 32), (1, 8), (5, 7), (7,), (2, 3, 40), (129, 130), (200, 392), (4, 0))


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("case", list(transpose_cases()), ids=lambda case: case.name)
def test_equals_the_reference(case: Transposed) -> None:
    for shape in SOME:
        assert case.check(drawer(3, "cpu"), shape, "sm_90") == [], shape


def test_scales_of_tiles_are_not_transposed() -> None:
    case = Transposed(Float8BlockQuantizer(block_scaling_dim=2), Usage.ROW)
    (found,) = case.check(drawer(3, "cpu"), (128, 128), "sm_90")
    assert "codes under one scale" in found
