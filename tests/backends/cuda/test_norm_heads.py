"""The device text of norms of heads run on the host equals the reference; what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from te_ops.backends.cuda.norm_heads import refuse
from te_ops.basic.heads_norm import NORM_HEADS
from tests.backends.cuda.calls import Inputs, make_call
from tests.backends.cuda.cases import Case, check, drawer
from tests.backends.cuda.cases_norm_heads import norm_heads_cases

CASES = {case.name: case for case in norm_heads_cases()}


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case: Case = CASES[name]
    for shape in ((0, 32), (1, 32), (21, 32)):
        assert check(case.make(drawer(3, "cpu"), shape), "sm_90", "cpu") == [], shape


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (((2, 24), (1, 24), (1, 24)), "heads of 24 features"),
        (((2, 512), (1, 512), (1, 512)), "heads of 512 features"),
        (((2, 64), (1, 64), (1, 32)), r"heads have \[32, 64\] features"),
    ],
)
def test_other_heads_are_refused(parts: Any, reason: str) -> None:
    inputs = Inputs()
    x = inputs(torch.zeros(4, sum(h * d for h, d in parts), dtype=torch.bfloat16))
    attrs: dict[str, Any] = {"normed": (True, True, False), "eps": 1e-6, "zero_centered": False}
    outs = inputs.g.calls(NORM_HEADS, x, parts=parts, **attrs)
    found = refuse(make_call(inputs, (inputs.g.node(outs[0]),), outs))
    assert found is not None
    assert re.search(reason, found)
