"""The rounding contract on whole pipelines: fused plans against unfused ones (contract 8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te
from te_ops.backends.reference import composed
from te_ops.registry import REGISTRY
from tests.runtime.cases import RECIPES, assert_same, gradients


@te.pointwise
def softcap(x, cap: float):  # type: ignore[no-untyped-def]
    return cap * te.math.tanh(x / cap)


PIPELINES: dict[str, Any] = {
    "mlp": lambda: te.Sequential(te.RMSNorm(32), te.Linear(32, 64), te.SwiGLU(), te.Linear(32, 32)),
    "gelu": lambda: te.Sequential(
        te.LayerNorm(32), te.Linear(32, 64), te.GELU(), te.Linear(64, 32)
    ),
    "own": lambda: te.Sequential(
        te.Linear(32, 32), softcap(cap=2.0), te.Linear(32, 32, bias=False), te.ConstantScale(0.5)
    ),
    "residual": lambda: te.Sequential(
        te.Residual(te.RMSNorm(32), te.Linear(32, 32)),
        te.Residual(te.RMSNorm(32), te.Linear(32, 64), te.GEGLU(), te.Linear(32, 32)),
    ),
    "qkv": lambda: te.Sequential(
        te.RMSNorm(32),
        te.Branch(te.Linear(32, 32), te.Linear(32, 32, bias=False), te.Linear(32, 32)),
        te.Add(),
    ),
    "dropout": lambda: te.Sequential(
        te.Linear(32, 32), te.Dropout(0.25), te.Residual(te.SiLU(), te.Linear(32, 32))
    ),
    "main_grad": lambda: te.Sequential(
        te.Linear(32, 64, accumulate_into_main_grad=True),
        te.GELU(),
        te.Linear(64, 32, accumulate_into_main_grad=True),
    ),
    "rotated": lambda: te.Sequential(
        te.Reshape((4, 8, 32)),
        te.Linear(32, 96),
        te.Attention(2, packed=True, rotary=te.RoPE(16)),
        te.Linear(32, 32),
        te.Reshape((32, 32)),
    ),
    "normalised and rotated": lambda: te.Sequential(
        te.Reshape((4, 8, 32)),
        te.Linear(32, 96, bias=False),
        te.Attention(
            2, packed=True, rotary=te.RoPE(8), q_norm=te.RMSNorm(16), k_norm=te.RMSNorm(16),
            qk_norm_before_rope=True,
        ),
        te.Linear(32, 32),
        te.Reshape((32, 32)),
    ),
    "recompute": lambda: te.Sequential(
        te.Linear(32, 32),
        te.Recompute(te.Linear(32, 64), te.GELU(), te.Linear(64, 32)),
        te.RMSNorm(32),
    ),
}  # fmt: skip


ATTENTION = "current, attention too"


@contextmanager
def fused(exact: bool) -> Iterator[None]:
    """Every rule of the package has a kernel: the composition of its members."""
    rules = [replace(rule, exact=rule.exact or exact) for rule in te.fused.RULES]
    with REGISTRY.temporary(*rules, *(composed(rule) for rule in rules)):
        yield


def give_main_grads(model: te.Op) -> dict[str, Tensor]:
    """An FP32 main_grad for each weight that wants one, by name."""
    made: dict[str, Tensor] = {}
    for path, op in model.named_modules():
        if isinstance(op, te.Linear) and op.accumulate_into_main_grad:
            made[f"{path}.main_grad"] = op.weight.main_grad = torch.zeros_like(
                op.weight, dtype=torch.float32
            )
    return made


def run(
    name: str, recipe: str, dtype: torch.dtype, frozen: bool = False
) -> tuple[dict[str, Tensor], set[str]]:
    """Outputs, gradients and state of two steps, and the rules that fused."""
    torch.manual_seed(5)
    model = PIPELINES[name]().to(dtype)
    if frozen:
        model.requires_grad_(False)
    main_grads = give_main_grads(model)
    chosen = {**RECIPES, ATTENTION: te.recipe.Float8CurrentScaling(fp8_dpa=True)}[recipe]
    found: dict[str, Tensor] = {}
    for i in range(2):
        model.zero_grad()
        x = torch.randn(32, 32, dtype=dtype, requires_grad=True)
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = model(x)
            plan = model.plan(x)
        y.square().sum().backward()
        assert x.grad is not None
        found |= {
            f"{i} {k}": v for k, v in ({"y": y.detach(), "x": x.grad} | gradients(model)).items()
        }
    found |= dict(model.state_dict()) | main_grads
    steps = [
        s for segment in plan.segments for s in (*segment.forward_steps, *segment.backward_steps)
    ]
    return found, {s.name for s in steps if s.kernel.startswith("reference.composed")}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", PIPELINES)
def test_fused_with_rounded_inner_values_is_unfused_bit_for_bit(name: str, recipe: str) -> None:
    plain, none = run(name, recipe, torch.bfloat16)
    assert none == set()
    with fused(exact=True):
        together, rules = run(name, recipe, torch.bfloat16)
    assert rules
    assert_same(plain, together)


@pytest.mark.parametrize("recipe", ["none", "current", "nvfp4"])
@pytest.mark.parametrize("name", PIPELINES)
def test_in_fp32_nothing_is_rounded_inside_so_bits_are_equal(name: str, recipe: str) -> None:
    plain, _ = run(name, recipe, torch.float32)
    with fused(exact=False):
        together, rules = run(name, recipe, torch.float32)
    assert rules
    assert_same(plain, together)


@pytest.mark.parametrize("name", PIPELINES)
def test_frozen_pipelines_too(name: str) -> None:
    plain, _ = run(name, "mxfp8", torch.bfloat16, frozen=True)
    with fused(exact=True):
        assert_same(plain, run(name, "mxfp8", torch.bfloat16, frozen=True)[0])


def test_unwritten_inner_values_stay_in_fp32() -> None:
    """BF16 GEMM + GELU without gradients: GELU of the FP32 accumulator, rounded once."""
    model = te.Sequential(te.Linear(32, 32, bias=False), te.GELU()).bfloat16()
    x = torch.randn(64, 32).bfloat16()
    acc = x.float() @ model[0].weight.detach().float().t()
    once = torch.nn.functional.gelu(acc, approximate="tanh").bfloat16()
    with torch.no_grad(), fused(exact=False):
        y = model(x)
        assert "gemm_epilogue" in model.explain(x)
    assert torch.equal(y, once)
    with torch.no_grad():
        twice = model(x)
    assert torch.equal(
        twice, torch.nn.functional.gelu(acc.bfloat16().float(), approximate="tanh").bfloat16()
    )
    assert not torch.equal(once, twice)


def test_a_written_inner_value_is_rounded_before_it_is_read() -> None:
    """With gradients the pre-activation is saved, so GELU reads its BF16 value, as unfused."""
    model = te.Sequential(te.Linear(32, 32, bias=False), te.GELU()).bfloat16()
    x = torch.randn(64, 32).bfloat16()
    plain = model(x)
    with fused(exact=False):
        together = model(x)
    assert torch.equal(plain, together)


def test_codes_follow_the_contract() -> None:
    """Codes of GELU from the accumulator and from the rounded value differ; each has its plan."""
    model = te.Sequential(
        te.Linear(32, 32, bias=False), te.GELU(), te.Quantize(quantizer=te.MXFP8Quantizer())
    ).bfloat16()
    x = torch.randn(64, 32).bfloat16()
    acc = x.float() @ model[0].weight.detach().float().t()
    gelu = torch.nn.functional.gelu
    q = te.MXFP8Quantizer()
    with torch.no_grad():
        plain = model(x)
        with fused(exact=False):
            together = model(x)
        with fused(exact=True):
            rounded = model(x)
    inner = gelu(acc.bfloat16().float(), approximate="tanh").bfloat16()
    assert torch.equal(plain, te.quantize(inner, q).dequantize())
    assert torch.equal(rounded, plain)
    assert torch.equal(
        together, te.quantize(gelu(acc, approximate="tanh"), q).dequantize(torch.bfloat16)
    )
    assert not torch.equal(together, plain)


JOINT = tuple(rule.name for rule in te.fused.RULES if rule.stage == "joint")


@pytest.mark.parametrize("rule", [r.name for r in te.fused.RULES if r.stage == "phase"])
def test_every_rule_of_the_package_alone(rule: str) -> None:
    """Each matches somewhere in these pipelines, and changes no bit."""
    found: set[str] = set()
    for name in PIPELINES:
        for recipe in ("none", "current", *((ATTENTION,) if "rotated" in name else ())):
            plain, _ = run(name, recipe, torch.bfloat16)
            with fused(exact=True), REGISTRY.only(rule, *JOINT):
                together, rules = run(name, recipe, torch.bfloat16)
            assert_same(plain, together)
            found |= rules
    assert found == {rule}
