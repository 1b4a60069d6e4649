"""K10: gradients accumulate over micro-batches, and bytes keep the scale that made them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import te_ops as te
from tests.faults import cases
from tests.faults.cases import every_case, every_mode


@every_case
def test_gradients_of_micro_batches_add_up(case: cases.Case) -> None:
    op = case.fresh()
    total: dict[str, torch.Tensor] = {}
    for rows in (3, 5, 3):
        twin = case.fresh()
        for name, g in cases.run(twin, case.data(rows)).param_grads.items():
            assert g is not None
            total[name] = g if name not in total else total[name] + g
        cases.run(op, case.data(rows))
    for name, p in op.named_parameters():
        assert torch.equal(p.grad, total[name]), name  # type: ignore[arg-type]


@every_mode
def test_errors_stay_at_the_level_of_the_first_micro_batch(recipe: te.Recipe | None) -> None:
    """B059: five micro-batches under state that moves between them."""
    torch.manual_seed(0)
    op = te.Linear(96, 96)
    with torch.no_grad():
        op.weight.uniform_(-0.1, 0.1)
    errors = []
    for _ in range(5):
        x = torch.rand(32, 96, requires_grad=True)
        with cases.within(recipe):
            y = op(x)
        dy = torch.rand_like(y)
        y.backward(dy)
        expected = F.linear(x.detach(), op.weight.detach(), op.bias.detach())
        errors.append(
            max(
                cases.relative_error(y.detach(), expected),
                cases.relative_error(x.grad, dy @ op.weight.detach()),
            )  # type: ignore[arg-type]
        )
    assert max(errors) <= max(2 * errors[0], 1e-5), errors


@pytest.mark.parametrize(
    "recipe",
    [r for n, r in cases.RECIPES.items() if n != "current_high"],
    ids=[n for n in cases.RECIPES if n != "current_high"],
)
def test_a_backward_after_later_commits_reads_the_bytes_with_their_own_scale(
    recipe: te.Recipe | None,
) -> None:
    """Five forwards, each region committing a new scale, then five backwards.

    (A dense weight that is saved is the parameter itself, which `.data = ` changes, as in torch.)
    """

    def grads(late: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        op = te.Linear(32, 32)
        ys, xs = [], []
        for i in range(5):
            x = (torch.randn(8, 32) * 10.0**i).requires_grad_()
            torch.manual_seed(i)
            with cases.within(recipe):
                y = op(x)
            xs.append(x)
            ys.append(y)
            with torch.no_grad():
                op.weight.data = op.weight.data * 3  # the saved bytes are of the old weight
            if not late:
                y.backward(_dy(y))
        if late:
            for y in ys:
                y.backward(_dy(y))
        return [x.grad for x in xs if x.grad is not None]

    for a, b in zip(grads(True), grads(False), strict=True):
        assert torch.equal(a, b)


def _dy(y: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, y.numel()).reshape(y.shape)


@every_mode
def test_records_carry_their_own_scale(recipe: te.Recipe | None) -> None:
    if recipe is None:
        pytest.skip("nothing is quantized")
    s = te.Sequential(te.Linear(32, 32), te.Quantize())
    x = torch.randn(8, 32)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            q = s(x)
        assert isinstance(q, te.QuantizedTensor)
        before = q.dequantize().detach().clone()
        with te.autocast(recipe=recipe):
            s(100 * x)
        assert torch.equal(q.dequantize(), before)


def test_a_missing_main_grad_is_named_at_the_first_forward() -> None:
    """B057: and not deep in the backward."""
    model = te.Sequential(te.Linear(8, 8, accumulate_into_main_grad=True))
    with pytest.raises(te.PlanError, match=r"Sequential\.0\.weight accumulates .* but has none"):
        model(torch.randn(4, 8))
    model[0].weight.main_grad = torch.zeros(8, 8)
    model(torch.randn(4, 8)).sum().backward()
    assert model[0].weight.main_grad.any()
    assert model[0].weight.grad is None


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises((TypeError, te.Error), match="delay_wgrad_compute"):
        te.Linear(8, 8, delay_wgrad_compute=True)  # type: ignore[call-arg]
