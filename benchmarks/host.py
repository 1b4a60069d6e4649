"""Host time of te_ops on the CPU: planning a 12-op pipeline, replaying a plan of 8 steps, and what is left around
launches that are recorded (they do nothing here).

    python benchmarks/host.py [--profile] [--repeat N]

The budgets are those of the architecture: planning 20 ms, of which shape inference 5 ms; a replay
adds 60 us over the same torch functions called by hand (without gradients; with them, beyond an
empty autograd.Function).
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import te_ops as te
from te_ops import graph
from te_ops.compiler.trace import trace
from te_ops.registry import REGISTRY, Call, Kernel
from te_ops.runtime import bundle, cache, replay, replay_report, state, tape

WIDTH = 16
RECIPES: dict[str, te.Recipe | None] = {
    "none": None,
    "current": te.recipe.Float8CurrentScaling(),
    "delayed": te.recipe.DelayedScaling(),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    budget: float | None = None

    def __str__(self) -> str:
        budget = (
            ""
            if self.budget is None
            else f"{self.budget:8.0f} {self.unit}  {'ok' if self.value <= self.budget else 'OVER'}"
        )
        return f"{self.name:<58}{self.value:9.2f} {self.unit}{budget}"


def best(function: Callable[[], Any], repeat: int, number: int) -> float:
    """Seconds per call: the best mean of `number` calls in `repeat` rounds."""
    result = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(number):
            function()
        result = min(result, (time.perf_counter() - start) / number)
    return result


# -- planning


def twelve() -> te.Sequential:
    """12 ops: a norm, an attention-like body without attention, and a gated MLP."""
    return te.Sequential(
        te.RMSNorm(WIDTH),
        te.Linear(WIDTH, WIDTH),
        te.GELU(),
        te.Linear(WIDTH, WIDTH),
        te.Dropout(0.1),
        te.ConstantScale(0.5),
        te.LayerNorm(WIDTH),
        te.Linear(WIDTH, 2 * WIDTH),
        te.SwiGLU(),
        te.Linear(WIDTH, WIDTH, bias=False),
        te.Bias(WIDTH),
        te.SiLU(),
    )


@contextmanager
def timed_inference(total: list[float]) -> Iterator[None]:
    """Adds up the time in shape rules."""
    originals = {name: prim.infer for name, prim in graph.PRIMS.items()}

    def wrap(infer: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*specs: Any, **attrs: Any) -> Any:
            start = time.perf_counter()
            try:
                return infer(*specs, **attrs)
            finally:
                total[0] += time.perf_counter() - start

        return timed

    for prim in graph.PRIMS.values():
        object.__setattr__(prim, "infer", wrap(prim.infer))
    try:
        yield
    finally:
        for name, infer in originals.items():
            object.__setattr__(graph.PRIMS[name], "infer", infer)


def planning(repeat: int) -> list[Row]:
    """Planning without any cache, by recipe, and the share of inference."""
    rows = []
    x = torch.randn(8, WIDTH, requires_grad=True)
    for name, recipe in RECIPES.items():
        model = twelve()

        def plan(model: te.Sequential = model, recipe: te.Recipe | None = recipe) -> None:
            cache.CACHE.clear()
            model.__dict__.pop("_te_cache", None)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                model.plan(x)

        plan()
        rows.append(Row(f"plan 12 ops, {name}", 1e3 * best(plan, repeat, 3), "ms", 20))
        spent = [0.0]
        with timed_inference(spent):
            plan()
        rows.append(Row("  of which shape inference", 1e3 * spent[0], "ms", 5))
    request = _request(twelve(), x)
    rows.append(Row("  one trace", 1e3 * best(lambda: trace(request), repeat, 3), "ms"))
    return rows


def _request(model: te.Sequential, x: Tensor) -> Any:
    model(x)
    op_cache = model.__dict__["_te_cache"]
    key = next(iter(op_cache.runners))
    return cache._request(model, [x], (cache.spec_of(x),), None, key)


# -- replay


def eight() -> te.Sequential:
    """8 forward steps: linears and norms in turn, nothing that composes."""
    ops: list[te.Op] = []
    for _ in range(4):
        ops += [te.Linear(WIDTH, WIDTH, bias=False), te.RMSNorm(WIDTH)]
    return te.Sequential(*ops)


def by_hand(
    model: te.Sequential, x: Tensor, grad: bool
) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The launches of the model's plan, forward and backward, with their arguments."""
    recorded: list[tuple[bool, Callable[..., Any]]] = []

    def bind(call: Call) -> Any:
        function = REGISTRY.find("reference").bind(call)  # type: ignore[union-attr]
        backward = call.node.phase.is_backward

        def launch(*xs: Any) -> Any:
            recorded.append((backward, partial(function, *xs)))
            return function(*xs)

        return launch

    with (
        REGISTRY.temporary(Kernel("*", "bench.record", bind, priority=99)),
        torch.set_grad_enabled(grad),
    ):
        y = model(x)
        if grad:
            y.sum().backward()
    return [f for back, f in recorded if not back], [f for back, f in recorded if back]


class Empty(torch.autograd.Function):
    """What autograd itself costs: as many tensors in and saved as the plan has."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        """Save the tensors."""
        ctx.save_for_backward(*tensors)
        ctx.count = len(tensors)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Fresh tensors."""
        saved = ctx.saved_tensors
        return (None, *(torch.empty_like(t) if t.requires_grad else None for t in saved))


def run_all(calls: list[Callable[..., Any]]) -> None:
    """Call everything once."""
    for call in calls:
        call()


def replayed(repeat: int) -> list[Row]:
    """Added host time per call, for forward alone and for forward and backward."""
    rows = []
    number = 200
    model, x = eight(), torch.randn(8, WIDTH)
    with torch.no_grad():
        forward, _ = by_hand(model, x, False)
        steps = sum(len(s.forward_steps) for s in model.plan(x).segments)
        ours = best(lambda: model(x), repeat, number)
        hand = best(lambda: run_all(forward), repeat, number)
    rows.append(Row(f"replay {steps} steps, no gradients: te_ops", 1e6 * ours, "us"))
    rows.append(Row("  the same torch functions by hand", 1e6 * hand, "us"))
    rows.append(Row("  added", 1e6 * (ours - hand), "us", 60))

    rows += training(three(), repeat, number, budget=60)
    rows += training(model, repeat, number, budget=None)
    rows += others(repeat, number)
    return rows


def three() -> te.Sequential:
    """3 forward and 5 backward steps."""
    return te.Sequential(te.Linear(WIDTH, WIDTH, bias=False), te.RMSNorm(WIDTH), te.SiLU())


def training(model: te.Sequential, repeat: int, number: int, budget: float | None) -> list[Row]:
    """Added host time of a forward and backward, beyond an empty autograd.Function."""
    leaf = torch.randn(8, WIDTH, requires_grad=True)
    forward, backward = by_hand(model, leaf, True)
    tensors = [leaf, *model.parameters()]
    out, dy = torch.randn(8, WIDTH), torch.ones(8, WIDTH)

    def train() -> None:
        torch.autograd.grad(model(leaf), tensors, dy)

    def hand() -> None:
        """The same launches around an empty autograd.Function: in turn, since either alone finds its code in cache."""
        with torch.no_grad():
            run_all(forward)
        made = Empty.apply(out, *tensors)  # type: ignore[no-untyped-call]
        torch.autograd.grad(made, tensors, dy)
        with torch.no_grad():
            run_all(backward)

    ours, bare = best(train, repeat, number), best(hand, repeat, number)
    steps = len(forward) + len(backward)
    return [
        Row(f"forward and backward, {steps} steps: te_ops", 1e6 * ours, "us"),
        Row("  by hand around an empty autograd.Function", 1e6 * bare, "us"),
        Row("  added", 1e6 * (ours - bare), "us", budget),
    ]


# -- recorded launches


class Nothing:
    """An operation that is recorded and does nothing: what is left is the host's work around the launches."""

    clears = False

    def prepare(self, words: memoryview, address: int) -> Callable[[int], None]:
        """See `te_ops.runtime.tape.Issue`."""
        return lambda stream: None


class AtOnce:
    """All operations as one, whatever their addresses: on a device they come again, in host memory they do not."""

    def find(self, key: object) -> Callable[[int], None]:
        """See `te_ops.runtime.bundle.Bundles`."""
        return lambda stream: None


def reported(call: Call) -> Any:
    """A launch that runs the reference and reports one operation over all its operands."""
    function = REGISTRY.find("reference").bind(call)  # type: ignore[union-attr]

    def launch(*xs: Any) -> Any:
        made = tape.recorder()
        if made is None:
            return function(*xs)
        with tape.unwatched():
            found = function(*xs)
        results = found if isinstance(found, tuple) else (found,)
        fresh = [_like(r) for r in results]
        tensors = [t for v in (*xs, *fresh) for t in _tensors(v)]
        made.launched(Nothing(), tuple(t.data_ptr() for t in tensors))
        return tuple(fresh) if isinstance(found, tuple) else fresh[0]

    return launch


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return value.tensors() if hasattr(value, "tensors") else (value,)


def _like(value: Any) -> Any:
    if hasattr(value, "map"):
        return value.map(torch.empty_like)
    return torch.empty_like(value)


def recorded(repeat: int, number: int) -> list[Row]:
    """Added host time of a SwiGLU MLP whose launches are recorded, beyond an empty autograd.Function."""
    rows = []
    kernel = Kernel("*", "bench.recorded", reported, priority=99, recorded=True)
    replay.STREAMS["cpu"] = lambda device: 0
    state.UPDATES["cpu"] = lambda device, rolls: None
    make = bundle.Bundles.of
    bundle.Bundles.of = staticmethod(lambda device, size: AtOnce())  # type: ignore[method-assign, assignment, return-value]
    try:
        with REGISTRY.only(), REGISTRY.temporary(kernel):
            for name, recipe in RECIPES.items():
                rows += _recorded(name, recipe, repeat, number)
    finally:
        del replay.STREAMS["cpu"], state.UPDATES["cpu"]
        bundle.Bundles.of = staticmethod(make)  # type: ignore[method-assign]
    return rows


def _recorded(name: str, recipe: te.Recipe | None, repeat: int, number: int) -> list[Row]:
    model = te.Sequential(
        te.RMSNorm(WIDTH),
        te.Linear(WIDTH, 2 * WIDTH, bias=False),
        te.SwiGLU(),
        te.Linear(WIDTH, WIDTH, bias=False),
    )
    leaf, dy = torch.randn(16, WIDTH, requires_grad=True), torch.ones(16, WIDTH)
    tensors = [leaf, *model.parameters()]

    def train() -> None:
        if recipe is None:
            y = model(leaf)
        else:
            with te.autocast(recipe=recipe):
                y = model(leaf)
        torch.autograd.grad(y, tensors, dy)

    def empty() -> None:
        torch.autograd.grad(Empty.apply(dy, *tensors), tensors, dy)  # type: ignore[no-untyped-call]

    for _ in range(5):
        train()
    if not all(line.endswith("operations") for line in replay_report(model)):
        raise RuntimeError("\n".join(replay_report(model)))
    ours, bare = best(train, repeat, number), best(empty, repeat, number)
    return [
        Row(f"SwiGLU MLP of recorded launches, {name}", 1e6 * ours, "us"),
        Row("  beyond an empty autograd.Function", 1e6 * (ours - bare), "us", RECORDED[name]),
    ]


RECORDED = {"none": 90, "current": 100, "delayed": 160}
"""Budgets in microseconds, for an idle machine."""


def others(repeat: int, number: int) -> list[Row]:
    """What else a call may cost."""
    x = torch.randn(8, WIDTH)
    single = te.GELU()
    recipe = te.recipe.Float8CurrentScaling()
    model = eight()
    shapes = [torch.randn(8 + 16 * k, WIDTH) for k in range(64)]

    def scoped() -> None:
        with te.autocast(recipe=recipe):
            single(x)

    def changing() -> None:
        model.training = model.training  # every cached fingerprint is stale
        model(x)

    def varying() -> None:
        cached = model.__dict__.get("_te_cache")
        if cached is not None:
            cached.runners.clear()
        for item in shapes:
            model(item)

    with torch.no_grad():
        base = best(lambda: single(x), repeat, number)
        return [
            Row("one op (GELU), no gradients", 1e6 * base, "us"),
            Row("  inside te.autocast", 1e6 * best(scoped, repeat, number), "us"),
            Row("call after an attribute changed", 1e6 * best(changing, repeat, 50), "us"),
            Row(
                "call with a row count not seen before, plan there",
                1e6 * best(varying, repeat, 1) / len(shapes),
                "us",
            ),
        ]


def profile() -> None:
    """Where planning and replaying spend their time."""
    x = torch.randn(8, WIDTH, requires_grad=True)
    model, small = twelve(), eight()
    small(x)

    def plan() -> None:
        for _ in range(20):
            cache.CACHE.clear()
            model.__dict__.pop("_te_cache", None)
            model.plan(x)

    def call() -> None:
        for _ in range(500):
            torch.autograd.grad(small(x).sum(), x)

    for title, function in (("planning, 20 times", plan), ("replaying, 500 times", call)):
        print(f"\n{title}")
        profiler = cProfile.Profile()
        profiler.runcall(function)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", action="store_true", help="print the hot spots too")
    parser.add_argument("--repeat", type=int, default=7, help="rounds; the best counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU, one thread")
    for row in (
        *planning(options.repeat),
        *replayed(options.repeat),
        *recorded(options.repeat, 200),
    ):
        print(row)
    if options.profile:
        profile()


if __name__ == "__main__":
    main()
