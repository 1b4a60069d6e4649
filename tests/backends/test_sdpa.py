"""torch's attention kernels: what is refused, and what their operators are given, by stand-ins on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_ops.backends import sdpa
from te_ops.backends.reference.kernels import bind_reference
from te_ops.basic.band import Band
from te_ops.registry import Call, Kernel
from te_ops.testing import assert_close
from tests.backends.cudnn.calls import both, call_of
from tests.backends.cudnn.problems import LENS, MASK, Case

CAUSAL = Band(right=0)
FORWARD = {k.name.split(".")[1].split("_")[0]: k for k in sdpa.KERNELS if k.runs == "attention"}
BACKWARD = {
    k.name.split(".")[1].split("_")[0]: k for k in sdpa.KERNELS if k.runs == "attention_backward"
}


class Operator:
    """A stand-in for one of torch's operators, over [b, h, s, d]."""

    def __init__(self, run: Any) -> None:
        self.default = run


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = scale * q.double() @ k.transpose(2, 3)
    return s.masked_fill(torch.ones(s.shape[2:]).triu(1).bool(), -torch.inf) if causal else s


def _forward(qkv: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    q, k, v = qkv
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    s = _scores(q, k, scale, causal)
    values = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (s.softmax(-1) @ values).to(q.dtype), s.logsumexp(-1).float()


def _backward(given: Any, lse: Any, scale: float, causal: bool) -> Any:
    do, *qkv = given
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    with torch.enable_grad():
        s = _scores(leaves[0], leaves[1], scale, causal)
        assert_close(s.logsumexp(-1).float(), lse, rtol=0.01, atol=0.05)
        values = leaves[2].repeat_interleave(qkv[0].shape[1] // qkv[2].shape[1], 1)
        grads = torch.autograd.grad(s.softmax(-1) @ values, leaves, do.double())
    return tuple(g.to(do.dtype) for g in grads)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """torch's operators, counted."""
    calls = {"cudnn": 0, "flash": 0}

    def cudnn(*given: Any, scale: float) -> Any:
        *qkv, bias, wanted, p, causal, debug = given
        assert (bias, wanted, p, debug) == (None, True, 0.0, False)
        calls["cudnn"] += 1
        o, lse = _forward(qkv, scale, causal)
        return o, lse.unsqueeze(-1)

    def flash(*given: Any, scale: float) -> Any:
        *qkv, p, causal, debug = given
        assert (p, debug) == (0.0, False)
        calls["flash"] += 1
        return _forward(qkv, scale, causal)

    def cudnn_back(*given: Any, scale: float) -> Any:
        do, q, k, v, _, lse, _, _, bias, cu_q, cu_k, s_q, s_kv, p, causal = given
        assert (bias, cu_q, cu_k, s_q, s_kv, p) == (None, None, None, q.shape[2], k.shape[2], 0.0)
        calls["cudnn"] += 1
        return _backward((do, q, k, v), lse.squeeze(-1), scale, causal)

    def flash_back(*given: Any, scale: float) -> Any:
        do, q, k, v, _, lse, cu_q, cu_k, s_q, s_kv, p, causal, _, _ = given
        assert (cu_q, cu_k, s_q, s_kv, p) == (None, None, q.shape[2], k.shape[2], 0.0)
        calls["flash"] += 1
        return _backward((do, q, k, v), lse, scale, causal)

    for family, forward, backward in (("cudnn", cudnn, cudnn_back), ("flash", flash, flash_back)):
        name = f"_scaled_dot_product_{family}_attention"
        monkeypatch.setattr(torch.ops.aten, name, Operator(forward))
        monkeypatch.setattr(torch.ops.aten, f"{name}_backward", Operator(backward))
    return calls


def _operands(layout: str, s: int, s_kv: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    whole = torch.randn(2, max(s, s_kv), 8, 16).bfloat16()
    parts = whole.split([4, 2, 2], 2)
    xs = {name: x[:, :n] for name, x, n in zip("qkv", parts, (s, s_kv, s_kv), strict=True)}
    do = torch.randn(2, s, 4, 16).bfloat16()
    if layout == "sbhd":
        xs = {name: x.transpose(0, 1).contiguous() for name, x in xs.items()}
        do = do.transpose(0, 1)
    return xs, do


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("band", [Band(), CAUSAL])
@pytest.mark.parametrize("family", ["cudnn", "flash"])
def test_like_the_reference(
    operators: dict[str, int], family: str, band: Band, layout: str
) -> None:
    xs, do = _operands(layout, 12, 12 if family == "flash" and band == CAUSAL else 20)
    attrs = {"scale": 0.3, "band": band, "layout": layout, "kv_layout": layout}
    got = both((FORWARD[family].bind, BACKWARD[family].bind), xs, do, **attrs)
    wanted = both((bind_reference, bind_reference), xs, do, **attrs)
    for name, x in wanted.items():
        assert got[name].shape == x.shape
        assert_close(got[name].float(), x.float(), rtol=0.05, atol=0.02, name=name)
    assert operators[family] == 2


def test_sizes_that_a_family_does_not_take_go_to_the_reference(operators: dict[str, int]) -> None:
    xs, _ = _operands("bshd", 12, 12)
    call = call_of(xs, writes=(0, 1), scale=0.3, band=CAUSAL)
    launched, wanted = FORWARD["flash"].bind(call), bind_reference(call)
    other, _ = _operands("bshd", 8, 12)
    for a, b in zip(launched(*other.values()), wanted(*other.values()), strict=True):
        assert torch.equal(a, b)
    assert operators["flash"] == 0


def _reason(kernel: Kernel, case: Case) -> str | None:
    attrs = {"scale": 0.125, **case.attrs}
    writes = (0, 1, 2) if case.backward else case.writes
    call: Call = call_of(case.operands(), writes=writes, backward=case.backward, **attrs)
    return kernel.refuse(call)


DLSE = (("dlse", (2, 4, 256), torch.float32),)
REFUSED = {
    "dense BF16 or FP16": Case(dtype=torch.float32),
    "no kv_lens, q_lens": Case(more=LENS),
    "no mask": Case(more=MASK),
    "no dlse": Case(more=DLSE, backward=True),
    "no score modifier, no dropout": Case(
        more=(("seed", (), torch.int64),), attrs={"dropout": 0.1}
    ),
    "largest scores": Case(writes=(0, 1, 2)),
    "size zero": Case(b=0),
    "divide by 8": Case(d=(60, 60)),
    "starts at the first key": Case(attrs={"band": Band(7, 0)}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    kernels = BACKWARD if REFUSED[reason].backward else FORWARD
    for kernel in kernels.values():
        found = _reason(kernel, REFUSED[reason])
        assert found is not None
        assert reason in found


def test_what_the_families_differ_in() -> None:
    for case, taken in (
        (Case(d=(64, 32)), {"cudnn"}),
        (Case(d=(256, 256)), {"flash"}),
        (Case(s=(128, 256), attrs={"band": CAUSAL}), {"cudnn"}),
        (Case(s=(128, 256)), {"cudnn", "flash"}),
        (Case(s=(1, 1)), {"flash"}),
        (Case(s=(1, 256)), {"cudnn", "flash"}),
        (Case(attrs={"band": Band(right=0, diagonal="bottom_right")}), {"cudnn", "flash"}),
    ):
        assert {name for name, k in FORWARD.items() if _reason(k, case) is None} == taken
