"""Graphed calls and what is around them: numbers, arguments, checkpoints, threads, other graphs, freeing."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.runtime import engines
from tests.runtime.cases import assert_same, both, gradients, mlp, state, step, twin
from tests.runtime.graph_engine import Rerun, data

DELAYED = te.recipe.DelayedScaling(amax_history_len=4)


def test_numbers_of_scalar_slots(engine: Rerun) -> None:
    @te.pointwise
    def scaled(v, by: float):  # type: ignore[no-untyped-def]
        return v * by

    by = te.scalar(2.0)
    graphed = te.make_graphed(scaled(by=by), data())
    for value in (2.0, 3.0, 3.0, 3.0, 2.0):
        by.set(value)
        assert torch.equal(graphed(data()), value * data())
    assert graphed.captured == 2


def test_a_capture_between_a_forward_and_its_backward_touches_no_buffer(engine: Rerun) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("by", torch.full((32,), 2.0))
            self.norm = nn.BatchNorm1d(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * self.by

    model = Scaled()
    x = data()
    y = model(x)
    before = state(model)
    te.make_graphed(model, data())
    assert_same(state(model), before)
    y.sum().backward()


def test_a_sparse_buffer_is_no_hindrance(engine: Rerun) -> None:
    model = nn.Sequential(mlp())
    model.register_buffer("table", torch.eye(3).to_sparse())
    graphed = te.make_graphed(model, data())
    assert torch.equal(graphed(data()), model(data()))
    assert graphed.captured == 1


def test_the_least_recently_used_graph_goes_first(engine: Rerun) -> None:
    graphed = te.make_graphed(mlp(), limit=2)
    with torch.no_grad():
        for rows in (4, 8, 16):
            graphed.capture(data(rows))
        assert graphed.captured == 3
        graphed.capture(data(8))
        assert graphed.captured == 3
        graphed.capture(data(4))
        assert graphed.captured == 4


def test_modules_that_are_not_ours_with_arguments_by_name(engine: Rerun) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = mlp(), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, *, by: float, mask: torch.Tensor) -> dict[str, object]:
            y = self.last(self.first(x)) * by * mask
            return {"y": y, "more": (y.sum(), mask > 0)}

    model = Block()
    other = twin(model)
    graphed = te.make_graphed(model)
    for i in range(4):
        mask = torch.ones(16, 1)
        for run in (graphed, other):
            with te.autocast(recipe=DELAYED):
                out = run(data(seed=i), by=2.0, mask=mask)
            (out["y"].square().sum() + out["more"][0]).backward()
        assert out["more"][1].dtype is torch.bool
        assert_same(state(model), state(other))
        assert_same(gradients(model), gradients(other))
    assert engine.replayed == 6

    class Strange:
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(te.PlanError, match="plain values, got a Strange"):
        graphed(data(), by=Strange(), mask=mask)


def test_inside_a_checkpoint_and_under_saved_tensor_hooks_calls_are_eager(engine: Rerun) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model)
    both((graphed, other), DELAYED, data())
    both((graphed, other), DELAYED, data())
    replayed = engine.replayed
    assert replayed
    for run in (graphed, other):
        for checkpoint in (
            te.checkpoint,
            lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False),
        ):
            with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
                for _ in range(3):
                    y = checkpoint(run, data())
                    y.square().sum().backward()
    assert engine.replayed == replayed
    assert_same(gradients(model), gradients(other))
    with torch.autograd.graph.save_on_cpu():
        graphed(data()).sum().backward()
    assert engine.replayed == replayed


def test_a_recompute_after_replays_runs_under_the_recipe_of_the_replay(engine: Rerun) -> None:
    model = mlp()
    graphed = te.make_graphed(model)
    for _ in range(3):
        step(graphed, data(), te.recipe.Float8CurrentScaling())
    last = model.__dict__["_te_last"]
    assert last.frame.recipe == te.recipe.Float8CurrentScaling()
    step(graphed, data(), te.recipe.Float8BlockScaling())
    step(graphed, data(), te.recipe.Float8BlockScaling())
    assert model.__dict__["_te_last"].frame.recipe == te.recipe.Float8BlockScaling()


def test_graphed_parts_of_a_pipeline_and_graphs_in_graphs(engine: Rerun) -> None:
    inner = te.make_graphed(mlp())
    model = te.Sequential(te.Linear(32, 32), inner, te.GELU())
    plain = te.Sequential(model[0], inner.__dict__["module"], te.GELU())
    for _ in range(3):
        assert torch.equal(model(data(grad=False)), plain(data(grad=False)))
    outer = te.make_graphed(nn.Sequential(model))
    before = inner.captured
    for _ in range(3):
        torch.testing.assert_close(outer(data(grad=False)), plain(data(grad=False)))
    assert outer.captured == 1
    assert inner.captured == before


def test_models_and_their_graphs_die_with_their_last_reference(engine: Rerun) -> None:
    class Quiet(Rerun):
        """Keeps no body: as a CUDA graph, which runs no Python."""

        def record(self, body, pool, device, reads):  # type: ignore[no-untyped-def]
            return body(), lambda given, made: None

    engines.ENGINES["cpu"] = Quiet()
    gc.collect()
    gc.disable()
    try:
        for way in ("make_graphed", "cuda_graph"):
            model = mlp()
            graphed: nn.Module = te.make_graphed(model)
            if way == "cuda_graph":
                model.cuda_graph = True
                graphed = model
            for _ in range(3):
                with te.autocast(recipe=DELAYED):
                    x = data()
                    y = graphed(x)
                    y.sum().backward()
            refs = [weakref.ref(t) for t in (model, model[1], model[1].weight, graphed, y, x)]
            del model, graphed, y, x
            assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


def test_threads_share_one_graphed_module(engine: Rerun) -> None:
    model = mlp()
    graphed = te.make_graphed(model, in_flight=2)
    expected = {i: model(data(seed=i)) for i in range(4)}
    failed: list[int] = []

    def work(i: int) -> None:
        for _ in range(10):
            x = data(seed=i)
            y = graphed(x)
            if not torch.equal(y, expected[i]):
                failed.append(i)
            torch.autograd.grad(y.sum(), x)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert engine.replayed


def test_free_workspaces_drops_graphs_that_no_forward_waits_in(engine: Rerun) -> None:
    model = mlp()
    graphed = te.make_graphed(model, data())
    y = graphed(data())
    te.free_workspaces()
    te.free_workspaces()
    expected = twin(model)
    expected(data()).sum().backward()
    y.sum().backward()
    assert_same(gradients(model), gradients(expected))
    te.free_workspaces()
    for _ in range(3):
        graphed(data())
    assert graphed.captured == 2
