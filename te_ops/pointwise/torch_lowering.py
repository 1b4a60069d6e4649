"""The torch lowering: the reference of every pointwise function, on any device.

A function is compiled once into a flat list of torch calls. It computes in FP32 (FP64 if an input
is FP64) and rounds once, at its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from te_ops.errors import PlanError, ShapeError
from te_ops.pointwise.expr import Expr, float32, walk
from te_ops.pointwise.function import Fn
from te_ops.pointwise.table import OPERATORS

T = TypeVar("T")
Tensors: TypeAlias = Sequence[torch.Tensor | None]
# torch gives it no types.
_broadcast_shapes: Callable[..., torch.Size] = torch.broadcast_shapes

HALF = frozenset({torch.float16, torch.bfloat16})
FP8 = frozenset(
    {
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    }
)


class Instruction(NamedTuple):
    """`slots[result] = function(*slots[arguments])`; then the `dead` slots are dropped."""

    function: Callable[..., Any]
    arguments: tuple[int, ...]
    result: int
    dead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled function.

    Attributes:
        initial: the slots before a call: a place per component read, constants, places for results.
        steps: the calls.
        outputs: the slot of each output component.
        complete: whether each output reads every input that the function reads, so that it has the
            shape of the result by broadcasting.
    """

    initial: tuple[Any, ...]
    steps: tuple[Instruction, ...]
    outputs: tuple[int, ...]
    complete: bool

    def run(self, components: Sequence[torch.Tensor]) -> list[Any]:
        """The output components in the compute dtype; one that reads nothing is a Python float."""
        slots = [*components, *self.initial[len(components) :]]
        for function, arguments, result, dead in self.steps:
            slots[result] = function(*[slots[k] for k in arguments])
            for k in dead:
                slots[k] = None
        return [slots[k] for k in self.outputs]


@lru_cache(maxsize=4096)
def compile_torch(fn: Fn, dtype: torch.dtype) -> Program:
    """`fn` as torch calls on its `leaves` that compute in `dtype`."""
    nodes = walk(fn.out)
    constants = [node for node in nodes if node.is_const]
    inner = [node for node in nodes if not node.is_leaf]
    slot = {node: k for k, node in enumerate((*fn.leaves, *constants, *inner))}
    last = {slot[arg]: at for at, node in enumerate(inner) for arg in node.args if not arg.is_const}
    kept = {slot[out] for out in fn.out}
    dead: list[list[int]] = [[] for _ in inner]
    for k, at in last.items():
        if k not in kept:
            dead[at].append(k)
    steps = tuple(
        Instruction(
            _torch(node, dtype), tuple(slot[arg] for arg in node.args), slot[node], tuple(unread)
        )
        for node, unread in zip(inner, dead, strict=True)
    )
    initial = (
        [None] * len(fn.leaves) + [_number(node, dtype) for node in constants] + [None] * len(inner)
    )
    reads = [{node.payload[0] for node in walk((out,)) if node.op == "input"} for out in fn.out]
    complete = all(len(read) == sum(fn.used) for read in reads)
    return Program(tuple(initial), steps, tuple(slot[out] for out in fn.out), complete)


def _number(node: Expr, dtype: torch.dtype) -> float:
    """A constant in the compute dtype, as the number that torch's calls take."""
    return float(node.payload) if dtype is torch.float64 else float32(node.payload)


def _torch(node: Expr, dtype: torch.dtype) -> Callable[..., Any]:
    """The torch call of an operator."""
    if node.op == "where" and node.args[1].is_const and node.args[2].is_const:
        # With two Python floats torch.where would answer in the default dtype. The tensor is made
        # on the device: a copy from the host would wait for it, and could not be captured.
        return lambda mask, a, b: torch.where(
            mask, a, torch.full((), b, dtype=dtype, device=mask.device)
        )
    return OPERATORS[node.op].torch


@lru_cache(maxsize=4096)
def _native(fn: Fn) -> tuple[Callable[..., torch.Tensor], tuple[int, ...]] | None:
    """The torch call that computes `fn` on 16-bit tensors with one rounding, and its inputs."""
    out = fn.out[0]
    row = OPERATORS.get(out.op)
    inputs = all(arg.op == "input" and arg.payload[1] == "value" for arg in out.args)
    if len(fn.out) > 1 or row is None or not row.native or not (inputs and all(fn.used)):
        return None
    return row.torch, tuple(arg.payload[0] for arg in out.args)


def evaluate(
    fn: Fn,
    *tensors: torch.Tensor | None,
    interleave: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`fn` of tensors, computed in FP32 (FP64 if an input is FP64) and rounded once to `dtype`.

    Args:
        fn: the function.
        *tensors: one per input, broadcast against each other; None where `fn.used` is false. A pair
            input has 2N features: gate then linear, or alternating blocks of `interleave` features.
        interleave: block width of pair inputs and of a pair output; None for halves.
        dtype: of the output; by default the promoted dtype of the inputs that have the output's
            shape. FP8 saturates: values beyond the largest finite one become it, NaN stays.

    Returns:
        A new tensor with the broadcast shape of the inputs given (with 2N features if `fn.out` is a
        pair).

    Raises:
        PlanError: a wrong number of tensors, or None for an input that is read.
        ShapeError: an odd or indivisible pair, or shapes that do not broadcast.
    """
    if len(tensors) != len(fn.inputs):
        raise PlanError(f"{fn.name} takes {len(fn.inputs)} tensors, {len(tensors)} given")
    given = [t for t in tensors if t is not None]
    if not given:
        raise PlanError(f"{fn.name}: at least one tensor is needed for the shape of the result")
    if interleave is not None and interleave < 1:
        raise ShapeError(
            f"{fn.name}: interleave = {interleave}, a block width >= 1 or None expected"
        )
    if dtype is None:
        dtype = _result_dtype(fn, tensors)
    if dtype in HALF and all(t.dtype is dtype for t in given):
        native = _native(fn)
        if native is not None:
            function, order = native
            return _checked(
                fn, tensors, lambda: function(*(_tensor(fn, tensors, k) for k in order))
            )
    compute = torch.float64 if any(t.dtype is torch.float64 for t in given) else torch.float32
    program = compile_torch(fn, compute)
    components = [_component(fn, tensors, leaf, compute, interleave) for leaf in fn.leaves]
    results = _checked(fn, tensors, lambda: program.run(components))
    if not (program.complete and len(given) == sum(fn.used)):
        shape = _checked(fn, tensors, lambda: _result_shape(fn, tensors))
        results = [_full(result, shape, compute, given[0].device) for result in results]
    if len(results) == 1:
        # An output that is an input is copied: a result never aliases an argument.
        return _round(results[0], dtype, copy=fn.out[0].is_leaf)
    return _pack(fn, results, dtype, interleave)


def _tensor(fn: Fn, tensors: Tensors, index: int) -> torch.Tensor:
    """An input that the function reads."""
    tensor = tensors[index]
    if tensor is None:
        raise PlanError(f"{fn.name} reads input {index}, None given")
    return tensor


def _component(
    fn: Fn, tensors: Tensors, leaf: Expr, compute: torch.dtype, interleave: int | None
) -> torch.Tensor:
    """The tensor of an input component in the compute dtype."""
    index, part = leaf.payload
    tensor = _tensor(fn, tensors, index)
    if part != "value":
        tensor = _half(fn, index, tensor, part == "linear", interleave)
    return tensor.to(compute)


def _half(
    fn: Fn, index: int, tensor: torch.Tensor, linear: bool, interleave: int | None
) -> torch.Tensor:
    """The gate or linear half of a pair input."""
    features = tensor.shape[-1] if tensor.dim() else 1
    width = features // 2
    block = width if interleave is None else interleave
    if features % 2 or (block and width % block):
        rule = "an even number" if interleave is None else f"a multiple of {2 * interleave}"
        raise ShapeError(f"{fn.name}: pair input {index} has {features} features, {rule} expected")
    if interleave is None:
        return tensor.narrow(-1, width if linear else 0, width)
    blocks = torch.unflatten(tensor, -1, (width // block, 2, block))
    return blocks.select(-2, int(linear)).flatten(-2)


def _pack(
    fn: Fn, halves: Sequence[torch.Tensor], dtype: torch.dtype, interleave: int | None
) -> torch.Tensor:
    """A pair output in one tensor of 2N features: the halves, or their alternating blocks."""
    rounded = [_round(half, dtype) for half in halves]
    if interleave is None:
        return torch.cat(rounded, -1)
    features = rounded[0].shape[-1]
    if features % interleave:
        raise ShapeError(
            f"{fn.name}: {features} features per half, a multiple of {interleave} expected"
        )
    blocks = [torch.unflatten(half, -1, (features // interleave, interleave)) for half in rounded]
    return torch.stack(blocks, -2).flatten(-3)


def _round(result: torch.Tensor, dtype: torch.dtype, copy: bool = False) -> torch.Tensor:
    """The one rounding; FP8 saturates, where a cast of some torch versions gives NaN."""
    if dtype in FP8:
        largest = torch.finfo(dtype).max
        result = result.clamp(-largest, largest)
    return result.to(dtype, copy=copy)


def _full(
    result: torch.Tensor | float, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`result` in the shape of all inputs, where it does not read each of them."""
    if not isinstance(result, torch.Tensor):
        return torch.full(shape, result, dtype=dtype, device=device)
    return result if result.shape == shape else result.expand(shape).contiguous()


def _value_shape(kind: str, tensor: torch.Tensor) -> torch.Size:
    """The shape that an input has per component."""
    if kind == "value":
        return tensor.shape
    return torch.Size((*tensor.shape[:-1], tensor.shape[-1] // 2))


def _result_shape(fn: Fn, tensors: Tensors) -> torch.Size:
    shapes = [
        _value_shape(kind, t) for kind, t in zip(fn.inputs, tensors, strict=True) if t is not None
    ]
    return _broadcast_shapes(*shapes)


def _result_dtype(fn: Fn, tensors: Tensors) -> torch.dtype:
    """The promoted dtype of the inputs that have the result's shape; FP32 if that is no float."""
    given = [t for t in tensors if t is not None]
    dtypes = {t.dtype for t in given}
    if len(dtypes) > 1:
        shape = _checked(fn, tensors, lambda: _result_shape(fn, tensors))
        pairs = [(k, t) for k, t in zip(fn.inputs, tensors, strict=True) if t is not None]
        full = {t.dtype for kind, t in pairs if _value_shape(kind, t) == shape}
        dtypes = full or dtypes
    dtype = reduce(torch.promote_types, dtypes)
    return dtype if dtype.is_floating_point else torch.float32


def _checked(fn: Fn, tensors: Tensors, compute: Callable[[], T]) -> T:
    """`compute()`, with torch's complaint about shapes as ours."""
    try:
        return compute()
    except RuntimeError as error:
        shapes = [tuple(t.shape) for t in tensors if t is not None]
        try:
            _result_shape(fn, tensors)
        except RuntimeError:
            raise ShapeError(f"{fn.name}: shapes {shapes} do not broadcast") from error
        raise
