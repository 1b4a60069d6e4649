"""K12: graph replays take no short cuts, over every op that holds weights (on the CPU, recordings are run again)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch

import te_ops as te
from te_ops.runtime import engines
from tests.faults import cases
from tests.faults.cases import Case
from tests.runtime.graph_engine import Rerun

HOLD = [case for case in cases.CASES if any(True for _ in case.fresh().parameters())]
PAIRS = [
    pytest.param(case, cases.MODES[name], id=f"{case.name}-{name}")
    for case in HOLD
    for name in ("none", "delayed", "mxfp8")
    if name == "none" or case.quantized
]


@pytest.fixture
def engine() -> Iterator[Rerun]:
    engines.ENGINES["cpu"] = made = Rerun()
    yield made
    del engines.ENGINES["cpu"]


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize(("case", "recipe"), PAIRS)
def test_three_microbatches_accumulate_what_eager_calls_do(
    engine: Rerun, case: Case, recipe: te.Recipe | None, frozen: bool
) -> None:
    """B065: gradients and states are eager's, bit for bit, with weights quantized once a step or at every call."""
    eager = case.fresh()
    model = copy.deepcopy(eager)
    graphed = te.make_graphed(model)
    scope = te.weights_frozen() if frozen else contextlib.nullcontext()
    for _ in range(3):
        for run in (graphed, eager):
            with cases.within(recipe), scope:
                for i in range(3):
                    torch.manual_seed(i)
                    outputs = cases.outputs_of(run(*case.data(8)))
                    if any(y.requires_grad for y in outputs):
                        cases.backward(outputs)
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert p.grad is not None, name
            assert torch.equal(p.grad, q.grad), name
        buffers = dict(model.named_buffers())
        for name, b in eager.named_buffers():
            assert torch.equal(buffers[name], b), name
    assert engine.replayed >= 6
