"""Quantize as a node: outputs `row`, `col` and the observed amax; dequantize; explicit Quantize and Dequantize ops."""

from __future__ import annotations

from typing import Any

import torch

from te_ops.basic.arguments import FLOATS, flag
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Kind, Node, Spec, Value, gradient, prim, same
from te_ops.op import Op
from te_ops.quantizers import Quantizer, Record, Usage
from te_ops.quantizers.state import observe_amax


def _quantize_infer(x: Spec, *_: Spec, quantizer: Quantizer, **__: Any) -> tuple[Spec, Spec, Spec]:
    if not x.dtype.is_floating_point:
        raise ShapeError(f"cannot quantize a {x.dtype} value; quantizers take floating point")
    row = Spec(x.shape, x.dtype, Kind("record", quantizer, Usage.ROW))
    col = Spec(x.shape, x.dtype, Kind("record", quantizer, Usage.COL))
    return row, col, Spec((), torch.float32)


@prim("quantize", infer=_quantize_infer, n_out=3, cheap=True, differentiable=False, selective=True)
def QUANTIZE(
    x: torch.Tensor,
    *extras: torch.Tensor,
    quantizer: Quantizer,
    live: tuple[bool, ...],
    stream: int = 0,
    known: bool = False,
) -> tuple[Record | None, Record | None, torch.Tensor | None]:
    """(row record, column record, amax). Further inputs: the scale if the quantizer is stateful, then the seed.

    `known`: the amax comes instead of the scale, for a quantizer whose scale is made from it: x was quantized before.
    """
    rest = list(extras)
    state = rest.pop(0) if quantizer.stateful or known else None
    seed = rest.pop(0) + seed_offset(stream) if quantizer.stochastic else None
    return quantizer.records(x, row=live[0], col=live[1], state=state, seed=seed)


_STREAM_STEP = (
    0x9E3779B97F4A7C1  # odd, so that seeds of different streams never meet within 2^60 calls
)


def seed_offset(stream: int) -> int:
    """What a quantize node adds to the seed of its call, modulo 2^64 as int64 arithmetic has it."""
    return (stream * _STREAM_STEP + 2**63) % 2**64 - 2**63


@prim("amax", infer=lambda x: Spec((), torch.float32), differentiable=False)
def AMAX(x: torch.Tensor) -> torch.Tensor:
    """max |x| in FP32, NaN propagating, 0 for an empty tensor: what a calibrating region observes."""
    return observe_amax(x)


@prim(
    "transpose_record",
    infer=lambda r: Spec(r.shape, r.dtype, _other(r.kind)),
    cheap=True,
    differentiable=False,
)
def TRANSPOSE_RECORD(record: Record) -> Record:
    """The other usage of a record, from its bytes alone: nothing is rounded again."""
    other = record.transposed()
    if other is None:
        raise PlanError(f"a {record.quantizer.describe()} record has no exact other usage")
    return other


def _other(kind: Kind) -> Kind:
    return Kind("record", kind.quantizer, Usage.COL if kind.usage is Usage.ROW else Usage.ROW)


@prim("dequantize", infer=lambda r, dtype: Spec(r.shape, dtype), cheap=True)
def DEQUANTIZE(record: Record, dtype: torch.dtype) -> torch.Tensor:
    """The values of a record in its logical shape, rounded once to dtype."""
    return record.dequantize(dtype)


@gradient(DEQUANTIZE)
def _dequantize_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value]:
    return (dy,)


def _mark_roles(node: Node) -> tuple[tuple[str, str] | None, ...]:
    if node.phase.is_backward:
        return (("grad_output", "row"),) if node.attrs["backward"] else (None,)
    return (("input", "row"),) if node.attrs["forward"] else (None,)


@prim("quantize_mark", infer=same, roles=_mark_roles)
def MARK(
    x: torch.Tensor, forward: bool, backward: bool, quantizer: Quantizer | None = None
) -> torch.Tensor:
    """Where a user asked for quantization; the quantize pass replaces it (outside autocast it is nothing)."""
    return x


@gradient(MARK)
def _mark_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value]:
    return (g.call(MARK, dy, **node.attrs),)


@prim("cached_input", infer=same, cheap=True)
def CACHED(x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Where backward is to read a record of x instead of x; the quantize pass replaces it. Forward reads x."""
    return x


@gradient(CACHED)
def _cached_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value]:
    return (dy,)


class Quantize(Op):
    """Quantizes its input (forward) and/or the gradient that passes it (backward), by the recipe in force.

    Outside autocast it does nothing, unless a stateless `quantizer` is given, which then always applies. The value
    that flows on is the dequantized record; a reader that quantizes in the same format reuses the record.
    """

    def __init__(
        self, forward: bool = True, backward: bool = False, *, quantizer: Quantizer | None = None
    ) -> None:
        super().__init__()
        flag("Quantize", "forward", forward)
        flag("Quantize", "backward", backward)
        if quantizer is not None and not isinstance(quantizer, Quantizer):
            raise PlanError(
                f"Quantize: quantizer must be a te_ops quantizer, got a {type(quantizer).__name__}"
            )
        if quantizer is not None and quantizer.stateful:
            raise PlanError(
                "Quantize: a delayed-scaling quantizer needs state from a recipe; leave quantizer=None"
            )
        self.in_forward = forward
        self.in_backward = backward
        self.quantizer_value = quantizer

    def state_operands(self) -> dict[str, str]:
        """What it quantizes: the value and the gradient that pass."""
        marked = (("input", self.in_forward), ("grad_output", self.in_backward))
        return {operand: "quantize" for operand, on in marked if on}

    def emit(self, g: Graph, x: Value) -> Value:
        """A mark for the quantize pass."""
        return g.call(
            MARK,
            x,
            forward=self.in_forward,
            backward=self.in_backward,
            quantizer=self.quantizer_value,
        )


class Dequantize(Op):
    """A dense tensor from a QuantizedTensor (or a dense one, unchanged), in `dtype` or the nominal dtype."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if dtype is not None and dtype not in FLOATS:
            raise PlanError(
                f"Dequantize: dtype must be float16, bfloat16, float32 or float64, got {dtype}"
            )
        self.dtype = dtype

    def emit(self, g: Graph, x: Value) -> Value:
        """dequantize, if there is something to dequantize."""
        from te_ops.basic.pointwise import cast

        spec = g.spec(x)
        if spec.kind.name == "record":
            return g.call(DEQUANTIZE, x, dtype=self.dtype or spec.dtype)
        return cast(g, x, self.dtype)


__all__ = [
    "AMAX",
    "CACHED",
    "DEQUANTIZE",
    "MARK",
    "QUANTIZE",
    "TRANSPOSE_RECORD",
    "Dequantize",
    "Quantize",
]
