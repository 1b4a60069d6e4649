"""Attention calls as the planner makes them, forward and backward, and what the reference says of them."""

from __future__ import annotations

from typing import Any

import torch

from te_ops.basic.attention_core import ATTENTION, ATTENTION_BACKWARD
from te_ops.basic.attention_form import Form, learned
from te_ops.basic.attention_fp8 import ATTENTION_FP8
from te_ops.graph import Graph, Kind, Spec, Value
from te_ops.quantizers import Float8CurrentScalingQuantizer, Record, Usage
from te_ops.registry import Call

NOT_BACKWARD = ("sink",)


PER_TENSOR = Float8CurrentScalingQuantizer(force_pow_2_scales=True)


def quantized(operands: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The operands with records for q, k and v."""
    made: dict[str, Any] = dict(operands)
    for name in ("q", "k", "v"):
        made[name] = PER_TENSOR.records(operands[name], row=True, col=False)[0]
    return made


def _spec(x: Any) -> Spec:
    if not isinstance(x, Record):
        return Spec(tuple(x.shape), x.dtype)
    return Spec(x.shape, x.dtype, Kind("record", x.quantizer, Usage.ROW))


def call_of(
    operands: dict[str, Any],
    *,
    writes: tuple[int, ...],
    backward: bool = False,
    **attrs: Any,
) -> Call:
    """A call over operands by name."""
    g = Graph()
    values = {name: g.input(i, _spec(x)) for i, (name, x) in enumerate(operands.items())}
    form = Form(operands=tuple(values), **attrs)
    whole = {name: getattr(form, name) for name in Form.__dataclass_fields__}
    forward = ATTENTION_FP8 if isinstance(operands["q"], Record) else ATTENTION
    prim = ATTENTION_BACKWARD if backward else forward
    made = g.calls(prim, *values.values(), **whole)
    node = g.node(made[0])
    outs = tuple(Value(node.id, i) for i in range(len(g.specs[node.id])))
    reads = tuple(dict.fromkeys(node.inputs))
    specs = {v: g.spec(v) for v in (*reads, *outs)}
    producers = {v.node: g.node(v) for v in reads}
    return Call(
        (node,),
        reads,
        tuple(outs[i] for i in writes),
        specs,
        torch.device("cpu"),
        "sm_90",
        1,
        None,
        producers,
    )


def run(call: Call, launch: Any, operands: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a launch gives, always a tuple."""
    made = launch(*operands.values())
    return made if len(call.writes) > 1 else (made,)


def both(
    kernels: Any,
    operands: dict[str, torch.Tensor],
    do: torch.Tensor,
    *,
    peak: bool = False,
    **attrs: Any,
) -> dict[str, torch.Tensor]:
    """Forward and backward through `kernels`, a (forward, backward) pair of bind functions."""
    writes = (0, 1, 2) if peak else (0, 1)
    call = call_of(operands, writes=writes, **attrs)
    results = run(call, kernels[0](call), operands)
    made = dict(zip(("o", "lse", "peak"), results, strict=False))
    back = {n: x for n, x in operands.items() if n not in NOT_BACKWARD}
    back |= {"o": made["o"], "lse": made["lse"], "do": do}
    names = ("q", "k", "v", *learned(tuple(back)))
    call = call_of(back, writes=tuple(range(len(names))), backward=True, **attrs)
    grads = run(call, kernels[1](call), back)
    return made | {f"d{name}": x for name, x in zip(names, grads, strict=True) if x is not None}
