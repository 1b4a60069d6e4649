"""Attention of a few queries, and new tokens of a KV cache, against their references."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_ops.backends.cuda import few_queries, kv_append
from te_ops.backends.reference.kernels import bind_reference
from te_ops.basic.band import Band
from te_ops.basic.kvcache import KV_APPEND, KV_APPEND_PAGES
from te_ops.basic.score import Score, soft_cap
from te_ops.pointwise import elementwise
from te_ops.registry import Call
from tests.backends.cuda.calls import Inputs, make_call
from tests.backends.cuda.cases import Draw
from tests.backends.cudnn.calls import call_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ENDING = Band(right=0, diagonal="bottom_right")
PLACES = Score(
    elementwise(
        "places",
        lambda s, i, j, h, b, c: s * (0.5 + 0.25 * h) - 0.01 * (i - j) * c + 0.5 * b,
        *["value"] * 6,
    ),
    ("s", "i", "j", "head", "batch", "captured_slope"),
)
Shape = tuple[int, ...]


def placed(call: Call, device: torch.device) -> Call:
    """The call on a device."""
    return replace(call, device=device)


@dataclass(frozen=True)
class Few:
    """An attention.

    Attributes:
        sizes: batch, queries, keys at least. heads: of queries and of keys. d: features of q and k, and of v.
        lengths: sequences have some; what lies outside is NaN.
        page: slots of a page, 0 without.
        slope: numbers that the score captures, 0 for none; a sink comes with them.
    """

    name: str
    sizes: tuple[int, int, int]
    heads: tuple[int, int]
    d: tuple[int, int]
    dtype: torch.dtype = BF16
    band: Band = ENDING
    layout: str = "bshd"
    score: Score | None = None
    lengths: bool = False
    page: int = 0
    slope: int = 0

    def operands(self, draw: Draw, more: int) -> dict[str, torch.Tensor]:
        """Of so many more keys."""
        (b, s_q, s_kv), (h, hk) = self.sizes, self.heads
        s_kv += more
        shapes = {"q": (b, s_q, h), "k": (b, s_kv, hk), "v": (b, s_kv, hk)}
        if self.page:
            pages = b * -(-s_kv // self.page)
            shapes |= dict.fromkeys(("k", "v"), (pages + 3, self.page, hk))
        xs = {n: draw((*s, self.d[n == "v"]), self.dtype) for n, s in shapes.items()}
        if self.layout == "sbhd":
            xs = {n: x.transpose(0, 1).contiguous() for n, x in xs.items()}
        device = xs["q"].device
        if self.page:
            order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
            xs["page_table"] = order.view(b, -1).to(device)
        if self.lengths:
            xs |= self._lengths(xs, b, s_q, s_kv)
        if self.slope:
            xs["captured_slope"] = torch.linspace(0.5, 2.0, self.slope, device=device)
            xs["captured_slope"] = (
                xs["captured_slope"] if self.slope > 1 else xs["captured_slope"][0]
            )
            xs["sink"] = torch.linspace(-3.0, 100.0, h, device=device)
        return xs

    def _lengths(
        self, xs: dict[str, torch.Tensor], b: int, s_q: int, s_kv: int
    ) -> dict[str, torch.Tensor]:
        starts = [0, 3, 7, 2][:b]
        lens = [s_kv, 0, 1, s_kv // 2][:b]
        if not self.page:
            for name in ("k", "v"):
                for e, (start, count) in enumerate(zip(starts, lens, strict=True)):
                    xs[name][e, :start] = math.nan
                    xs[name][e, start + count :] = math.nan
        made = {
            "q_lens": torch.tensor([s_q, s_q, 1, 0][:b]),
            "kv_starts": torch.tensor(starts, dtype=torch.int32),
            "kv_lens": torch.tensor(lens),
        }
        return {name: x.to(xs["q"].device) for name, x in made.items()}

    def call(self, xs: dict[str, torch.Tensor]) -> Call:
        """Over these operands."""
        made = call_of(
            xs, writes=(0, 1), scale=self.d[0] ** -0.5, band=self.band, score=self.score,
            layout=self.layout, kv_layout="paged" if self.page else self.layout,
        )  # fmt: skip
        return placed(made, xs["q"].device)

    def check(self, draw: Draw, shape: Shape, arch: str) -> list[str]:
        """What differs from the reference."""
        xs = self.operands(draw, shape[-1])
        call = replace(self.call(xs), arch=arch)
        if (reason := few_queries.refuse(call)) is not None:
            return [f"refused: {reason}"]
        made, wanted = few_queries.bind(call)(*xs.values()), bind_reference(call)(*xs.values())
        found = []
        for name, x, y in zip(("o", "lse"), made, wanted, strict=True):
            relative = 2.0**-10 if self.dtype is FP16 or name == "lse" else 2.0**-7
            if x.shape != y.shape or x.dtype is not y.dtype:
                found.append(f"{name} is {x.dtype} {tuple(x.shape)}")
            elif not torch.allclose(x.float(), y.float(), rtol=relative, atol=2e-3):
                found.append(f"{name} differs by {float((x.float() - y.float()).abs().max()):.1e}")
        return found


@dataclass(frozen=True)
class Appended:
    """New tokens, three or fewer of three sequences."""

    name: str
    layout: str = "bshd"
    page: int | None = None
    paged: bool = False
    dtype: torch.dtype = BF16
    features: int = 8

    def make(self, draw: Draw) -> tuple[Call, list[torch.Tensor]]:
        """A call and its operands, the first of which is written."""
        shape = (8, 4, 2) if self.paged else (3, 16 if self.page else 12, 2)
        cache = draw((*shape, self.features), self.dtype)
        new = draw((3, 3, 2, self.features), self.dtype)
        new = new.transpose(0, 1).contiguous() if self.layout == "sbhd" else new
        lengths = torch.tensor([30, 7, 15] if self.page else [0, 7, 3])
        more = [lengths, lengths + torch.tensor([3, 0, 2])]
        if self.paged:
            more.append(torch.tensor([[5, 1, 0], [3, 2, 0], [7, 6, 0]]))
        more.append(torch.tensor([0, 2, 1], dtype=torch.int32))
        xs = [cache, new, *(x.to(cache.device) for x in more)]
        inputs = Inputs()
        values = [inputs(x) for x in xs]
        prim = KV_APPEND_PAGES if self.paged else KV_APPEND
        attrs: dict[str, Any] = {} if self.paged else {"page": self.page}
        out = inputs.g.call(prim, *values, layout=self.layout, **attrs)
        return make_call(inputs, [inputs.g.node(out)], [out], device=cache.device), xs

    def check(self, draw: Draw, shape: Shape, arch: str) -> list[str]:
        """Whether the caches differ; the shape is the case's."""
        call, xs = self.make(draw)
        call = replace(call, arch=arch)
        ours, theirs = xs[0].clone(), xs[0].clone()
        made = kv_append.bind(call)(ours, *xs[1:])
        expected = bind_reference(call)(theirs, *xs[1:])
        same = torch.equal(made, expected) and torch.equal(ours, theirs)
        return [] if same else ["the caches differ"]


def few_queries_cases() -> Iterator[Few]:
    """Heads that share keys, features with idle threads, masks, scores, lengths, pages, sinks."""
    yield Few("few-4-heads-a-key", (1, 1, 300), (4, 1), (128, 128))
    yield Few("few-alone", (2, 1, 300), (2, 2), (64, 64), FP16)
    yield Few("few-other-values", (2, 3, 300), (4, 2), (32, 16))
    yield Few("few-odd-window", (1, 2, 130), (16, 2), (24, 24), FP16, Band(100, 0, "bottom_right"))
    yield Few("few-at-the-start", (1, 3, 130), (3, 1), (16, 32), FP16, Band(1, 1))
    yield Few("few-capped", (1, 1, 700), (1, 1), (256, 256), score=soft_cap(3.0))
    yield Few("few-lengths", (4, 2, 300), (4, 2), (32, 32), lengths=True)
    yield Few("few-pages", (2, 1, 260), (4, 2), (32, 32), lengths=True, page=16)
    yield Few("few-long-pages", (4, 1, 260), (8, 1), (64, 64), FP16, lengths=True, page=48)
    for slope in (1, 4):
        yield Few(
            f"few-captured-{slope}", (2, 2, 200), (4, 2), (32, 32), FP16, score=PLACES, slope=slope
        )
    yield Few("few-sequence-first", (2, 2, 200), (2, 1), (32, 32), FP16, layout="sbhd")


def kv_append_cases() -> Iterator[Appended]:
    """Rows, a ring, pages."""
    yield Appended("append")
    yield Appended("append-fp32", "sbhd", dtype=FP32)
    yield Appended("append-ring", page=4)
    yield Appended("append-pages", paged=True)
    yield Appended("append-pages-fp16", "sbhd", paged=True, dtype=FP16, features=24)
