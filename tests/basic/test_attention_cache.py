"""KV cache: generation in pieces equals the whole, commits by length, and edits between calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.basic.kvcache import KV_RING
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Value, prim

F64 = torch.float64
KINDS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "paged": {"page_size": 4},
    "ring": {"window": 5},
}


def attention(kind: str, **keywords: Any) -> te.Attention:
    if kind == "ring":
        keywords = {"window_size": (4, 0), **keywords}
    return te.Attention(4, 2, packed=True, rotary=te.RoPE(8), **keywords)


def cache_of(kind: str, batch: int = 2, most: int = 40, **keywords: Any) -> te.KVCache:
    return te.KVCache(batch, most, 2, 8, dtype=F64, **KINDS[kind], **keywords)


def pieces(op: te.Op, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([op(part) for part in x.split(sizes, 1)], 1)


def poison(cache: te.KVCache) -> None:
    """NaN in every slot: unwritten ones are never read."""
    cache.k.fill_(math.nan)
    cache.v.fill_(math.nan)


# -- generation


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    "sizes", [[1] * 37, [3] * 12 + [1], [16, 16, 5], [37], [20, 1, 1, 15], [4, 4, 29]]
)
def test_in_pieces_equals_the_whole(kind: str, sizes: list[int]) -> None:
    op, x = attention(kind), torch.randn(2, 37, 64, dtype=F64)
    want = op(x)
    op.cache = cache_of(kind)
    poison(op.cache)
    torch.testing.assert_close(pieces(op, x, sizes), want, rtol=1e-10, atol=1e-12)
    assert op.cache.lengths.tolist() == [37, 37]


FEATURES: list[dict[str, Any]] = [
    {"attn_mask_type": "causal_bottom_right"},
    {"core_attention_bias_type": "alibi"},
    {"softmax_type": "learnable"},
    {"logits_soft_cap": 1.0},
    {"window_size": (6, 0)},
    {"q_norm": te.RMSNorm(8, dtype=F64), "k_norm": te.RMSNorm(8, dtype=F64)},
]


@pytest.mark.parametrize("keywords", FEATURES, ids=lambda keywords: next(iter(keywords)))
@pytest.mark.parametrize("kind", list(KINDS))
def test_everything_that_attention_can_do(kind: str, keywords: dict[str, Any]) -> None:
    if kind == "ring":
        keywords = {**keywords, "window_size": (4, 0)}
    op, x = attention(kind, **keywords), torch.randn(2, 21, 64, dtype=F64)
    with torch.no_grad():
        want = op(x)
    op.cache = cache_of(kind)
    torch.testing.assert_close(pieces(op, x, [7, 1, 1, 12]), want, rtol=1e-6, atol=1e-6)


def test_sequence_first() -> None:
    op = te.Attention(4, 2, packed=True, qkv_format="sbhd", rotary=te.RoPE(8, qkv_format="sbhd"))
    x = torch.randn(9, 2, 64, dtype=F64)
    want = op(x)
    op.cache = cache_of("contiguous")
    with torch.no_grad():
        got = torch.cat([op(part) for part in x.split([4, 1, 4])])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_different_lengths(kind: str, side: str) -> None:
    """Padded prompts, then one token each: every sequence as if it were alone; one gets nothing."""
    op = attention(kind)
    lens = [6, 2, 0]
    x, more = torch.randn(3, 6, 64, dtype=F64), torch.randn(3, 3, 64, dtype=F64)
    alone = []
    for e, n in enumerate(lens):
        begin = 6 - n if side == "left" else 0
        alone.append(op(torch.cat([x[e : e + 1, begin : begin + n], more[e : e + 1]], 1))[0])
    at = torch.arange(6)
    bound = torch.tensor(lens)[:, None]
    mask = at < 6 - bound if side == "left" else at >= bound
    x[mask] = math.nan
    op.attn_mask_type = "padding_causal"
    op.cache = cache_of(kind, batch=3)
    poison(op.cache)
    with torch.no_grad():
        first = op(x, mask[:, None, None])
        rest = [op(more[:, i : i + 1], torch.ones(3, dtype=torch.int64)) for i in range(3)]
    assert op.cache.lengths.tolist() == [9, 5, 3]
    assert torch.equal(first[mask], torch.zeros_like(first[mask]))
    for e, n in enumerate(lens):
        begin = 6 - n if side == "left" else 0
        got = torch.cat([first[e, begin : begin + n], *(r[e] for r in rest)])
        torch.testing.assert_close(got, alone[e], rtol=1e-10, atol=1e-12)


def test_one_plan_serves_all_lengths() -> None:
    op = attention("contiguous")
    op.cache = cache_of("contiguous")
    x = torch.randn(2, 1, 64, dtype=F64)
    with torch.no_grad():
        plan = op.plan(x)
        for _ in range(5):
            op(x)
            assert op.plan(x) is plan


RECIPES = {
    "none": None,
    "delayed": te.recipe.DelayedScaling(),  # its scales are fixed in eval
    "mxfp8": te.recipe.MXFP8BlockScaling(),  # blocks are within a row
    "block": te.recipe.Float8BlockScaling(),
}


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("bf16", [False, True])
def test_a_model_of_two_layers_under_recipes_that_do_not_look_across_rows(
    name: str, bf16: bool
) -> None:
    torch.manual_seed(4)
    layers = [
        te.Residual(
            te.Linear(32, 64, bias=False),
            te.Attention(4, 2, packed=True),
            te.Linear(32, 32, bias=False),
        )
        for _ in range(2)
    ]
    model = te.Sequential(*layers)
    x = torch.randn(2, 32, 32)
    quantized = {"enabled": RECIPES[name] is not None, "recipe": RECIPES[name]}
    dtype = torch.bfloat16 if bf16 else torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16), te.autocast(**quantized):  # type: ignore[arg-type]
        model(x).sum().backward()
        model.eval()
        with torch.no_grad():
            want = model(x)
            for layer in layers:
                layer[1].cache = te.KVCache(2, 32, 2, 8, dtype=dtype)
            got = torch.cat([model(part) for part in x.split([16, 1, 15], 1)], 1)
    tolerance = 0.02 if bf16 else 1e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# -- commit by length


@prim("fails_on_demand", infer=lambda x: x.like())
def FAILS(x: torch.Tensor) -> torch.Tensor:
    """Its input, unless the switch is on."""
    if Failing.on:
        raise RuntimeError("in the middle")
    return x.clone()


class Failing(te.Op):
    """An op behind the attention that may fail."""

    on = False

    def emit(self, g: Graph, x: Value) -> Value:
        return g.call(FAILS, x)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_failed_step_leaves_the_visible_cache(kind: str) -> None:
    attend = attention(kind)
    model = te.Sequential(attend, Failing())
    x = torch.randn(2, 20, 64, dtype=F64)
    want = model(x)
    attend.cache = cache_of(kind, most=24)
    with torch.no_grad():
        first = model(x[:, :11])
        before = attend.cache.lengths.clone()
        Failing.on = True
        try:
            with pytest.raises(RuntimeError, match="in the middle"):
                model(torch.randn(2, 9, 64, dtype=F64))
        finally:
            Failing.on = False
        assert torch.equal(attend.cache.lengths, before)
        torch.testing.assert_close(torch.cat([first, model(x[:, 11:])], 1), want)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_a_full_cache_says_so_and_stays(kind: str) -> None:
    op = attention(kind)
    op.cache = cache_of(kind, most=8)
    x = torch.randn(2, 9, 64, dtype=F64)
    with torch.no_grad():
        a = op(x[:, :6])
        k = op.cache.k.clone()
        with pytest.raises(ShapeError, match="sequence 0 would have 9 tokens, the cache holds 8"):
            op(x[:, 6:])
        assert torch.equal(op.cache.k, k)
        assert op.cache.lengths.tolist() == [6, 6]
        b = op(x[:, 6:8])
    op.cache = None
    want = op(x[:, :8])
    torch.testing.assert_close(torch.cat([a, b], 1), want)


def test_a_ring_takes_steps_up_to_its_limit() -> None:
    op = attention("ring")
    op.cache = cache_of("ring", most=6)
    with torch.no_grad(), pytest.raises(ShapeError, match="gets 7 tokens at once"):
        op(torch.randn(2, 7, 64, dtype=F64))


# -- edits


@pytest.mark.parametrize("kind", list(KINDS))
def test_truncate_and_go_on(kind: str) -> None:
    op = attention(kind)
    x, other = torch.randn(2, 30, 64, dtype=F64), torch.randn(2, 6, 64, dtype=F64)
    want = op(x)
    op.cache = cache_of(kind, **({"rollback": 6} if kind == "ring" else {}))
    with torch.no_grad():
        op(x[:, :20])
        op(other)
        op.cache.truncate([20, 23])
        op.cache.truncate(20)
        torch.testing.assert_close(op(x[:, 20:]), want[:, 20:])
        with pytest.raises(ShapeError, match="has 30 tokens, it cannot have 31"):
            op.cache.truncate(31)
        if kind == "ring":
            with pytest.raises(ShapeError, match="rollback=6: it cannot go back to 20"):
                op.cache.truncate(20)
        op.cache.reset()
        torch.testing.assert_close(op(x[:, :9]), want[:, :9])


def test_a_ring_counts_its_rollback_from_the_most_tokens_there_were() -> None:
    op = attention("ring")
    x = torch.randn(2, 60, 64, dtype=F64)
    op.cache = cache_of("ring", most=4, rollback=6)
    with torch.no_grad():
        pieces(op, x, [4] * 15)
        op.cache.truncate([56, 60])
        op.cache.reorder([1, 0])
        op.cache.truncate([55, 54])
        with pytest.raises(ShapeError, match=r"has 55 tokens, had 60, and .* go back to 50"):
            op.cache.truncate([50, 54])
        assert op.cache.lengths.tolist() == [55, 54]
        op.cache.truncate([0, 54])  # nothing before a fresh start is needed
        op(x[:, :3])
        op.cache.truncate([1, 55])


@pytest.mark.parametrize("lengths", [2.5, True, [1.5, 2], "12"])
def test_lengths_are_integers(lengths: Any) -> None:
    with pytest.raises(ShapeError, match="must be an int"):
        cache_of("contiguous").truncate(lengths)


@pytest.mark.parametrize("kind", list(KINDS))
def test_beams_are_reordered(kind: str) -> None:
    op = attention(kind)
    x, tails = torch.randn(3, 9, 64, dtype=F64), torch.randn(3, 5, 64, dtype=F64)
    order = [2, 0, 0]
    want = op(torch.cat([x[order], tails], 1))[:, 9:]
    op.cache = cache_of(kind, batch=3)
    with torch.no_grad():
        op(x)
        op.cache.reorder(order)
        torch.testing.assert_close(pieces(op, tails, [1, 1, 3]), want)
    with pytest.raises(ShapeError, match="no sequence 3 of 3"):
        op.cache.reorder([0, 1, 3])
    with pytest.raises(ShapeError, match="2 numbers for 3 sequences"):
        op.cache.reorder([0, 1])


def test_pages_are_shared_until_they_are_written() -> None:
    op = attention("paged")
    op.cache = cache_of("paged", batch=4, most=16, total_num_pages=8)
    x = torch.randn(4, 6, 64, dtype=F64)
    with torch.no_grad():
        op(x)  # two pages each: the pool is full
        op.cache.reorder([1, 1, 1, 1])  # two pages in all
        table = op.cache.page_table.clone()
        assert len({tuple(row[:2].tolist()) for row in table}) == 1
        op(x[:, :1])
        after = op.cache.page_table
        assert torch.equal(after[:, 0], table[:, 0])  # full pages stay shared
        assert len(set(after[:, 1].tolist())) == 4  # the last one is written by each


def test_a_pool_without_free_pages() -> None:
    op = attention("paged")
    op.cache = cache_of("paged", batch=2, most=16, total_num_pages=3)
    x = torch.randn(2, 4, 64, dtype=F64)
    with torch.no_grad():
        op(x)
        with pytest.raises(ShapeError, match="no page is free for sequence 1"):
            op(x)
        assert op.cache.lengths.tolist() == [4, 4]
        op.cache.truncate([4, 0])
        op(x[:, :4])
        assert op.cache.lengths.tolist() == [8, 4]


def test_the_table_of_a_ring() -> None:
    lengths, total = torch.tensor([0, 30, 45]), torch.tensor([3, 33, 48])
    table, starts, lens = KV_RING.reference(lengths, total, slots=48, page=16, window=5)
    assert table.tolist() == [[0, 1, 2], [4, 5, 3], [8, 6, 7]]
    assert starts.tolist() == [0, 10, 9]
    assert lens.tolist() == [3, 7, 7]


# -- mistakes


def test_caches_are_for_inference() -> None:
    op = attention("contiguous")
    op.cache = cache_of("contiguous")
    x = torch.randn(2, 3, 64, dtype=F64, requires_grad=True)
    with pytest.raises(PlanError, match="a cache is for inference"):
        op(x)
    assert op.cache.lengths.tolist() == [0, 0]
    assert "cache.k" not in op.state_dict()


def test_two_places_cannot_share_a_cache() -> None:
    op = attention("contiguous")
    op.cache = cache_of("contiguous")
    with torch.no_grad(), pytest.raises(PlanError, match="append to one cache"):
        te.Branch(op, op)(torch.randn(2, 3, 64, dtype=F64))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"attn_mask_type": "arbitrary"}, "without mask and bias"),
        ({"core_attention_bias_type": "post_scale_bias"}, "without mask and bias"),
        ({"attention_type": "cross"}, "self-attention"),
        ({"qkv_format": "thd"}, "self-attention"),
        ({"qkv_format": "sbhd_2bshd"}, "self-attention"),
        ({"rotary": te.RoPE(8, positions="offsets")}, "counts the positions"),
        ({"rotary": te.RoPE(8, start_position=3)}, "counts the positions"),
        ({"cache": "yes"}, "must be a te.KVCache"),
    ],
)
def test_attention_options_that_a_cache_refuses(keywords: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        te.Attention(4, 2, **{"cache": cache_of("contiguous"), **keywords})


@pytest.mark.parametrize("window", [None, (5, 0), (-1, 0)])
def test_a_ring_needs_a_window_that_fits(window: Any) -> None:
    with pytest.raises(PlanError, match=r"use window_size=\(4, 0\)"):
        te.Attention(4, 2, cache=cache_of("ring"), window_size=window)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"window": 4, "page_size": 4}, "choose one"),
        ({"total_num_pages": 4}, "needs page_size"),
        ({"rollback": 4}, "rollback is for rings"),
        ({"rollback": -1, "window": 4}, "rollback must be"),
        ({"dtype": torch.int32}, "dtype must be floating point"),
        ({"head_dim_v": 0}, "head_dim_v"),
    ],
)
def test_constructor_mistakes(keywords: Any, message: str) -> None:
    given = {"max_batch_size": 2, "max_sequence_length": 8, "num_heads_kv": 2, "head_dim_k": 8}
    with pytest.raises(te.Error, match=message):
        te.KVCache(**{**given, **keywords})


def test_inputs_that_do_not_fit() -> None:
    op = attention("contiguous")
    op.cache = cache_of("contiguous")
    with torch.no_grad():
        with pytest.raises(ShapeError, match="holds 2 sequences, got 3"):
            op(torch.randn(3, 4, 64, dtype=F64))
        with pytest.raises(ShapeError, match=r"make it with dtype=torch\.float32"):
            op(torch.randn(2, 4, 64))
        with pytest.raises(ShapeError, match=r"holds heads \(2, 8\)"):
            op(torch.randn(2, 4, 128, dtype=F64))


def test_the_op_by_itself() -> None:
    for kind, count in (("contiguous", 3), ("paged", 4), ("ring", 5)):
        cache = cache_of(kind)
        k, v = torch.randn(2, 3, 2, 8, dtype=F64), torch.randn(2, 3, 2, 8, dtype=F64)
        with torch.no_grad():
            outs = cache(k, v)
        assert len(outs) == count
        assert outs[2].tolist() == [3, 3]
        if kind == "contiguous":
            assert torch.equal(outs[0][:, :3], k)
            assert torch.equal(outs[1][:, :3], v)


def test_caches_in_plans_of_several_segments_and_inside_autocast() -> None:
    layers = [attention("contiguous"), attention("paged")]
    model = te.Sequential(layers[0], te.Linear(32, 64, dtype=F64), te.Cut(), layers[1])
    x = torch.randn(2, 12, 64, dtype=F64)
    want = model(x)
    layers[0].cache, layers[1].cache = cache_of("contiguous"), cache_of("paged")
    with te.autocast(enabled=False):
        got = pieces(model, x, [5, 1, 6])
    torch.testing.assert_close(got, want)
    with torch.no_grad():
        assert len(model.plan(x).segments) == 2
    for layer in layers:
        assert layer.cache is not None
        assert layer.cache.lengths.tolist() == [12, 12]
