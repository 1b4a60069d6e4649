"""`te.make_graphed` and `Sequential(cuda_graph=True)`, with an engine that runs recordings again on the CPU."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.runtime.state import registered
from tests.runtime.cases import RECIPES, assert_same, both, gradients, mlp, state, twin
from tests.runtime.graph_engine import Rerun, data

DELAYED = te.recipe.DelayedScaling(amax_history_len=4)
every_recipe = pytest.mark.parametrize("name", RECIPES)


# -- the API where there are no CUDA graphs


@every_recipe
def test_without_an_engine_every_call_is_eager(name: str) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model, data())
    assert graphed.captured == 0
    assert not graphed.capture(data())
    for i in range(3):
        both((graphed, other), RECIPES[name], data(seed=i), i)
    assert_same(gradients(model), gradients(other))
    assert_same(state(model), state(other))


def test_the_module_stays_what_it_is() -> None:
    model = mlp()
    graphed = te.make_graphed(model)
    assert list(graphed.state_dict()) == list(model.state_dict())
    assert list(map(id, graphed.parameters())) == list(map(id, model.parameters()))
    graphed.eval()
    assert not model.training
    assert not model[0].training
    graphed.train()
    assert model.training
    graphed.to(torch.float64)
    assert model[1].weight.dtype is torch.float64
    assert "RMSNorm" in repr(graphed)
    graphed.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert not model[1].weight.any()
    for made in (copy.deepcopy(graphed), pickle.loads(pickle.dumps(graphed))):
        assert isinstance(made, te.Graphed)
        x = data(grad=False).double()
        assert torch.equal(made(x), model(x))
        assert next(made.parameters()) is not next(model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_flight": 0}, "in_flight must be a positive number, got 0"),
        ({"limit": 1.5}, "limit must be a positive number"),
        ({"warmup": True}, "warmup must be"),
        ({"copies": 1}, "copies must be True or False"),
    ],
)
def test_wrong_options(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(te.PlanError, match=message):
        te.make_graphed(mlp(), **arguments)  # type: ignore[arg-type]


def test_wrong_modules() -> None:
    with pytest.raises(te.PlanError, match="not graphed, got Graphed"):
        te.make_graphed(te.make_graphed(mlp()))
    with pytest.raises(te.PlanError, match="got function"):
        te.make_graphed(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(te.PlanError, match="cuda_graph must be True or False, got 'yes'"):
        te.Sequential(te.GELU(), cuda_graph="yes")  # type: ignore[arg-type]


# -- equal to eager calls


@every_recipe
@pytest.mark.parametrize("way", ["make_graphed", "cuda_graph"])
def test_steps_equal_eager_ones(engine: Rerun, name: str, way: str) -> None:
    other = mlp()
    model = twin(other)
    if way == "cuda_graph":
        model.cuda_graph = True
    graphed = te.make_graphed(model) if way == "make_graphed" else model
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-4) for m in (model, other)]
    for i in range(5):
        both((graphed, other), RECIPES[name], data(seed=i), i)
        assert_same(gradients(model), gradients(other))
        assert_same(state(model), state(other))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert engine.recorded == 2  # a forward and a backward
    assert engine.replayed == 8  # the first step was eager


def test_a_sample_is_captured_at_once_and_changes_nothing(engine: Rerun) -> None:
    model = te.Sequential(te.Dropout(0.5), mlp(), nn.BatchNorm1d(32))
    other = twin(model)
    before = torch.get_rng_state()
    with te.autocast(recipe=DELAYED):
        graphed = te.make_graphed(model, data())
    assert engine.recorded == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert not gradients(model)
    assert all(not s.amax_history.any() for s in registered() if s.maker is None)
    for i in range(3):
        both((graphed, other), DELAYED, data(seed=i), i)
    assert engine.replayed == 6
    assert_same(state(model), state(other))
    assert_same(gradients(model), gradients(other))


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_accumulation_in_one_region_rolls_once(engine: Rerun, name: str) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model)
    for outer in range(3):
        for run, mine in ((graphed, model), (other, other)):
            with te.autocast(recipe=RECIPES[name]):
                for i in range(3):
                    run(data(seed=10 * outer + i)).square().sum().backward()
            del mine
        assert_same(state(model), state(other))
        assert_same(gradients(model), gradients(other))
    assert engine.replayed == 2 * 8


def test_one_backward_over_two_calls_commits_once(engine: Rerun) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model, in_flight=2)
    for i in range(4):
        for run in (graphed, other):
            with te.autocast(recipe=DELAYED):
                a, b = run(data(seed=i)), run(data(seed=i + 50))
            (a.sum() * 3 + b.square().sum()).backward()
        assert_same(state(model), state(other))
        assert_same(gradients(model), gradients(other))
    assert engine.replayed > 8


def test_forwards_beyond_those_in_flight_run_eagerly(engine: Rerun) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model, data())
    for run in (graphed, other):
        ys = [run(data(seed=i)) for i in range(3)]
        for y in ys:  # not the last one first
            y.square().sum().backward()
    assert engine.replayed == 2
    assert_same(gradients(model), gradients(other))
    graphed(data())  # nobody keeps its output: the lane is free at once
    graphed(data()).sum().backward()
    assert engine.replayed == 5


def test_shapes_modes_and_recipes_have_their_own_graphs(engine: Rerun) -> None:
    model = te.Sequential(mlp(), te.Dropout(0.25))
    other = twin(model)
    graphed = te.make_graphed(model)
    for rows in (16, 8, 16, 8, 16, 8):
        both((graphed, other), None, data(rows))
    assert (engine.recorded, engine.replayed) == (4, 8)
    for _ in range(3):
        both((graphed, other), DELAYED, data(16))
    assert (engine.recorded, engine.replayed) == (6, 12)
    for m in (graphed, other):
        m.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context(), te.autocast(recipe=DELAYED):
            for i in range(3):
                assert torch.equal(graphed(data(seed=i)), other(data(seed=i)))
    assert (engine.recorded, engine.replayed) == (8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            y, z = graphed(data()), other(data())
            assert y.dtype is z.dtype
            assert torch.equal(y, z)
    assert_same(state(model), state(other))
    assert_same(gradients(model), gradients(other))


def test_interleaved_eager_calls_share_the_state(engine: Rerun) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model)
    for i in range(4):
        both((graphed, other), DELAYED, data(seed=i))
        both((model, other), DELAYED, data(8, seed=i))
        with torch.no_grad(), te.autocast(recipe=DELAYED):
            assert torch.equal(model(data()), other(data()))
    assert engine.replayed
    assert_same(state(model), state(other))


def test_a_scale_of_another_recipe_is_derived_eagerly(engine: Rerun) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model)
    short = te.recipe.DelayedScaling(amax_history_len=2, margin=1)
    for recipe in (DELAYED, DELAYED, DELAYED, short, DELAYED, DELAYED, short, short, short):
        both((graphed, other), recipe, data())
        assert_same(state(model), state(other))
    assert_same(gradients(model), gradients(other))


def test_non_finite_values_follow_the_rules(engine: Rerun) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model)
    for i in range(6):
        x = data(seed=i)
        if i in (2, 4):
            x.data[3, 5] = torch.inf if i == 2 else torch.nan
        for run in (graphed, other):
            with te.autocast(recipe=DELAYED):
                run(x).sum().backward()
        assert_same(state(model), state(other))
    assert any(s.nonfinite_steps.any() for s in registered())
    assert engine.replayed == 10


def test_random_numbers_differ_between_replays_and_repeat_with_the_seed(engine: Rerun) -> None:
    graphed = te.make_graphed(te.Sequential(te.Dropout(0.5)), data())
    torch.manual_seed(5)
    a, b = graphed(data()), graphed(data())
    torch.manual_seed(5)
    assert torch.equal(graphed(data()), a)
    assert not torch.equal(a, b)
