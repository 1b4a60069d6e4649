"""Every gate refuses what it says, with its reason, and takes what lies next to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from te_ops.backends.flash import KERNELS, gates, limits, pays, problem
from te_ops.backends.flash.problem import problem_of, spec_of
from te_ops.basic.band import Band
from te_ops.basic.score import Score, soft_cap
from te_ops.pointwise import elementwise
from te_ops.registry import Call
from tests.backends.cudnn.calls import call_of, quantized

BF16, FP32, INT = torch.bfloat16, torch.float32, torch.int64
CAUSAL, ENDING = Band(right=0), Band(right=0, diagonal="bottom_right")
SCALED = Score(elementwise("scaled", lambda s, c: s * c, "value", "value"), ("s", "captured_c"))
LENS = dict.fromkeys(("q_starts", "q_lens", "kv_starts", "kv_lens"), ((2,), INT))


def case(
    *,
    s: tuple[int, int] = (256, 256),
    h: tuple[int, int] = (4, 2),
    d: tuple[int, int] = (64, 64),
    dtype: torch.dtype = BF16,
    backward: bool = False,
    writes: tuple[int, ...] | None = None,
    more: dict[str, Any] | None = None,
    left_out: tuple[str, ...] = (),
    fp8: bool = False,
    **attrs: Any,
) -> Call:
    """A call over tensors without memory."""
    packed = attrs.get("layout") == "thd"
    lead = [() if packed else (2,) for _ in range(2)]
    q, k, v = (
        (*lead[0], s[0], h[0], d[0]),
        (*lead[1], s[1], h[1], d[0]),
        (*lead[1], s[1], h[1], d[1]),
    )
    if attrs.get("kv_layout") == "thd" and not packed:
        k, v = k[1:], v[1:]
    made = {"q": (q, dtype), "k": (k, dtype), "v": (v, dtype), **(more or {})}
    if backward:
        o = (*q[:-1], d[1])
        by_row = (h[0], s[0]) if packed else (2, h[0], s[0])
        made |= {"o": (o, dtype), "lse": (by_row, FP32), "do": (o, dtype)}
        writes = writes or (0, 1, 2)
    xs = {
        name: torch.empty(shape, dtype=kind, device="meta")
        for name, (shape, kind) in made.items()
        if name not in left_out
    }
    given = quantized(xs) if fp8 else xs
    return call_of(given, writes=writes or (0, 1), backward=backward, **{"scale": 0.125, **attrs})


CAPTURED = {"captured_c": ((), FP32)}
PADDED = {"kv_lens": ((2,), INT)}
THD: dict[str, Any] = {"layout": "thd", "kv_layout": "thd", "more": LENS}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dtype": ({"dtype": FP32}, {"dtype": torch.float16}),
    "empty": ({"s": (0, 0)}, {"s": (1, 1)}),
    "features": ({"d": (260, 64)}, {"d": (256, 64), "h": (2, 2)}),
    "wider values": ({"d": (64, 96), "h": (2, 2)}, {"d": (96, 64), "h": (2, 2)}),
    "features of a gradient": ({"d": (48, 48), "backward": True}, {"d": (48, 48)}),
    "shared keys": (
        {"d": (192, 128), "backward": True},
        {"d": (192, 128), "h": (2, 2), "backward": True},
    ),
    "scale": ({"scale": None, "more": {"scale": ((), FP32)}}, {}),
    "sign": ({"scale": -0.125}, {"scale": 0.5}),
    "captured": (
        {"score": SCALED, "more": CAPTURED, "backward": True, "writes": (0, 1, 2, 3)},
        {"score": SCALED, "more": CAPTURED, "backward": True},
    ),
    "lengths": (
        {"more": {"kv_lens": ((256,), INT)}, "layout": "sbhd", "kv_layout": "sbhd"},
        {"more": PADDED, "band": ENDING},
    ),
    "diagonal": ({"band": CAUSAL, "s": (128, 256)}, {"band": ENDING, "s": (128, 256)}),
    "dropout": ({"dropout": 0.1, "more": {"seed": ((), INT)}}, {"dropout": 0.0}),
    "peak": ({"writes": (0, 1, 2)}, {"writes": (0,)}),
    "gradient of the lse": (
        {"backward": True, "more": {"dlse": ((2, 4, 256), FP32)}},
        {"backward": True},
    ),
    "operands": (
        {"more": {"bias": ((4, 256, 256), BF16)}},
        {"more": {"sink": ((4,), FP32)}, "band": Band(9, 0)},
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_both_directions(name: str) -> None:
    reasons = {gate.name: gate.reason for gate in gates.GATES}
    refused, taken = PAIRS[name]
    assert gates.refuse(problem_of(case(**refused))) == reasons[name]
    found = problem_of(case(**taken))
    assert gates.refuse(found) is None
    assert limits.refuse(spec_of(found)) is None


def test_every_gate_has_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [gate.name for gate in gates.GATES]
    assert set(names) == {*PAIRS, "deterministic"}
    assert len({gate.reason for gate in gates.GATES}) == len(names)
    monkeypatch.setattr(problem.torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "order" in (gates.refuse(problem_of(case(backward=True))) or "")
    assert gates.refuse(problem_of(case())) is None


def test_attention_in_fp8_is_left_to_others_but_for_its_gradient() -> None:
    assert "must be BF16" in (gates.refuse(problem_of(case(fp8=True))) or "")
    assert gates.refuse(problem_of(case(fp8=True, backward=True))) is None


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda spec: replace(spec, features=12), "divide by 8"),
        (lambda spec: replace(spec, dtype="fp32"), "BF16 or FP16"),
        (lambda spec: replace(spec, left=True), "a window has a side"),
        (lambda spec: replace(spec, mask="window"), "a window has a side"),
        (lambda spec: replace(spec, score="def f(): ..."), "comes with its text"),
        (lambda spec: replace(spec, backward=True, group=2, values=32), "as many features of v"),
        (lambda spec: replace(spec, backward=True, values=48), "divide by 32"),
        (lambda spec: replace(spec, features=256, sink=True), "a sink is added forward"),
    ],
)
def test_limits(wrong: Callable[[Any], Any], reason: str) -> None:
    spec = spec_of(problem_of(case()))
    assert limits.refuse(spec) is None
    assert reason in (limits.refuse(wrong(spec)) or "")
    assert "is made for sm_90a" in (limits.refuse(spec, "sm_100a") or "")


def test_where_blocks_of_threads_stay() -> None:
    plain = spec_of(problem_of(case(d=(96, 96), h=(4, 4))))
    assert not limits.stays(plain)
    assert not limits.stays(replace(plain, packed=True)), "o has no room beside q"
    for more in ({"mask": "causal", "packed": True}, {"mask": "window", "left": True}):
        assert limits.stays(replace(plain, **more))
        assert not limits.stays(replace(plain, **more, features=136))
        assert not limits.stays(replace(plain, **more, backward=True))
    assert limits.stays(replace(plain, features=128, sink=True))


LONG = {"s": (1024, 1024), "d": (128, 128)}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gradient of padded batches": (
        {**LONG, "more": PADDED, "backward": True},
        {**LONG, "more": PADDED},
    ),
    "features": ({**LONG, "d": (80, 80)}, LONG),
    "gradient of wide heads": (
        {**LONG, "d": (256, 256), "backward": True},
        {**LONG, "d": (256, 256)},
    ),
    "short": ({**LONG, "s": (512, 512)}, {**LONG, "s": (512, 512), "backward": True}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_first_choice_is_where_it_was_measured_to_pay(name: str) -> None:
    reasons = {loss.name: loss.reason for loss in pays.LOSSES}
    assert set(reasons) == set(LOSSES)
    slower, faster = LOSSES[name]
    assert pays.refuse(problem_of(case(**slower))) == reasons[name]
    assert pays.refuse(problem_of(case(**faster))) is None
    only = problem_of(case(**slower, score=soft_cap(30.0)))
    assert pays.refuse(only) is None, "no other kernel takes a score modifier"


def test_kernels_are_named_by_what_they_run() -> None:
    assert sorted(k.name for k in KERNELS) == [
        "flash.attention",
        "flash.attention_backward",
        "flash.attention_backward_first",
        "flash.attention_first",
    ]
