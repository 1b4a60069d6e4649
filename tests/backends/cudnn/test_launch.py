"""Launches over a stand-in for the library against the reference: masks, lengths, layouts, extras, both directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_ops.backends.cudnn import launch
from te_ops.backends.reference.kernels import bind_reference
from te_ops.basic.band import Band
from te_ops.basic.sequences import PackedSequences, _parts
from te_ops.testing import assert_close
from tests.backends.cudnn.calls import both, call_of, run
from tests.backends.cudnn.fake import FakeCudnn

BF16 = torch.bfloat16
Made = tuple[dict[str, torch.Tensor], dict[str, Any]]
GEN = torch.Generator()


def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=GEN) * scale).to(BF16)


def qkv(
    *,
    b: int = 2,
    s: int = 24,
    s_kv: int | None = None,
    h: int = 4,
    hk: int = 2,
    d: int = 16,
    dv: int = 0,
) -> dict[str, torch.Tensor]:
    keys = s if s_kv is None else s_kv
    return {"q": rand(b, s, h, d), "k": rand(b, keys, hk, d), "v": rand(b, keys, hk, dv or d)}


def causal() -> Made:
    return qkv(), {"band": Band(right=0)}


def full() -> Made:
    return qkv(s_kv=40, dv=8), {}


def window() -> Made:
    return qkv(), {"band": Band(3, 2)}


def bottom_right() -> Made:
    return qkv(s=9, s_kv=24), {"band": Band(5, 0, "bottom_right")}


def sequence_first() -> Made:
    xs = {name: x.transpose(0, 1).contiguous() for name, x in qkv().items()}
    return xs, {"band": Band(right=0), "layout": "sbhd", "kv_layout": "sbhd"}


def packed() -> Made:
    whole = rand(2, 24, 8, 16)
    q, k, v = whole.split([4, 2, 2], 2)
    return {"q": q, "k": k, "v": v}, {"band": Band(right=0)}


def odd_strides() -> Made:
    wide = rand(2, 24, 4, 20)
    return {**qkv(), "q": wide[..., :16], "k": rand(2, 24, 2, 32)[..., ::2]}, {}


def bias() -> Made:
    return {**qkv(), "bias": rand(1, 4, 24, 24)}, {"band": Band(right=0)}


def one_query() -> Made:
    return qkv(s=1, s_kv=40), {}


def mask() -> Made:
    hidden = torch.rand(2, 1, 72, 24, generator=GEN) < 0.5
    hidden[0, 0, 3] = True  # a row without keys
    return {**qkv(s=72, s_kv=24), "mask": hidden}, {}


def padding_mask_with_holes() -> Made:
    return {**qkv(s=72, s_kv=24), "mask": torch.rand(2, 1, 1, 24, generator=GEN) < 0.3}, {}


def sink() -> Made:
    return {**qkv(), "sink": torch.linspace(-2, 20, 4)}, {"band": Band(right=0)}


def right_padding() -> Made:
    xs = qkv(b=4)
    lens = torch.tensor([24, 0, 7, 1], dtype=torch.int32)
    for e, n in enumerate(lens.tolist()):
        for x in xs.values():
            x[e, n:] = math.nan
    return {**xs, "q_lens": lens, "kv_lens": lens.clone()}, {"band": Band(right=0)}


def cross_padding() -> Made:
    xs = qkv(b=4, s=9, s_kv=24)
    lens = {"q_lens": torch.tensor([9, 4, 9, 0]), "kv_lens": torch.tensor([3, 20, 0, 5])}
    return {**xs, **lens}, {"band": Band(4, 0, "bottom_right")}


def left_padding() -> Made:
    xs = qkv(b=3)
    starts, lens = torch.tensor([5, 0, 23]), torch.tensor([19, 24, 1])
    for e, n in enumerate(starts.tolist()):
        for x in xs.values():
            x[e, :n] = math.nan
    places = {
        "q_starts": starts,
        "q_lens": lens,
        "kv_starts": starts.clone(),
        "kv_lens": lens.clone(),
    }
    return {**xs, **places}, {"band": Band(right=0)}


def thd(band: Band, cu: list[int], padded: list[int], cu_kv: list[int] | None = None) -> Made:
    table = PackedSequences(cu, cu_kv, cu_q_padded=padded)
    names = ("q_starts", "q_lens", "kv_starts", "kv_lens")
    places = {name: table.part(name).clone() for name in names}
    keys = padded[-1] if cu_kv is None else cu_kv[-1]
    xs = {"q": rand(padded[-1], 4, 16), "k": rand(keys, 2, 16), "v": rand(keys, 2, 16)}
    for name, x in xs.items():
        side = "q" if name == "q" else "kv"
        used = torch.zeros(x.shape[0], dtype=torch.bool)
        for start, length in zip(
            *(places[f"{side}_{w}"].tolist() for w in ("starts", "lens")), strict=True
        ):
            used[start : start + length] = True
        x[~used] = math.nan
    return {**xs, **places}, {"band": band, "layout": "thd", "kv_layout": "thd"}


def tokens() -> Made:
    return thd(Band(right=0), [0, 5, 5, 17, 30], [0, 8, 8, 24, 40])


def tokens_full() -> Made:
    return thd(Band(), [0, 0, 9, 17, 17], [0, 0, 9, 17, 17])


def tokens_bottom_right() -> Made:
    return thd(Band(6, 0, "bottom_right"), [0, 5, 12, 15], [0, 5, 12, 15], [0, 3, 14, 14])


def tokens_to_batch() -> Made:
    xs, attrs = thd(Band(), [0, 5, 9], [0, 5, 9])
    del xs["kv_starts"]
    xs |= {"k": rand(2, 12, 2, 16), "v": rand(2, 12, 2, 16), "kv_lens": torch.tensor([12, 4])}
    return xs, {**attrs, "kv_layout": "bshd"}


def pages() -> Made:
    """A pool with NaN where nothing was written, a page that two sequences share, one sequence without keys."""
    pool = {name: rand(9, 8, 2, 16) for name in ("k", "v")}
    table = torch.tensor([[3, 1, 7], [3, 2, 0], [5, 5, 5]], dtype=torch.int32)
    lens = torch.tensor([17, 11, 0])
    used = torch.zeros(9, 8, dtype=torch.bool)
    for e, n in enumerate(lens.tolist()):
        for j in range(n):
            used[table[e, j // 8], j % 8] = True
    for x in pool.values():
        x[~used] = math.nan
    table[2] = -1  # of no page
    more = {"page_table": table, "kv_lens": lens, "q_lens": torch.tensor([4, 3, 0])}
    band = Band(right=0, diagonal="bottom_right")
    return {"q": rand(3, 4, 4, 16), **pool, **more}, {"kv_layout": "paged", "band": band}


def pages_of_a_ring() -> Made:
    xs, attrs = pages()
    xs |= {"kv_starts": torch.tensor([2, 0, 0]), "kv_lens": torch.tensor([15, 11, 0])}
    return xs, attrs


@pytest.mark.parametrize("case", [pages, pages_of_a_ring])
def test_pages(cudnn: FakeCudnn, case: Callable[[], Made]) -> None:
    GEN.manual_seed(0)
    xs, attrs = case()
    call = call_of(xs, writes=(0, 1), scale=0.25, **attrs)
    for got, wanted in zip(
        run(call, launch.bind(call), xs), run(call, bind_reference(call), xs), strict=True
    ):
        assert_close(got.float(), wanted.float(), rtol=0.05, atol=0.02)
    assert len(cudnn.calls) == 1


CASES: tuple[Callable[[], Made], ...] = (
    causal, full, window, bottom_right, sequence_first, packed, odd_strides, bias, one_query, mask,
    padding_mask_with_holes, sink, right_padding, cross_padding, left_padding, tokens, tokens_full,
    tokens_bottom_right, tokens_to_batch,
)  # fmt: skip


def agree(xs: dict[str, torch.Tensor], attrs: dict[str, Any], *, peak: bool = False) -> None:
    attrs = {"scale": 0.25, **attrs}
    q = xs["q"]
    do = rand(*q.shape[:-1], xs["v"].shape[-1])
    got = both((launch.bind, launch.bind), xs, do, peak=peak, **attrs)
    wanted = both((bind_reference, bind_reference), xs, do, peak=peak, **attrs)
    assert set(got) == set(wanted)
    for name, x in wanted.items():
        assert_close(got[name].float(), x.float(), rtol=0.05, atol=0.02, name=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_like_the_reference(cudnn: FakeCudnn, case: Callable[[], Made]) -> None:
    GEN.manual_seed(0)
    agree(*case())
    assert len(cudnn.calls) == 2, "the library did not run both directions"


@pytest.mark.parametrize("case", [causal, right_padding, tokens_bottom_right, sink])
def test_largest_scores(cudnn: FakeCudnn, case: Callable[[], Made]) -> None:
    GEN.manual_seed(0)
    agree(*case(), peak=True)
    assert len(cudnn.calls) == 2


def test_further_dense_shapes_share_plans(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STATIC", 2)
    GEN.manual_seed(0)
    xs, attrs = causal()
    call = call_of(xs, writes=(0, 1), scale=0.25, **attrs)
    launched, wanted = launch.bind(call), bind_reference(call)
    for s in (16, 24, 130, 135, 200, 140):
        xs = qkv(s=s)
        for got, x in zip(run(call, launched, xs), run(call, wanted, xs), strict=True):
            assert_close(got.float(), x.float(), rtol=0.05, atol=0.02)
    assert len(cudnn.graphs) == 3, "130 to 200 rows are one size class"


@pytest.mark.parametrize("shared", [False, True], ids=["packed tokens", "size class"])
def test_gradients_with_offsets_read_contiguous_operands(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Of q among packed heads the library put dq where that of another sequence belongs (seen on an H200)."""
    GEN.manual_seed(0)
    if shared:
        monkeypatch.setattr(launch, "STATIC", 0)
        xs, attrs = packed()
    else:
        xs, attrs = thd(Band(right=0), [0, 9, 17, 24], [0, 9, 17, 24])
        together = rand(24, 8, 16)
        xs |= dict(zip("qkv", together.split([4, 2, 2], 1), strict=True))
        starts, lens, *_ = _parts(PackedSequences([0, 9, 17, 24]))  # known: nothing is cleaned
        xs |= {"q_starts": starts, "q_lens": lens, "kv_starts": starts, "kv_lens": lens}
    agree(xs, attrs)
    ((_, given, made),) = [g.node for g in cudnn.graphs if g.node and g.node[0] == "backward"]
    read = {name: given[name].facts["stride"][2] for name in ("q", "k", "v", "o", "dO")}
    assert read == {"q": 64, "k": 32, "v": 32, "o": 64, "dO": 64}
    assert [x.facts["stride"][2] for x in made] == [64, 32, 32]


def test_shared_plans_backward(cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STATIC", 0)
    GEN.manual_seed(0)
    agree(*causal())
    agree(*packed())
    assert all(graph.node[1]["use_padding_mask"] for graph in cudnn.graphs if graph.node)
