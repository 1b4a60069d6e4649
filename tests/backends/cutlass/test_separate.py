"""A group by other kernels: which parts it is cut into."""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from te_ops import recipe
from te_ops.backends.cutlass import separate
from te_ops.backends.cutlass.trial import Trial
from te_ops.registry import Call
from te_ops.runtime import tune as tuning
from te_ops.runtime.cache import plan_for
from tests.backends.cutlass import standin


def calls(model: te.Op, made: te.Recipe | None) -> dict[str, Call]:
    """The groups of a training step, by their primitives."""
    x = torch.zeros(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with tuning.collected() as found, te.autocast(enabled=made is not None, recipe=made):
        plan_for(model, (x,))
    trials = [t for t in found if isinstance(t, Trial)]
    named = [(" ".join(n.prim.name for n in t.call.nodes), t.call) for t in trials]
    return dict(reversed(named))  # the first of each: forward, where it has one


PARTS = {
    "delayed": {
        "gemm pointwise quantize": ["gemm", "pointwise_quantize"],
        "gemm pointwise reduce quantize": ["gemm", "pointwise_together"],
        "gemm pointwise reduce quantize pointwise quantize": ["gemm", "pointwise_together"],
    },
    "current": {
        "gemm pointwise quantize": ["gemm", "pointwise_quantize_rounded"],
        "gemm pointwise reduce quantize": ["gemm", "pointwise_together_rounded"],
    },
    "dense": {
        "gemm pointwise": ["gemm", "pointwise"],
        "gemm pointwise reduce": ["gemm", "pointwise_together"],
    },
}
RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "dense": None,
}


@pytest.mark.parametrize("name", PARTS)
def test_the_gemm_and_what_follows_it_in_the_fewest_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = te.Sequential(te.Linear(64, 96), te.GELU(), te.Linear(96, 64)).bfloat16()
    with standin.hopper(monkeypatch, "measured", emulated=False):
        found = calls(model, RECIPES[name])
        for group, parts in PARTS[name].items():
            cut = separate._parts(found[group])
            assert [kernel.runs for _, kernel in cut] == parts, group
            assert not any(kernel.name.startswith(separate.PREFIX) for _, kernel in cut)
            assert [v for part, _ in cut for v in part.writes if v in found[group].writes] == list(
                found[group].writes
            )


def test_parts_pass_their_values_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = te.Sequential(te.Linear(64, 96), te.GELU(), te.Linear(96, 64)).bfloat16()
    with standin.hopper(monkeypatch, "measured", emulated=False):
        call = calls(model, RECIPES["delayed"])["gemm pointwise quantize"]
        (gemm, _), (rest, _) = separate._parts(call)
    assert gemm.writes == (call.nodes[0].out,)
    assert call.nodes[0].out in rest.reads
