"""A tape whose addresses come again is issued at once; every other call issues its operations one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.runtime import bundle, replay, transcript
from te_ops.runtime.bundle import Bundles
from te_ops.runtime.tape import Prepared
from tests.runtime.host_kernels import Counter, Steady, host_kernels
from tests.runtime.test_tape import mlp, tapes

HERE = torch.device("cpu")


class Fake:
    """Bundles by calling what was recorded again, with the words of then."""

    def __init__(self) -> None:
        self.busy = False
        self.refuses = False
        self.made: list[int] = []  # streams
        self.launched = 0

    def capturing(self) -> bool:
        return self.busy

    def bundle(
        self, device: torch.device, stream: int, calls: Sequence[Prepared]
    ) -> Prepared | None:
        if self.refuses:
            return None
        self.made.append(stream)
        frozen = [_frozen(call) for call in calls]

        def launch(stream: int) -> None:
            self.launched += 1
            for call in frozen:
                call(stream)

        return launch


def _frozen(call: Any) -> Prepared:
    """The call over a copy of its words: a host kernel reads them through its closure."""
    names = call.__code__.co_freevars
    cells = dict(zip(names, call.__closure__, strict=True))
    issue = cells["self"].cell_contents
    words = cells["words"].cell_contents
    kept = (ctypes.c_int64 * len(words))(*words.tolist())
    view = memoryview(kept).cast("B").cast("q")
    made: Callable[[int], Any] = issue.prepare(view, ctypes.addressof(kept))
    return made


@pytest.fixture
def host() -> Iterator[Counter]:
    with host_kernels() as counter:
        yield counter


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setitem(bundle.BUNDLERS, "cpu", made)
    return made


def step(model: Any, x: torch.Tensor, dy: torch.Tensor, recipe: te.Recipe | None) -> list[Any]:
    model.zero_grad(set_to_none=True)
    x.grad = None
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(dy)
    return [t.detach().clone() for t in (y, x.grad, *(p.grad for p in model.parameters()))]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", ["dense", "delayed", "current"])
def test_the_same_bits_at_once(name: str, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {
        "dense": None,
        "delayed": te.recipe.DelayedScaling(amax_history_len=4),
        "current": te.recipe.Float8CurrentScaling(),
    }[name]
    x, dy = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32)
    monkeypatch.setattr(replay, "_empty_like", Steady())
    model = mlp()
    ours = [step(model, x, dy, recipe) for _ in range(transcript.WARM + 6)]
    buffers = [b.clone() for b in model.buffers()]
    assert fake.launched >= 4
    launched = fake.launched
    monkeypatch.setitem(bundle.BUNDLERS, "cpu", None)
    model = mlp()
    theirs = [step(model, x, dy, recipe) for _ in range(transcript.WARM + 6)]
    assert fake.launched == launched
    for mine, other in zip([*ours, buffers], [*theirs, [*model.buffers()]], strict=True):
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a, b)


def bundles_of(model: Any) -> list[Bundles]:
    return [p.tape.bundles for p in tapes(model)]  # type: ignore[union-attr, misc]


@pytest.mark.usefixtures("host")
def test_other_addresses_are_issued_one_by_one(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_empty_like", Steady())
    model, dy = mlp(), torch.randn(16, 32)
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(transcript.WARM + 4):
        step(model, x, dy, None)
    count = fake.launched
    other = torch.randn(16, 32, requires_grad=True)
    found = step(model, other, dy, None)
    assert fake.launched <= count + 1  # the backward reads x too
    expected = mlp()
    for a, b in zip(found, step(expected, other.detach().requires_grad_(), dy, None), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("host")
def test_not_while_the_caller_captures(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_empty_like", Steady())
    model, dy = mlp(), torch.randn(16, 32)
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(transcript.WARM + 4):
        step(model, x, dy, None)
    fake.busy, count = True, fake.launched
    step(model, x, dy, None)
    assert fake.launched == count
    fake.busy = False
    step(model, x, dy, None)
    assert fake.launched == count + 2


@pytest.mark.usefixtures("host")
def test_scratch_memory_that_was_given_back(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_empty_like", Steady())
    model, dy = mlp(), torch.randn(16, 32)
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(transcript.WARM + 4):
        step(model, x, dy, None)
    count, made = fake.launched, len(fake.made)
    monkeypatch.setattr(Bundles, "scratch", Bundles.scratch + 1)
    step(model, x, dy, None)
    assert fake.launched == count
    step(model, x, dy, None)
    step(model, x, dy, None)
    assert len(fake.made) == made + 2
    assert fake.launched > count


@pytest.mark.usefixtures("host")
def test_what_cannot_be_recorded_is_not_tried_again(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_empty_like", Steady())
    fake.refuses = True
    model, dy = mlp(), torch.randn(16, 32)
    x = torch.randn(16, 32, requires_grad=True)
    for _ in range(transcript.WARM + 4):
        step(model, x, dy, None)
    assert all(b.left == 0 for b in bundles_of(model))
    fake.refuses = False
    step(model, x, dy, None)
    assert not fake.made


def test_limits(fake: Fake) -> None:
    assert Bundles.of(HERE, bundle.LIMIT + 1) is None
    assert Bundles.of(torch.device("meta"), 0) is None
    made = Bundles.of(HERE, 0)
    assert made is not None
    for key in range(3 * bundle.TRIES):
        for _ in range(bundle.AFTER):
            assert made.find(key) is None
            if made.due(key):
                made.make(key, 0, [])
    assert len(fake.made) == bundle.TRIES
    assert len(made.made) <= bundle.MOST
    assert len(made.met) <= 4 * bundle.MOST + 1
