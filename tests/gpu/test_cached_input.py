"""Activations that cache their input, on a CUDA device: the CPU's numbers, and as much less memory as is not kept."""

from __future__ import annotations

import copy

import pytest
import torch

import te_ops as te

RECIPES = {
    "none": None,
    "delayed": te.recipe.DelayedScaling(),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
}


def mlp(hidden: int, ffn: int, *, cached: bool) -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(
        te.Linear(hidden, 2 * ffn, bias=False),
        te.SwiGLU(cache_quantized_input=cached),
        te.Linear(ffn, hidden, bias=False),
    ).bfloat16()


def step(model: te.Op, x: torch.Tensor, recipe: te.Recipe | None) -> list[torch.Tensor]:
    """Output and gradients of the second step: delayed scaling has its scales there."""
    for _ in range(2):
        leaf = x.detach().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(leaf)
        grads = torch.autograd.grad(y.float().square().mean(), [leaf, *model.parameters()])
    return [y.detach(), *grads]


@pytest.mark.parametrize("rows", [1, 33, 256])
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_gives_the_cpus_numbers(name: str, rows: int) -> None:
    model, x = mlp(256, 384, cached=True), torch.randn(rows, 256).bfloat16()
    theirs = step(copy.deepcopy(model), x, RECIPES[name])
    ours = step(model.cuda(), x.cuda(), RECIPES[name])
    for a, b in zip(ours, theirs, strict=True):
        # A fused kernel and other sums turn codes over: by one.
        assert (a.cpu().float() - b.float()).norm() <= 0.1 * b.float().norm()


def test_what_is_kept_is_freed() -> None:
    held = []
    for cached in (False, True):
        model = mlp(1024, 4096, cached=cached).cuda()
        x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()  # plans, and gradients that stay
        before = torch.cuda.memory_allocated()
        y = model(x)
        held.append(torch.cuda.memory_allocated() - before)
        y.sum().backward()
        del model, x, y
    dense, record = 2 * 2048 * 8192, 2048 * 8192 * 33 // 32
    assert held[0] - held[1] == pytest.approx(dense - record, rel=0.02)
