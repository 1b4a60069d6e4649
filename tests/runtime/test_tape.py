"""A recorded phase gives what its launches give: same bits, its own memory, and the same behaviour under autograd."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.errors import Error, PlanError
from te_ops.registry import REGISTRY
from te_ops.runtime import replay, replay_report, transcript
from te_ops.runtime.segment import SegmentRunner
from te_ops.runtime.state import DelayedState
from te_ops.testing.cases import PIPELINES, Pipeline
from tests.runtime.host_kernels import Counter, host_kernels

RECIPES: dict[str, te.Recipe | None] = {
    "dense": None,
    "delayed": te.recipe.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
}
BY_NAME = {p.name: p for p in PIPELINES}
CALLS = transcript.WARM + 3


@pytest.fixture
def host() -> Iterator[Counter]:
    with host_kernels() as counter:
        yield counter


def mlp() -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(
        te.RMSNorm(32), te.Linear(32, 64), te.SwiGLU(), te.Linear(32, 32, bias=False)
    )


def tapes(model: Any) -> list[transcript.Recorded]:
    """Of every phase that a model's runners have run."""
    return [
        phase
        for runner in model.__dict__["_te_cache"].runners.values()
        for part in runner.runners
        if isinstance(part, SegmentRunner)
        for _, phase in part.phases()
    ]


def training(pipeline: Pipeline, recipe: te.Recipe | None, rows: int = 32) -> tuple[Any, list[Any]]:
    """Steps of training on new data each; the model, and everything that came out."""
    torch.manual_seed(0)
    model = pipeline.make().bfloat16()
    found: list[torch.Tensor] = []
    for step in range(CALLS):
        torch.manual_seed(step)
        xs = [x.requires_grad_() for x in pipeline.inputs(rows, dtype=torch.bfloat16)]
        model.zero_grad(set_to_none=True)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(*xs)
        ys = y if isinstance(y, tuple) else (y,)
        torch.autograd.backward(ys, [torch.randn_like(v) for v in ys])
        grads = [t.grad for t in (*xs, *model.parameters()) if t.grad is not None]
        found += [t.detach().clone() for t in (*ys, *grads, *model.buffers())]
    return model, found


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p.name)
def test_same_bits_as_the_launches(pipeline: Pipeline, name: str) -> None:
    _, theirs = training(pipeline, RECIPES[name])
    with host_kernels() as counter:
        model, ours = training(pipeline, RECIPES[name])
    assert all(t.tape is not None for t in tapes(model)), [str(t) for t in tapes(model)]
    assert len(tapes(model)) == 2
    assert counter.issued > 0
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_nothing_is_launched_once_there_is_a_tape(host: Counter) -> None:
    model = mlp()
    x = torch.randn(8, 32, requires_grad=True)
    for _ in range(transcript.WARM + 1):
        model(x).sum().backward()
    launched = host.launched
    model(x).sum().backward()
    assert host.launched == launched


def steps(model: Any, x: torch.Tensor, count: int = transcript.WARM + 1) -> None:
    for _ in range(count):
        y = model(x)
        y.backward(torch.ones_like(y))
    model.zero_grad()
    x.grad = None


def gradients(model: Any, x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y, [x, *model.parameters()], dy))


def test_two_forwards_in_flight_and_results_of_their_own(host: Counter) -> None:
    model = mlp()
    a, b = (torch.randn(8, 32, requires_grad=True) for _ in range(2))
    steps(model, a)
    dy = torch.randn(8, 32)
    alone = [gradients(model, x, model(x), dy) for x in (a, b)]
    y, z = model(a), model(b)
    kept = y.detach().clone(), z.detach().clone()
    second, first = gradients(model, b, z, dy), gradients(model, a, y, dy)
    for ours, theirs in zip((first, second), alone, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    for _ in range(3):
        model(torch.randn(8, 32, requires_grad=True))
    assert torch.equal(y, kept[0])
    assert torch.equal(z, kept[1])


def test_backward_twice(host: Counter) -> None:
    model = mlp()
    x = torch.randn(8, 32, requires_grad=True)
    steps(model, x)
    y = model(x)
    once = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    again = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(once, again)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_a_change_of_a_saved_tensor_is_noticed(host: Counter) -> None:
    model = mlp()
    x = torch.randn(8, 32, requires_grad=True)
    steps(model, x)
    y = model(x)
    with torch.no_grad():
        next(model.parameters()).mul_(2.0)
    with pytest.raises(PlanError, match="changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("strided", [False, True])
def test_saved_tensor_hooks(host: Counter, strided: bool) -> None:
    """What a hook gives back may lie elsewhere, and otherwise."""
    model = mlp()
    x = torch.randn(8, 32, requires_grad=True)
    steps(model, x)
    dy = torch.randn(8, 32)
    expected = gradients(model, x, model(x), dy)
    packed = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t)
        return t.detach().clone()

    def unpack(t: torch.Tensor) -> torch.Tensor:
        if not strided or t.dim() < 2:
            return t
        return torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)[..., ::2].copy_(t)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = model(x)
    found = gradients(model, x, y, dy)
    assert packed
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_backward_of_other_outputs_than_before(host: Counter) -> None:
    """Its launches run on what a tape saved."""
    torch.manual_seed(0)
    model = te.Sequential(
        te.Linear(32, 32, bias=False), te.MakeExtraOutput(), te.Linear(32, 32, bias=False)
    )
    x = torch.randn(8, 32, requires_grad=True)
    expected = {}
    for name in ("both", "first", "second"):
        with_tape = name != "both"
        for _ in range(transcript.WARM + 2):
            y, extra = model(x)
            picked = {"both": (y, extra), "first": (y,), "second": (extra,)}[name]
            found = torch.autograd.grad([p.sum() for p in picked], x)[0]
            expected.setdefault(name, found)
            assert torch.equal(found, expected[name])
        assert tapes(model)[0].tape is not None or not with_tape
    plain = te.Sequential(
        te.Linear(32, 32, bias=False), te.MakeExtraOutput(), te.Linear(32, 32, bias=False)
    )
    plain.load_state_dict(model.state_dict())
    y, extra = plain(x)
    assert torch.equal(torch.autograd.grad(extra.sum(), x)[0], expected["second"])


def test_create_graph_refuses_the_second_order_as_before(host: Counter) -> None:
    model = mlp()
    x = torch.randn(8, 32, requires_grad=True)
    steps(model, x)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(PlanError, match="double backward"):
        g.sum().backward()


def test_operands_that_are_not_contiguous_or_not_aligned(host: Counter) -> None:
    model = mlp()
    x = torch.randn(8, 32, requires_grad=True)
    steps(model, x)
    dy = torch.randn(8, 32)
    expected = [model(x).detach(), *gradients(model, x, model(x), dy)]
    strided = torch.empty(8, 64)[:, ::2].copy_(x.detach()).requires_grad_()
    shifted = torch.empty(8 * 32 + 1)[1:].view(8, 32).copy_(x.detach()).requires_grad_()
    assert shifted.data_ptr() % 16
    for given in (strided, shifted):
        y = model(given)
        grads = gradients(model, given, y, dy.t().contiguous().t())
        for a, b in zip([y.detach(), *grads], expected, strict=True):
            assert torch.equal(a, b)


def test_operands_that_share_memory_by_chance(host: Counter) -> None:
    """A recording with one tensor in two places would not tell them apart later."""
    torch.manual_seed(0)
    model = te.Sequential(te.AddExtraInput(), te.Linear(32, 32, bias=False))
    a, b = torch.randn(8, 32), torch.randn(8, 32)
    weight = next(model.parameters()).detach()
    with torch.no_grad():
        for _ in range(transcript.WARM + 2):
            model(a, a)
        assert [t.tape for t in tapes(model)] == [None]
        for _ in range(2):
            torch.testing.assert_close(model(a, b), (a + b) @ weight.t())
        assert tapes(model)[0].tape is not None
        torch.testing.assert_close(model(a, a), (a + a) @ weight.t())


def test_a_gradient_that_is_an_operand_of_forward(host: Counter) -> None:
    model = te.Sequential(te.Linear(32, 32, bias=False), te.GELU())
    x = torch.randn(32, 32, requires_grad=True)
    plain = [
        torch.autograd.grad(
            torch.nn.functional.gelu(x @ model[0].weight.t(), approximate="tanh"), x, d
        )[0]
        for d in (x.detach(), torch.ones(32, 32))
    ]
    for _ in range(transcript.WARM + 2):
        torch.testing.assert_close(torch.autograd.grad(model(x), x, x.detach())[0], plain[0])
    for _ in range(3):
        given = torch.ones(32, 32)
        torch.testing.assert_close(torch.autograd.grad(model(x), x, given)[0], plain[1])


def test_tied_parameters(host: Counter) -> None:
    torch.manual_seed(0)
    model = te.Sequential(te.Linear(32, 32, bias=False), te.GELU(), te.Linear(32, 32, bias=False))
    model[2].weight = model[0].weight
    x = torch.randn(8, 32, requires_grad=True)
    first = None
    for _ in range(CALLS):
        found = gradients(model, x, model(x), torch.ones(8, 32))
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    assert all(t.tape is not None for t in tapes(model))


def test_parameters_that_moved(host: Counter) -> None:
    """Addresses are read at every call."""
    model = mlp()
    x = torch.randn(8, 32, requires_grad=True)
    steps(model, x)
    with torch.no_grad():
        for p in model.parameters():
            p.data = p.data * 0.5
    fresh = mlp()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(x), fresh(x))


def test_threads(host: Counter) -> None:
    model = mlp()
    xs = [torch.randn(8, 32, requires_grad=True) for _ in range(8)]
    steps(model, xs[0])
    expected = [gradients(model, x, model(x), torch.ones(8, 32)) for x in xs]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(30):
            found = gradients(model, xs[k], model(xs[k]), torch.ones(8, 32))
            if not all(torch.equal(a, b) for a, b in zip(found, expected[k], strict=True)):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert all(len(t.tape.frames) <= 9 for t in tapes(model) if t.tape is not None)


def test_a_failure_leaves_the_state_and_the_tape_as_they_were(host: Counter) -> None:
    model = mlp()
    x = torch.randn(8, 32, requires_grad=True)
    recipe = RECIPES["delayed"]
    with te.autocast(recipe=recipe):
        steps(model, x)
    states = [m for m in model.modules() if isinstance(m, DelayedState)]
    before = [b.clone() for b in model.buffers()]
    versions = [s.version for s in states]
    host.fail_at = host.issued + 2
    with pytest.raises(RuntimeError, match="the device failed"), te.autocast(recipe=recipe):
        model(x)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert [s.version for s in states] == versions
    host.fail_at = None
    with te.autocast(recipe=recipe):
        model(x).sum().backward()
    assert len(states) == 6
    assert [s.version for s in states] == [v + 1 for v in versions]


def test_memory_is_given_back(host: Counter) -> None:
    model = mlp()
    x = torch.randn(8, 32, requires_grad=True)
    steps(model, x)
    y = model(x)
    node = y.grad_fn
    blocks = [weakref.ref(t) for t in node.saved_tensors]
    y.sum().backward()
    del y, node
    gc.collect()
    parameters = {id(p) for p in model.parameters()}
    alive = [r() for r in blocks]
    assert all(t is None or id(t) in parameters or t is x for t in alive)


def test_gradient_accumulation_rolls_once(host: Counter) -> None:
    recipe = RECIPES["delayed"]
    x = torch.randn(8, 32, requires_grad=True)

    def run(model: Any) -> list[torch.Tensor]:
        for _ in range(CALLS):
            with te.autocast(recipe=recipe):
                ys = [model(x * k) for k in (1.0, 3.0, 2.0)]
            sum(y.sum() for y in ys).backward()  # type: ignore[union-attr]
        return [b.clone() for b in model.buffers()]

    ours = run(mlp())
    with REGISTRY.without("test."):
        theirs = run(mlp())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_modes_that_watch_torch_calls_see_the_launches(host: Counter) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Watch.seen += "mm" in str(func)
            return func(*args, **(kwargs or {}))

    model = mlp()
    x = torch.randn(8, 32)
    with torch.no_grad():
        for _ in range(CALLS):
            model(x)
        with Watch():
            model(x)
    assert Watch.seen == 2


def test_torch_calls_are_not_recorded() -> None:
    """The reference computes with torch: its phases keep their launches, and say why."""
    before = dict(replay.STREAMS)
    replay.STREAMS["cpu"] = lambda device: 0
    try:
        model = mlp()
        x = torch.randn(8, 32)
        with torch.no_grad():
            expected = [model(x) for _ in range(CALLS)]
        assert all(torch.equal(y, expected[0]) for y in expected)
        (phase,) = tapes(model)
        assert phase.tape is None
        assert "reference" in str(phase)
    finally:
        replay.STREAMS.clear()
        replay.STREAMS.update(before)


def test_more_memory_than_a_tape_may_hold(host: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_ops.runtime import tape

    monkeypatch.setattr(tape, "LIMIT", 1000)
    model = mlp()
    x = torch.randn(8, 32)
    with torch.no_grad():
        for _ in range(CALLS):
            model(x)
    (phase,) = tapes(model)
    assert phase.tape is None
    assert "MiB" in str(phase)


def test_an_error_inside_a_recording(host: Counter) -> None:
    """The recorder is gone afterwards."""
    from te_ops.runtime.tape import recorder, recording

    with pytest.raises(Error), recording():
        raise PlanError("no")
    assert recorder() is None


def test_checkpoints_replay_scales(host: Counter) -> None:
    recipe = RECIPES["delayed"]
    x = torch.randn(8, 32, requires_grad=True)

    def run(model: Any, check: bool) -> list[torch.Tensor]:
        for _ in range(CALLS):
            with te.autocast(recipe=recipe):
                y = te.checkpoint(model, x) if check else model(x)
            grads = gradients(model, x, y, torch.ones(8, 32))
        return [*grads, *(b.clone() for b in model.buffers())]

    ours, theirs = run(mlp(), True), run(mlp(), False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_report(host: Counter) -> None:
    model = torch.nn.Sequential(mlp())
    x = torch.randn(8, 32, requires_grad=True)
    model(x).sum().backward()
    assert all("not recorded yet (1 calls)" in line for line in replay_report(model))
    for _ in range(transcript.WARM):
        model(x).sum().backward()
    forward, backward = replay_report(model)
    assert re.fullmatch(r"0\.Sequential, segment 0, forward: 4 operations", forward)
    assert re.fullmatch(r"0\.Sequential, segment 0, backward: \d operations", backward)


class Kept(torch.nn.Module):
    """The first rows of its input: how many is in no key."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: self.rows]


def test_a_module_that_returns_other_shapes_than_at_first(host: Counter) -> None:
    torch.manual_seed(0)
    kept = Kept()
    model = te.Sequential(te.Linear(32, 64), te.GELU(), kept, te.Linear(64, 32))
    x = torch.randn(16, 32)
    for _ in range(CALLS):
        model(x).sum().backward()
    assert all(p.tape is not None for p in tapes(model))
    first, last = model[0], model[3]
    for rows in (8, 16, 3):
        kept.rows = rows
        model.zero_grad(set_to_none=True)
        y = model(x)
        y.sum().backward()
        hidden = torch.nn.functional.gelu(x @ first.weight.t() + first.bias, approximate="tanh")
        torch.testing.assert_close(y, hidden[:rows] @ last.weight.t() + last.bias)
        torch.testing.assert_close(last.bias.grad, torch.full((32,), float(rows)))
        torch.testing.assert_close(
            last.weight.grad, hidden[:rows].sum(0).expand(32, 64), rtol=1e-4, atol=1e-4
        )
