"""K33: what must invalidate a plan (B157) and what must not (B159)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrize, prune

import te_ops as te
from te_ops.compiler.passes import passes
from te_ops.runtime.cache import CACHE
from tests.faults import cases
from tests.faults.cases import RECIPES, Case, every_case


@contextlib.contextmanager
def builds(expected: int | None = None, at_most: int | None = None) -> Iterator[None]:
    """Exactly (or at most) so many plans are built inside."""
    before = CACHE.built
    yield
    made = CACHE.built - before
    if expected is not None:
        assert made == expected
    if at_most is not None:
        assert made <= at_most


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    CACHE.clear()


def pair(bias: bool = True) -> te.Sequential:
    return te.Sequential(te.Linear(8, 8, bias=bias), te.SiLU(), te.Linear(8, 8, bias=bias))


def plain(s: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.silu(F.linear(x, s[0].weight, s[0].bias))
    return F.linear(y, s[2].weight, s[2].bias)


def check_pair(s: te.Sequential, rows: int = 4) -> None:
    """Output and all gradients are those of plain torch with the parameters as they are now."""
    x = torch.randn(rows, 8, requires_grad=True)
    s.zero_grad()
    y = s(x)
    expected = plain(s, x)
    torch.testing.assert_close(y, expected)
    params = [p for p in s.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(expected.square().sum(), [x, *params], retain_graph=True)
    got = torch.autograd.grad(y.square().sum(), [x, *params])
    for a, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, e)


# -- parameters


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


# -- modes, attributes, hooks


def test_train_and_eval_have_a_plan_each() -> None:
    s = te.Sequential(te.Linear(8, 8), te.Dropout(0.5))
    x = torch.randn(64, 8)
    with builds(2):
        for _ in range(3):
            s.train()
            assert (s(x) == 0).any()
            s.eval()
            torch.testing.assert_close(s(x), F.linear(x, s[0].weight, s[0].bias))
    s[1].train()
    assert (s(x) == 0).any()


Edit = Callable[[Any], None]


def _set(name: str, value: Any) -> Edit:
    return lambda op: setattr(op, name, value)


EDITS: list[
    tuple[
        str, Callable[[], te.Op], Edit, Callable[[], te.Op], Callable[[], tuple[torch.Tensor, ...]]
    ]
] = [
    (
        "scale",
        lambda: te.ConstantScale(2.0),
        _set("scale", 3.0),
        lambda: te.ConstantScale(3.0),
        lambda: _row(8),
    ),
    (
        "eps",
        lambda: te.RMSNorm(8),
        _set("eps", 1.0),
        lambda: te.RMSNorm(8, eps=1.0),
        lambda: _row(8),
    ),
    (
        "approximate",
        lambda: te.GELU(),
        _set("approximate", "none"),
        lambda: te.GELU("none"),
        lambda: _row(8),
    ),
    (
        "interleave",
        lambda: te.SwiGLU(),
        _set("glu_interleave_size", 2),
        lambda: te.SwiGLU(2),
        lambda: _row(8),
    ),
    (
        "limit",
        lambda: te.ClampedSwiGLU(),
        _set("limit", 0.5),
        lambda: te.ClampedSwiGLU(0.5),
        lambda: _row(8),
    ),
    (
        "beta",
        lambda: te.SiTUGLU(),
        _set("beta2", 0.5),
        lambda: te.SiTUGLU(beta2=0.5),
        lambda: _row(8),
    ),
    (
        "smoothing",
        lambda: te.CrossEntropy(),
        _set("label_smoothing", 0.5),
        lambda: te.CrossEntropy(0.5),
        lambda: (torch.randn(4, 8), torch.tensor([0, 1, 2, 3])),
    ),
    (
        "reduction",
        lambda: te.CrossEntropy(),
        _set("reduction", "none"),
        lambda: te.CrossEntropy(reduction="none"),
        lambda: (torch.randn(4, 8), torch.tensor([0, 1, 2, 3])),
    ),
    (
        "p",
        lambda: te.Dropout(0.2, seed=1),
        _set("p", 0.7),
        lambda: te.Dropout(0.7, seed=1),
        lambda: _row(8),
    ),
    (
        "base",
        lambda: te.RoPE(4),
        _set("base", 10.0),
        lambda: te.RoPE(4, 10.0),
        lambda: (torch.randn(2, 3, 2, 4),),
    ),
    (
        "softmax_scale",
        lambda: te.Attention(2, packed=True),
        _set("softmax_scale", 2.0),
        lambda: te.Attention(2, packed=True, softmax_scale=2.0),
        lambda: (torch.randn(2, 5, 24),),
    ),
    (
        "shape",
        lambda: te.Reshape((-1, 4)),
        _set("shape", (-1, 2)),
        lambda: te.Reshape((-1, 2)),
        lambda: _row(8),
    ),
    (
        "quantizer",
        lambda: te.Quantize(),
        _set("quantizer_value", te.MXFP8Quantizer()),
        lambda: te.Quantize(quantizer=te.MXFP8Quantizer()),
        lambda: _row(8),
    ),
    (
        "cap",
        lambda: cases.softcap(2.0),
        _set("cap", 0.5),
        lambda: cases.softcap(0.5),
        lambda: _row(8),
    ),
]


def _row(features: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, features),)


@pytest.mark.parametrize("nested", [False, True], ids=["root", "child"])
@pytest.mark.parametrize("case", EDITS, ids=[e[0] for e in EDITS])
def test_attribute_edits_are_seen(case: tuple[Any, ...], nested: bool) -> None:
    _, make, edit, wanted, inputs = case
    op, other = make(), wanted()
    root = te.Sequential(te.Sequential(op)) if nested else op
    xs = inputs()
    before = root(*xs)
    edit(op)
    after, expected = root(*xs), other(*xs)
    assert torch.equal(cases_dense(after), cases_dense(expected))
    assert before.shape != after.shape or not torch.equal(cases_dense(before), cases_dense(after))


def cases_dense(y: torch.Tensor) -> torch.Tensor:
    return y.dequantize() if isinstance(y, te.QuantizedTensor) else y


def test_hooks_run_and_stop_running() -> None:
    s = pair()
    check_pair(s)
    seen: list[str] = []
    x = torch.randn(4, 8, requires_grad=True)
    handles = [
        s[0].register_forward_pre_hook(lambda *_: seen.append("pre")),
        s[0].register_forward_hook(lambda *_: seen.append("post")),
        s[2].register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    check = plain(s, x)
    y = s(x)
    torch.testing.assert_close(y, check)
    y.sum().backward()
    assert seen == ["pre", "post", "backward"]
    for handle in handles:
        handle.remove()
    seen.clear()
    check_pair(s)
    assert seen == []


def test_hook_that_changes_the_value_is_obeyed() -> None:
    s = pair()
    x = torch.randn(4, 8)
    s(x)
    handle = s[0].register_forward_hook(lambda _m, _i, y: 2 * y)
    h = F.silu(2 * F.linear(x, s[0].weight, s[0].bias))
    torch.testing.assert_close(s(x), F.linear(h, s[2].weight, s[2].bias))
    handle.remove()
    torch.testing.assert_close(s(x), plain(s, x))


def test_hook_on_the_root_and_on_a_nested_pipeline() -> None:
    inner = pair()
    outer = te.Sequential(inner, te.Bias(8))
    x = torch.randn(4, 8)
    expected = outer(x)
    seen = []
    for module in (inner, outer):
        module.register_forward_hook(lambda m, *_: seen.append(len(m)))
    torch.testing.assert_close(outer(x), expected)
    assert seen == [3, 2]


# -- children


def test_list_edits_are_seen() -> None:
    s = te.Sequential(te.ConstantScale(2.0))
    x = torch.randn(3, 8)

    def factor() -> float:
        return float((s(x) / x).mean())

    assert factor() == pytest.approx(2)
    s.append(te.ConstantScale(3.0))
    assert factor() == pytest.approx(6)
    s.insert(0, te.ConstantScale(5.0))
    assert factor() == pytest.approx(30)
    s[0] = te.ConstantScale(7.0)
    assert factor() == pytest.approx(42)
    del s[0]
    assert factor() == pytest.approx(6)
    s.pop()
    assert factor() == pytest.approx(2)
    s.extend([te.ConstantScale(0.5), te.ConstantScale(4.0)])
    assert factor() == pytest.approx(4)
    s += te.Sequential(te.ConstantScale(2.0))
    assert factor() == pytest.approx(8)


def test_edits_deep_inside_are_seen() -> None:
    inner = te.Residual(te.ConstantScale(1.0))
    s = te.Sequential(te.Branch(inner, te.Identity()), te.Add())
    x = torch.randn(3, 8)
    torch.testing.assert_close(s(x), 3 * x)
    inner[0] = te.ConstantScale(2.0)
    torch.testing.assert_close(s(x), 4 * x)
    s[0].add_module("2", te.Identity())
    torch.testing.assert_close(s(x), 5 * x)


def test_child_of_a_foreign_module_may_change() -> None:
    foreign = nn.Sequential(nn.Linear(8, 8))
    s = te.Sequential(foreign, te.SiLU())
    x = torch.randn(3, 8)
    torch.testing.assert_close(s(x), F.silu(foreign(x)))
    foreign[0] = nn.Linear(8, 5)
    torch.testing.assert_close(s(x), F.silu(foreign(x)))
    foreign.append(nn.Linear(5, 6, dtype=torch.float32))
    y = s(x)
    torch.testing.assert_close(y, F.silu(foreign(x)))
    y.sum().backward()


def test_shape_that_no_longer_fits_is_reported_when_a_foreign_child_changes() -> None:
    foreign = nn.Sequential(nn.Linear(8, 8))
    s = te.Sequential(foreign, te.Linear(8, 4))
    x = torch.randn(3, 8)
    s(x)
    foreign[0] = nn.Linear(8, 5)
    with pytest.raises(te.Error, match="5 features"):
        s(x)


def test_extra_output_added_and_removed_after_a_forward() -> None:
    s = te.Sequential(te.SiLU(), te.SiLU())
    x = torch.randn(3, 8)
    assert isinstance(s(x), torch.Tensor)
    s.insert(1, te.MakeExtraOutput())
    y, extra = s(x)
    torch.testing.assert_close(extra, F.silu(x))
    torch.testing.assert_close(y, F.silu(F.silu(x)))
    del s[1]
    assert isinstance(s(x), torch.Tensor)


def test_registered_pass_makes_new_plans() -> None:
    s = pair()
    check_pair(s)
    seen: list[Any] = []
    made = passes.add("select", lambda work: seen.append(work))
    try:
        check_pair(s)
        assert seen
    finally:
        passes.remove("select", made)


# -- what must not make a plan


@every_case
def test_row_counts_of_a_class_share_a_plan(case: Case) -> None:
    op = case.fresh()
    with builds(at_most=1):
        op(*case.data(33))
    for rows in (35, 37, 61):
        xs = case.data(rows)
        expected = case.expected(op, xs)
        op.zero_grad()
        with builds(0):
            actual = cases.run(op, xs)
        cases.compare(actual, expected, 1e-4)


@every_case
def test_grad_mode_flips_build_once_each(case: Case) -> None:
    op, xs = case.fresh(), case.data(3)
    with builds(at_most=2):
        for _ in range(4):
            with torch.no_grad():
                op(*xs)
            op(*xs)


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
@pytest.mark.parametrize("reentrant", [True, False])
def test_ten_checkpointed_steps_build_at_most_twice(
    recipe: te.Recipe | None, reentrant: bool
) -> None:
    if reentrant and recipe in [RECIPES[name] for name in cases.DELAYED]:
        pytest.skip("refused: see K11")
    op = cases.BY_NAME["MLP"].fresh()
    x = torch.randn(5, cases.WIDTH, requires_grad=True)
    with builds(at_most=2):
        for _ in range(10):
            with cases.within(recipe):
                y = torch.utils.checkpoint.checkpoint(op, x, use_reentrant=reentrant)
                y.sum().backward()


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
def test_te_checkpoint_and_optimizer_steps_build_once(recipe: te.Recipe | None) -> None:
    op = cases.BY_NAME["MLP"].fresh()
    optimizer = torch.optim.SGD(op.parameters(), lr=1e-3)
    x = torch.randn(5, cases.WIDTH)
    with builds(at_most=1):
        for _ in range(10):
            with cases.within(recipe):
                y = te.checkpoint(op, x)
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_equal_layers_and_copies_share_a_plan() -> None:
    x = torch.randn(5, 8)
    layers = [pair() for _ in range(3)]
    with builds(1):
        for layer in (*layers, copy.deepcopy(layers[0])):
            layer(x)


def test_scalars_equal_recipes_and_weight_updates_make_no_plan() -> None:
    scale = te.scalar(2.0)
    s = te.Sequential(te.Linear(8, 8), te.ConstantScale(scale))
    x = torch.randn(5, 8)
    expected = F.linear(x, s[0].weight, s[0].bias)
    torch.testing.assert_close(s(x), 2 * expected)
    with builds(0):
        scale.set(5.0)
        torch.testing.assert_close(s(x), 5 * expected)
        with torch.no_grad():
            s[0].weight.mul_(2)
        s(x)
    with builds(1):
        for _ in range(3):
            with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
                s(x)


def test_state_that_appears_makes_no_second_plan() -> None:
    s = pair()
    x = torch.randn(5, 8)
    recipe = te.recipe.DelayedScaling()
    with builds(1):
        for _ in range(3):
            with te.autocast(recipe=recipe):
                y = s(x)
            y.sum().backward()
