"""The one pointwise primitive, its gradient, fan-in sums, reductions, and the `@te.pointwise` decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require
from te_ops.op import Op, Scalar
from te_ops.pointwise import Const, Expr, Fn, Input, InputKind, Pair, evaluate
from te_ops.pointwise.expr import substitute

Broadcast = Literal["full", "row", "col", "scalar"]

_CAST = Fn("cast", ("value",), (Input(0),))


def _pointwise_infer(
    *specs: Spec,
    fn: Fn,
    dtype: torch.dtype,
    broadcast: tuple[Broadcast, ...],
    interleave: int | None = None,
) -> Spec:
    if len(specs) != len(fn.inputs):
        raise ShapeError(f"{fn.name} takes {len(fn.inputs)} inputs, got {len(specs)}")
    full = next((i for i, b in enumerate(broadcast) if b == "full"), None)
    if full is None:
        raise ShapeError(f"{fn.name}: at least one input must have the full shape")
    lead, width = specs[full].shape[:-1], _width(fn, full, specs[full], interleave)
    for i, (spec, kind) in enumerate(zip(specs, broadcast, strict=True)):
        if kind == "full":
            ok = spec.shape[:-1] == lead and len(spec.shape) == len(specs[full].shape)
            ok = ok and _width(fn, i, spec, interleave) == width
        elif kind == "row":
            ok = len(spec.shape) == 1 and _width(fn, i, spec, interleave) == width
        elif kind == "col":
            ok = spec.shape == lead
        else:
            ok = spec.shape == () or spec.shape == (1,)
        if not ok:
            raise ShapeError(
                f"{fn.name}: input {i} has shape {_show(spec.shape)}, which is not the {kind} shape that fits "
                f"{_show(specs[full].shape)}"
            )
    if not specs[full].shape:
        return Spec((), dtype)
    return Spec((*lead, width * len(fn.out)), dtype)


def _width(fn: Fn, i: int, spec: Spec, interleave: int | None) -> int:
    last = spec.shape[-1] if spec.shape else 1
    if fn.inputs[i] != "pair":
        return last
    require(
        last % 2 == 0, f"{fn.name}: a gated input needs an even last dimension, got {int(last)}"
    )
    if interleave:
        require(
            last % (2 * interleave) == 0,
            f"{fn.name}: last dimension {int(last)} is not a multiple of 2 x interleave = {2 * interleave}",
        )
    return last // 2


def _show(shape: tuple[int, ...]) -> str:
    return str(tuple(int(d) for d in shape))


@prim("pointwise", infer=_pointwise_infer, cheap=True)
def POINTWISE(
    *xs: torch.Tensor,
    fn: Fn,
    dtype: torch.dtype,
    broadcast: tuple[Broadcast, ...],
    interleave: int | None = None,
) -> torch.Tensor:
    """An interned expression over its inputs: computes in FP32 (FP64 for FP64), rounds once at its output."""
    inputs = [x.unsqueeze(-1) if b == "col" else x for x, b in zip(xs, broadcast, strict=True)]
    return evaluate(fn, *inputs, interleave=interleave, dtype=dtype)


def pointwise(
    g: Graph,
    fn: Fn,
    *values: Value,
    dtype: torch.dtype | None = None,
    broadcast: tuple[Broadcast, ...] | None = None,
    interleave: int | None = None,
) -> Value:
    """Emit `fn(*values)`; the output dtype defaults to the first full input's.

    Broadcast kinds follow from the shapes (0-dim: scalar, 1-d against more: row [N]); a per-row input
    ("col", shape = leading dimensions) must be named, since shapes alone can be ambiguous.
    """
    kinds = broadcast or _broadcast(g, values)
    if dtype is None:
        dtype = g.spec(values[kinds.index("full")]).dtype
    return g.call(POINTWISE, *values, fn=fn, dtype=dtype, broadcast=kinds, interleave=interleave)


def _broadcast(g: Graph, values: tuple[Value, ...]) -> tuple[Broadcast, ...]:
    shapes = [g.spec(v).shape for v in values]
    rank = max(len(s) for s in shapes)

    def kind(shape: tuple[int, ...]) -> Broadcast:
        if len(shape) == rank:
            return "full"
        if not shape:
            return "scalar"
        return "row" if len(shape) == 1 else "full"

    return tuple(kind(s) for s in shapes)


@gradient(POINTWISE)
def _pointwise_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value | None, ...]:
    return tuple(_input_gradient(g, node, i, dy) for i in range(len(node.inputs)))


def _input_gradient(g: Graph, node: Node, i: int, dy: Value) -> Value | None:
    spec = g.spec(node.inputs[i])
    if not spec.dtype.is_floating_point:
        return None
    fn: Fn = node.fn.grad(i)
    twin = _full_twin(node, i)
    if twin is not None:  # d(x + b)/db is d(x + b)/dx summed: one expression, written once
        dx = _input_gradient(g, node, twin, dy)
        return (
            None if dx is None else reduce(g, dx, over=_OVER[node.broadcast[i]], dtype=spec.dtype)
        )
    if fn.out[0] is Const(0.0) and len(set(fn.out)) == 1:
        return None
    reduced = node.broadcast[i] != "full"
    wide = torch.float64 if spec.dtype is torch.float64 else torch.float32
    last = len(node.inputs)
    passes_dy = len(fn.out) == 1 and fn.out[0] is Input(last)
    if passes_dy:
        dx = dy if reduced else cast(g, dy, spec.dtype)
    else:
        kept = [k for k, used in enumerate(fn.used) if used]
        inputs = (*node.inputs, dy)
        kinds = (*node.broadcast, "full")
        if not any(
            kinds[k] == "full" for k in kept
        ):  # e.g. d(scale * x)/dx read with a constant dy: keep dy's shape
            kept.append(last)
        dx = g.call(
            POINTWISE,
            *(inputs[k] for k in sorted(kept)),
            fn=select(fn, sorted(kept)),
            dtype=wide if reduced else spec.dtype,
            broadcast=tuple(kinds[k] for k in sorted(kept)),
            interleave=node.attrs.get("interleave"),
        )
    if not reduced:
        return dx
    return reduce(g, dx, over=_OVER[node.broadcast[i]], dtype=spec.dtype)


_OVER = {"row": "rows", "col": "cols", "scalar": "all"}


def _full_twin(node: Node, i: int) -> int | None:
    """A full input with the very gradient expression of broadcast input i."""
    if node.broadcast[i] == "full":
        return None
    wanted = node.fn.grad(i).out
    for k, kind in enumerate(node.broadcast):
        if (
            kind == "full"
            and node.fn.grad(k).out == wanted
            and node.fn.inputs[k] == node.fn.inputs[i]
        ):
            return k
    return None


def select(fn: Fn, kept: list[int]) -> Fn:
    """fn with only these inputs, renumbered; the others must be unused."""
    place = {old: new for new, old in enumerate(kept)}

    def renumber(node: Expr) -> Expr | None:
        return Input(place[node.payload[0]], node.payload[1]) if node.op == "input" else None

    return Fn(fn.name, tuple(fn.inputs[k] for k in kept), substitute(fn.out, renumber))


def cast(g: Graph, x: Value, dtype: torch.dtype | None) -> Value:
    """x in another dtype; no node when it has it already.

    Raises:
        ShapeError: x is not floating point: integers and complex numbers are not cast silently.
    """
    if not g.spec(x).dtype.is_floating_point:
        raise ShapeError(f"input is {g.spec(x).dtype}, the op takes floating point; cast it first")
    if dtype is None or g.spec(x).dtype is dtype:
        return x
    return g.call(POINTWISE, x, fn=_CAST, dtype=dtype, broadcast=("full",), interleave=None)


def _reduce_infer(spec: Spec, over: str, dtype: torch.dtype) -> Spec:
    shapes = {"rows": spec.shape[-1:], "cols": spec.shape[:-1], "all": ()}
    return Spec(shapes[over], dtype)


@prim("reduce", infer=_reduce_infer)
def REDUCE(x: torch.Tensor, over: str, dtype: torch.dtype) -> torch.Tensor:
    """Sum over rows (all leading dimensions), columns (the last) or all, accumulated in FP32 (FP64 for FP64)."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    if over == "rows":
        return (
            x.reshape(-1, x.shape[-1]).sum(0, dtype=wide).to(dtype) if x.dim() > 1 else x.to(dtype)
        )
    return (x.sum(-1, dtype=wide) if over == "cols" else x.sum(dtype=wide)).to(dtype)


def reduce(g: Graph, x: Value, *, over: str, dtype: torch.dtype) -> Value:
    """Emit a sum over "rows" -> [N], "cols" -> leading shape, or "all" -> 0-dim."""
    return g.call(REDUCE, x, over=over, dtype=dtype)


@gradient(REDUCE)
def _reduce_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value]:
    x = node.inputs[0]
    return (g.call(EXPAND, dy, g.shape(x), over=node.over, dtype=g.spec(x).dtype),)


@prim("expand", infer=lambda dy, shape, over, dtype: Spec(shape.shape, dtype), cheap=True)
def EXPAND(dy: torch.Tensor, shape: tuple[int, ...], over: str, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of a sum: dy repeated along what was summed."""
    return (dy.unsqueeze(-1) if over == "cols" else dy).to(dtype).expand(shape)


@gradient(EXPAND)
def _expand_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value | None, ...]:
    return (reduce(g, dy, over=node.over, dtype=g.spec(node.inputs[0]).dtype), None)


def _sum_infer(*specs: Spec, dtype: torch.dtype) -> Spec:
    for i, spec in enumerate(specs):
        require(
            spec.shape == specs[0].shape,
            f"a sum of shapes {_show(specs[0].shape)} and {_show(spec.shape)} (operand {i}); they must be equal",
        )
    return Spec(specs[0].shape, dtype)


@prim("sum", infer=_sum_infer, cheap=True)
def SUM(*xs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sum in operand order, accumulated in FP32 (FP64 for FP64), rounded once."""
    wide = torch.float64 if any(x.dtype is torch.float64 for x in xs) else torch.float32
    total = xs[0].to(wide)
    for x in xs[1:]:
        total = total + x
    return total.to(dtype)


@gradient(SUM)
def _sum_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value, ...]:
    return tuple(cast(g, dy, g.spec(v).dtype) for v in node.inputs)


# -- the decorator


class Row:
    """Annotation of a per-column vector [N] of `@te.pointwise`."""


class Col:
    """Annotation of a per-row value (shape = leading dimensions) of `@te.pointwise`."""


_NUMBERS = (float, int, bool, "float", "int", "bool")
_MARKS: dict[Any, Broadcast] = {
    Row: "row",
    "Row": "row",
    "te.Row": "row",
    Col: "col",
    "Col": "col",
    "te.Col": "col",
}
_PAIRS = (Pair, "Pair", "te.Pair")


class PointwiseOp(Op):
    """An op made from a function of expressions; see `te_ops.pointwise`."""

    function: Callable[..., Any]
    tensors: tuple[tuple[str, Any], ...] = ()
    numbers: ClassVar[dict[str, Any]] = {}
    num_inputs: int | None = None

    def __init__(self, *args: Any, interleave: int | None = None, **kwargs: Any) -> None:
        super().__init__()
        names = list(self.numbers)
        if len(args) > len(names):
            raise TypeError(
                f"{type(self).__name__} takes {len(names)} numbers ({', '.join(names)}), got {len(args)}"
            )
        given = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in self.numbers or name in given:
                raise TypeError(
                    f"{type(self).__name__} got an unexpected or repeated argument {name!r}"
                )
            given[name] = value
        for name, default in self.numbers.items():
            value = given.get(name, default)
            if value is inspect.Parameter.empty:
                raise TypeError(f"{type(self).__name__} needs a value for {name!r}")
            if not isinstance(value, Scalar | nn.Parameter | bool | int | float):
                raise TypeError(
                    f"{type(self).__name__}: {name} must be a number, a te.scalar or a 0-dim Parameter, "
                    f"not a {type(value).__name__}"
                )
            setattr(self, name, value)
        if interleave is not None and (not isinstance(interleave, int) or interleave < 1):
            raise PlanError(
                f"{type(self).__name__}: interleave must be a positive int or None, got {interleave!r}"
            )
        self.interleave = interleave

    def emit(self, g: Graph, *xs: Value) -> Value:
        """One pointwise node; run-time numbers are further inputs of it."""
        dtype = g.autocast_dtype or g.spec(xs[0]).dtype
        kinds: list[Broadcast] = [_MARKS.get(mark, "full") for _, mark in self.tensors]
        leaves: list[Any] = [
            Pair(Input(i, "gate"), Input(i, "linear")) if mark in _PAIRS else Input(i)
            for i, (_, mark) in enumerate(self.tensors)
        ]
        shapes: list[InputKind] = ["pair" if isinstance(leaf, Pair) else "value" for leaf in leaves]
        values = [cast(g, x, dtype) if k == "full" else x for x, k in zip(xs, kinds, strict=True)]
        arguments: dict[str, Any] = {}
        for name in self.numbers:
            value = getattr(self, name)
            if isinstance(value, Scalar | torch.Tensor):
                arguments[name] = Input(len(values))
                values.append(g.scalar(value) if isinstance(value, Scalar) else g.param(value))
                kinds.append("scalar")
                shapes.append("value")
            else:
                arguments[name] = value
        out = type(self).function(*leaves, **arguments)
        fn = Fn(type(self).__name__, tuple(shapes), out)
        return pointwise(
            g, fn, *values, dtype=dtype, broadcast=tuple(kinds), interleave=self.interleave
        )


def pointwise_op(function: Callable[..., Any]) -> type[PointwiseOp]:
    """`@te.pointwise`: an op from a function of expressions; the gradient is derived and it fuses like GELU.

    Parameters annotated `float`, `int` or `bool` are numbers (attributes, `te.scalar()` slots or 0-dim
    Parameters of the op); the others are tensors: plain (full), `te.Pair` (gated), `te.Row`, `te.Col`.
    The body uses Python operators and `te.math`.
    """
    tensors, numbers = [], {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation in _NUMBERS or isinstance(parameter.default, bool | int | float):
            numbers[name] = parameter.default
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise PlanError(
                f"{function.__name__}: @te.pointwise functions take named parameters only"
            )
        else:
            tensors.append((name, parameter.annotation))
    if not tensors:
        raise PlanError(f"{function.__name__}: @te.pointwise needs at least one tensor parameter")
    body = {
        "function": staticmethod(function),
        "tensors": tuple(tensors),
        "numbers": numbers,
        "num_inputs": len(tensors),
        "__doc__": function.__doc__,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
    }
    return type(function.__name__, (PointwiseOp,), body)
