"""K26: nothing stays alive longer than it is needed, and nothing grows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.runtime import state
from te_ops.runtime.cache import CACHE
from te_ops.runtime.checkpoint import _LAST
from tests.faults import cases
from tests.faults.cases import Case, every_mode


@pytest.fixture(autouse=True)
def _no_gc() -> Iterator[None]:
    """What follows must be freed by reference counts alone."""
    gc.disable()
    yield
    gc.enable()


def dead(refs: list[weakref.ref[Any]]) -> bool:
    return all(ref() is None for ref in refs)


PAIRS = [
    pytest.param(case, recipe, id=f"{case.name}-{name}")
    for case in cases.CASES
    for name, recipe in cases.MODES.items()
    if recipe is None or case.name in cases.CORE
]


@pytest.mark.parametrize(("case", "recipe"), PAIRS)
def test_inputs_outputs_and_models_die_with_their_last_reference(
    case: Case, recipe: te.Recipe | None
) -> None:
    op, xs = case.fresh(), case.data(5)
    with cases.within(recipe):
        outputs = cases.outputs_of(op(*xs))
    cases.backward(outputs)
    tensors = [weakref.ref(t) for t in (*xs, *outputs)]
    grads = [weakref.ref(x.grad) for x in xs if x.grad is not None]
    model = [weakref.ref(m) for m in op.modules()] + [weakref.ref(p) for p in op.parameters()]
    del xs, outputs
    assert dead(tensors)
    assert dead(grads)
    del op
    assert dead(model)


@every_mode
def test_forward_without_backward_frees_all(recipe: te.Recipe | None) -> None:
    case = cases.BY_NAME["MLP"]
    op, xs = case.fresh(), case.data(5)
    for guard in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with guard(), cases.within(recipe):
            outputs = cases.outputs_of(op(*xs))
        refs = [weakref.ref(y) for y in outputs]
        del outputs
        assert dead(refs)
    model = weakref.ref(op)
    del op
    assert model() is None


@every_mode
def test_model_dies_while_its_output_lives_on_detached(recipe: te.Recipe | None) -> None:
    case = cases.BY_NAME["MLP"]
    op, xs = case.fresh(), case.data(5)
    with cases.within(recipe):
        (y,) = cases.outputs_of(op(*xs))
    kept = y.detach()
    refs = [weakref.ref(m) for m in op.modules()]
    del op, y
    assert dead(refs)
    assert torch.isfinite(kept).all()


@every_mode
def test_checkpointed_model_dies(recipe: te.Recipe | None) -> None:
    case = cases.BY_NAME["MLP"]
    op, (x,) = case.fresh(), case.data(5)
    with cases.within(recipe):
        y = te.checkpoint(op, x)
    y.sum().backward()
    refs = [weakref.ref(m) for m in op.modules()] + [weakref.ref(x), weakref.ref(y)]
    del op, x, y
    assert dead(refs)


def test_failed_forward_and_failed_backward_free_all() -> None:
    class Boom(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.is_meta:
                raise ZeroDivisionError
            return x

    op = te.Sequential(te.Linear(8, 8), Boom())
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(ZeroDivisionError), te.autocast(recipe=te.recipe.DelayedScaling()):
        op(x)
    refs = [weakref.ref(op), weakref.ref(x)]
    del op, x
    assert dead(refs)


def tensors_alive() -> tuple[int, int]:
    """(number, bytes) of the tensors made since `gc.freeze()` that live: no collection helps."""
    live = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    return len(live), sum(
        t.nbytes for t in live if type(t) is torch.Tensor or isinstance(t, nn.Parameter)
    )


@every_mode
def test_ten_steps_do_not_grow(recipe: te.Recipe | None) -> None:
    """B134, on the CPU: live tensors, plans, states and records are flat from step 3."""
    case = cases.BY_NAME["MLP"]
    op = case.fresh()
    optimizer = torch.optim.SGD(op.parameters(), lr=1e-4)
    seen = []
    gc.freeze()
    for i in range(10):
        xs = case.data(5)
        with cases.within(recipe):
            y = op(*xs)
            if i % 3 == 0:
                y = te.checkpoint(op, y)
        y.sum().backward()
        with torch.no_grad(), cases.within(recipe):
            op(*xs)
        optimizer.step()
        optimizer.zero_grad()
        del xs, y
        seen.append((*tensors_alive(), len(CACHE.plans), len(state.registered()), len(_LAST)))
    gc.unfreeze()
    assert len(set(seen[4:])) <= 2, seen  # a step with and one without a checkpoint
    assert seen[4] == seen[7], seen


def test_thousand_models_leave_nothing_behind() -> None:
    recipe = te.recipe.DelayedScaling()
    x = torch.randn(3, 8)
    seen = []
    for i in range(60):
        op = te.Sequential(te.Linear(8, 8), te.GELU())
        with te.autocast(recipe=recipe):
            y = op(x)
        y.sum().backward()
        del op, y
        if i % 20 == 19:
            seen.append((len(state.registered()), len(_LAST), len(CACHE.plans)))
    assert seen[0] == seen[1] == seen[2]


def test_caller_frame_is_not_kept_by_first_use() -> None:
    """B136: a big local at the first use of an op dies when it is dropped."""

    @te.pointwise
    def fresh(x, a: float):  # type: ignore[no-untyped-def]
        return a * te.math.sin(x)

    big = torch.randn(1000)
    ref = weakref.ref(big)
    fresh(a=2.0)(big)
    del big
    assert ref() is None


def test_plans_hold_no_tensor_and_no_module() -> None:
    case = cases.BY_NAME["MLP"]
    op, xs = case.fresh(), case.data(5)
    with te.autocast(recipe=te.recipe.DelayedScaling()):
        op(*xs)
        plan = op.plan(*xs)
    refs = [weakref.ref(op)]
    del op
    assert dead(refs)
    todo: list[Any] = [plan]
    seen: set[int] = set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        assert not isinstance(thing, nn.Module), type(thing)
        if isinstance(thing, torch.Tensor):
            assert thing.numel() <= 64, thing.shape  # constants of a kernel only
        if callable(thing) and hasattr(thing, "__closure__"):
            todo.extend(c.cell_contents for c in thing.__closure__ or () if _filled(c))
        elif not hasattr(thing, "__globals__"):
            todo.extend(gc.get_referents(thing) if not hasattr(thing, "__file__") else ())


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
