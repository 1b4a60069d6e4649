"""Gradients added to main_grad: the same numbers as summed .grad, and nothing written where it should not be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import te_ops as te
from te_ops.testing import assert_close
from te_ops.testing.cases import RECIPES

BF16, FP32 = torch.bfloat16, torch.float32


def mlp(dtype: torch.dtype = FP32, *, fused: bool = True, bias: bool = True) -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(
        te.RMSNorm(32, dtype=dtype),
        te.Linear(32, 64, bias=bias, dtype=dtype, accumulate_into_main_grad=fused),
        te.GELU(),
        te.Linear(64, 32, bias=bias, dtype=dtype, accumulate_into_main_grad=fused),
    )


def weights(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if n.endswith("weight") and p.dim() == 2}


def give(model: nn.Module, dtype: torch.dtype = FP32, value: float = 0.0) -> nn.Module:
    for weight in weights(model).values():
        weight.main_grad = torch.full_like(weight, value, dtype=dtype)
    return model


def step(
    model: nn.Module, recipe: te.Recipe | None = None, *, seed: int = 1, dtype: torch.dtype = FP32
) -> torch.Tensor:
    torch.manual_seed(seed)  # stochastic rounding draws from it
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 32, generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(16, 32, generator=generator).to(dtype)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.backward(dy)
    assert x.grad is not None
    return x.grad


def check(ours: nn.Module, theirs: nn.Module, start: float = 0.0, **tolerance: int) -> None:
    """main_grad of one against .grad of the other; everything else alike."""
    other = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = other[name].grad
        assert expected is not None
        if name in weights(ours):
            assert parameter.grad is None
            assert_close(parameter.main_grad, expected.to(FP32) + start, **tolerance)
        else:
            assert torch.equal(parameter.grad, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_the_gradient_under_every_recipe(recipe: str) -> None:
    ours, theirs = give(mlp()), mlp(fused=False)
    for seed in (1, 2):
        assert torch.equal(
            step(ours, RECIPES[recipe], seed=seed), step(theirs, RECIPES[recipe], seed=seed)
        )
    check(ours, theirs, terms=16)
    for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(a, b), name


def test_it_is_added_to_what_is_there() -> None:
    ours, theirs = give(mlp(), value=0.5), mlp(fused=False)
    for seed in (1, 2, 3):
        step(ours, seed=seed)
        step(theirs, seed=seed)
    check(ours, theirs, 0.5, terms=16)


def test_products_of_bf16_weights_are_not_rounded_before() -> None:
    ours, theirs = give(mlp(BF16)), mlp(BF16, fused=False)
    step(ours, RECIPES["current"], dtype=BF16)
    step(theirs, RECIPES["current"], dtype=BF16)
    exact = False
    for name, weight in weights(ours).items():
        assert torch.equal(weight.main_grad.to(BF16), dict(theirs.named_parameters())[name].grad)
        exact |= not torch.equal(weight.main_grad, weight.main_grad.to(BF16).to(FP32))
    assert exact


@pytest.mark.parametrize("kind", ["transposed", "columns", "offset"])
def test_main_grads_that_do_not_lie_as_kernels_want(kind: str) -> None:
    model, (n, k) = te.Sequential(te.Linear(32, 48, accumulate_into_main_grad=True)), (48, 32)
    plain = te.Sequential(te.Linear(32, 48))
    plain.load_state_dict(model.state_dict())
    flat = torch.ones(2 * n * k)
    total = {
        "transposed": flat[: n * k].view(k, n).t(),
        "columns": flat.view(n, 2 * k)[:, :k],
        "offset": flat[1 : n * k + 1].view(n, k),
    }[kind]
    model[0].weight.main_grad = total
    x = torch.randn(16, 32)
    for m in (model, plain):
        for scale in (1.0, 2.0):
            m(x * scale).square().sum().backward()
    torch.testing.assert_close(total, plain[0].weight.grad + 1)
    assert model[0].weight.main_grad is total
    assert int((flat == 1).sum()) == n * k  # what lies beside it is as it was


def test_a_bf16_main_grad() -> None:
    ours, theirs = give(mlp(BF16), BF16), mlp(BF16, fused=False)
    step(ours, RECIPES["current"], dtype=BF16)
    step(theirs, RECIPES["current"], dtype=BF16)
    for name, weight in weights(ours).items():
        assert weight.main_grad.dtype is BF16
        assert torch.equal(weight.main_grad, dict(theirs.named_parameters())[name].grad)


def test_master_weights_under_torchs_autocast() -> None:
    ours, theirs = give(mlp()), mlp(fused=False)
    with torch.autocast("cpu", BF16):
        step(ours)
        step(theirs)
    check(ours, theirs, terms=16, roundings=4)
    with torch.autocast("cpu", BF16):
        x = torch.randn(16, 32, requires_grad=True)
        steps = [n for s in ours.plan(x).backward if s.phase == "wgrad" for n in s.nodes]
    assert steps.count("gemm_tn") == steps.count("accumulate") == 2
    assert not any("cast" in n for n in steps)


class Twice(te.Op):
    """One linear twice."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = te.Linear(32, 32, **options)

    def emit(self, g: Any, x: Any) -> Any:
        return self.linear.emit(g, self.linear.emit(g, x))


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_one_op_twice_is_added_twice(autocast: bool) -> None:
    torch.manual_seed(0)
    ours = Twice(accumulate_into_main_grad=True)
    theirs = copy.deepcopy(ours)
    theirs.linear.accumulate_into_main_grad = False
    give(ours)
    with torch.autocast("cpu", BF16, enabled=autocast):
        step(ours)
        step(theirs)
        x = torch.randn(16, 32, requires_grad=True)
        steps = [n for s in ours.plan(x).backward for n in s.nodes]
    if autocast:  # autograd's gradient is rounded to BF16, twice
        expected = theirs.linear.weight.grad
        torch.testing.assert_close(ours.linear.weight.main_grad, expected, rtol=2e-2, atol=0.1)
    else:
        check(ours, theirs, terms=16)
    assert steps.count("accumulate") == 2
    assert steps.count("sum") == 1  # the bias


@pytest.mark.parametrize("between", [lambda: te.GELU(), lambda: te.Cut()], ids=["one", "two"])
def test_tied_weights_are_added_twice_in_one_segment_or_two(between: Callable[[], te.Op]) -> None:
    def build(fused: bool) -> te.Sequential:
        torch.manual_seed(0)
        first, second = (te.Linear(32, 32, accumulate_into_main_grad=fused) for _ in range(2))
        second.weight = first.weight
        return te.Sequential(first, between(), te.GELU(), second)

    ours, theirs = give(build(True)), build(False)
    step(ours)
    step(theirs)
    check(ours, theirs, terms=16)


def test_a_weight_tied_to_an_op_without_the_option() -> None:
    def build(fused: bool) -> te.Sequential:
        torch.manual_seed(0)
        first, second = te.Linear(32, 32), te.Linear(32, 32, accumulate_into_main_grad=fused)
        second.weight = first.weight
        return te.Sequential(first, te.GELU(), second)

    ours, theirs = give(build(True)), build(False)
    step(ours)
    step(theirs)
    check(ours, theirs, terms=16)


def test_a_frozen_weight_needs_none() -> None:
    model = mlp()
    weights(model)["1.weight"].requires_grad_(False)
    weights(model)["3.weight"].main_grad = torch.zeros(32, 64)
    step(model)
    assert not hasattr(weights(model)["1.weight"], "main_grad")
    assert weights(model)["3.weight"].main_grad.any()


def test_without_gradients_none_is_needed() -> None:
    with torch.no_grad():
        mlp()(torch.randn(4, 32))


def test_a_recompute_region_adds_once() -> None:
    ours, theirs = give(mlp()), mlp(fused=False)
    step(te.Sequential(te.Recompute(ours)))
    step(theirs)
    check(ours, theirs, terms=16)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_adds_once(reentrant: bool) -> None:
    ours, theirs = give(mlp()), mlp(fused=False)
    x = torch.randn(16, 32, requires_grad=True)
    torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=reentrant).sum().backward()
    theirs(x).sum().backward()
    check(ours, theirs, terms=16)


def test_a_second_backward_adds_again() -> None:
    model = give(mlp())
    y = model(torch.randn(16, 32, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    once = {n: w.main_grad.clone() for n, w in weights(model).items()}
    y.backward()
    for name, weight in weights(model).items():
        assert torch.equal(weight.main_grad, once[name] * 2)


def test_an_op_inside_a_plain_module() -> None:
    ours = give(nn.Sequential(mlp(), nn.Tanh()))
    theirs = nn.Sequential(mlp(fused=False), nn.Tanh())
    step(ours)
    step(theirs)
    check(ours, theirs, terms=16)


def test_the_dtype_is_part_of_the_plan() -> None:
    model = give(mlp())
    step(model)
    give(model, BF16)
    step(model)
    assert all(w.main_grad.dtype is BF16 and w.main_grad.any() for w in weights(model).values())


def test_switching_it_on_later() -> None:
    model = give(mlp(fused=False))
    step(model)
    model[1].accumulate_into_main_grad = True
    model.zero_grad()
    step(model)
    assert model[1].weight.grad is None
    assert model[1].weight.main_grad.any()
    assert model[3].weight.grad is not None


# -- data-parallel hooks


def test_megatrons_flag_is_set_and_its_hook_runs() -> None:
    model = give(mlp())
    weight = model[1].weight
    weight.grad_added_to_main_grad = False
    seen: list[Any] = []
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    handle = node.register_hook(lambda *_: seen.append(weight.grad))
    step(model)
    handle.remove()
    assert weight.grad_added_to_main_grad is True
    assert len(seen) == 1
    assert seen[0] is not None
    assert not seen[0].any()
    assert not hasattr(model[3].weight, "grad_added_to_main_grad")
    assert model[3].weight.grad is None


def test_torch_sees_that_main_grad_has_changed() -> None:
    model = give(mlp())
    before = model[1].weight.main_grad._version
    step(model)
    assert model[1].weight.main_grad._version > before


# -- errors


def untouched(model: nn.Module, action: Callable[[], Any], match: str) -> None:
    before = {n: w.main_grad.clone() for n, w in weights(model).items() if hasattr(w, "main_grad")}
    with pytest.raises(te.errors.PlanError, match=match):
        action()
    for name, weight in weights(model).items():
        if name in before:
            assert torch.equal(weight.main_grad, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_missing_at_the_first_forward() -> None:
    model = mlp()
    untouched(
        model,
        lambda: model(torch.randn(4, 32)),
        r"Sequential\.1\.weight accumulates its gradient into main_grad, but has none",
    )
    give(model)
    step(model)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (torch.zeros(3, 3), "is \\(3, 3\\) on cpu"),
        (torch.zeros(64, 32, dtype=torch.float16), "must be FP32, BF16"),
        (torch.zeros(64, 32, device="meta"), "on meta"),
        (torch.zeros(1, 32).expand(64, 32), "elements that share memory"),
    ],
)
def test_one_that_does_not_fit(wrong: torch.Tensor, match: str) -> None:
    model = give(mlp())
    model[1].weight.main_grad = wrong
    with pytest.raises(te.errors.PlanError, match=match):
        model(torch.randn(4, 32))


def test_gone_or_changed_before_the_backward() -> None:
    model = give(mlp())
    y = model(torch.randn(4, 32)).sum()
    del model[1].weight.main_grad
    untouched(model, lambda: y.backward(retain_graph=True), "but has none")
    model[1].weight.main_grad = torch.zeros(64, 32, dtype=BF16)
    untouched(model, y.backward, "was torch.float32 at the forward")


def test_a_partial_backward_is_refused() -> None:
    model = give(mlp())
    x = torch.randn(4, 32, requires_grad=True)
    y = model(x).sum()
    match = r"Sequential\.1\.weight accumulates .* this backward .* is not for all parameters"
    untouched(model, lambda: torch.autograd.grad(y, [x], retain_graph=True), match)
    untouched(
        model,
        lambda: torch.autograd.grad(y, [model[1].weight], retain_graph=True, allow_unused=True),
        match,
    )
    untouched(model, lambda: y.backward(inputs=[x], retain_graph=True), match)
    y.backward(inputs=list(model.parameters()))
    assert model[1].weight.main_grad.any()


def test_overwriting_is_refused() -> None:
    model = give(mlp())
    model[1].weight.overwrite_main_grad = True
    with pytest.raises(te.errors.PlanError, match="zero main_grad at the start of a step"):
        model(torch.randn(4, 32))


def test_an_error_before_the_product_leaves_it_alone() -> None:
    model = give(mlp())
    x = torch.randn(4, 32, requires_grad=True)
    y = model(x * 1.0)
    with torch.no_grad():
        model[3].weight.mul_(2.0)
    untouched(model, lambda: y.sum().backward(), "changed in place since the forward")
