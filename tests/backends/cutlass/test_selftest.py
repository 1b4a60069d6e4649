"""The self-test finds what a faulty compiler makes; the reference stands in for kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_ops.backends.cutlass import limits, selftest
from te_ops.backends.cutlass.reference import reference
from te_ops.backends.cutlass.spec import GemmSpec

CPU = torch.device("cpu")
KINDS = [pytest.param(spec, id=name) for name, spec in selftest.KINDS.items()]
COPIES = selftest.KINDS["FP8 copies"]


def right(spec: GemmSpec) -> Callable[..., None]:
    """A kernel that computes what it should, row by row where it writes."""

    def run(a: Any, b: Any, *, scale: Any = None, **given: Any) -> None:
        scales = (given.pop("scale_a"), given.pop("scale_b")) if spec.scaled else None
        made = reference(spec, None, a, b, scales=scales, scale=scale)
        for name, out in given.items():
            out.copy_(getattr(made, name).reshape(out.shape))

    return run


def wrong(spec: GemmSpec, fault: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    """The same with something done to the results."""

    def run(a: Any, b: Any, **given: Any) -> None:
        right(spec)(a, b, **given)
        fault(given)

    return run


@pytest.mark.parametrize("spec", KINDS)
def test_a_right_kernel_passes(spec: GemmSpec) -> None:
    assert limits.refuse(spec) is None
    assert selftest.check(spec, right(spec), CPU) is None


@pytest.mark.parametrize("spec", KINDS)
def test_one_wrong_value_is_found(spec: GemmSpec) -> None:
    def fault(given: dict[str, Any]) -> None:
        given["y"][-1, -1] += 1

    assert selftest.check(spec, wrong(spec, fault), CPU) == "y is wrong"


@pytest.mark.parametrize("spec", KINDS)
def test_a_dropped_bound_is_found(spec: GemmSpec) -> None:
    """B149: a copy whose predicate is lost writes rows that are not there."""

    def fault(given: dict[str, Any]) -> None:
        y = given["y"]
        beyond = y.as_strided((1, y.shape[1]), (y.shape[1], 1), y.shape[0] * y.shape[1])
        beyond.fill_(0)

    assert selftest.check(spec, wrong(spec, fault), CPU) == "memory behind y was written"


def test_a_transposed_copy_with_garbage_is_found() -> None:
    """B151: the bytes of one copy must be those of the other."""

    def fault(given: dict[str, Any]) -> None:
        given["col"].view(torch.uint8)[3, 5] ^= 1

    assert selftest.check(COPIES, wrong(COPIES, fault), CPU) == "col is wrong"


@pytest.mark.parametrize("name", ["amax", "scale_inv", "row"])
def test_every_result_is_looked_at(name: str) -> None:
    def fault(given: dict[str, Any]) -> None:
        given[name].view(torch.uint8).view(-1)[0] ^= 1

    assert selftest.check(COPIES, wrong(COPIES, fault), CPU) == f"{name} is wrong"


def test_sums_of_the_operands_are_exact() -> None:
    """Whatever the order of summing, and whatever the accumulator keeps."""
    for m, n, k in (selftest._SIZES, selftest._COLUMN_SIZES):
        assert k * 2 <= 288 < 2**9  # |sum| * the scales: a whole number that BF16 holds
        assert m % 128
        assert n % 128
        assert k % 64
