"""Heads that turn where they lie, are packed, and are quantized; and the table of their angles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_ops.basic.heads import PACK_HEADS, Parts, width_of
from te_ops.basic.quantize import QUANTIZE
from te_ops.basic.rope import ROPE, ROPE_HEADS, ROPE_TABLE
from te_ops.basic.rope_scaling import frequencies, scaling_of
from te_ops.fused.rope import RULES
from te_ops.graph import DIM, Value
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    Quantizer,
)
from tests.backends.cuda.calls import Inputs, make_call
from tests.backends.cuda.cases import BIND, Case, Draw, Group

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RULE = {rule.name: rule for rule in RULES}
GROUPED: Parts = ((4, 32), (2, 32), (2, 32))
"""Query, key and value heads."""
ODD: Parts = ((3, 10), (1, 10), (1, 7))
QUANTIZERS: tuple[Quantizer, ...] = (
    Float8Quantizer(torch.float8_e5m2),
    Float8CurrentScalingQuantizer(torch.float8_e5m2),
    Float8BlockQuantizer(),
    MXFP8Quantizer(),
)


@dataclass(frozen=True)
class Form:
    """What is turned, and how.

    Attributes:
        leads: dimensions before heads: 1 for packed tokens.
        half: pairs of a head that turn.
        per_row: the table has a place for each row.
    """

    parts: Parts = GROUPED
    half: int = 16
    dtype: torch.dtype = BF16
    interleaved: bool = False
    inverse: bool = False
    axis: int = 1
    leads: int = 2
    per_row: bool = False

    def lead(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Leading dimensions, from those of a tensor."""
        rows = shape[0] if len(shape) > 1 else 1
        return (rows,) if self.leads == 1 else (3, rows) if self.axis == 1 else (rows, 3)

    def table(self, draw: Draw, lead: tuple[int, ...]) -> torch.Tensor:
        """Some angles."""
        places = lead if self.per_row or self.leads == 1 else (lead[self.axis],)
        angle = draw((*places, self.half), FP32) * 7
        return torch.stack((angle.cos(), angle.sin()), -2)

    @property
    def name(self) -> str:
        """Of a case."""
        words = [str(self.dtype).removeprefix("torch."), "x".join(str(d) for _, d in self.parts)]
        words += [w for w in ("interleaved", "inverse", "per_row") if getattr(self, w)]
        return "-".join(
            [*words, f"half{self.half}", "thd" if self.leads == 1 else f"axis{self.axis}"]
        )


def _turned(inputs: Inputs, draw: Draw, shape: tuple[int, ...], form: Form, packs: str) -> Value:
    """A `rope_heads` node over a packed tensor, or over what `packs`: "all" or "some" of the parts."""
    lead = form.lead(shape)
    if packs:
        filled = tuple(range(len(form.parts)))[: None if packs == "all" else -1]
        pieces = [inputs(draw((*lead, *form.parts[i]), form.dtype)) for i in filled]
        x = inputs.g.call(PACK_HEADS, *pieces, parts=form.parts, filled=filled)
    else:
        x = inputs(draw((*lead, width_of(form.parts)), form.dtype))
    return inputs.g.call(
        ROPE_HEADS,
        x,
        inputs(form.table(draw, lead)),
        parts=form.parts,
        turned=(True, True, False),
        interleaved=form.interleaved,
        inverse=form.inverse,
        axis=form.axis,
    )


def _group(runs: str, inputs: Inputs, *writes: Value) -> Group:
    """All nodes that are no inputs, as one call."""
    nodes = tuple(n for n in inputs.g.nodes if n.inputs and n.prim is not DIM)
    return Group(runs, inputs, nodes, writes, RULE.get(runs), exact=True)


def _case(form: Form, packs: str, quantizer: Quantizer | None, dense: bool) -> Case:
    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        out = _turned(inputs, draw, shape, form, packs)
        if quantizer is None:
            return _group("pack_rope" if packs else "rope_heads", inputs, out)
        more = [inputs(draw((1,), FP32).abs() + 0.5)] if quantizer.stateful else []
        outs = inputs.g.calls(QUANTIZE, out, *more, quantizer=quantizer, stream=0)
        exact = not isinstance(quantizer, Float8Quantizer)
        runs = "heads_quantize_rounded" if exact else "heads_quantize"
        kept = (out,) if dense else ()
        wanted = (*kept, *(outs if quantizer.stateful else outs[:2]))
        return _group(runs, inputs, *wanted)

    words = [form.name, packs and f"packs-{packs}", quantizer.describe() if quantizer else ""]
    kind = "rope_heads" if quantizer is None else "heads_quantize"
    return Case("-".join([kind, *(w for w in (*words, "dense" * dense) if w)]), make, wide=True)


FORMS = (
    Form(),
    Form(interleaved=True, inverse=True),
    Form(axis=0, dtype=FP16),
    Form(half=8, leads=1, inverse=True),
    Form(per_row=True, dtype=FP32),
    Form(ODD, 4, interleaved=True),
    Form(ODD, 3, axis=0, inverse=True),
    Form(((2, 192), (2, 192), (2, 128)), 32),
)
PARTIAL = Form(((4, 64), (1, 64), (1, 64)), 16, inverse=True)
WHOLE = Form(((2, 128), (1, 128), (1, 128)), 64)
THREE = Form(((1, 128), (1, 128), (1, 128)), 64)  # no half of a row is made of whole heads


def rope_cases() -> Iterator[Case]:
    """Every form, alone and packed; some before each format."""
    for form in (*FORMS, PARTIAL, WHOLE):
        yield _case(form, "", None, False)
        yield _case(form, "all", None, False)
    yield _case(FORMS[0], "some", None, False)
    for quantizer in QUANTIZERS:
        yield _case(FORMS[0], "all", quantizer, False)
        yield _case(FORMS[1], "", quantizer, True)
        yield _case(PARTIAL, "all", quantizer, False)
        yield _case(WHOLE, "some", quantizer, False)
    for quantizer in QUANTIZERS[:3]:
        yield _case(THREE, "all", quantizer, True)
        yield _case(replace(WHOLE, dtype=FP32), "all", quantizer, False)
    for form in FORMS[:4]:
        yield _single(form)
        yield _packed(form)


def _single(form: Form) -> Case:
    """One tensor of heads turns, read where it lies among others."""

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        lead = form.lead(shape)
        x = inputs(draw((*lead, 3 * 32), form.dtype)[..., 32:].unflatten(-1, (2, 32)))  # type: ignore[no-untyped-call]
        attrs: dict[str, Any] = {"interleaved": form.interleaved, "inverse": form.inverse}
        table = inputs(form.table(draw, lead))
        return _group("rope", inputs, inputs.g.call(ROPE, x, table, axis=form.axis, **attrs))

    return Case(f"rope-{form.name}", make, wide=True)


def _packed(form: Form) -> Case:
    """Heads are packed, and do not turn."""

    def make(draw: Draw, shape: tuple[int, ...]) -> Group:
        inputs = Inputs()
        lead = form.lead(shape)
        pieces = [inputs(draw((*lead, *part), form.dtype)) for part in form.parts]
        packed = inputs.g.call(PACK_HEADS, *pieces, parts=form.parts, filled=(0, 1, 2))
        return _group("pack_heads", inputs, packed)

    return Case(f"pack_heads-{form.name}", make, wide=True)


@dataclass(frozen=True)
class Table:
    """cos and sin of positions far out: at most one unit of the last place from those of FP64."""

    name: str
    scaling: dict[str, Any] | None = None
    wide: bool = False

    def check(
        self, draw: Draw, shape: tuple[int, ...], arch: str, device: torch.device | str = "cpu"
    ) -> list[str]:
        """What is wrong, in words."""
        inputs = Inputs()
        length = inputs.g.dim(inputs(draw(shape)), 0)
        attrs: dict[str, Any] = {"dim": 32, "base": 5e5, "start": 130_000}
        attrs["scaling"] = scaling_of(self.scaling, 5e5)
        node = inputs.g.node(inputs.g.call(ROPE_TABLE, length, dtype=FP32, **attrs))
        call = make_call(inputs, (node,), (node.out,), arch=arch, device=device)
        got = BIND["rope_table"].bind(call)((shape[0],)).cpu().double()
        # The angle is an FP32 number by definition: its cosine and sine are taken in FP64.
        right = ROPE_TABLE.reference((shape[0],), dtype=FP32, **attrs)
        like = torch.arange(shape[0], dtype=FP32, device=device) + attrs["start"]
        frequency = frequencies(32, 5e5, attrs["scaling"], 0, like)
        angle = (like[:, None] * frequency).cpu().double()
        exact = torch.stack((angle.cos(), angle.sin()), -2)
        if got.shape != right.shape:
            return [f"{tuple(got.shape)} instead of {tuple(right.shape)}"]
        off = float((got - exact).abs().max()) if got.numel() else 0.0
        return [f"off by {off}"] if off > 2.0**-24 else []


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def table_cases() -> Iterator[Table]:
    """With frequencies as they are, and stretched."""
    yield Table("rope_table")
    yield Table("rope_table-llama3", LLAMA3)


__all__ = ["rope_cases", "table_cases"]
