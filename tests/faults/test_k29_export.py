"""K29: torch.export sees operations of torch only, and what it makes gives the numbers of the call."""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from tests.faults import cases

FEW = {"Extras": ("delayed",), "Recompute": ("mxfp8",), "Head": ("current",)}
PAIRS = [
    pytest.param(case, recipe, id=f"{case.name}-{name}")
    for case in cases.CASES
    for name, recipe in cases.MODES.items()
    if recipe is None
    or (case.name == "MLP" and name in cases.SOME)
    or name in FEW.get(case.name, ())
]


@pytest.mark.parametrize(("case", "recipe"), PAIRS)
def test_a_forward_exports_to_operations_of_torch(
    case: cases.Case, recipe: te.Recipe | None
) -> None:
    """B147: in eval, before and after states exist; no op of ours, no state that is no tensor."""
    op, xs = case.fresh().eval(), case.data(6, grad=False)
    other = case.fresh().eval()
    with torch.no_grad(), cases.within(recipe):
        program = torch.export.export(op, xs, strict=False)
        wanted = cases.outputs_of(other(*xs))
        found = cases.outputs_of(program.module()(*xs))
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert {str(c).split(".")[0] for c in calls if isinstance(c, torch._ops.OpOverload)} <= {"aten"}
    assert not any("te_ops" in getattr(c, "__module__", "") for c in calls)
    assert all(isinstance(v, torch.Tensor) for v in program.state_dict.values())
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_a_trained_model_exports_with_its_scales() -> None:
    recipe = te.recipe.DelayedScaling(amax_history_len=3)
    model, (x,) = cases.BY_NAME["MLP"].fresh(), cases.BY_NAME["MLP"].data(6)
    for scale in (1.0, 20.0):
        cases.step(model, ((scale * x.detach()).requires_grad_(),), recipe)
    before = {name: b.clone() for name, b in model.named_buffers()}
    model.eval()
    with torch.no_grad(), te.autocast(recipe=recipe):
        program = torch.export.export(model, (x.detach(),), strict=False)
        assert torch.equal(program.module()(x.detach()), model(x.detach()))
    for name, b in model.named_buffers():
        assert torch.equal(b, before[name]), name


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_what_traces_sizes_is_told_what_exports() -> None:
    model, x = te.Sequential(te.Linear(8, 8), te.GELU()).eval(), torch.randn(6, 8)
    rows = torch.export.Dim("rows", min=2, max=64)
    with torch.no_grad():
        with pytest.raises(te.PlanError, match=r"number of rows.*torch\.export"):
            torch.jit.trace(model, x)
        with pytest.raises(te.PlanError, match="dynamic shapes give none"):
            torch.export.export(model, (x,), dynamic_shapes=[({0: rows},)], strict=False)
