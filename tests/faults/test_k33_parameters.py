"""K33 (B157): plans use the parameters that are there now, however they were replaced, moved, tied or frozen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

import te_ops as te
from tests.faults import cases
from tests.faults.cases import RECIPES, Case, every_case
from tests.faults.pairs import builds, check_pair, pair

pytestmark = pytest.mark.usefixtures("no_plans")


def test_replaced_parameter_is_used_without_a_new_plan() -> None:
    s = pair()
    check_pair(s)
    old = s[0].weight
    s[0].weight = nn.Parameter(torch.randn(8, 8))
    with builds(0):
        check_pair(s)
    x = torch.randn(4, 8)
    old.grad = None
    s(x).sum().backward()
    assert old.grad is None
    assert s[0].weight.grad is not None


def test_replaced_parameter_of_another_dtype_or_shape_makes_a_new_plan() -> None:
    s = te.Sequential(te.Linear(8, 8), te.SiLU())
    x = torch.randn(4, 8)
    assert s(x).dtype is torch.float32
    s[0].weight = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))
    assert s(x).dtype is torch.bfloat16
    s[0].weight = nn.Parameter(torch.randn(5, 8))
    s[0].bias = nn.Parameter(torch.randn(5))
    assert s(x).shape == (4, 5)


def test_bias_taken_away_and_given_back() -> None:
    s = pair()
    check_pair(s)
    bias = s[0].bias
    s[0].bias = None
    check_pair(s)
    s[0].bias = bias
    check_pair(s)


def test_written_through_data_and_parameters_dict() -> None:
    s = pair()
    check_pair(s)
    s[0].weight.data = torch.randn(8, 8)
    check_pair(s)
    s[0]._parameters["weight"] = nn.Parameter(
        torch.randn(8, 8)
    )  # as torch.func.functional_call does
    with builds(0):
        check_pair(s)


def test_functional_call_uses_the_given_parameters() -> None:
    s = pair()
    check_pair(s)
    given = {n: torch.randn_like(p).requires_grad_() for n, p in s.named_parameters()}
    x = torch.randn(4, 8)
    y = torch.func.functional_call(s, given, (x,))
    h = F.silu(F.linear(x, given["0.weight"], given["0.bias"]))
    torch.testing.assert_close(y, F.linear(h, given["2.weight"], given["2.bias"]))
    y.sum().backward()
    assert given["0.weight"].grad is not None
    check_pair(s)


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
def test_meta_model_is_materialised(recipe: te.Recipe | None) -> None:
    with torch.device("meta"):
        s = te.Sequential(te.RMSNorm(8), te.Linear(8, 8), te.Bias(8), te.LayerNorm(8))
    assert all(p.is_meta for p in s.parameters())
    with pytest.raises(te.PlanError, match="meta"):
        s(torch.randn(2, 8))
    s.to_empty(device="cpu")
    for op in s:
        op.reset_parameters()
    before = list(s.parameters())
    x = torch.randn(3, 8)
    with cases.within(recipe):
        y = s(x)
    y.sum().backward()
    assert all(a is b for a, b in zip(before, s.parameters(), strict=True))
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in s.parameters())


def test_materialised_after_meta_planning() -> None:
    s = te.Sequential(te.Linear(8, 8, device="meta"), te.Bias(8, device=torch.device("meta")))
    assert s.plan(torch.randn(2, 8, device="meta")) is not None
    s.to_empty(device="cpu")
    s[0].reset_parameters()
    s[1].reset_parameters()
    x = torch.randn(2, 8)
    torch.testing.assert_close(s(x), F.linear(x, s[0].weight, s[0].bias) + s[1].bias)
    s(x).sum().backward()
    assert s[0].weight.grad is not None


def test_tied_and_untied_weights() -> None:
    s = pair()
    check_pair(s)
    s[2].weight = s[0].weight
    check_pair(s)
    assert len(list(s.parameters())) == 3
    s[2].weight = nn.Parameter(torch.randn(8, 8))
    check_pair(s)


def test_pruned_and_pruning_removed() -> None:
    s = pair()
    check_pair(s)
    prune.l1_unstructured(s[0], "weight", 0.5)
    for _ in range(2):
        x = torch.randn(4, 8)
        y = s(x)
        masked = s[0].weight_orig * s[0].weight_mask
        h = F.silu(F.linear(x, masked, s[0].bias))
        torch.testing.assert_close(y, F.linear(h, s[2].weight, s[2].bias))
        s.zero_grad()
        y.square().sum().backward()
        grad = s[0].weight_orig.grad
        assert grad is not None
        assert not grad[s[0].weight_mask == 0].any()
        with torch.no_grad():
            s[0].weight_orig.add_(0.1)
    prune.remove(s[0], "weight")
    check_pair(s)


class _Doubled(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return 2.0 * w


def test_parametrized_and_parametrization_removed() -> None:
    s = pair()
    check_pair(s)
    parametrize.register_parametrization(s[0], "weight", _Doubled())
    check_pair(s)
    with torch.no_grad():
        s[0].parametrizations.weight.original.add_(1.0)
    with builds(0):
        check_pair(s)
    parametrize.register_parametrization(s[0], "weight", _Doubled())
    check_pair(s)
    parametrize.remove_parametrizations(s[0], "weight")
    check_pair(s)


def test_frozen_and_unfrozen() -> None:
    s = pair()
    check_pair(s)
    s[0].weight.requires_grad_(False)
    check_pair(s)
    s.requires_grad_(False)
    x = torch.randn(4, 8)
    assert not s(x).requires_grad
    s.requires_grad_(True)
    with builds(0):
        check_pair(s)


@pytest.mark.parametrize("first", [True, False])
def test_foreign_module_frozen_and_unfrozen(first: bool) -> None:
    foreign = nn.Linear(8, 8)
    s = te.Sequential(foreign, te.SiLU()) if first else te.Sequential(te.SiLU(), foreign, te.SiLU())
    x = torch.randn(4, 8)
    foreign.requires_grad_(False)
    assert not s(x).requires_grad
    foreign.requires_grad_(True)
    s(x).sum().backward()
    assert foreign.weight.grad is not None
    expected = torch.autograd.grad(
        F.silu(foreign(x if first else F.silu(x))).sum(), [foreign.weight]
    )[0]
    torch.testing.assert_close(foreign.weight.grad, expected)


@every_case
def test_loaded_moved_and_copied_weights_are_used(case: Case) -> None:
    op, xs = case.fresh(), case.data(3)
    op(*xs)
    if not list(op.parameters()):
        pytest.skip("no parameters")
    state = {k: v + 0.25 for k, v in op.state_dict().items()}
    op.load_state_dict(state)
    op.zero_grad()
    with builds(0):
        cases.compare(cases.run(op, xs), case.expected(op, xs), 1e-4)
    op.double().zero_grad()
    wide = case.data(3, torch.float64)
    cases.compare(cases.run(op, wide), case.expected(op, wide), 1e-10)
