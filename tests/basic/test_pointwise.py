"""The pointwise primitive, the decorator, and the activations as ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import te_ops as te
from te_ops.runtime.cache import CACHE

torch.manual_seed(0)


@te.pointwise
def softcap(x, cap: float):
    """cap * tanh(x / cap)."""
    return cap * te.math.tanh(x / cap)


@te.pointwise
def gate(x: te.Pair, bias: te.Row, p: te.Col, alpha: float = 2.0):
    """A gated function with every kind of input."""
    return alpha * x.gate * (x.linear + 1.0) * p + bias


def test_decorator_makes_an_op_with_the_derived_gradient() -> None:
    op = softcap(cap=3.0)
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op, (x,))
    torch.testing.assert_close(op(x), 3.0 * torch.tanh(x / 3.0))


def test_every_kind_of_input_gets_its_gradient() -> None:
    op = gate(alpha=1.5)
    assert op.num_inputs == 3
    x = torch.randn(4, 3, 10, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    p = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    a, b = x.chunk(2, -1)
    torch.testing.assert_close(op(x, bias, p), 1.5 * a * (b + 1) * p.unsqueeze(-1) + bias)
    assert torch.autograd.gradcheck(op, (x, bias, p))


def test_numbers_are_attributes_scalars_or_parameters() -> None:
    x = torch.randn(4, 6)
    cap = te.scalar(2.0)
    op = softcap(cap=cap)
    before = CACHE.built
    op(x)
    made = CACHE.built - before
    for value in (1.0, 0.5, 7.0):
        cap.set(value)
        torch.testing.assert_close(op(x), value * torch.tanh(x / value))
    assert CACHE.built - before == made == 1

    learned = softcap(cap=torch.nn.Parameter(torch.tensor(2.0)))
    learned(x).sum().backward()
    reference = torch.tensor(2.0, requires_grad=True)
    (reference * torch.tanh(x / reference)).sum().backward()
    torch.testing.assert_close(learned.cap.grad, reference.grad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: softcap(),
        lambda: softcap(1.0, 2.0),
        lambda: softcap(cap=1.0, other=2.0),
        lambda: softcap(1.0, cap=2.0),
        lambda: softcap(cap="3"),
    ],
)
def test_wrong_numbers_are_type_errors(make) -> None:
    with pytest.raises(TypeError, match="softcap"):
        make()


def test_functions_without_tensors_or_with_star_arguments_are_refused() -> None:
    with pytest.raises(te.PlanError, match="at least one tensor"):
        te.pointwise(lambda cap=1.0: cap)
    with pytest.raises(te.PlanError, match="named parameters"):

        @te.pointwise
        def star(*xs):
            return xs[0]


@te.pointwise
def of_torch(x):
    return torch.relu(x)


@te.pointwise
def nothing(x):
    return None


@te.pointwise
def text(x):
    return [x, "x"]


@te.pointwise
def truth(x):
    return x > 0


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (of_torch, "torch's relu does not take it; use te_ops.math"),
        (nothing, "nothing returns a NoneType"),
        (text, "text returns a str"),
        (truth, "truth returns a mask"),
    ],
)
def test_what_is_no_function_of_elements(op, message: str) -> None:
    with pytest.raises(te.PlanError, match=message):
        op()(torch.randn(2, 4))
    with pytest.raises(te.PlanError, match=message):
        te.Attention(2, packed=True, score_mod=op())(torch.randn(1, 3, 24))


def _halves(x):
    return x.chunk(2, -1)


REFERENCES = {
    te.GELU: lambda x: F.gelu(x, approximate="tanh"),
    te.ReLU: F.relu,
    te.SReLU: lambda x: F.relu(x).square(),
    te.QGELU: lambda x: x * torch.sigmoid(1.702 * x),
    te.SiLU: F.silu,
    te.GLU: lambda x: torch.sigmoid(_halves(x)[0]) * _halves(x)[1],
    te.GEGLU: lambda x: F.gelu(_halves(x)[0], approximate="tanh") * _halves(x)[1],
    te.QGEGLU: lambda x: _halves(x)[0] * torch.sigmoid(1.702 * _halves(x)[0]) * _halves(x)[1],
    te.ReGLU: lambda x: F.relu(_halves(x)[0]) * _halves(x)[1],
    te.SReGLU: lambda x: F.relu(_halves(x)[0]).square() * _halves(x)[1],
    te.SwiGLU: lambda x: F.silu(_halves(x)[0]) * _halves(x)[1],
    te.ClampedSwiGLU: lambda x: (
        _halves(x)[0].clamp(max=7)
        * torch.sigmoid(1.702 * _halves(x)[0].clamp(max=7))
        * (_halves(x)[1].clamp(-7, 7) + 1)
    ),
    te.SiTUGLU: lambda x: (
        4
        * torch.tanh(_halves(x)[0] / 4)
        * torch.sigmoid(_halves(x)[0])
        * 25
        * torch.tanh(_halves(x)[1] / 25)
    ),
}


@pytest.mark.parametrize("kind", REFERENCES, ids=lambda k: k.__name__)
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 10), (0, 4), (1, 2), (12,)], ids=str)
def test_activation_equals_torch_in_float64(kind, shape) -> None:
    x = (4 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    y, expected = kind()(x), REFERENCES[kind](x)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(expected)
    (dx,) = torch.autograd.grad(y, x, dy)
    (reference,) = torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(dx, reference)


def test_gelu_none_is_the_exact_form() -> None:
    x = torch.randn(9, dtype=torch.float64)
    torch.testing.assert_close(te.GELU(approximate="none")(x), F.gelu(x))
    with pytest.raises(te.PlanError, match="approximate"):
        te.GELU(approximate="fast")


@pytest.mark.parametrize("kind", [te.SwiGLU, te.ClampedSwiGLU, te.SiTUGLU, te.GEGLU])
def test_interleaved_layout_is_a_permutation_of_columns(kind) -> None:
    x = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
    columns = (
        torch.arange(24).reshape(2, 3, 4).transpose(0, 1).reshape(-1)
    )  # blocks of 4: gate, linear, gate, ...
    y = kind(glu_interleave_size=4)(x[:, columns])
    torch.testing.assert_close(y, kind()(x))
    with pytest.raises(te.ShapeError, match="interleave"):
        kind(glu_interleave_size=5)(x)
    with pytest.raises(te.PlanError, match="positive int"):
        kind(glu_interleave_size=0)


@pytest.mark.parametrize(
    "kind", [te.ScaledSwiGLU, te.ScaledSReLU, te.ScaledClampedQGeGLU, te.ScaledSiTUGLU]
)
def test_scaled_activations_give_the_scale_a_gradient(kind) -> None:
    plain = {
        te.ScaledSwiGLU: te.SwiGLU,
        te.ScaledSReLU: te.SReLU,
        te.ScaledClampedQGeGLU: te.ClampedSwiGLU,
        te.ScaledSiTUGLU: te.SiTUGLU,
    }[kind]
    x = torch.randn(5, 7, 8, dtype=torch.float64, requires_grad=True)
    p = torch.rand(5, 7, dtype=torch.float64, requires_grad=True)
    y, expected = kind()(x, p), REFERENCES[plain](x) * p.unsqueeze(-1)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, (x, p), dy), torch.autograd.grad(expected, (x, p), dy), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(te.ShapeError, match="col"):
        kind()(x, p[:3])


def test_odd_features_of_a_gate_are_an_error_with_the_path() -> None:
    with pytest.raises(
        te.ShapeError, match=r"Sequential\.1 \(SwiGLU\).*even last dimension, got 5"
    ):
        te.Sequential(te.Linear(4, 5), te.SwiGLU())(torch.randn(2, 4))


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0])
def test_constants_are_checked_at_construction(value) -> None:
    with pytest.raises(te.PlanError, match="ClampedSwiGLU"):
        te.ClampedSwiGLU(limit=value)
    with pytest.raises(te.PlanError, match="SiTUGLU"):
        te.SiTUGLU(beta1=value)


def test_a_chain_rounds_once_and_saves_its_inputs_once() -> None:
    model = te.Sequential(
        te.Linear(16, 16, dtype=torch.bfloat16), te.GELU(), te.ReLU(), te.ConstantScale(0.7)
    )
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    steps = model.plan(x).segments[0].forward_steps
    assert [s.name for s in steps] == ["gemm", "pointwise"]
    a = (x @ model[0].weight.t()).float() + model[0].bias.float()
    expected = (F.relu(F.gelu(a, approximate="tanh")) * 0.7).bfloat16()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-2)


def test_activation_dtype_is_the_autocast_dtype_else_the_inputs() -> None:
    x = torch.randn(3, 8)
    assert te.SiLU()(x.half()).dtype is torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert te.SwiGLU()(x).dtype is torch.bfloat16
