"""Attention in float64 from a mask that is written out, for the faults K16 to K19."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""`pytest -m gpu tests/faults tests/gpu` runs everything that wants a device."""


def explicit(q: Any, k: Any, v: Any, hidden: Any, scale: float | None = None) -> tuple[Any, Any]:
    """o [b, s, h, d] and lse [b, h, s] of q, k, v and a mask (True = hidden) that broadcasts to [b, h, i, j].

    Rows without a key are 0, their lse -inf.
    """
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.as_tensor(hidden, device=q.device).expand(s.shape)
    empty = hidden.all(-1)
    s = s.masked_fill(hidden, -math.inf).masked_fill(empty[..., None], 0.0)
    p = torch.softmax(s, -1).masked_fill(hidden, 0.0)
    lse = torch.logsumexp(s, -1).masked_fill(empty, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def offsets(s_q: int, s_kv: int) -> torch.Tensor:
    """j - i of every score."""
    return torch.arange(s_kv)[None] - torch.arange(s_q)[:, None]


def qkv(
    b: int, s_q: int, s_kv: int, h: int = 2, hk: int = 2, *, d: Any = 8, dtype: torch.dtype = torch.float64,
    device: str = "cpu", seed: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """Leaves with gradients."""
    gen = torch.Generator().manual_seed(seed)
    d_qk, d_v = d if isinstance(d, tuple) else (d, d)
    shapes = ((b, s_q, h, d_qk), (b, s_kv, hk, d_qk), (b, s_kv, hk, d_v))
    return [
        torch.randn(x, generator=gen, dtype=torch.float64).to(device, dtype).requires_grad_()
        for x in shapes
    ]
