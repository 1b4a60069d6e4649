"""What a call asks of a GEMM library: one gemm, alone or with a bias add, a cast or an accumulation after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from te_ops.basic.gemm import ACCUMULATE
from te_ops.graph import Node, Spec, Value
from te_ops.pointwise import Input, activations
from te_ops.registry import Call

_SUM = (Input(0) + Input(1), Input(1) + Input(0))
assert activations["bias"]().out[0] in _SUM


@dataclass(frozen=True)
class Problem:
    """y = op(a) op(b) (+ bias) in `dtype`, or added to a tensor of that dtype.

    Attributes:
        layout: "nt" (a b^T), "nn" (a b) or "tn" (a^T b), as the gemm primitive says.
        dtype: of the result.
        a, b, bias: specs of the operands.
        places: where a, b and bias, or what is added to, stand among the values that the call reads.
        fast: whether FP8 products may be summed in the tensor core's own, narrower accumulator.
        arch: of the device, "sm_90".
        accumulate: the product is added to its last operand.
    """

    layout: str
    dtype: torch.dtype
    a: Spec
    b: Spec
    bias: Spec | None
    places: tuple[int, ...]
    fast: bool
    arch: str
    device: torch.device
    accumulate: bool = False

    @property
    def extents(self) -> tuple[int, int, int]:
        """Rows and columns of y and what is contracted, of the shapes that the plan was made for."""
        return self.extents_of(self.a.shape, self.b.shape)

    def extents_of(self, a: Sequence[int], b: Sequence[int]) -> tuple[int, int, int]:
        """The same for operands of these (logical) shapes."""
        if self.layout == "tn":
            return a[-1], b[-1], math.prod(a[:-1])
        return math.prod(a[:-1]), b[0 if self.layout == "nt" else 1], a[-1]


def problem_of(call: Call) -> Problem | str:
    """The problem of a call, or why no GEMM with a bias or another result dtype solves it."""
    gemm = call.nodes[0]
    inputs = gemm.inputs
    dtype, bias, total = call.spec(gemm.out).dtype, None, None
    if len(call.nodes) > 1 and call.nodes[1].prim is ACCUMULATE:
        reason = _not_added(call, gemm)
        if reason is not None:
            return reason
        total = call.nodes[1].inputs[0]
        dtype = call.spec(total).dtype
    elif len(call.nodes) > 1:
        found = _epilogue(call, gemm)
        if isinstance(found, str):
            return found
        dtype, bias = found
    values = [v for v in (*inputs, bias, total) if v is not None]
    return Problem(
        layout=gemm.attrs["layout"],
        dtype=dtype,
        a=call.spec(inputs[0]),
        b=call.spec(inputs[1]),
        bias=None if bias is None else call.spec(bias),
        places=tuple(call.reads.index(v) for v in values),
        fast=gemm.attrs.get("accumulation") == "fast",
        arch=call.arch,
        device=call.device,
        accumulate=total is not None,
    )


def _not_added(call: Call, gemm: Node) -> str | None:
    """Why the library does not add the product to the tensor, None if it does."""
    if len(call.nodes) > 2 or gemm.out in call.writes:
        return "the library adds the product to a tensor, and nothing more"
    if call.nodes[1].inputs[1] != gemm.out or call.nodes[1].inputs[0] == gemm.out:
        return "the product is what is added to"
    return None


def _epilogue(call: Call, gemm: Node) -> tuple[torch.dtype, Value | None] | str:
    """Dtype of the result and the bias of a group, or why the library has no such epilogue."""
    node = call.nodes[1]
    if len(call.nodes) > 2 or node.prim.name != "pointwise":
        return "the library adds a bias or changes the result's dtype, and nothing more"
    if gemm.out in call.writes:
        return "the product itself is read elsewhere too, and the library writes one result"
    made, result = call.spec(gemm.out), call.spec(node.out)
    if node.inputs == (gemm.out,) and node.attrs["fn"].out == (Input(0),):
        return result.dtype, None
    others = [i for i, v in enumerate(node.inputs) if v != gemm.out]
    is_bias = (
        len(node.inputs) == 2
        and len(others) == 1
        and node.attrs["fn"].out[0] in _SUM
        and len(node.attrs["fn"].out) == 1
        and node.attrs["broadcast"][others[0]] == "row"
    )
    if not is_bias:
        return f"the library adds a bias and has no {node.attrs['fn'].name!r} epilogue"
    bias = node.inputs[others[0]]
    for what, dtype in (("bias", call.spec(bias).dtype), ("sum", result.dtype)):
        if dtype is not made.dtype:
            return f"the {what} is {dtype}, the product {made.dtype}; the library wants one dtype"
    return result.dtype, bias
