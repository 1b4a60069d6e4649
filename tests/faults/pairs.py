"""A pipeline beside plain torch, and how many plans are built (K33)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import te_ops as te
from te_ops.runtime.cache import CACHE


@contextlib.contextmanager
def builds(expected: int | None = None, at_most: int | None = None) -> Iterator[None]:
    """Exactly (or at most) so many plans are built inside."""
    before = CACHE.built
    yield
    made = CACHE.built - before
    if expected is not None:
        assert made == expected
    if at_most is not None:
        assert made <= at_most


def pair(bias: bool = True) -> te.Sequential:
    return te.Sequential(te.Linear(8, 8, bias=bias), te.SiLU(), te.Linear(8, 8, bias=bias))


def plain(s: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.silu(F.linear(x, s[0].weight, s[0].bias))
    return F.linear(y, s[2].weight, s[2].bias)


def check_pair(s: te.Sequential, rows: int = 4) -> None:
    """Output and all gradients are those of plain torch with the parameters as they are now."""
    x = torch.randn(rows, 8, requires_grad=True)
    s.zero_grad()
    y = s(x)
    expected = plain(s, x)
    torch.testing.assert_close(y, expected)
    params = [p for p in s.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(expected.square().sum(), [x, *params], retain_graph=True)
    got = torch.autograd.grad(y.square().sum(), [x, *params])
    for a, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, e)
