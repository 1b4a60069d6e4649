"""What backward rebuilds instead of saving (core contract 6; the sources are pinned, bits stay)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te
from te_ops.compiler import Plan, Work
from te_ops.compiler.passes import passes
from te_ops.compiler.remat import remat
from te_ops.runtime.cache import CACHE
from tests.runtime.cases import RECIPES, gradients


def saved(plan: Plan) -> list[tuple[str, int]]:
    return [(s.format, s.bytes) for segment in plan.segments for s in segment.saved_values]


def test_activation_is_rebuilt_from_its_input() -> None:
    model = te.Sequential(te.Linear(8, 16, bias=False), te.GELU(), te.Linear(16, 8, bias=False))
    plan = model.plan(torch.randn(4, 8))
    assert saved(plan) == [("float32", 4 * 16 * 4), ("float32", 4 * 8 * 4)]
    rebuilt = [s for s in plan.segments[0].backward_steps if s.phase == "recompute"]
    assert [s.nodes for s in rebuilt] == [("gelu",)]


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
