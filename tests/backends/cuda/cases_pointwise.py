"""Groups of pointwise, quantize and reduce nodes that become one launch, and of quantize nodes of several tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from te_ops.basic.pointwise import POINTWISE, REDUCE
from te_ops.basic.quantize import QUANTIZE
from te_ops.fused.pointwise import RULES
from te_ops.graph import Value
from te_ops.pointwise import Fn, activations
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)
from tests.backends.cuda.calls import Inputs
from tests.backends.cuda.cases import Case, Draw, Group

BF16, FP32 = torch.bfloat16, torch.float32
E5M2 = torch.float8_e5m2
RULE = {rule.name: rule for rule in RULES}
GELU = activations["gelu"]()
SWIGLU = activations["swiglu"]()


def quantized(
    inputs: Inputs,
    draw: Draw,
    x: Value,
    quantizer: Quantizer,
    live: Sequence[int],
    *,
    known: Value | None = None,
) -> tuple[Value, ...]:
    """A quantize node of x; the outputs that are wanted."""
    more = [inputs(draw((1,), FP32).abs() + 0.5)] if quantizer.stateful else []
    attrs: dict[str, Any] = {}
    if known is not None:
        more, attrs = [known], {"known": True}
    outs = inputs.g.calls(QUANTIZE, x, *more, quantizer=quantizer, stream=0, **attrs)
    return tuple(outs[i] for i in live)


def apply(inputs: Inputs, fn: Fn, *xs: Value, kinds: tuple[str, ...] | None = None) -> Value:
    broadcast = kinds or ("full",) * len(xs)
    return inputs.g.call(POINTWISE, *xs, fn=fn, dtype=BF16, broadcast=broadcast, interleave=None)


def group(inputs: Inputs, rule: str, writes: Sequence[Value], codes: float = 2.0) -> Group:
    nodes = tuple(n for n in inputs.g.nodes if n.prim in (POINTWISE, QUANTIZE, REDUCE))
    return Group(rule, inputs, nodes, tuple(writes), RULE[rule], codes=codes)


def _gated(forward: Quantizer | None, backward: Quantizer | None, rule: str) -> Case:
    """swiglu rebuilt beside its gradient; without a quantizer the values themselves."""
    blocked = any(isinstance(q, Float8BlockQuantizer) for q in (forward, backward))

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        if blocked:  # no block spans both halves
            shape = (*shape[:-1], -(-shape[-1] // 128) * 128)
        pair = inputs(draw((*shape[:-1], 2 * shape[-1]), BF16, scale=3.0))
        dy = inputs(draw(shape, BF16))
        known = None
        if isinstance(forward, Float8CurrentScalingQuantizer):
            known = inputs(torch.full((), 8.0, device=inputs.tensors[dy].device))
        h = apply(inputs, SWIGLU, pair)
        writes = (
            [h] if forward is None else [*quantized(inputs, draw, h, forward, (1,), known=known)]
        )
        dx = apply(inputs, SWIGLU.grad(0), pair, dy)
        if backward is None:
            writes.append(dx)
        else:
            writes += quantized(inputs, draw, dx, backward, (0, 1, 2))
        return group(inputs, rule, writes)

    names = [q.describe() if q else "dense" for q in (forward, backward)]
    return Case(f"{rule}-swiglu-{names[0]}-{names[1]}", make, True)


def _bias_gelu(quantizer: Quantizer | None, rule: str, dense: bool = False) -> Case:
    """d(bias + GELU), its copies and the gradient of the bias."""

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        z, dy = inputs(draw(shape, BF16, scale=3.0)), inputs(draw(shape, BF16))
        dz = apply(inputs, GELU.grad(0), z, dy)
        writes = [dz] if dense else []
        if quantizer is not None:
            writes += quantized(inputs, draw, dz, quantizer, (0, 1, 2))
        writes.append(inputs.g.call(REDUCE, dz, over="rows", dtype=BF16))
        return group(inputs, rule, writes)

    name = quantizer.describe() if quantizer else "dense"
    return Case(f"{rule}-dgelu-dbias-{name}{'-dense' if dense else ''}", make, True)


def _rounded(name: str, quantizer: Quantizer, dense: bool) -> Case:
    fn = activations[name]()

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        factor = 2 if fn.inputs[0] == "pair" else 1
        x = inputs(draw((*shape[:-1], shape[-1] * factor), BF16, scale=3.0))
        y = apply(inputs, fn, x)
        outs = quantized(inputs, draw, y, quantizer, (0, 1, 2))
        return group(inputs, "pointwise_quantize_rounded", [*([y] if dense else []), *outs])

    label = f"pointwise_quantize_rounded-{name}-{quantizer.describe()}"
    return Case(label + ("-dense" if dense else ""), make, True)


def _reduce_quantize(quantizer: Quantizer, dtype: torch.dtype) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        x = inputs(draw(shape, dtype))
        outs = quantized(inputs, draw, x, quantizer, (0, 1, 2))
        total = inputs.g.call(REDUCE, x, over="rows", dtype=dtype)
        return group(inputs, "reduce_quantize", (total, *outs), codes=0.0)

    return Case(f"reduce_quantize-{quantizer.describe()}-{dtype}", make, True)


def _several(quantizer: Quantizer, live: tuple[int, ...]) -> Case:
    """Tensors of different shapes: this one, its transpose, one row of it, nothing."""

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        writes: list[Value] = []
        for size in (shape, shape[::-1], (1, shape[-1]), (0, shape[-1])):
            x = inputs(draw(size, BF16, special=True))
            writes += quantized(inputs, draw, x, quantizer, live)
        return group(inputs, "quantize_together", writes, codes=0.0)

    wanted = "".join("rca"[i] for i in live)
    return Case(f"quantize_together-{quantizer.describe()}-{wanted}", make, True)


def cases() -> Iterator[Case]:
    """All of them."""
    delayed, current = Float8Quantizer(), Float8CurrentScalingQuantizer()
    wide = Float8Quantizer(E5M2)
    yield _gated(delayed, wide, "pointwise_together")
    yield _gated(delayed, None, "pointwise_together")
    yield _gated(None, None, "pointwise_together")
    yield _gated(current, Float8CurrentScalingQuantizer(E5M2), "pointwise_together_rounded")
    blocks, squares = Float8BlockQuantizer(), Float8BlockQuantizer(E5M2, block_scaling_dim=2)
    for pair in (
        (blocks, blocks),
        (blocks, squares),
        (squares, blocks),
        (None, blocks),
        (blocks, None),
    ):
        yield _gated(*pair, "pointwise_together_rounded")
    yield _bias_gelu(wide, "pointwise_together")
    yield _bias_gelu(wide, "pointwise_together", dense=True)
    yield _bias_gelu(None, "pointwise_together", dense=True)
    yield _bias_gelu(current, "pointwise_together_rounded")
    yield _rounded("gelu", current, False)
    yield _rounded("swiglu", current, True)
    yield _rounded("swiglu", Float8CurrentScalingQuantizer(E5M2, force_pow_2_scales=True), False)
    for dtype in (BF16, FP32):
        yield _reduce_quantize(wide, dtype)
        yield _reduce_quantize(current, dtype)
    for live in ((0, 1, 2), (0,), (2,)):
        yield _several(delayed, live)
        yield _several(current, live)
