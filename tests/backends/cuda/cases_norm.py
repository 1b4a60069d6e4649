"""Groups around norms: a sum before, a quantize after; backward with the residual gradient and those of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from te_ops.basic.norm import (
    LAYERNORM,
    LAYERNORM_BACKWARD,
    LAYERNORM_DGAMMA,
    RMSNORM,
    RMSNORM_BACKWARD,
    RMSNORM_DGAMMA,
)
from te_ops.basic.pointwise import POINTWISE, REDUCE, SUM
from te_ops.basic.quantize import QUANTIZE
from te_ops.fused.norm import RULES
from te_ops.graph import Value
from te_ops.pointwise import Fn, activations
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    Quantizer,
)
from tests.backends.cuda.calls import Inputs
from tests.backends.cuda.cases import Case, Draw, Group

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RULE = {rule.name: rule for rule in RULES}
DELAYED, CURRENT = Float8Quantizer(), Float8CurrentScalingQuantizer(torch.float8_e5m2)
GELU = activations["gelu"]()


def normalised(
    inputs: Inputs, draw: Draw, x: Value, layer: bool, gamma: torch.dtype
) -> tuple[Value, ...]:
    """A norm node of x."""
    width = inputs.g.spec(x).shape[-1]
    weights = [inputs(draw((width,), gamma)) for _ in range(1 + layer)]
    return inputs.g.calls(
        LAYERNORM if layer else RMSNORM, x, *weights, eps=1e-5, zero_centered=layer
    )


def quantized(
    inputs: Inputs, draw: Draw, x: Value, quantizer: Quantizer, known: bool = False
) -> tuple[Value, ...]:
    """A quantize node of x: row and column, and the amax of delayed scaling."""
    more = [inputs(draw((1,), FP32).abs() + 0.5)] if quantizer.stateful or known else []
    attrs: dict[str, Any] = {"known": True} if known else {}
    outs = inputs.g.calls(QUANTIZE, x, *more, quantizer=quantizer, stream=0, **attrs)
    return outs if quantizer.stateful else outs[:2]


def front(
    inputs: Inputs, draw: Draw, shape: tuple[int, ...], kind: str, dtype: torch.dtype
) -> Value:
    """What comes before the norm: "add" (two tensors), "sum" (the prim), "gelu", or nothing."""
    x = inputs(draw(shape, dtype))
    if kind == "":
        return x
    if kind == "gelu":
        return inputs.g.call(
            POINTWISE, x, fn=GELU, dtype=dtype, broadcast=("full",), interleave=None
        )
    other = inputs(draw(shape, dtype) + 0.25)
    if kind == "sum":
        return inputs.g.call(SUM, x, other, dtype=dtype)
    fn: Fn = activations["add"]()
    return inputs.g.call(
        POINTWISE, x, other, fn=fn, dtype=dtype, broadcast=("full", "full"), interleave=None
    )


def forward(
    kind: str,
    layer: bool,
    quantizer: Quantizer | None,
    writes: str,
    *,
    dtype: torch.dtype = BF16,
    known: bool = False,
    rule: str = "",
) -> Case:
    """`writes`: s the sum, y, t the statistics."""
    name = rule or ("add_norm_quantize" if kind else "norm_quantize")

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        x = front(inputs, draw, shape, kind, dtype)
        outs = normalised(inputs, draw, x, layer, dtype)
        made = [
            *([x] if "s" in writes else []),
            *([outs[0]] if "y" in writes else []),
            *(outs[1:] if "t" in writes else []),
        ]
        if quantizer is not None:
            made += quantized(inputs, draw, outs[0], quantizer, known)
        nodes = tuple(n for n in inputs.g.nodes if n.prim.name in _PRIMS)
        return Group(name, inputs, nodes, tuple(made), RULE[name], codes=2.0)

    described = "" if quantizer is None else f"-{quantizer.describe()}{' known' if known else ''}"
    label = f"{name}-{kind or 'plain'}-{'layer' if layer else 'rms'}{described}-{writes}-{dtype}"
    return Case(label.replace("torch.", ""), make, True)


_PRIMS = frozenset(("pointwise", "sum", "rmsnorm", "layernorm", "quantize"))


def backward(
    layer: bool, members: str, dtype: torch.dtype = BF16, gamma: torch.dtype = FP32
) -> Case:
    """`members`: s the residual gradient, g gamma's, b beta's."""
    together = "norm_backward_together" if "s" in members else "norm_backward_weights"
    name = "norm_backward_sum" if members == "s" else together

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        x, weight = draw(shape, dtype), draw(shape[-1:], gamma)
        wide = x.float()
        mean = wide.mean(-1) if layer else torch.zeros(shape[:-1], device=x.device)
        rstd = torch.rsqrt((wide - mean.unsqueeze(-1)).square().mean(-1) + 1e-5)
        dy, given = inputs(draw(shape, dtype)), inputs(x)
        statistics = [inputs(rstd), *([inputs(mean)] if layer else [])]
        prims = (
            (LAYERNORM_BACKWARD, LAYERNORM_DGAMMA) if layer else (RMSNORM_BACKWARD, RMSNORM_DGAMMA)
        )
        g = inputs.g
        dx = g.call(prims[0], dy, given, inputs(weight), *statistics, zero_centered=layer)
        made = [dx]
        if "g" in members:
            made.append(g.call(prims[1], dy, given, *statistics, dtype=gamma))
        if "b" in members:
            made.append(g.call(REDUCE, dy, over="rows", dtype=gamma))
        if "s" in members:
            made[0] = g.call(SUM, inputs(draw(shape, dtype)), dx, dtype=dtype)
        nodes = tuple(n for n in g.nodes if n.prim.name.split("_")[-1] in _GRADIENTS)
        return Group(name, inputs, nodes, tuple(made), RULE[name])

    kind = f"{'layer' if layer else 'rms'}-{members}-{dtype}-{gamma}".replace("torch.", "")
    return Case(f"{name}-{kind}", make, True)


_GRADIENTS = frozenset(("backward", "dgamma", "reduce", "sum"))


def cases() -> Iterator[Case]:
    """Every kind of group."""
    for layer in (False, True):
        yield forward("add", layer, None, "syt")
        yield forward("add", layer, DELAYED, "st")
        yield forward("add", layer, CURRENT, "st")
        yield forward("", layer, CURRENT, "t", rule="norm_quantize_rounded")
        yield backward(layer, "g")
        yield backward(layer, "gs", FP16, FP16)
    yield forward("sum", False, DELAYED, "syt")
    yield forward("sum", True, None, "st", dtype=FP32)
    yield forward("gelu", False, DELAYED, "st")
    yield forward("gelu", True, None, "y", dtype=FP16)
    yield forward("add", False, DELAYED, "")
    yield forward("add", False, None, "y")
    yield forward("add", False, Float8BlockQuantizer(), "st")
    yield forward("add", True, MXFP8Quantizer(), "st")
    yield forward("", False, DELAYED, "")
    yield forward("", True, DELAYED, "t", dtype=FP32)
    yield forward("", False, CURRENT, "t", known=True)
    yield forward("", False, CURRENT, "yt")
    yield forward("", False, CURRENT, "", rule="norm_quantize_rounded")
    yield backward(False, "s")
    yield backward(True, "s", FP32)
    yield backward(True, "gb")
    yield backward(True, "gbs", BF16, BF16)
