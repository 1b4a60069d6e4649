"""Values that are hard to quantize."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch


@dataclass(frozen=True)
class Values:
    """A way to fill a tensor."""

    name: str
    fill: Callable[[tuple[int, ...]], torch.Tensor] = field(repr=False)
    finite: bool = True


def _with(value: float) -> Callable[[tuple[int, ...]], torch.Tensor]:
    def fill(shape: tuple[int, ...]) -> torch.Tensor:
        x = torch.randn(shape)
        if x.numel():
            x.view(-1)[x.numel() // 2] = value
        return x

    return fill


def _zero_row(shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(shape)
    if x.numel():
        x[0] = 0.0
    return x


VALUES = [
    Values("normal", torch.randn),
    Values("zeros", torch.zeros),
    Values("negative_zeros", lambda s: -torch.zeros(s)),
    Values("tiny", lambda s: torch.full(s, 1e-38)),
    Values("subnormal", lambda s: torch.full(s, 1e-44)),
    Values("small", lambda s: 1e-3 * torch.randn(s)),
    Values("huge", lambda s: 1e38 * torch.randn(s).sign()),
    Values("outlier", _with(3e4)),
    Values("zero_row", _zero_row),
    Values("inf", _with(math.inf), finite=False),
    Values("minus_inf", _with(-math.inf), finite=False),
    Values("nan", _with(math.nan), finite=False),
    Values("all_nan", lambda s: torch.full(s, math.nan), finite=False),
]
every_value = pytest.mark.parametrize("values", VALUES, ids=lambda v: v.name)
