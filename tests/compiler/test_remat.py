"""What backward rebuilds instead of saving (core contract 6; the sources are pinned, bits stay)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te
from te_ops.backends.reference.kernels import composed
from te_ops.compiler import Plan, Work
from te_ops.compiler.passes import passes
from te_ops.compiler.remat import remat
from te_ops.registry import REGISTRY
from te_ops.runtime.cache import CACHE
from tests.runtime.cases import RECIPES, gradients


def saved(plan: Plan) -> list[tuple[str, int]]:
    return [(s.format, s.bytes) for segment in plan.segments for s in segment.saved_values]


def mlp() -> te.Sequential:
    return te.Sequential(te.Linear(64, 128, bias=False), te.GELU(), te.Linear(128, 64, bias=False))


X, HIDDEN = torch.randn(32, 64), 32 * 128
TOGETHER = [composed(f"pointwise_together{kind}") for kind in ("", "_rounded")]


@pytest.mark.parametrize("recipe", [te.recipe.DelayedScaling(), te.recipe.Float8CurrentScaling()])
def test_a_copy_is_rebuilt_beside_its_gradient(recipe: te.Recipe) -> None:
    """Where a kernel does both; else rebuilding would be a pass over memory of its own."""
    model = mlp()
    with te.autocast(recipe=recipe):
        kept = model.plan(X)
        with REGISTRY.temporary(*TOGETHER):
            plan = model.plan(X)
    assert plan.saved_bytes + HIDDEN in range(kept.saved_bytes, kept.saved_bytes + 9)
    assert "recompute" not in [s.phase for s in plan.segments[0].backward_steps]
    names = [s.name for s in plan.segments[0].backward_steps]
    first = names.index("pointwise_together")
    assert names[:first].count("gemm") == 1, "dgrad of the second Linear comes before its wgrad"
    assert names[first + 1] == "gemm"


def test_the_rebuilt_copy_has_the_scale_of_the_first() -> None:
    """Current scaling: the amax that forward found is saved, and read instead of found again."""
    model = mlp()
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()), REGISTRY.temporary(*TOGETHER):
        plan = model.plan(X)
    assert ("float32", 4) in saved(plan)
    (step,) = [s for s in plan.segments[0].backward_steps if s.name == "pointwise_together"]
    assert any(read.startswith("quantize") for read in step.reads)


def test_what_forward_reads_is_saved() -> None:
    """Forward writes the dense activation for its GEMM anyway: to write it again would cost time."""
    model = mlp()
    with REGISTRY.temporary(*TOGETHER):
        plan = model.plan(X)
    assert ("float32", 4 * HIDDEN) in saved(plan)
    assert len(saved(plan)) == 3


def test_moved_data_is_rebuilt() -> None:
    """Heads that are rotated one tensor at a time come from the projection, which is saved as the values' base."""
    model = te.Sequential(
        te.Linear(32, 96, bias=False), te.Attention(2, packed=True, rotary=te.RoPE(16))
    )
    with REGISTRY.only():
        plan = model.plan(torch.randn(1, 8, 32))
    steps = [s.name for s in plan.segments[0].backward_steps if s.phase == "recompute"]
    assert steps.count("rope") == 2


def test_dropout_mask_is_rebuilt_from_the_seed() -> None:
    plan = te.Sequential(te.Linear(8, 8, bias=False), te.Dropout(0.5)).plan(torch.randn(64, 8))
    assert ("bool", 64 * 8) not in saved(plan)
    assert ("int64", 8) in saved(plan)


def test_views_save_their_base() -> None:
    model = te.Sequential(
        te.Linear(8, 8, bias=False), te.Reshape((-1, 4)), te.Linear(4, 4, bias=False)
    )
    x = torch.randn(4, 8)
    assert len(saved(model.plan(x))) == 2


def test_outputs_are_not_rebuilt() -> None:
    """They are alive anyway."""
    model = te.Sequential(
        te.Linear(8, 8, bias=False), te.GELU(), te.MakeExtraOutput(), te.Linear(8, 8, bias=False)
    )
    plan = model.plan(torch.randn(4, 8))
    assert [s.phase for s in plan.segments[0].backward_steps].count("recompute") == 0


class Without:
    """Planning with the pass taken out."""

    def __enter__(self) -> None:
        passes.remove("remat", remat)

    def __exit__(self, *_: Any) -> None:
        passes.add("remat", remat)


PIPELINES = {
    "swiglu": lambda: te.Sequential(
        te.RMSNorm(32), te.Linear(32, 64), te.SwiGLU(), te.Linear(32, 32)
    ),
    "dropout": lambda: te.Sequential(
        te.Linear(32, 32), te.Dropout(0.3), te.GELU(), te.Linear(32, 32)
    ),
    "chain": lambda: te.Sequential(
        te.GELU(), te.Linear(32, 32), te.SiLU(), te.Reshape((-1, 64)), te.GELU()
    ),
    "branch": lambda: te.Sequential(te.GELU(), te.Branch(te.Linear(32, 32), te.SiLU()), te.Add()),
    "recompute": lambda: te.Sequential(
        te.Linear(32, 32), te.Recompute(te.GELU(), te.Linear(32, 32)), te.SiLU()
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", PIPELINES)
def test_bits_and_state_do_not_depend_on_it(name: str, recipe: str) -> None:
    model = PIPELINES[name]()
    start = {k: v.clone() for k, v in model.state_dict().items()}

    def run() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        fresh = PIPELINES[name]()
        fresh.load_state_dict(start)
        for _ in range(2):
            fresh.zero_grad()
            torch.manual_seed(3)
            x = torch.randn(32, 32, requires_grad=True)
            chosen = RECIPES[recipe]
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                y = fresh(x)
                plan = fresh.plan(x)
            y.square().sum().backward()
        assert x.grad is not None
        return (
            {"y": y.detach(), "x": x.grad} | gradients(fresh),
            dict(fresh.state_dict()),
            plan.saved_bytes,
        )

    CACHE.clear()
    got, got_state, small = run()
    with Without():
        want, want_state, large = run()
    for key in want:
        assert torch.equal(got[key], want[key]), key
    for key in want_state:
        assert torch.equal(got_state[key], want_state[key]), key
    assert small <= large


def test_pass_is_an_ordinary_entry_of_its_slot() -> None:
    seen: list[str] = []

    def look(work: Work) -> None:
        seen.append(work.name)

    added = passes.add("remat", look)
    try:
        te.Sequential(te.GELU(), te.Cut(), te.GELU()).plan(torch.randn(2, 2, requires_grad=True))
    finally:
        passes.remove("remat", added)
    assert seen == ["segment 0", "segment 1"]
