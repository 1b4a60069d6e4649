"""Two kernels: a single primitive by its reference, and a fused group by the composition of its members'."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from te_ops.graph import Node, Value
from te_ops.quantizers import Record
from te_ops.registry import REGISTRY, ArchRange, Call, Kernel, Launch, Rule


def bind_reference(call: Call) -> Launch:
    """Launch of one node: its primitive's reference with the attributes bound."""
    node = call.node
    function = call_reference(call, node)
    if len(call.reads) != len(node.inputs):  # a value is read twice, and comes once
        places = tuple(call.reads.index(v) for v in node.inputs)
        function = _spread(function, places)
    if len(call.specs_of(node)) == 1 and node.prim.n_out == 1:
        return function
    picked = tuple(v.index for v in call.writes)
    if len(picked) == 1:
        only = picked[0]
        return lambda *xs: function(*xs)[only]

    def several(*xs: Any) -> tuple[Any, ...]:
        results = function(*xs)
        return tuple(results[i] for i in picked)

    return several


def _spread(function: Launch, places: tuple[int, ...]) -> Launch:
    return lambda *xs: function(*(xs[i] for i in places))


def call_reference(call: Call, node: Node, **changed: Any) -> Launch:
    """The reference of a node with its attributes (and what a selective one must know) bound."""
    attrs = {**node.attrs, **changed}
    if node.prim.selective:
        attrs["live"] = call.live(node)
    if node.prim.placed:
        attrs["device"] = call.device
    return partial(node.prim.reference, **attrs) if attrs else node.prim.reference


def bind_composed(call: Call) -> Launch:
    """The group's reference (rounding contract): members in order; a value that is also written is rounded first and
    later members read the rounded one; a value not written stays FP32 unless the rule is exact."""
    written = set(call.writes)
    exact = call.rule is None or call.rule.exact
    members = []
    for node in call.nodes:
        specs = call.specs_of(node)
        outs = tuple(Value(node.id, i) for i in range(len(specs)))
        inner = not exact and not any(v in written for v in outs) and specs[0].kind.name == "dense"
        inner = inner and specs[0].dtype in (torch.bfloat16, torch.float16)
        changed = {"dtype": torch.float32} if inner and "dtype" in node.attrs else {}
        members.append((node, outs, specs, inner, call_reference(call, node, **changed)))

    def launch(*xs: Any) -> Any:
        values: dict[Value, Any] = dict(zip(call.reads, xs, strict=True))
        for node, outs, specs, inner, function in members:
            inputs = [values[v] for v in node.inputs]
            if inner:
                inputs = [_widen(x) for x in inputs]
            results = function(*inputs)
            if len(outs) == 1 and node.prim.n_out == 1:
                results = (results,)
            for out, spec, value in zip(outs, specs, results, strict=True):
                rounds = not inner and isinstance(value, torch.Tensor) and spec.kind.name == "dense"
                if isinstance(
                    value, Record
                ):  # made from an unrounded value, but it stands for the rounded one
                    value = replace(value, dtype=spec.dtype)
                values[out] = value.to(spec.dtype) if rounds else value
        made = tuple(values[v] for v in call.writes)
        return made[0] if len(made) == 1 else made

    return launch


def _widen(x: Any) -> Any:
    is_half = isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if is_half else x


def composed(rule: Rule | str, *, priority: int = 1) -> Kernel:
    """A kernel that runs any group of a rule by its members' references: fused kernels are tested against it."""
    name = rule if isinstance(rule, str) else rule.name
    return Kernel(name, f"reference.composed.{name}", bind_composed, ArchRange("any"), priority)


def register() -> None:
    """Add the reference kernel, which takes every single primitive on every device."""
    REGISTRY.add(
        Kernel("*", "reference", bind_reference, ArchRange("any"), priority=0), replace=True
    )
