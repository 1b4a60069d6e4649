"""From a group of the graph to the spec of a kernel: roundings, what is stored, and what kernels are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import recipe
from te_ops.backends.cutlass import limits, match
from te_ops.backends.cutlass.choices import kind
from te_ops.backends.cutlass.match import Extents, extents_of
from te_ops.backends.cutlass.spec import GemmSpec, Load, Quantized
from te_ops.pointwise import Fn, Input, evaluate, lower, symbol
from te_ops.pointwise.expr import call
from tests.backends.cutlass import standin

DELAYED, CURRENT = recipe.DelayedScaling(), recipe.Float8CurrentScaling()


def specs_of(
    make: Callable[[], te.Op], made: te.Recipe | None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, GemmSpec]:
    """The specs of a training step's groups, by the names of their members."""
    found: dict[str, GemmSpec] = {}
    model = make().to(dtype)
    with pytest.MonkeyPatch.context() as patch, standin.hopper(patch, emulated=False):
        inner = standin.matched

        def matched(call: Any) -> Any:
            result = inner(call)
            if isinstance(result, match.Match):
                names = [
                    n.fn.name if n.prim.name == "pointwise" else n.prim.name for n in call.nodes
                ]
                found[" ".join([call.nodes[0].layout, *names[1:]])] = result.spec
            return result

        patch.setattr("te_ops.backends.cutlass.kernels.match_of", matched)
        x = torch.zeros(32, 64, dtype=dtype, requires_grad=True)
        with te.autocast(enabled=made is not None, recipe=made):
            model.plan(x)
    return found


def gated() -> te.Op:
    return te.Sequential(te.Linear(64, 96, bias=False), te.SwiGLU(), te.Linear(48, 64, bias=False))


def gelu() -> te.Op:
    return te.Sequential(te.Linear(64, 96), te.GELU(), te.Linear(96, 64))


def test_a_written_product_is_rounded_before_the_function_reads_it() -> None:
    spec = specs_of(gated, DELAYED)["nt swiglu quantize"]
    e = spec.epilogue
    assert (spec.a, spec.b, spec.scaled, spec.fast) == ("e4m3", "e4m3", True, True)
    assert e.acc_pair
    assert (e.acc_store, e.rounds_acc) == ("bf16", "bf16")
    assert (e.store, e.rounds) == (None, None)  # the value itself is not written: it stays FP32
    assert e.quantized == Quantized("e4m3", row=True, col=False, amax=True)


def test_a_product_that_nobody_else_reads_stays_fp32() -> None:
    spec = specs_of(gated, DELAYED)["nn dswiglu quantize swiglu quantize"]
    e = spec.epilogue
    assert (spec.a, spec.b, spec.fast) == ("e5m2", "e4m3", False)
    assert (e.acc, e.acc_pair, e.outs) == (1, False, 2)
    assert e.loads == (Load("tile", "bf16", pair=True),)
    assert (e.acc_store, e.rounds_acc, e.store, e.rounds) == (None, None, None, None)
    assert e.quantized == Quantized("e5m2", row=True, col=True, amax=True)


def test_current_scaling_gets_the_rounded_value_and_its_amax() -> None:
    e = specs_of(gated, CURRENT)["nn dswiglu quantize"].epilogue
    assert (e.rounds_acc, e.store, e.rounds) == ("bf16", "bf16", "bf16")
    assert e.quantized == Quantized("e5m2", row=False, col=False, amax=True)


def test_a_bias_is_a_row_and_its_gradient_a_sum() -> None:
    found = specs_of(gelu, DELAYED)
    assert found["nt bias + gelu quantize"].epilogue.loads == (Load("row", "bf16"),)
    e = found["nn dbias + gelu/d0 reduce quantize bias + gelu quantize"].epilogue
    assert e.sums
    assert e.loads == (Load("tile", "bf16"), Load("row", "bf16"))
    assert e.acc == 2


@pytest.mark.parametrize(("make", "loads"), [(gated, (0,)), (gelu, (0, 1))])
def test_the_copy_of_an_activation_is_rebuilt_of_what_its_gradient_reads(
    make: Callable[[], te.Op], loads: tuple[int, ...]
) -> None:
    for spec in specs_of(make, DELAYED).values():
        again = spec.epilogue.rebuilt
        if again is not None:
            break
    else:
        raise AssertionError("nothing is rebuilt")
    assert (again.loads, again.format) == (loads, "e4m3")
    fn = standin.FUNCTIONS[again.function]
    assert again.function == symbol(fn)
    assert lower(fn, "cutedsl") in again.text
    assert GemmSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert replace(spec, epilogue=replace(spec.epilogue, rebuilt=None)).key != spec.key


def test_beside_fast_sums_the_copy_is_saved() -> None:
    """That form gave wrong numbers on a device before it was repaired, and has not been there since."""
    fast = type("Fast", (te.recipe.DelayedScaling,), {"split_accumulator": (False, False, False)})()
    found = specs_of(gated, fast)
    assert any("dswiglu" in name for name in found)
    assert all(s.fast and s.epilogue.rebuilt is None for s in found.values())


@pytest.mark.parametrize("made", [CURRENT, None], ids=["current", "dense"])
def test_only_a_copy_whose_scale_is_there_is_rebuilt(made: te.Recipe | None) -> None:
    assert all(s.epilogue.rebuilt is None for s in specs_of(gated, made).values())


def test_rows_of_codes_begin_on_sixteen_bytes() -> None:
    """N = 272 is a multiple of 16, and its half is not."""

    def narrow() -> te.Op:
        return te.Sequential(
            te.Linear(64, 272, bias=False), te.SwiGLU(), te.Linear(136, 64, bias=False)
        )

    found = specs_of(narrow, DELAYED)
    assert "nt swiglu quantize" not in found
    assert found["nt swiglu"].epilogue.quantized is None


def test_dense_operands_lie_as_they_are() -> None:
    found = specs_of(gelu, None)
    majors = {name.split()[0]: (s.a_major, s.b_major) for name, s in found.items()}
    assert majors == {"nt": ("k", "k"), "nn": ("k", "mn"), "tn": ("mn", "mn")}
    assert found["nt bias + gelu"].epilogue.store == "bf16"


def test_the_text_is_that_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in specs_of(gelu, DELAYED).values():
        e = spec.epilogue
        if e.function:
            fn = standin.FUNCTIONS[e.function]
            assert e.function == symbol(fn)
            assert lower(fn, "cutedsl") in e.text


def test_functions_are_approximated_only_where_rounding_hides_it() -> None:
    for made, dtype, fast in (
        (DELAYED, torch.bfloat16, True), (None, torch.bfloat16, True), (None, torch.float16, False),
    ):  # fmt: skip
        found = specs_of(gelu, made, dtype)
        text = next(
            s.epilogue.text for name, s in found.items() if name.startswith("nt bias + gelu")
        )
        assert ("approx=True" in text) is fast, (made, dtype)


def test_no_element_is_divided_by_a_constant() -> None:
    """Where functions are approximated: a division is a call of a dozen instructions there."""

    @te.pointwise
    def capped(x: Any, cap: float) -> Any:
        return cap * te.math.tanh(x / cap)

    def model() -> te.Op:
        return te.Sequential(te.Linear(64, 96), capped(cap=30.0), te.Linear(96, 64))

    for dtype, divides in ((torch.bfloat16, False), (torch.float16, True)):
        spec = specs_of(model, None, dtype)["nt bias + capped"]
        body = spec.epilogue.text.rpartition("def ")[2]
        assert ("/ 30.0" in body) is divides
    fn = standin.FUNCTIONS[specs_of(model, None)["nt bias + capped"].epilogue.function]
    x = torch.randn(64, 16) * 20
    wanted = 30 * torch.tanh(x.double() / 30)
    assert torch.allclose(evaluate(fn, x, torch.zeros(16)).double(), wanted, rtol=1e-6)


def test_divisions_that_have_no_reciprocal_stay() -> None:
    for by, stays in ((3.0, False), (1e-38, True), (3e38, True), (0.0, True)):
        fn = Fn("f", ("value",), call("div", Input(0), by))
        assert (match._without_division(fn).out == fn.out) is stays


def test_divisions_that_a_step_depends_on_stay() -> None:
    """49 * (1 / 49) is smaller than 1 in FP32."""
    x = torch.tensor([49.0, -49.0, 48.5, 100.0])
    quotient = call("div", Input(0), 49.0)
    for out in (
        call("where", call("ge", quotient, 1.0), Input(0), 0.0),
        call("floor", quotient),
        call("sign", call("sub", quotient, 1.0)),
    ):
        fn = Fn("f", ("value",), out)
        assert torch.equal(evaluate(match._without_division(fn), x), evaluate(fn, x))
    both = Fn("f", ("value",), call("where", call("isnan", Input(0)), 0.0, quotient))
    assert match._without_division(both).out != both.out, "a value that is selected is no step"


@pytest.mark.parametrize("made", [DELAYED, CURRENT, None], ids=["delayed", "current", "dense"])
@pytest.mark.parametrize("make", [gated, gelu])
def test_kernels_are_made_of_what_training_asks_for(
    make: Callable[[], te.Op], made: te.Recipe | None
) -> None:
    for name, spec in specs_of(make, made).items():
        tilings = limits.tilings(spec)
        assert tilings, name
        for tiling in tilings:
            assert limits.refuse(replace(spec, tiling=tiling)) is None, name


def test_kinds_are_short_and_tell_what_costs_time() -> None:
    found = {name: kind(spec) for name, spec in specs_of(gated, DELAYED).items()}
    assert found["nt swiglu quantize"] == "e4m3*e4m3 fast pair->1 acc:bf16 e4m3:row+amax"
    gradient = "e5m2*e4m3 split 1->2 tiles:bf16 e5m2:row+col+amax"
    assert found["nn dswiglu quantize swiglu quantize"] == f"{gradient} rebuilt:e4m3"


def test_extents() -> None:
    assert extents_of("nt", (2, 8, 64), (96, 64)) == Extents(16, 96, 64)
    assert extents_of("nn", (16, 96), (96, 64)) == Extents(16, 64, 96)
    tn = extents_of("tn", (2, 8, 96), (2, 8, 64))
    assert tn == Extents(96, 64, 16, contracts=True)
    assert (tn.rows, tn.at(5)) == (16, Extents(96, 64, 5, contracts=True))
