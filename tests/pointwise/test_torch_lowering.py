"""The torch lowering: one rounding, broadcasting, gated layouts, special dtypes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import te_ops.math as tm
from te_ops.errors import PlanError, ShapeError
from te_ops.pointwise import Fn, Input, Pair, activations, elementwise, evaluate
from te_ops.pointwise.table import OPERATORS

X, Y = Input(0), Input(1)
SWAP = elementwise("swap", lambda p: Pair(p.linear, p.gate), "pair")


def test_it_rounds_once() -> None:
    fn = Fn("f", ("value", "value"), (X + Y) - X)
    x, y = torch.tensor([256.0]).bfloat16(), torch.tensor([1.0]).bfloat16()
    assert ((x + y) - x).item() == 0.0  # rounding in between
    assert evaluate(fn, x, y).item() == 1.0
    assert evaluate(fn, x, y).dtype is torch.bfloat16


def test_chains_round_once() -> None:
    """The composition equals its FP32 value, rounded; the two-step plan differs somewhere."""
    x = torch.randn(4096).bfloat16()
    fn = Fn("f", ("value",), tm.gelu_tanh(X * 1.1))
    once = evaluate(fn, x.float()).bfloat16()
    assert torch.equal(evaluate(fn, x), once)
    twice = evaluate(activations["gelu"](), evaluate(activations["scale"](1.1), x))
    assert not torch.equal(twice, once)


def all_values(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n, row in OPERATORS.items() if row.native])
def test_the_direct_16_bit_call_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    row = OPERATORS[name]
    x = all_values(dtype)
    inputs = [x] if row.arity == 1 else [x, x.flip(0).roll(7)]
    fn = Fn(name, ("value",) * row.arity, _apply(name))
    direct = evaluate(fn, *inputs)
    wide = evaluate(fn, *(t.float() for t in inputs)).to(dtype)
    nan = direct.isnan() & wide.isnan()
    assert torch.equal(direct.view(torch.int16)[~nan], wide.view(torch.int16)[~nan])


def _apply(name: str) -> object:
    from te_ops.pointwise.expr import call

    return call(name, *(Input(i) for i in range(OPERATORS[name].arity)))


def test_fp64_stays_fp64() -> None:
    x = torch.tensor([0.1], dtype=torch.float64)
    fn = Fn("f", ("value",), tm.where(X > 0, 0.1, 0.2) * X + 0.3)
    assert evaluate(fn, x).item() == 0.1 * 0.1 + 0.3
    assert evaluate(fn, x).dtype is torch.float64


def test_the_default_dtype_does_not_matter() -> None:
    fn = Fn("f", ("value",), tm.where(X > 0, 0.1, 0.2))
    before = torch.get_default_dtype()
    try:
        for default in (torch.float16, torch.float64):
            torch.set_default_dtype(default)
            assert evaluate(fn, torch.ones(1, dtype=torch.float32)).dtype is torch.float32
            assert evaluate(fn, torch.ones(1, dtype=torch.float64)).item() == 0.1
            assert evaluate(Fn("one", ("value",), 0.1), torch.ones(1).double()).item() == 0.1
    finally:
        torch.set_default_dtype(before)


def test_constants_beyond_fp32_are_inf_there() -> None:
    fn = Fn("f", ("value",), tm.minimum(X, 1e60) + tm.where(X > 1e60, 1e60, 0.0))
    assert evaluate(fn, torch.tensor([1.0, float("inf")])).tolist() == [1.0, float("inf")]
    assert evaluate(fn, torch.tensor([1e70], dtype=torch.float64)).item() == 2e60


def test_special_values_of_relu_and_extrema() -> None:
    x = torch.tensor([-0.0, float("nan"), -1.0])
    relu = evaluate(activations["relu"](), x)
    assert not relu.signbit()[0]
    assert relu.isnan().tolist() == [False, True, False]
    nan = torch.tensor([float("nan"), 1.0])
    for function in (tm.minimum, tm.maximum):
        fn = Fn("f", ("value", "value"), function(X, Y))
        assert evaluate(fn, nan, nan.flip(0)).isnan().all()
        assert evaluate(Fn("g", ("value",), function(X, 7.0)), nan).isnan().tolist() == [
            True,
            False,
        ]


def test_dtype_of_the_result_is_that_of_the_full_inputs() -> None:
    add = activations["add"]()
    x = torch.randn(4, 8).bfloat16()
    assert evaluate(add, x, torch.randn(8)).dtype is torch.bfloat16
    assert evaluate(add, x, torch.randn(4, 8)).dtype is torch.float32
    assert evaluate(add, x, torch.randn(4, 8).half()).dtype is torch.float32
    assert evaluate(add, torch.randn(4, 1).bfloat16(), torch.randn(8).half()).dtype is torch.float32
    assert evaluate(add, x, x, dtype=torch.float16).dtype is torch.float16
    keep = torch.ones(4, 8, dtype=torch.uint8)
    assert evaluate(activations["dropout"](0.1), x, keep).dtype is torch.bfloat16
    assert evaluate(add, keep, keep).dtype is torch.float32
    scaled = activations["scaled_swiglu"]()
    assert evaluate(scaled, x, torch.rand(4, 1)).dtype is torch.bfloat16


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert evaluate(activations["gelu"](), x).shape == x.shape
    assert evaluate(activations["gelu"]().grad(0), x, torch.ones(())).shape == x.shape


def test_outputs_have_the_shape_of_all_inputs() -> None:
    x, y = torch.randn(4, 1), torch.randn(8)
    constant = Fn("one", ("value", "value"), 1.0)
    assert evaluate(constant, x, y).tolist() == [[1.0] * 8] * 4
    first = Fn("first", ("value", "value"), tm.exp(X))
    assert torch.equal(evaluate(first, x, y), x.exp().expand(4, 8))
    assert evaluate(first, x, None).shape == (4, 1)
    half = elementwise("half", lambda p, q: Pair(p.gate * q, p.linear), "pair", "value")
    assert evaluate(half, torch.randn(4, 2), y).shape == (4, 16)
    assert evaluate(constant, x.double(), y).dtype is torch.float64


def test_a_result_never_aliases_an_input() -> None:
    x = torch.randn(4, 8)
    results = [
        evaluate(activations["identity"](), x),
        evaluate(Fn("gate", ("pair",), Input(0, "gate")), x),
        evaluate(activations["add"]().grad(0), None, None, x),
        evaluate(SWAP, x),
    ]
    for result in results:
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert result.is_contiguous()


def test_gate_is_the_first_half() -> None:
    x = torch.tensor([[1.0, 2.0, 30.0, 40.0]])
    glu = elementwise("pick", lambda p: p.gate - p.linear, "pair")
    assert evaluate(glu, x).tolist() == [[-29.0, -38.0]]
    assert evaluate(SWAP, x).tolist() == [[30.0, 40.0, 1.0, 2.0]]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_interleaved_blocks(width: int) -> None:
    """Up to the last bit: torch's vector and scalar code round exp differently, and memory decides which is taken."""
    gate, linear = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    blocks = [t.unflatten(-1, (8 // width, width)) for t in (gate, linear)]
    x = torch.stack(blocks, -2).flatten(-3)
    halves = torch.cat((gate, linear), -1)
    swiglu = activations["swiglu"]()
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-7)
    close(evaluate(swiglu, x, interleave=width), evaluate(swiglu, halves))
    dy = torch.randn(2, 3, 8)
    grad = evaluate(swiglu.grad(0), x, dy, interleave=width)
    expected = evaluate(swiglu.grad(0), halves, dy)
    blocks = [t.unflatten(-1, (8 // width, width)) for t in expected.chunk(2, -1)]
    close(grad, torch.stack(blocks, -2).flatten(-3))


def test_fp8_saturates_and_keeps_nan() -> None:
    x = torch.tensor([1e9, -1e9, 448.0, float("inf"), float("nan"), 0.1])
    y = evaluate(activations["identity"](), x, dtype=torch.float8_e4m3fn).float()
    assert y[:4].tolist() == [448.0, -448.0, 448.0, 448.0]
    assert y[4].isnan()
    assert evaluate(activations["gelu"](), y[5:].to(torch.float8_e5m2)).dtype is torch.float8_e5m2


class _Casts(TorchFunctionMode):
    """Records the largest value that is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[float] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.to:
            self.largest.append(args[0].abs().max().item())
        return func(*args, **(kwargs or {}))


def test_fp8_is_clamped_before_the_cast() -> None:
    """Some versions of torch saturate by themselves, others turn overflow into NaN."""
    with _Casts() as casts:
        evaluate(activations["scale"](2.0), torch.tensor([1e9]), dtype=torch.float8_e4m3fn)
    assert casts.largest[-1] == 448.0


def test_strided_inputs_and_meta() -> None:
    x = torch.randn(8, 4).t()
    assert torch.equal(
        evaluate(activations["silu"](), x), evaluate(activations["silu"](), x.clone())
    )
    out = evaluate(activations["swiglu"](), torch.empty(3, 8, device="meta", dtype=torch.bfloat16))
    assert out.shape == (3, 4)
    assert out.dtype is torch.bfloat16
    assert out.device.type == "meta"


def test_intermediate_results_are_dropped() -> None:
    """The program frees each value after its last reader."""
    from te_ops.pointwise.torch_lowering import compile_torch

    node = X
    for _ in range(5):
        node = tm.exp(tm.sin(node))
    program = compile_torch(Fn("chain", ("value",), node), torch.float32)
    assert [step.dead for step in program.steps] == [(k,) for k in range(10)]
    assert compile_torch(Fn("chain", ("value",), node), torch.float32) is program


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: evaluate(SWAP, torch.ones(3)), ShapeError, "swap: .* 3 features, an even number"),
        (lambda: evaluate(SWAP, torch.ones(())), ShapeError, "1 features"),
        (lambda: evaluate(SWAP, torch.ones(6), interleave=2), ShapeError, "multiple of 4"),
        (lambda: evaluate(SWAP, torch.ones(6), interleave=0), ShapeError, "interleave = 0"),
        (
            lambda: evaluate(activations["add"](), torch.ones(3), torch.ones(4)),
            ShapeError,
            r"add: shapes \[\(3,\), \(4,\)\] do not broadcast",
        ),
        (
            lambda: evaluate(activations["add"](), torch.ones(3), torch.ones(4).half()),
            ShapeError,
            "do not broadcast",
        ),
        (
            lambda: evaluate(Fn("one", ("value", "value"), 1.0), torch.ones(3), torch.ones(4)),
            ShapeError,
            "do not broadcast",
        ),
        (lambda: evaluate(activations["add"](), torch.ones(3)), PlanError, "takes 2 tensors"),
        (lambda: evaluate(activations["gelu"](), None), PlanError, "at least one tensor"),
        (
            lambda: evaluate(activations["add"](), torch.ones(3), None),
            PlanError,
            "reads input 1, None given",
        ),
        (
            lambda: evaluate(activations["add"](), torch.ones(3).half(), None),
            PlanError,
            "reads input 1, None given",
        ),
    ],
)
def test_mistakes(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
