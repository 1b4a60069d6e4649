"""Norms of heads in a packed tensor: those of each part on its own, forward and backward."""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from te_ops.basic.heads_norm import NORM_HEADS, NORM_HEADS_BACKWARD
from te_ops.basic.norm import L2NORM, RMSNORM
from te_ops.errors import ShapeError
from te_ops.graph import Graph, Spec
from te_ops.registry import REGISTRY

PARTS = ((4, 8), (2, 8), (2, 8))
NORMED = (True, True, False)


def norms(kind: str) -> dict[str, te.Op]:
    torch.manual_seed(0)
    made = [te.RMSNorm(8) if kind == "rms" else te.L2Normalization() for _ in range(2)]
    for op in made:
        for p in op.parameters():
            torch.nn.init.normal_(p, 1.0, 0.2)
    return {"q_norm": made[0], "k_norm": made[1]}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["rms", "l2"])
def test_attention_is_the_same_whichever_tensor_its_heads_are_normalised_in(
    kind: str, before: bool
) -> None:
    """The joint rule moves norms and rotations into the packed tensor; without it they run head by head."""
    options = {"packed": True, "rotary": te.RoPE(8), "qk_norm_before_rope": before}
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    found = []
    for rules in (("packed_heads",), ()):
        op = te.Attention(4, 2, **options, **norms(kind)).double()
        leaf = x.clone().requires_grad_()
        with REGISTRY.only(*rules):
            y = op(leaf)
            plan = op.plan(leaf).to_dict()
        y.square().sum().backward()
        names = [n for s in plan["segments"] for step in s["forward"] for n in step["nodes"]]
        assert ("norm_heads" in names) is bool(rules)
        assert ("rope_heads" in names) is bool(rules)
        found.append([y.detach(), leaf.grad, *(p.grad for p in op.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_one_table_serves_queries_and_keys_of_a_fixed_shape() -> None:
    op = te.Sequential(
        te.Reshape((4, 8, 32)),
        te.Linear(32, 96),
        te.Attention(2, packed=True, rotary=te.RoPE(16)),
    )
    plan = op.plan(torch.randn(32, 32)).to_dict()
    names = [n for s in plan["segments"] for step in s["forward"] for n in step["nodes"]]
    assert names.count("rope_table") == names.count("rope_heads") == 1


def test_heads_that_turn_in_two_ways_stay_apart() -> None:
    """Query and key rotations of their own, over views of one tensor."""

    class Two(te.Op):
        def __init__(self) -> None:
            super().__init__()
            self.attention = te.Attention(2, packed=True, rotary=te.RoPE(16))
            self.q, self.k = te.RoPE(16), te.RoPE(16, base=500.0)

        def emit(self, g, x):  # type: ignore[no-untyped-def]
            from te_ops.basic.heads import pack_heads, unpack_heads

            q, k = unpack_heads(g, x, ((2, 16), (2, 16)))
            return pack_heads(g, (self.q.emit(g, q), self.k.emit(g, k)))

    op, x = Two(), torch.randn(2, 5, 64)
    y = op(x)
    names = [s.name for s in op.plan(x).segments[0].forward_steps]
    assert names.count("rope") == 2
    q, k = (part.unflatten(-1, (2, 16)) for part in x.chunk(2, -1))
    assert torch.equal(y, torch.cat((op.q(q).flatten(2), op.k(k).flatten(2)), -1))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_references_are_those_of_each_part(zero_centered: bool) -> None:
    x, dy = torch.randn(2, 3, 5, 64)
    gammas = [torch.rand(8) + 0.5 for _ in range(2)]
    attrs = {"parts": PARTS, "normed": NORMED, "zero_centered": zero_centered}
    y, scale = NORM_HEADS.reference(x, *gammas, eps=1e-5, **attrs)
    leaf = x.clone().requires_grad_()
    weights = [g.clone().requires_grad_() for g in gammas]
    q, k, v = leaf.split((32, 16, 16), -1)
    made = []
    for part, gamma in zip((q, k), weights, strict=True):
        heads = part.unflatten(-1, (-1, 8))
        right, r = RMSNORM.reference(heads.detach(), gamma.detach(), 1e-5, zero_centered)
        rstd = torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5)
        made.append((heads * rstd * (gamma + 1 if zero_centered else gamma)).flatten(-2))
        torch.testing.assert_close(made[-1], right.flatten(-2))
        torch.testing.assert_close(rstd.squeeze(-1), r)
    torch.testing.assert_close(y, torch.cat((*made, v), -1))
    assert scale.shape == (3, 5, 6)
    torch.autograd.backward((torch.cat((*made, v), -1),), (dy,))
    dx, *dgammas = NORM_HEADS_BACKWARD.reference(dy, x, scale, *gammas, **attrs)
    for a, b in zip((dx, *dgammas), (leaf.grad, *(w.grad for w in weights)), strict=True):
        torch.testing.assert_close(a, b)


def test_without_gammas_heads_have_length_one() -> None:
    x = torch.randn(3, 64)
    attrs = {"parts": PARTS, "normed": NORMED, "zero_centered": False}
    y, _ = NORM_HEADS.reference(x, eps=1e-6, **attrs)
    right, _ = L2NORM.reference(x[:, :32].unflatten(-1, (4, 8)), 1e-6)
    assert torch.equal(y[:, :32].unflatten(-1, (4, 8)), right)
    assert torch.equal(y[:, 48:], x[:, 48:])


def test_wrong_sizes_are_refused_in_words() -> None:
    g = Graph()
    x = g.input(0, Spec((3, 60), torch.float32))
    attrs = {"parts": PARTS, "normed": NORMED, "eps": 1e-6, "zero_centered": False}
    with pytest.raises(ShapeError, match=r"norm_heads: .*does not hold"):
        g.calls(NORM_HEADS, x, **attrs)
    x = g.input(1, Spec((3, 64), torch.float32))
    gammas = [g.input(i, Spec((n,), torch.float32)) for i, n in ((2, 8), (3, 4))]
    with pytest.raises(ShapeError, match=r"heads have \[8, 8\] features"):
        g.calls(NORM_HEADS, x, *gammas, **attrs)
