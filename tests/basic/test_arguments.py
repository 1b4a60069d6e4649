"""Checks of arguments: what passes, what is refused, with which words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from te_ops.attrs import Dim
from te_ops.basic import arguments
from te_ops.errors import PlanError, ShapeError


def test_what_passes() -> None:
    assert arguments.positive_int("Op", "n", np.int64(3)) == 3
    assert type(arguments.positive_int("Op", "n", np.int64(3))) is int
    assert arguments.sizes("Op", "n", 4) == (4,)
    assert arguments.sizes("Op", "n", torch.Size([2, 3])) == (2, 3)
    assert arguments.number("Op", "x", 1) == 1.0
    assert type(arguments.number("Op", "x", 1)) is float
    assert arguments.flag("Op", "on", False) is False
    assert arguments.wide(torch.bfloat16) is torch.float32
    assert arguments.wide(torch.float64) is torch.float64
    assert arguments.show((Dim(2, (0, 0)), 3)) == "(2, 3)"
    assert arguments.checked_here(torch.zeros(1))
    assert not arguments.checked_here(torch.zeros(1, device="meta"))


@pytest.mark.parametrize("value", [0, -3, 1.0, "1", None, True])
def test_positive_int(value: Any) -> None:
    with pytest.raises(ShapeError, match=r"Op: n must be"):
        arguments.positive_int("Op", "n", value)


@pytest.mark.parametrize("value", [(), (2, 0), [1.5], "ab", None])
def test_sizes(value: Any) -> None:
    with pytest.raises(ShapeError, match=r"Op: n must"):
        arguments.sizes("Op", "n", value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.1, True, "1", None, 1j])
def test_number(value: Any) -> None:
    with pytest.raises(PlanError, match=r"Op: x must be"):
        arguments.number("Op", "x", value, low=0.0, high=1.0)


def test_parameters_start_in_the_default_dtype() -> None:
    made = arguments.empty("Op", (2, 3), "cpu", None)
    assert made.dtype is torch.get_default_dtype()
    assert made.shape == (2, 3)
    assert made.requires_grad
    with pytest.raises(PlanError, match=r"float64, got torch\.int8"):
        arguments.empty("Op", (2,), None, torch.int8)
