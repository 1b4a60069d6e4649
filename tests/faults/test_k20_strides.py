"""K20: strides, layouts, non-contiguous and expanded inputs, gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_ops as te
from tests.faults import cases
from tests.faults.cases import Case, every_case, every_quantizer, every_recipe

Stride = Callable[[torch.Tensor], torch.Tensor]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Equal values, stored with the first and the last dimension swapped."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def sliced(x: torch.Tensor) -> torch.Tensor:
    """Every second element of a larger tensor whose gaps are NaN."""
    size = (*x.shape[:-1], 2 * x.shape[-1])
    if not x.is_floating_point():
        wide = torch.full(size, 10**9, dtype=x.dtype)
    else:
        wide = torch.full(size, torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Storage offset of one element."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """NHWC memory of a 4-d tensor."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else transposed(x)


def rows_of_larger(x: torch.Tensor) -> torch.Tensor:
    """A slice of rows and of columns."""
    wide = torch.full(
        (x.shape[0] + 3, *x.shape[1:-1], x.shape[-1] + 5) if x.dim() > 1 else (x.numel() + 8,), 0.0
    )
    wide = wide.to(x.dtype)
    view = wide[2:-1, ..., 3:-2] if x.dim() > 1 else wide[2 : 2 + x.numel()]
    view.copy_(x)
    return view


STRIDES: list[Stride] = [transposed, sliced, shifted, channels_last, rows_of_larger]


def leaf_with(x: torch.Tensor, stride: Stride) -> torch.Tensor:
    """The input as a leaf that has these strides."""
    made = stride(x.detach())
    assert torch.equal(made, x)
    return made.requires_grad_(x.requires_grad)


@pytest.mark.parametrize("stride", STRIDES, ids=lambda s: s.__name__)
@every_case
def test_inputs(case: Case, stride: Stride) -> None:
    """B109."""
    op, xs = case.fresh(), case.data(6)
    expected = cases.run(op, xs)
    op.zero_grad()
    strided = [leaf_with(x, stride) for x in xs]
    if (
        stride is shifted
    ):  # a CPU GEMM of 7 columns sums in another order where memory is not aligned
        cases.compare(cases.run(op, strided), expected, 1e-6, dtypes=True)
    else:
        cases.same(cases.run(op, strided), expected)


@every_case
def test_expanded_inputs(case: Case) -> None:
    op = case.fresh()
    base = [x.detach()[:1] for x in case.data(6)]
    whole = [
        b.expand(6, *b.shape[1:]).contiguous().requires_grad_(b.is_floating_point()) for b in base
    ]
    expected = cases.run(op, whole)
    op.zero_grad()
    views = [b.expand(6, *b.shape[1:]).detach().requires_grad_(b.is_floating_point()) for b in base]
    assert all(v.stride(0) == 0 for v in views)
    cases.same(cases.run(op, views), expected)


def _backward(
    op: nn.Module, xs: tuple[torch.Tensor, ...], grad: Callable[[torch.Tensor], torch.Tensor]
) -> cases.Result:
    outputs = cases.outputs_of(op(*xs))
    grads = [grad(y) for y in outputs]
    live = [(y, g) for y, g in zip(outputs, grads, strict=True) if y.requires_grad]
    torch.autograd.backward([y for y, _ in live], [g for _, g in live])
    return cases.Result(
        [y.detach() for y in outputs],
        [x.grad for x in xs],
        {n: p.grad for n, p in op.named_parameters()},
    )


@pytest.mark.parametrize("stride", STRIDES, ids=lambda s: s.__name__)
@every_case
def test_gradients(case: Case, stride: Stride) -> None:
    """B111: backward alone sees the odd strides."""
    dense = _backward(case.fresh(), case.data(6), lambda y: cases.loss_weights([y])[0])
    odd = _backward(case.fresh(), case.data(6), lambda y: stride(cases.loss_weights([y])[0]))
    cases.same(odd, dense)


@every_case
def test_expanded_gradients(case: Case) -> None:
    """What `.sum().backward()` sends: one element, stride 0."""
    dense = _backward(case.fresh(), case.data(6), lambda y: torch.full(y.shape, 0.5, dtype=y.dtype))
    odd = _backward(
        case.fresh(), case.data(6), lambda y: torch.tensor(0.5, dtype=y.dtype).expand(y.shape)
    )
    cases.same(odd, dense)


@pytest.mark.parametrize("stride", STRIDES, ids=lambda s: s.__name__)
@every_case
def test_parameters(case: Case, stride: Stride) -> None:
    op, xs = case.fresh(), case.data(6)
    if not list(op.parameters()):
        pytest.skip("no parameters")
    expected = cases.run(op, xs)
    twin = case.fresh()
    for module in twin.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and p.dim() > 0:
                setattr(module, name, nn.Parameter(stride(p.detach())))
    cases.same(cases.run(twin, case.data(6)), expected)


@every_recipe
@pytest.mark.parametrize("stride", STRIDES, ids=lambda s: s.__name__)
def test_quantized(recipe: te.Recipe, stride: Stride) -> None:
    case = cases.BY_NAME["MLP"]
    expected = cases.step(case.fresh(), case.data(6), recipe)
    xs = [leaf_with(x, stride) for x in case.data(6)]
    cases.same(cases.step(case.fresh(), xs, recipe), expected)


@pytest.mark.parametrize("stride", STRIDES, ids=lambda s: s.__name__)
@every_quantizer
def test_quantizers(quantizer: te.Quantizer, stride: Stride) -> None:
    x = torch.randn(33, 48)
    a = cases.make_quantized(x, quantizer, rowwise=True, columnwise=True)
    b = cases.make_quantized(stride(x), quantizer, rowwise=True, columnwise=True)
    for r, s in ((a.rowwise, b.rowwise), (a.columnwise, b.columnwise)):
        assert r is not None
        assert s is not None
        for t, u in zip(r.tensors(), s.tensors(), strict=True):
            assert t.dtype is u.dtype
            assert torch.equal(t.float(), u.float())


@pytest.mark.parametrize("shape", [(2, 3, 64), (2, 3, 2, 64), (64,)], ids=str)
@pytest.mark.parametrize(
    "case", [c for c in cases.CASES if c.pipes and te.Reshape not in c.kinds], ids=lambda c: c.name
)
def test_every_leading_shape(case: Case, shape: tuple[int, ...]) -> None:
    """Rank 1, 3 and 4 give what the flat rows give."""
    rows = max(1, torch.Size(shape[:-1]).numel())
    flat = case.data(rows)
    op, twin = case.fresh(), case.fresh()
    x = flat[0].detach().reshape(shape).requires_grad_()
    y = op(x)
    y.backward(cases.loss_weights([y.reshape(rows, -1)])[0].reshape(y.shape))
    expected = cases.run(twin, flat)
    assert y.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape
    assert cases.relative_error(y.reshape(rows, -1), expected.outputs[0]) < 1e-5
    assert cases.relative_error(x.grad.reshape(rows, -1), expected.input_grads[0]) < 1e-5  # type: ignore[arg-type]
    for name, p in op.named_parameters():
        assert cases.relative_error(p.grad, expected.param_grads[name]) < 1e-5  # type: ignore[arg-type]


# -- B113


def test_unreduced_loss_reads_every_rows_gradient() -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, 2, 3, 4])
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    twin = logits.detach().clone().requires_grad_()
    (te.CrossEntropy(reduction="none")(logits, targets) * weights).sum().backward()
    (F.cross_entropy(twin, targets, reduction="none") * weights).sum().backward()
    torch.testing.assert_close(logits.grad, twin.grad)
    assert logits.grad is not None
    assert not logits.grad[0].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_gradient_of_every_stride(reduction: str) -> None:
    logits = torch.randn(4, 9, dtype=torch.float64)
    targets = torch.tensor([1, 2, -100, 4])
    for transform in (lambda t: t, transposed, sliced):
        a = transform(logits.clone()).requires_grad_()
        b = logits.clone().requires_grad_()
        loss = te.CrossEntropy(reduction=reduction)(a, targets)
        wanted = F.cross_entropy(b, targets, reduction=reduction)
        (3 * loss).sum().backward()
        (3 * wanted).sum().backward()
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(a.grad, b.grad)
