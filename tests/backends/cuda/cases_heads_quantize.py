"""Heads of a packed tensor, each part to FP8 under a scale of its own: as they are, turned, normalised, both. And the
gradient of normalised heads, turned back before, to FP8 as one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from te_ops.basic.heads import PACK_HEADS, UNPACK_HEADS, width_of
from te_ops.basic.heads_norm import NORM_HEADS, NORM_HEADS_BACKWARD
from te_ops.basic.pointwise import REDUCE
from te_ops.basic.quantize import QUANTIZE
from te_ops.basic.rope import ROPE_HEADS
from te_ops.fused.rope import RULES
from te_ops.graph import Value
from te_ops.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer
from tests.backends.cuda.calls import Inputs
from tests.backends.cuda.cases import Case, Draw, Group
from tests.backends.cuda.cases_norm_heads import NORMED, Kind, normed_inputs
from tests.backends.cuda.cases_rope import Form

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RULE, BACK = (
    next(rule for rule in RULES if rule.name == name)
    for name in ("heads_quantize_each", "heads_norm_back_quantize")
)
QUANTIZERS: tuple[Quantizer, ...] = (
    Float8Quantizer(torch.float8_e4m3fn),
    Float8CurrentScalingQuantizer(torch.float8_e4m3fn, force_pow_2_scales=True),
)
FORMS = (
    Form(),
    Form(((9, 64), (2, 64), (2, 64)), 16, interleaved=True, axis=0, dtype=FP16),
    Form(((3, 128), (1, 128), (1, 128)), 64, leads=1, dtype=FP32),
    Form(((2, 256), (1, 256), (1, 256)), 128),
)
"""Groups of heads that are full and not; features of a head that do not turn."""


def _case(form: Form, quantizer: Quantizer, turns: bool, kind: Kind | None) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs, lead = Inputs(), form.lead(shape)
        value = inputs(draw((*lead, width_of(form.parts)), form.dtype, special=kind is None))
        writes: list[Value] = []
        if kind is not None:
            gammas, attrs = normed_inputs(inputs, draw, value, form.parts, kind)
            value, statistic = inputs.g.calls(NORM_HEADS, value, *gammas, eps=1e-5, **attrs)
            writes.append(statistic)
        if turns:
            table = inputs(form.table(draw, lead))
            options: dict[str, Any] = {"interleaved": form.interleaved, "inverse": False}
            options |= {"parts": form.parts, "turned": NORMED, "axis": form.axis}
            value = inputs.g.call(ROPE_HEADS, value, table, **options)
        for head in inputs.g.calls(UNPACK_HEADS, value, parts=form.parts):
            more = [inputs(draw((1,), FP32).abs() + 0.5)] if quantizer.stateful else []
            row, _, amax = inputs.g.calls(QUANTIZE, head, *more, quantizer=quantizer, stream=0)
            writes += [row, amax] if quantizer.stateful else [row]
        nodes = tuple(n for n in inputs.g.nodes if n.inputs)
        # A norm's statistic may be off in its last bit, and a code of thousands with it.
        codes = 0.0 if kind is None else 2.0
        return Group(RULE.name, inputs, nodes, tuple(writes), RULE, codes=codes)

    words = [form.name, "rope" * turns, "norm" * (kind is not None), quantizer.describe()]
    return Case("-".join(["heads_quantize_each", *(w for w in words if w)]), make, wide=True)


def heads_quantize_cases() -> Iterator[Case]:
    """Every form as it is, turned, and normalised too, in both formats by turns; norms without a gamma."""
    for i, form in enumerate(FORMS):
        yield _case(form, QUANTIZERS[i % 2], False, None)
        yield _case(form, QUANTIZERS[(i + 1) % 2], True, None)
        yield _case(form, QUANTIZERS[i % 2], True, (BF16, i % 2 == 1))
    odd = Form(((5, 48), (1, 48), (1, 48)), 16)
    yield _case(odd, QUANTIZERS[0], True, None)
    yield _case(FORMS[0], QUANTIZERS[1], False, (FP32, True))
    yield _case(FORMS[0], QUANTIZERS[0], True, (None, False))


def _back(form: Form, quantizer: Quantizer, turns: bool, kind: Kind, sums: bool) -> Case:
    """`sums`: over rows too, and the values themselves are wanted."""

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs, lead, parts = Inputs(), form.lead(shape), form.parts
        pieces = [inputs(draw((*lead, *part), form.dtype)) for part in parts]
        filled = tuple(range(len(parts)))
        value = inputs.g.call(PACK_HEADS, *pieces, parts=parts, filled=filled)
        if turns:
            table = inputs(form.table(draw, lead))
            options: dict[str, Any] = {"interleaved": form.interleaved, "inverse": True}
            options |= {"parts": parts, "turned": NORMED, "axis": form.axis}
            value = inputs.g.call(ROPE_HEADS, value, table, **options)
        x = inputs(draw((*lead, width_of(parts)), form.dtype))
        heads = sum(h for (h, _), has in zip(parts, NORMED, strict=True) if has)
        scale = inputs(draw((*lead, heads), FP32).abs() + 0.1)
        gammas, attrs = normed_inputs(inputs, draw, x, parts, kind)
        dx, *totals = inputs.g.calls(NORM_HEADS_BACKWARD, value, x, scale, *gammas, **attrs)
        more = [inputs(draw((1,), FP32).abs() + 0.5)] if quantizer.stateful else []
        row, col, amax = inputs.g.calls(QUANTIZE, dx, *more, quantizer=quantizer, stream=0)
        writes = [*totals, row, col, *([amax] if quantizer.stateful else [])]
        if sums:
            writes += [dx, inputs.g.call(REDUCE, dx, over="rows", dtype=FP32)]
        nodes = tuple(n for n in inputs.g.nodes if n.inputs)
        return Group(BACK.name, inputs, nodes, tuple(writes), BACK, codes=2.0)

    words = [
        form.name,
        "rope" * turns,
        "l2" * (kind[0] is None),
        "sums" * sums,
        quantizer.describe(),
    ]
    return Case("-".join(["heads_norm_back_quantize", *(w for w in words if w)]), make, wide=True)


def heads_back_cases() -> Iterator[Case]:
    """Gradients of norms behind rotations and alone, with and without gammas and sums."""
    e5m2, current = Float8Quantizer(torch.float8_e5m2), Float8CurrentScalingQuantizer()
    yield _back(FORMS[0], e5m2, True, (BF16, False), False)
    yield _back(FORMS[1], current, True, (BF16, True), True)
    yield _back(FORMS[2], e5m2, True, (None, False), False)
    yield _back(FORMS[2], e5m2, False, (FP32, True), True)


__all__ = ["heads_back_cases", "heads_quantize_cases"]
