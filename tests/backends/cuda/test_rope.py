"""The device text of RoPE run on the host: every form and format equals the reference."""

from __future__ import annotations

import pytest
import torch

from te_ops.backends.cuda.rope import fit
from tests.backends.cuda.cases import Case, check, drawer
from tests.backends.cuda.cases_rope import Table, rope_cases, table_cases

CASES = {case.name: case for case in rope_cases()}
SHAPES = ((0, 32), (5, 32), (33, 32))


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case: Case = CASES[name]
    for shape in SHAPES:
        assert check(case.make(drawer(3, "cpu"), shape), "sm_90", "cpu") == [], shape


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("case", [*table_cases()], ids=lambda case: case.name)
def test_the_table_is_that_of_fp64(case: Table) -> None:
    for shape in ((0,), (1,), (700,)):
        assert case.check(drawer(3, "cpu"), shape, "sm_90") == [], shape


def test_heads_are_read_where_they_lie() -> None:
    packed = torch.empty(3, 5, 96, dtype=torch.bfloat16)
    views = packed[..., 32:64].unflatten(-1, (2, 16))
    assert fit(views, chunked=True).data_ptr() == views.data_ptr()
    cut = packed[:, :3, 32:64].unflatten(-1, (2, 16))  # rows are not one stride apart
    assert fit(cut, chunked=True).is_contiguous()
    odd = packed[..., 1:33].unflatten(-1, (2, 16))
    assert fit(odd, chunked=True).is_contiguous()
    assert fit(odd, chunked=False).data_ptr() == odd.data_ptr()
