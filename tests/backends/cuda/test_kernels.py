"""The device text run on the host (see `emulator`): every family, shapes with and without tails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_ops.backends.cuda import launch
from tests.backends.cuda.cases import BIND, Case, cases, check, drawer

SOME = (
    "pointwise-gelu-bf16-bf16",
    "pointwise-swiglu-f32-bf16-i1",
    "pointwise-dswiglu-bf16",
    "pointwise-broadcast-f32",
    "sum-3-f16",
    "reduce-rows-bf16-f32",
    "reduce-cols-f32-f32",
    "reduce-all-bf16-f32",
    "amax-bf16",
    "quantize-e4m3 per-tensor delayed-bf16-rca",
    "quantize-e5m2 per-tensor current, pow2 scale-bf16-rca",
    "quantize-e4m3 block 1x128-bf16-rca",
    "quantize-e5m2 block 128x128-bf16-rca",
    "quantize-mxfp8 e4m3-bf16-rca",
    "quantize-mxfp8 e5m2 32x32-bf16-rca",
    "layernorm-bf16-f32-zc",
    "layernorm_backward-bf16",
    "rmsnorm_dgamma-f32",
    "norm_quantize-rms-e4m3 per-tensor delayed-dense",
    "pointwise_quantize-dswiglu-e4m3 per-tensor delayed",
    "pointwise_quantize-bias+gelu-e4m3 block 1x128",
)
SHAPES = ((0, 32), (2, 3, 40), (129, 131))
BY_NAME = {case.name: case for case in cases()}

pytestmark = pytest.mark.usefixtures("on_the_host")


@pytest.mark.parametrize("name", SOME)
def test_equals_the_reference(name: str) -> None:
    case: Case = BY_NAME[name]
    for shape in SHAPES:
        assert check(case.make(drawer(3, "cpu"), shape), "sm_90", "cpu") == [], shape


def test_long_rows_are_read_again() -> None:
    case = BY_NAME["layernorm-f32-f32"]
    assert check(case.make(drawer(4, "cpu"), (2, 70000)), "sm_90", "cpu") == []


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_results_that_no_cache_holds_leave_it_first(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rows that are expected: the bytes are the same either way."""
    texts: list[str] = []

    def note(name: str, text: str, *_: Any, **__: Any) -> None:
        texts.extend([text] if name == "quantize" else [])

    monkeypatch.setattr(launch, "build", note)
    case = BY_NAME[f"quantize-e4m3 per-tensor {scaling}-bf16-rca"]
    for rows in (1024, 8192):  # 28 and 224 MiB of copies
        group = case.make(
            lambda shape, dtype=torch.bfloat16, **_: torch.empty(shape, dtype=dtype), (rows, 14336)
        )
        BIND[group.runs].bind(group.call("sm_90", "cpu"))
    assert [text.startswith("#define TE_OPS_PASSING\n") for text in texts] == [False, True]
    assert texts[1].partition("\n")[2] == texts[0]
