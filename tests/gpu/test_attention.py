"""Attention on a CUDA device: whichever kernels take it, the numbers of the CPU's reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.testing import assert_close

H, HK, D, S = 4, 2, 32, 96


@te.pointwise
def tilted(s, i, j, slope: float):  # type: ignore[no-untyped-def]
    """A soft cap, and a slope over the distance."""
    return 4.0 * te.math.tanh(s / 4.0) + slope * (j - i)


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"attn_mask_type": "no_mask"},
    "window": {"window_size": (7, 0)},
    "padding": {"attn_mask_type": "padding_causal"},
    "mask": {"attn_mask_type": "arbitrary"},
    "bias": {"core_attention_bias_type": "post_scale_bias"},
    "alibi": {"core_attention_bias_type": "alibi"},
    "soft cap": {"logits_soft_cap": 2.0},
    "modifier": {"score_mod": tilted(0.05)},
    "off by one": {"softmax_type": "off-by-one"},
    "learnable sink": {"softmax_type": "learnable"},
    "packed": {"qkv_format": "thd", "rotary": te.RoPE(D, qkv_format="thd")},
    "rotary": {"rotary": te.RoPE(D)},
    "sequence first": {"qkv_format": "sbhd"},
    # What libraries were seen to compute wrongly, in random calls:
    "negative scale": {"softmax_scale": -0.1},
    "negative scale, full": {"softmax_scale": -0.1, "attn_mask_type": "no_mask"},
    "one tensor without gaps": {"qkv_format": "thd", "packed": True},
    "two queries beside a mask": {"attn_mask_type": "arbitrary"},
}


def inputs(name: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k and v, and what else the options ask for, on the CPU."""
    gen = torch.Generator().manual_seed(0)
    queries = 2 if name.startswith("two") else S
    shapes = [(2, queries, H, D), *[(2, S, HK, D)] * 2]
    xs = [torch.randn(shape, generator=gen).to(dtype) for shape in shapes]
    if name == "sequence first":
        xs = [x.transpose(0, 1).contiguous() for x in xs]
    if name == "packed":
        xs = [x.flatten(0, 1) for x in xs]
        return xs, [te.PackedSequences([0, 5, 5, 90, 170], cu_q_padded=[0, 8, 8, 100, 192])]
    if name.startswith("one tensor"):
        together = torch.cat([x.flatten(0, 1).flatten(1) for x in xs], 1)
        return [together], [te.PackedSequences([0, 60, 63, 192])]
    more: dict[str, Any] = {
        "padding": lambda: torch.tensor([S, 17]),
        "mask": lambda: torch.rand(2, 1, S, S, generator=gen) < 0.3,
        "two queries beside a mask": lambda: torch.rand(2, H, 2, S, generator=gen) < 0.4,
        "bias": lambda: torch.randn(1, H, S, S, generator=gen),
    }
    return xs, [more[name]()] if name in more else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(CASES))
def test_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    xs, extras = inputs(name, dtype)
    results = []
    for device in ("cpu", "cuda"):
        op = te.Attention(H, HK, return_lse=True, **CASES[name]).to(device)
        leaves = [x.to(device).requires_grad_() for x in xs]
        o, lse = op(*leaves, *(x.to(device) for x in extras))
        do = torch.cos(torch.arange(o.numel(), dtype=torch.float32)).view(o.shape).to(device, dtype)
        grads = torch.autograd.grad(o, [*leaves, *op.parameters()], do)
        results.append([x.detach().cpu() for x in (o, lse, *grads)])
    tolerance = 2e-4 if dtype is torch.float32 else 3e-2
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["contiguous", "paged", "ring"])
def test_generation(kind: str) -> None:
    keywords: dict[str, Any] = {"contiguous": {}, "paged": {"page_size": 8}, "ring": {"window": 9}}[
        kind
    ]
    window = (8, 0) if kind == "ring" else None
    op = te.Attention(H, HK, packed=True, rotary=te.RoPE(D), window_size=window).cuda()
    x = torch.randn(2, 40, (H + 2 * HK) * D, device="cuda")
    with torch.no_grad():
        want = op(x)
        op.cache = te.KVCache(2, 40, HK, D, device="cuda", **keywords)
        got = torch.cat([op(part) for part in x.split([25, 1, 1, 13], 1)], 1)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_dropout_repeats_with_the_seed() -> None:
    q, k, v = (torch.randn(2, S, 2, D) for _ in range(3))
    op = te.Attention(2, attention_dropout=0.5)
    torch.manual_seed(0)
    first = op(q.cuda(), k.cuda(), v.cuda())
    torch.manual_seed(0)
    torch.testing.assert_close(op(q.cuda(), k.cuda(), v.cuda()), first)
    assert not torch.allclose(op(q.cuda(), k.cuda(), v.cuda()), first)
