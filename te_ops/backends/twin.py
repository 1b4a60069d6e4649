"""FP8 attention where no kernel takes it in FP8: decoded, by the kernel of dense attention, and encoded again.

The numbers are those of `attention_fp8` without the rounding of probabilities. It is also what keeps dropout in one
family: dense kernels drop in backward what they dropped in forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from te_ops.basic.attention_core import ATTENTION
from te_ops.basic.attention_fp8 import E4M3, output, output_scale_inv
from te_ops.basic.quantize import DEQUANTIZE, QUANTIZE
from te_ops.graph import Graph, Node, Prim, Spec, Value
from te_ops.quantizers import Float8Quantizer
from te_ops.registry import REGISTRY, ArchRange, Call, Kernel, Launch

PRIORITY = 5
ENCODER = Float8Quantizer(E4M3)
"""It is given its scale, as delayed scaling is."""


def dense_call(call: Call) -> Call:
    """The same attention over dense operands."""
    old = call.node
    node = Node(old.id, ATTENTION, old.inputs, old.attrs, old.phase, old.scope, old.path)
    dense = {
        v: Spec(s.shape, s.dtype) if s.kind.name == "record" else s for v, s in call.specs.items()
    }
    return replace(call, nodes=(node,), specs=dense, rule=None)


def _kernel(call: Call) -> Kernel | None:
    dense = dense_call(call)
    return next((k for k in REGISTRY.kernels(ATTENTION.name) if k.reason(dense) is None), None)


def refuse(call: Call) -> str | None:
    """None if a kernel takes the dense twin of the call."""
    return None if _kernel(call) else "no kernel takes the same attention over dense operands"


def _alone(call: Call, prim: Prim, specs: tuple[Spec, ...], **attrs: Any) -> Launch:
    """The launch of one node for its first output, on the device of a call, by the kernel that a plan would choose."""
    g = Graph()
    xs = tuple(g.input(i, spec) for i, spec in enumerate(specs))
    outs = g.calls(prim, *xs, **attrs)
    known = {v: g.spec(v) for v in (*xs, *outs)}
    own = Call((g.node(outs[0]),), xs, outs[:1], known, call.device, call.arch, call.align)
    candidates = (*REGISTRY.kernels(prim.name), *REGISTRY.kernels("*"))
    return next(k for k in candidates if k.reason(own) is None).bind(own)


class _Twin:
    """A launch: decode, attend, encode."""

    def __init__(self, call: Call) -> None:
        kernel = _kernel(call)
        assert kernel is not None, "refuse() was asked"
        node = call.node
        self.names: tuple[str, ...] = node.operands
        self.v = call.reads.index(dict(zip(self.names, node.inputs, strict=True))["v"])
        self.place = {v: i for i, v in enumerate(call.writes)}.get(Value(node.id, 0))
        self.dropout: float = node.dropout
        self.launch = kernel.bind(dense_call(call))
        specs = [call.spec(v) for v in call.reads]
        self.decode = {
            i: _alone(call, DEQUANTIZE, (spec,), dtype=spec.dtype)
            for i, spec in enumerate(specs)
            if spec.kind.name == "record"
        }
        o, scale = call.spec(Value(node.id, 0)), Spec((1,), torch.float32)
        given = (Spec(o.shape, o.dtype), scale)
        self.encode = _alone(call, QUANTIZE, given, quantizer=ENCODER, stream=0)

    def __call__(self, *reads: Any) -> Any:
        dense = [self.decode[i](x) if i in self.decode else x for i, x in enumerate(reads)]
        made = self.launch(*dense)
        if self.place is None:
            return made
        results = [*made] if isinstance(made, tuple) else [made]
        v = reads[self.v]
        scale_inv = output_scale_inv(v.scale_inv, self.dropout)
        codes = self.encode(results[self.place], scale_inv.reciprocal().view(1)).data
        results[self.place] = output(codes, scale_inv, v.dtype)
        return results[0] if len(results) == 1 else tuple(results)


def bind(call: Call) -> Launch:
    """The launch of an attention_fp8 call."""
    return _Twin(call)


KERNEL = Kernel(
    runs="attention_fp8",
    name="twin.attention_fp8",
    bind=bind,
    arch=ArchRange("cuda"),
    priority=PRIORITY,
    refuse=refuse,
)


def register() -> None:
    """Add the kernel; safe to call again."""
    REGISTRY.add(KERNEL, replace=True)


__all__ = ["KERNEL", "dense_call", "refuse", "register"]
