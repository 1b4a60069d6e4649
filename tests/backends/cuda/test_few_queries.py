"""Attention of a few queries: the device text run on the host equals the reference; what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from te_ops.backends.cuda import few_queries
from te_ops.backends.reference.kernels import bind_reference
from te_ops.registry import REGISTRY
from te_ops.testing import assert_close
from tests.backends.cuda.cases import drawer
from tests.backends.cuda.cases_few_queries import Few, few_queries_cases
from tests.backends.cudnn.calls import call_of

pytestmark = pytest.mark.usefixtures("on_the_host")
CASES = {case.name: case for case in few_queries_cases()}
PLAIN = Few("plain", (1, 1, 300), (4, 2), (32, 32), torch.float16)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_queries, "processors", lambda _: 5)  # keys are cut into several parts
    assert CASES[name].check(drawer(0, "cpu"), (0,), "sm_90") == []


def test_keys_that_are_not_cut() -> None:
    assert PLAIN.check(drawer(0, "cpu"), (1,), "sm_90") == []


def test_what_is_not_wanted_is_left_out() -> None:
    xs = PLAIN.operands(drawer(0, "cpu"), 0)
    call = call_of(xs, writes=(1,), scale=0.2)
    assert_close(few_queries.bind(call)(*xs.values()), bind_reference(call)(*xs.values()))


def test_other_sizes_of_a_plan_run_too() -> None:
    launch = few_queries.bind(PLAIN.call(PLAIN.operands(drawer(0, "cpu"), 0)))
    for sizes in ((2, 3, 150), (1, 30, 200), (1, 1, 3)):
        case = replace(PLAIN, sizes=sizes)
        xs = case.operands(drawer(0, "cpu"), 0)
        wanted = bind_reference(case.call(xs))(*xs.values())
        for x, y in zip(launch(*xs.values()), wanted, strict=True):
            assert_close(x.float(), y.float(), rtol=2.0**-10, atol=2e-3)


def test_operands_may_lie_anyhow() -> None:
    xs = PLAIN.operands(drawer(0, "cpu"), 0)
    wide = torch.zeros(1, 300, 2, 48, dtype=torch.float16)
    wide[..., 3:35] = xs["k"]
    call = PLAIN.call(xs)
    found = few_queries.bind(call)(xs["q"], wide[..., 3:35], xs["v"])
    for x, y in zip(found, few_queries.bind(call)(*xs.values()), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("case", "more", "reason"),
    [
        ({"sizes": (1, 9, 300)}, {}, "up to 16 queries"),
        ({"sizes": (1, 1, 100)}, {}, "at least 128 keys"),
        ({"d": (260, 32)}, {}, "divide by 8"),
        ({"dtype": torch.float32}, {}, "BF16 and FP16"),
        ({}, {"dropout": 0.1, "seed": torch.zeros(2, dtype=torch.int64)}, "seed"),
        ({}, {"mask": torch.zeros(1, 1, 1, 300, dtype=torch.bool)}, "mask"),
        ({}, {"scale": None, "scale_": torch.ones(())}, "scale"),
        ({}, {"writes": (0, 1, 2)}, "no largest scores"),
    ],
)
def test_what_is_refused(case: dict[str, Any], more: dict[str, Any], reason: str) -> None:
    xs: dict[str, Any] = replace(PLAIN, **case).operands(drawer(0, "cpu"), 0)
    tensors = {name.strip("_"): x for name, x in more.items() if isinstance(x, torch.Tensor)}
    attrs = {"writes": (0, 1), "scale": 1.0} | {
        name: x for name, x in more.items() if not isinstance(x, torch.Tensor)
    }
    assert reason in str(few_queries.refuse(call_of({**xs, **tensors}, **attrs)))


def test_it_comes_first() -> None:
    REGISTRY.prepare("cuda")
    names = [kernel.name for kernel in REGISTRY.kernels("attention")]
    assert names[0] == "cuda.attention_few"
