"""The primitive against a float64 softmax over whole score matrices, forward and backward."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_ops.basic.attention import ATTENTION, ATTENTION_BACKWARD, Attention, attention
from te_ops.basic.band import Band
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Phase, Spec, Value
from te_ops.op import Op, Scalar
from te_ops.quantizers import Float8CurrentScalingQuantizer

from .attention_oracle import (
    BF16,
    CAUSAL,
    CAUSAL_BR,
    FULL,
    Core,
    Tensors,
    gradients,
    oracle,
    oracle_gradients,
    saved_of,
    tensors,
    values,
)
from .interp import program


def check(xs: Tensors, band: Band, scale: Any = None) -> None:
    """Outputs and gradients, those of the lse included, to FP64 accuracy."""
    o, lse, top = oracle(*xs, band, scale)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    outs, grads = gradients(Core(band, scale), xs, [do, dlse, None])
    for got, want in zip(outs, (o, lse, top), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for got, want in zip(grads, oracle_gradients(xs, band, do, dlse, scale), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


# -- against the definition


@pytest.mark.parametrize("s", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(17, 0), Band(0, 130)], ids=str)
def test_lengths_around_the_blocks(s: int, band: Band) -> None:
    check(tensors(2, (s, s), (4, 2), (8, 5), torch.float64), band)


@pytest.mark.parametrize(("left", "right"), [(0, 0), (1, 0), (2, 0), (0, 1), (69, 0), (70, 0)])
def test_windows(left: int, right: int) -> None:
    check(tensors(1, (70, 70), (2, 2), (4, 4), torch.float64), Band(left, right))


@pytest.mark.parametrize(
    "lengths", [(5, 3), (3, 5), (1, 5), (5, 1), (130, 67), (67, 130), (300, 20)]
)
@pytest.mark.parametrize("diagonal", ["top_left", "bottom_right"])
@pytest.mark.parametrize("sides", [(None, None), (None, 0), (2, 0), (2, 1), (0, None)])
def test_two_lengths(lengths: tuple[int, int], diagonal: Any, sides: Any) -> None:
    check(tensors(2, lengths, (2, 1), (4, 3), torch.float64), Band(*sides, diagonal))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (6, 3), (6, 2)])
def test_query_heads_share_key_heads_in_runs(heads: tuple[int, int]) -> None:
    q, k, v = tensors(2, (9, 9), heads, (8, 8), torch.float64)
    v = v + 100.0 * torch.arange(heads[1]).reshape(1, 1, -1, 1)  # h // g against h % h_kv
    check((q, k, v), CAUSAL)
    o = values(Core(), q, k, v)[0]
    read = (o.mean((0, 1, 3)) / 100.0).round().long()
    assert read.tolist() == [h // (heads[0] // heads[1]) for h in range(heads[0])]


def test_many_heads_in_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk over heads, and over the query heads of one key head, changes nothing."""
    xs = tensors(2, (40, 40), (6, 2), (8, 8), torch.float64)
    for tile in (1, 2000, 4000, 20000):
        monkeypatch.setattr("te_ops.basic.tiles.TILE", tile)
        check(xs, CAUSAL)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0, 1, None])
def test_scales(scale: Any) -> None:
    check(tensors(1, (20, 20), (2, 2), (8, 8), torch.float64), CAUSAL, scale)


def test_a_scalar_scale_changes_without_a_new_graph() -> None:
    xs = tensors(1, (20, 20), (2, 2), (8, 8), torch.float64)
    core = Core(CAUSAL, Scalar(0.5))
    made = program(core, *xs, given=[True, False, False])
    do = torch.randn(1, 20, 2, 8, dtype=torch.float64)
    for scale in (0.5, 2.0):
        core.scale.set(scale)
        o, _, _, *grads = made.run(*xs, dys=[do])
        torch.testing.assert_close(o, oracle(*xs, CAUSAL, scale)[0], rtol=1e-12, atol=1e-12)
        for got, want in zip(grads, oracle_gradients(xs, CAUSAL, do, None, scale), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("s_kv", [64, 192, 320])
def test_logits_that_are_all_far_below_zero(s_kv: int) -> None:
    q, k, v = tensors(1, (1, s_kv), (2, 2), (8, 8), torch.float64)
    q, k = torch.full_like(q, -15.0), torch.ones_like(k) + 0.01 * k
    check((q, k, v), CAUSAL_BR, 1.0)
    o, lse, _ = values(Core(CAUSAL_BR, 1.0), q.float(), k.float(), v.float())
    want = oracle(q.float(), k.float(), v.float(), CAUSAL_BR, 1.0)
    torch.testing.assert_close(o.double(), want[0], rtol=2e-4, atol=1e-5)
    assert float(lse.max()) < -100.0


# -- rounding


def ratio(got: torch.Tensor, want: torch.Tensor, rounded: torch.Tensor) -> tuple[float, float]:
    """Error of `got` over that of a correctly rounded result, the worst head: Frobenius and max."""
    per_head = (0, 1, 3)
    errors = [(x.double() - want).abs() for x in (got, rounded)]
    frobenius, largest = (
        [reduce(e) for e in errors]
        for reduce in (lambda e: e.square().sum(per_head).sqrt(), lambda e: e.amax(per_head))
    )
    return float((frobenius[0] / frobenius[1]).max()), float((largest[0] / largest[1]).max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("s", [33, 200])
def test_half_precision_errs_by_one_rounding(dtype: torch.dtype, s: int) -> None:
    xs = tensors(2, (s, s), (4, 2), (16, 16), dtype)
    o, _, _ = oracle(*xs, CAUSAL)
    do = torch.randn(o.shape).to(dtype)
    outs, grads = gradients(Core(), xs, [do, None, None])
    wants = (o, *oracle_gradients(xs, CAUSAL, do.double(), None))
    assert outs[0].dtype is dtype
    assert outs[1].dtype is torch.float32
    for got, want in zip((outs[0], *grads), wants, strict=True):
        assert got.dtype is dtype
        frobenius, largest = ratio(got, want, want.to(dtype))
        assert frobenius <= 2.0
        assert largest <= 4.0


def test_single_precision() -> None:
    xs = tensors(2, (150, 150), (4, 2), (16, 16), torch.float32)
    o, lse, _ = oracle(*xs, CAUSAL)
    do = torch.randn_like(o).float()
    outs, grads = gradients(Core(), xs, [do, None, None])
    bound = 64 * torch.finfo(torch.float32).eps  # sums of 150 terms of size 1
    for got, want in zip(outs[:2], (o, lse), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)
    for got, want in zip(grads, oracle_gradients(xs, CAUSAL, do, None), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=4 * bound, atol=4 * bound)


def test_twice_gives_the_same_bits() -> None:
    xs = tensors(2, (90, 90), (4, 2), (16, 16), torch.float32)
    do = torch.randn(2, 90, 4, 16)
    first, second = (gradients(Core(), xs, [do, None, None]) for _ in range(2))
    for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(a, b)


# -- empty rows, empty tensors


@pytest.mark.parametrize("op", [Core(CAUSAL_BR), Core(Band(0, 0))])
def test_rows_without_a_key_are_zero_with_finite_gradients(op: Core) -> None:
    xs = tensors(1, (5, 3), (2, 1), (4, 4), torch.float32)
    empty = slice(0, 2) if op.band is CAUSAL_BR else slice(3, 5)
    o, lse, _ = values(op, *xs)
    assert torch.equal(o[:, empty], torch.zeros(1, 2, 2, 4))
    assert torch.equal(lse[:, :, empty], torch.full((1, 2, 2), math.inf))
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    dlse[:, :, empty] = math.nan  # what log-space code makes of -inf
    _, grads = gradients(op, xs, [do, dlse, None])
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert torch.equal(grads[0][:, empty], torch.zeros(1, 2, 2, 4))


def test_keys_past_the_top_left_diagonal_get_no_gradient() -> None:
    xs = tensors(1, (3, 5), (2, 2), (4, 4), torch.float32)
    _, (_, dk, dv) = gradients(Core(), xs, [torch.ones(1, 3, 2, 4), None, None])
    assert torch.equal(dk[:, 3:], torch.zeros(1, 2, 2, 4))
    assert torch.equal(dv[:, 3:], torch.zeros(1, 2, 2, 4))
    assert bool((dv[:, :3] != 0).all())


@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)])
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(1, 0, "bottom_right")], ids=str)
def test_empty_tensors(sizes: tuple[int, int, int], band: Band) -> None:
    b, s_q, s_kv = sizes
    xs = tensors(b, (s_q, s_kv), (4, 2), (8, 8), torch.float32)
    do = torch.ones(b, s_q, 4, 8)
    (o, lse, top), grads = gradients(Core(band), xs, [do, torch.ones(b, 4, s_q), None])
    assert torch.equal(o, torch.zeros(b, s_q, 4, 8))
    assert torch.equal(lse, torch.full((b, 4, s_q), math.inf))
    assert torch.equal(top, torch.full((4,), -math.inf))
    assert all(torch.equal(dx, torch.zeros_like(x)) for dx, x in zip(grads, xs, strict=True))


# -- strides, layouts, aliases


def variants(xs: Tensors) -> dict[str, Tensors]:
    packed = torch.cat([x.flatten(2) for x in xs], -1)
    widths = [x.shape[2] * x.shape[3] for x in xs]
    slices = packed.split(widths, -1)
    return {
        "packed": tuple(s.unflatten(-1, x.shape[2:]) for s, x in zip(slices, xs, strict=True)),
        "bhsd": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in xs),
        "sbhd": tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in xs),
        "strided": tuple(torch.stack([x, x], -1)[..., 0] for x in xs),
    }


@pytest.mark.parametrize("name", ["packed", "bhsd", "sbhd", "strided"])
def test_strides_change_no_bit(name: str) -> None:
    xs = tensors(2, (30, 30), (4, 2), (8, 8), torch.float32)
    do = torch.randn(2, 30, 4, 8)
    want = gradients(Core(), xs, [do, None, None])
    got = gradients(
        Core(), variants(xs)[name], [do.transpose(1, 2).contiguous().transpose(1, 2), None, None]
    )
    for a, b in zip((*want[0], *want[1]), (*got[0], *got[1]), strict=True):
        assert torch.equal(a, b)
        assert b.dim() < 4 or b.is_contiguous()


def test_expanded_and_shared_inputs() -> None:
    x = torch.randn(1, 20, 1, 8, dtype=torch.float64)
    q = x.expand(3, 20, 2, 8)
    check(
        (q, x.expand(3, 20, 2, 8), torch.ones(1, dtype=torch.float64).expand(3, 20, 2, 8)), CAUSAL
    )
    do = torch.randn(3, 20, 2, 8, dtype=torch.float64)

    class Self(Core):
        """One value as q, k and v."""

        num_inputs = 1

        def emit(self, g: Graph, *xs: Value) -> tuple[Value, ...]:
            return super().emit(g, xs[0], xs[0], xs[0])

    _, (dx,) = gradients(Self(), (q,), [do, None, None])
    want = sum(oracle_gradients((q, q, q), CAUSAL, do, None))
    torch.testing.assert_close(dx, want, rtol=1e-11, atol=1e-11)


def test_sequence_first_layout() -> None:
    xs = tensors(2, (30, 40), (4, 2), (8, 6), torch.float32)
    do = torch.randn(2, 30, 4, 6)
    want = gradients(Core(CAUSAL_BR), xs, [do, None, None])
    turned = tuple(x.transpose(0, 1).contiguous() for x in xs)
    got = gradients(
        Core(CAUSAL_BR, layout="sbhd"), turned, [do.transpose(0, 1).contiguous(), None, None]
    )
    assert torch.equal(got[0][0], want[0][0].transpose(0, 1))
    assert torch.equal(got[0][1], want[0][1])  # the lse is [b, h, s] in both
    for a, b in zip(want[1], got[1], strict=True):
        assert torch.equal(a, b.transpose(0, 1))


def test_later_tokens_do_not_change_earlier_rows() -> None:
    q, k, v = tensors(1, (100, 100), (2, 2), (8, 8), torch.float32)
    o = values(Core(), q, k, v)[0]
    for x in (q, k, v):
        x[:, 80:] += 1.0
    again = values(Core(), q, k, v)[0]
    assert torch.equal(o[:, :64], again[:, :64])
    torch.testing.assert_close(o[:, :80], again[:, :80], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(o[:, 80:], again[:, 80:])


# -- memory


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        items = out if isinstance(out, tuple | list) else (out,)
        self.numel = max(self.numel, *(t.numel() for t in items if isinstance(t, torch.Tensor)), 0)
        return out


@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=str)
def test_memory_is_linear_in_the_length(band: Band) -> None:
    s = 4096
    xs = tensors(1, (s, s), (2, 1), (8, 8), torch.float32)
    made = program(Core(band), *xs, given=[True, False, False])
    with Largest() as seen:
        made.run(*xs, dys=[torch.ones(1, s, 2, 8)])
    assert seen.numel <= 1 << 20 < s * s
    # Forward values that the backward reads: no scores.
    assert {(name, index) for name, index, _ in made.saved} == {
        *(("input", 0),),
        ("attention", 0),
        ("attention", 1),
    }


def test_many_query_heads_of_one_key_head_are_walked_too() -> None:
    xs = tensors(1, (64, 4096), (32, 1), (8, 8), torch.float32)
    with Largest() as seen:
        values(Core(FULL), *xs)
    assert seen.numel <= 1 << 20 < 32 * 64 * 4096


def test_the_recorder_sees_a_square() -> None:
    with Largest() as seen:
        torch.ones(64, 1) @ torch.ones(1, 64)
    assert seen.numel == 64 * 64


def test_a_window_costs_its_width() -> None:
    s = 4096
    xs = tensors(1, (s, s), (1, 1), (8, 8), torch.float32)
    with Largest() as seen:
        values(Core(Band(100, 0)), *xs)
    assert seen.numel <= s * 8


# -- gradients that are not asked for


def test_gradients_of_the_lse_alone_and_of_the_output_alone() -> None:
    xs = tensors(2, (20, 20), (4, 2), (8, 8), torch.float64)
    do = torch.randn(2, 20, 4, 8, dtype=torch.float64)
    dlse = torch.randn(2, 4, 20, dtype=torch.float64)
    for dys, reads in (([do, None, None], {0, 1}), ([None, dlse, None], {1})):
        _, grads = gradients(Core(), xs, dys)
        saved = saved_of(Core(), xs, dys)
        assert {index for name, index, _ in saved if name == "attention"} == reads
        for got, want in zip(grads, oracle_gradients(xs, CAUSAL, *dys[:2]), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_what_nobody_reads_is_not_computed() -> None:
    q, k, v = tensors(1, (20, 20), (2, 2), (8, 8), torch.float32)
    shared: dict[str, Any] = {"layout": "bshd", "band": CAUSAL, "scale": 0.3}
    names: dict[str, Any] = {"operands": ("q", "k", "v"), **shared}
    o, lse, none = ATTENTION.reference(q, k, v, live=(True, True, False), **names)
    assert none is None
    names = {"operands": ("q", "k", "v", "o", "lse", "do"), **shared}
    full = ATTENTION_BACKWARD.reference(q, k, v, o, lse, o, **names)
    for live in product((True, False), repeat=3):
        got = ATTENTION_BACKWARD.reference(q, k, v, o, lse, o, live=live, **names)
        for wanted, a, b in zip(live, got, full, strict=True):
            assert torch.equal(a, b) if wanted else a is None


def test_max_logit_has_no_gradient() -> None:
    xs = tensors(1, (4, 4), (2, 2), (8, 8), torch.float32)
    with pytest.raises(PlanError, match="detach"):
        program(Core(), *xs, given=[False, False, True])


# -- operands and roles


def test_roles_are_those_of_the_operands() -> None:
    xs = tensors(1, (4, 4), (2, 2), (8, 8), torch.float32)
    made = program(Core(CAUSAL, Scalar(1.0)), *xs, given=[True, True, False])
    nodes = {node.prim.name: node for node in made.g.nodes}
    row = {name: (name, "row") for name in ("q", "k", "v", "do")}
    for name in ("attention", "attention_backward"):
        node = nodes[name]
        assert node.prim.roles is not None
        assert tuple(node.prim.roles(node)) == tuple(row.get(x) for x in node.operands)
    assert nodes["attention"].operands == ("q", "k", "v", "scale")
    assert nodes["attention_backward"].phase is Phase.DGRAD


def test_records_are_read_as_their_values() -> None:
    xs = tensors(1, (20, 20), (2, 2), (16, 16), BF16)
    quantizer = Float8CurrentScalingQuantizer()
    records = [quantizer.records(x, row=True, col=False)[0] for x in xs]
    attrs: dict[str, Any] = {"operands": ("q", "k", "v"), "layout": "bshd", "band": CAUSAL}
    o = ATTENTION.reference(*records, scale=0.25, **attrs)[0]
    want = oracle(*(r.dequantize(torch.float64) for r in records), CAUSAL, 0.25)[0]  # type: ignore[union-attr]
    assert o.dtype is BF16
    assert ratio(o, want, want.to(BF16))[0] <= 2.0


def infer(names: tuple[str, ...], specs: list[Spec], **attrs: Any) -> Any:
    g = Graph()
    values = [g.input(i, spec) for i, spec in enumerate(specs)]
    defaults: dict[str, Any] = {"layout": "bshd", "band": CAUSAL, "scale": 1.0}
    return g.calls(ATTENTION, *values, operands=names, **(defaults | attrs))


def test_operands_that_make_no_sense() -> None:
    spec = Spec((1, 4, 2, 8), torch.float32)
    with pytest.raises(PlanError, match="no operand 'w'"):
        infer(("q", "k", "v", "w"), [spec] * 4)
    with pytest.raises(PlanError, match="lack v"):
        infer(("q", "k"), [spec] * 2)
    with pytest.raises(PlanError, match="each of them once"):
        infer(("q", "k", "v"), [spec] * 4)
    with pytest.raises(PlanError, match="either a number or the operand"):
        infer(("q", "k", "v"), [spec] * 3, scale=None)
    with pytest.raises(PlanError, match="lack q_starts, q_lens"):
        infer(("q", "k", "v"), [spec] * 3, layout="thd")
    with pytest.raises(PlanError, match="layout must be one of"):
        infer(("q", "k", "v"), [spec] * 3, layout="bhsd")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 2, 8), (2, 4, 2, 8), (1, 4, 2, 8)), "batches 1, 2, 1"),
        (((1, 4, 2, 8), (1, 4, 2, 6), (1, 4, 2, 8)), "of k 6"),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 5, 2, 8)), "same length and heads"),
        (((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "3 query heads cannot share 2"),
        (((1, 4, 16), (1, 4, 2, 8), (1, 4, 2, 8)), "q must be bshd"),
        (((1, 4, 2, 0), (1, 4, 2, 0), (1, 4, 2, 8)), "none may be 0"),
    ],
)
def test_shapes_that_do_not_fit(shapes: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        values(Core(), *(torch.zeros(shape) for shape in shapes))


def test_dtypes_that_do_not_fit() -> None:
    q, k, v = tensors(1, (4, 4), (2, 2), (8, 8), torch.float32)
    with pytest.raises(ShapeError, match="one floating-point dtype"):
        values(Core(), q, k.bfloat16(), v)
    o = values(Core(), q, k.bfloat16(), v, autocast=BF16)[0]
    assert o.dtype is BF16


def test_bands_are_normalized_where_lengths_are_known() -> None:
    def band(op: Op, *xs: torch.Tensor) -> Band:
        made = program(op, *xs, given=[False] * 3)
        return next(n.band for n in made.g.nodes if n.prim is ATTENTION)

    q, k, v = tensors(1, (1, 6), (2, 2), (8, 8), torch.float32)
    # Lengths of plan inputs may change from call to call, so they decide nothing ...
    assert band(Core(CAUSAL_BR), q, k, v) == CAUSAL_BR
    assert band(Core(Band(9, 0)), q, k, v) == Band(9, 0)
    # ... but one input has one length.
    packed = Attention(2, attn_mask_type="causal_bottom_right", packed=True)
    made = program(packed, torch.zeros(1, 6, 48), given=[False])
    assert next(n.band for n in made.g.nodes if n.prim is ATTENTION) == CAUSAL
    g = Graph()
    fixed = [g.input(i, Spec(tuple(x.shape), x.dtype)) for i, x in enumerate((q, k, v))]
    o, _, _ = attention(g, *fixed, band=CAUSAL_BR)
    assert g.node(o).band == FULL
