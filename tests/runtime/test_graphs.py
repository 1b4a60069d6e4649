"""`te.make_graphed` and `Sequential(cuda_graph=True)`, with an engine that runs recordings again on the CPU."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.runtime import engines
from te_ops.runtime.state import registered
from tests.runtime.cases import RECIPES, assert_same, gradients, mlp, state, step, twin
from tests.runtime.graph_engine import Rerun, data

DELAYED = te.recipe.DelayedScaling(amax_history_len=4)
every_recipe = pytest.mark.parametrize("name", RECIPES)


def both(
    pair: tuple[nn.Module, nn.Module], recipe: te.Recipe | None, x: torch.Tensor, seed: int = 0
) -> None:
    """One step of each on the same data and random numbers, equal in outputs and input gradients."""
    found = []
    for model in pair:
        mine = x.detach().clone().requires_grad_(x.requires_grad)
        torch.manual_seed(seed)
        y = step(model, mine, recipe)
        found.append((y, mine.grad))
    (y, dx), (y2, dx2) = found
    assert torch.equal(y, y2)
    assert (dx is None) == (dx2 is None)
    assert dx is None or torch.equal(dx, dx2)


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


# -- gradients belong to the user (B067)


def test_grad_buffers_stay_the_users(engine: Rerun) -> None:
    model = mlp()
    weight = model[1].weight
    buffer = weight.grad = torch.ones_like(weight)
    graphed = te.make_graphed(model, data())
    eager = twin(model)
    eager(data()).sum().backward()
    once = eager[1].weight.grad
    for n in (1, 2):
        graphed(data()).sum().backward()
        assert weight.grad is buffer
        torch.testing.assert_close(buffer, 1 + n * once)
    model.zero_grad()
    graphed(data()).sum().backward()
    kept = weight.grad
    copied = kept.clone()
    model.zero_grad()
    graphed(100 * data()).square().sum().backward()
    assert torch.equal(kept, copied)  # the next replay does not write what was handed out


def test_outputs_survive_the_next_replay_unless_copies_are_off(engine: Rerun) -> None:
    for copies in (True, False):
        graphed = te.make_graphed(mlp(), copies=copies)
        with torch.no_grad():
            graphed(data(grad=False))
            first = graphed(data(grad=False))
            kept = first.clone()
            graphed(2 + data(grad=False))
        assert torch.equal(first, kept) == copies


def test_without_copies_gradients_are_right_until_the_next_replay(engine: Rerun) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model, copies=False)
    for i in range(4):
        both((graphed, other), DELAYED, data(seed=i))
        assert_same(gradients(model), gradients(other))
        model.zero_grad()
        other.zero_grad()
    assert_same(state(model), state(other))


def test_masks_of_gradients_are_part_of_the_signature(engine: Rerun) -> None:
    model = mlp()
    other = twin(model)
    graphed = te.make_graphed(model)
    for frozen in ((), (0,), (1, 3), (0, 1, 3), ()):
        for m in (model, other):
            m.zero_grad()
            m.requires_grad_(True)
            for i in frozen:
                m[i].requires_grad_(False)
        for grad in (True, False, True, False):
            if grad or frozen != (0, 1, 3):
                both((graphed, other), None, data(grad=grad))
        assert_same(gradients(model), gradients(other))
    assert engine.replayed


def test_a_second_backward_is_refused(engine: Rerun) -> None:
    graphed = te.make_graphed(mlp(), data())
    y = graphed(data()).sum()
    y.backward(retain_graph=True)
    with pytest.raises(te.PlanError, match="second backward"):
        y.backward()
    x = data()
    (g,) = torch.autograd.grad(graphed(x).square().sum(), x, create_graph=True)
    with pytest.raises(te.PlanError, match="double backward"):
        g.sum().backward()


def test_a_parameter_written_between_forward_and_backward_is_refused(engine: Rerun) -> None:
    model = mlp()
    graphed = te.make_graphed(model, data())
    y = graphed(data()).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(te.PlanError, match=r"Sequential: a parameter has been changed in place"):
        y.backward()


def test_writers_of_parameters_are_seen(engine: Rerun) -> None:
    model = mlp()
    graphed = te.make_graphed(model, data())

    def check() -> None:
        for _ in range(3):
            assert torch.equal(graphed(data()), model(data()))

    check()
    model[1].weight.data.mul_(2)
    check()
    model[1].weight.data = 3 * model[1].weight.data
    check()
    model.load_state_dict({k: 2 * v for k, v in state(model).items()}, assign=True)
    check()
    model[1].weight = nn.Parameter(torch.randn(128, 32))
    check()


def test_a_parameter_turned_over_in_its_place_is_seen(engine: Rerun) -> None:
    model = te.Sequential(te.Linear(32, 32, bias=False))
    graphed = te.make_graphed(model, data())
    for _ in range(2):
        for _ in range(3):
            graphed(data())
        before = engine.replayed
        assert torch.equal(graphed(data()), model(data()))
        assert engine.replayed > before
        weight = model[0].weight
        address, weight.data = weight.data_ptr(), weight.data.t()
        assert weight.data_ptr() == address
        assert torch.equal(graphed(data()), model(data()))
    for _ in range(3):
        graphed(data())
    assert graphed.captured > 1


# -- what else may happen


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


def test_missing_output_gradients_are_zeros(engine: Rerun) -> None:
    model = te.Sequential(te.Linear(32, 32), te.MakeExtraOutput(), te.Linear(32, 32))
    other = twin(model)
    graphed = te.make_graphed(model, data())
    for run in (graphed, other):
        _, extra = run(data())
        extra.square().sum().backward()
    assert torch.equal(model[0].weight.grad, other[0].weight.grad)
    assert not model[2].weight.grad.any()  # eager: no gradient at all


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


def test_a_module_that_is_replaced_over_the_same_memory_gets_the_gradients(engine: Rerun) -> None:
    class Still(Rerun):
        """Gives what the recording gave: as a CUDA graph, which runs no Python, on the same inputs."""

        def record(self, body, pool, device, reads):  # type: ignore[no-untyped-def]
            first = body()

            def replay(given, made):  # type: ignore[no-untyped-def]
                for fresh, static in zip(made, first, strict=True):
                    fresh.copy_(static.detach())

            return first, replay

    engines.ENGINES["cpu"] = Still()
    model = mlp()
    graphed = te.make_graphed(model, data())
    graphed(data()).sum().backward()
    old = model[1].weight
    before = old.grad.clone()  # type: ignore[union-attr]
    other = copy.deepcopy(model[1])
    other.weight = nn.Parameter(old.detach())
    other.bias = None if model[1].bias is None else nn.Parameter(model[1].bias.detach())
    model[1] = other
    for _ in range(2):
        graphed(data()).sum().backward()
    assert torch.equal(old.grad, before)
    torch.testing.assert_close(other.weight.grad, 2 * before)
