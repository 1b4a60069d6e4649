"""Every reason for which a kernel refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_ops.backends.cuda import KERNELS
from te_ops.basic.norm import LAYERNORM, RMSNORM
from te_ops.basic.pointwise import POINTWISE, REDUCE, SUM
from te_ops.basic.quantize import QUANTIZE
from te_ops.fused.pointwise import RULES
from te_ops.pointwise import Fn, Input, activations
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_ops.registry import Rule
from tests.backends.cuda.calls import Inputs, make_call

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
E5M2 = torch.float8_e5m2
RULE = {rule.name: rule for rule in RULES}
BLOCKS = (Float8BlockQuantizer(),) * 2
BY_NAME = {k.runs: k for k in KERNELS}


def reason(runs: str, inputs: Inputs, nodes: int = 1, writes: Any = None) -> str | None:
    members = inputs.g.nodes[-nodes:]
    last = members[-1]
    wanted = writes or tuple(last.outs)
    rule = Rule(runs, ("a", "b"), exact=runs.endswith("_rounded"))
    return BY_NAME[runs].refuse(make_call(inputs, members, wanted, rule=rule))


def emit(
    inputs: Inputs,
    fn: Fn,
    *xs: torch.Tensor,
    dtype: torch.dtype = BF16,
    interleave: int | None = None,
) -> Any:
    values = [inputs(x) for x in xs]
    return inputs.g.call(
        POINTWISE, *values, fn=fn, dtype=dtype, broadcast=("full",) * len(xs), interleave=interleave
    )


@pytest.mark.parametrize(
    ("x", "out", "text"),
    [
        (torch.zeros(4, 8, dtype=FP64), FP64, "output dtype torch.float64"),
        (torch.zeros(4, 8, dtype=FP64), BF16, "input 0 is torch.float64"),
        (torch.zeros(4, 8, dtype=torch.int64), BF16, "input 0 is torch.int64"),
    ],
)
def test_pointwise(x: torch.Tensor, out: torch.dtype, text: str) -> None:
    inputs = Inputs()
    emit(inputs, activations["gelu"](), x, dtype=out)
    assert text in str(reason("pointwise", inputs))


def test_a_sum_of_many() -> None:
    inputs = Inputs()
    inputs.g.call(SUM, *(inputs(torch.zeros(2, 8)) for _ in range(9)), dtype=torch.float32)
    assert "9 operands" in str(reason("sum", inputs))


def test_reduce_of_fp64() -> None:
    inputs = Inputs()
    inputs.g.call(REDUCE, inputs(torch.zeros(2, 8, dtype=FP64)), over="rows", dtype=FP64)
    assert "not torch.float64" in str(reason("reduce", inputs))


@pytest.mark.parametrize(
    ("quantizer", "x", "text"),
    [
        (NVFP4Quantizer(row_scaled=True), torch.zeros(4, 8), "no kernel for NVFP4 with row_scaled"),
        (Float8CurrentScalingQuantizer(), torch.zeros(4, 8, dtype=FP64), "not torch.float64"),
    ],
)
def test_quantize(quantizer: Any, x: torch.Tensor, text: str) -> None:
    inputs = Inputs()
    inputs.g.calls(QUANTIZE, inputs(x), quantizer=quantizer, stream=0)
    assert text in str(reason("quantize", inputs))


def test_a_scale_that_is_not_fp32() -> None:
    inputs = Inputs()
    state = inputs(torch.ones(1, dtype=BF16))
    inputs.g.calls(
        QUANTIZE, inputs(torch.zeros(4, 8)), state, quantizer=Float8Quantizer(), stream=0
    )
    assert "the scale is torch.bfloat16" in str(reason("quantize", inputs))


def test_norms() -> None:
    inputs = Inputs()
    inputs.g.calls(
        RMSNORM, inputs(torch.zeros(4, 0)), inputs(torch.zeros(0)), eps=1e-5, zero_centered=False
    )
    assert "without columns" in str(reason("rmsnorm", inputs))
    inputs = Inputs()
    gamma, beta = torch.ones(8), torch.zeros(8, dtype=BF16)
    inputs.g.calls(
        LAYERNORM,
        inputs(torch.zeros(4, 8)),
        inputs(gamma),
        inputs(beta),
        eps=1e-5,
        zero_centered=False,
    )
    assert "different dtypes" in str(reason("layernorm", inputs))


def test_current_scaling_behind_a_producer() -> None:
    inputs = Inputs()
    y = emit(inputs, activations["gelu"](), torch.zeros(4, 8, dtype=BF16))
    inputs.g.calls(QUANTIZE, y, quantizer=Float8CurrentScalingQuantizer(), stream=0)
    assert "needs the amax of all values" in str(reason("pointwise_quantize", inputs, 2))


def test_blocks_that_would_span_both_halves() -> None:
    inputs = Inputs()
    x, dy = torch.zeros(4, 2 * 96, dtype=BF16), torch.zeros(4, 96, dtype=BF16)
    y = emit(inputs, activations["swiglu"]().grad(0), x, dy)
    inputs.g.calls(QUANTIZE, y, quantizer=Float8BlockQuantizer(), stream=0)
    assert "halves of 96 columns" in str(reason("pointwise_quantize_rounded", inputs, 2))
    assert "rounded" in str(reason("pointwise_quantize", inputs, 2))


def test_an_interleaved_output() -> None:
    inputs = Inputs()
    x, dy = torch.zeros(4, 2 * 128, dtype=BF16), torch.zeros(4, 128, dtype=BF16)
    y = emit(inputs, activations["swiglu"]().grad(0), x, dy, interleave=32)
    state = inputs(torch.ones(1))
    inputs.g.calls(QUANTIZE, y, state, quantizer=Float8Quantizer(), stream=0)
    members = (inputs.g.node(y), inputs.g.nodes[-1])
    call = make_call(inputs, members, tuple(members[1].outs))
    assert "interleave of 32" in str(BY_NAME["pointwise_quantize"].refuse(call))


def test_a_chain_whose_inner_value_is_read() -> None:
    inputs = Inputs()
    double = Fn("double", ("value",), (2.0 * Input(0),))
    z = emit(inputs, double, torch.zeros(4, 8, dtype=BF16))
    y = inputs.g.call(
        POINTWISE, z, fn=activations["gelu"](), dtype=BF16, broadcast=("full",), interleave=None
    )
    inputs.g.calls(QUANTIZE, y, quantizer=Float8BlockQuantizer(), stream=0)
    outs = tuple(inputs.g.nodes[-1].outs)
    assert "read elsewhere" in str(reason("pointwise_quantize", inputs, 3, (z, *outs)))
    assert reason("pointwise_quantize", inputs, 3, outs) is None


def backward_group(
    *,
    quantizers: tuple[Any, Any],
    interleave: int | None = None,
    over: str = "rows",
    dtype: torch.dtype = BF16,
) -> tuple[Inputs, list[Any]]:
    """swiglu and its gradient, each quantized, and a sum of the gradient."""
    inputs = Inputs()
    pair, dy = inputs(torch.zeros(4, 256, dtype=BF16)), inputs(torch.zeros(4, 128, dtype=BF16))
    fn = activations["swiglu"]()
    made = [
        inputs.g.call(
            POINTWISE, *xs, fn=f, dtype=dtype, broadcast=("full",) * len(xs), interleave=interleave
        )
        for f, xs in ((fn, (pair,)), (fn.grad(0), (pair, dy)))
    ]
    outs: list[Any] = []
    for value, quantizer in zip(made, quantizers, strict=True):
        state = [inputs(torch.ones(1))] if quantizer.stateful else []
        outs += inputs.g.calls(QUANTIZE, value, *state, quantizer=quantizer, stream=0)
    outs.append(inputs.g.call(REDUCE, made[1], over=over, dtype=BF16))
    return inputs, outs


@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        ("pointwise_together", {}, None),
        ("pointwise_together", {"over": "cols"}, "a sum over cols"),
        ("pointwise_together", {"interleave": 32}, "an interleave of 32"),
        ("pointwise_together", {"quantizers": BLOCKS}, "as they would be written: rounded"),
        ("pointwise_together_rounded", {"quantizers": BLOCKS}, None),
        ("pointwise_together_rounded", {"quantizers": BLOCKS, "arch": "sm_89"}, "102 KiB"),
        ("pointwise_together_rounded", {"quantizers": BLOCKS, "dtype": FP32}, "have no room"),
        (
            "pointwise_together_rounded",
            {"quantizers": (Float8Quantizer(), Float8BlockQuantizer())},
            "per-tensor delayed has other tiles",
        ),
        (
            "pointwise_together_rounded",
            {"quantizers": (MXFP8Quantizer(), Float8BlockQuantizer())},
            "has other tiles",
        ),
        (
            "pointwise_together",
            {"quantizers": (Float8CurrentScalingQuantizer(),) * 2},
            "this rule does not round",
        ),
        (
            "pointwise_together_rounded",
            {"quantizers": (Float8CurrentScalingQuantizer(),) * 2},
            None,
        ),
        ("pointwise_together_rounded", {}, "no value is read again"),
    ],
)
def test_values_together(rule: str, options: dict[str, Any], text: str | None) -> None:
    arch = options.pop("arch", "sm_90")
    inputs, outs = backward_group(**{"quantizers": (Float8Quantizer(),) * 2, **options})
    members = [n for n in inputs.g.nodes if n.prim in (POINTWISE, QUANTIZE, REDUCE)]
    call = make_call(inputs, members, outs, rule=RULE[rule], arch=arch)
    found = BY_NAME[rule].refuse(call)
    assert (found is None) if text is None else (text in str(found))


def test_values_of_different_tensors() -> None:
    inputs = Inputs()
    outs = [emit(inputs, activations["gelu"](), torch.zeros(4, 8, dtype=BF16)) for _ in range(2)]
    members = [n for n in inputs.g.nodes if n.prim is POINTWISE]
    call = make_call(inputs, members, outs, rule=RULE["pointwise_together"])
    found = BY_NAME["pointwise_together"].refuse(call)
    assert "share no tensor" in str(found)


def quantized(*given: tuple[Any, torch.Tensor]) -> tuple[Inputs, list[Any]]:
    inputs = Inputs()
    outs = []
    for quantizer, x in given:
        value = inputs(x)
        state = [inputs(torch.ones(1))] if quantizer.stateful else []
        outs.append(inputs.g.calls(QUANTIZE, value, *state, quantizer=quantizer, stream=0))
    return inputs, outs


def test_tensors_in_one_launch() -> None:
    x, delayed = torch.zeros(4, 8, dtype=BF16), Float8Quantizer()
    kernel = BY_NAME["quantize_together"]

    def found(given: list[tuple[Any, torch.Tensor]], pick: slice = slice(0, 2)) -> str:
        inputs, outs = quantized(*given)
        members = [n for n in inputs.g.nodes if n.prim is QUANTIZE]
        wanted = [o for made in outs for o in made[pick]]
        return str(
            kernel.refuse(make_call(inputs, members, wanted, rule=RULE["quantize_together"]))
        )

    assert found([(delayed, x)] * 2) == "None"
    assert "up to 16" in found([(delayed, x)] * 17)
    assert "formats or dtypes differ" in found([(delayed, x), (Float8Quantizer(E5M2), x)])
    assert "formats or dtypes differ" in found([(delayed, x), (delayed, x.float())])
    assert "one by one" in found([(Float8BlockQuantizer(), x)] * 2)
    assert "not torch.float64" in found([(delayed, x.double())] * 2)
    inputs, outs = quantized((delayed, x), (delayed, x))
    members = [n for n in inputs.g.nodes if n.prim is QUANTIZE]
    call = make_call(inputs, members, (outs[0][0], outs[1][1]), rule=RULE["quantize_together"])
    assert "different copies" in str(kernel.refuse(call))
