"""check_kernel passes on right kernels, and fails on each way to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.reference.kernels import bind_composed, bind_reference
from te_ops.registry import ArchRange, Call, Kernel, OperandLayouts, rules
from te_ops.testing import check_kernel

MODEL = te.Sequential(te.Linear(32, 16), te.GELU())
FAST = {"dtypes": (torch.bfloat16,), "recipes": (None,)}


def epilogue(change: Callable[..., Any] = lambda result, xs: result, **fields: Any) -> Kernel:
    """The composed kernel of gemm_epilogue, its result changed."""

    def bind(call: Call) -> Any:
        launch = bind_composed(call)
        return lambda *xs: change(launch(*xs), xs)

    return Kernel("gemm_epilogue", "test.epilogue", bind, ArchRange("any"), **fields)


def check(kernel: Kernel, **options: Any) -> tuple[Call, ...]:
    with rules.temporary(kernel):
        return check_kernel(kernel.name, MODEL, **{**FAST, **options})


def last(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Change the last result of a launch only."""

    def apply(result: Any, xs: Any) -> Any:
        if isinstance(result, tuple):
            return (*result[:-1], change(result[-1]))
        return change(result)

    return apply


def test_a_right_kernel_passes_on_the_pool() -> None:
    with rules.temporary(Kernel("gemm_sum", "test.sum", bind_composed)):
        calls = check_kernel("test.sum")
    assert {len(call.nodes) for call in calls} == {2}
    assert {call.align for call in calls} >= {0, 1, 8}  # zero rows among them


def test_quantizing_groups_pass() -> None:
    with rules.temporary(Kernel("norm_quantize", "test.norm_quantize", bind_composed)):
        model = te.Sequential(te.RMSNorm(32), te.Linear(32, 32))
        assert check_kernel(
            "test.norm_quantize", model, recipes=("current", "mxfp8", "nvfp4", "delayed")
        )


def test_a_kernel_of_a_primitive_passes() -> None:
    with rules.temporary(Kernel("gemm", "test.gemm", bind_reference)):
        calls = check_kernel("test.gemm", MODEL)
    assert {call.node.layout for call in calls} == {"nt", "nn", "tn"}


@pytest.mark.parametrize("factor", [1.01, 0.99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_percent_fails(factor: float, dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match=r"test.epilogue at gemm"):
        check(epilogue(last(lambda y: y * factor)), dtypes=(dtype,))


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_quantized_results_off_by_one_percent_fail(recipe: str, factor: float) -> None:
    def bind(call: Call) -> Any:
        launch = bind_composed(call)
        return lambda x, weight: launch(x, weight * factor)

    kernel = Kernel("norm_quantize", "test.norm_quantize", bind)
    model = te.Sequential(te.RMSNorm(128), te.Linear(128, 32))
    with rules.temporary(kernel), pytest.raises(AssertionError, match=r"test.norm_quantize at"):
        check_kernel("test.norm_quantize", model, recipes=(recipe,), rows=(64,))


@pytest.mark.parametrize(("factor", "passes"), [(1 + 1e-4, True), (0.995, False), (1.005, False)])
def test_an_amax_may_lose_what_a_fast_product_loses(factor: float, passes: bool) -> None:
    def change(result: Any, xs: Any) -> Any:
        if not isinstance(result, tuple):
            return result
        amaxes = [isinstance(x, torch.Tensor) and x.dim() == 0 for x in result]
        return tuple(x * factor if a else x for x, a in zip(result, amaxes, strict=True))

    model = te.Sequential(te.Linear(64, 96), te.GELU(), te.Linear(96, 64))
    kernel, options = epilogue(change), {"rows": (16,), "dtypes": (torch.bfloat16,)}
    with rules.temporary(kernel):
        if passes:
            assert check_kernel(kernel.name, model, recipes=("delayed",), **options)
            return
        with pytest.raises(AssertionError, match="quantize output 2"):
            check_kernel(kernel.name, model, recipes=("delayed",), **options)


def test_dropped_nan_fails() -> None:
    model = te.Sequential(te.Linear(32, 16), te.GELU())
    with torch.no_grad():
        model[0].bias[3] = torch.nan
    kernel = epilogue(last(lambda y: y.nan_to_num()))
    with rules.temporary(kernel), pytest.raises(AssertionError, match="NaN on one side only"):
        check_kernel("test.epilogue", model, **FAST)


@pytest.mark.parametrize("wrong", ["row", "column", "element"])
def test_a_wrong_corner_fails(wrong: str) -> None:
    def change(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        index = {"row": (-1,), "column": (..., -1), "element": (-1, -1)}[wrong]
        y[index] += 0.1
        return y

    with pytest.raises(AssertionError, match="Worst at"):
        check(epilogue(last(change)), rows=(8,))


def test_a_written_operand_fails() -> None:
    def change(result: Any, xs: Any) -> Any:
        xs[0].mul_(2)
        return result

    with pytest.raises(AssertionError, match="operand 0 after the launch"):
        check(epilogue(change))


def test_wrong_results_in_number_shape_or_dtype_fail() -> None:
    with pytest.raises(AssertionError, match="launch returned"):
        check(epilogue(lambda result, xs: (result, result, result)))
    with pytest.raises(AssertionError, match="has shape"):
        check(epilogue(last(lambda y: y[..., :-1])))
    with pytest.raises(AssertionError, match=r"is torch\.float32, expected torch\.bfloat16"):
        check(epilogue(last(lambda y: y.float())))


def test_a_kernel_that_fails_on_zero_rows_fails() -> None:
    def change(result: Any, xs: Any) -> Any:
        if xs[0].shape[0] == 0:
            raise RuntimeError("invalid launch configuration")
        return result

    with pytest.raises(RuntimeError, match="invalid launch") as caught:
        check(epilogue(change))
    assert "0 rows" in "".join(caught.value.__notes__)
    refusing = epilogue(change, refuse=lambda call: None if call.align else "no rows")
    assert all(call.align for call in check(refusing))


def test_a_kernel_that_bakes_the_row_count_fails() -> None:
    def bind(call: Call) -> Any:
        launch = bind_composed(call)
        rows = call.spec(call.reads[0]).shape[0]

        def run(*xs: Any) -> Any:
            made = launch(*xs)
            for y in made if isinstance(made, tuple) else (made,):
                y[rows:] = 0
            return made

        return run

    with pytest.raises(AssertionError, match="7 rows"):
        check(Kernel("gemm_epilogue", "test.epilogue", bind), rows=(5, 7))


def test_strided_operands() -> None:
    def flat(result: Any, xs: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and not x.is_contiguous() for x in xs):
            return tuple(r * 2 for r in result) if isinstance(result, tuple) else result * 2
        return result

    with pytest.raises(AssertionError, match="with gaps between its rows"):
        check(epilogue(flat))
    check(epilogue(flat, layouts=OperandLayouts(strided_reads=frozenset())))


@pytest.mark.parametrize("answer", [True, False, "", 3])
def test_refuse_must_answer_none_or_a_reason(answer: Any) -> None:
    with pytest.raises(AssertionError, match="must return None, or the reason"):
        check(epilogue(refuse=lambda call: answer))


def test_refuse_must_not_change_its_mind() -> None:
    answers = iter(["busy", None] * 100)
    with pytest.raises(AssertionError, match="two answers for one call"):
        check(epilogue(refuse=lambda call: next(answers)))


def test_a_kernel_that_takes_nothing_fails_with_its_reasons() -> None:
    with pytest.raises(AssertionError, match=r"It refused: N = 16 is odd \(\d+ times\)"):
        check(epilogue(refuse=lambda call: "N = 16 is odd"))
    kernel = Kernel("no_such_prim", "test.lost", bind_reference)
    with rules.temporary(kernel), pytest.raises(AssertionError, match="No case holds no_such_prim"):
        check_kernel("test.lost", MODEL, **FAST)


def test_names_and_devices_are_checked() -> None:
    with pytest.raises(AssertionError, match=r"no kernel is named 'nope'; registered: .*reference"):
        check_kernel("nope")
    with pytest.raises(AssertionError, match="does not run on this machine: needs sm_12345"):
        check(
            epilogue().__class__("gemm_epilogue", "test.far", bind_composed, ArchRange("sm_12345"))
        )


def test_bind_must_return_a_launch() -> None:
    with pytest.raises(AssertionError, match="must return the launch"):
        check(Kernel("gemm_epilogue", "test.none", lambda call: None))
