"""Attention kernels of flash-attn on a device: every kind of call against the reference, capture, whole ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.cutlass import runtime
from te_ops.backends.flash import KERNELS, versions
from te_ops.backends.flash.problem import problem_of, spec_of
from te_ops.backends.reference.kernels import bind_reference
from te_ops.basic.band import Band
from te_ops.basic.score import Score, soft_cap
from te_ops.pointwise import elementwise
from te_ops.registry import REGISTRY, Call
from te_ops.runtime.cache import arch_of
from te_ops.testing import assert_close
from tests.backends.cudnn.calls import call_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
CAUSAL, ENDING = Band(right=0), Band(right=0, diagonal="bottom_right")
PLACES = Score(
    elementwise(
        "places",
        lambda s, i, j, h, b: s * (0.5 + 0.25 * h) - 0.01 * (i - j) * h + 0.5 * b,
        *["value"] * 5,
    ),
    ("s", "i", "j", "head", "batch"),
)
CAPTURING = Score(
    elementwise("capturing", lambda s, i, j, c, d: s * c - d * (i - j), *["value"] * 5),
    ("s", "i", "j", "captured_c", "captured_d"),
)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}


@pytest.fixture(scope="module")
def compiled() -> None:
    """The kernels of all cases, several at a time."""
    reason = versions.missing()
    if reason is None and arch_of(CUDA) != "sm_90":
        reason = f"the kernels are for sm_90, this is {arch_of(CUDA)}"
    if reason is not None:
        pytest.skip(reason)
    REGISTRY.prepare("cuda")
    calls = [call for name in CASES for call in _calls(name)[:2]]
    found = runtime.wait([spec_of(problem_of(call)) for call in calls], "sm_90", CUDA)
    assert set(found.values()) == {None}


@pytest.fixture(autouse=True)
def kernels(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_OPS_JIT", "sync")


def _tensors(
    shape: tuple[int, ...], heads: tuple[int, int], d: int, dtype: torch.dtype
) -> dict[str, Any]:
    drawn = torch.Generator(CUDA).manual_seed(0)
    return {
        name: torch.randn((*shape, h, d), generator=drawn, device=CUDA).to(dtype)
        for name, h in (("q", heads[0]), ("k", heads[1]), ("v", heads[1]), ("do", heads[0]))
    }


def _packed(lens: list[int], gap: int) -> tuple[dict[str, Any], int]:
    starts = [sum(lens[:i]) + gap * i for i in range(len(lens))]
    made = {"starts": torch.tensor(starts, device=CUDA), "lens": torch.tensor(lens, device=CUDA)}
    parts = {f"{side}_{name}": x for side in ("q", "kv") for name, x in made.items()}
    return parts, sum(lens) + gap * len(lens)


CASES: dict[str, tuple[Any, ...]] = {
    "causal, shared keys": ((2, 300), (8, 2), 128, BF16, {"band": CAUSAL}),
    "full, sequence first": ((300, 2), (4, 4), 64, BF16, {"layout": "sbhd", "kv_layout": "sbhd"}),
    "window": ((2, 300), (8, 2), 128, BF16, {"band": Band(70, 0)}),
    "window on both sides": ((1, 300), (4, 4), 64, FP16, {"band": Band(70, 20)}),
    "soft cap": ((2, 300), (4, 4), 64, FP16, {"band": CAUSAL, "score": soft_cap(2.0)}),
    "places, shared keys": ((2, 300), (8, 2), 128, BF16, {"band": CAUSAL, "score": PLACES}),
    "packed": ([0, 130, 1, 300], (8, 2), 128, BF16, {"band": ENDING}),
    "padded, places, shared keys": (
        (3, 300), (8, 2), 128, BF16, {"band": ENDING, "score": PLACES, "lens": [300, 0, 77]},
    ),
    "packed, places, window": (
        [0, 130, 1, 300], (4, 4), 64, BF16, {"band": Band(70, 0, "bottom_right"), "score": PLACES},
    ),
    "a window, many blocks": ((2, 1777), (16, 4), 128, BF16, {"band": Band(200, 0)}),
    "packed, many blocks": ([0, 130, *range(1, 60), 1, 2300], (16, 4), 128, BF16, {"band": ENDING}),
    "packed, uneven heads": ([129, 0, 700], (7, 1), 64, FP16, {"band": ENDING}),
    "captured, shared keys": ((2, 300), (8, 2), 128, BF16, {"band": CAUSAL, "score": CAPTURING}),
}  # fmt: skip


def _calls(name: str) -> tuple[Call, Call, dict[str, Any], dict[str, Any]]:
    """Both directions, and their operands."""
    shape, heads, d, dtype, attrs = CASES[name]
    more: dict[str, Any] = {}
    if isinstance(shape, list):
        more, rows = _packed(shape, 3)
        shape, attrs = (rows,), {**attrs, "layout": "thd", "kv_layout": "thd"}
    if "lens" in attrs:
        attrs = dict(attrs)
        more = {"kv_lens": torch.tensor(attrs.pop("lens"), device=CUDA)}
    if attrs.get("score") is CAPTURING:
        more |= {"captured_c": torch.tensor(0.5, device=CUDA)}
        more |= {"captured_d": torch.linspace(-0.01, 0.02, heads[0], device=CUDA)}
    xs = _tensors(shape, heads, d, dtype)
    do = xs.pop("do")
    attrs = {"scale": d**-0.5, **attrs}
    forward = _on_device(call_of({**xs, **more}, writes=(0, 1), **attrs))
    o, lse = bind_reference(forward)(*xs.values(), *more.values())
    given = {**xs, **more, "o": o, "lse": lse, "do": do}
    back = _on_device(call_of(given, writes=(0, 1, 2), backward=True, **attrs))
    return forward, back, {**xs, **more}, given


def _on_device(call: Call) -> Call:
    object.__setattr__(call, "device", CUDA)
    return call


def _bound(call: Call) -> Callable[..., Any]:
    kernel = BY_NAME[f"flash.{call.node.prim.name}"]
    assert kernel.reason(call) is None
    return kernel.bind(call)


@pytest.mark.parametrize("name", CASES)
def test_both_directions(name: str) -> None:
    forward, back, xs, given = _calls(name)
    o, lse = _bound(forward)(*xs.values())
    assert_close(o, given["o"], rtol=0.02, atol=0.01)
    assert_close(lse, given["lse"], rtol=1e-3, atol=1e-3)
    wanted = bind_reference(back)(*given.values())
    for x, y in zip(_bound(back)(*given.values()), wanted, strict=True):
        assert x.shape == y.shape
        assert_close(x, y, rtol=0.02, atol=0.02 * float(y.abs().max()))


@pytest.mark.parametrize(
    ("lengths", "band"),
    [(None, Band(127, 0)), (None, CAUSAL), (None, Band()), ([0, 300, 1, 900], ENDING)],
    ids=str,
)
def test_a_sink_of_any_size(lengths: list[int] | None, band: Band) -> None:
    attrs: dict[str, Any] = {"band": band, "scale": 0.125}
    more, rows = ({}, 0) if lengths is None else _packed(lengths, 3)
    attrs |= {"layout": "thd", "kv_layout": "thd"} if lengths else {}
    xs = _tensors((rows,) if lengths else (2, 1100), (16, 2), 128, BF16)
    del xs["do"]
    xs |= {**more, "sink": torch.linspace(-5.0, 150.0, 16, device=CUDA)}
    call = _on_device(call_of(xs, writes=(0, 1), **attrs))
    runtime.wait([spec_of(problem_of(call))], "sm_90", CUDA)
    for x, y in zip(_bound(call)(*xs.values()), bind_reference(call)(*xs.values()), strict=True):
        assert_close(x, y, rtol=0.02, atol=0.01)


def test_rows_of_no_sequence_may_hold_anything() -> None:
    forward, back, xs, given = _calls("packed")
    outside = given["lse"][0] == torch.inf
    spoiled = {n: x.clone() for n, x in given.items()}
    for name in ("q", "k", "v", "do"):
        spoiled[name][outside] = torch.nan
    o, lse = _bound(forward)(*[spoiled[name] for name in xs])
    assert torch.equal(o, _bound(forward)(*xs.values())[0])
    assert not o[outside].any()
    assert (lse[:, outside] == torch.inf).all()
    for x in _bound(back)(*spoiled.values()):
        assert x.isfinite().all()
        assert not x[outside].any()


def test_captured() -> None:
    forward, back, xs, given = _calls("window")
    launches = [_bound(forward), _bound(back)]
    o = launches[0](*xs.values())[0]
    dq = launches[1](*given.values())[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launches[0](*xs.values())[0], launches[1](*given.values())[0]
    for name in xs:
        xs[name].copy_(xs[name].clone())
    graph.replay()
    assert torch.equal(captured[0], o)
    assert_close(captured[1], dq, rtol=1e-2, atol=1e-3)


@te.pointwise
def tilted(s: Any, i: Any, j: Any, slope: float) -> Any:
    """A modifier of a user's."""
    return s + slope * (j - i)


@pytest.mark.parametrize(
    "options", [{"logits_soft_cap": 5.0}, {"score_mod": tilted(0.01)}], ids=str
)
def test_an_op_with_a_modifier(options: dict[str, Any]) -> None:
    op = te.Attention(4, 2, **options).to(CUDA)
    xs = _tensors((2, 256), (4, 2), 64, BF16)
    do = xs.pop("do")
    found = []
    for hidden in ((), ("flash.",)):
        leaves = [x.clone().requires_grad_() for x in xs.values()]
        with REGISTRY.without(*hidden or ("none.",)):
            assert ("flash." in op.explain(*leaves).partition("refused")[0]) == (not hidden)
            o = op(*leaves)
            o.backward(do)
        found.append([o, *(x.grad for x in leaves)])
    for x, y in zip(*found, strict=True):
        assert_close(x, y, rtol=0.02, atol=0.02 * float(y.abs().max()))


def test_deterministic_gradients_are_left_to_others() -> None:
    _, back, _, given = _calls("causal, shared keys")
    launch = _bound(back)
    torch.use_deterministic_algorithms(True)
    try:
        assert "order" in (BY_NAME["flash.attention_backward"].reason(back) or "")
        first, second = launch(*given.values()), launch(*given.values())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
