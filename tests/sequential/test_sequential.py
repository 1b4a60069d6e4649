"""Pipelines: flow of inputs and outputs, the list API, Residual, Branch, Recompute and Cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_ops as te
from te_ops.graph import Graph, Value

X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


class Sum3(te.Op):
    def emit(self, g: Graph, a: Value, b: Value, c: Value) -> Value:
        return te.basic.structure.add(g, a, b, c)


class TwoOut(te.Op):
    """The value, and twice the value as an extra output."""

    num_extra_outputs = 1

    def emit(self, g: Graph, x: Value) -> tuple[Value, Value]:
        return x, te.basic.structure.add(g, x, x)


# -- flow


def test_children_in_order() -> None:
    a, b = te.Linear(8, 4), te.Linear(4, 2)
    want = torch.nn.functional.linear(
        torch.nn.functional.linear(X, a.weight, a.bias), b.weight, b.bias
    )
    torch.testing.assert_close(te.Sequential(a, b)(X), want)


def test_named_children() -> None:
    model = te.Sequential({"norm": te.RMSNorm(8), "fc": te.Linear(8, 4)})
    assert [n for n, _ in model.named_parameters()] == ["norm.weight", "fc.weight", "fc.bias"]
    assert model["fc"] is model[1] is model[-1]
    assert model(X).shape == (4, 4)


def test_empty() -> None:
    assert torch.equal(te.Sequential()(X), X)


def test_further_inputs_come_in_order() -> None:
    model = te.Sequential(te.AddExtraInput(), te.ConstantScale(2.0), Sum3())
    one = torch.ones(4, 8)
    torch.testing.assert_close(model(X, one, 3 * one, 5 * one), 2 * (X + 1) + 8)


def test_first_op_with_several_inputs() -> None:
    one = torch.ones(4, 8)
    torch.testing.assert_close(
        te.Sequential(Sum3(), te.AddExtraInput())(X, one, one, 2 * one), X + 4
    )


def test_extra_outputs_come_last_in_op_order() -> None:
    model = te.Sequential(TwoOut(), te.ConstantScale(3.0), TwoOut(), te.ConstantScale(5.0))
    y, first, second = model(X)
    torch.testing.assert_close(y, 15 * X)
    torch.testing.assert_close(first, 2 * X)
    torch.testing.assert_close(second, 6 * X)


def test_nested_extra_inputs_and_outputs() -> None:
    inner = te.Sequential(te.AddExtraInput(), TwoOut())
    model = te.Sequential(te.ConstantScale(2.0), inner, te.ConstantScale(3.0))
    y, extra = model(X, torch.ones(4, 8))
    torch.testing.assert_close(y, 3 * (2 * X + 1))
    torch.testing.assert_close(extra, 2 * (2 * X + 1))


def test_tuples_flow() -> None:
    model = te.Sequential(
        te.Branch(te.Identity(), te.ConstantScale(2.0), te.ConstantScale(3.0)), Sum3()
    )
    torch.testing.assert_close(model(X), 6 * X)
    parts = te.Sequential(te.Branch(te.Identity(), te.ConstantScale(2.0)))(X)
    assert isinstance(parts, tuple)
    torch.testing.assert_close(parts[1], 2 * X)


def test_branch_and_further_inputs() -> None:
    model = te.Sequential(te.Branch(te.Identity(), te.ConstantScale(2.0)), Sum3())
    torch.testing.assert_close(model(X, torch.ones(4, 8)), 3 * X + 1)


@pytest.mark.parametrize(
    ("model", "inputs", "match"),
    [
        (lambda: te.Sequential(te.GELU()), 2, "1 more input given"),
        (lambda: te.Sequential(te.GELU()), 3, "2 more inputs given"),
        (lambda: te.Sequential(Sum3()), 2, "takes 3 inputs: 2 flow here and 0 more"),
        (
            lambda: te.Sequential(te.Branch(te.GELU(), te.SiLU()), te.GELU()),
            1,
            r"^Sequential\.1 \(GELU\): takes 1 input, 2 flow",
        ),
        (
            lambda: te.Sequential(te.GELU(), te.AddExtraInput()),
            1,
            r"^Sequential\.1 \(AddExtraInput\): takes 2 inputs",
        ),
    ],
)
def test_wrong_numbers_of_inputs(model: Any, inputs: int, match: str) -> None:
    with pytest.raises(te.ShapeError, match=match):
        model()(*[X] * inputs)


def test_any_leading_shape() -> None:
    model = te.Sequential(te.RMSNorm(8), te.Linear(8, 6))
    flat = model(X)
    for shape in ((2, 2), (1, 4), (4, 1), (2, 1, 2)):
        y = model(X.reshape(*shape, 8))
        assert y.shape == (*shape, 6)
        assert torch.equal(y.reshape(4, 6), flat)
    torch.testing.assert_close(model(X[0]), flat[0])


# -- list API, as torch.nn.Sequential's


def names(model: te.Sequential) -> list[str]:
    return [type(m).__name__ for m in model]


def test_list_api() -> None:
    model = te.Sequential(te.GELU(), te.SiLU())
    assert len(model) == 2
    model.append(te.ReLU()).insert(1, te.Identity())
    assert names(model) == ["GELU", "Identity", "SiLU", "ReLU"]
    model.extend([te.GELU()])
    assert isinstance(model.pop(), te.GELU)
    assert isinstance(model.pop(0), te.GELU)
    assert names(model) == ["Identity", "SiLU", "ReLU"]
    del model[0]
    model[0] = te.GELU()
    assert names(model) == ["GELU", "ReLU"]
    assert list(model._modules) == ["0", "1"]
    assert names(model[:1]) == ["GELU"]
    assert names(model + te.Sequential(te.SiLU())) == ["GELU", "ReLU", "SiLU"]
    model += te.Sequential(te.SiLU())
    assert names(model) == ["GELU", "ReLU", "SiLU"]
    model.insert(-1, te.Identity())
    assert names(model) == ["GELU", "ReLU", "Identity", "SiLU"]
    del model[1:3]
    assert names(model) == ["GELU", "SiLU"]
    assert model[-1] is model[1]


@pytest.mark.parametrize("index", [2, -3])
def test_index_out_of_range(index: int) -> None:
    model = te.Sequential(te.GELU(), te.SiLU())
    with pytest.raises(IndexError):
        _ = model[index]
    with pytest.raises(IndexError):
        model[index] = te.GELU()


def test_slices_share_modules() -> None:
    model = te.Sequential(te.Linear(8, 8), te.GELU(), te.Linear(8, 8))
    assert model[1:][1] is model[2]
    torch.testing.assert_close(model[1:](model[:1](X)), model(X))


@pytest.mark.parametrize("thing", [3, None, torch.nn.functional.gelu, te.GELU])
def test_only_modules(thing: Any) -> None:
    with pytest.raises(te.PlanError, match="holds modules"):
        te.Sequential(te.GELU(), thing)
    model = te.Sequential(te.GELU())
    with pytest.raises(te.PlanError, match="holds modules"):
        model.append(thing)
    assert len(model) == 1


def test_nested_is_inlined_and_callable_alone() -> None:
    inner = te.Sequential(te.Linear(8, 8), te.GELU())
    model = te.Sequential(inner, te.SiLU())
    assert len(model.plan(X).segments) == 1
    torch.testing.assert_close(te.SiLU()(inner(X)), model(X))


def test_one_module_at_two_positions() -> None:
    op = te.Linear(8, 8)
    model = te.Sequential(op, te.GELU(), op)
    assert len(list(model.parameters())) == 2
    h = te.GELU()(op(X))
    torch.testing.assert_close(model(X), op(h))


# -- Residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual(dtype: torch.dtype) -> None:
    body = te.Linear(8, 8, bias=False).to(dtype)
    x = X.to(dtype).clone().requires_grad_()
    y = te.Residual(body)(x)
    y.float().sum().backward()
    h = torch.nn.functional.linear(x.detach(), body.weight.detach())
    assert torch.equal(y.detach(), (x.detach().float() + h.float()).to(dtype))
    torch.testing.assert_close(
        x.grad.float(), 1 + body.weight.detach().float().sum(0).expand(4, 8), atol=2e-2, rtol=2e-2
    )


def test_residual_of_several_and_nested() -> None:
    model = te.Residual(te.Linear(8, 8), te.Residual(te.GELU()), te.ConstantScale(0.5))
    h = torch.nn.functional.linear(X, model[0].weight, model[0].bias)
    h = h + torch.nn.functional.gelu(h, approximate="tanh")
    torch.testing.assert_close(model(X), X + 0.5 * h)


def test_residual_with_further_inputs_and_extra_outputs() -> None:
    model = te.Residual(te.AddExtraInput(), TwoOut())
    y, extra = model(X, torch.ones(4, 8))
    torch.testing.assert_close(y, 2 * X + 1)
    torch.testing.assert_close(extra, 2 * (X + 1))


def test_residual_of_another_shape() -> None:
    with pytest.raises(te.ShapeError, match=r"Residual.*\(4, 8\) to \(4, 6\)"):
        te.Residual(te.Linear(8, 6))(X)


def test_empty_residual_doubles() -> None:
    torch.testing.assert_close(te.Residual()(X), 2 * X)


# -- Branch


def test_branch_needs_two() -> None:
    with pytest.raises(te.PlanError, match="at least two"):
        te.Branch(te.GELU())


def test_branch_with_foreign_and_several_inputs() -> None:
    tanh = nn.Tanh()
    a, b = te.Branch(te.GELU(), tanh)(X)
    torch.testing.assert_close(b, X.tanh())
    both = te.Branch(te.Add(), te.Add())(X, X)
    torch.testing.assert_close(both[0], 2 * X)
    extra = te.Sequential(te.Branch(te.AddExtraInput(), te.Add()), Sum3())(X, X, X)
    torch.testing.assert_close(extra, 5 * X)
    torch.testing.assert_close(a, te.GELU()(X))


# -- Recompute and Cut


class Runs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x.tanh()


def test_recompute_around_a_foreign_module() -> None:
    """A module that is not ours runs as it is: its gradients are right, once or twice run."""
    model = te.Sequential(te.Recompute(te.Linear(8, 8), Runs(), te.Linear(8, 8)), te.GELU())
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    plain = x.detach().clone().requires_grad_()
    h = torch.nn.functional.linear(plain, model[0][0].weight, model[0][0].bias).tanh()
    h = torch.nn.functional.linear(h, model[0][2].weight, model[0][2].bias)
    torch.nn.functional.gelu(h, approximate="tanh").sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)


def test_recompute_alone_and_empty() -> None:
    model = te.Recompute(te.Linear(8, 8), te.GELU())
    assert model.plan(X.clone().requires_grad_()).saved_bytes == X.numel() * 4
    assert torch.equal(te.Recompute()(X), X)


def test_recompute_draws_the_same_mask() -> None:
    model = te.Recompute(te.Dropout(0.5), te.Linear(8, 8, bias=False))
    x = torch.ones(64, 8, requires_grad=True)
    y = model(x)
    y.sum().backward()
    w = model[1].weight.detach().sum(0)
    kept = x.grad / (2 * w)
    assert torch.equal(kept.round(), kept.round().clamp(0, 1))
    torch.testing.assert_close((2 * kept.round()) @ model[1].weight.detach().t(), y.detach())


def test_cut_changes_no_number() -> None:
    layers = [te.Linear(8, 8), te.GELU(), te.Linear(8, 8)]
    plain, cut = (
        te.Sequential(*layers),
        te.Sequential(layers[0], te.Cut(), layers[1], te.Cut(), layers[2]),
    )
    a, b = X.clone().requires_grad_(), X.clone().requires_grad_()
    plain(a).square().sum().backward()
    kept = [p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    cut(b).square().sum().backward()
    assert torch.equal(a.grad, b.grad)
    for p, q in zip(kept, plain.parameters(), strict=True):
        assert torch.equal(p, q.grad)


def test_torch_containers_may_hold_pipelines() -> None:
    model = nn.Sequential(te.Sequential(te.Linear(8, 8)), nn.ReLU(), te.GELU())
    model(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_slices_and_sums_keep_the_wish_for_graphs() -> None:
    graphed = te.Sequential(te.GELU(), te.SiLU(), cuda_graph=True)
    plain = te.Sequential(te.GELU())
    assert graphed[:1].cuda_graph
    assert (graphed + plain).cuda_graph
    assert not (plain + graphed).cuda_graph
    assert not plain[:1].cuda_graph
