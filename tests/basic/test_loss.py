"""CrossEntropy: against float64, ignored rows, smoothing, odd gradients, what is saved."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from te_ops.basic.loss import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, CrossEntropy
from te_ops.errors import PlanError, ShapeError

from .interp import DTYPES, check, forward, layouts, program

bf16 = torch.bfloat16
REDUCTIONS = ("mean", "sum", "none")


def _torch(x: Any, t: Any, *, reduction: str, smoothing: float = 0.0, ignore: int = -100) -> Any:
    classes = x.shape[-1]
    loss = F.cross_entropy(
        x.reshape(-1, classes),
        t.reshape(-1).long(),
        label_smoothing=smoothing,
        ignore_index=ignore,
        reduction="none",
    )
    if reduction == "none":
        return loss.reshape(t.shape)
    # Not torch's mean, which is NaN when nothing counts.
    return loss.sum() / (max(int((t != ignore).sum()), 1) if reduction == "mean" else 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shape", [(6, 17), (2, 3, 5), (0, 7), (1, 1), (9,)])
def test_matches_float64(dtype: Any, reduction: str, smoothing: float, shape: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype) * 3
    t = torch.randint(0, shape[-1], shape[:-1])
    if t.numel() > 1:
        t.view(-1)[1] = -100
    op = CrossEntropy(smoothing, reduction=reduction)
    check(op, [x, t], partial(_torch, reduction=reduction, smoothing=smoothing))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("targets", [[3, -100, 7, -100], [-100] * 4])
def test_ignored_rows(reduction: str, targets: list[int]) -> None:
    x, t = torch.randn(4, 17), torch.tensor(targets)
    check(CrossEntropy(reduction=reduction), [x, t], partial(_torch, reduction=reduction))
    loss, dx = program(CrossEntropy(reduction=reduction), x, t).run(x, t, dys=[torch.tensor(1.0)])
    if max(targets) < 0:
        assert loss == 0
        assert not dx.any()
    elif reduction == "mean":
        torch.testing.assert_close(loss, F.cross_entropy(x, t))


def test_zero_rows_have_loss_zero() -> None:
    x, t = torch.randn(0, 5, dtype=bf16), torch.zeros(0, dtype=torch.int64)
    for reduction in ("mean", "sum"):
        loss, dx = program(CrossEntropy(reduction=reduction), x, t).run(
            x, t, dys=[torch.tensor(1.0)]
        )
        assert loss.shape == ()
        assert loss == 0
        assert dx.shape == (0, 5)


@pytest.mark.parametrize("ignore", [-1, 0, 3])
def test_other_ignore_index(ignore: int) -> None:
    x, t = torch.randn(6, 5), torch.tensor([0, 3, 1, ignore, 4, 2])
    check(
        CrossEntropy(ignore_index=ignore, reduction="mean"),
        [x, t],
        partial(_torch, reduction="mean", ignore=ignore),
    )


def test_rows_scale_with_any_gradient() -> None:
    x, t = torch.randn(4, 7), torch.tensor([1, 2, 3, 4])
    made = program(CrossEntropy(reduction="none"), x, t)
    unit = made.run(x, t, dys=[torch.ones(4)])[1]
    spaced = torch.arange(8.0)[::2]
    for dy in (torch.arange(4.0), spaced, torch.tensor(3.0).expand(4), torch.zeros(4)):
        dx = made.run(x, t, dys=[dy])[1]
        torch.testing.assert_close(dx, unit * dy.unsqueeze(-1))
    grid, targets = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    wide = program(CrossEntropy(reduction="none"), grid, targets)
    dy = torch.randn(3, 2).t()
    unit = wide.run(grid, targets, dys=[torch.ones(2, 3)])[1]
    torch.testing.assert_close(
        wide.run(grid, targets, dys=[dy])[1], unit * dy.unsqueeze(-1), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_strided_logits_and_targets(reduction: str) -> None:
    op = CrossEntropy(0.1, reduction=reduction)
    for _, x in layouts(torch.randn(6, 6)):
        for t in (torch.randint(0, 6, (12,))[::2], torch.tensor(2).expand(6)):
            check(op, [x, t], partial(_torch, reduction=reduction, smoothing=0.1))


def test_int32_targets() -> None:
    x, t = torch.randn(5, 7), torch.randint(0, 7, (5,), dtype=torch.int32)
    assert torch.equal(forward(CrossEntropy(), x, t), forward(CrossEntropy(), x, t.long()))


def test_logits_are_not_written_and_gradients_are_rounded_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 2000, dtype=bf16)
    t = torch.randint(0, 2000, (8,))
    x[torch.arange(8), t] = 18.0  # confident: p near 1
    before = x.clone()
    _, dx = program(CrossEntropy(reduction="sum"), x, t).run(x, t, dys=[torch.tensor(1.0)])
    assert torch.equal(x, before)
    wide = x.float()
    full = program(CrossEntropy(reduction="sum"), wide, t).run(wide, t, dys=[torch.tensor(1.0)])[1]
    assert torch.equal(dx, full.to(bf16))


@pytest.mark.parametrize(("dtype", "wide"), [(bf16, torch.float32), (torch.float64, torch.float64)])
def test_loss_is_fp32_and_only_logits_targets_and_lse_are_saved(dtype: Any, wide: Any) -> None:
    x, t = torch.randn(4, 9, dtype=dtype), torch.randint(0, 9, (4,))
    for reduction in REDUCTIONS:
        made = program(CrossEntropy(reduction=reduction), x, t)
        dy = torch.ones(4 if reduction == "none" else (), dtype=wide)
        loss, dx = made.run(x, t, dys=[dy])
        assert (loss.dtype, dx.dtype) == (wide, dtype)
        assert set(made.saved) == {
            ("input", 0, dtype),
            ("input", 0, torch.int64),
            ("cross_entropy", 1, wide),
        }


def test_huge_logits_and_masked_classes() -> None:
    x = torch.tensor([[500.0, -torch.inf, 499.0], [1e30, -1e30, 0.0], [-1e30, 0.0, -1e30]])
    t = torch.tensor([2, 0, 1])
    check(CrossEntropy(reduction="none"), [x, t], partial(_torch, reduction="none"), scale=500.0)
    x, t = torch.randn(4, 9) + 1000.0, torch.tensor([1, 2, 3, 4])
    want = F.cross_entropy(x.double(), t, reduction="none")
    assert (forward(CrossEntropy(reduction="none"), x, t) - want).abs().max() < 1e-6


def test_nan_and_inf_do_not_hide_unless_ignored() -> None:
    x = torch.randn(3, 5)
    x[0, 1], x[1, 2] = torch.nan, torch.inf
    t = torch.tensor([0, 0, 0])
    op = CrossEntropy(reduction="none")
    loss, dx = program(op, x, t).run(x, t, dys=[torch.ones(3)])
    assert loss.isfinite().tolist() == [False, False, True]
    assert dx.isnan().any(-1).tolist() == [True, True, False]
    t = torch.tensor([-100, -100, 0])
    dy = torch.tensor([torch.inf, torch.nan, 1.0])
    loss, dx = program(op, x, t).run(x, t, dys=[dy])
    assert loss[:2].tolist() == [0.0, 0.0]
    assert not dx[:2].any()


def test_plan_serves_other_row_counts() -> None:
    op = CrossEntropy(0.1)
    made = program(op, torch.randn(4, 3, 7), torch.zeros(4, 3, dtype=torch.int64))
    for lead in ((5, 3), (0, 3), (4, 1)):
        x, t = torch.randn(*lead, 7), torch.randint(0, 7, lead)
        dys = [torch.tensor(2.0)]
        fresh = program(op, x, t).run(x, t, dys=dys)
        for a, b in zip(made.run(x, t, dys=dys), fresh, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [-1, 7, -101])
def test_target_out_of_range(bad: int) -> None:
    with pytest.raises(ShapeError, match=rf"target {bad} is out of range: there are 7 classes"):
        forward(CrossEntropy(), torch.randn(3, 7), torch.tensor([0, bad, -100]))


def test_target_out_of_range_on_a_device_gives_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    # The path without a wait for the device, run on the CPU.
    import te_ops.basic.loss as module

    monkeypatch.setattr(module, "checked_here", lambda targets: False)
    x, t = torch.randn(4, 7), torch.tensor([0, 7, -100, -5])
    attrs = {"label_smoothing": 0.0, "ignore_index": -100}
    loss, lse = CROSS_ENTROPY.reference(x, t, **attrs)
    assert loss.isnan().tolist() == [False, True, False, True]
    dx = CROSS_ENTROPY_BACKWARD.reference(torch.ones(4), x, t, lse, **attrs)
    assert dx.isnan().all(-1).tolist() == [False, True, False, True]
    assert not dx[2].any()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"label_smoothing": -0.1}, PlanError),
        ({"label_smoothing": 1.1}, PlanError),
        ({"label_smoothing": None}, PlanError),
        ({"ignore_index": 1.0}, ShapeError),
        ({"reduction": "avg"}, PlanError),
        ({"reduction": None}, PlanError),
        ({"weight": None}, TypeError),
    ],
)
def test_bad_arguments(bad: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        CrossEntropy(**bad)
    op = CrossEntropy()  # the same by assignment, at the next plan
    for name, value in bad.items():
        setattr(op, name, value)
    if error is not TypeError:
        with pytest.raises(error):
            program(op, torch.randn(3, 7), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("logits", "targets"),
    [
        (torch.randn(3, 7), torch.zeros(4, dtype=torch.int64)),
        (torch.randn(3, 7), torch.zeros(3, 7, dtype=torch.int64)),
        (torch.randn(3, 7), torch.zeros(3)),
        (torch.randn(3, 0), torch.zeros(3, dtype=torch.int64)),
        (torch.tensor(1.0), torch.tensor(0)),
        (torch.zeros(3, 7, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
    ],
)
def test_bad_inputs(logits: torch.Tensor, targets: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="CrossEntropy"):
        program(CrossEntropy(), logits, targets)


def test_options_are_part_of_the_key_and_shown() -> None:
    ops = [CrossEntropy(), CrossEntropy(0.1), CrossEntropy(ignore_index=0)]
    ops.append(CrossEntropy(reduction="sum"))
    assert len({str(op.config()) for op in ops}) == 4
    assert repr(ops[1]) == "CrossEntropy(label_smoothing=0.1, ignore_index=-100, reduction='mean')"
