"""Attention through cuDNN and through torch on a device, against the reference there."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.cudnn import launch, launch_whole, library, plans
from te_ops.errors import PlanError
from te_ops.registry import REGISTRY

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("frontend")]
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16
H, HK = 4, 2
FEW = "cuda.attention_few"  # which is preferred where there are few queries
FUSED = ("cudnn.", "sdpa.", FEW)
Inputs = tuple[list[torch.Tensor], list[Any]]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CUDA).to(BF16)


def dense(s: int = 256, s_kv: int = 0, *, b: int = 2, d: int = 64) -> Inputs:
    keys = s_kv or s
    return [rand(b, s, H, d), rand(b, keys, HK, d), rand(b, keys, HK, d)], []


def first() -> Inputs:
    xs, _ = dense()
    return [x.transpose(0, 1).contiguous() for x in xs], []


def biased(value: float, s: int, s_kv: int) -> Inputs:
    xs, _ = dense(s, s_kv)
    return [*xs, (0.1 * torch.randn(1, H, s, s_kv, device=CUDA) + value).to(BF16)], []


def hidden_row() -> Inputs:
    xs, _ = biased(0.0, 256, 256)
    xs[3][0, :, 7] = -math.inf
    return xs, []


def holes() -> Inputs:
    mask = torch.rand(2, 1, 256, 256, device=CUDA) < 0.5
    mask[0, 0, 5] = True
    return dense()[0], [mask]


def padded(*lens: int) -> Inputs:
    xs, _ = dense(b=len(lens))
    for e, n in enumerate(lens):
        for x in xs:
            x[e, n:] = math.nan
    return xs, [torch.tensor(lens, device=CUDA)]


def packed(cu: list[int], places: list[int], cu_kv: list[int] | None = None) -> Inputs:
    keys = (cu_kv or places)[-1]
    xs = [rand(places[-1], H, 64), rand(keys, HK, 64), rand(keys, HK, 64)]
    gap = torch.ones(places[-1], dtype=torch.bool, device=CUDA)
    for i in range(len(cu) - 1):
        gap[places[i] : places[i] + cu[i + 1] - cu[i]] = False
    for x in xs if cu_kv is None else xs[:1]:
        x[gap] = math.nan
    return xs, [te.PackedSequences(cu, cu_kv, cu_q_padded=places, device=CUDA)]


BIAS = {"core_attention_bias_type": "post_scale_bias"}
FULL = {"attn_mask_type": "no_mask"}
CASES: dict[str, tuple[Callable[[], Inputs], dict[str, Any]]] = {
    "causal": (dense, {}),
    "full, 128 features": (lambda: dense(384, d=128), FULL),
    "sequence first": (first, {"qkv_format": "sbhd"}),
    "window": (dense, {"window_size": (37, 0)}),
    "last keys": (lambda: dense(100, 256), {"attn_mask_type": "causal_bottom_right"}),
    "one query": (lambda: dense(1, 128), FULL),
    "low scores": (lambda: biased(-120.0, 256, 192), {**FULL, **BIAS}),
    "low scores, causal": (lambda: biased(-120.0, 320, 320), BIAS),
    "low scores, one query": (lambda: biased(-120.0, 1, 128), {**FULL, **BIAS}),
    "bias that hides a row": (hidden_row, {**FULL, **BIAS}),
    "mask that hides a row": (holes, {"attn_mask_type": "arbitrary"}),
    "alibi": (dense, {"core_attention_bias_type": "alibi"}),
    "sink": (dense, {"softmax_type": "learnable"}),
    "largest score": (dense, {"return_max_logit": True}),
    "padding": (lambda: padded(256, 0, 77, 1), {"attn_mask_type": "padding_causal"}),
    "packed": (lambda: packed([0, 100, 100, 300, 301], [0, 128, 128, 400, 512]), {"qkv_format": "thd"}),
    "packed, rows without keys": (
        lambda: packed([0, 100, 200, 300], [0, 100, 200, 300], [0, 40, 300, 300]),
        {"qkv_format": "thd", "attention_type": "cross", "attn_mask_type": "padding_causal_bottom_right"},
    ),
}  # fmt: skip


def step(op: te.Attention, inputs: Inputs) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs[0]]
    o, *more = op(*leaves, *inputs[1])
    do = torch.cos(torch.arange(o.numel(), device=CUDA, dtype=torch.float32)).view(o.shape).to(o)
    return [
        x.detach() for x in (o, *more, *torch.autograd.grad(o, [*leaves, *op.parameters()], do))
    ]


def near(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a.isfinite(), b.isfinite()), i
        a, b = (torch.where(x.isfinite(), x, 0.0).double() for x in (a, b))
        assert (a - b).norm() <= 0.02 * b.norm().clamp(min=0.02 * a.numel() ** 0.5), i


@pytest.mark.parametrize("name", CASES)
def test_like_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = CASES[name]
    inputs = make()
    op = te.Attention(H, HK, return_lse=True, **options).to(CUDA)
    ran: list[int] = []
    run = library.Built.run
    monkeypatch.setattr(library.Built, "run", lambda self, *xs: (ran.append(1), run(self, *xs))[1])
    with REGISTRY.without(FEW):
        got = step(op, inputs)
    assert len(ran) == 2, "cuDNN did not run both directions"
    with REGISTRY.without(*FUSED):
        near(got, step(op, inputs))


@pytest.mark.parametrize("kind", ["padding_causal", "padding"])
@pytest.mark.parametrize("d", [64, 128])
def test_packed_without_gaps(kind: Any, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issued as addresses: each table of lengths is read."""
    monkeypatch.setenv("TE_OPS_CUDNN_WHOLE", "1")
    ran: list[int] = []
    run = launch_whole.Whole.run
    monkeypatch.setattr(
        launch_whole.Whole, "run", lambda self, *xs: (ran.append(1), run(self, *xs))[1]
    )
    op = te.Attention(H, HK, return_lse=True, qkv_format="thd", attn_mask_type=kind).to(CUDA)
    xs = [rand(512, n, d) for n in (H, HK, HK)]
    for cu in ([0, 100, 300, 512], [0, 129, 130, 512], [0, 100, 300, 512]):
        inputs: Inputs = (xs, [te.PackedSequences(cu, device=CUDA)])
        for _ in range(2):
            got = step(op, inputs)
        with REGISTRY.without(*FUSED):
            near(got, step(op, inputs))
    assert len(ran) >= 6


@pytest.mark.parametrize("hidden", [("cudnn.",), ("cudnn.", "sdpa.cudnn")], ids=["cudnn", "flash"])
@pytest.mark.parametrize("options", [{}, FULL], ids=["causal", "full"])
def test_through_torch(hidden: tuple[str, ...], options: dict[str, Any]) -> None:
    op = te.Attention(H, HK, return_lse=True, **options).to(CUDA)
    inputs = dense()
    with REGISTRY.without(*hidden):
        kernels = str(op.plan(*[x.requires_grad_() for x in inputs[0]]).explain())
        assert "sdpa." in kernels
        got = step(op, inputs)
    with REGISTRY.without(*FUSED):
        near(got, step(op, inputs))


def test_shapes_beyond_the_first_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STATIC", 0)
    op = te.Attention(H, HK, return_lse=True).to(CUDA)
    for b, s in ((3, 250), (2, 130)):
        inputs = dense(s, b=b)
        with REGISTRY.temporary():
            got = step(op, inputs)
        with REGISTRY.without(*FUSED):
            near(got, step(op, inputs))


def test_dropout_is_the_same_in_both_directions() -> None:
    """o is linear in v with the dropped probabilities, so <o, do> = <v, dv>."""
    op = te.Attention(H, H, attention_dropout=0.3).to(CUDA).train()
    q, k, v = (rand(2, 256, H, 64).requires_grad_() for _ in range(3))
    o = op(q, k, v)
    do = rand(*o.shape)
    dv = torch.autograd.grad(o, v, do)[0]
    products = o.detach().double() * do.double()
    left, right = products.sum(), (v.detach().double() * dv.double()).sum()
    assert abs(left - right) <= 0.05 * products.norm()
    assert not torch.equal(op(q, k, v), o), "two calls drop the same"
    with torch.no_grad():
        plain = op.eval()(q, k, v)
    assert (o - plain).norm() > 0.01 * plain.norm()


def test_streams_and_threads() -> None:
    op = te.Attention(H, HK).to(CUDA)
    xs, _ = dense()
    with torch.no_grad():
        wanted = op(*xs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            side = op(*xs)
        stream.synchronize()
    assert torch.equal(side, wanted)
    made: list[torch.Tensor] = []

    def other() -> None:
        with torch.no_grad():
            made.append(op(*xs))

    threads = [threading.Thread(target=other) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(made) == 4
    assert all(torch.equal(x, wanted) for x in made)


def test_capture() -> None:
    op = te.Attention(H, HK).to(CUDA)
    xs, _ = dense()
    with torch.no_grad():
        wanted = op(*xs).clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = op(*xs)
        o.zero_()
        plans.forget()
        graph.replay()
        assert torch.equal(o, wanted)
        new = dense(264)[0]
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            new[0].add(1)  # an empty graph is warned of
            with pytest.raises(PlanError, match="capture"):
                op(*new)


def test_determinism() -> None:
    op = te.Attention(H, HK, return_lse=True).to(CUDA)
    inputs = dense(512, d=128)
    torch.use_deterministic_algorithms(True)
    try:
        one, two = step(op, inputs), step(op, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("kind", ["contiguous", "paged", "ring"])
def test_generation(kind: str) -> None:
    """In BF16, by the library, with NaN in every slot that was not written."""
    keywords: dict[str, Any] = {"contiguous": {}, "paged": {"page_size": 8}, "ring": {"window": 9}}
    window = (8, 0) if kind == "ring" else None
    op = te.Attention(H, HK, packed=True, rotary=te.RoPE(32), window_size=window).to(CUDA).eval()
    x = rand(2, 40, (H + 2 * HK) * 32)
    with torch.no_grad():
        want = op(x)
        op.cache = te.KVCache(2, 40, HK, 32, device=CUDA, dtype=BF16, **keywords[kind])
        op.cache.k.fill_(math.nan)
        op.cache.v.fill_(math.nan)
        parts = x.split([25, 1, 1, 13], 1)
        assert "cudnn.attention" in op.explain(parts[1])
        got = torch.cat([op(part) for part in parts], 1)
    near([got], [want])


def test_plans_are_kept_on_disk(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process built is loaded, and issued as directly."""
    monkeypatch.setenv("TE_OPS_PLAN_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    op, inputs = te.Attention(H, HK, return_lse=True).to(CUDA), dense(272)
    plans.forget()
    wanted = step(op, inputs)
    assert len(list(tmp_path.iterdir())) == 2
    plans.forget()
    monkeypatch.setattr(plans.graphs, "build", lambda *_: pytest.fail("a plan is built again"))
    with REGISTRY.temporary():  # new launches
        got = step(op, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got[:2], wanted[:2], strict=True))
    near(got, wanted)
    assert all(built.raw is not None for built in plans._KNOWN.values())  # type: ignore[union-attr]
