"""What a call asks of a GEMM library: one gemm, alone or with sums, a cast or an accumulation after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from te_ops.basic.gemm import ACCUMULATE
from te_ops.basic.pointwise import SUM
from te_ops.graph import Node, Spec, Value
from te_ops.pointwise.expr import Expr
from te_ops.registry import Call


@dataclass(frozen=True)
class Problem:
    """y = op(a) op(b) (+ bias) (+ c) in `dtype`, or added to a tensor of that dtype.

    Attributes:
        layout: "nt" (a b^T), "nn" (a b) or "tn" (a^T b), as the gemm primitive says.
        dtype: of the result.
        a, b, bias, c: specs of the operands; c is of y's shape.
        places: where a, b, bias and c, or what is added to, stand among the values that the call reads.
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
    c: Spec | None = None
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
    dtype, total, more = call.spec(gemm.out).dtype, None, _Sums()
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
        dtype, more = call.spec(call.nodes[1].out).dtype, found
    bias, c = more.bias, more.c
    values = [v for v in (*inputs, bias, c, total) if v is not None]
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
        c=None if c is None else call.spec(c),
        accumulate=total is not None,
    )


def _not_added(call: Call, gemm: Node) -> str | None:
    """Why the library does not add the product to the tensor, None if it does."""
    if len(call.nodes) > 2 or gemm.out in call.writes:
        return "the library adds the product to a tensor, and nothing more"
    if call.nodes[1].inputs[1] != gemm.out or call.nodes[1].inputs[0] == gemm.out:
        return "the product is what is added to"
    return None


@dataclass(frozen=True)
class _Sums:
    """What is added to a product: a bias, one a column, and a value of the product's shape."""

    bias: Value | None = None
    c: Value | None = None


def _epilogue(call: Call, gemm: Node) -> _Sums | str:
    """What a group adds to its product, or why the library has no such epilogue."""
    node = call.nodes[1]
    if len(call.nodes) > 2 or node.prim.name not in ("pointwise", SUM.name):
        return "the library adds a bias or a matrix or changes the result's dtype, and nothing more"
    if gemm.out in call.writes:
        return "the product itself is read elsewhere too, and the library writes one result"
    found = _added(node, gemm)
    if found is None:
        name = node.attrs["fn"].name if node.prim is not SUM else SUM.name
        return f"the library adds a bias and a matrix, and has no {name!r} epilogue"
    made, result = call.spec(gemm.out), call.spec(node.out)
    dtypes = {"bias": found.bias, "matrix that is added": found.c}
    given = {what: call.spec(v).dtype for what, v in dtypes.items() if v is not None}
    for what, dtype in (*given.items(), *([("sum", result.dtype)] if given else [])):
        if dtype is not made.dtype:
            return f"the {what} is {dtype}, the product {made.dtype}; the library wants one dtype"
    return found


def _added(node: Node, gemm: Node) -> _Sums | None:
    """The values that a node adds to the product, which it takes once; None if it does more."""
    if node.prim is SUM:
        terms, kinds = list(range(len(node.inputs))), ["full"] * len(node.inputs)
    else:
        outs = node.attrs["fn"].out
        terms, kinds = _terms(outs[0]) if len(outs) == 1 else [], list(node.attrs["broadcast"])
    if sorted(terms) != list(range(len(node.inputs))) or node.inputs.count(gemm.out) != 1:
        return None
    found: dict[str, Value] = {}
    for value, kind in zip(node.inputs, kinds, strict=True):
        if value == gemm.out and kind == "full":
            continue
        if kind not in ("row", "full") or kind in found:
            return None
        found[kind] = value
    return _Sums(found.get("row"), found.get("full")) if gemm.out not in found.values() else None


def _terms(e: Expr) -> list[int]:
    """The inputs that an expression is the sum of, [-1] for another one."""
    if e.op == "add":
        return [i for arg in e.args for i in _terms(arg)]
    return [e.payload[0] if e.op == "input" and e.payload[1] == "value" else -1]
