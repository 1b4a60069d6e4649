"""K19: attention returns NaN or fails on legal input."""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from tests.faults.attention import DEVICES, explicit, offsets, qkv

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("s", [64, 192, 704])
@pytest.mark.parametrize("form", ["causal", "mask"])
def test_b105_logits_far_below_zero_at_half_a_tile(device: str, s: int, form: str) -> None:
    """S % 128 == 64 and every row's LSE near -120: the gradients are those of the definition."""
    gen = torch.Generator().manual_seed(1)
    q, k, v = (0.1 * torch.randn(1, s, 1, 64, generator=gen) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -120.0 * 8.0
    xs = [x.to(device, torch.bfloat16).requires_grad_() for x in (q, k, v)]
    hidden = (offsets(s, s) > 0).to(device)
    if form == "causal":
        o = te.Attention(1)(*xs)
    else:
        o = te.Attention(1, attn_mask_type="arbitrary")(*xs, hidden[None, None])
    exact = [x.detach().double().requires_grad_() for x in xs]
    want, lse = explicit(*exact, hidden)
    assert float(lse.detach().max()) < -88.7
    do = torch.randn(o.shape, generator=gen).to(device, torch.bfloat16)
    got = torch.autograd.grad(o, xs, do)
    pairs = list(
        zip((o, *got), (want, *torch.autograd.grad(want, exact, do.double())), strict=True)
    )
    assert all(bool(a.isfinite().all()) for a, _ in pairs)
    # dq[0] is 120 times the row sum of ds: exactly 0, but for the rounding of o in do * o.
    rounding = 120.0 * 2.0**-8 * (do.double() * want).abs().sum(-1)
    assert bool(((got[0] - pairs[1][1]).abs()[..., 0] <= rounding).all())
    for number, pair in enumerate(pairs):
        a, b = (x.detach().double()[..., number == 1 :] for x in pair)
        assert float((a - b).norm()) <= 0.02 * float(b.norm()) + 1e-6


@pytest.mark.parametrize("s", [1, 2, 3, 5, 63, 65])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_b107_short_lengths_that_are_no_multiple_of_anything(
    device: str, s: int, mask: str
) -> None:
    xs = qkv(2, s, s, d=64, dtype=torch.bfloat16, device=device)
    o = te.Attention(2, attn_mask_type=mask)(*xs)  # type: ignore[arg-type]
    exact = [x.detach().double().requires_grad_() for x in xs]
    hidden = (offsets(s, s) > 0).to(device) if mask == "causal" else torch.tensor(False)
    want, _ = explicit(*exact, hidden)
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, xs, do)
    for a, b in zip((o, *got), (want, *torch.autograd.grad(want, exact, do.double())), strict=True):
        assert bool(a.isfinite().all())
        a, b = a.detach().double(), b.detach()
        assert float((a - b).norm()) <= 0.01 * float(b.norm()) + 1e-2
