"""A small product without a recipe runs by torch's own linear; everything else about the op stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import te_ops as te
from te_ops.context import ARCH
from te_ops.errors import ShapeError
from te_ops.registry import REGISTRY, Call, Kernel
from te_ops.runtime import plain, replay_report

OURS, TORCHS = "_SegmentNodeBackward", "AddmmBackward0"


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(plain, "DEVICES", ["cpu"])
    monkeypatch.setattr(plain, "KERNELS", ["cublas.", "cuda.", "reference"])


def node(y: torch.Tensor) -> str:
    return type(y.grad_fn).__name__


def data(rows: int = 8, width: int = 16, **options: Any) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1), **options)


def test_it_runs_by_torch_and_computes_what_the_plan_does(monkeypatch: pytest.MonkeyPatch) -> None:
    op, x = te.Linear(16, 24, dtype=torch.float64), data(dtype=torch.float64).requires_grad_()
    y = op(x)
    assert node(y) == TORCHS
    assert replay_report(op) == ["Linear: torch's own linear"]
    found = torch.autograd.grad(y.sin().sum(), [x, op.weight, op.bias])
    monkeypatch.setattr(plain, "DEVICES", [])
    other = copy.deepcopy(op)
    z = other(x)
    assert node(z) == OURS
    wanted = torch.autograd.grad(z.sin().sum(), [x, other.weight, other.bias])
    torch.testing.assert_close([y, *found], [z, *wanted])


def test_other_shapes_dtypes_and_gradients_are_followed() -> None:
    op = te.Linear(16, 24, bias=False)
    for x in (data(), data(3).view(1, 3, 16), data(0), data()[:, ::1].t().contiguous().t()):
        y = op(x)
        assert node(y) in ("MmBackward0", "UnsafeViewBackward0", "ViewBackward0")
        torch.testing.assert_close(y, x @ op.weight.t())
    op.weight.requires_grad_(False)
    assert not op(data()).requires_grad
    (op(data().requires_grad_())).sum().backward()
    assert op.weight.grad is None
    op.to(torch.bfloat16)
    assert op(data().bfloat16()).dtype is torch.bfloat16


def test_second_derivatives_are_torchs() -> None:
    op, x = te.Linear(16, 4), data().requires_grad_()
    (dx,) = torch.autograd.grad(op(x).pow(2).sum(), x, create_graph=True)
    dx.sum().backward()
    assert op.weight.grad is not None


class Own(te.Linear):
    """A subclass may compute anything."""


OTHERS: dict[str, Callable[[], tuple[te.Op, torch.Tensor]]] = {
    "a subclass": lambda: (Own(16, 24), data()),
    "a pipeline": lambda: (te.Sequential(te.Linear(16, 24), te.GELU()), data()),
    "return_bias": lambda: (te.Linear(16, 24, return_bias=True), data()),
    "another dtype": lambda: (te.Linear(16, 24, dtype=torch.bfloat16), data()),
    "a bias of another dtype": lambda: (_biased(torch.bfloat16), data()),
    "a large product": lambda: (te.Linear(16, 24), data().expand(plain.SMALL // (16 * 24) + 8, 8, 16)[:, 0]),
    "a tensor of a class of its own": lambda: (te.Linear(16, 24), data().as_subclass(Marked)),
}  # fmt: skip


class Marked(torch.Tensor):
    """A user's tensor."""


def _biased(dtype: torch.dtype) -> te.Linear:
    op = te.Linear(16, 24)
    op.bias = nn.Parameter(torch.zeros(24, dtype=dtype))
    return op


@pytest.mark.parametrize("name", OTHERS)
def test_what_asks_for_more_has_a_plan(name: str) -> None:
    op, x = OTHERS[name]()
    y = op(x)
    assert node(y[0] if isinstance(y, tuple) else y) in (OURS, "AliasBackward0")
    assert "torch's own" not in "".join(replay_report(op))


def test_main_grad_is_added_to_in_the_product() -> None:
    op = te.Linear(16, 24, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.zeros(24, 16)
    op(data()).sum().backward()
    assert op.weight.grad is None
    assert op.weight.main_grad.any()


def _without_gradients(op: te.Linear) -> None:
    with torch.no_grad():
        op(data())


def _frozen(op: te.Linear) -> None:
    op.requires_grad_(False)
    op(data())
    op.requires_grad_()


@pytest.mark.parametrize("earlier", [_without_gradients, _frozen])
def test_what_a_call_without_gradients_found_says_nothing_of_gradients(
    earlier: Callable[[te.Linear], None],
) -> None:
    op = te.Linear(16, 24, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.zeros(24, 16)
    earlier(op)
    op(data()).sum().backward()
    assert op.weight.grad is None
    assert op.weight.main_grad.any()
    earlier(op)
    assert node(op(data())) == OURS


@pytest.mark.parametrize("layout", ["nn", "tn"])
def test_a_kernel_of_the_users_for_a_gradient_is_found(layout: str) -> None:
    op, found = te.Linear(16, 24), []

    def refuse(call: Call) -> str | None:
        return None if call.nodes[0].attrs["layout"] == layout else "another product"

    def bind(call: Call) -> Any:
        shape = (8, 16) if layout == "nn" else (24, 16)
        return lambda a, b: found.append(layout) or torch.zeros(shape)

    with REGISTRY.temporary(Kernel("gemm", "own.gemm", bind, refuse=refuse, priority=99)):
        _without_gradients(op)
        _frozen(op)
        op(data().requires_grad_()).sum().backward()
    assert found == [layout]


def _pruned(op: te.Linear) -> None:
    prune.random_unstructured(op, "bias", amount=0.25)


def _a_tensor(op: te.Linear) -> None:
    del op.bias
    op.bias = torch.randn(24, requires_grad=True)


def _a_buffer(op: te.Linear) -> None:
    del op.bias
    op.register_buffer("bias", torch.randn(24))


@pytest.mark.parametrize("change", [_pruned, _a_tensor, _a_buffer])
def test_a_bias_that_is_no_parameter_is_added(change: Callable[[te.Linear], None]) -> None:
    op, x = te.Linear(16, 24), data()
    with torch.no_grad():
        op.bias.normal_()
    op(x)
    change(op)
    for _ in range(2):
        torch.testing.assert_close(op(x), x @ op.weight.t() + op.bias)


def test_parameters_of_other_shapes_are_refused_as_the_plan_does() -> None:
    op, x = te.Linear(16, 24), data()
    op(x)
    op.bias.data = torch.ones(1)  # torch would broadcast it
    with pytest.raises(ShapeError, match="Linear"):
        op(x)
    op = te.Linear(16, 24, bias=False)
    op(x)
    op.weight.data = torch.ones(16)
    with pytest.raises(ShapeError, match="Linear"):
        op(x)


def test_a_recompute_runs_as_its_forward_did_and_later_calls_by_what_came_since() -> None:
    op, x = te.Linear(16, 24), data().requires_grad_()
    op(x).sum().backward()
    wanted, x.grad = x.grad, None

    def refuse(call: Call) -> str | None:
        return None if call.nodes[0].attrs["layout"] == "nt" else "a gradient"

    y: Any = checkpoint(op, x, use_reentrant=False)

    def bind(call: Call) -> Any:
        return lambda a, b: torch.ones(8, 24)

    with REGISTRY.temporary(Kernel("gemm", "own.gemm", bind, refuse=refuse, priority=99)):
        y.sum().backward()
        torch.testing.assert_close(x.grad, wanted)
        torch.testing.assert_close(op(x), torch.ones(8, 24) + op.bias)
    z: Any = checkpoint(op, x, use_reentrant=False)
    te.tune(op, data())
    z.sum().backward()
    assert node(op(x)) == OURS


def test_a_checkpoint_counts_each_call_once() -> None:
    first, second, x = te.Linear(32, 32), te.Linear(32, 32), data(32, 32).requires_grad_()
    recipe = te.recipe.Float8CurrentScaling()
    second(x)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = first(x)
        with te.autocast(recipe=recipe):
            return second(y)

    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    first = copy.deepcopy(first)  # its first call is the checkpoint's
    y = te.checkpoint(function, x)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, wanted)


def test_a_call_that_asks_for_more_finds_the_plan_and_the_next_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op, x = te.Linear(16, 24), data()
    assert node(op(x)) == TORCHS
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x)
        assert node(y) == OURS
        assert y.dtype is torch.bfloat16
    assert node(op(x)) == TORCHS
    torch.use_deterministic_algorithms(True)
    try:
        assert node(op(x)) == OURS
    finally:
        torch.use_deterministic_algorithms(False)
    assert node(te.checkpoint(op, x)) == OURS
    assert node(op(x)) == TORCHS
    other = copy.deepcopy(op)
    with te.autocast(enabled=False):
        for each in (op, other):
            assert node(each(x)) == OURS
    assert "torch's own" not in "".join(replay_report(other))
    assert node(op(x)) == OURS  # its recipe is remembered for a recompute from now on


def test_recipes_have_a_plan() -> None:
    op, x = te.Linear(16, 32), data(16)
    assert node(op(x)) == TORCHS
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        assert node(op(x)) == OURS


def test_torchs_checkpoint_recomputes_it() -> None:
    op, x = te.Linear(16, 24), data().requires_grad_()
    op(x).sum().backward()
    wanted, x.grad = x.grad, None
    for _ in range(2):
        x.grad = None
        y: Any = checkpoint(op, x, use_reentrant=False)
        y.sum().backward()
        torch.testing.assert_close(x.grad, wanted)


def test_a_kernel_of_the_users_is_found() -> None:
    op, x = te.Linear(16, 24), data()
    assert node(op(x)) == TORCHS

    def bind(call: Call) -> Any:
        return lambda a, b: torch.ones(8, 24)

    with REGISTRY.temporary(Kernel("gemm", "own.gemm", bind, priority=99)):
        y = op(x)
        assert node(y) == OURS
        torch.testing.assert_close(y, torch.ones(8, 24) + op.bias)
    assert node(op(x)) == TORCHS


def test_a_tuned_model_runs_what_was_chosen() -> None:
    model, x = nn.Sequential(te.Linear(16, 24), te.Linear(24, 8)), data()
    assert node(model(x)) == TORCHS
    te.tune(model, x)
    assert node(model(x)) == OURS
    assert node(copy.deepcopy(model)(x)) == TORCHS


def test_errors_name_the_op() -> None:
    op, x = te.Linear(16, 24), data()
    op(x)
    with pytest.raises(ShapeError, match="Linear"):
        op(data(8, 15))
    with pytest.raises(ShapeError, match="dense"):
        op(x.to_sparse())
    with pytest.raises(ShapeError, match="takes 1 input"):
        op(x, x)
    with pytest.raises(ShapeError, match="got none"):
        op()
    op.weight.data = torch.randn(24, 15)  # nobody announces it, and torch alone would not say where
    with pytest.raises(ShapeError, match="Linear"):
        op(x)


def test_hooks_run_once_and_copies_start_anew() -> None:
    op, x, seen = te.Linear(16, 24), data(), []
    op(x)
    op.register_forward_hook(lambda m, args, y: seen.append(y))
    assert node(op(x)) == TORCHS
    assert len(seen) == 1
    other = copy.deepcopy(op)
    assert not set(plain.PLACE.values()) & set(other.__dict__)
    other.weight.data.zero_()
    torch.testing.assert_close(other(x), other.bias.expand(8, 24))


def test_explain_says_so() -> None:
    op = te.Linear(16, 24, device="meta", dtype=torch.bfloat16)
    token = ARCH.set("sm_90")
    try:
        text = op.explain(torch.empty(8, 16, device="meta", dtype=torch.bfloat16))
    finally:
        ARCH.reset(token)
    assert "torch's own linear runs it" in " ".join(text.split())
    assert "torch's own" not in te.Linear(16, 24).explain(data())
