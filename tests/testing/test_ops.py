"""check_op passes on right ops, and fails on each way to be wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.graph import Graph, Prim, Value, gradient, prim, same
from te_ops.registry import ArchRange, Call, Kernel, rules
from te_ops.runtime import segment
from te_ops.testing import cases, check_op

FAST = {"dtypes": (torch.bfloat16,)}


def caps(name: str, forward: Any = None, backward: Any = None, **options: Any) -> type[te.Op]:
    """cap * tanh(x / cap), with one thing changed."""

    def right(x: torch.Tensor, cap: float) -> torch.Tensor:
        return cap * torch.tanh(x / cap)

    def right_back(dy: torch.Tensor, x: torch.Tensor, cap: float) -> torch.Tensor:
        return dy * (1 - torch.tanh(x / cap).square())

    made: Prim = prim(f"test_{name}", infer=same, replace=True, **options)(forward or right)
    back: Prim = prim(f"test_{name}_bwd", infer=same, replace=True)(backward or right_back)

    @gradient(made)
    def rule(g: Graph, node: Any, dy: Value) -> tuple[Value]:
        return (g.call(back, dy, node.inputs[0], cap=node.cap),)

    class Cap(te.Op):
        def __init__(self, cap: float = 2.0) -> None:
            super().__init__()
            self.cap = cap

        def emit(self, g: Graph, x: Value) -> Value:
            return g.call(made, x, cap=self.cap)

    return Cap


def formula(x: torch.Tensor, cap: float = 2.0) -> torch.Tensor:
    return cap * torch.tanh(x / cap)


OPS = {
    "linear": (te.Linear(32, 16), ((6, 32),), lambda x, weight, bias: x @ weight.t() + bias),
    "rmsnorm": (
        te.RMSNorm(32),
        ((6, 32),),
        lambda x, weight: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight,
    ),
    "gelu": (te.GELU(), ((2, 3, 32),), lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    "swiglu": (te.SwiGLU(), ((6, 32),), None),
    "dropout": (te.Dropout(0.5), ((6, 32),), None),
    "embedding": (te.Embedding(16, 8), (torch.tensor([3, 3, 0, 15, 7]),), None),
    "add": (te.Add(), ((6, 8), (6, 8)), lambda a, b: a + b),
    "cap": (caps("cap_right")(), ((6, 32),), formula),
    "swiglu_mlp": (cases.PIPELINES[3].make(), ((6, 32),), None),
}


@pytest.mark.parametrize("name", list(OPS))
def test_right_ops_pass(name: str) -> None:
    op, inputs, reference = OPS[name]
    plan = check_op(op, *inputs, reference=reference)
    assert plan.forward


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4", "delayed"])
def test_recipes(recipe: str) -> None:
    op = te.Sequential(te.RMSNorm(32), te.Linear(32, 32))
    check_op(op, (6, 32), recipe=cases.RECIPES[recipe], **FAST)
    assert not list(op.buffers())  # it worked on copies


def low(x: torch.Tensor) -> bool:
    return x.dtype is not torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_off_by_one_percent_in_one_dtype_fails(dtype: torch.dtype) -> None:
    op = caps("off", lambda x, cap: (1.01 if x.dtype is dtype else 1.0) * formula(x, cap))
    with pytest.raises(AssertionError, match="output 0"):
        check_op(op(), (64, 32), dtypes=(dtype,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_off_by_one_percent_in_one_dtype_fails(dtype: torch.dtype) -> None:
    def back(dy: torch.Tensor, x: torch.Tensor, cap: float) -> torch.Tensor:
        return (1.01 if x.dtype is dtype else 1.0) * dy * (1 - torch.tanh(x / cap).square())

    with pytest.raises(AssertionError, match="gradient of input0"):
        check_op(caps("off_back", backward=back)(), (64, 32), dtypes=(dtype,))


def test_a_gradient_off_by_one_percent_everywhere_fails() -> None:
    op = caps(
        "off_everywhere", backward=lambda dy, x, cap: 1.01 * dy * (1 - torch.tanh(x / cap).square())
    )
    with pytest.raises(AssertionError, match="gradient of input0: along a random direction"):
        check_op(op(), (6, 32), **FAST)


def test_a_missing_gradient_fails() -> None:
    made = prim("test_no_gradient", infer=same, replace=True)(lambda x: 2 * x)
    gradient(made)(lambda g, node, dy: (None,))

    class Double(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            return g.call(made, x)

    with pytest.raises(AssertionError, match="gradient"):
        check_op(Double(), (6, 32), **FAST)


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_another_function_than_the_reference_fails(factor: float) -> None:
    op = caps("other")(2.0)
    with pytest.raises(AssertionError, match="the reference: output"):
        check_op(op, (6, 32), reference=lambda x: factor * formula(x), **FAST)


def test_another_gradient_than_the_reference_fails() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        y = formula(x)
        return y + 0.01 * (y - y.detach())

    with pytest.raises(AssertionError, match="the reference: gradient of input0"):
        check_op(caps("other_gradient")(), (6, 32), reference=reference, **FAST)


def test_dropped_nan_fails() -> None:
    with pytest.raises(AssertionError, match="input 0 is all NaN, but no output shows it"):
        check_op(caps("nan", lambda x, cap: formula(x, cap).nan_to_num())(), (6, 32), **FAST)
    hides = caps(
        "nan_back",
        backward=lambda dy, x, cap: (dy * (1 - (formula(x, 1 * cap) / cap).square())).nan_to_num(),
    )
    with pytest.raises(AssertionError, match="gradient of input0 does not show it"):
        check_op(hides(), (6, 32), **FAST)
    check_op(hides(), (6, 32), propagates_nan=False, **FAST)


def test_a_written_input_fails() -> None:
    def writes(x: torch.Tensor, cap: float) -> torch.Tensor:
        y = formula(x, cap)
        x.mul_(0.5)
        return y

    with pytest.raises(AssertionError, match="may not write their inputs"):
        check_op(caps("writes", writes)(), (6, 32), **FAST)


def test_a_result_that_changes_from_call_to_call_fails() -> None:
    calls = []

    def drifts(x: torch.Tensor, cap: float) -> torch.Tensor:
        calls.append(0)
        return formula(x, cap) + 1e-3 * len(calls)

    with pytest.raises(AssertionError, match="of a second call"):
        check_op(caps("drifts", drifts)(), (6, 32), **FAST)


def with_kernel(launch: Any) -> Any:
    """Registers a kernel for the prim `test_kerneled`."""

    def bind(call: Call) -> Any:
        return lambda x: launch(call, x, call.node.cap)

    return rules.temporary(Kernel("test_kerneled", "test.kerneled", bind, ArchRange("any")))


KERNELED = caps("kerneled")


def test_a_kernel_off_by_one_percent_fails() -> None:
    with (
        with_kernel(lambda call, x, cap: 1.01 * formula(x, cap)),
        pytest.raises(AssertionError, match="output 0"),
    ):
        check_op(KERNELED(), (6, 32), **FAST)


def test_an_executor_that_ignores_strides_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = segment.entry
    monkeypatch.setattr(segment, "entry", lambda x: entry(x) if x.is_contiguous() else entry(2 * x))
    with pytest.raises(AssertionError, match=r"strided inputs|expanded output gradient"):
        check_op(KERNELED(), (6, 32), **FAST)


def test_a_kernel_that_bakes_the_row_count_fails() -> None:
    def baked(call: Call, x: torch.Tensor, cap: float) -> torch.Tensor:
        y = formula(x, cap)
        y[call.spec(call.reads[0]).shape[0] :] = 0
        return y

    with with_kernel(baked), pytest.raises(AssertionError, match=r"replayed for|rows"):
        check_op(KERNELED(), (6, 32), **FAST)


def test_a_kernel_that_is_wrong_for_one_row_fails() -> None:
    def one(call: Call, x: torch.Tensor, cap: float) -> torch.Tensor:
        return formula(x, cap) + (0.1 if x.shape[0] == 1 else 0.0)

    with with_kernel(one), pytest.raises(AssertionError, match="1 rows: output 0"):
        check_op(KERNELED(), (6, 32), **FAST)


def test_a_kernel_that_raises_for_no_rows_fails() -> None:
    def none(call: Call, x: torch.Tensor, cap: float) -> torch.Tensor:
        if not x.shape[0]:
            raise RuntimeError("invalid launch configuration")
        return formula(x, cap)

    with with_kernel(none), pytest.raises(RuntimeError, match="invalid launch") as caught:
        check_op(KERNELED(), (6, 32), **FAST)
    assert "te_ops.testing: while checking 0 rows" in caught.value.__notes__


def test_vectors_of_a_value_per_row_or_column() -> None:
    @te.pointwise
    def weighted(x, bias: te.Row, weight: te.Col):  # type: ignore[no-untyped-def]
        return (x + bias) * weight

    check_op(weighted(), (6, 8), (8,), (6,), reference=lambda x, b, w: (x + b) * w[:, None])


def test_the_op_is_left_alone() -> None:
    op = te.Linear(8, 8)
    op.weight.requires_grad_(False)
    before = {n: p.clone() for n, p in op.named_parameters()}
    x = torch.randn(4, 8)
    check_op(op, x, **FAST)
    assert not op.weight.requires_grad
    assert op.bias is not None
    assert op.bias.grad is None
    assert all(torch.equal(p, before[n]) for n, p in op.named_parameters())
    assert not x.requires_grad
