"""Structure of a pipeline: Reshape, Identity, Add, ConstantScale, extra inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_ops.attrs import Dim
from te_ops.basic.arguments import floating, integer, number, show
from te_ops.basic.pointwise import SUM, pointwise
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require
from te_ops.op import Op, Scalar
from te_ops.pointwise import activations

# -- reshapes: views, whose gradient is a view in the shape of the input


def _resolve(source: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with its -1 filled in: by the source's symbol where that is the only one."""
    total, known = math.prod(source), math.prod(size for size in shape if size != -1)
    if -1 not in shape:
        require(total == known, f"shape {show(source)} has {total} elements, {shape} holds {known}")
        return shape
    require(
        total % known == 0,
        f"shape {show(source)} has {total} elements, no multiple of {known} as {shape} needs",
    )
    symbols = [size for size in source if isinstance(size, Dim)]
    static = math.prod(size for size in source if not isinstance(size, Dim))
    free = symbols[0] if len(symbols) == 1 and static == known else total // known
    return tuple(free if size == -1 else size for size in shape)


def _reshape_infer(x: Spec, shape: tuple[int, ...]) -> Spec:
    return x.like(_resolve(x.shape, shape))


@prim("reshape", infer=_reshape_infer, nature="view")
def RESHAPE(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """x in `shape`; one size may be -1, and is worked out anew at each replay."""
    return x.reshape(_resolve(tuple(x.shape), shape))


def _reshape_like_infer(x: Spec, shape: Spec) -> Spec:
    require(
        math.prod(x.shape) == math.prod(shape.shape),
        f"shape {show(x.shape)} cannot be read as {show(shape.shape)}: element counts differ",
    )
    return x.like(shape.shape)


@prim("reshape_like", infer=_reshape_like_infer, nature="view")
def RESHAPE_LIKE(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """x in the shape of another value, an operand because a plan serves many row counts."""
    return x.reshape(shape)


def _reshape_tail_infer(x: Spec, count: int, tail: tuple[int, ...]) -> Spec:
    lead, last = x.shape[: len(x.shape) - count], x.shape[len(x.shape) - count :]
    require(
        len(last) == count and math.prod(last) == math.prod(tail),
        f"the last {count} dimensions of {show(x.shape)} do not hold the elements of {tail}",
    )
    return x.like((*lead, *tail))


@prim("reshape_tail", infer=_reshape_tail_infer, nature="view")
def RESHAPE_TAIL(x: torch.Tensor, count: int, tail: tuple[int, ...]) -> torch.Tensor:
    """The last `count` dimensions of x read as `tail`; the leading ones stay."""
    return x.reshape(*x.shape[: x.dim() - count], *tail)


@gradient(RESHAPE)
@gradient(RESHAPE_TAIL)
def _reshape_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value]:
    return (g.call(RESHAPE_LIKE, dy, g.shape(node.inputs[0])),)


@gradient(RESHAPE_LIKE)
def _reshape_like_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value, None]:
    return g.call(RESHAPE_LIKE, dy, g.shape(node.inputs[0])), None


class Reshape(Op):
    """x in `shape`, which may hold one -1; its gradient has the shape of x.

    A plan made for one row count serves others: `Reshape((-1, 8))` and `Reshape((4, -1, 8))` follow
    their input.

    Raises:
        ShapeError: more than one -1, a size below -1, a -1 beside a 0, or an input whose number of
            elements does not fit.
    """

    def __init__(self, shape: int | Sequence[int]) -> None:
        super().__init__()
        items = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        self.shape = tuple(integer("Reshape", "shape", item) for item in items)
        if min(self.shape, default=0) < -1 or self.shape.count(-1) > 1:
            raise ShapeError(
                f"Reshape: shape takes sizes of at least 0 and at most one -1, got {self.shape}"
            )
        if -1 in self.shape and 0 in self.shape:
            raise ShapeError(
                f"Reshape: the -1 in {self.shape} is ambiguous beside a 0; write the size"
            )

    def emit(self, g: Graph, x: Value) -> Value:
        """reshape, a view."""
        return g.call(RESHAPE, x, shape=self.shape)

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return str(self.shape)


class Identity(Op):
    """Its input, unchanged; no node."""

    def emit(self, g: Graph, x: Value) -> Value:
        """The input."""
        return x


# -- sums


def add(g: Graph, *values: Value) -> Value:
    """The sum of values of one shape in their common dtype; FP32 (FP64 for FP64), rounded once."""
    for value in values:
        floating(g.spec(value))
    dtypes = [g.spec(value).dtype for value in values]
    dtype = dtypes[0]
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    if len(values) > 2:
        return g.call(SUM, *values, dtype=dtype)
    return pointwise(g, activations["add"](), *values, dtype=dtype, broadcast=("full", "full"))


class Add(Op):
    """The sum of two or more inputs of one shape: accumulated in FP32 in their order, rounded once.

    The result has the inputs' common dtype (`torch.promote_types`).

    Raises:
        ShapeError: fewer than two inputs, or shapes that differ.
    """

    num_inputs = None

    def emit(self, g: Graph, *xs: Value) -> Value:
        """One pointwise node for two inputs, one sum node for more."""
        if len(xs) < 2:
            raise ShapeError(f"Add: takes two inputs or more, got {len(xs)}")
        return add(g, *xs)


class ConstantScale(Op):
    """x times `scale`, and its gradient too: dx = scale * dy.

    `scale` is a float, or a `te.scalar` whose value may change from call to call without a new
    plan.

    Raises:
        PlanError: a float that is not finite.
    """

    def __init__(self, scale: float | Scalar) -> None:
        super().__init__()
        self.scale = scale if isinstance(scale, Scalar) else number("ConstantScale", "scale", scale)

    def emit(self, g: Graph, x: Value) -> Value:
        """One pointwise node."""
        floating(g.spec(x))
        if isinstance(self.scale, Scalar):
            fn, scale = activations["mul"](), g.scalar(self.scale)
            return pointwise(g, fn, x, scale, broadcast=("full", "scalar"))
        return pointwise(g, activations["scale"](self.scale), x)

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return str(self.scale)


# -- extra inputs and outputs of a pipeline


def _refuse_in_place(op: str, in_place: Any) -> None:
    if in_place is not False:
        raise PlanError(
            f"{op}: in_place={in_place!r} is not needed: the sum fuses with the GEMM or norm next "
            "to it and overwrites no tensor of the caller; leave it out"
        )


class MakeExtraOutput(Op):
    """x, and x once more as an extra output of the pipeline; the gradients of both add up.

    `in_place` is there for Transformer Engine's users and may only be False: nothing has to be
    overwritten for the gradient sum to fuse.

    Raises:
        PlanError: `in_place=True`.
    """

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        _refuse_in_place("MakeExtraOutput", in_place)

    def emit(self, g: Graph, x: Value) -> tuple[Value, Value]:
        """The input twice."""
        return x, x


class AddExtraInput(Op):
    """x plus an extra input of the pipeline, of the same shape; rounded once to their common dtype.

    `in_place` is there for Transformer Engine's users and may only be False: nothing has to be
    overwritten for the sum to fuse.

    Raises:
        PlanError: `in_place=True`.
        ShapeError: the shapes differ.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        _refuse_in_place("AddExtraInput", in_place)

    def emit(self, g: Graph, x: Value, extra: Value) -> Value:
        """One pointwise node."""
        return add(g, x, extra)


__all__ = [
    "RESHAPE",
    "RESHAPE_LIKE",
    "RESHAPE_TAIL",
    "Add",
    "AddExtraInput",
    "ConstantScale",
    "Identity",
    "MakeExtraOutput",
    "Reshape",
    "add",
]
