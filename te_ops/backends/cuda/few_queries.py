"""Attention of a few queries, as in generation: the keys of a head are shared out over the whole device.

What other kernels do with a block of 64 or 128 queries is bound by reading keys and values here, and by having enough
blocks for it. Keys are read where they lie, cached pages too, and none beyond a length.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.block import processors
from te_ops.backends.cuda.compile import missing
from te_ops.backends.cuda.source import CTYPES, flag
from te_ops.basic.attention_form import Form, Sizes, named, sizes
from te_ops.basic.score import PLACES, Score
from te_ops.pointwise import lower, prelude, symbol
from te_ops.registry import ArchRange, Call, Kernel, Launch

MOST_ROWS = 16
"""Queries of all heads that share a key: with more, other kernels' blocks are full enough."""
LEAST_KEYS = 128
"""Keys, below which there is nothing to share out."""
FEATURES = 256
PRIORITY = 24  # before all kernels for many queries
THREADS, STEP, STAGES = 128, 4, 3
SHARED = 32 * STEP * STAGES * THREADS  # bytes of a block: keys and values on their way
BLOCKS = {1: 4, 2: 4, 4: 4, 8: 2}
"""Blocks that a multiprocessor holds, by the rows of one: registers and shared memory have room for no more."""
ROWS = max(BLOCKS)
_LENGTHS = ("q_starts", "q_lens", "kv_starts", "kv_lens")
_TAKEN = {"q", "k", "v", "sink", "page_table", *_LENGTHS}
_LAYOUTS = ("bshd", "sbhd")
_SLOTS = (26, 12)  # of the two kernels, without what a score captures


def refuse(call: Call) -> str | None:
    """Many queries, few keys; dtypes beyond BF16 and FP16; masks of their own, biases, dropout, largest scores."""
    node = call.node
    form = Form(**node.attrs)
    by_name = named(form, [call.spec(v) for v in node.inputs])
    return _refuse_form(call, form, by_name) or _refuse_sizes(sizes(form, by_name))


def _refuse_form(call: Call, form: Form, by_name: dict[str, Any]) -> str | None:
    captured = () if form.score is None else form.score.captured
    extra = sorted(set(form.operands) - _TAKEN - set(captured))
    three = [by_name[name] for name in ("q", "k", "v")]
    if any(x.kind.name != "dense" for x in three) or len({x.dtype for x in three}) > 1:
        return "q, k and v must be dense tensors of one dtype"
    if three[0].dtype not in (torch.bfloat16, torch.float16):
        return f"reads BF16 and FP16, not {three[0].dtype}"
    if form.layout not in _LAYOUTS or form.kv_layout not in (*_LAYOUTS, "paged"):
        return "packed tokens are left to other kernels"
    if extra:
        return f"it is given no {', '.join(extra)}"
    if form.scale is None or form.dropout:
        return "the scale is a number, and nothing is dropped"
    if call.live(call.node)[2]:
        return "it returns no largest scores"
    return None


def _refuse_sizes(n: Sizes) -> str | None:
    rows = n.s_q * (n.h_q // n.h_kv)
    if 0 in n:
        return "nothing of size zero is attended to"
    if rows > MOST_ROWS or n.s_kv < LEAST_KEYS:
        return (
            f"it is for up to {MOST_ROWS} queries of the heads that share a key, and at least {LEAST_KEYS} keys; "
            f"there are {rows} and {n.s_kv}"
        )
    if any(d % 8 or d > FEATURES for d in (n.d_qk, n.d_v)):
        return f"the features of a head must divide by 8, and be {FEATURES} at most"
    return None


# -- texts


@dataclass(frozen=True)
class Text:
    """What a kernel is made for.

    Attributes:
        rows: of a block.
        lanes: threads that read a key together.
    """

    form: Form
    sizes: Sizes
    ctype: str

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.sizes.h_q // self.sizes.h_kv

    @property
    def rows(self) -> int:
        wanted = int(min(self.sizes.s_q * self.group, ROWS))
        return 1 << (wanted - 1).bit_length()

    @property
    def lanes(self) -> int:
        wanted = int(max(self.sizes.d_qk, self.sizes.d_v)) // 8
        return 1 << (wanted - 1).bit_length()

    def head(self, *, score: bool) -> str:
        """The struct `Form`, and what it calls."""
        form, n = self.form, self.sizes
        modifier = form.score if score else None
        captured = () if modifier is None else modifier.captured
        band = form.band
        ending = band.diagonal == "bottom_right"
        parts = ["#include <kernels/few_queries.cuh>\n"]
        if modifier is not None:
            parts += [prelude("cuda", fast=_approximates(self.ctype)), lower(modifier.fn, "cuda")]
        sides = [-1 if side is None else side for side in (band.left, band.right)]
        parts.append(
            f"struct Form {{\n  static constexpr int D = {n.d_qk}, DV = {n.d_v}, GROUP = {self.group};\n"
            f"  static constexpr bool ending = {flag(ending)}, paged = {flag(form.kv_layout == 'paged')};\n"
            f"  static constexpr te::i64 left = {sides[0]}, right = {sides[1]};\n"
            f"{_members(captured)}{_score(modifier)}}};\n"
        )
        return "".join(parts)


def _approximates(ctype: str) -> bool:
    """Whether a modifier may use approximations: their errors vanish in BF16's rounding of the result only."""
    return ctype == CTYPES[torch.bfloat16]


def _members(captured: tuple[str, ...]) -> str:
    """Values that a score reads: an address each and the step from a head's to the next, or 0 and a number's bits."""
    return "".join(f"  const float* {name}; te::i64 step_{name};\n" for name in captured)


def _score(modifier: Score | None) -> str:
    """The function of a score."""
    inputs = "float s, float i, float j, te::i64 head, te::i64 batch"
    if modifier is None:
        return f"  TE_DEVICE float score({inputs}) const {{ return s; }}\n"
    names = {"s": "s", "i": "i", "j": "j", "head": "(float)head", "batch": "(float)batch"}
    given = [
        names[x]
        if x == "s" or x in PLACES
        else f"({x} ? {x}[head * step_{x}] : te::float_of((te::u32)step_{x}))"
        for x in modifier.inputs
    ]
    return (
        f"  TE_DEVICE float score({inputs}) const {{\n"
        f"    float y; {symbol(modifier.fn)}({', '.join(given)}, y); return y;\n  }}\n"
    )


def _build(text: Text, arch: str) -> tuple[launch.Function, launch.Function]:
    """The kernel that reads keys, and the one that merges."""
    captured = () if text.form.score is None else text.form.score.captured
    split = launch.text_of(
        name="few_queries",
        head=f"{text.head(score=True)}struct Parameters {{ te::FewCall call; Form form; }};\n",
        body=(
            f"te::few_queries<{text.ctype}, Form, {text.lanes}, {text.rows}, {STEP}, {STAGES}, {THREADS}>"
            "(p.call, p.form);"
        ),
        threads=THREADS,
        blocks=BLOCKS[text.rows],
    )
    merge = launch.text_of(
        name="few_queries_merged",
        head=f"{text.head(score=False)}typedef te::FewMerge Parameters;\n",
        body=f"te::few_queries_merged<{text.ctype}, Form, {THREADS}>(p);",
        threads=THREADS,
    )
    slots = _SLOTS[0] + max(2 * len(captured), 1)  # an empty struct is one byte, eight with its end
    return (
        launch.build("few_queries", split, arch, THREADS, slots, shared=SHARED),
        launch.build("few_queries_merged", merge, arch, THREADS, _SLOTS[1]),
    )


# -- launches


class FewQueries:
    """The launch of a call."""

    def __init__(self, call: Call) -> None:
        node = call.node
        self.form = Form(**node.attrs)
        by_name = named(self.form, [call.spec(v) for v in node.inputs])
        n = sizes(self.form, by_name)
        self.text = Text(self.form, n, CTYPES[by_name["q"].dtype])
        self.captured = () if self.form.score is None else self.form.score.captured
        self.places = tuple(call.reads.index(v) for v in node.inputs)
        self.writes = tuple(v.index for v in call.writes)
        self.reference: Callable[..., Any] = functools.partial(
            node.prim.reference, live=call.live(node), **node.attrs
        )
        self.kernels = _build(self.text, call.arch)
        assert self.form.scale is not None
        self.scale = _bits(self.form.scale)
        self.device = call.device

    def __call__(self, *reads: Any) -> Any:
        """Over the values that the call reads; sizes that the kernel does not take go to the reference."""
        xs = [reads[i] for i in self.places]
        by_name = dict(zip(self.form.operands, xs, strict=True))
        n = sizes(self.form, by_name)
        made = (
            self.reference(*xs) if _refuse_sizes(n) is not None else (*self._run(by_name, n), None)
        )
        picked = tuple(made[i] for i in self.writes)
        return picked[0] if len(picked) == 1 else picked

    def _run(self, by_name: dict[str, Any], n: Sizes) -> tuple[Tensor, Tensor]:
        q, k, v = (_fit(by_name[name]) for name in ("q", "k", "v"))
        integers = {name: _whole(by_name.get(name)) for name in (*_LENGTHS, "page_table")}
        group, chunk = self.text.group, self.text.rows
        blocks = n.b * n.h_kv * -(-n.s_q * group // chunk)
        held = BLOCKS[chunk] * processors(self.device)
        splits = max(1, min(held // blocks, -(-n.s_kv // LEAST_KEYS)))  # all at once, none tiny
        parts = launch.empty(
            (n.b, n.h_kv, n.s_q * group, splits, n.d_v + 2), torch.float32, self.device
        )
        paged = self.form.kv_layout == "paged"
        page, pages = (k.shape[1], by_name["page_table"].shape[1]) if paged else (1, 1)
        captured = [_fp32(by_name[name]) for name in self.captured]
        addresses = [0 if x is None else x.data_ptr() for x in integers.values()]
        split, merge = self.kernels
        split(
            self.device, blocks * splits,
            q.data_ptr(), k.data_ptr(), v.data_ptr(), parts.data_ptr(), *addresses,
            *_steps(q, self.form.layout), *_steps(k, self.form.kv_layout), *_steps(v, self.form.kv_layout),
            n.b, n.s_q, n.s_kv, n.h_kv, splits, page, pages, self.scale,
            *([part for x in captured for part in _value(x, self.device)] or [0]),
        )  # fmt: skip
        o = launch.empty((*q.shape[:-1], n.d_v), q.dtype, self.device)
        lse = launch.empty((n.b, n.h_q, n.s_q), torch.float32, self.device)
        sink = by_name.get("sink")
        sink = None if sink is None else launch.ready(sink.float())
        merge(
            self.device, n.b * n.s_q * n.h_q,
            parts.data_ptr(), o.data_ptr(), lse.data_ptr(), 0 if sink is None else sink.data_ptr(),
            *addresses[:2], *_steps(o, self.form.layout)[:2], n.b, n.s_q, n.h_kv, splits,
        )  # fmt: skip
        return o, lse


def bind(call: Call) -> Launch:
    """The launch of a call that was not refused."""
    return FewQueries(call)


def _fit(x: Tensor) -> Tensor:
    """x as the kernel reads it: eight features at once."""
    fits = x.stride(-1) == 1 and not any(s % 8 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else launch.ready(x.contiguous())


def _whole(x: Tensor | None) -> Tensor | None:
    """Contiguous int64."""
    return None if x is None else x.to(torch.int64).contiguous()


def _fp32(x: Tensor) -> Tensor:
    """A captured value, FP32 and contiguous."""
    return x.detach().float().contiguous()


def _bits(x: float) -> int:
    """Of an FP32 number."""
    return int.from_bytes(struct.pack("<f", x), "little")


def _value(x: Tensor, device: torch.device) -> tuple[int, int]:
    """The slots of a captured value; a run-time number lives on the host."""
    if x.device != device:
        return 0, _bits(float(x))
    return x.data_ptr(), int(x.numel() > 1)


def _steps(x: Tensor, layout: str) -> tuple[int, int, int]:
    """Elements from an entry (a page) to the next, from a row (a slot), from a head."""
    outer, row, head, _ = x.stride()
    return (row, outer, head) if layout == "sbhd" else (outer, row, head)


KERNELS = (
    Kernel(
        runs="attention",
        name="cuda.attention_few",
        bind=bind,
        arch=ArchRange("sm_80+"),
        priority=PRIORITY,
        refuse=refuse,
        available=missing,
        recorded=True,
    ),
)

__all__ = ["KERNELS", "bind", "refuse"]
