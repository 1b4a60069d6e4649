"""K16: attention masks and windows: who sees whom."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import te_ops as te
from tests.faults.attention import DEVICES, explicit, offsets, qkv

pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("window", [(0, 0), (1, 0), (2, 0), (7, 0), (8, 0), (0, 1), (2, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_b088_windows_are_inclusive_on_both_sides(
    device: str, window: tuple[int, int], packed: bool
) -> None:
    """S = 8, window (2, 0): query 5 sees the keys 3, 4 and 5, whichever form asks."""
    q, k, v = qkv(1, 8, 8, device=device)
    at = offsets(8, 8).to(device)
    hidden = (at < -window[0]) | (at > window[1])
    kind: Any = "causal" if window[1] == 0 else "no_mask"
    if packed:
        op = te.Attention(2, attn_mask_type=kind, window_size=window, qkv_format="thd")
        o = op(q[0], k[0], v[0], te.PackedSequences([0, 8], device=device))[None]
    else:
        o = te.Attention(2, attn_mask_type=kind, window_size=window)(q, k, v)
    torch.testing.assert_close(o, explicit(q, k, v, hidden)[0])
    seen = torch.autograd.grad(o[0, 5].sum(), v)[0][0, :, 0, 0].nonzero().flatten().tolist()
    assert seen == [j for j in range(8) if -window[0] <= j - 5 <= window[1]]


def test_b088_an_arbitrary_mask_says_the_same_as_a_window(device: str) -> None:
    q, k, v = qkv(1, 8, 8, device=device)
    at = offsets(8, 8).to(device)
    mask = ((at < -2) | (at > 0))[None, None]
    by_mask = te.Attention(2, attn_mask_type="arbitrary")(q, k, v, mask)
    torch.testing.assert_close(by_mask, te.Attention(2, window_size=(2, 0))(q, k, v))


def test_b090_cross_attention_inherits_nothing_from_the_causal_default(device: str) -> None:
    """Self attention is causal with a window; the cross attention beside it sees the last key from row 0."""
    x, memory = qkv(1, 4, 6, device=device)[:2]
    lens = torch.tensor([4], device=device)
    cross = te.Attention(2, attn_mask_type="padding", attention_type="cross")
    own = te.Attention(2, attn_mask_type="causal", window_size=(1, 0))
    everything = torch.tensor([6], device=device)

    def decoder(memory: torch.Tensor) -> torch.Tensor:
        return cross(own(x, x, x), memory, memory, lens, everything)

    moved = memory.detach().clone()
    moved[:, 5] += 1.0
    assert not torch.allclose(decoder(memory)[:, 0], decoder(moved)[:, 0])
    y = own(x, x, x)
    torch.testing.assert_close(decoder(memory), explicit(y, memory, memory, torch.tensor(False))[0])


@pytest.mark.parametrize("kind", ["padding", "window and padding", "mask", "bottom right", "sink"])
def test_b092_a_row_without_a_key_is_zero_with_finite_gradients(device: str, kind: str) -> None:
    keywords: dict[str, Any] = {"return_lse": True}
    extras: list[torch.Tensor] = []
    q, k, v = qkv(2, 4, 4, device=device)
    at = offsets(4, 4).to(device)
    none = torch.zeros(2, 1, 4, 4, dtype=torch.bool, device=device)
    if kind in ("padding", "sink"):
        keywords |= {"attn_mask_type": "padding", "attention_type": "cross"}
        keywords |= {"softmax_type": "off-by-one"} if kind == "sink" else {}
        extras = [torch.tensor(x, device=device) for x in ([4, 4], [0, 4])]
        hidden = none.clone()
        hidden[0] = True
    elif kind == "window and padding":
        keywords |= {
            "attn_mask_type": "padding_causal",
            "window_size": (0, 0),
            "attention_type": "cross",
        }
        extras = [torch.tensor(x, device=device) for x in ([4, 4], [2, 4])]
        hidden = none | (at != 0)
        hidden[0, :, 2:] = True
    elif kind == "mask":
        keywords["attn_mask_type"] = "arbitrary"
        hidden = none.clone()
        hidden[1, :, 2] = True
        extras = [hidden]
    else:
        q, k, v = qkv(2, 4, 2, device=device)
        keywords["attn_mask_type"] = "causal_bottom_right"
        hidden = (offsets(4, 2).to(device) > -2)[None, None].expand(2, 1, 4, 2)
    o, lse = te.Attention(2, **keywords)(q, k, v, *extras)
    want, want_lse = explicit(q, k, v, hidden)
    empty = want_lse == -math.inf
    assert bool(empty.any())
    assert torch.equal(lse[empty], want_lse[empty])
    assert torch.equal(o.transpose(1, 2)[empty], torch.zeros_like(o.transpose(1, 2)[empty]))
    if kind != "sink":
        torch.testing.assert_close(o, want)
        torch.testing.assert_close(lse, want_lse)
    grads = torch.autograd.grad([o, lse], [q, k, v], [torch.randn_like(o), torch.ones_like(lse)])
    assert all(bool(g.isfinite().all()) for g in grads)
    assert torch.equal(grads[0].transpose(1, 2)[empty], torch.zeros_like(q.transpose(1, 2)[empty]))
