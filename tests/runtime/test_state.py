"""Delayed-scaling state: what is observed, when it commits, where it lives.

Core contracts 5, 11, 12 and 18; numerics 4 to 10.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import te_ops as te
from te_ops.registry import REGISTRY, Call, Kernel
from te_ops.runtime import state as runtime_state
from te_ops.runtime.state import DelayedState, state_of
from tests.runtime.cases import assert_same, state

RECIPE = te.recipe.DelayedScaling(amax_history_len=4)


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many states each commit rolled."""
    log: list[int] = []
    original = runtime_state.commit

    def commit(observed: Any, *rest: Any) -> None:
        log.append(len(observed))
        original(observed, *rest)

    monkeypatch.setattr(runtime_state, "commit", commit)
    return log


def history(op: nn.Module, operand: str) -> list[float]:
    """Finished steps, most recent last, without the zero slots."""
    found = state_of(op, operand)
    return [] if found is None else [float(a) for a in found.amax_history if a != 0]


def call(model: te.Op, x: Tensor, recipe: te.Recipe = RECIPE, **kwargs: Any) -> Tensor:
    with te.autocast(recipe=recipe, **kwargs):
        return model(x)


X = torch.linspace(-1.0, 1.0, 32 * 32).reshape(32, 32)


# -- what a step does


def test_scale_formula_and_roll() -> None:
    op = te.Linear(32, 32, bias=False)
    for k in (1.0, 3.0, 2.0):
        y = call(op, k * X)
        y.sum().backward()
    found = state_of(op, "input")
    assert found is not None
    assert history(op, "input") == [1.0, 3.0, 2.0]
    assert float(found.scale) == float(torch.tensor(448.0) / 3.0)
    assert history(op, "grad_output") == [1.0, 1.0, 1.0]
    grad = state_of(op, "grad_output")
    assert grad is not None
    assert float(grad.scale) == 57344.0


def test_first_step_uses_scale_one_and_the_record_keeps_its_scale() -> None:
    """A commit between forward and backward must not change what backward reads."""
    op = te.Linear(32, 32, bias=False)
    x = (100 * X).requires_grad_()
    y = call(op, x)  # commits: the scales move
    assert float(state_of(op, "weight").scale) != 1.0  # type: ignore[union-attr]
    y.sum().backward()
    q = te.Float8Quantizer()
    w = q.quantize(op.weight.detach(), state=torch.ones(1), columnwise=True).dequantize()
    dy = (
        te.Float8Quantizer(torch.float8_e5m2)
        .quantize(torch.ones(32, 32), state=torch.ones(1))
        .dequantize()
    )
    torch.testing.assert_close(x.grad, dy @ w)
    xq = q.quantize(x.detach(), state=torch.ones(1)).dequantize()
    torch.testing.assert_close(op.weight.grad, dy.t() @ xq)


def test_several_uses_in_a_region_are_one_roll_of_the_maximum() -> None:
    op = te.Linear(32, 32)
    with te.autocast(recipe=RECIPE):
        op(X)
        op(5 * X)
        op(2 * X)
    assert history(op, "input") == [5.0]


def test_one_op_twice_in_a_pipeline_is_one_roll() -> None:
    op = te.Linear(32, 32)
    with torch.no_grad():
        op.weight.copy_(3 * torch.eye(32))
    model = te.Sequential(op, op)
    y = call(model, X)
    y.sum().backward()
    assert history(op, "input") == [3.0]
    assert history(op, "weight") == [3.0]
    assert history(op, "grad_output") == [3.0]
    assert len(model.state_dict()) == len(set(model.state_dict())) == 2 * (2 + 9)


def test_only_observed_entries_roll() -> None:
    a, b = te.Linear(32, 32), te.Linear(32, 32)
    call(te.Sequential(a, b), X)
    call(a, 2 * X)
    assert history(a, "input") == [1.0, 2.0]
    assert len(history(b, "input")) == 1


def test_without_autocast_the_state_stays() -> None:
    op = te.Linear(32, 32)
    call(op, X).sum().backward()
    before = state(op)
    op(5 * X).sum().backward()
    assert_same(before, state(op))


# -- contract 12: when


def test_regions_nest_and_commit_at_the_outermost_exit(commits: list[int]) -> None:
    a, b = te.Linear(32, 32), te.Linear(32, 32)
    with te.autocast(recipe=RECIPE):
        a(X)
        with te.autocast(recipe=RECIPE):
            b(X)
        assert commits == []
        with te.autocast(enabled=False):
            a(9 * X)
        assert not history(b, "input")
    assert commits == [4]
    assert history(a, "input") == [1.0]


def test_backward_commits_once_at_its_end(commits: list[int]) -> None:
    a, b = te.Linear(32, 32), te.Linear(32, 32)
    with te.autocast(recipe=RECIPE):
        y = b(torch.tanh(a(X)))
    commits.clear()
    y.sum().backward()
    assert commits == [2]


def test_frozen_first_layer(commits: list[int]) -> None:
    """The backward that commits need not be the first pipeline's."""
    a, b = te.Linear(32, 32).requires_grad_(False), te.Linear(32, 32)
    for i in range(2):
        with te.autocast(recipe=RECIPE):
            y = b(a(X))
        y.sum().backward()
        assert history(b, "grad_output") == [1.0] * (i + 1)
    assert not history(a, "grad_output")
    assert len(history(a, "input")) == 2
    assert commits == [4, 1, 4, 1]


def test_fully_frozen_pipeline_observes_forward_only() -> None:
    model = te.Sequential(te.Linear(32, 32), te.GELU(), te.Linear(32, 32)).requires_grad_(False)
    call(model, X)
    assert len(history(model[2], "input")) == 1
    x = X.clone().requires_grad_()
    call(model, x).sum().backward()  # dgrad alone: the gradient is quantized, and observed
    assert history(model[2], "grad_output") == [1.0]


def test_first_pipelines_backward_never_runs() -> None:
    a, b = te.Linear(32, 32), te.Linear(32, 32)
    for _ in range(2):
        with te.autocast(recipe=RECIPE):
            a(X)
            y = b(X)
        y.sum().backward()
    assert not history(a, "grad_output")
    assert history(b, "grad_output") == [1.0, 1.0]


def test_two_pipelines_two_backwards() -> None:
    a, b = te.Linear(32, 32), te.Linear(32, 32)
    with te.autocast(recipe=RECIPE):
        y, z = a(X), b(X)
    y.sum().backward()
    (2 * z).sum().backward()
    assert history(a, "grad_output") == [1.0]
    assert history(b, "grad_output") == [2.0]


def test_backward_inside_the_region() -> None:
    op = te.Linear(32, 32)
    with te.autocast(recipe=RECIPE):
        op(X).sum().backward()
        assert history(op, "grad_output") == [1.0]
        assert not history(op, "input")
    assert history(op, "input") == [1.0]


def test_exception_inside_the_region_commits_nothing() -> None:
    op = te.Linear(32, 32)
    call(op, X)
    before = state(op)

    def broken_step() -> None:
        with te.autocast(recipe=RECIPE):
            op(7 * X)
            raise KeyError

    with pytest.raises(KeyError):
        broken_step()
    assert_same(before, state(op))
    call(op, 2 * X)
    assert history(op, "input") == [1.0, 2.0]


def test_no_grad_neither_records_nor_rolls() -> None:
    op = te.Linear(32, 32)
    call(op, X)
    before = state(op)
    with torch.no_grad():
        call(op, 7 * X)
    with te.autocast(recipe=RECIPE), torch.no_grad():
        op(7 * X)
    assert_same(before, state(op))
    with torch.no_grad(), te.autocast(recipe=RECIPE), torch.enable_grad():
        op(3 * X)
    assert history(op, "input") == [1.0, 3.0]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_calibrating_observes_in_any_mode(enabled: bool, grad: bool) -> None:
    op = te.Linear(32, 32)
    with torch.set_grad_enabled(grad):
        y = call(op, 3 * X, enabled=enabled, calibrating=True)
        if not enabled:
            assert torch.equal(y, op(3 * X))
    assert history(op, "input") == [3.0]
    assert len(history(op, "weight")) == 1


def test_calibration_includes_gradients_and_explicit_quantize() -> None:
    model = te.Sequential(te.Quantize(), te.Linear(32, 32))
    call(model, 3 * X, enabled=False, calibrating=True).sum().backward()
    assert history(model[1], "grad_output") == [1.0]
    assert history(model[0], "input") == [3.0]


def test_reentrant_checkpoint_commits_once(commits: list[int]) -> None:
    """Gradient states alone, so reentrant is allowed: two nested backwards, one commit."""

    def factory(role: te.Role) -> Any:
        return RECIPE if role.is_grad else te.Float8CurrentScalingQuantizer()

    recipe = te.recipe.CustomRecipe(qfactory=factory)
    ops = [te.Linear(32, 32) for _ in range(3)]
    x = X.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        h = torch.utils.checkpoint.checkpoint(ops[0], x, use_reentrant=True)
        h = torch.utils.checkpoint.checkpoint(lambda t: ops[0](ops[1](t)), h, use_reentrant=True)
        y = ops[2](h)
    y.sum().backward()
    assert commits == [3]
    assert [len(history(op, "grad_output")) for op in ops] == [1, 1, 1]


def test_aborted_backward_commits_nothing_and_the_next_does() -> None:
    a, b = te.Linear(32, 32), te.Linear(32, 32)

    class Break(torch.autograd.Function):
        broken = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            if Break.broken:
                raise ValueError("no")
            return dy

    with te.autocast(recipe=RECIPE):
        y = b(Break.apply(a(X)))
    loss = y.sum()
    with pytest.raises(ValueError, match="no"):
        loss.backward(retain_graph=True)
    assert not history(b, "grad_output")
    Break.broken = False
    loss.backward()  # without a forward in between
    assert history(b, "grad_output") == [1.0]
    assert len(history(a, "grad_output")) == 1


def test_forward_on_another_thread_does_not_drop_a_running_backward() -> None:
    op, other = te.Linear(32, 32), te.Linear(32, 32)

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            reached.set()
            assert go_on.wait(30)
            return dy

    reached, go_on = threading.Event(), threading.Event()
    x = X.clone().requires_grad_()
    with te.autocast(recipe=RECIPE):
        y = op(Wait.apply(x))
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    assert reached.wait(30)
    call(other, X)  # the thread that made the forward goes on
    go_on.set()
    thread.join()
    assert history(op, "grad_output") == [1.0]


def test_retained_graph_reads_the_gradient_scale_of_now() -> None:
    op = te.Linear(32, 32)
    loss = call(op, X).sum() * 1000
    loss.backward(retain_graph=True)
    loss.backward()
    assert history(op, "grad_output") == [1000.0, 1000.0]


def test_two_micro_batches_in_one_region() -> None:
    op = te.Linear(32, 32)
    with te.autocast(recipe=RECIPE):
        for k in (1.0, 4.0, 2.0):
            op(k * X).sum().backward()
    assert history(op, "input") == [4.0]
    assert history(op, "grad_output") == [1.0, 1.0, 1.0]


# -- special amaxes


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_step_is_counted_and_keeps_the_scale(bad: float) -> None:
    op = te.Linear(32, 32)
    call(op, X)
    found = state_of(op, "input")
    assert found is not None
    scale = found.scale.clone()
    broken = X.clone()
    broken[3, 3] = bad
    call(op, broken)
    assert torch.equal(found.scale, scale)
    assert int(found.nonfinite_steps) == 1
    assert history(op, "input") == [1.0]
    call(op, 2 * X)
    assert int(found.nonfinite_steps) == 1
    assert history(op, "input") == [1.0, 2.0]


def test_zeros_are_a_step_and_nothing_is_none() -> None:
    op = te.Linear(32, 32)
    call(op, X)
    found = state_of(op, "input")
    assert found is not None
    version = found.version
    call(op, torch.zeros(32, 32))
    assert found.version == version + 1
    assert found.amax_history.tolist() == [0.0, 0.0, 1.0, 0.0]
    before = state(op)
    call(op, torch.zeros(0, 32))
    assert before["quantizer.delayed.input.amax_history"].tolist() == found.amax_history.tolist()


# -- recipe values share a history


def test_another_recipe_value_derives_its_scale_from_the_history() -> None:
    op = te.Linear(32, 32)
    call(op, X)
    found = state_of(op, "input")
    assert found is not None
    margin = te.recipe.DelayedScaling(amax_history_len=4, margin=2)
    y = call(op, X, margin)
    q = te.Float8Quantizer()
    dense = q.quantize(X, state=torch.tensor([448.0 / 4])).dequantize()
    weight = state_of(op, "weight")
    assert weight is not None
    wmax = torch.tensor(float(op.weight.detach().abs().max()))
    w = q.quantize(op.weight.detach(), state=(448.0 / wmax / 4).reshape(1)).dequantize()
    torch.testing.assert_close(y.detach(), dense @ w.t() + op.bias.detach())
    assert float(found.scale) == 448.0 / 4


def test_history_resizes() -> None:
    op = te.Linear(32, 32)
    for k in (1.0, 2.0, 3.0):
        call(op, k * X)
    found = state_of(op, "input")
    assert found is not None
    call(op, X, te.recipe.DelayedScaling(amax_history_len=2))
    assert found.amax_history.shape == (2,)
    call(op, X, te.recipe.DelayedScaling(amax_history_len=6))
    assert found.amax_history.shape == (6,)


# -- where it lives


def test_names_and_strict_loading_into_a_fresh_module() -> None:
    model = te.Sequential(te.Linear(32, 32), te.GELU())
    call(model, X).sum().backward()
    names = {f"0.quantizer.delayed.{o}.{b}" for o in ("input", "weight", "grad_output")
             for b in ("scale", "amax_history", "nonfinite_steps")}  # fmt: skip
    assert set(model.state_dict()) == names | {"0.weight", "0.bias"}
    for saved in (model.state_dict(), load(save(model.state_dict()))):
        fresh = te.Sequential(te.Linear(32, 32), te.GELU())
        fresh.load_state_dict(saved, strict=True)
        assert_same(state(model), state(fresh))
        assert torch.equal(call(fresh, X), call(copy.deepcopy(model), X))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))


def test_loading_after_a_plan_was_made() -> None:
    a, b = te.Linear(32, 32), te.Linear(32, 32)
    for k in (1.0, 2.0):
        call(a, k * X).sum().backward()
    call(b, 9 * X).sum().backward()
    b.load_state_dict(a.state_dict())
    assert torch.equal(call(a, X), call(b, X))


@pytest.mark.parametrize("shape", [(2, 3), (0,), ()])
@pytest.mark.parametrize("used", [False, True])
def test_a_history_that_is_none_does_not_load(shape: tuple[int, ...], used: bool) -> None:
    op = te.Linear(32, 32)
    call(op, X).sum().backward()
    saved = op.state_dict() | {"quantizer.delayed.input.amax_history": torch.zeros(shape)}
    other = te.Linear(32, 32)
    if used:
        call(other, X).sum().backward()
    with pytest.raises(RuntimeError, match=r"size mismatch for .*input\.amax_history"):
        other.load_state_dict(saved)
    call(other, X).sum().backward()


def test_prepare_creates_everything_before_the_first_forward() -> None:
    model = te.prepare(te.Sequential(te.Linear(32, 32)), RECIPE)
    names = set(model.state_dict())
    call(model, X).sum().backward()
    assert set(model.state_dict()) == names
    assert len(names) == 2 + 9
    assert not set(te.prepare(te.Linear(8, 8), te.recipe.MXFP8BlockScaling()).state_dict()) - {
        "weight",
        "bias",
    }


def test_casts_leave_the_state_and_copies_own_theirs() -> None:
    model = te.Linear(32, 32)
    call(model, 3.14159 * X)
    before = state(model)
    model.bfloat16()
    for name, tensor in state(model).items():
        if name.startswith("quantizer"):
            assert torch.equal(tensor, before[name])
    other = copy.deepcopy(model)
    call(other, 100 * X.bfloat16())
    assert history(model, "input") == [float(torch.tensor(3.14159))]
    again = pickle.loads(pickle.dumps(model))
    assert_same(state(model), state(again))


def test_distributed_data_parallel_ignores_the_state() -> None:
    model = te.Sequential(te.Linear(32, 32))
    call(model, X)
    ignored = model._ddp_params_and_buffers_to_ignore
    assert set(ignored) == {n for n in model.state_dict() if "quantizer" in n}


def test_stateless_recipes_add_nothing() -> None:
    model = te.Linear(32, 32)
    for recipe in (
        te.recipe.Float8CurrentScaling(),
        te.recipe.MXFP8BlockScaling(),
        te.recipe.NVFP4BlockScaling(),
    ):
        call(model, X, recipe).sum().backward()
    assert set(model.state_dict()) == {"weight", "bias"}


def test_states_are_freed_with_their_op() -> None:
    gc.collect()
    before = len(runtime_state.registered())
    model = te.Linear(32, 32)
    call(model, X).sum().backward()
    assert len(runtime_state.registered()) == before + 3
    del model
    gc.collect()
    assert len(runtime_state.registered()) == before


def test_state_of_hooked_and_foreign_children() -> None:
    """A hook makes an op a segment of its own; its state and its recipe by path stay the same."""
    model = te.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    other = copy.deepcopy(model)
    other[1].register_forward_hook(lambda *_: None)
    recipe = te.recipe.PerLayer(
        layers={"1": te.recipe.DelayedScaling(amax_history_len=3)}, default=None
    )
    for m in (model, other):
        call(m, X, recipe).sum().backward()
    assert_same(state(model), state(other))


def test_state_module_is_exported() -> None:
    assert te.runtime.DelayedState is DelayedState


@pytest.mark.parametrize("at", range(4))
def test_failure_in_a_backward_step_changes_nothing(at: int) -> None:
    model = te.Sequential(te.Linear(32, 32), te.Cut(), te.Linear(32, 32))
    call(model, X).sum().backward()
    count = 0

    def bind(made: Call) -> Any:
        function = REGISTRY.find("reference").bind(made)

        def launch(*xs: Any) -> Any:
            nonlocal count
            count += made.node.phase.is_backward
            if count == at + 1:
                raise ValueError("broken kernel")
            return function(*xs)

        return launch

    with REGISTRY.temporary(Kernel("*", "test.fail", bind, priority=99)):
        loss = call(model, X).sum()
        before = state(model)
        with pytest.raises(ValueError, match="broken kernel"):
            loss.backward()
    assert_same(before, state(model))
    model.zero_grad()
    call(model, X).sum().backward()
    assert len(history(model[0], "grad_output")) == len(history(model[2], "grad_output")) == 2
