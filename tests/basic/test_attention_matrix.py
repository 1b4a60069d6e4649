"""The conformance matrix: mask x layout x heads x window x bias x sink x dropout x dtype x ..., forward and
backward, through real plans, against float64.

The full product has millions of cells; tested is a pairwise covering array of it (every pair of two
options that may be combined occurs), and `test_the_array_covers_every_pair` says so.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.basic.attention import Attention, band_of
from te_ops.basic.attention_masks import is_bottom_right
from te_ops.basic.sequences import PackedSequences, alibi_slopes
from te_ops.quantizers.philox import philox_uniform

from .attention_full_oracle import Meaning, dense_spans, oracle
from .covering import covering, pairs_of

B = 2
FACTORS: dict[str, list[Any]] = {
    "mask": [
        "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal",
        "padding_causal_bottom_right", "arbitrary",
    ],
    "bias": ["no_bias", "pre 11ss", "post bhss", "post 1hss", "post b1ss", "post 111s", "alibi"],
    "layout": ["bshd", "sbhd", "thd", "sbhd_2bshd", "thd_2bshd"],
    "lengths": ["self", "more queries", "more keys"],
    "padding": ["right", "left", "lengths"],
    "window": [None, (2, 0), (1, 1), (0, 0)],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "d": [(8, 8), (6, 4)],
    "softmax": ["vanilla", "off-by-one", "learnable"],
    "score": [None, "cap", "modifier"],
    "dropout": [0.0, 0.3, 0.95],
    "dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
}  # fmt: skip


@te.pointwise
def bent(s, i, j, head, batch, a: float, b: float):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """A modifier that reads everything: its place, a vector with a number a head and a number."""
    return te.math.tanh(s * a) * (1.0 + 0.1 * head - 0.05 * batch) + b * te.math.sin(
        0.3 * i - 0.2 * j
    )


def allowed(row: dict[str, Any]) -> bool:
    """Whether the options can be combined (also of a part of a row)."""
    mask, layout, bias = (row.get(name, "") for name in ("mask", "layout", "bias"))
    if "thd" in layout and (mask == "arbitrary" or bias[:3] in ("pre", "pos")):
        return False
    if "causal" in mask and row.get("window") == (1, 1):
        return False
    uses_padding = mask.startswith("padding") and "thd" not in layout
    return (
        uses_padding or not row.get("padding") or row["padding"] == "right" or not (mask and layout)
    )


CASES = covering(FACTORS, allowed)


def test_the_array_covers_every_pair() -> None:
    seen = {
        pair
        for case in CASES
        for pair in combinations(((n, FACTORS[n].index(case[n])) for n in FACTORS), 2)
    }
    for (a, i), (b, j) in pairs_of(FACTORS) - seen:
        values = {a: FACTORS[a][i], b: FACTORS[b][j]}
        rest = {n: v for n, v in FACTORS.items() if n not in values}
        fixed = {n: [v] for n, v in values.items()}
        assert not _possible({**fixed, **rest}), values
    assert len(CASES) < 100


def _possible(factors: dict[str, list[Any]], row: dict[str, Any] | None = None) -> bool:
    row = row or {}
    if not allowed(row):
        return False
    name = next((n for n in factors if n not in row), None)
    return name is None or any(_possible(factors, {**row, name: v}) for v in factors[name])


class Built:
    """A case: the op, its inputs, and what they mean."""

    def __init__(self, case: dict[str, Any], seed: int) -> None:
        self.case, self.gen = case, torch.Generator().manual_seed(seed)
        self.dtype = case["dtype"]
        self.h, self.hk = case["heads"]
        self.q_layout, self.kv_layout = (case["layout"].split("_2") * 2)[:2]
        s = {"self": (6, 6), "more queries": (7, 4), "more keys": (4, 7)}[case["lengths"]]
        self.s_q, self.s_kv = s
        self._lengths()
        d_qk, d_v = case["d"]
        self.q = self._tensor(self.q_layout, self.s_q, self.h, d_qk)
        self.k = self._tensor(self.kv_layout, self.s_kv, self.hk, d_qk)
        self.v = self._tensor(self.kv_layout, self.s_kv, self.hk, d_v)
        self.learned: dict[str, torch.Tensor] = {}
        self._op()

    def _tensor(self, layout: str, s: int, h: int, d: int) -> torch.Tensor:
        shape = {"bshd": (B, s, h, d), "sbhd": (s, B, h, d), "thd": (2 * s + 3, h, d)}[layout]
        return self.random(shape)

    def random(self, shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=self.gen, dtype=torch.float64).to(self.dtype)

    def _lengths(self) -> None:
        """(starts, lengths) of each side; full ones without padding."""
        self.packed = "thd" in self.case["layout"]
        padded = self.case["mask"].startswith("padding") or self.packed
        lens = {"q": [self.s_q, max(0, self.s_q - 2)], "kv": [self.s_kv, self.s_kv - 2]}
        if not padded:
            lens = {"q": [self.s_q] * B, "kv": [self.s_kv] * B}
        self.spans: dict[str, tuple[list[int], list[int]]] = {}
        for side, layout, s in (("q", self.q_layout, self.s_q), ("kv", self.kv_layout, self.s_kv)):
            left = self.case["padding"] == "left" and not self.packed
            starts = [s - n if left else 0 for n in lens[side]]
            if layout == "thd":
                starts = [1, s + 2]  # gaps in front, between and behind
            self.spans[side] = starts, lens[side]

    def _op(self) -> None:
        case = self.case
        keywords: dict[str, Any] = {}
        bias, kind = case["bias"].split()[0], case["bias"].split()[-1]
        if bias in ("pre", "post"):
            keywords["core_attention_bias_type"] = f"{bias}_scale_bias"
        elif bias == "alibi":
            keywords["core_attention_bias_type"] = "alibi"
        if case["score"] == "cap":
            keywords["logits_soft_cap"] = 1.5
        elif case["score"] == "modifier":
            vector = torch.nn.Parameter(self.random((self.h,)).double())
            keywords["score_mod"] = bent(
                vector, torch.nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
            )
        cross = case["lengths"] != "self"
        self.op = Attention(
            self.h, self.hk, attn_mask_type=case["mask"], window_size=case["window"],
            qkv_format=case["layout"], attention_type="cross" if cross else "self",
            softmax_type=case["softmax"], attention_dropout=case["dropout"],
            return_lse=True, return_max_logit=True, dtype=torch.float64, **keywords,
        )  # fmt: skip
        if case["softmax"] == "learnable":
            with torch.no_grad():
                self.op.softmax_offset.copy_(self.random((self.h,)))
        self.extras: list[torch.Tensor] = []
        self.meaning = Meaning(
            spans=dense_spans(B, self.spans["q"], self.spans["kv"]),
            band=band_of(case["mask"], case["window"]),
            slopes_bottom_right=is_bottom_right(case["mask"], None),
            p=case["dropout"],
        )
        self._spans()
        self._sequences(cross)
        shapes = {
            "11ss": (1, 1),
            "bhss": (B, self.h),
            "1hss": (1, self.h),
            "b1ss": (B, 1),
            "111s": (1, 1),
        }
        if case["mask"] == "arbitrary":
            mask = torch.rand((B, 1, self.s_q, self.s_kv), generator=self.gen) < 0.4
            mask[0, :, 1] = True  # an empty row
            self.extras.append(mask)
            self.meaning.mask = mask
        if bias in ("pre", "post"):
            tensor = self.random((*shapes[kind], 1 if kind == "111s" else self.s_q, self.s_kv))
            self.extras.append(tensor)
            self.learned["bias"] = tensor
        if bias == "alibi":
            self.meaning.slopes = torch.tensor(alibi_slopes(self.h), dtype=torch.float32).double()

    def _spans(self) -> None:
        """The spans of packed sides have no batch row."""
        thd = [layout == "thd" for layout in (self.q_layout, self.kv_layout)]
        self.meaning.spans = [
            tuple((None if t else e, start, n) for t, (e, start, n) in zip(thd, pair, strict=True))
            for pair in self.meaning.spans
        ]

    def _sequences(self, cross: bool) -> None:
        """The inputs that say where sequences are."""
        if self.packed:
            parts = []
            for side, s in (("q", self.s_q), ("kv", self.s_kv)):
                starts, lens = self.spans[side]
                parts += [[0, lens[0], sum(lens)], [1, s + 2, 2 * s + 3]]
                if side == "kv" and self.kv_layout != "thd":
                    parts[-1] = parts[-2]
            self.extras.append(PackedSequences(parts[0], parts[2], parts[1], parts[3]))
        elif self.case["mask"].startswith("padding"):
            sides = ("q", "kv") if cross else ("q",)
            for side in sides:
                starts, lens = (torch.tensor(x) for x in self.spans[side])
                at = torch.arange(self.s_q if side == "q" else self.s_kv)
                mask = (at < starts[:, None]) | (at >= (starts + lens)[:, None])
                right = self.case["padding"] == "lengths"
                self.extras.append(lens if right else mask[:, None, None])

    def keep(self, seed: torch.Tensor) -> Any:
        """The library's dropout mask, dumped for all scores."""
        if not self.case["dropout"]:
            return None
        shape: tuple[int, ...] = (B, self.h, self.s_q, self.s_kv)
        if self.q_layout == "thd":
            shape = (
                self.h,
                self.q.shape[0],
                self.k.shape[0] if self.kv_layout == "thd" else self.s_kv,
            )
        return philox_uniform(shape, seed, 0) >= self.case["dropout"]


def batch_first(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x.transpose(0, 1) if layout == "sbhd" else x


def close(
    got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str, floor: float
) -> None:
    """To a few roundings of what adds up; half precision: numerics 20, twice the Frobenius error of rounding."""
    assert got.shape == want.shape, what
    assert torch.equal(got.isinf(), want.isinf()), what
    hidden = want.isinf()
    got, want = (x.detach().double().masked_fill(hidden, 0.0) for x in (got, want))
    error = float((got - want).norm())
    exact = {torch.float64: 1e-12, torch.float32: 2e-6}.get(dtype)
    if exact is not None:
        assert error <= exact * (float(want.norm()) + floor), (what, error)
        return
    rounding = float((want.to(dtype).double() - want).norm())
    assert error <= 2 * rounding + torch.finfo(dtype).eps * floor, (what, error, rounding)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{i}")
def test_case(number: int) -> None:
    case = CASES[number]
    built = Built(case, number)
    op = built.op
    leaves = [built.q, built.k, built.v, *built.learned.values(), *op.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    torch.manual_seed(number)
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    torch.manual_seed(number)
    o, lse, top = op(built.q, built.k, built.v, *built.extras)

    exact = [x.detach().double().requires_grad_() for x in leaves]
    meaning = built.meaning
    named = dict(
        zip((*built.learned, *(n for n, _ in op.named_parameters())), exact[3:], strict=True)
    )
    if "bias" in named:
        setattr(meaning, "pre_bias" if case["bias"].startswith("pre") else "bias", named["bias"])
    meaning.sink = {
        "vanilla": None, "off-by-one": torch.zeros(built.h), "learnable": named.get("softmax_offset"),
    }[case["softmax"]]  # fmt: skip
    if case["score"] == "cap":
        meaning.score = lambda s, *_: 1.5 * torch.tanh(s / 1.5)
    elif case["score"] == "modifier":
        a, b = named["score_mod.a"], named["score_mod.b"]
        meaning.score = lambda s, i, j, h, e: (
            torch.tanh(s * a[int(h)]) * (1.0 + 0.1 * h - 0.05 * e)
            + b * torch.sin(0.3 * i - 0.2 * j)
        )
    meaning.keep = built.keep(seed)
    layouts = (built.q_layout, built.kv_layout, built.kv_layout)
    want_o, want_lse, want_top = oracle(
        *(batch_first(x, at) for x, at in zip(exact[:3], layouts, strict=True)), meaning
    )
    want_o = batch_first(want_o, built.q_layout)
    dtype = case["dtype"]
    close(o, want_o, dtype, f"o of {case}", 0.1)
    statistic = torch.float64 if dtype is torch.float64 else torch.float32
    empty = want_lse == math.inf
    close(lse, want_lse.masked_fill(empty, -math.inf), statistic, f"lse of {case}", 1.0)
    close(top, want_top, statistic, f"max_logit of {case}", 1.0)

    do, dlse = built.random(o.shape), built.random(lse.shape).to(lse.dtype)
    dlse = dlse.masked_fill(lse == -math.inf, math.nan)
    got = torch.autograd.grad([o, lse], leaves, [do, dlse])
    loss = (want_o * do.double()).sum() + (want_lse * dlse.double())[~empty].sum()
    wants = torch.autograd.grad(loss, exact, materialize_grads=True)
    # delta reads the rounded o: its error is that of o, times do.
    floor = {torch.bfloat16: 4.0, torch.float16: 4.0}.get(dtype, 10.0)
    for name, a, b in zip(("dq", "dk", "dv", *named), got, wants, strict=True):
        assert a.isfinite().all(), (name, case)
        kind = a.dtype if a.dtype is not torch.float64 or dtype is torch.float64 else dtype
        close(a.to(kind), b, kind, f"{name} of {case}", floor)
