"""Generation in pieces equals one long forward, under every recipe whose rows do not see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te

BF16 = torch.bfloat16
R = te.recipe
HIDDEN, HEADS, GROUPS, D, TOKENS, BATCH = 128, 4, 2, 32, 40, 2
# How far pieces may be from the whole, relative, in norm: BF16 rounds sums of other lengths to neighbours, and what
# is quantized then goes to the neighbouring code. Under current scaling the amax of a call counts too.
RECIPES: dict[str, tuple[te.Recipe | None, float]] = {
    "bf16": (None, 0.01),
    "delayed": (R.DelayedScaling(amax_history_len=4), 0.03),
    "block": (R.Float8BlockScaling(), 0.03),
    "mxfp8": (R.MXFP8BlockScaling(), 0.03),
    "current": (R.Float8CurrentScaling(), 0.08),
    "delayed, fp8 attention": (R.DelayedScaling(amax_history_len=4, fp8_dpa=True), 0.08),
}
CACHES: dict[str, dict[str, Any]] = {"contiguous": {}, "paged": {"page_size": 8}}


def model() -> te.Sequential:
    torch.manual_seed(0)
    layers = [
        te.layers.TransformerLayer(
            HIDDEN, 256, HEADS, num_gqa_groups=GROUPS, normalization="RMSNorm", activation="swiglu", bias=False,
            hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd", rotary=te.RoPE(D),
            self_attn_mask_type="causal", params_dtype=BF16,
        )
        for _ in range(2)
    ]  # fmt: skip
    return te.Sequential(*layers)


def whole_and_pieces(recipe: te.Recipe | None, caches: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The output of one forward, and of a prompt, single tokens and further chunks."""
    op, x = model(), torch.randn(BATCH, TOKENS, HIDDEN).to(BF16)
    for _ in range(2):  # scales of delayed scaling, which are fixed in eval
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            op(torch.randn_like(x)).float().square().mean().backward()
    op.eval()
    with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
        whole = op(x)
        for layer in op:
            layer.self_attention.attention.cache = te.KVCache(
                BATCH, TOKENS, GROUPS, D, dtype=BF16, **caches
            )
        pieces = [op(part) for part in x.split([17, 1, 1, 3, 16, 1, 1], 1)]
    return whole.float(), torch.cat(pieces, 1).float()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", RECIPES)
def test_pieces_equal_the_whole(name: str, cache: str) -> None:
    recipe, bound = RECIPES[name]
    whole, pieces = whole_and_pieces(recipe, CACHES[cache])
    assert float((pieces - whole).norm() / whole.norm()) < bound
    rows = (pieces - whole).norm(dim=-1) / whole.norm(dim=-1)
    assert float(rows.max()) < 4 * bound, "no single token is far off"


@pytest.mark.parametrize("name", ["block", "mxfp8", "delayed"])
def test_later_tokens_do_not_change_earlier_ones(name: str) -> None:
    recipe, _ = RECIPES[name]
    op, x = model().eval(), torch.randn(BATCH, TOKENS, HIDDEN).to(BF16)
    other = x.clone()
    other[:, 20:] *= 30
    with torch.no_grad(), te.autocast(recipe=recipe):
        a, b = op(x), op(other)
    assert torch.equal(a[:, :20], b[:, :20])
