from __future__ import annotations

import pytest
import torch

import te_ops as te
from te_ops.cli.arms import NAMES, SABOTAGED, arm
from te_ops.errors import Error
from te_ops.graph import Phase

CPU = torch.device("cpu")
INPUT = te.Role("gemm", Phase.FORWARD, "input", "fc1")


def test_names_make_the_recipes_they_say() -> None:
    assert arm("fp32").recipe is None
    assert arm("delayed").recipe == te.recipe.DelayedScaling()
    assert isinstance(arm("nvfp4").quantizer(INPUT), te.NVFP4Quantizer)


def test_dtype_is_that_of_all_but_fp32_and_bf16_has_its_own() -> None:
    found = {name: arm(name, torch.float16).dtype for name in NAMES}
    assert found.pop("fp32") is None
    assert found.pop("bf16") is torch.bfloat16
    assert set(found.values()) == {torch.float16}


def test_bf16_rounds_operands_by_a_cast() -> None:
    assert arm("fp32").quantizer(INPUT) is None
    assert arm("bf16").quantizer(INPUT) == te.IdentityQuantizer(torch.bfloat16)


def test_active_applies_recipe_and_dtype() -> None:
    linear = te.Linear(16, 16, bias=False)
    x = torch.randn(16, 16)
    for way in (arm("mxfp8"), arm("bf16")):
        with way.active(CPU):
            inside = linear(x)
        assert not torch.equal(inside.float(), linear(x))
    assert inside.dtype is torch.bfloat16


def test_sparing_leaves_one_path_dense() -> None:
    way = arm("current").sparing("head")
    assert way.quantizer(INPUT) is not None
    assert way.quantizer(te.Role("gemm", Phase.FORWARD, "input", "head")) is None
    assert arm("fp32").sparing("head") == arm("fp32")


def test_the_sabotaged_scale_is_fixed_whatever_was_seen() -> None:
    linear = te.Linear(8, 8, bias=False)
    for size in (1.0, 100.0):
        with arm(SABOTAGED).active(CPU):
            linear(size * torch.ones(4, 8)).sum().backward()
        assert linear.state_dict()["quantizer.delayed.input.scale"].item() == 2**-8


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(Error, match="no recipe is named 'fp7'; choose from fp32, bf16"):
        arm("fp7")
