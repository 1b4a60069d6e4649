"""K05: the delayed-scaling state machine: whose amax, when, in which module."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import te_ops as te
from tests.faults import cases
from tests.faults.cases import Case, quantized_case

DelayedScaling = te.recipe.DelayedScaling


def states(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of every state buffer."""
    return {k: v.clone() for k, v in model.state_dict().items() if ".delayed." in f".{k}"}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {k for k in after if k not in before or not torch.equal(before[k], after[k])}


def train(
    model: nn.Module, x: torch.Tensor, recipe: te.Recipe | None, dy: float = 1.0
) -> torch.Tensor:
    with cases.within(recipe):
        y = model(x)
    (dy * y).sum().backward()
    return y.detach()


class Model:
    """One operand's state in NumPy, in FP32: numerics of the guide, written again."""

    def __init__(self, length: int, margin: int, algo: Any, fp8_max: float) -> None:
        self.history = np.zeros(length, np.float32)
        self.scale = np.float32(1)
        self.margin, self.algo, self.fp8_max = margin, algo, np.float32(fp8_max)

    def step(self, amax: float) -> None:
        live = self.history.copy()
        live[0] = np.float32(amax)
        picked = (
            {"max": live.max, "most_recent": lambda: live[0]}.get(self.algo)
            if isinstance(self.algo, str)
            else None
        )
        top = picked() if picked is not None else np.float32(live.max() / 2)
        if top > 0:
            self.scale = np.float32(
                np.float32(self.fp8_max / np.float32(top)) / np.float32(2.0**self.margin)
            )
        self.history = np.roll(live, -1)
        self.history[0] = 0


def half_max(history: torch.Tensor) -> torch.Tensor:
    return history.amax(0) / 2


@pytest.mark.parametrize(
    ("margin", "algo", "length", "reduce"),
    list(
        itertools.product((0, 1), ("max", "most_recent", half_max), (1, 2, 5, 1024), (True, False))
    ),
)
def test_every_option_follows_the_numpy_model(
    margin: int, algo: Any, length: int, reduce: bool
) -> None:
    """B029."""
    recipe = DelayedScaling(
        margin=margin, amax_compute_algo=algo, amax_history_len=length, reduce_amax=reduce
    )
    op = te.Linear(16, 16)
    models = {
        "input": Model(length, margin, algo, 448),
        "weight": Model(length, margin, algo, 448),
        "grad_output": Model(length, margin, algo, 57344),
    }
    for i in range(6):
        x = torch.randn(4, 16) * (i % 3 + 1)
        train(op, x, recipe, dy=i + 1.0)
        models["input"].step(float(x.abs().amax()))
        models["weight"].step(float(op.weight.detach().abs().amax()))
        models["grad_output"].step(i + 1.0)
        for operand, model in models.items():
            state = op.quantizer.delayed.get_submodule(operand)  # type: ignore[union-attr]
            np.testing.assert_array_equal(
                state.scale.numpy()[0], model.scale, err_msg=f"{operand}, step {i}"
            )
            np.testing.assert_array_equal(state.amax_history.numpy(), model.history)
        with torch.no_grad():
            op.weight.mul_(1.1)


def test_custom_scale_algorithm_gets_the_recipe() -> None:
    seen = []

    def scale(
        amax: torch.Tensor, old: torch.Tensor, fp8_max: float, recipe: te.Recipe
    ) -> torch.Tensor:
        seen.append((fp8_max, recipe))
        return torch.full_like(old, 7.0)

    recipe = DelayedScaling(scaling_factor_compute_algo=scale)
    op = te.Linear(16, 16)
    train(op, torch.randn(4, 16), recipe)
    assert {m for m, _ in seen} == {448.0, 57344.0}
    assert all(r == recipe for _, r in seen)
    assert {float(v) for k, v in states(op).items() if k.endswith(".scale")} == {7.0}


# -- whose


def test_modules_that_did_not_run_keep_their_state() -> None:
    """B027."""
    recipe = DelayedScaling(amax_history_len=3)
    model = nn.ModuleDict(
        {"a": te.Linear(16, 16), "b": te.Sequential(te.Linear(16, 16), te.GELU())}
    )
    te.prepare(model, recipe)
    for name in "ab":
        train(model[name], torch.randn(4, 16), recipe)
    frozen = states(model["b"])
    for i in range(3):
        before = states(model["a"])
        train(model["a"], torch.randn(4, 16) * (i + 2), recipe, dy=i + 2.0)
        moved = changed(before, states(model["a"]))
        assert {f"quantizer.delayed.{o}.amax_history" for o in ("input", "grad_output")} <= moved
    assert changed(frozen, states(model["b"])) == set()


def test_branch_that_did_not_run_inside_one_region() -> None:
    recipe = DelayedScaling(amax_history_len=2)
    a, b = te.Linear(16, 16), te.Linear(16, 16)
    x = torch.randn(4, 16)
    with te.autocast(recipe=recipe):
        y = a(x) + b(x)
    y.sum().backward()
    kept = states(b)
    for _ in range(3):
        with te.autocast(recipe=recipe):
            with te.autocast(recipe=recipe):
                y = a(x)
            z = a(2 * x)
        (y + z).sum().backward()
    assert changed(kept, states(b)) == set()


@quantized_case
def test_one_roll_a_region_for_every_op(case: Case) -> None:
    """Each operand's history moves by one slot an outermost region, however often the op ran in it."""
    recipe = DelayedScaling(amax_history_len=8)
    op, xs = case.fresh(), case.data(5)
    for uses in (1, 3):
        before = states(op)
        with te.autocast(recipe=recipe):
            for _ in range(uses):
                with te.autocast(recipe=recipe):
                    outputs = cases.outputs_of(op(*xs))
        cases.backward(outputs)
        for name, history in states(op).items():
            if name.endswith("amax_history") and name in before:
                torch.testing.assert_close(history[:-1], before[name][1:], msg=name)
                assert history[-1] > 0


def test_several_uses_in_a_region_share_a_slot_by_max() -> None:
    recipe = DelayedScaling()
    op = te.Linear(16, 16)
    xs = [torch.full((4, 16), v) for v in (1.0, 3.0, 2.0)]
    with te.autocast(recipe=recipe):
        y = sum(op(x) for x in xs)
    y.sum().backward()
    state = op.quantizer.delayed.input
    assert state.amax_history[-1] == 3.0
    assert state.amax_history[-2] == 0.0


def test_op_used_twice_in_one_pipeline() -> None:
    recipe = DelayedScaling()
    shared = te.Linear(16, 16, bias=False)
    with torch.no_grad():
        shared.weight.copy_(4 * torch.eye(16))
    s = te.Sequential(shared, shared)
    with te.autocast(recipe=recipe):
        y = s(torch.ones(4, 16))
    y.sum().backward()
    assert shared.quantizer.delayed.input.amax_history[-1] == 4.0
    assert shared.quantizer.delayed.grad_output.amax_history[-1] == 4.0
    assert (shared.quantizer.delayed.input.amax_history != 0).sum() == 1


# -- when


@quantized_case
def test_steps_without_quantization_leave_no_trace(case: Case) -> None:
    """B031: 3 plain steps, 3 FP8 steps, 2 plain, 2 FP8, equal to 5 FP8 steps."""
    recipe = DelayedScaling(amax_history_len=3)
    plan: list[te.Recipe | None] = [
        None,
        None,
        None,
        recipe,
        recipe,
        recipe,
        None,
        None,
        recipe,
        recipe,
    ]

    def results(
        modes: list[te.Recipe | None],
    ) -> tuple[list[cases.Result], dict[str, torch.Tensor]]:
        op = case.fresh()
        made = [cases.step(op, case.data(5), mode) for mode in modes]
        return [r for r, mode in zip(made, modes, strict=True) if mode is not None], states(op)

    mixed, mixed_state = results(plan)
    alone, alone_state = results([m for m in plan if m is not None])
    for a, b in zip(mixed, alone, strict=True):
        cases.same(a, b)
    assert mixed_state.keys() == alone_state.keys()
    assert changed(mixed_state, alone_state) == set()


@quantized_case
def test_no_grad_forward_neither_records_nor_rolls(case: Case) -> None:
    recipe = DelayedScaling()
    op, xs = case.fresh(), case.data(5)
    cases.step(op, xs, recipe)
    before = states(op)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard(), te.autocast(recipe=recipe):
            op(*xs)
    assert changed(before, states(op)) == set()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.enable_grad])
@quantized_case
def test_calibrating_records_without_gradients(
    case: Case, guard: Callable[[], Any], enabled: bool
) -> None:
    recipe = DelayedScaling()
    op, xs = case.fresh(), case.data(5)
    with guard(), te.autocast(enabled=enabled, calibrating=True, recipe=recipe):
        outputs = cases.outputs_of(op(*xs))
    seen = {
        k: v
        for k, v in states(op).items()
        if k.endswith(".amax_history") and "grad_output" not in k
    }
    assert seen
    assert all(v[-1] > 0 for v in seen.values())
    if not enabled:
        cases.compare(
            cases.Result([y.detach() for y in outputs], [], {}),
            _outputs(case.expected(op, xs)),
            1e-4,
        )


def _outputs(result: cases.Result) -> cases.Result:
    return cases.Result(result.outputs, [], {})


@quantized_case
def test_region_that_fails_leaves_no_trace(case: Case) -> None:
    recipe = DelayedScaling()
    op, xs = case.fresh(), case.data(5)
    cases.step(op, xs, recipe)
    before = states(op)
    with contextlib.suppress(ZeroDivisionError), te.autocast(recipe=recipe):
        op(*xs)
        raise ZeroDivisionError
    assert changed(before, states(op)) == set()
    cases.step(op, xs, recipe)
    assert changed(before, states(op))


def test_forward_state_commits_at_exit_and_gradient_state_after_backward() -> None:
    recipe = DelayedScaling()
    op = te.prepare(te.Linear(16, 16), recipe)
    start = states(op)
    x = torch.randn(4, 16)
    with te.autocast(recipe=recipe):
        y = op(x)
        assert changed(start, states(op)) == set()
    after = states(op)
    names = {n for n in changed(start, after) if n.endswith("amax_history")}
    assert names == {f"quantizer.delayed.{o}.amax_history" for o in ("input", "weight")}
    y.sum().backward()
    moved = {n for n in changed(after, states(op)) if n.endswith("amax_history")}
    assert moved == {"quantizer.delayed.grad_output.amax_history"}


def test_backward_of_two_forwards_is_one_gradient_step() -> None:
    recipe = DelayedScaling()
    op = te.Linear(16, 16)
    x = torch.randn(4, 16)
    with te.autocast(recipe=recipe):
        a, b = op(x), op(2 * x)
    (3 * a + 5 * b).sum().backward()
    history = op.quantizer.delayed.grad_output.amax_history
    assert history[-1] == 5.0
    assert history[-2] == 0.0


def test_repeated_backward_uses_the_current_gradient_scale() -> None:
    """A backward after the first (`retain_graph`) is a step of its own, with the scale of its time."""
    recipe = DelayedScaling()
    op = te.Linear(16, 16, bias=False)
    x = torch.randn(4, 16, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = op(x)
    dy = torch.full_like(y, 0.3)
    y.backward(dy, retain_graph=True)
    first = op.quantizer.delayed.grad_output.scale.clone()
    assert first != 1.0
    x.grad = None
    y.backward(dy)
    q = te.quantize(dy, te.Float8Quantizer(torch.float8_e5m2), state=first).dequantize()
    w = te.quantize(op.weight.detach(), te.Float8Quantizer(), state=torch.ones(1)).dequantize()
    torch.testing.assert_close(x.grad, q @ w)
    assert (op.quantizer.delayed.grad_output.amax_history != 0).sum() == 2


# -- what is recorded


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_step_is_counted_and_does_not_move_the_scale(bad: float) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    op = te.Linear(16, 16)
    x = torch.randn(4, 16)
    train(op, x, recipe)
    scale = op.quantizer.delayed.input.scale.clone()
    poisoned = x.clone()
    poisoned[1, 3] = bad
    train(op, poisoned, recipe)
    state = op.quantizer.delayed.input
    assert torch.equal(state.scale, scale)
    assert state.amax_history[-1] == 0
    assert state.nonfinite_steps == 1
    train(op, 2 * x, recipe)
    torch.testing.assert_close(state.scale[0], 448 / (2 * x).abs().amax())
    assert torch.isfinite(state.amax_history).all()


def test_all_zero_step_rolls_and_keeps_the_scale() -> None:
    recipe = DelayedScaling(amax_history_len=2)
    op = te.Linear(16, 16)
    x = torch.randn(4, 16)
    train(op, x, recipe)
    state = op.quantizer.delayed.input
    scale = state.scale.clone()
    for _ in range(3):
        train(op, torch.zeros(4, 16), recipe)
    assert not state.amax_history.any()
    assert torch.equal(state.scale, scale)


@quantized_case
def test_empty_step_keeps_history_and_scale(case: Case) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    op = case.fresh()
    cases.step(op, case.data(5), recipe)
    before = {k: v for k, v in states(op).items() if ".weight." not in k}
    cases.step(op, case.data(0), recipe)
    after = {k: v for k, v in states(op).items() if ".weight." not in k}
    assert changed(before, after) == set()


def test_empty_use_beside_a_real_one_in_a_region() -> None:
    recipe = DelayedScaling()
    op = te.Linear(16, 16)
    x = torch.randn(4, 16)
    with te.autocast(recipe=recipe):
        y, z = op(x[:0]), op(x)
    (y.sum() + z.sum()).backward()
    assert op.quantizer.delayed.input.amax_history[-1] == x.abs().amax()
    assert op.quantizer.delayed.grad_output.amax_history[-1] == 1.0


def test_other_recipe_value_derives_its_scale_from_the_history() -> None:
    op = te.Linear(16, 16)
    x = torch.randn(4, 16)
    first, second = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=4, margin=2)
    train(op, x, first)
    with torch.no_grad(), te.autocast(recipe=second):
        y = op(x)
    scale = (448 / x.abs().amax()) / 4
    qx = te.quantize(x, te.Float8Quantizer(), state=scale).dequantize()
    qw = te.quantize(
        op.weight.detach(), te.Float8Quantizer(), state=(448 / op.weight.detach().abs().amax()) / 4
    ).dequantize()
    torch.testing.assert_close(y, qx @ qw.T + op.bias)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_history_follows_the_recipes_length(length: int) -> None:
    op = te.Linear(16, 16)
    x = torch.randn(4, 16)
    train(op, x, DelayedScaling(amax_history_len=4))
    train(op, 2 * x, DelayedScaling(amax_history_len=length))
    assert op.quantizer.delayed.input.amax_history.shape == (length,)


def test_state_is_there_from_prepare_and_equals_the_one_made_by_a_forward() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    for case in cases.QUANTIZED:
        prepared, lazy = case.fresh(), case.fresh()
        te.prepare(prepared, recipe)
        for op in (prepared, lazy):
            cases.step(op, case.data(5), recipe)
        a, b = states(prepared), states(lazy)
        assert set(b) <= set(a), case.name
        assert changed({k: a[k] for k in b}, b) == set(), case.name
