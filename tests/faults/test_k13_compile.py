"""K13: around torch.compile a pipeline is one graph break; what is compiled around it equals eager, in every order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.runtime.state import DelayedState
from tests.faults import cases
from tests.faults.cases import Case, every_case, some_modes

# Dynamo's own: it looks at the `.grad` of tensors that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """By Dynamo, whose graphs torch runs as they are: what a code generator does with them is not ours."""
    return torch.compile(f, backend="eager", **options)  # type: ignore[no-any-return]


def frames() -> int:
    """Graphs that Dynamo has made since the last reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Model(nn.Module):
    """An op between torch's own arithmetic."""

    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.op = op

    def forward(self, first: torch.Tensor, *more: torch.Tensor) -> Any:
        first = 2 * first if first.is_floating_point() else first
        outputs = self.op(first, *more)
        return [y + 1 for y in cases.outputs_of(outputs)]


@every_case
def test_every_op_in_a_compiled_model(case: Case) -> None:
    """B070: outputs and gradients are eager's bit for bit, and the second call compiles nothing."""
    model, xs = Model(case.fresh()), case.data(6)
    wanted = cases.step(copy.deepcopy(model), xs, None)
    run = compiled(model)
    for i in range(2):
        before = frames()
        cases.same(cases.step(run, xs, None), _named_by(run, wanted))  # type: ignore[arg-type]
        assert i == 0 or frames() == before


def _named_by(run: Any, wanted: cases.Result) -> cases.Result:
    names = [n for n, _ in run.named_parameters()]
    grads = dict(zip(names, wanted.param_grads.values(), strict=True))
    return cases.Result(wanted.outputs, wanted.input_grads, grads)


def test_a_pipeline_alone_is_no_full_graph() -> None:
    """What docs/guide/limits.md says: the reason is torch's, and it comes at once."""
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(te.Sequential(te.Linear(8, 8), te.GELU()), fullgraph=True)(torch.randn(2, 8))


@some_modes
def test_compiled_and_checkpointed(recipe: te.Recipe | None) -> None:
    """B072."""
    model = Model(cases.BY_NAME["MLP"].fresh())
    twin = copy.deepcopy(model)

    def checkpointed(m: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False)[0]
            return y.square()

        return run

    run, eager = compiled(checkpointed(model)), checkpointed(twin)
    for i in range(3):
        for f in (run, eager):
            torch.manual_seed(i)
            x = torch.randn(6, cases.WIDTH)
            torch.manual_seed(i)
            with cases.within(
                recipe
            ):  # its exit moves scales on, and the recompute would be refused
                f(x).sum().backward()
        same_models(model, twin)


def same_models(a: nn.Module, b: nn.Module) -> None:
    """Gradients and states bit for bit."""
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert p.grad is not None, name
        assert torch.equal(p.grad, q.grad), name
    mine = dict(a.named_buffers())
    for name, buffer in b.named_buffers():
        assert torch.equal(mine[name], buffer), name


@some_modes
def test_training_and_evaluation_back_to_back(recipe: te.Recipe | None) -> None:
    """B074: 2 training steps, a call without gradients in eval, 2 more steps, with 32 rows and 48."""
    made = te.Sequential(te.Linear(64, 64), te.Dropout(0.25, seed=1), te.GELU(), te.Linear(64, 64))
    model = Model(made)
    twin = copy.deepcopy(model)
    run = compiled(model)
    for i, rows in enumerate((32, 48, 32, 48, 32)):
        x, results = torch.randn(rows, 64), []
        for m, f in ((model, run), (twin, twin)):
            m.train(i != 2)
            torch.manual_seed(i)
            with torch.set_grad_enabled(i != 2), cases.within(recipe):
                (y,) = f(x)
            if i != 2:
                y.square().sum().backward()
            results.append(y.detach())
        assert torch.equal(*results), i
        same_models(model, twin)


@every_case
def test_a_forward_writes_no_attribute(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """B072: of any module of the model; states of delayed scaling, which no forward reads itself, are committed."""
    op, xs = case.fresh(), case.data(6)
    recipe = cases.RECIPES["delayed"] if case.quantized else None
    cases.step(op, xs, recipe)
    written: list[str] = []
    write = nn.Module.__setattr__

    def spy(self: nn.Module, name: str, value: Any) -> None:
        if not isinstance(self, DelayedState):
            written.append(f"{type(self).__name__}.{name}")
        write(self, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", spy)
    for training in (True, False):
        for module in op.modules():
            module.__dict__["training"] = training
        with cases.within(recipe):
            op(*xs)
    assert written == []
