"""Operand layouts: a kernel reads what its producer's kernel writes (core contract 14)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te
from te_ops.registry import REGISTRY, Call, Kernel, OperandLayouts


def gemm(reads: tuple[tuple[int, Any], ...], flip: bool) -> Kernel:
    """A forward GEMM that wants its first operand transposed."""

    def bind(call: Call) -> Any:
        function = REGISTRY.find("reference").bind(call)

        def launch(a: Tensor, b: Tensor) -> Tensor:
            return function(a.t() if flip else a, b)

        return launch

    def refuse(call: Call) -> str | None:
        return None if call.node.attrs["layout"] == "nt" else "forward only"

    return Kernel(
        "gemm", "test.gemm", bind, layouts=OperandLayouts(reads=reads), refuse=refuse, priority=99
    )


def gelu(layout: Any, flip: bool) -> Kernel:
    """A pointwise kernel that writes in a layout."""

    def bind(call: Call) -> Any:
        function = REGISTRY.find("reference").bind(call)

        def launch(*xs: Tensor) -> Tensor:
            y = function(*xs)
            return y.t().contiguous() if flip else y

        return launch

    def refuse(call: Call) -> str | None:
        return "forward only" if call.node.phase.is_backward else None

    return Kernel(
        "pointwise",
        "test.gelu",
        bind,
        layouts=OperandLayouts(writes=((0, layout),)),
        refuse=refuse,
        priority=99,
    )


MODEL = te.Sequential(te.GELU(), te.Linear(8, 4, bias=False)).requires_grad_(False)
X = torch.linspace(-1, 1, 24).reshape(3, 8)


@pytest.mark.parametrize("layout", ["transposed", "swizzled", "interleaved"])
def test_agreement_is_accepted_and_runs(layout: str) -> None:
    want = MODEL(X)
    with REGISTRY.temporary(gemm(((0, layout),), True), gelu(layout, True)):
        torch.testing.assert_close(MODEL(X), want)


def test_plain_by_default() -> None:
    with REGISTRY.temporary(gemm((), False), gelu("plain", False)):
        MODEL(X)


def test_reader_wants_what_nobody_writes() -> None:
    with (
        REGISTRY.temporary(gemm(((0, "swizzled"),), False)),
        pytest.raises(te.PlanError, match=r"test\.gemm.*'swizzled'.*reference.*'plain'"),
    ):
        MODEL(X)


def test_writer_offers_what_the_reader_does_not_take() -> None:
    with (
        REGISTRY.temporary(gelu("transposed", False)),
        pytest.raises(te.PlanError, match=r"'plain'.*test\.gelu.*'transposed'"),
    ):
        MODEL(X)


def test_inputs_and_parameters_are_plain() -> None:
    with (
        REGISTRY.temporary(gemm(((1, "interleaved"),), False)),
        pytest.raises(te.PlanError, match="input of the segment"),
    ):
        MODEL(X)


def test_a_result_that_leaves_the_segment_is_plain() -> None:
    with (
        REGISTRY.temporary(gelu("transposed", True)),
        pytest.raises(te.PlanError, match="transposed"),
    ):
        te.GELU()(X)
