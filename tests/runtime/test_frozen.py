"""`te.weights_frozen()` and `is_first_microbatch=`: what is shared, what is checked, and what ends it."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import te_ops as te
from te_ops.registry import REGISTRY, Launch
from te_ops.registry import Call as KernelCall
from tests.runtime.cases import RECIPES, assert_same, gradients, mlp, state, twin
from tests.runtime.graph_engine import Rerun
from tests.runtime.test_weights import WRITERS

QUANTIZED = [name for name in RECIPES if name != "none"]
# What nothing shows: the address stays and no version counter moves.
UNSEEN = {
    "sgd_fused",
    "adam_fused",
    "adamw_fused",
    "adagrad_fused",
    "data",
    "flat",
    "numpy",
    "resize",
}


def data(rows: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def accumulate(
    model: nn.Module, recipe: te.Recipe | None, frozen: bool, rows: tuple[int, ...]
) -> None:
    """Forward and backward of one microbatch for each row count, in one region."""
    torch.manual_seed(1)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        if frozen:
            with te.weights_frozen():
                for i, n in enumerate(rows):
                    model(data(n, i)).square().sum().backward()
        else:
            for i, n in enumerate(rows):
                model(data(n, i)).square().sum().backward()


class Counted:
    """Counts quantizations of a 128 x 32 tensor: the first weight of `mlp()`."""

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture
def counted():
    """Every quantize kernel of the reference, counting those of the first weight."""
    counter = Counted()
    plain = REGISTRY.kernels("*")[0]

    def bind(call: KernelCall) -> Launch:
        launch = plain.bind(call)
        weight = call.spec(call.reads[0]).shape == (128, 32)

        def counting(*args):
            counter.count += weight
            return launch(*args)

        return counting

    with REGISTRY.temporary(
        replace(plain, runs="quantize", name="counting", priority=1000, bind=bind)
    ):
        yield counter


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rows", [(16, 16, 16), (16, 5, 16, 64)], ids=str)
def test_microbatches_with_frozen_weights_equal_those_without(name: str, rows) -> None:
    frozen = mlp()
    plain = twin(frozen)
    for _ in range(2):
        accumulate(frozen, RECIPES[name], True, rows)
        accumulate(plain, RECIPES[name], False, rows)
        assert_same(gradients(frozen), gradients(plain))
        assert_same(state(frozen), state(plain))


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
def test_a_weight_is_quantized_once_in_a_scope(counted: Counted, name: str) -> None:
    model = mlp()
    accumulate(model, RECIPES[name], False, (16, 16, 16))
    assert counted.count == 3
    accumulate(model, RECIPES[name], True, (16, 16, 16))
    assert counted.count == 4
    accumulate(model, RECIPES[name], True, (16, 5, 64))  # other plans share the copies too
    assert counted.count == 5
    accumulate(model, RECIPES[name], False, (16,))
    assert counted.count == 6


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_is_first_microbatch(counted: Counted, name: str) -> None:
    model = mlp()
    plain = twin(model)
    recipe = RECIPES[name]
    with pytest.raises(te.PlanError, match="Sequential: is_first_microbatch=False comes without"):
        model(data(), is_first_microbatch=False)
    with pytest.raises(te.PlanError, match="must be True, False or None, got 1"):
        model(data(), is_first_microbatch=1)  # type: ignore[arg-type]
    for _ in range(2):
        before = counted.count
        with te.autocast(recipe=recipe):
            for i in range(3):
                model(data(seed=i), is_first_microbatch=i == 0).square().sum().backward()
        assert counted.count == before + 1
        with te.autocast(recipe=recipe):
            for i in range(3):
                plain(data(seed=i)).square().sum().backward()
        assert_same(gradients(model), gradients(plain))
        assert_same(state(model), state(plain))
    with te.autocast(recipe=recipe):
        model(data(), is_first_microbatch=None)
    assert counted.count == 9


@pytest.mark.parametrize("name", [n for n in WRITERS if n not in ("flat", "resize")])
def test_writers_inside_a_scope(name: str) -> None:
    """What can be seen raises, or is quantized anew; what cannot be seen is the caller's promise (documented)."""
    op = te.Linear(32, 32, bias=False)
    recipe = te.recipe.MXFP8BlockScaling()
    x = torch.linspace(-1.0, 1.0, 32 * 32).reshape(32, 32)
    with te.weights_frozen(), te.autocast(recipe=recipe):
        before = op(x)
        before.sum().backward()
        WRITERS[name](op)
        stepped = name.startswith(("sgd", "adam", "adagrad"))
        if stepped or name in UNSEEN:  # an optimizer's step ends the sharing, fused or not
            after = op(x)
        else:
            with pytest.raises(
                te.PlanError, match=r"Linear\.weight has changed inside te\.weights_frozen"
            ):
                op(x)
            after = None
    with te.autocast(recipe=recipe):
        fresh = op(x)
    assert not torch.equal(fresh, before)
    if stepped:
        assert torch.equal(after, fresh)
    elif after is not None:
        assert torch.equal(after, before)


def test_writes_to_the_buffer_behind_a_parameter_are_not_seen() -> None:
    """As flat parameters of sharded optimizers do it; nor is a storage that comes back where it was (FSDP)."""
    op = te.Linear(32, 32, bias=False)
    flat = op.weight.detach().clone().reshape(-1)
    op.weight.data = flat.view(32, 32)
    x = torch.ones(2, 32)
    with te.weights_frozen(), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        before = op(x)
        flat.mul_(3)
        assert torch.equal(op(x), before)
    with te.weights_frozen(), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        assert not torch.equal(op(x), before)
        address = op.weight.data_ptr()
        WRITERS["resize"](op)
        if op.weight.data_ptr() != address:
            with pytest.raises(te.PlanError, match="its address"):
                op(x)


@pytest.mark.parametrize("name", ["data", "numpy"])
def test_the_checksum_of_the_debug_mode_sees_every_writer(name: str, monkeypatch) -> None:
    monkeypatch.setenv("TE_OPS_CHECK_FROZEN", "1")
    op = te.Linear(32, 32, bias=False)
    with te.weights_frozen(), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        op(torch.ones(2, 32))
        op(torch.ones(2, 32))
        WRITERS[name](op)
        with pytest.raises(te.PlanError, match=r"its checksum"):
            op(torch.ones(2, 32))


def test_the_error_names_the_parameter_and_what_changed() -> None:
    model = mlp()
    with te.weights_frozen(), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        model(data())
        with torch.no_grad():
            model[3].weight.add_(1)
        with pytest.raises(
            te.PlanError, match=r"Sequential\.3\.weight has changed.*\(its version\)"
        ):
            model(data())
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        assert torch.isfinite(model(data())).all()


def test_an_optimizer_step_ends_the_sharing_so_far(counted: Counted) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    plain = twin(model)
    recipe = te.recipe.Float8CurrentScaling()
    with te.weights_frozen(), te.autocast(recipe=recipe):
        for i in range(4):
            y = model(data(seed=i))
            y.sum().backward()
            if i == 1:
                optimizer.step()
    assert counted.count == 2
    plain.load_state_dict(model.state_dict())
    with te.autocast(recipe=recipe):
        assert torch.equal(plain(data(seed=3)), y)


def test_copies_made_without_gradients_serve_a_backward() -> None:
    for guard in (torch.inference_mode, torch.no_grad):
        model = mlp()
        plain = twin(model)
        with te.weights_frozen(), te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
            with guard():
                model(data())
            x = data().requires_grad_()
            model(x).square().sum().backward()
        z = data().requires_grad_()
        with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
            plain(z).square().sum().backward()
        assert_same(gradients(model), gradients(plain))
        assert torch.equal(x.grad, z.grad)


def test_a_backward_after_the_scope_reads_the_copies_of_its_forward() -> None:
    model = mlp()
    plain = twin(model)
    recipe = te.recipe.Float8CurrentScaling()
    with te.weights_frozen(), te.autocast(recipe=recipe):
        ys = [model(data(seed=i)) for i in range(2)]
    with te.weights_frozen(), te.autocast(recipe=recipe):
        model(data(seed=5))
    for i, y in enumerate(ys):
        y.square().sum().backward()
        with te.autocast(recipe=recipe):
            plain(data(seed=i)).square().sum().backward()
    assert_same(gradients(model), gradients(plain))


def test_delayed_scaling_observes_the_weight_once_and_keeps_the_scale_of_the_copy() -> None:
    model = te.Linear(32, 32, bias=False)
    recipe = te.recipe.DelayedScaling(amax_history_len=4)
    x = data()
    with te.weights_frozen():
        for _ in range(3):  # three regions: the state of the weight rolls at the first one only
            with te.autocast(recipe=recipe):
                y = model(x)
            y.sum().backward()
    history = dict(model.named_buffers())["quantizer.delayed.weight.amax_history"]
    inputs = dict(model.named_buffers())["quantizer.delayed.input.amax_history"]
    assert (history > 0).sum() == 1
    assert (inputs > 0).sum() == 3


def test_scopes_nest_and_belong_to_their_context(counted: Counted) -> None:
    model = mlp()
    recipe = te.recipe.Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        with te.weights_frozen():
            model(data())
            with te.weights_frozen():
                model(data())
            model(data())
        assert counted.count == 1
        model(data())
        assert counted.count == 2
        try:
            with te.weights_frozen():
                model(data())
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        model(data())
        assert counted.count == 4


def test_recompute_and_several_segments_share_too(counted: Counted) -> None:
    model = te.Sequential(
        te.Linear(32, 128), nn.Tanh(), te.Recompute(te.GELU(), te.Linear(128, 32))
    )
    plain = twin(model)
    recipe = te.recipe.Float8BlockScaling()
    accumulate(model, recipe, True, (16, 16))
    assert counted.count == 1
    accumulate(plain, recipe, False, (16, 16))
    assert_same(gradients(model), gradients(plain))


def test_copies_die_with_the_scope_and_with_the_model() -> None:
    model = mlp()
    gc.disable()
    try:
        with te.weights_frozen(), te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
            model(data())
            from te_ops.runtime.frozen import FROZEN

            scope = FROZEN.get()
            (table,) = scope.copies.values()
            record = next(iter(table.values())).values[0]
            ref = weakref.ref(record.data)
            del record, table
            assert ref() is not None
        assert ref() is None
        with te.weights_frozen(), te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
            other = copy.deepcopy(model)
            other(data())
            died = weakref.ref(other)
            del other
            assert died() is None
    finally:
        gc.enable()


def test_explain_says_what_a_scope_shares() -> None:
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        plan = mlp().plan(data())
        inside = mlp().explain(data())
    assert plan.segments[0].forward.prologue is not None
    assert "cached" not in inside
    with te.weights_frozen(), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        assert mlp().explain(data()).count("(cached)") == 2


def test_free_workspaces_forgets_the_copies(counted: Counted) -> None:
    model = mlp()
    with te.weights_frozen(), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        model(data())
        te.free_workspaces()
        model(data())
    assert counted.count == 2


# -- with CUDA graphs (on the CPU, recordings are run again)


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
def test_graphs_share_the_copies_of_a_scope(engine: Rerun, counted: Counted, name: str) -> None:
    """One graph makes the copies, another one reads them."""
    model = mlp()
    plain = twin(model)
    graphed = te.make_graphed(model)
    for _ in range(5):
        before = counted.count
        for run, frozen in ((graphed, True), (plain, False)):
            accumulate(run, RECIPES[name], frozen, (16, 16, 16, 16))
        assert_same(gradients(model), gradients(plain))
        assert_same(state(model), state(plain))
    assert graphed.captured == 2
    assert counted.count == before + 1 + 4
    accumulate(graphed, RECIPES[name], False, (16, 16))  # outside of a scope, neither of them
    accumulate(plain, RECIPES[name], False, (16, 16))
    assert_same(gradients(model), gradients(plain))


def test_graphs_check_the_promise_and_start_anew_after_a_step(
    engine: Rerun, counted: Counted
) -> None:
    model = mlp()
    recipe = te.recipe.Float8CurrentScaling()
    graphed = te.make_graphed(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def call(run: nn.Module) -> Tensor:
        with te.autocast(recipe=recipe):
            return run(data())

    for _ in range(3):
        with te.weights_frozen():
            for _ in range(3):
                call(graphed)
    assert graphed.captured == 2
    before = counted.count
    with te.weights_frozen():
        for _ in range(3):
            call(graphed).sum().backward()
        optimizer.step()
        assert counted.count == before + 1
        y = call(graphed)
        assert counted.count == before + 2
        assert torch.equal(y, call(twin(model)))
        with torch.no_grad():
            model[1].bias.add_(1)  # nobody quantizes it
        assert torch.equal(call(graphed), call(twin(model)))
        with torch.no_grad():
            model[1].weight.add_(1)
        with pytest.raises(te.PlanError, match=r"Sequential\.1\.weight has changed.*its version"):
            call(graphed)
    with te.weights_frozen():
        assert torch.equal(call(graphed), call(twin(model)))


def test_two_scopes_do_not_take_each_others_copies(engine: Rerun) -> None:
    model = mlp()
    graphed = te.make_graphed(model)
    recipe = te.recipe.Float8CurrentScaling()
    for _ in range(4):
        with te.autocast(recipe=recipe):
            for k in range(3):
                y = graphed(data(seed=k), is_first_microbatch=k == 0)
                assert torch.equal(y, model(data(seed=k)))
            with torch.no_grad():
                model[3].weight.mul_(1.5)
            with te.weights_frozen():
                for k in range(3):
                    assert torch.equal(graphed(data(seed=k)), model(data(seed=k)))
    assert graphed.captured == 2
    with pytest.raises(te.PlanError, match="comes without"):
        te.make_graphed(mlp())(data(), is_first_microbatch=False)


def test_a_microbatch_flag_inside_a_recording_is_refused(engine: Rerun) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x, is_first_microbatch=True)

    with pytest.raises(te.PlanError, match="is_first_microbatch= inside of a graphed module"):
        te.make_graphed(Inner(), data())


def test_buffers_of_ops_are_no_weights() -> None:
    """What depends on the lengths of a cache only is not shared: they move with every call."""
    torch.manual_seed(0)
    rotary, cache = te.RoPE(16), te.KVCache(2, 8, 2, 16)
    model = te.Sequential(
        te.Linear(32, 96), te.Attention(2, packed=True, rotary=rotary, cache=cache)
    )
    x = torch.randn(2, 6, 32)
    results = []
    for scope in (contextlib.nullcontext(), te.weights_frozen()):
        cache.reset()
        recipe = te.recipe.MXFP8BlockScaling()
        with torch.no_grad(), te.autocast(recipe=recipe), scope:
            results.append(torch.cat([model(part) for part in x.split([3, 1, 1, 1], 1)], 1))
    assert torch.equal(*results)
