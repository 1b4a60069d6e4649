"""Packed sequences and padding: gaps, empty sequences, left padding, and mistakes in them."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.basic.arguments import on_host
from te_ops.basic.sequences import MASK_RUNS, PackedSequences
from te_ops.basic.structure import add
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Value

from .attention_full_oracle import Meaning, dense_spans, oracle
from .attention_oracle import CAUSAL, CAUSAL_BR, FULL
from .interp import program

F64 = torch.float64


def thd_spans(starts: Any, lens: Any) -> list[Any]:
    return [((None, a, n), (None, a, n)) for a, n in zip(starts, lens, strict=True)]


def packed_inputs(tokens: int, gaps: torch.Tensor | None = None) -> list[torch.Tensor]:
    xs = [torch.randn(tokens, h, 8, dtype=F64) for h in (4, 2, 2)]
    if gaps is not None:
        for x in xs:
            x[gaps] = math.nan
    return [x.requires_grad_() for x in xs]


def check_packed(
    cu: list[int], padded: list[int] | None, mask: str, band: Any, tokens: int
) -> None:
    """Outputs and gradients of every row; gaps hold NaN and come out 0."""
    starts = (padded or cu)[:-1]
    lens = [b - a for a, b in pairwise(cu)]
    inside = torch.zeros(tokens, dtype=torch.bool)
    for a, n in zip(starts, lens, strict=True):
        inside[a : a + n] = True
    xs = packed_inputs(tokens, ~inside)
    sequences = te.PackedSequences(cu, cu_q_padded=padded)
    op = te.Attention(4, 2, qkv_format="thd", attn_mask_type=mask, return_lse=True)  # type: ignore[arg-type]
    o, lse = op(*xs, sequences)
    do = torch.randn(tokens, 4, 8, dtype=F64)
    do[~inside] = math.nan
    got = torch.autograd.grad(o, xs, do)

    exact = [x.detach().nan_to_num().requires_grad_() for x in xs]
    want, want_lse, _ = oracle(*exact, Meaning(spans=thd_spans(starts, lens), band=band))
    torch.testing.assert_close(o, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse.masked_fill(want_lse == math.inf, -math.inf))
    assert torch.equal(o[~inside], torch.zeros_like(o[~inside]))
    want = want + 0.0 * sum(x.sum() for x in exact)  # where no sequence is left
    wants = torch.autograd.grad(want, exact, do.nan_to_num())
    for a, b in zip(got, wants, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        assert torch.equal(a[~inside], torch.zeros_like(a[~inside]))


# -- packed tokens


@pytest.mark.parametrize(
    ("cu", "padded", "tokens"),
    [
        ([0, 5, 12], None, 12),
        ([0, 5, 12], [0, 8, 24], 24),
        ([0, 5, 12], [2, 8, 20], 24),  # gaps in front and behind, too
        ([0, 0, 7], None, 7),
        ([0, 7, 7], None, 9),
        ([0, 5, 5, 10], [0, 6, 6, 12], 12),
        ([0, 0, 0], None, 3),
        ([0, 0, 0], None, 0),
        ([0], None, 4),
        ([0, 70, 71, 200], None, 200),
    ],
)
@pytest.mark.parametrize(("mask", "band"), [("padding", FULL), ("padding_causal", CAUSAL)])
def test_packed(cu: list[int], padded: Any, tokens: int, mask: str, band: Any) -> None:
    check_packed(cu, padded, mask, band, tokens)


@pytest.mark.parametrize("mask", ["causal_bottom_right", "causal", "no_mask"])
@pytest.mark.parametrize("window", [None, (1, 0)])
def test_cross_packed_has_a_diagonal_of_its_own_in_each_sequence(mask: str, window: Any) -> None:
    cu_q, cu_kv = [0, 5, 8, 8, 9], [0, 3, 8, 12, 12]
    q = torch.randn(9, 4, 8, dtype=F64)
    k, v = (torch.randn(12, 2, 8, dtype=F64) for _ in range(2))
    xs = [x.requires_grad_() for x in (q, k, v)]
    op = te.Attention(
        4, 2, qkv_format="thd", attn_mask_type=mask, window_size=window, attention_type="cross",  # type: ignore[arg-type]
    )  # fmt: skip
    o = op(*xs, te.PackedSequences(cu_q, cu_kv))
    pairs = list(zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:], strict=False))
    spans = [((None, a, b - a), (None, c, d - c)) for a, b, c, d in pairs]
    exact = [x.detach().clone().requires_grad_() for x in xs]
    want, _, _ = oracle(*exact, Meaning(spans=spans, band=op.band))
    torch.testing.assert_close(o, want, rtol=1e-12, atol=1e-12)
    do = torch.randn_like(o)
    for a, b in zip(
        torch.autograd.grad(o, xs, do), torch.autograd.grad(want, exact, do), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_one_long_sequence_is_a_batch_of_one() -> None:
    q, k, v = (x.detach() for x in packed_inputs(100))
    packed = te.Attention(4, 2, qkv_format="thd")(q, k, v, te.PackedSequences([0, 100]))
    dense = te.Attention(4, 2)(q[None], k[None], v[None])
    assert torch.equal(packed, dense[0])


def test_layouts_of_packed_inputs_and_rope_agree_with_single_sequences() -> None:
    """[Q | K | V] of packed tokens through RoPE: each sequence as if it were alone."""
    packed = te.Attention(4, 2, packed=True, qkv_format="thd", rotary=te.RoPE(8, qkv_format="thd"))
    single = te.Attention(4, 2, packed=True, rotary=te.RoPE(8))
    x = torch.randn(30, 64, dtype=F64)
    x[7:10] = math.nan
    y = packed(x, te.PackedSequences([0, 7, 7, 27], cu_q_padded=[0, 10, 10, 30]))
    for a, b in ((0, 7), (10, 30)):
        torch.testing.assert_close(y[a:b], single(x[None, a:b])[0])
    assert torch.equal(y[7:10], torch.zeros(3, 32, dtype=F64))


def test_two_layers_share_the_table_of_rope_and_the_places() -> None:
    class Two(te.Op):
        """Two layers on one table."""

        num_inputs = 2

        def __init__(self) -> None:
            super().__init__()
            make = lambda: te.Attention(  # noqa: E731
                2, packed=True, qkv_format="thd", rotary=te.RoPE(8, qkv_format="thd")
            )
            self.a, self.b = make(), make()
            self.up = te.Linear(16, 48)

        def emit(self, g: Any, x: Any, sequences: Any) -> Any:
            return self.b.emit(g, self.up.emit(g, self.a.emit(g, x, sequences)), sequences)

    op, x = Two(), torch.randn(9, 48)
    plan = op.plan(x, te.PackedSequences([0, 4, 9]))
    names = [step["name"] for segment in plan.to_dict()["segments"] for step in segment["forward"]]
    for name in ("rope_packed_positions", "rope_table_at", "sequence_table"):
        assert names.count(name) == 1


def test_a_plan_serves_other_batches() -> None:
    op = te.Attention(4, 2, qkv_format="thd")
    one = (*(x.detach() for x in packed_inputs(65)), te.PackedSequences([0, 20, 65]))
    two = (*(x.detach() for x in packed_inputs(81)), te.PackedSequences([0, 40, 81]))
    assert op.plan(*one) is op.plan(*two)


def test_more_sequences_than_before_in_one_plan_class() -> None:
    op = te.Attention(4, 2, qkv_format="thd")
    for cu in ([0, 20, 33], [0, 3, 6, 9, 33], [0, 33]):
        xs = [x.detach() for x in packed_inputs(33)]
        lens = [b - a for a, b in pairwise(cu)]
        want, _, _ = oracle(*xs, Meaning(spans=thd_spans(cu[:-1], lens), band=CAUSAL))
        torch.testing.assert_close(op(*xs, te.PackedSequences(cu)), want)


# -- the value itself


def test_packed_sequences_are_a_value() -> None:
    made = te.PackedSequences(
        torch.tensor([0, 3, 3, 8], dtype=torch.int32), cu_q_padded=[0, 4, 4, 12], max_q=16
    )
    assert made.part("q_starts").tolist() == made.part("kv_starts").tolist() == [0, 4, 4]
    assert made.part("q_lens").tolist() == made.part("kv_lens").tolist() == [3, 0, 5]
    assert (made.count, made.max_q, made.max_kv) == (3, 16, 5)
    moved = made.to("cpu")
    assert isinstance(moved, PackedSequences)
    assert (moved.max_q, moved.max_kv) == (16, 5)
    assert "3 sequences" in repr(made)
    for twin in (copy.deepcopy(made), made.clone(), pickle.loads(pickle.dumps(made))):
        assert isinstance(twin, PackedSequences)
        assert (twin.tolist(), twin.max_q) == (made.tolist(), 16)
    assert type(made + 0) is torch.Tensor
    meta = te.PackedSequences([0, 3], device="meta")
    assert meta.device.type == "meta"
    assert meta.max_q == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 5, 3],), "cu_q falls from 5 to 3 at entry 2"),
        (([1, 5],), "must start at 0"),
        (([],), "int32 or int64"),
        (([0.0, 2.0],), "int32 or int64"),
        (([[0, 2]],), "sequences \\+ 1 entries"),
        (("ab",), "must be integers"),
        (([0, 5], [0, 5, 6]), "1 sequences of q, 2 of kv"),
        (([0, 5], None, [0, 4]), "sequence 0 of q has length 5, its place"),
        (([0, 5, 6], None, [0, 5]), "cu_q has 3 entries, cu_q_padded 2"),
        (([0, 5], None, None, [0, 5]), "needs cu_kv"),
        (([0, 5, 6], None, [0, 9, 6]), "cu_q_padded falls"),
    ],
)
def test_wrong_sequences(arguments: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        te.PackedSequences(*arguments)


def test_limits_that_are_too_small() -> None:
    assert te.PackedSequences([0, 5], max_q=500).max_q == 500
    with pytest.raises(ShapeError, match="max_kv is 4, a sequence has length 5"):
        te.PackedSequences([0, 5], max_kv=4)


def test_sequences_beyond_the_tokens() -> None:
    xs = [x.detach() for x in packed_inputs(6)]
    with pytest.raises(
        ShapeError, match="Attention: attention: sequence 1 of q starts at 3 with length 4"
    ):
        te.Attention(4, 2, qkv_format="thd")(*xs, te.PackedSequences([0, 3, 7]))


def test_other_tensors_are_not_sequences() -> None:
    xs = [x.detach() for x in packed_inputs(6)]
    op = te.Attention(4, 2, qkv_format="thd")
    with pytest.raises(ShapeError, match=r"must be a te\.PackedSequences"):
        op(*xs, torch.tensor([0, 3, 6]))
    with pytest.raises(ShapeError, match="takes 4 inputs, got 3"):
        op(*xs)
    with pytest.raises(ShapeError, match='attention_type="cross"'):
        op(*xs, te.PackedSequences([0, 3, 6], [0, 2, 6]))


# -- padding of dense batches


def padded_batch(side: str) -> tuple[list[torch.Tensor], torch.Tensor, list[int], list[int]]:
    lens = [3, 0, 6, 4]
    starts = [6 - n if side == "left" else 0 for n in lens]
    at = torch.arange(6)
    mask = (at < torch.tensor(starts)[:, None]) | (
        at >= torch.tensor(starts)[:, None] + torch.tensor(lens)[:, None]
    )
    xs = [torch.randn(4, 6, h, 8, dtype=F64) for h in (4, 2, 2)]
    for x in xs:
        x[mask] = math.nan
    return [x.requires_grad_() for x in xs], mask, starts, lens


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("mask_type", "band"),
    [("padding", FULL), ("padding_causal", CAUSAL), ("padding_causal_bottom_right", CAUSAL_BR)],
)
def test_padding_on_either_side(side: str, mask_type: Any, band: Any) -> None:
    xs, mask, starts, lens = padded_batch(side)
    o = te.Attention(4, 2, attn_mask_type=mask_type)(*xs, mask[:, None, None, :])
    exact = [x.detach().nan_to_num().requires_grad_() for x in xs]
    want, _, _ = oracle(
        *exact, Meaning(spans=dense_spans(4, (starts, lens), (starts, lens)), band=band)
    )
    torch.testing.assert_close(o, want, rtol=1e-12, atol=1e-12)
    do = torch.randn_like(o)
    do[mask] = math.nan
    wants = torch.autograd.grad(want, exact, do.nan_to_num())
    for a, b in zip(torch.autograd.grad(o, xs, do), wants, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        assert torch.equal(a[mask], torch.zeros_like(a[mask]))


def test_masks_and_lengths_say_the_same() -> None:
    xs, mask, _, lens = padded_batch("right")
    op = te.Attention(4, 2, attn_mask_type="padding_causal")
    want = op(*xs, mask)
    for padding in (torch.tensor(lens), torch.tensor(lens, dtype=torch.int32), mask[:, None, None]):
        assert torch.equal(op(*xs, padding), want)
    spelled = te.Attention(4, 2, attn_mask_type="padding,causal")  # type: ignore[arg-type]
    assert torch.equal(spelled(*xs, mask), want)


def test_left_padding_is_not_a_length() -> None:
    keep = torch.tensor(
        [
            [False, False, True, True, True],
            [True] * 5,
            [False] * 5,
            [True, True, False, False, False],
        ]
    )
    starts, lens = MASK_RUNS.reference(~keep, rows=5)
    assert (starts.tolist(), lens.tolist()) == ([2, 0, 0, 0], [3, 5, 0, 2])
    starts, lens = MASK_RUNS.reference(torch.zeros(3, 0, dtype=torch.bool), rows=0)
    assert (starts.tolist(), lens.tolist()) == ([0] * 3, [0] * 3)


def test_cross_padding_and_mistakes() -> None:
    q, k, v = torch.randn(2, 4, 2, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    q_lens, kv_lens = torch.tensor([4, 2]), torch.tensor([3, 7])
    op = te.Attention(2, attn_mask_type="padding", attention_type="cross")
    spans = dense_spans(2, ([0, 0], [4, 2]), ([0, 0], [3, 7]))
    want, _, _ = oracle(q.double(), k.double(), v.double(), Meaning(spans=spans))
    torch.testing.assert_close(op(q, k, v, q_lens, kv_lens).double(), want, rtol=1e-5, atol=1e-5)

    with pytest.raises(ShapeError, match=r"takes 5 inputs, got 4: q, k, v, q_padding, kv_padding$"):
        op(q, k, v, q_lens)
    own = te.Attention(2, attn_mask_type="padding")
    with pytest.raises(ShapeError, match="have lengths 4 and 7; attention_type='cross'"):
        own(q, k, v, q_lens)
    with pytest.raises(ShapeError, match="row 1 of the padding mask has holes"):
        own(q, q, q, torch.tensor([[True] * 4, [False, True, False, False]]))
    with pytest.raises(ShapeError, match="padding must be a bool mask"):
        own(q, q, q, torch.zeros(2, 4))
    with pytest.raises(ShapeError, match=r"must be \[b, s\] or \[b, 1, 1, s\]"):
        own(q, q, q, torch.zeros(2, 1, 4, 4, dtype=torch.bool))
    for wrong in (torch.tensor([4, 9]), torch.tensor([4, -1])):
        with pytest.raises(ShapeError, match="does not lie within the 4 rows"):
            own(q, q, q, wrong)
    with pytest.raises(ShapeError, match=r"entries for 2 sequences|one entry for each"):
        own(q, q, q, torch.tensor([4, 4, 4]))


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [4, 6])
def test_a_padding_mask_of_another_length(layout: str, packed: bool, size: int) -> None:
    """Shorter ones too: the positions that they say nothing of are not padding."""
    op = te.Attention(2, attn_mask_type="padding", qkv_format=layout, packed=packed)
    shape = (2, 5) if layout == "bshd" else (5, 2)
    xs = [torch.randn(*shape, 48)] if packed else [torch.randn(*shape, 2, 8) for _ in range(3)]
    fits = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    assert torch.equal(op(*xs, fits), op(*xs, fits[:, 0, 0]))
    for mask in (torch.zeros(2, size, dtype=torch.bool), torch.ones(2, 1, 1, size) < 0):
        with pytest.raises(ShapeError, match=r"mask of 5 positions must be \[b, 5\] or"):
            op(*xs, mask)


def test_each_side_of_cross_attention_has_masks_of_its_length() -> None:
    q, k = torch.randn(2, 5, 2, 8), torch.randn(2, 7, 2, 8)
    op = te.Attention(2, attn_mask_type="padding", attention_type="cross")
    short, long = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 7, dtype=torch.bool)
    op(q, k, k, short, long)
    with pytest.raises(ShapeError, match="of 7 positions"):
        op(q, k, k, short, short)
    with pytest.raises(ShapeError, match="of 5 positions"):
        op(q, k, k, long, long)


class Twice(te.Op):
    """Two attentions of one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = te.Attention(2, packed=True, attn_mask_type="padding")

    def emit(self, g: Graph, x: Value, mask: Value) -> Value:
        doubled = self.attention.emit(g, add(g, x, x), mask)
        return add(g, self.attention.emit(g, x, mask), doubled)


def test_attentions_of_one_mask_share_its_runs() -> None:
    x, mask = torch.randn(2, 6, 48), torch.zeros(2, 6, dtype=torch.bool)
    made = program(Twice(), x, mask, given=[True])
    assert [node.prim.name for node in made.g.nodes].count("mask_runs") == 1


def test_combinations_that_do_not_exist() -> None:
    for keywords in (
        {"attn_mask_type": "arbitrary"},
        {"core_attention_bias_type": "post_scale_bias"},
    ):
        with pytest.raises(PlanError, match="takes no mask and no bias tensor"):
            te.Attention(2, qkv_format="thd", **keywords)
    with pytest.raises(PlanError, match="packed=True is one input"):
        te.Attention(2, packed=True, attention_type="cross")
    with pytest.raises(PlanError, match="two of them as in"):
        te.Attention(2, qkv_format="thd_2bshd_2bshd")


def test_a_mask_that_grows_needs_no_new_plan_and_is_checked_again() -> None:
    op = te.Attention(2, attn_mask_type="arbitrary")
    made = []
    for s in (65, 81):
        q, mask = torch.randn(2, s, 2, 8), torch.rand(2, 1, s, s) < 0.3
        made.append(op.plan(q, q, q, mask))
        want, _, _ = oracle(
            *[q.double()] * 3,
            Meaning(spans=dense_spans(2, ([0, 0], [s, s]), ([0, 0], [s, s])), mask=mask),
        )
        torch.testing.assert_close(op(q, q, q, mask).double(), want, rtol=1e-5, atol=1e-5)
    assert made[0] is made[1]
    with pytest.raises(ShapeError, match=r"mask is torch.bool .* broadcast to"):
        op(q, q, q, torch.zeros(2, 1, 65, 65, dtype=torch.bool))
    with pytest.raises(ShapeError, match="True = masked out"):
        op(q, q, q, torch.zeros(2, 1, 81, 81))


def test_lengths_cannot_be_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice:
        """What a length on a device looks like to the reference."""

        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(PlanError, match="cannot be captured in a CUDA graph"):
        on_host(OnDevice())  # type: ignore[arg-type]
    assert on_host(torch.tensor([3, 4])) == [3, 4]


@pytest.mark.parametrize(
    "recipe", [None, te.recipe.Float8CurrentScaling(), te.recipe.MXFP8BlockScaling()]
)
def test_packed_tokens_flow_through_a_pipeline(recipe: te.Recipe | None) -> None:
    """The sequences are a further input of the pipeline, one for each layer that asks."""
    torch.manual_seed(0)

    def block() -> te.Residual:
        return te.Residual(
            te.RMSNorm(32),
            te.Linear(32, 64, bias=False),
            te.Attention(4, 2, packed=True, qkv_format="thd", rotary=te.RoPE(8, qkv_format="thd")),
            te.Linear(32, 32, bias=False),
        )

    model = te.Sequential(block(), block())
    x = torch.randn(64, 32, requires_grad=True)
    sequences = te.PackedSequences([0, 20, 20, 50], cu_q_padded=[0, 32, 32, 64])
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, sequences, sequences)
    y.square().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    again = model(x, sequences, sequences)
    assert float((y - again).detach().norm() / (again - x).detach().norm()) < 0.2
    for start, n in ((0, 20), (32, 30)):
        part = te.PackedSequences([0, n])
        alone = model(x[start : start + n], part, part)
        torch.testing.assert_close(again[start : start + n], alone, rtol=1e-4, atol=1e-5)
