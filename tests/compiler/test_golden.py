"""Plans of standard blocks, field by field. After a wanted change: `python -m
tests.compiler.update_golden`.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch

from tests.compiler.golden import CASES, FOLDER, Case, differences, dumps


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plan_is_the_golden_one(case: Case) -> None:
    assert case.path.exists(), f"{case}: run `python -m tests.compiler.update_golden`"
    found = differences(json.loads(case.path.read_text()), case.plan())
    shown = "\n  ".join(found)
    assert not found, (
        f"{case}:\n  {shown}\nIf this is wanted: python -m tests.compiler.update_golden"
    )


def test_every_golden_file_has_a_case() -> None:
    assert set(FOLDER.rglob("*.json")) == {case.path for case in CASES}


def test_a_plan_does_not_depend_on_what_was_planned_before() -> None:
    case = Case("swiglu_mlp", "mxfp8", fused=True)
    first = case.plan()
    Case("lm_layer", "delayed", fused=True).plan()
    assert differences(first, case.plan()) == []


@pytest.mark.parametrize("recipe", ["fp32", "delayed", "mxfp8"])
def test_fused_and_unfused_plans_agree(recipe: str) -> None:
    """Composed kernels keep unwritten inner values in FP32; in FP32 blocks that is the same
    rounding.
    """
    results = []
    for fused in (False, True):
        with Case("lm_layer", recipe, fused).scene() as (block, x):
            block.float()
            x = x.detach().float().requires_grad_()
            block(x).square().sum().backward()
            results.append([x.grad, *(p.grad for p in block.parameters())])
    for plain, fused_grad in zip(*results, strict=True):
        torch.testing.assert_close(fused_grad, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p["segments"][0]["forward"].pop(2), "which is gone"),
        (lambda p: p["segments"][0]["forward"][1].update(kernel="other"), "kernel: expected"),
        (lambda p: p["segments"][0]["forward"][0]["reads"].append("x"), "reads: expected"),
        (lambda p: p["segments"][0]["saved"][0].update(bytes=1), "bytes: expected"),
        (
            lambda p: p["refused"].append({"rule": "r", "at": "a", "kernel": "", "reason": "b"}),
            "r at a is new",
        ),
        (lambda p: p["key"].update(grad=1), "grad: expected True, got 1"),
        (lambda p: p.pop("key"), "'key' is gone"),
    ],
)
def test_every_change_is_seen_and_told_in_one_line(change: object, said: str) -> None:
    plan = Case("norm_linear", "current", fused=False).plan()
    other = copy.deepcopy(plan)
    change(other)  # type: ignore[operator]
    found = differences(plan, other)
    assert len(found) == 1
    assert said in found[0]


def test_json_is_read_back_as_it_was() -> None:
    plan = Case("gelu_mlp", "nvfp4", fused=True).plan()
    assert json.loads(dumps(plan)) == plan
    assert max(len(line) for line in dumps(plan).splitlines()) < 600
