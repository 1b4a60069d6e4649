"""Outputs that alias, in-place writes, gradients as autograd delivers them (contract 15)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import te_ops as te
from te_ops.graph import Graph, Value
from tests.runtime.cases import RECIPES, double, gradients, pair

# -- in-place changes and aliases


@pytest.mark.parametrize("what", ["input", "weight", "output"])
def test_in_place_change_of_a_saved_tensor_is_an_error(what: str) -> None:
    class Mine(te.Sequential):
        pass

    model = Mine(te.Linear(8, 8), te.Branch(te.Identity(), te.GELU()))
    x = torch.randn(4, 8)
    y, z = model(x)
    changed = {"input": x, "weight": model[0].weight, "output": y}[what]
    if what == "weight":
        y, z = model(x.requires_grad_())
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(te.Error, match=r"Mine.*changed in place"):
        (y.sum() + z.sum()).backward()


ALIASES: dict[str, Any] = {
    "identity": te.Identity,
    "reshape": lambda: te.Reshape((-1, 4)),
    "cut": lambda: te.Sequential(te.Cut()),
    "cuts": lambda: te.Sequential(te.Cut(), te.Identity(), te.Cut()),
    "quantize": lambda: te.Sequential(te.Quantize()),
    "linear_cut": lambda: te.Sequential(te.Linear(8, 8), te.Cut()),
    "linear_reshape": lambda: te.Sequential(te.Linear(8, 8), te.Reshape((-1, 4))),
    "linear_reshapes": lambda: te.Sequential(
        te.Linear(8, 8), te.Reshape((-1, 4)), te.Reshape((-1, 2))
    ),
    "cut_reshape": lambda: te.Sequential(te.Linear(8, 8), te.Cut(), te.Reshape((-1, 4))),
    "two": lambda: te.Branch(te.Identity(), te.Identity()),
    "marks": lambda: te.Sequential(te.Linear(8, 8), te.Branch(te.Quantize(), te.Identity())),
    "extra": lambda: te.Sequential(te.MakeExtraOutput(), te.GELU()),
    "extra_reshape": lambda: te.Sequential(
        te.Linear(8, 8), te.Branch(te.Reshape((-1, 4)), te.Identity())
    ),
}


@pytest.mark.parametrize("name", ALIASES)
def test_user_may_write_into_outputs(name: str) -> None:
    model = ALIASES[name]()
    leaf = torch.randn(4, 8, requires_grad=True)
    h = leaf * 1.0
    outs = model(h)
    outs = outs if isinstance(outs, tuple) else (outs,)
    last = outs[-1]
    kept = last.detach().clone()
    last.mul_(3.0)
    assert torch.equal(last.detach(), 3.0 * kept)
    last.sum().backward()
    assert leaf.grad is not None
    assert float(leaf.grad.abs().sum()) > 0


@pytest.mark.parametrize("name", ["quantize", "marks", "linear_cut"])
def test_pass_through_without_grad_is_not_the_input(name: str) -> None:
    model = ALIASES[name]()
    x = torch.randn(4, 8)
    kept = x.clone()
    with torch.no_grad():
        outs = model(x)
        for out in outs if isinstance(outs, tuple) else (outs,):
            out.zero_()
    assert torch.equal(x, kept)


def test_identity_returns_a_view_of_its_input() -> None:
    x = torch.randn(4, 8)
    y = te.Identity()(x)
    assert y is not x
    assert y.data_ptr() == x.data_ptr()


# -- gradients as autograd delivers them


def test_expanded_gradient() -> None:
    ours, theirs = pair()
    x = torch.randn(4, 8)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours(a).sum().backward()  # dy has strides (0, 0)
    theirs(b).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_strided_input_and_gradient() -> None:
    ours, theirs = pair()
    base = torch.randn(8, 4)
    ours(base.t()).t().contiguous().t().square().sum().backward()
    theirs(base.t()).square().sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def two_heads() -> te.Sequential:
    return te.Sequential(
        te.Linear(8, 8),
        te.GELU(),
        te.Branch(te.Linear(8, 4), te.Sequential(te.SiLU(), te.RMSNorm(8))),
    )


@pytest.mark.parametrize("mask", [(True, False), (False, True), (True, True)])
def test_missing_output_gradients(mask: tuple[bool, bool]) -> None:
    """As with zeros for the missing ones, but nothing of the other head gets a gradient."""
    model = two_heads()
    x = torch.randn(4, 8, requires_grad=True)
    outs = model(x)
    sum(o.square().sum() for o, m in zip(outs, mask, strict=True) if m).backward()
    got = gradients(model) | {"x": x.grad.clone()}
    model.zero_grad()
    x.grad = None
    outs = model(x)
    sum((o.square() * m).sum() for o, m in zip(outs, mask, strict=True)).backward()
    full = gradients(model) | {"x": x.grad.clone()}
    for name, grad in got.items():
        torch.testing.assert_close(grad, full[name])
    if not mask[0]:
        assert "2.0.weight" not in got
    if not mask[1]:
        assert "2.1.1.weight" not in got


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_missing_output_gradients_quantized(recipe: str) -> None:
    model, x = (
        te.Sequential(te.Linear(32, 32), te.Branch(te.Linear(32, 32), te.Linear(32, 32))),
        torch.randn(32, 32),
    )
    with te.autocast(recipe=RECIPES[recipe]):
        a, _ = model(x)
    a.sum().backward()
    assert model[1].get_submodule("0").weight.grad is not None
    assert model[1].get_submodule("1").weight.grad is None
    if recipe == "delayed":
        assert "1.1.quantizer.delayed.grad_output.scale" not in model.state_dict() or torch.equal(
            model.state_dict()["1.1.quantizer.delayed.grad_output.amax_history"], torch.zeros(4)
        )


def test_no_gradient_at_all_needs_no_backward() -> None:
    model = te.Sequential(te.Linear(8, 8).requires_grad_(False), te.GELU())
    y = model(torch.randn(4, 8))
    assert not y.requires_grad
    assert model.plan(torch.randn(4, 8)).saved_bytes == 0


def test_non_differentiable_outputs_say_so() -> None:
    class Top(te.Op):
        def emit(self, g: Graph, x: Value) -> tuple[Value, Value]:
            return x, g.call(ARGMAX, double(g, x))

    class Stopped(te.Op):
        def emit(self, g: Graph, x: Value) -> tuple[Value, Value]:
            return double(g, x), g.call(STOP, x)

    x = torch.randn(4, 8, requires_grad=True)
    _, best = te.Sequential(te.Linear(8, 8), Top())(x)
    assert best.dtype is torch.int64
    assert not best.requires_grad
    y, stopped = Stopped()(x)
    assert y.requires_grad
    assert not stopped.requires_grad
    assert torch.equal(stopped, x)


@te.graph.prim(
    "test_argmax", infer=lambda x: te.graph.Spec(x.shape[:-1], torch.int64), differentiable=False
)
def ARGMAX(x: Tensor) -> Tensor:
    return x.argmax(-1)


@te.graph.prim("test_stop", infer=te.graph.same, differentiable=False)
def STOP(x: Tensor) -> Tensor:
    return x * 1.0


@te.graph.prim("test_cube")
def CUBE(x: Tensor) -> Tensor:
    return x * x * x


@te.graph.prim("test_mix", n_out=2)
def MIX(x: Tensor, y: Tensor, k: float) -> tuple[Tensor, Tensor]:
    return x * y, x.sin() * k


def test_primitive_without_a_gradient_rule() -> None:
    class Cube(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            return g.call(CUBE, x)

    class Mix(te.Op):
        def emit(self, g: Graph, x: Value, y: Value) -> tuple[Value, ...]:
            return g.calls(MIX, x, y, k=2.0)

    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    Cube()(x).sum().backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)
    x.grad = None
    a, b = Mix()(x, y)
    b.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    assert y.grad is None or not y.grad.any()
    x.grad = y.grad = None
    a, b = Mix()(x, y)
    (a.sum() + b.sum()).backward()
    torch.testing.assert_close(y.grad, x.detach())


def test_double_backward_raises() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(
        te.Sequential(te.Linear(8, 8), te.GELU())(x).sum(), x, create_graph=True
    )
    assert grad.requires_grad  # the first order is right, and may be used
    with pytest.raises(te.PlanError, match="double backward"):
        grad.sum().backward()


def test_create_graph_without_second_use() -> None:
    ours, theirs = pair()
    x = torch.randn(4, 8, requires_grad=True)
    (a,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
    (b,) = torch.autograd.grad(theirs(x).sum(), x)
    torch.testing.assert_close(a.detach(), b)


def test_partial_backward() -> None:
    ours, theirs = pair()
    x = torch.randn(4, 8, requires_grad=True)
    (a,) = torch.autograd.grad(ours(x).sum(), [x])
    (b,) = torch.autograd.grad(theirs(x).sum(), [x])
    torch.testing.assert_close(a, b)
    assert all(p.grad is None for p in ours.parameters())
    ours(x).sum().backward(inputs=[ours[0].weight])
    assert ours[0].weight.grad is not None
    assert x.grad is None
    assert ours[2].weight.grad is None
