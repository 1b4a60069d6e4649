"""Segments in autograd, slots, aliases, missing gradients (core contracts 1, 5, 15)."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_ops as te
from te_ops.graph import Graph, Value
from te_ops.registry import REGISTRY, Call, Kernel
from tests.runtime.cases import RECIPES, assert_same, double, gradients, mlp, state, step, twin

# -- gradients equal torch's, whatever the segments are


def foreign() -> dict[str, tuple[nn.Module, nn.Module]]:
    """Pipelines with a module that is not an Op, and torch's version of them."""

    class Skip(nn.Module):
        def __init__(self, *body: nn.Module) -> None:
            super().__init__()
            self.body = nn.Sequential(*body)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x)

    class Both(nn.Module):
        def __init__(self, a: nn.Module, b: nn.Module) -> None:
            super().__init__()
            self.a, self.b = a, b

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    a, b, c = te.Linear(8, 8), nn.Linear(8, 8), te.Linear(8, 8)

    def like(op: te.Linear) -> nn.Linear:
        made = nn.Linear(8, 8)
        made.load_state_dict(op.state_dict())
        return made

    return {
        "sequential": (te.Sequential(a, b, c), nn.Sequential(like(a), b, like(c))),
        "residual": (te.Residual(a, b, c), Skip(like(a), b, like(c))),
        "first": (te.Sequential(b, a), nn.Sequential(b, like(a))),
        "last": (te.Sequential(a, b), nn.Sequential(like(a), b)),
        "branch": (te.Sequential(te.Branch(a, b), te.Add()), Both(like(a), b)),
        "recompute": (
            te.Sequential(a, te.Recompute(c, te.GELU()), b),
            nn.Sequential(like(a), like(c), nn.GELU("tanh"), b),
        ),
        "nested": (
            te.Sequential(a, te.Residual(te.Sequential(c, b))),
            nn.Sequential(like(a), Skip(like(c), b)),
        ),
    }


@pytest.mark.parametrize("name", list(foreign()))
def test_foreign_modules_get_gradients(name: str) -> None:
    ours, theirs = foreign()[name]
    x = torch.randn(4, 8)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    theirs.zero_grad()
    want = theirs(b)
    want.square().sum().backward()
    expected = [p.grad.clone() for p in theirs.parameters() if p.grad is not None]
    theirs.zero_grad()
    got = ours(a)
    got.square().sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(a.grad, b.grad)
    found = [p.grad for p in ours.parameters() if p.grad is not None]
    assert len(found) == len(expected)
    total = sum(float(g.norm()) for g in expected)  # the modules are in another order in `branch`
    assert abs(sum(float(g.norm()) for g in found) - total) < 1e-4 * total


def test_foreign_module_keeps_its_own_hooks_and_runs_once() -> None:
    calls: list[str] = []
    inner = nn.Linear(8, 8)
    inner.register_forward_hook(lambda *_: calls.append("forward"))
    inner.register_full_backward_hook(lambda *_: calls.append("backward"))
    model = te.Sequential(te.Linear(8, 8), inner)
    model.plan(torch.randn(2, 8))
    assert calls == []
    model(torch.randn(2, 8).requires_grad_()).sum().backward()
    assert calls == ["forward", "backward"]


# -- contract 1: grain


def test_wgrads_and_hooks_interleave_over_layers() -> None:
    log: list[str] = []
    layers = [te.Linear(8, 8) for _ in range(4)]
    model = te.Sequential(*(m for layer in layers for m in (layer, te.Cut())))
    for i, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: log.append(f"reduce{i}"))

    def bind(call: Call) -> Any:
        number = int(call.node.path) // 2

        def launch(a: Tensor, b: Tensor) -> Tensor:
            log.append(f"wgrad{number}")
            return call.node.prim.reference(a, b, **call.node.attrs)

        return launch

    def only_wgrad(call: Call) -> str | None:
        return None if call.node.phase is te.graph.Phase.WGRAD else "not a wgrad"

    with REGISTRY.temporary(Kernel("gemm", "test.wgrad", bind, refuse=only_wgrad, priority=99)):
        model(torch.randn(2, 8)).sum().backward()
    expected = [f"{what}{i}" for i in (3, 2, 1, 0) for what in ("wgrad", "reduce")]
    assert log == expected


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_ready_layer_by_layer(autocast: bool) -> None:
    """Also with a cast of each FP32 weight to BF16, which belongs to its layer."""
    order: list[int] = []
    layers = [te.Linear(8, 8) for _ in range(4)]
    model = te.Sequential(*(m for layer in layers for m in (layer, te.Cut())))
    for i, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(torch.randn(2, 8))
    y.sum().backward()
    assert order == [3, 2, 1, 0]


def test_large_layers_are_segments_of_their_own() -> None:
    big = [te.Residual(te.Linear(2600, 2600, bias=False, device="meta")) for _ in range(3)]
    small = te.Sequential(*(te.Residual(te.Linear(8, 8)) for _ in range(3)))
    x = torch.empty(2, 2600, device="meta")
    assert len(te.Sequential(*big).plan(x).segments) == 3
    assert len(small.plan(torch.randn(2, 8)).segments) == 1


def live_bytes(model: te.Op, x: Tensor) -> list[int]:
    """Bytes of saved computed values that are still alive at each backward step."""
    saved: list[weakref.ref[Tensor]] = []
    seen: list[int] = []

    def pack(t: Tensor) -> Tensor:
        twin = t.view_as(t)
        saved.append(weakref.ref(twin))
        return twin

    def bind(call: Call) -> Any:
        def launch(*xs: Any) -> Any:
            if call.node.phase.is_backward:
                alive = [t for ref in saved if (t := ref()) is not None]
                seen.append(sum(t.numel() * t.element_size() for t in alive))
            return call.node.prim.reference(*xs, **call.node.attrs)

        return launch

    with REGISTRY.temporary(Kernel("gemm", "test.watch", bind, priority=99)):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = model(x)
        del x
        y.sum().backward()
    return seen


def test_saved_bytes_fall_during_backward() -> None:
    layers: list[te.Op] = []
    for _ in range(5):
        layers += [te.Linear(16, 16), te.GELU()]
    seen = live_bytes(te.Sequential(*layers), torch.randn(4, 16, requires_grad=True))
    assert len(seen) == 10
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < seen[0] / 3


# -- purity: several forwards, several backwards, failures


@pytest.mark.parametrize("name", RECIPES)
def test_retain_graph_twice(name: str) -> None:
    model = mlp()
    x = torch.randn(32, 32, requires_grad=True)
    recipe = RECIPES[name]
    if name == "nvfp4":
        recipe = te.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
    if recipe is not None:
        with te.autocast(recipe=recipe):
            y = model(x)
    else:
        y = model(x)
    loss = y.sum()
    loss.backward(retain_graph=True)
    once = gradients(model) | {"x": x.grad.clone()}
    model.zero_grad()
    x.grad = None
    before = state(model)
    loss.backward(retain_graph=True)
    if name == "delayed":  # the repeated backward reads the gradient scale of now (numerics 8)
        assert not torch.equal(before["1.quantizer.delayed.grad_output.scale"], torch.ones(1))
    else:
        assert_same(once, gradients(model) | {"x": x.grad.clone()})


@pytest.mark.parametrize("name", RECIPES)
def test_two_forwards_in_flight(name: str) -> None:
    """Forward 1, forward 2, backward 1, backward 2; the scales move in between."""
    recipe = RECIPES[name]
    model, x1, x2 = mlp(), torch.randn(32, 32), 7 * torch.randn(32, 32)

    def forward(m: te.Op, x: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        if recipe is None:
            return m(x)
        with te.autocast(recipe=recipe):
            return m(x)

    other = twin(model)
    y1, y2 = forward(model, x1, 1), forward(model, x2, 2)
    y1.sum().backward()
    first = gradients(model)
    forward(other, x1, 1).sum().backward()
    assert_same(first, gradients(other))
    model.zero_grad()
    y2.sum().backward()
    if (
        name != "delayed"
    ):  # there the gradient scales have moved on, and not in the other model's way
        other.zero_grad()
        forward(other, x2, 2).sum().backward()
        assert_same(gradients(model), gradients(other))


def test_one_op_twice_in_a_pipeline() -> None:
    op = te.Linear(8, 8)
    model = te.Sequential(op, te.GELU(), op)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    got = op.weight.grad.clone()
    op.zero_grad()
    h = torch.nn.functional.gelu(
        torch.nn.functional.linear(x, op.weight, op.bias), approximate="tanh"
    )
    torch.nn.functional.linear(h, op.weight, op.bias).sum().backward()
    torch.testing.assert_close(got, op.weight.grad)


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("region", [False, True])
def test_failure_in_step_k_changes_nothing(at: int, region: bool) -> None:
    """One forward step fails, also in a later segment; every buffer keeps its bits."""
    count = 0

    def bind(call: Call) -> Any:
        function = REGISTRY.find("reference").bind(call)

        def launch(*xs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at + 1:
                raise ValueError("broken kernel")
            return function(*xs)

        return launch

    model = te.Sequential(te.Linear(32, 32), te.Cut(), te.Linear(32, 32), te.Quantize())
    recipe = te.recipe.DelayedScaling(amax_history_len=4)
    x = torch.randn(32, 32)
    step(model, x, recipe)
    before = state(model)
    with REGISTRY.temporary(Kernel("*", "test.fail", bind, priority=99)):
        with te.autocast(recipe=recipe):
            if region:  # the user carries on: the failed call must not be half observed
                with pytest.raises(ValueError, match="broken kernel"):
                    model(5 * x)
            else:
                pass
        if not region:
            with pytest.raises(ValueError, match="broken kernel"), te.autocast(recipe=recipe):
                model(5 * x)
    assert count == at + 1
    assert_same(before, state(model))


def test_updates_are_written_only_if_all_segments_succeed() -> None:
    class Counter(te.Op):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def emit(self, g: Graph, x: Value) -> Value:
            old = g.buffer(self.seen)
            g.update(old, g.call(te.basic.pointwise.REDUCE, x, over="all", dtype=torch.float32))
            return double(g, x)

    class Broken(nn.Module):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fail:
                raise ValueError("no")
            return x + 0

    counter, broken = Counter(), Broken()
    model = te.Sequential(counter, broken)
    model(torch.ones(2, 2))
    assert float(counter.seen) == 4.0
    broken.fail = True
    with pytest.raises(ValueError, match="no"):
        model(torch.full((2, 2), 5.0))
    assert float(counter.seen) == 4.0


# -- lifetime


@pytest.mark.parametrize("grad", [True, False])
def test_no_intermediate_outlives_its_use(grad: bool) -> None:
    made: list[weakref.ref[Tensor]] = []

    def bind(call: Call) -> Any:
        function = REGISTRY.find("reference").bind(call)

        def launch(*xs: Any) -> Any:
            result = function(*xs)
            for item in result if isinstance(result, tuple) else (result,):
                if isinstance(item, Tensor):
                    made.append(weakref.ref(item))
            return result

        return launch

    model = te.Sequential(
        te.RMSNorm(8), te.Linear(8, 16), te.GELU(), te.Cut(), te.Linear(16, 8), te.SiLU()
    )
    x = torch.randn(4, 8)
    with (
        REGISTRY.temporary(Kernel("*", "test.watch", bind, priority=99)),
        torch.set_grad_enabled(grad),
    ):
        y = model(x)
        alive = [r() for r in made if r() is not None]
        outputs = sum(t is y or t.data_ptr() == y.data_ptr() for t in alive)
        saved = sum(len(s.saved_values) for s in model.plan(x).segments)
        assert len(alive) <= saved + outputs if grad else len(alive) == 1
        del alive
        if grad:
            y.sum().backward()
            model.zero_grad()
        del y
    gc.collect()
    assert [r for r in made if r() is not None] == []


def test_model_is_freed_by_its_last_reference() -> None:
    model = te.Sequential(te.Linear(8, 8), te.Cut(), te.GELU())
    y = model(torch.randn(4, 8))
    y.sum().backward()
    ref = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model, y
        assert ref() is None
    finally:
        gc.enable()


# -- threads


@pytest.mark.parametrize("name", ["none", "current"])
def test_eight_threads_on_one_plan(name: str) -> None:
    model, recipe = mlp(), RECIPES[name]
    inputs = [torch.randn(8, 32) for _ in range(8)]

    def once(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        if recipe is None:
            y = model(leaf)
        else:
            with te.autocast(recipe=recipe):
                y = model(leaf)
        (dx,) = torch.autograd.grad(y.square().sum(), leaf)
        return y.detach(), dx

    expected = [once(x) for x in inputs]
    model[1].in_features = model[1].in_features  # every thread finds a stale fingerprint
    wrong: list[Any] = []
    barrier = threading.Barrier(8)

    def work(i: int) -> None:
        try:
            barrier.wait()
            for _ in range(25):
                y, dx = once(inputs[i])
                if not (torch.equal(y, expected[i][0]) and torch.equal(dx, expected[i][1])):
                    wrong.append(i)
                if i == 0:
                    model[1].in_features = model[1].in_features
        except Exception as error:  # noqa: BLE001  (a thread must not die unseen)
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- saved tensors are ordinary ones


@pytest.mark.parametrize("name", ["none", "current", "mxfp8"])
def test_saved_tensor_hooks_see_every_part(name: str) -> None:
    """Offloading works: FP8 codes and scales pass as tensors, and come back."""
    model, x, recipe = mlp(), torch.randn(32, 32), RECIPES[name]
    seen: set[torch.dtype] = set()

    def pack(t: Tensor) -> Tensor:
        seen.add(t.dtype)
        return t.detach().clone()

    want = twin(model)
    step(want, x, recipe)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.clone()):
        step(model, x, recipe)
    assert_same(gradients(want), gradients(model))
    assert (torch.float8_e4m3fn in seen) == (name != "none")
    with torch.autograd.graph.save_on_cpu():
        step(model, x, recipe)
