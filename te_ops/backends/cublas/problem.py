"""What a call asks of a GEMM library: one gemm, alone or with the bias add or cast after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_ops.graph import Node, Spec, Value
from te_ops.pointwise import Input, activations
from te_ops.registry import Call

_SUM = (Input(0) + Input(1), Input(1) + Input(0))
assert activations["bias"]().out[0] in _SUM


@dataclass(frozen=True)
class Problem:
    """y = op(a) op(b) (+ bias) in `dtype`.

    Attributes:
        layout: "nt" (a b^T), "nn" (a b) or "tn" (a^T b), as the gemm primitive says.
        dtype: of the result.
        a, b, bias: specs of the operands.
        places: where a, b and bias stand among the values that the call reads.
        fast: whether FP8 products may be summed in the tensor core's own, narrower accumulator.
        arch: of the device, "sm_90".
    """

    layout: str
    dtype: torch.dtype
    a: Spec
    b: Spec
    bias: Spec | None
    places: tuple[int, ...]
    fast: bool
    arch: str


def problem_of(call: Call) -> Problem | str:
    """The problem of a call, or why no GEMM with a bias or another result dtype solves it."""
    gemm = call.nodes[0]
    inputs = gemm.inputs
    dtype, bias = call.spec(gemm.out).dtype, None
    if len(call.nodes) > 1:
        found = _epilogue(call, gemm)
        if isinstance(found, str):
            return found
        dtype, bias = found
    values = inputs if bias is None else (*inputs, bias)
    return Problem(
        layout=gemm.attrs["layout"],
        dtype=dtype,
        a=call.spec(inputs[0]),
        b=call.spec(inputs[1]),
        bias=None if bias is None else call.spec(bias),
        places=tuple(call.reads.index(v) for v in values),
        fast=gemm.attrs.get("accumulation") == "fast",
        arch=call.arch,
    )


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
