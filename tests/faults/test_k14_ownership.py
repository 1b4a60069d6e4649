"""K14: what a plan saves, frees, aliases and returns."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from tests.faults import cases
from tests.faults.cases import Case, every_case, every_mode, quantized_case


@pytest.fixture
def _no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# -- B075


def _packs(case: Case, recipe: te.Recipe | None) -> tuple[Counter[int], Counter[int], list[Any]]:
    packed: Counter[int] = Counter()
    unpacked: Counter[int] = Counter()
    kept: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> int:
        for i, other in enumerate(kept):
            if other is t or (
                t.numel()
                and (other.data_ptr(), other.shape, other.stride())
                == (t.data_ptr(), t.shape, t.stride())
            ):
                packed[i] += 1
                return i
        kept.append(t)
        packed[len(kept) - 1] += 1
        return len(kept) - 1

    def unpack(i: int) -> torch.Tensor:
        unpacked[i] += 1
        return kept[i]

    op, xs = case.fresh(), case.data(5)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), cases.within(recipe):
        outputs = cases.outputs_of(op(*xs))
    cases.backward(outputs)
    return packed, unpacked, kept


@every_case
def test_each_saved_tensor_is_packed_and_unpacked_once(case: Case) -> None:
    packed, unpacked, kept = _packs(case, None)
    if case.name in ("Recompute", "Cuts", "ForeignModule"):  # several nodes: each has its own
        assert packed == unpacked
        return
    assert set(packed.values()) <= {1}, [tuple(kept[i].shape) for i, n in packed.items() if n > 1]
    assert packed == unpacked


@every_mode
def test_each_saved_tensor_of_a_quantized_plan_is_packed_and_unpacked_once(
    recipe: te.Recipe | None,
) -> None:
    packed, unpacked, kept = _packs(cases.BY_NAME["MLP"], recipe)
    assert set(packed.values()) <= {1}, [tuple(kept[i].shape) for i, n in packed.items() if n > 1]
    assert packed == unpacked


@quantized_case
def test_offload_hooks_change_nothing(case: Case) -> None:
    for recipe in (cases.MODES[name] for name in cases.SOME):
        op, xs = case.fresh(), case.data(5)
        expected = cases.step(op, xs, recipe)
        twin, ys = case.fresh(), case.data(5)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            actual = cases.step(twin, ys, recipe)
        cases.same(actual, expected)


# -- B077


class _Spy(nn.Module):
    """Keeps a weak reference to what flows through it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            self.seen.append(weakref.ref(x))
        return x * 1.0


@pytest.mark.usefixtures("_no_gc")
@every_mode
def test_intermediates_die_with_backward_while_the_output_lives(recipe: te.Recipe | None) -> None:
    spy = _Spy()
    s = te.Sequential(te.Linear(64, 64), te.SiLU(), spy, te.Linear(64, 64), te.GELU())
    with cases.within(recipe):
        y = s(torch.randn(5, 64, requires_grad=True))
    y.sum().backward()
    assert spy.seen
    assert all(ref() is None for ref in spy.seen)
    assert y.grad_fn is not None


def _saved_bytes(y: torch.Tensor) -> int:
    """Bytes that the autograd nodes behind y still hold."""
    total, queue, done = 0, [y.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is None or node in done:
            continue
        done.add(node)
        with contextlib.suppress(RuntimeError):  # released: what is asked for
            total += sum(t.nbytes for t in getattr(node, "saved_tensors", ()))
        queue.extend(n for n, _ in node.next_functions)
    return total


@every_case
def test_saved_values_are_released_by_backward(case: Case) -> None:
    op, xs = case.fresh(), case.data(5)
    outputs = cases.outputs_of(op(*xs))
    cases.backward(outputs)
    assert all(_saved_bytes(y) == 0 for y in outputs)
    if any(
        getattr(y.grad_fn, "layout", ()) for y in outputs
    ):  # an addition saves nothing and may go again
        with pytest.raises((RuntimeError, te.Error)):
            cases.backward(outputs)


@every_case
def test_retained_graph_gives_the_same_gradients_again(case: Case) -> None:
    op, xs = case.fresh(), case.data(5)
    outputs = cases.outputs_of(op(*xs))
    wanted = [t for t in (*xs, *op.parameters()) if t.requires_grad]
    live = [
        (y, w) for y, w in zip(outputs, cases.loss_weights(outputs), strict=True) if y.requires_grad
    ]
    first, second = (
        torch.autograd.grad(
            [y for y, _ in live], wanted, [w for _, w in live], retain_graph=True, allow_unused=True
        )
        for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


# -- aliases


@every_case
def test_inputs_and_parameters_are_never_written(case: Case) -> None:
    op, xs = case.fresh(), case.data(5)
    tensors = [*xs, *op.parameters()]
    before = [t.detach().clone() for t in tensors]
    versions = [t._version for t in tensors]
    cases.run(op, xs)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert versions == [t._version for t in tensors]


@every_case
def test_writing_an_output_gives_right_gradients_or_an_error(case: Case) -> None:
    """Whether or not the output is saved for backward: never a silently wrong gradient."""
    op, xs = case.fresh(), case.data(5)
    wanted = cases.run(case.fresh(), case.data(5))
    outputs = cases.outputs_of(op(*xs))
    try:
        for y in outputs:
            y.add_(1.0)
        cases.backward(outputs)
    except (RuntimeError, te.PlanError) as error:
        reason = str(error)
    else:
        for x, g in zip(xs, wanted.input_grads, strict=True):
            assert (x.grad is None) == (g is None)
            assert g is None or torch.equal(x.grad, g)  # type: ignore[arg-type]
        return
    assert any(word in reason for word in ("in place", "in-place", "inplace")), reason


def test_changed_saved_tensor_is_an_error_not_a_wrong_gradient() -> None:
    op = te.Linear(8, 8)
    x = torch.randn(3, 8)
    y = op(x)
    x.mul_(2)
    with pytest.raises(te.PlanError, match="in place"):
        y.sum().backward()


@every_case
def test_two_forwards_in_flight_do_not_share_anything(case: Case) -> None:
    op = case.fresh()
    xs = case.data(5)
    ys = tuple(
        (x.detach() * 0.5).requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in xs
    )
    alone = [cases.run(op, t) for t in ()]
    first = cases.outputs_of(op(*xs))
    kept = [y.detach().clone() for y in first]
    second = cases.outputs_of(op(*ys))
    assert all(torch.equal(a, b) for a, b in zip(kept, first, strict=True))
    cases.backward(first)
    grads = [None if x.grad is None else x.grad.clone() for x in xs]
    cases.backward(second)
    expected = case.expected(op, xs)
    for x, g, e in zip(xs, grads, expected.input_grads, strict=True):
        assert x.grad is None or torch.equal(x.grad, g)  # type: ignore[arg-type]
        assert e is None or cases.relative_error(g, e) < 1e-4  # type: ignore[arg-type]
    assert alone == []


# -- B079


@pytest.mark.parametrize(
    "between", [nn.Identity(), nn.Tanh(), nn.Linear(64, 64)], ids=lambda m: type(m).__name__
)
def test_residual_and_extra_tensors_cross_plain_modules(between: nn.Module) -> None:
    s = te.Sequential(
        te.AddExtraInput(),
        te.MakeExtraOutput(),
        te.Residual(te.Linear(64, 64), between, te.SiLU()),
        between,
        te.MakeExtraOutput(),
        te.AddExtraInput(),
    )
    x, a, b = (torch.randn(3, 64, requires_grad=True) for _ in range(3))
    y, first, second = s(x, a, b)
    h = x + a
    r = h + torch.nn.functional.silu(
        between(torch.nn.functional.linear(h, s[2][0].weight, s[2][0].bias))
    )
    torch.testing.assert_close(first, h)
    torch.testing.assert_close(second, between(r))
    torch.testing.assert_close(y, between(r) + b)
    tensors = [x, a, b, *s.parameters()]
    wanted = torch.autograd.grad(
        [h.square().sum() + between(r).sum() + (between(r) + b).square().sum()], tensors
    )
    got = torch.autograd.grad([first.square().sum() + second.sum() + y.square().sum()], tensors)
    for g, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, e)


def test_outputs_of_which_only_some_reach_the_loss() -> None:
    for case in cases.CASES:
        op, xs = case.fresh(), case.data(5)
        count = len(cases.outputs_of(op(*xs)))
        for used in range(count if count > 1 else 0):
            op, xs = case.fresh(), case.data(5)
            out = cases.outputs_of(op(*xs))[used]
            out.backward(cases.loss_weights([out])[0])
            actual = [x.grad for x in xs]
            twin = cases.wide_twin(op)
            wide = [x.detach().double().requires_grad_(x.requires_grad) for x in xs]
            want = cases.outputs_of(case.oracle(twin, *wide))[used]
            want.backward(cases.loss_weights([want])[0])
            for a, e in zip(actual, [w.grad for w in wide], strict=True):
                if e is None:
                    assert a is None or not a.any()
                else:
                    assert a is not None
                    assert cases.relative_error(a, e) < 1e-4, (case.name, used)
