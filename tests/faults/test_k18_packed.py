"""K18: packed (THD) sequences and padding between sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.registry import REGISTRY
from tests.faults.attention import DEVICES, explicit, offsets, qkv

pytestmark = pytest.mark.parametrize("device", DEVICES)


@dataclass(frozen=True, kw_only=True)
class Quantized(te.Recipe):
    """Attention operands in FP8, by the quantizer of another recipe."""

    of: te.Recipe

    def quantizer(self, role: te.Role) -> te.Quantizer | None:
        if not role.prim.startswith("attention"):
            return None
        operand = "grad_output" if role.is_grad else "input"
        return self.of.quantizer(te.Role("gemm", role.phase, operand, role.path))


RECIPES: dict[str, te.Recipe] = {
    "current": Quantized(of=te.recipe.Float8CurrentScaling()),
    "mxfp8": Quantized(of=te.recipe.MXFP8BlockScaling()),
    "block": Quantized(of=te.recipe.Float8BlockScaling()),
    "delayed, fp8_dpa": te.recipe.DelayedScaling(fp8_dpa=True),
    "current, fp8_dpa": te.recipe.Float8CurrentScaling(fp8_dpa=True),
    "block, fp8_dpa": te.recipe.Float8BlockScaling(fp8_dpa=True),
    "mxfp8, fp8_dpa": te.recipe.MXFP8BlockScaling(fp8_dpa=True),
    "nvfp4, fp8_dpa": te.recipe.NVFP4BlockScaling(fp8_dpa=True),
}


@pytest.mark.parametrize("name", [None, *RECIPES])
def test_b100_padded_places_with_quantized_operands(device: str, name: Any) -> None:
    """Real [0, 5, 12], places [0, 8, 24]: 24 rows come out, pad rows 0, real rows as unquantized ones."""
    q, k, v = (
        x[0].detach() for x in qkv(1, 24, 24, 4, 2, d=32, dtype=torch.float32, device=device)
    )
    inside = torch.zeros(24, dtype=torch.bool, device=device)
    inside[0:5] = inside[8:15] = True
    for x in (q, k, v):
        x[~inside] = 0.0
        x.requires_grad_()
    op = te.Attention(4, 2, qkv_format="thd", attn_mask_type="padding_causal")
    sequences = te.PackedSequences([0, 5, 12], cu_q_padded=[0, 8, 24], device=device)
    recipe = None if name is None else RECIPES[name]
    for _ in range(2):  # delayed scaling has a scale from the second call on
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            o = op(q, k, v, sequences)
        grads = torch.autograd.grad(o, (q, k, v), torch.randn_like(o))
    assert o.shape == (24, 4, 32)
    for x in (o, *grads):
        assert torch.equal(x[~inside], torch.zeros_like(x[~inside]))
        assert bool(x.isfinite().all())
    noise = 1e-5 if name is None else 0.1
    for a, n in ((0, 5), (8, 7)):
        want, _ = explicit(*(x[None, a : a + n] for x in (q, k, v)), (offsets(n, n) > 0).to(device))
        error = (o[a : a + n].detach().double() - want[0].detach()).norm() / want.detach().norm()
        assert float(error) < noise


@pytest.mark.parametrize("cu", [[0, 512, 512, 1024], [0, 0, 7], [0, 7, 7], [0, 0, 0, 3, 3, 3]])
def test_b102_a_duplicate_entry_is_an_empty_sequence(device: str, cu: list[int]) -> None:
    """Attention and RoPE alike, with the gradients of the sequences that there are."""
    t = cu[-1]
    x = torch.randn(t, 2 * 3 * 8, dtype=torch.float64, device=device, requires_grad=True)
    model = te.Attention(2, packed=True, qkv_format="thd", rotary=te.RoPE(8, qkv_format="thd"))
    y = model(x, te.PackedSequences(cu, device=device))
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    distinct = sorted(set(cu))
    alone = te.Attention(2, packed=True, rotary=te.RoPE(8))
    for a, b in pairwise(distinct):
        part = x.detach()[None, a:b].requires_grad_()
        want = alone(part)
        torch.testing.assert_close(y[a:b], want[0])
        torch.testing.assert_close(dx[a:b], torch.autograd.grad(want, part, dy[None, a:b])[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b019_rows_behind_the_last_sequence_reach_nothing(device: str, dtype: torch.dtype) -> None:
    """64 rows allocated, 37 in sequences, NaN behind: the 37 are those of a tensor of that size, the rest are 0."""
    gen = torch.Generator().manual_seed(0)
    drawn = [torch.randn(64, 2, 64, generator=gen).to(device, dtype) for _ in range(4)]
    sequences = te.PackedSequences([0, 20, 37], device=device)
    op = te.Attention(2, qkv_format="thd", attn_mask_type="padding_causal")
    exact = [x[:37].clone().requires_grad_() for x in drawn[:3]]
    for x in drawn:
        x[37:] = torch.nan
    *xs, do = drawn
    for x in xs:
        x.requires_grad_()
    y, wanted = op(*xs, sequences), op(*exact, sequences)
    found = (y, *torch.autograd.grad(y, xs, do))
    right = (wanted, *torch.autograd.grad(wanted, exact, do[:37]))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a[:37], b)
        assert torch.equal(a[37:], torch.zeros_like(a[37:]))


@pytest.mark.parametrize(
    "recipe", [None, te.recipe.Float8CurrentScaling(fp8_dpa=True)], ids=["", "fp8"]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_b019_a_sequence_that_is_not_finite_spoils_no_other(
    device: str, where: str, value: float, recipe: te.Recipe | None
) -> None:
    """Three without gaps, by the reference and by cuDNN; docs/guide/attention.md says what flash-attn's kernels do."""
    gen = torch.Generator().manual_seed(0)
    drawn = {
        n: torch.randn(256, 2, 64, generator=gen).to(device, torch.bfloat16)
        for n in ("q", "k", "v", "do")
    }
    if recipe is not None and math.isinf(value):
        pytest.skip("the amax of the tensor sees it: one scale for all sequences")
    drawn[where][100:200] = value
    sequences = te.PackedSequences([0, 100, 200, 256], device=device)
    xs = [drawn[n].requires_grad_() for n in ("q", "k", "v")]
    op = te.Attention(2, qkv_format="thd", attn_mask_type="padding_causal")
    with REGISTRY.without("flash."), te.autocast(recipe is not None, recipe=recipe):
        y = op(*xs, sequences)
        found = (y, *torch.autograd.grad(y, xs, drawn["do"]))
    for x in found:
        assert bool(torch.cat([x[:100], x[200:]]).isfinite().all())
