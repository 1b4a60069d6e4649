"""K06: a quantized tensor is a torch tensor, and an input and output of plans."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_ops as te
from tests.faults import cases
from tests.faults.cases import every_quantizer, every_usage


@pytest.mark.parametrize("shape", [(48, 64), (3, 5, 64), (0, 32)], ids=str)
@every_usage
@every_quantizer
def test_shape_is_one_thing(
    quantizer: te.Quantizer, rowwise: bool, columnwise: bool, shape: tuple[int, ...]
) -> None:
    """B033: whichever usages are there."""
    made = [
        quantizer.make_empty(shape, rowwise=rowwise, columnwise=columnwise),
        cases.make_quantized(torch.randn(shape), quantizer, rowwise=rowwise, columnwise=columnwise),
    ]
    dense = torch.empty(shape)
    for q in made:
        assert q.shape == q.size() == dense.shape
        assert q.dim() == q.ndim == dense.dim()
        assert q.numel() == dense.numel()
        assert [q.size(i) for i in range(-q.dim(), q.dim())] == [
            dense.size(i) for i in range(-q.dim(), q.dim())
        ]
        assert q.stride() == dense.stride()
        assert q.device == dense.device
        assert q.dtype is dense.dtype
        assert q.is_floating_point()
        assert len(q) == len(dense)
        assert q.dequantize().shape == dense.shape


class Holder(nn.Module):
    def __init__(self, q: te.QuantizedTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(q, requires_grad=True)
        self.register_buffer("table", q.detach().clone())


@every_usage
@every_quantizer
def test_modules_that_hold_one_can_be_moved(
    quantizer: te.Quantizer, rowwise: bool, columnwise: bool
) -> None:
    """B035: bytes and scales survive; nothing is quantized again."""
    q = cases.make_quantized(torch.randn(32, 64), quantizer, rowwise=rowwise, columnwise=columnwise)
    m = Holder(q)
    for move in (
        lambda t: t.cpu(),
        lambda t: t.to("cpu", non_blocking=True),
        lambda t: t.to(torch.device("cpu")),
    ):
        m = move(m)
        for held in (m.weight, m.table):
            assert isinstance(held.data, te.QuantizedTensor)
            for r, s in ((held.data.rowwise, q.rowwise), (held.data.columnwise, q.columnwise)):
                for t, u in zip(
                    () if r is None else r.tensors(), () if s is None else s.tensors(), strict=True
                ):
                    assert torch.equal(t.float(), u.float())


@every_usage
@every_quantizer
def test_gradient_passes_through(quantizer: te.Quantizer, rowwise: bool, columnwise: bool) -> None:
    """B037: straight-through, for every format; detach breaks it."""
    x = torch.randn(32, 64, requires_grad=True)
    q = cases.make_quantized(x, quantizer, rowwise=rowwise, columnwise=columnwise)
    assert q.requires_grad
    q.dequantize().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(x))
    assert not q.detach().requires_grad
    assert not q.detach().dequantize().requires_grad


# -- inputs of plans


@every_usage
@every_quantizer
@pytest.mark.parametrize("name", ["Linear", "MLP", "Dequantize"])
def test_ops_take_one_as_input(
    name: str, quantizer: te.Quantizer, rowwise: bool, columnwise: bool
) -> None:
    """As its dequantized values, with the gradient passing through."""
    case = cases.BY_NAME[name]
    x = torch.randn(5, cases.WIDTH, requires_grad=True)
    q = cases.make_quantized(x, quantizer, rowwise=rowwise, columnwise=columnwise)
    op = case.fresh()
    outputs = cases.outputs_of(op(q))
    cases.backward(outputs)
    twin, dense = case.fresh(), q.detach().dequantize().requires_grad_()
    expected = cases.run(twin, (dense,))
    assert torch.equal(outputs[0], expected.outputs[0])
    assert x.grad is not None
    assert torch.equal(x.grad, expected.input_grads[0])  # type: ignore[arg-type]
    for (n, p), g in zip(op.named_parameters(), expected.param_grads.values(), strict=True):
        assert torch.equal(p.grad, g), n  # type: ignore[arg-type]


def test_formats_do_not_share_a_plan() -> None:
    op = te.Linear(64, 64)
    x = torch.randn(32, 64)
    for _ in range(2):
        for quantizer in cases.QUANTIZERS:
            for usage in ({"rowwise": True}, {"rowwise": False, "columnwise": True}):
                q = cases.make_quantized(x, quantizer, **usage)
                torch.testing.assert_close(op(q), F.linear(q.dequantize(), op.weight, op.bias))


@pytest.mark.parametrize("recipe", cases.RECIPES.values(), ids=list(cases.RECIPES))
@every_quantizer
def test_inputs_under_a_recipe(quantizer: te.Quantizer, recipe: te.Recipe) -> None:
    """Equal to feeding the dequantized values, but that bytes of the same format are not rounded twice."""
    op, twin = te.Linear(64, 64, bias=False), te.Linear(64, 64, bias=False)
    twin.load_state_dict(op.state_dict())
    q = cases.make_quantized(torch.randn(32, 64), quantizer, rowwise=True, columnwise=True)
    torch.manual_seed(0)
    with te.autocast(recipe=recipe):
        y = op(q)
    y.sum().backward()
    torch.manual_seed(0)
    with te.autocast(recipe=recipe):
        z = twin(q.dequantize())
    z.sum().backward()
    limit = 0.3 if "nvfp4" in recipe_name(recipe) or "nvfp4" in quantizer.describe() else 0.1
    assert cases.relative_error(y, z) < limit
    assert cases.relative_error(op.weight.grad, twin.weight.grad) < limit  # type: ignore[arg-type]


def recipe_name(recipe: te.Recipe) -> str:
    return next(name for name, r in cases.RECIPES.items() if r is recipe)


# -- outputs of plans


@pytest.mark.parametrize("recipe", cases.RECIPES.values(), ids=list(cases.RECIPES))
def test_pipeline_that_ends_in_quantize_returns_one(recipe: te.Recipe) -> None:
    s = te.Sequential(te.Linear(64, 64), te.Quantize())
    x = torch.randn(32, 64, requires_grad=True)
    torch.manual_seed(0)
    with te.autocast(recipe=recipe):
        q = s(x)
        wanted = recipe.quantizer(te.Role("quantize", te.graph.Phase.FORWARD, "input", "1"))
    if isinstance(recipe, te.recipe.PerLayer):
        wanted = recipe.for_path("1").quantizer(
            te.Role("quantize", te.graph.Phase.FORWARD, "input", "1")
        )  # type: ignore[union-attr]
    assert isinstance(q, te.QuantizedTensor)
    assert q.quantizer == (wanted.of_usage(q.rowwise.usage) if wanted is not None else None)  # type: ignore[union-attr]
    assert q.requires_grad
    q.dequantize().sum().backward()
    assert x.grad is not None
    assert s[0].weight.grad is not None
    outside = s(x)
    assert not isinstance(outside, te.QuantizedTensor)


@pytest.mark.parametrize(
    "quantizer", [q for q in cases.QUANTIZERS if not q.stateful], ids=lambda q: q.describe()
)
def test_output_of_one_pipeline_is_input_of_the_next(quantizer: te.Quantizer) -> None:
    first = te.Sequential(te.Linear(64, 64), te.Quantize(quantizer=quantizer))
    second = te.Sequential(te.Linear(64, 64), te.GELU())
    x = torch.randn(32, 64, requires_grad=True)
    q = first(x)
    assert isinstance(q, te.QuantizedTensor)
    y = second(q)
    torch.testing.assert_close(
        y, F.gelu(F.linear(q.dequantize(), second[0].weight, second[0].bias), approximate="tanh")
    )
    y.sum().backward()
    assert x.grad is not None
    assert first[0].weight.grad is not None
    straight = torch.autograd.grad(
        F.gelu(
            F.linear(_ste(first[0], x, q), second[0].weight, second[0].bias), approximate="tanh"
        ).sum(),
        [x],
    )[0]
    torch.testing.assert_close(x.grad, straight)


def _ste(linear: te.Linear, x: torch.Tensor, q: te.QuantizedTensor) -> torch.Tensor:
    h = F.linear(x, linear.weight, linear.bias)
    return h + (q.detach().dequantize() - h).detach()


@pytest.mark.parametrize("name", ["Identity", "Dequantize"])
@every_quantizer
def test_a_record_of_the_wanted_format_is_passed_on_as_it_is(
    quantizer: te.Quantizer, name: str
) -> None:
    """Also a hybrid's, whose records name the part that made them."""
    if quantizer.stateful:
        pytest.skip("Quantize takes no delayed-scaling quantizer")
    q = cases.make_quantized(torch.randn(5, 64), quantizer)
    s = te.Sequential(getattr(te, name)(), te.Quantize(quantizer=quantizer))
    made = s(q)
    assert isinstance(made, te.QuantizedTensor)
    assert made.rowwise is not None
    assert q.rowwise is not None
    for t, u in zip(made.rowwise.tensors(), q.rowwise.tensors(), strict=True):
        assert torch.equal(t.float(), u.float())
