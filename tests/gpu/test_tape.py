"""Recorded launches on a GPU: same bits, other streams and threads, capture, flat memory, few operations."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.runtime import replay, replay_report, transcript
from te_ops.runtime import state as runtime_state
from te_ops.runtime.bundle import Bundles
from tests.gpu.sync import held

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RECIPES: dict[str, te.Recipe | None] = {
    "dense": None,
    "delayed": te.recipe.DelayedScaling(amax_history_len=16),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
}
CALLS = transcript.WARM + 3


def mlp(width: int = 256, inner: int = 384) -> te.Sequential:
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    return te.Sequential(
        te.RMSNorm(width, **options),
        te.Linear(width, 2 * inner, **options),
        te.SwiGLU(),
        te.Linear(inner, width, bias=False, **options),
    )


def train(model: Any, recipe: te.Recipe | None, rows: int, calls: int = CALLS) -> list[Any]:
    """Everything that comes out of some steps on new data each."""
    found = []
    for step in range(calls):
        torch.manual_seed(step)
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        model.zero_grad(set_to_none=True)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(torch.randn_like(y))
        grads = [t.grad for t in (x, *model.parameters()) if t.grad is not None]
        found += [t.detach().clone() for t in (y, *grads, *model.buffers())]
    return found


@pytest.mark.parametrize("rows", [512, 48, 37])
@pytest.mark.parametrize("name", RECIPES)
def test_same_bits_as_the_launches(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours_model = mlp()
    ours = train(ours_model, RECIPES[name], rows)
    with monkeypatch.context() as patch:
        patch.delitem(replay.STREAMS, "cuda")
        patch.setattr(runtime_state, "UPDATES", {})
        theirs = train(mlp(), RECIPES[name], rows)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), i


def test_what_is_recorded() -> None:
    """With cuBLASLt's bindings, whole steps: whatever is not says why."""
    lt = pytest.importorskip("te_ops.backends.cublas.lt")
    if lt.missing() is not None:
        pytest.skip(lt.missing())
    for name in ("dense", "delayed", "current", "block"):
        model = mlp()
        train(model, RECIPES[name], 512)
        report = replay_report(model)
        assert len(report) == 2
        assert all(line.endswith("operations") for line in report), (name, report)


def bundled(model: Any) -> list[Bundles]:
    """Of the tapes of a model's only runner."""
    (runner,) = model.__dict__["_te_cache"].runners.values()
    (part,) = runner.runners
    tapes = [phase.tape for _, phase in part.phases()]
    return [tape.bundles for tape in tapes if tape is not None and tape.bundles is not None]


def steady(model: Any, recipe: te.Recipe | None, x: torch.Tensor, dy: torch.Tensor) -> list[Any]:
    """A step as a training loop makes it: addresses come again."""
    x.grad = None
    model.zero_grad(set_to_none=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(dy)
    return [y, x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", ["dense", "delayed", "current", "block"])
def test_everything_at_once_where_addresses_come_again(name: str) -> None:
    lt = pytest.importorskip("te_ops.backends.cublas.lt")
    if lt.missing() is not None:
        pytest.skip(lt.missing())
    recipe, model = RECIPES[name], mlp()
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    for _ in range(CALLS + 40):
        steady(model, recipe, x, dy)
    found = bundled(model)
    assert [len(b.made) > 0 for b in found] == [True, True]
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        model[1].weight.mul_(1.5)
    before = [b.clone() for b in model.buffers()]
    ours = [t.detach().clone() for t in (*steady(model, recipe, x, dy), *model.buffers())]
    for state, kept in zip(model.buffers(), before, strict=True):
        state.copy_(kept)
    for b in found:
        b.made, b.left = {}, 0
    theirs = [t.detach().clone() for t in (*steady(model, recipe, x, dy), *model.buffers())]
    assert all(not b.made for b in found)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), i


def test_workspaces_that_were_given_back() -> None:
    model = mlp()
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    for _ in range(CALLS + 8):
        expected = [t.detach().clone() for t in steady(model, None, x, dy)]
    te.free_workspaces()
    for _ in range(8):
        got = [t.detach().clone() for t in steady(model, None, x, dy)]
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_another_stream_and_other_threads() -> None:
    """Threads share the parameters, each on its own stream, which torch says of any module."""
    model, recipe = mlp(), RECIPES["current"]
    train(model, recipe, 64)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    def step() -> list[torch.Tensor]:
        with te.autocast(recipe=recipe):
            y = model(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]

    expected = step()
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                found = step()
                stream.synchronize()
                if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                    wrong.append(threading.current_thread().name)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.parametrize("name", ["dense", "delayed", "current", "block"])
def test_memory_and_operations_do_not_grow(name: str) -> None:
    model, recipe = mlp(), RECIPES[name]
    train(model, recipe, 64)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.sum().backward()

    assert len(set(held(step, 300)[10:])) == 1


def test_a_capture_of_a_step() -> None:
    model, recipe = mlp(), RECIPES["current"]
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    stream = torch.cuda.Stream()

    def step() -> list[torch.Tensor]:
        with te.autocast(recipe=recipe):
            y = model(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(CALLS):
            expected = [t.clone() for t in step()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_states_roll_on_the_device_as_by_torch() -> None:
    """One launch against `delayed_update`."""
    from te_ops.runtime.state import DelayedState, Observation, commit

    te.Sequential(te.GELU())(torch.ones(8, device="cuda"))  # the device's kernels are there
    for algo, length, margin in (("max", 1, 0), ("max", 1024, 1), ("most_recent", 17, 0)):
        config = te.recipe.DelayedScaling(
            amax_history_len=length, amax_compute_algo=algo, margin=margin
        )
        ours = [DelayedState(length, "cuda") for _ in range(60)]
        theirs = [DelayedState(length) for _ in ours]
        for step in range(4):
            torch.manual_seed(step)
            amaxes = torch.rand(len(ours)) * 10
            amaxes[step] = float("nan")
            amaxes[step + 7] = float("inf")
            amaxes[step + 11] = 0.0
            given = amaxes.cuda()
            commit({s: Observation(given[i], config, 448.0, None) for i, s in enumerate(ours)})
            for i, t in enumerate(theirs):
                t.advance(amaxes[i], config, 448.0)
        for s, t in zip(ours, theirs, strict=True):
            for a, b in zip(s.buffers(), t.buffers(), strict=True):
                assert torch.equal(a.cpu(), b)
