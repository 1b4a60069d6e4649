"""New tokens into a KV cache: the device text run on the host equals the reference; what is refused."""

from __future__ import annotations

import pytest
import torch

from te_ops.backends.cuda.kv_append import bind, refuse
from te_ops.backends.reference.kernels import bind_reference
from tests.backends.cuda.cases import drawer
from tests.backends.cuda.cases_few_queries import Appended, kv_append_cases

pytestmark = pytest.mark.usefixtures("on_the_host")
CASES = {case.name: case for case in kv_append_cases()}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case = CASES[name]
    assert refuse(case.make(drawer(0, "cpu"))[0]) is None
    assert case.check(drawer(0, "cpu"), (0,), "sm_90") == []


def test_new_tokens_may_lie_apart() -> None:
    call, xs = Appended("").make(drawer(0, "cpu"))
    wide = torch.zeros(3, 3, 4, 8, dtype=torch.bfloat16)
    wide[:, :, 1:3] = xs[1]
    expected = bind_reference(call)(xs[0].clone(), *xs[1:])
    assert torch.equal(bind(call)(xs[0], wide[:, :, 1:3], *xs[2:]), expected)


def test_what_is_refused() -> None:
    assert "a token has 12 bytes" in str(refuse(Appended("", features=3).make(drawer(0, "cpu"))[0]))
