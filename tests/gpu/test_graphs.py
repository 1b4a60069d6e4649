"""CUDA graphs on a device: replays equal eager calls, whole steps can be captured, and nothing outlives a failure."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import te_ops as te
from tests.gpu.sync import allocated, held, synchronising_is_an_error

RECIPES: dict[str, te.Recipe | None] = {
    "none": None,
    "delayed": te.recipe.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
    "nvfp4": te.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)
DELAYED = RECIPES["delayed"]


def mlp(width: int = 128, hidden: int = 256, **options: bool) -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(
        te.RMSNorm(width, dtype=torch.bfloat16),
        te.Linear(width, 2 * hidden, bias=False, dtype=torch.bfloat16),
        te.SwiGLU(),
        te.Linear(hidden, width, dtype=torch.bfloat16),
        **options,
    ).cuda()


def data(rows: int = 64, seed: int = 0, width: int = 128) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(
        rows, width, generator=generator, device="cuda", dtype=torch.bfloat16
    ).requires_grad_()


def step(
    run: Callable[..., torch.Tensor], x: torch.Tensor, recipe: te.Recipe | None
) -> list[torch.Tensor]:
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = run(x)
    y.float().square().mean().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(p, q), name
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), f"gradient of {name}"
    found, expected = dict(a.named_buffers()), dict(b.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        assert torch.equal(buffer, expected[name]), name


@every_recipe
@pytest.mark.parametrize("way", ["make_graphed", "cuda_graph"])
def test_training_equals_eager_training(name: str, way: str) -> None:
    recipe = RECIPES[name]
    eager = mlp()
    model = copy.deepcopy(eager)
    model.cuda_graph = way == "cuda_graph"
    graphed = te.make_graphed(model) if way == "make_graphed" else model
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, eager)]
    for i in range(8):
        rows = 64 if i % 3 else 32
        ours, theirs = step(graphed, data(rows, i), recipe), step(eager, data(rows, i), recipe)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
        assert_same(model, eager)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=i % 2 == 0)
    if way == "make_graphed":
        assert graphed.captured == 2


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_accumulation_rolls_once_and_eager_calls_come_between(name: str) -> None:
    recipe = RECIPES[name]
    eager = mlp()
    model = copy.deepcopy(eager)
    with te.autocast(recipe=recipe):
        graphed = te.make_graphed(model, data())
    for outer in range(3):
        for run, plain in ((graphed, model), (eager, eager)):
            with te.autocast(recipe=recipe):
                for i in range(3):
                    run(data(seed=10 * outer + i)).square().sum().backward()
                plain(data(48, seed=outer)).sum().backward()
            plain.eval()
            with torch.no_grad(), te.autocast(recipe=recipe):
                run(data())
            plain.train()
        assert_same(model, eager)


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_inputs_from_anywhere(name: str) -> None:
    """A call is one launch, which copies in and out: other addresses, strides and alignments at every step."""
    recipe = RECIPES[name]
    eager = mlp()
    model = copy.deepcopy(eager)
    with te.autocast(recipe=recipe):
        graphed = te.make_graphed(model, data())
    kept = []
    for i in range(8):
        wide = torch.randn(65, 129, device="cuda", dtype=torch.bfloat16)
        views = [
            wide[:64, :128],
            wide[1:, 1:],
            wide[:64, :128].contiguous(),
            wide.t()[:128, :64].t(),
        ]
        flat = wide.reshape(-1)[1 : 1 + 64 * 128].view(64, 128)  # contiguous, on two bytes
        for view in (*views, flat):
            x, twin = (view.detach().requires_grad_() for _ in range(2))
            ours, theirs = step(graphed, x, recipe), step(eager, twin, recipe)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            if i % 2:
                kept.append(torch.empty_like(x))  # what comes out lies elsewhere
        assert_same(model, eager)
    (lane,) = next(iter(graphed._graphs.lanes.values()))
    for pair in lane.pairs.values():
        assert None not in pair.forward.around.values()
        assert None not in pair.backward.around.values()


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_weights_frozen_over_microbatches(name: str) -> None:
    """Eager and by replay (one graph makes the copies, one reads them), against weights quantized at every call."""
    recipe = RECIPES[name]
    plain = mlp()
    eager, model = copy.deepcopy(plain), copy.deepcopy(plain)
    graphed = te.make_graphed(model)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (plain, eager, model)
    ]
    for outer in range(4):
        for run in (eager, graphed):
            with te.weights_frozen(), te.autocast(recipe=recipe):
                for i in range(4):
                    run(data(seed=10 * outer + i)).float().square().mean().backward()
        with te.autocast(recipe=recipe):
            for i in range(4):
                plain(data(seed=10 * outer + i)).float().square().mean().backward()
        assert_same(eager, plain)
        assert_same(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert graphed.captured == 2


@pytest.mark.parametrize("way", ["make_graphed", "cuda_graph"])
def test_one_backward_over_two_calls_in_flight(way: str) -> None:
    """The second call captures while the first one's forward waits, on the caller's stream."""
    eager = mlp()
    model = copy.deepcopy(eager)
    model.cuda_graph = way == "cuda_graph"
    graphed = te.make_graphed(model, in_flight=2) if way == "make_graphed" else model
    for i in range(4):
        for run in (graphed, eager):
            with te.autocast(recipe=DELAYED):
                a, b, c = (run(data(seed=i + 50 * k)) for k in range(3))
            (a.sum() * 3 + b.square().sum() + c.sum()).backward()
        assert_same(model, eager)


def test_hooks_on_gradients_of_parameters_run_once() -> None:
    eager = mlp()
    model = copy.deepcopy(eager)
    for m in (model, eager):
        m[1].weight.register_hook(lambda g: 3 * g)
    graphed = te.make_graphed(model, data())
    for i in range(3):
        for run in (graphed, eager):
            run(data(seed=i)).sum().backward()
        assert_same(model, eager)


def test_a_module_that_keeps_a_parameter_in_two_places() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.kept = [self.inner[1].weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.kept[0].square().mean()

    model = Twice()
    eager = copy.deepcopy(model)
    graphed = te.make_graphed(model, data())
    for i in range(3):
        for run in (graphed, eager):
            run(data(seed=i)).float().sum().backward()
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert graphed.captured == 1


@every_recipe
def test_a_users_capture_of_a_whole_step(name: str) -> None:
    """Forward, backward, the region's exit and the optimizer in one graph: it rolls the state at every replay."""
    recipe = RECIPES[name]
    eager = mlp()
    model = copy.deepcopy(eager)
    x = torch.empty(64, 128, device="cuda", dtype=torch.bfloat16)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=True, capturable=True)
        for m in (model, eager)
    ]

    def whole(m: nn.Module, optimizer: torch.optim.Optimizer, value: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = m(value)
        y.float().square().mean().backward()
        optimizer.step()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(4):
            x.copy_(data(seed=i).detach())
            whole(model, optimizers[0], x)
    torch.cuda.current_stream().wait_stream(side)
    for i in range(4):
        whole(eager, optimizers[1], data(seed=i).detach())
    assert_same(model, eager)
    optimizers[0].zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = whole(model, optimizers[0], x)
    for i in range(4, 8):
        x.copy_(data(seed=i).detach())
        graph.replay()
        expected = whole(eager, optimizers[1], data(seed=i).detach())
        assert torch.equal(y, expected)
        assert_same(model, eager)


def test_random_numbers_of_replays() -> None:
    model = te.Sequential(te.Dropout(0.5), te.Linear(128, 128, dtype=torch.bfloat16)).cuda()
    graphed = te.make_graphed(model, data())
    torch.manual_seed(3)
    a, b = graphed(data()), graphed(data())
    torch.manual_seed(3)
    assert torch.equal(graphed(data()), a)
    assert not torch.equal(a, b)


@pytest.mark.parametrize("name", ["none", "delayed", "current"])
def test_replays_neither_wait_nor_grow(name: str) -> None:
    recipe = RECIPES[name]
    model = mlp()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        graphed = te.make_graphed(model, data())
    x = data()

    def once() -> None:
        model.zero_grad()
        x.grad = None
        with synchronising_is_an_error():
            step(graphed, x, recipe)

    seen = held(once, 40)
    assert len(set(seen[2:])) == 1, seen
    assert graphed.captured == 1


def test_gradients_are_the_users() -> None:
    """B067: a `.grad` that was there stays the one that is filled, and what was handed out is not written again."""
    model = mlp()
    weight = model[1].weight
    buffer = weight.grad = torch.zeros_like(weight)
    graphed = te.make_graphed(model, data())
    eager = copy.deepcopy(model)
    step(eager, data(), None)
    step(graphed, data(), None)
    assert weight.grad is buffer
    assert torch.equal(buffer, eager[1].weight.grad)
    step(eager, data(), None)
    step(graphed, data(), None)
    assert weight.grad is buffer
    assert torch.equal(buffer, eager[1].weight.grad)
    model.zero_grad()
    y, _ = step(graphed, data(), None)
    kept, copies = (weight.grad, y), (weight.grad.clone(), y.clone())
    model.zero_grad()
    step(graphed, data(seed=9), None)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_writers_of_parameters_are_seen() -> None:
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
    torch.utils.swap_tensors(model[1].weight, nn.Parameter(torch.randn_like(model[1].weight)))
    check()
    model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}, assign=True)
    check()


def test_other_streams_and_threads() -> None:
    model = mlp()
    graphed = te.make_graphed(model, data(), in_flight=2)
    expected = [step(model, data(seed=i), None) for i in range(3)]
    failed: list[str] = []

    def work(i: int) -> None:
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                for _ in range(10):
                    x = data(seed=i)
                    y = graphed(x)
                    (dx,) = torch.autograd.grad(y.float().square().mean(), x)
                    if not (torch.equal(y, expected[i][0]) and torch.equal(dx, expected[i][1])):
                        failed.append(f"thread {i} got other numbers")
        except Exception as error:  # noqa: BLE001
            failed.append(f"thread {i}: {error}")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_capture_does_not_disturb_other_threads() -> None:
    stop = threading.Event()
    failed: list[str] = []

    def work() -> None:
        try:
            model, x = mlp(), data()
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    float(step(model, x, None)[0].sum())
        except Exception as error:  # noqa: BLE001
            failed.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for rows in (16, 32, 48, 64):
            model = mlp()
            graphed = te.make_graphed(model, data(rows))
            assert torch.equal(graphed(data(rows)), model(data(rows)))
    finally:
        stop.set()
        thread.join()
    assert not failed


class Waits(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum() > 0)


def test_what_waits_for_the_device_is_refused_and_poisons_nothing() -> None:
    model = nn.Sequential(mlp(), Waits())
    for _ in range(2):
        with pytest.raises(te.PlanError, match=r"Sequential.1 \(Waits\).*CUDA graph"):
            te.make_graphed(model, data())
    assert torch.isfinite(model(data())).all()
    fine = mlp()
    graphed = te.make_graphed(fine, data())
    for i in range(3):
        assert torch.equal(graphed(data(seed=i)), fine(data(seed=i)))
    dropout = te.make_graphed(te.Dropout(0.5), data())
    assert not torch.equal(dropout(data()), dropout(data()))
    torch.manual_seed(0)
    torch.randn(3, device="cuda")


def test_memory_comes_back() -> None:
    model = mlp(512, 1024)
    x = data(512, width=512)
    for _ in range(2):  # libraries keep scratch memory of their own for the streams of recordings
        with te.autocast(recipe=DELAYED):
            te.make_graphed(model, x)
        step(model, x, DELAYED)
        model.zero_grad()
        x.grad = None
        te.free_workspaces()
    baseline = allocated()
    with te.autocast(recipe=DELAYED):
        graphed = te.make_graphed(model, x)
    assert allocated() > baseline
    te.free_workspaces()
    te.free_workspaces()
    assert allocated() <= baseline + 4096
    step(graphed, x, DELAYED)  # and the next step works
    model.zero_grad()


def test_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    here, there = mlp(), mlp().to("cuda:1")
    graphs = [te.make_graphed(here, data()), te.make_graphed(there, data().to("cuda:1"))]
    for i in range(3):
        x = data(seed=i)
        a, b = graphs[0](x), graphs[1](x.to("cuda:1"))
        assert b.device.index == 1
        assert torch.equal(a, here(x))
        assert torch.equal(a, b.to("cuda:0"))
    with pytest.raises(te.PlanError, match="one device"):
        te.make_graphed(nn.Sequential(here, there), data())
