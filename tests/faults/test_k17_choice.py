"""K17: attention backend choice and error reporting."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.basic.attention_core import ATTENTION
from te_ops.basic.attention_form import Form
from te_ops.registry import REGISTRY, ArchRange, Call, Kernel
from tests.faults.attention import DEVICES, explicit, offsets, qkv


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b094_mla_heads_of_packed_tokens_run_everywhere(device: str, dtype: torch.dtype) -> None:
    """q, k (37, 4, 192), v (37, 4, 128), thd, padding_causal, forward and backward."""
    q, k, v = (
        x[0].detach().requires_grad_()
        for x in qkv(1, 37, 37, 4, 4, d=(192, 128), dtype=dtype, device=device)
    )
    op = te.Attention(4, attn_mask_type="padding_causal", qkv_format="thd")
    sequences = te.PackedSequences([0, 20, 37], device=device)
    o = op(q, k, v, sequences)
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, (q, k, v), do)
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for a, b in ((0, 20), (20, 37)):
        exact = [x.detach()[None, a:b].double().requires_grad_() for x in (q, k, v)]
        hidden = (offsets(b - a, b - a) > 0).to(device)
        want, _ = explicit(*exact, hidden)
        torch.testing.assert_close(o[None, a:b].double(), want, rtol=tolerance, atol=tolerance)
        wants = torch.autograd.grad(want, exact, do[None, a:b].double())
        for got, right in zip(grads, wants, strict=True):
            torch.testing.assert_close(
                got[None, a:b].double(), right, rtol=tolerance, atol=tolerance
            )
    text = op.explain(q, k, v, sequences)
    assert "attention" in text


def _kernel(name: str, refuse: Any = None, bind: Any = None) -> Kernel:
    def no_bind(call: Call) -> Any:
        raise AssertionError("a kernel that refused was bound")

    return Kernel(
        "attention",
        name,
        bind or no_bind,
        ArchRange("any"),
        9,
        refuse=refuse or (lambda call: None),
    )


def test_b094_the_reason_of_every_kernel_that_refused_is_shown() -> None:
    """And the reference runs."""
    REGISTRY.add(_kernel("picky.one", lambda call: "head dimension 192 is too large for it"))
    REGISTRY.add(_kernel("picky.two", lambda call: "it is never in the mood"))
    try:
        q, k, v = qkv(1, 4, 4, d=(192, 128))
        op = te.Attention(2)
        text = op.explain(q, k, v)
        for name, reason in (("picky.one", "192 is too large"), ("picky.two", "never in the mood")):
            assert name in text
            assert reason in text
        torch.testing.assert_close(op(q, k, v), explicit(q, k, v, offsets(4, 4) > 0)[0])
    finally:
        REGISTRY.remove("picky.one")
        REGISTRY.remove("picky.two")


def test_b096_a_kernel_that_is_broken_is_not_one_that_refused() -> None:
    def bind(call: Call) -> Any:
        raise RuntimeError("the library is broken")

    REGISTRY.add(_kernel("broken.one", bind=bind))
    try:
        with pytest.raises(RuntimeError, match="the library is broken"):
            te.Attention(2)(*qkv(1, 4, 4))
    finally:
        REGISTRY.remove("broken.one")


FIELDS: dict[str, tuple[Any, Any]] = {
    "attn_mask_type": ("causal", "no_mask"),
    "window_size": (None, (2, 0)),
    "bottom_right_diagonal": (None, True),
    "softmax_scale": (None, 0.5),
    "attention_dropout": (0.0, 0.5),
    "core_attention_bias_type": ("no_bias", "alibi"),
    "softmax_type": ("vanilla", "off-by-one"),
    "logits_soft_cap": (None, 2.0),
    "kv_channels": (None, 8),
    "return_lse": (False, True),
    "return_max_logit": (False, True),
    "qkv_format": ("bshd", "sbhd"),
}


@pytest.mark.parametrize("field", list(FIELDS))
def test_b098_calls_that_differ_in_one_field_are_decided_apart(field: str) -> None:
    q, k, v = qkv(6, 6, 6, dtype=torch.float32)
    plans = [te.Attention(2, **{field: value}).plan(q, k, v) for value in FIELDS[field]]
    assert plans[0] is not plans[1]
    again = te.Attention(2, **{field: FIELDS[field][1]}).plan(q, k, v)
    assert again is plans[1]  # equal ops share a plan: what differs is the field alone


def test_b098_and_so_are_dtype_gradients_training_and_determinism() -> None:
    q, k, v = qkv(6, 6, 6, dtype=torch.float32)
    op = te.Attention(2, attention_dropout=0.5)
    plans = [
        op.plan(q, k, v),
        op.plan(*(x.bfloat16() for x in (q, k, v))),
        op.plan(q.detach(), k, v),
    ]
    with torch.no_grad():
        plans.append(op.plan(q, k, v))
    op.eval()
    plans.append(op.plan(q, k, v))
    torch.use_deterministic_algorithms(True)
    try:
        plans.append(op.plan(q, k, v))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len({id(plan) for plan in plans}) == len(plans)


def test_b098_every_attribute_of_the_node_is_in_its_key() -> None:
    q, k, v = qkv(1, 4, 4)
    plan_attrs = set(inspect.signature(Form).parameters)
    from tests.basic.interp import program

    node = next(
        n for n in program(te.Attention(2), q, k, v, given=[False]).g.nodes if n.prim is ATTENTION
    )
    assert set(node.attrs) == plan_attrs
    assert {name for name, _ in node.attrs.key} == plan_attrs
