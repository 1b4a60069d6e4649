"""Experts as a composition of ops, which is how this version has them: a Linear each, over its part of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

import te_ops as te


def experts(
    count: int, features: int, out: int, dtype: torch.dtype = torch.float32
) -> list[te.Linear]:
    """Equal in shape, so that all share their plans."""
    return [te.Linear(features, out, dtype=dtype) for _ in range(count)]


def routed(every: Iterable[nn.Module], x: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
    """Each expert's part of the rows through it, in one tensor again."""
    parts = x.split(list(splits))
    return torch.cat([expert(part) for expert, part in zip(every, parts, strict=True)])
