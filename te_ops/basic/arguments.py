"""Checks of arguments, one place for all ops: the message names the op, the value and the rule."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Spec, require

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDICES = (torch.int32, torch.int64)


def positive_int(op: str, name: str, value: Any) -> int:
    """A size or count of at least 1.

    Raises:
        ShapeError: it is not an integer, or below 1.
    """
    number = integer(op, name, value)
    if number < 1:
        raise ShapeError(f"{op}: {name} must be at least 1, got {number}")
    return number


def integer(op: str, name: str, value: Any) -> int:
    """An int or what stands for one (numpy integers); a bool or a float is a mistake.

    Raises:
        ShapeError: it is not an integer.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ShapeError(f"{op}: {name} must be an int, got {value!r}") from None


def sizes(op: str, name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """One size or a non-empty sequence of sizes, as a tuple.

    Raises:
        ShapeError: it is empty, or an item is not an integer of at least 1.
    """
    items = tuple(value) if isinstance(value, Sequence) else (value,)
    if not items:
        raise ShapeError(f"{op}: {name} must hold at least one size, got {value!r}")
    return tuple(positive_int(op, name, item) for item in items)


def number(
    op: str, name: str, value: Any, *, low: float = -math.inf, high: float = math.inf
) -> float:
    """A finite number within [low, high].

    Raises:
        PlanError: it is not a number, not finite, or outside.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"{op}: {name} must be a number, got {value!r}")
    if not (math.isfinite(value) and low <= value <= high):
        rule = "" if (low, high) == (-math.inf, math.inf) else f" and within [{low:g}, {high:g}]"
        raise PlanError(f"{op}: {name} must be finite{rule}, got {value!r}")
    return float(value)


def flag(op: str, name: str, value: Any) -> bool:
    """A bool, and nothing that only counts as one.

    Raises:
        PlanError: it is not a bool.
    """
    if not isinstance(value, bool):
        raise PlanError(f"{op}: {name} must be True or False, got {value!r}")
    return value


def empty(
    op: str, shape: tuple[int, ...], device: Any, dtype: torch.dtype | None
) -> torch.nn.Parameter:
    """A parameter without values, in the default dtype if none is given.

    Raises:
        PlanError: the dtype is not FP16, BF16, FP32 or FP64.
    """
    dtype = dtype or torch.get_default_dtype()
    if dtype not in FLOATS:
        raise PlanError(f"{op}: dtype must be float16, bfloat16, float32 or float64, got {dtype}")
    return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


def floating(x: Spec) -> None:
    """Refuse an input that is not floating point.

    Raises:
        ShapeError: it is not.
    """
    require(x.dtype.is_floating_point, f"input has dtype {x.dtype}, a floating-point one is needed")


def indices(name: str, spec: Spec) -> None:
    """Refuse indices that are not int32 or int64.

    Raises:
        ShapeError: they are not.
    """
    require(spec.dtype in INDICES, f"{name} have dtype {spec.dtype}, they must be int32 or int64")


def checked_here(values: torch.Tensor) -> bool:
    """Whether values can be looked at without a wait: a bad index is then an error. In a trace by torch.export: no."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def on_host(values: torch.Tensor) -> list[Any]:
    """The numbers of a small tensor, for a reference that walks by them; on a device that is a wait.

    Raises:
        PlanError: a CUDA graph is being captured, which cannot wait.
    """
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        raise PlanError(
            "lengths of sequences (or of a cache) are read on the host here, since no kernel takes this "
            "step; it cannot be captured in a CUDA graph: run it eagerly"
        )
    made: list[Any] = values.tolist()
    return made


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that maths on values of this dtype runs in: FP32, or FP64 for FP64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def show(shape: Sequence[int]) -> str:
    """A shape as text, without the names of its symbols."""
    return str(tuple(int(size) for size in shape))
