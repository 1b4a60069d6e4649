"""Score modifiers of attention: a pointwise expression of a score, its place and captured values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_ops.basic.arguments import number
from te_ops.basic.pointwise import PointwiseOp
from te_ops.errors import PlanError
from te_ops.graph import Graph, Value
from te_ops.math import tanh
from te_ops.op import Scalar
from te_ops.pointwise import Fn, Input, InputKind

PLACES = ("i", "j", "head", "batch")  # parameters that mean where a score is


@dataclass(frozen=True)
class Score:
    """An expression and what each of its inputs reads: "s", one of `PLACES`, or an operand."""

    fn: Fn
    inputs: tuple[str, ...]

    @property
    def captured(self) -> tuple[str, ...]:
        """The operands that it reads: numbers, or vectors with one number a head."""
        return tuple(name for name in self.inputs if name != "s" and name not in PLACES)


def soft_cap(cap: float) -> Score:
    """cap * tanh(s / cap).

    Raises:
        PlanError: cap is not a positive finite number.
    """
    number("Attention", "logits_soft_cap", cap)
    if cap <= 0:
        raise PlanError(f"Attention: logits_soft_cap must be positive, got {cap!r}")
    s = Input(0)
    return Score(Fn("soft_cap", ("value",), (float(cap) * tanh(s / float(cap)),)), ("s",))


def check_modifier(op: Any) -> PointwiseOp:
    """A `@te.pointwise` op of one score: s, and any of i, j, head and batch by these names.

    Raises:
        PlanError: it is something else.
    """
    if not isinstance(op, PointwiseOp):
        raise PlanError(
            f"Attention: score_mod must be a @te.pointwise op such as softcap(cap=30.0), got a "
            f"{type(op).__name__}"
        )
    names = [name for name, _ in op.tensors]
    wrong = [name for name in names[1:] if name not in PLACES]
    if wrong or names[0] in PLACES or op.interleave is not None:
        raise PlanError(
            f"Attention: score_mod {type(op).__name__} takes {', '.join(names)}; its tensors are the "
            f"score and, by these names, {', '.join(PLACES)}; other values are numbers, te.scalar "
            "slots or Parameters (0-dim, or one number a head) of the op"
        )
    return op


def modifier(g: Graph, op: PointwiseOp) -> tuple[Score, dict[str, Value]]:
    """What a `@te.pointwise` op does to a score, and the operands that it captures."""
    names = [name for name, _ in op.tensors]
    inputs: list[str] = ["s", *names[1:]]
    captured: dict[str, Value] = {}
    arguments: dict[str, Any] = {}
    for name in op.numbers:
        value = getattr(op, name)
        if isinstance(value, Scalar | torch.Tensor):
            operand = f"captured_{name}"
            captured[operand] = g.scalar(value) if isinstance(value, Scalar) else g.param(value)
            arguments[name] = Input(len(inputs))
            inputs.append(operand)
        else:
            arguments[name] = value
    out = type(op).function(*(Input(i) for i in range(len(names))), **arguments)
    if isinstance(out, tuple):
        raise PlanError(
            f"Attention: score_mod {type(op).__name__} returns {len(out)} values, not one"
        )
    kinds: list[InputKind] = ["value"] * len(inputs)
    fn = Fn(type(op).__name__, kinds, out)
    return Score(fn, tuple(inputs)), captured


__all__ = ["PLACES", "Score", "check_modifier", "modifier", "soft_cap"]
