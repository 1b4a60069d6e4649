"""Launches of attention kernels, which a stand-in runs on the CPU: against the reference, forward and backward."""

from __future__ import annotations

import array
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import math as tm
from te_ops.backends.flash import gates, launch, limits
from te_ops.backends.flash.problem import problem_of, spec_of
from te_ops.backends.reference.kernels import bind_reference
from te_ops.basic.band import Band
from te_ops.basic.score import Score, soft_cap
from te_ops.basic.sequences import PackedSequences
from te_ops.pointwise import elementwise
from te_ops.registry import REGISTRY, Call, Kernel
from te_ops.runtime import tape
from te_ops.testing import assert_close
from tests.backends.cudnn.calls import both, call_of, quantized
from tests.backends.flash import standin

CAUSAL, ENDING = Band(right=0), Band(right=0, diagonal="bottom_right")
PLACES = Score(
    elementwise(
        "places", lambda s, i, j, h, b: s * (h + 1.0) - 0.125 * tm.abs(i - j) + b, *["value"] * 5
    ),
    ("s", "i", "j", "head", "batch"),
)
CAPTURING = Score(
    elementwise("capturing", lambda s, c, i, d: s * c + d * i, *["value"] * 4),
    ("s", "captured_c", "i", "captured_d"),
)


def bind(call: Call) -> Any:
    """The launch of a call that is not refused, by the stand-in."""
    problem = problem_of(call)
    assert gates.refuse(problem) is None
    return launch.bind(call, standin.kernel(spec_of(problem), problem.form.score))


def tensors(
    shape: tuple[int, ...], heads: tuple[int, int] = (4, 2), d: int = 32, dv: int = 32
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """q, k and v of shape + heads + features, and a gradient of o."""
    torch.manual_seed(0)

    def made(h: int, d: int) -> torch.Tensor:
        return torch.randn(*shape, h, d).bfloat16()

    xs = {"q": made(heads[0], d), "k": made(heads[1], d), "v": made(heads[1], dv)}
    return xs, made(heads[0], dv)


def compare(operands: dict[str, Any], do: torch.Tensor, **attrs: Any) -> None:
    """The launch against the reference, both directions."""
    attrs = {"scale": 0.25, **attrs}
    standin.CALLS.clear()
    got = both((bind, bind), operands, do, **attrs)
    assert [spec.backward for spec in standin.CALLS] == [False, True]
    wanted = both((bind_reference, bind_reference), operands, do, **attrs)
    assert set(got) == set(wanted)
    for name, x in wanted.items():
        assert got[name].shape == x.shape
        assert got[name].dtype == x.dtype
        assert_close(got[name], x, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize(
    "band",
    [Band(), CAUSAL, Band(5, 0), Band(3, 2), Band(left=4), Band(6, 0, "bottom_right")],
    ids=str,
)
def test_masks_and_layouts(layout: str, band: Band) -> None:
    xs, do = tensors((2, 24) if layout == "bshd" else (24, 2))
    compare(xs, do, band=band, layout=layout, kv_layout=layout)


@pytest.mark.parametrize("score", [soft_cap(2.0), PLACES], ids=["cap", "places"])
@pytest.mark.parametrize("band", [Band(), CAUSAL, Band(5, 1)], ids=str)
def test_scores(score: Score, band: Band) -> None:
    xs, do = tensors((2, 24))
    compare(xs, do, score=score, band=band)


@pytest.mark.parametrize("captured", [torch.tensor(0.5), torch.tensor([0.5, 1.0, -2.0, 0.0])])
def test_a_score_that_captures_values(captured: torch.Tensor) -> None:
    xs, do = tensors((2, 24))
    more = {"captured_c": captured, "captured_d": torch.tensor(0.25)}
    attrs: dict[str, Any] = {"score": CAPTURING, "band": CAUSAL, "scale": 0.25}
    forward = call_of({**xs, **more}, writes=(0, 1), **attrs)
    o, lse = bind(forward)(*xs.values(), *more.values())
    wanted = bind_reference(forward)(*xs.values(), *more.values())
    given = {**xs, **more, "o": wanted[0], "lse": wanted[1], "do": do}
    back = call_of(given, writes=(0, 1, 2), backward=True, **attrs)
    grads, expected = bind(back)(*given.values()), bind_reference(back)(*given.values())
    for x, y in zip((o, lse, *grads), (*wanted, *expected), strict=True):
        assert_close(x, y, rtol=0.02, atol=0.02)


def test_rows_without_a_key() -> None:
    xs, do = tensors((2, 24))
    short, _ = tensors((2, 8))
    compare({**xs, "k": short["k"], "v": short["v"]}, do, band=ENDING)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_sink_is_added(kind: torch.dtype) -> None:
    xs, _ = tensors((2, 24))
    sink = torch.tensor([0.0, 2.0, -3.0, 200.0], dtype=kind)
    call = call_of({**xs, "sink": sink}, writes=(0, 1), scale=0.25, band=Band(5, 0))
    for x, y in zip(
        bind(call)(*xs.values(), sink), bind_reference(call)(*xs.values(), sink), strict=True
    ):
        assert_close(x, y, rtol=0.02, atol=0.02)


def test_other_features_of_v() -> None:
    xs, do = tensors((2, 24), heads=(2, 2), d=96, dv=64)
    compare(xs, do, band=CAUSAL)


def _packed(
    lens: list[int], padded: list[int] | None = None
) -> tuple[dict[str, Any], torch.Tensor]:
    cu = [sum(lens[:i]) for i in range(len(lens) + 1)]
    packed = PackedSequences(cu, cu_q_padded=padded)
    rows = (padded or cu)[-1]
    xs, do = tensors((rows,))
    parts = {name: packed.part(f"q_{name}") for name in ("starts", "lens")}
    return {**xs, **{f"{s}_{name}": x for s in ("q", "kv") for name, x in parts.items()}}, do


@pytest.mark.parametrize("band", [Band(), ENDING, Band(5, 0, "bottom_right")], ids=str)
@pytest.mark.parametrize("score", [None, PLACES], ids=["plain", "places"])
def test_sequences(band: Band, score: Score | None) -> None:
    xs, do = _packed([7, 0, 20, 1])
    compare(xs, do, layout="thd", kv_layout="thd", band=band, score=score)


def _lengths(**given: list[int]) -> dict[str, Any]:
    return {name: torch.tensor(values) for name, values in given.items()}


@pytest.mark.parametrize(
    ("more", "band"),
    [
        (_lengths(kv_lens=[24, 0, 7]), ENDING),  # a cache
        (_lengths(q_lens=[24, 3, 7], kv_lens=[24, 3, 7]), Band(5, 0, "bottom_right")),
        (_lengths(q_starts=[0, 20, 3], q_lens=[24, 4, 7], kv_starts=[0, 20, 3], kv_lens=[24, 4, 7]), ENDING),
        (_lengths(q_lens=[24, 3, 7], kv_lens=[20, 0, 24]), Band()),
    ],
    ids=["keys", "right", "left", "cross"],
)  # fmt: skip
@pytest.mark.parametrize("score", [None, PLACES], ids=["plain", "places"])
def test_batches_with_lengths(more: dict[str, Any], band: Band, score: Score | None) -> None:
    xs, do = tensors((3, 24))
    for x in (xs["k"], xs["v"]):
        for e, (start, length) in enumerate(_sides("kv", more)):
            x[e, :start] = torch.nan
            x[e, start + length :] = torch.nan
    compare({**xs, **more}, do, band=band, score=score)
    whole = torch.randn(3, 24, 8, 32).bfloat16()
    parts = {"q": whole[:, :, :4], "k": whole[:, :, 4:6], "v": whole[:, :, 6:]}
    compare({**parts, **more}, do, band=band, score=score)
    apart = {name: torch.cat([x, x], 1)[:, :24] for name, x in parts.items()}
    compare({**apart, **more}, do, band=band, score=score)


def _sides(side: str, more: dict[str, Any]) -> list[tuple[int, int]]:
    lens = more[f"{side}_lens"]
    starts = more.get(f"{side}_starts", torch.zeros_like(lens))
    return list(zip(starts.tolist(), lens.tolist(), strict=True))


def test_rows_of_no_sequence_are_not_read_and_are_zero() -> None:
    xs, do = _packed([7, 0, 20], [0, 10, 10, 36])
    for name in ("q", "k", "v"):
        xs[name][7:10] = torch.nan
        xs[name][30:] = torch.nan
    do[7:10] = torch.nan
    compare(xs, do, layout="thd", kv_layout="thd", band=ENDING)


def test_a_gradient_reads_records_decoded() -> None:
    xs, do = tensors((2, 24))
    call = call_of(xs, writes=(0, 1), scale=0.25, band=CAUSAL)
    o, lse = bind_reference(call)(*xs.values())
    given = {**quantized(xs), "o": o, "lse": lse, "do": do}
    back = call_of(given, writes=(0, 1, 2), backward=True, scale=0.25, band=CAUSAL)
    standin.CALLS.clear()
    got = bind(back)(*given.values())
    assert len(standin.CALLS) == 1
    for x, y in zip(got, bind_reference(back)(*given.values()), strict=True):
        assert_close(x, y, rtol=0.02, atol=0.02)


def test_tensors_that_lie_otherwise() -> None:
    whole = torch.randn(2, 24, 8 * 32 + 8).bfloat16()[..., 8:].unflatten(-1, (8, 32))
    xs = {"q": whole[:, :, :4], "k": whole[:, :, 4:6], "v": whole[:, :, 6:]}
    do = torch.randn(2, 24, 1, 1).bfloat16().expand(2, 24, 4, 32)
    compare(xs, do, band=CAUSAL)
    odd = {
        name: torch.randn(2, 24, h, 33).bfloat16()[..., 1:]
        for name, h in (("q", 4), ("k", 2), ("v", 2))
    }
    compare(odd, do, band=CAUSAL)


def test_copies_what_is_read_wrongly_only() -> None:
    x = torch.randn(2, 24, 4, 32).bfloat16()
    turned = torch.randn(2, 24, 32, 1).bfloat16().transpose(2, 3)
    assert turned.is_contiguous()
    fits = launch._fits
    assert fits(x)
    assert fits(x[:1, :, :1])
    assert fits(x[:, ::2])
    for wrong in (x[..., ::2], x[:, :1].expand(2, 24, 4, 32), turned):
        assert not fits(wrong)


@pytest.mark.parametrize("block", [48, 64, 80, 96, 128])
@pytest.mark.parametrize("lens", [[1], [128] * 3, [127, 1, 0, 129], [5] * 40])
def test_every_block_of_every_sequence_has_its_place(block: int, lens: list[int]) -> None:
    """Whatever the blocks of a kernel are: a sequence begins on the block behind its own number of them."""
    ends = []
    for i, length in enumerate(lens):
        first = (sum(lens[:i]) + i * block) // block * block
        ends.append(first + -(-length // block) * block)
    assert max(ends) <= limits.padded(sum(lens), len(lens))
    assert -(-lens[0] // block) * block <= limits.padded(lens[0])
    assert limits.padded(sum(lens), len(lens)) % limits.TILE == 0


def test_a_recorded_launch_is_issued_again_on_other_memory() -> None:
    xs, _ = tensors((2, 24))
    call = call_of(xs, writes=(0, 1), scale=0.25, band=Band(5, 0))
    made = bind(call)
    with tape.recording() as found:
        o, lse = made(*xs.values())
    (issued,) = found.issued
    assert found.reason is None
    assert issued.words[:5] == tuple(x.data_ptr() for x in (*xs.values(), o, lse))
    again = [torch.empty_like(o), torch.empty_like(lse)]
    words = array.array("q", [*issued.words[:3], *(x.data_ptr() for x in again)])
    issued.issue.prepare(memoryview(words), 0)(0)
    assert torch.equal(again[0], o)
    assert torch.equal(again[1], lse)


def test_an_address_that_is_not_aligned() -> None:
    xs, do = tensors((2, 24))
    moved = {name: _moved(x) for name, x in xs.items()}
    assert all(x.data_ptr() % 16 for x in moved.values())
    compare(moved, do, band=CAUSAL)


def _moved(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def test_other_sizes_of_a_plan_run_too() -> None:
    xs, _ = tensors((2, 24))
    call = call_of(xs, writes=(0, 1), scale=0.25, band=CAUSAL)
    made = bind(call)
    for shape in ((1, 40), (3, 0), (0, 24)):
        other, _ = tensors(shape)
        standin.CALLS.clear()
        o, lse = made(*other.values())
        assert len(standin.CALLS) == (0 not in shape)
        wanted, statistics = bind_reference(call)(*other.values())
        assert_close(o, wanted, rtol=0.02, atol=0.02)
        assert_close(lse, statistics, rtol=0.02, atol=0.02)
    keys, _ = tensors((2, 30))  # a top-left diagonal, which the kernel has not
    standin.CALLS.clear()
    o, _ = made(xs["q"], keys["k"], keys["v"])
    assert not standin.CALLS
    assert_close(o, bind_reference(call)(xs["q"], keys["k"], keys["v"])[0], rtol=0.02, atol=0.02)


def test_deterministic_algorithms_leave_the_gradient_to_the_reference() -> None:
    xs, do = tensors((2, 24))
    torch.use_deterministic_algorithms(True)
    try:
        given = {**xs, "o": do, "lse": torch.zeros(2, 4, 24), "do": do}
        problem = problem_of(call_of(given, writes=(0, 1, 2), backward=True, scale=1.0))
        assert "order" in (gates.refuse(problem) or "")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def registered() -> Iterator[None]:
    """The kernels, on the CPU and by the stand-in."""

    def refuse(call: Call) -> str | None:
        return gates.refuse(problem_of(call))

    made = [
        Kernel(runs=runs, name=f"flash.{runs}", bind=bind, priority=50, refuse=refuse)
        for runs in ("attention", "attention_backward")
    ]
    with REGISTRY.temporary(*made):
        yield


@pytest.mark.parametrize("kind", ["causal", "padding_causal"])
@pytest.mark.parametrize("window", [(-1, 0), (5, 0), (2**31, 0)])
@pytest.mark.usefixtures("registered")
def test_packed_self_attention(kind: Any, window: tuple[int, int]) -> None:
    """The keys of self-attention are known to have the sequences of the queries, so any diagonal is the last one."""
    xs, do = tensors((28,))
    packed = PackedSequences([0, 7, 7, 27, 28])
    found = {}
    for name in ("kernel", "reference"):
        op = te.Attention(4, 2, attn_mask_type=kind, window_size=window, qkv_format="thd")
        leaves = [x.clone().requires_grad_() for x in xs.values()]
        standin.CALLS.clear()
        hidden = ("flash.",) if name == "reference" else ()
        with REGISTRY.without(*hidden) if hidden else contextlib.nullcontext():
            o = op(*leaves, packed)
            o.backward(do)
        assert len(standin.CALLS) == (2 if name == "kernel" else 0)
        found[name] = (o, *[x.grad for x in leaves])
    for got, wanted in zip(found["kernel"], found["reference"], strict=True):
        assert_close(got, wanted, rtol=0.02, atol=0.02)
