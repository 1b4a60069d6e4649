"""The norm of queries and keys in a packed tensor, alone, with the rotation behind it, and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from te_ops.basic.heads import Parts, width_of
from te_ops.basic.heads_norm import NORM_HEADS, NORM_HEADS_BACKWARD
from te_ops.basic.rope import ROPE_HEADS
from te_ops.fused.rope import RULES
from te_ops.graph import Value
from tests.backends.cuda.calls import Inputs
from tests.backends.cuda.cases import Case, Draw, Group
from tests.backends.cuda.cases_rope import Form

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RULE = {rule.name: rule for rule in RULES}
NORMED = (True, True, False)
Kind = tuple[torch.dtype | None, bool]
"""The dtype of gammas (None: L2), and whether they are zero-centered."""


def normed_inputs(
    inputs: Inputs, draw: Draw, x: Value, parts: Parts, kind: Kind
) -> tuple[tuple[Value, ...], dict[str, Any]]:
    """The gammas, and the attributes of a norm."""
    gamma, zero_centered = kind
    sizes = [size for (_, size), has in zip(parts, NORMED, strict=True) if has and gamma]
    gammas = tuple(inputs(draw((size,), gamma) * 0.1 + 1) for size in sizes)
    return gammas, {"parts": parts, "normed": NORMED, "zero_centered": zero_centered}


def _forward(form: Form, kind: Kind, turns: bool) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs, lead = Inputs(), form.lead(shape)
        x = inputs(draw((*lead, width_of(form.parts)), form.dtype))
        gammas, attrs = normed_inputs(inputs, draw, x, form.parts, kind)
        y, scale = inputs.g.calls(NORM_HEADS, x, *gammas, eps=1e-5, **attrs)
        runs = "norm_rope_heads" if turns else "norm_heads"
        if turns:
            table = inputs(form.table(draw, lead))
            options: dict[str, Any] = {"interleaved": form.interleaved, "inverse": False}
            options |= {"parts": form.parts, "turned": NORMED, "axis": form.axis}
            y = inputs.g.call(ROPE_HEADS, y, table, **options)
        nodes = tuple(n for n in inputs.g.nodes if n.inputs)
        return Group(runs, inputs, nodes, (y, scale), RULE.get(runs))

    return Case(f"norm_heads-{_name(form, kind)}" + "-rope" * turns, make, wide=True)


def _backward(form: Form, kind: Kind) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs, lead = Inputs(), form.lead(shape)
        dy, x = (inputs(draw((*lead, width_of(form.parts)), form.dtype)) for _ in range(2))
        heads = sum(h for (h, _), has in zip(form.parts, NORMED, strict=True) if has)
        scale = inputs(draw((*lead, heads), FP32).abs() + 0.1)
        gammas, attrs = normed_inputs(inputs, draw, x, form.parts, kind)
        outs = inputs.g.calls(NORM_HEADS_BACKWARD, dy, x, scale, *gammas, **attrs)
        node = inputs.g.node(outs[0])
        return Group("norm_heads_backward", inputs, (node,), outs)

    return Case(f"norm_heads_backward-{_name(form, kind)}", make, wide=True)


def _name(form: Form, kind: Kind) -> str:
    gamma, zero_centered = kind
    words = ["l2" if gamma is None else str(gamma).removeprefix("torch."), form.name]
    return "-".join(words) + "-zc" * zero_centered


KINDS: tuple[Kind, ...] = ((BF16, False), (FP32, True), (None, False))
FORMS = (
    Form(),
    Form(interleaved=True, axis=0, dtype=FP16),
    Form(((3, 64), (1, 64), (1, 64)), 8, leads=1, dtype=FP32),
    Form(((2, 256), (1, 256), (1, 256)), 128),
)


def norm_heads_cases() -> Iterator[Case]:
    """Every form and kind of norm."""
    for form in FORMS:
        for kind in KINDS:
            yield _forward(form, kind, False)
            yield _forward(form, kind, True)
            yield _backward(form, kind)


__all__ = ["NORMED", "Kind", "norm_heads_cases", "normed_inputs"]
