"""What is alive during a training step, by the arithmetic of its plan: fused GEMMs need less."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import te_ops as te
from te_ops import recipe
from te_ops.compiler import bind
from te_ops.compiler.work import Group, Work
from te_ops.graph import BUFFER, GRAD, INPUT, PARAM, Phase, Value
from tests.backends.cutlass import standin

ROWS, HIDDEN, INSIDE = 8192, 4096, 14336
MIB = 1 << 20
RESIDENT = (PARAM, INPUT, GRAD, BUFFER)


def alive(work: Work, groups: Sequence[Group], kept: set[Value], backward: bool) -> int:
    """The most bytes that a phase's values take at once, without what is there before and after the step."""
    last = {v: i for i, group in enumerate(groups) for v in (*group.reads, *group.writes)}
    live = set(work.saved) if backward else set()
    most = 0
    for i, group in enumerate(groups):
        if not all(n.prim.nature == "view" for n in group.nodes):
            live |= set(group.writes)
        own = (v for v in live if work.g.node(v).prim not in RESIDENT)
        most = max(most, sum(work.g.spec(v).nbytes for v in own))
        live -= {v for v, end in last.items() if end == i and v not in kept}
    return most


def peaks(mode: str, made: te.Recipe) -> tuple[dict[str, float], int]:
    """Of forward and backward of a SwiGLU MLP in MiB, and the bytes that it saves."""
    found: dict[str, float] = {}
    binding = bind._Binder.bind
    patch = pytest.MonkeyPatch()

    def bound(
        self: bind._Binder, keep: Sequence[Value], results: Sequence[Value | None], phase: Phase
    ) -> bind.Bound:
        backward = phase is not Phase.FORWARD
        most = alive(self.work, self.groups, set(keep), backward)
        found["backward" if backward else "forward"] = most / MIB
        return binding(self, keep, results, phase)

    with patch.context() as own, standin.hopper(own, mode, emulated=False):
        own.setattr(bind._Binder, "bind", bound)
        with torch.device("meta"):
            model = te.Sequential(
                te.RMSNorm(HIDDEN),
                te.Linear(HIDDEN, 2 * INSIDE, bias=False),
                te.SwiGLU(),
                te.Linear(INSIDE, HIDDEN, bias=False),
            ).bfloat16()
            x = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(enabled=True, recipe=made):
            plan = model.plan(x)
            for segment in plan.segments:
                if segment.derive is not None:
                    segment.derive(segment.full)
    return found, plan.saved_bytes


@pytest.mark.parametrize("made", [recipe.DelayedScaling(), recipe.Float8CurrentScaling()])
def test_a_fused_gradient_needs_no_dense_one(made: te.Recipe) -> None:
    """The activation's gradient is never written: 224 MiB, of which the product's operands take 88 back."""
    off, fused = (peaks(mode, made)[0]["backward"] for mode in ("off", "prefer"))
    dense = ROWS * INSIDE * 2 / MIB
    operands = (ROWS * HIDDEN + HIDDEN * INSIDE) / MIB
    assert off - fused >= 0.99 * (dense - operands)


def test_delayed_scaling_saves_no_more_where_the_gradient_is_fused() -> None:
    (off, separate), (fused, saved) = (peaks(m, recipe.DelayedScaling()) for m in ("off", "prefer"))
    assert saved == separate
    assert (round(off["backward"]), round(fused["backward"])) == (1408, 1272)
