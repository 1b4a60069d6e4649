"""FP8 attention where no kernel takes it in FP8: decoded, by the kernel of dense attention, and encoded again.

The numbers are those of `attention_fp8` without the rounding of probabilities. It is also what keeps dropout in one
family: dense kernels drop in backward what they dropped in forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from te_ops.basic.attention_core import ATTENTION
from te_ops.basic.attention_fp8 import E4M3, output, output_scale_inv
from te_ops.graph import Node, Spec, Value
from te_ops.quantizers import Record
from te_ops.quantizers.codec import encode_fp8
from te_ops.registry import REGISTRY, ArchRange, Call, Kernel, Launch

PRIORITY = 5


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

    def __call__(self, *reads: Any) -> Any:
        dense = [x.dequantize() if isinstance(x, Record) else x for x in reads]
        made = self.launch(*dense)
        if self.place is None:
            return made
        results = [*made] if isinstance(made, tuple) else [made]
        v = reads[self.v]
        scale_inv = output_scale_inv(v.scale_inv, self.dropout)
        wide = results[self.place].float().div_(scale_inv)
        results[self.place] = output(encode_fp8(wide, E4M3), scale_inv, v.dtype)
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
