"""What each gate refuses, beside what differs little and is taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from te_ops.backends.cudnn.problem import Problem, problem_of
from te_ops.basic.attention_core import attention
from te_ops.basic.band import Band
from te_ops.basic.score import soft_cap
from te_ops.basic.sequences import alibi_slopes, constant_vector
from te_ops.graph import Graph, Spec, Value
from te_ops.registry import Call
from tests.backends.cudnn.calls import call_of, quantized

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CAUSAL, ENDING = Band(right=0), Band(right=0, diagonal="bottom_right")


@dataclass(frozen=True)
class Case:
    """An attention over tensors without memory."""

    s: tuple[int, int] = (256, 256)
    d: tuple[int, int] = (64, 64)
    b: int = 2
    h: tuple[int, int] = (4, 2)
    dtype: torch.dtype = BF16
    more: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    backward: bool = False
    writes: tuple[int, ...] = (0, 1)
    left_out: tuple[str, ...] = ()
    fp8: bool = False

    def operands(self) -> dict[str, torch.Tensor]:
        """By name."""
        (s_q, s_kv), (d, dv), (h, hk), b = self.s, self.d, self.h, self.b
        made = {"q": (b, s_q, h, d), "k": (b, s_kv, hk, d), "v": (b, s_kv, hk, dv)}
        xs = {name: _meta(shape, self.dtype) for name, shape in made.items()}
        if self.attrs.get("kv_layout") == "paged":
            xs |= {"k": _meta((8, 16, hk, d), self.dtype), "v": _meta((8, 16, hk, dv), self.dtype)}
        xs |= {name: _meta(shape, dtype) for name, shape, dtype in self.more}
        if self.backward:
            xs |= {"o": _meta((b, s_q, h, dv), self.dtype), "lse": _meta((b, h, s_q), FP32)}
            xs["do"] = xs["o"]
        return {name: x for name, x in xs.items() if name not in self.left_out}

    def problem(self) -> Problem:
        """As the kernel sees it."""
        attrs = {"scale": 0.125, **self.attrs}
        xs = self.operands()
        writes = (0, 1, 2) if self.backward else self.writes
        if self.backward and not {"bias", "slopes"}.isdisjoint(xs):
            writes = (0, 1, 2, 3)
        given = quantized(xs) if self.fp8 else xs
        return problem_of(call_of(given, writes=writes, backward=self.backward, **attrs))


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def with_slopes(heads: int, *, ours: bool = True, band: Band = CAUSAL) -> Problem:
    """ALiBi with slopes that the plan knows."""
    g = Graph()
    q, k, v = (g.input(i, Spec((2, 256, heads, 64), BF16)) for i in range(3))
    numbers = alibi_slopes(heads) if ours else (0.5,) * heads
    slopes = constant_vector(g, numbers)
    o, lse, _ = attention(g, q, k, v, operands={"slopes": slopes}, band=band)
    return problem_of(_call(g, o, (o, lse)))


def _call(g: Graph, o: Value, writes: tuple[Value, ...]) -> Call:
    node = g.node(o)
    outs = tuple(Value(node.id, i) for i in range(3))
    specs = {v: g.spec(v) for v in (*node.inputs, *outs)}
    producers = {v.node: g.node(v) for v in node.inputs}
    return Call(
        (node,), node.inputs, writes, specs, torch.device("cpu"), "sm_90", 1, None, producers
    )


LENS = (("q_lens", (2,), torch.int64), ("kv_lens", (2,), torch.int64))
STARTS = (*LENS, ("q_starts", (2,), torch.int64), ("kv_starts", (2,), torch.int64))
BIAS = (("bias", (1, 4, 256, 256), BF16),)
MASK = (("mask", (2, 1, 256, 256), torch.bool),)
SEED = (("seed", (), torch.int64),)
BACK = {"backward": True}

PAIRS: dict[str, tuple[Case, Case]] = {
    "dtype": (Case(dtype=FP32), Case(dtype=FP16)),
    "fp8 of fp64": (Case(dtype=torch.float64, fp8=True), Case(dtype=FP32, fp8=True)),
    "fp8 features": (Case(d=(72, 72), fp8=True), Case(d=(80, 80), fp8=True)),
    "fp8 bias": (Case(more=BIAS, fp8=True), Case(fp8=True)),
    "fp8 slopes": (
        Case(more=(("slopes", (4,), FP32),), attrs={"band": CAUSAL}, fp8=True),
        Case(attrs={"band": CAUSAL}, fp8=True),
    ),
    "fp8 diagonal": (
        Case(s=(100, 256), attrs={"band": ENDING}, fp8=True),
        Case(s=(256, 256), attrs={"band": ENDING}, fp8=True),
    ),
    "fp8 one query": (Case(s=(1, 256), fp8=True), Case(s=(2, 256), fp8=True)),
    "fp8 offsets": (Case(more=STARTS, fp8=True), Case(more=LENS, fp8=True)),
    "fp8 peak": (Case(writes=(0, 1, 2), fp8=True), Case(writes=(0, 1), fp8=True)),
    "fp8 dropout": (Case(more=SEED, attrs={"dropout": 0.1}, fp8=True), Case(more=SEED, attrs={"dropout": 0.1})),
    "empty": (Case(b=0), Case(b=1)),
    "features": (Case(d=(60, 60)), Case(d=(72, 72))),
    "many features": (Case(d=(264, 264)), Case(d=(256, 256))),
    "score": (Case(attrs={"score": soft_cap(30.0)}), Case()),
    "scale": (Case(more=(("scale", (), FP32),), attrs={"scale": None}), Case()),
    "pre-bias": (Case(more=(("pre_bias", (1, 4, 256, 256), BF16),)), Case(more=BIAS)),
    "bias dtype": (Case(more=(("bias", (1, 4, 256, 256), FP32),)), Case(more=BIAS)),
    "two biases": (Case(more=(*BIAS, *MASK)), Case(more=MASK)),
    "narrow bias": (
        Case(more=(("bias", (1, 4, 256, 1), BF16),)),
        Case(more=(("bias", (1, 4, 1, 256), BF16),)),
    ),
    "partial dbias": (
        Case(more=(("bias", (1, 4, 1, 256), BF16),), **BACK),
        Case(more=BIAS, **BACK),
    ),
    "square with lengths": (Case(more=(*BIAS, *LENS)), Case(more=LENS)),
    "mask with band": (Case(more=MASK, attrs={"band": CAUSAL}), Case(more=BIAS, attrs={"band": CAUSAL})),
    "diagonal with extras": (
        Case(s=(128, 256), more=(("bias", (1, 4, 128, 256), BF16),), attrs={"band": ENDING}),
        Case(s=(128, 256), attrs={"band": ENDING}),
    ),
    "diagonal beyond keys": (
        Case(s=(256, 128), attrs={"band": ENDING}),
        Case(s=(256, 128), more=LENS, attrs={"band": ENDING}),
    ),
    "window beyond keys": (
        Case(s=(256, 128), attrs={"band": Band(7, 0)}),
        Case(s=(256, 128), more=LENS, attrs={"band": Band(7, 0)}),
    ),
    "one by one": (Case(s=(1, 1), **BACK), Case(s=(1, 2), **BACK)),
    "sign": (Case(attrs={"scale": -0.1}), Case(attrs={"scale": 0.1})),
    "few queries beside a mask": (
        Case(s=(2, 256), more=(("mask", (1, 1, 2, 256), torch.bool),), **BACK),
        Case(s=(64, 256), more=(("mask", (1, 1, 64, 256), torch.bool),), **BACK),
    ),
    "gradient of the lse": (
        Case(more=(("dlse", (2, 4, 256), FP32),), **BACK),
        Case(**BACK),
    ),
    "dropout of all": (
        Case(more=SEED, attrs={"dropout": 1.0}),
        Case(more=SEED, attrs={"dropout": 0.5}),
    ),
}  # fmt: skip
"""Refused, and taken."""

SLOPES = ("slopes", "slopes band", "slopes diagonal", "slopes gradient")
