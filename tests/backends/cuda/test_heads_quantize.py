"""The device text of heads, and of their gradients, to FP8 run on the host equals the reference; what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from te_ops.backends.cuda.heads_quantize import refuse
from te_ops.basic.heads import UNPACK_HEADS, Parts
from te_ops.basic.quantize import QUANTIZE
from te_ops.quantizers import MXFP8Quantizer, Quantizer
from tests.backends.cuda.calls import Inputs
from tests.backends.cuda.cases import Case, Group, check, drawer
from tests.backends.cuda.cases_heads_quantize import (
    QUANTIZERS,
    RULE,
    heads_back_cases,
    heads_quantize_cases,
)

DELAYED = QUANTIZERS[0]
CASES = {case.name: case for case in (*heads_quantize_cases(), *heads_back_cases())}


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case: Case = CASES[name]
    for shape in ((0, 32), (1, 32), (21, 32)):
        assert check(case.make(drawer(3, "cpu"), shape), "sm_90", "cpu") == [], shape


def _group(parts: Parts, quantizer: Quantizer, *, skips: int = 0, reads: int = 0) -> Group:
    """Heads that are unpacked and quantized, the first `skips` parts not; `reads` of them are wanted as they are."""
    inputs = Inputs()
    x = inputs(torch.zeros(4, sum(h * d for h, d in parts), dtype=torch.bfloat16))
    heads = inputs.g.calls(UNPACK_HEADS, x, parts=parts)
    writes = list(heads[:reads])
    for head in heads[skips:]:
        more = [inputs(torch.ones(1))] if quantizer.stateful else []
        writes.append(inputs.g.calls(QUANTIZE, head, *more, quantizer=quantizer, stream=0)[0])
    nodes = tuple(n for n in inputs.g.nodes if n.inputs)
    return Group(RULE.name, inputs, nodes, tuple(writes), RULE)


EVEN: Parts = ((2, 64), (1, 64), (1, 64))


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: _group(((2, 24), (1, 24), (1, 24)), DELAYED), r"heads of \[24\] features"),
        (lambda: _group(((2, 64), (1, 64), (1, 32)), DELAYED), r"heads of \[32, 64\] features"),
        (lambda: _group(((1, 8),) * 5, DELAYED), "5 parts"),
        (lambda: _group(EVEN, DELAYED, skips=1), "each part is quantized once"),
        (lambda: _group(EVEN, DELAYED, reads=1), "read as they are too"),
        (lambda: _group(EVEN, MXFP8Quantizer()), "one scale a tensor"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_refused(made: Callable[[], Group], reason: str) -> None:
    found = refuse(made().call("sm_90", "cpu"))
    assert found is not None
    assert re.search(reason, found)
