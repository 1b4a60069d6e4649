"""Score modifiers as text of the CuTe DSL: the function of a score, and its gradient."""

from __future__ import annotations

from typing import NamedTuple

from te_ops.basic.score import Score
from te_ops.pointwise import Const, Expr, Fn, lower, prelude, symbol
from te_ops.pointwise.expr import intern, walk

# The approximate tanh of the hardware is wrong by 2^-11 of its result, as much as BF16 rounds a probability by after
# exp. For FP16 that is too much; by exponentials it is exact but for a few 2^-24.
_TANH = """

def _tanh(x):
    return 1.0 - 2.0 * _cute.arch.rcp_approx(1.0 + _exp(x + x))


"""


_LEAST = 1e-30  # numbers beyond would leave the range of FP32 where they were made one


class Text(NamedTuple):
    """Source, and the names in it."""

    source: str = ""
    function: str = ""
    gradient: str = ""
    inputs: tuple[str, ...] = ()


def text_of(score: Score | None, *, backward: bool, exact: bool = False) -> Text:
    """The source of a modifier; its gradient takes the gradient of the result as one more argument.

    `exact`: the hardware's tanh is not used.
    """
    if score is None:
        return Text()
    function = quick(score.fn)
    parts = [prelude("cutedsl", fast=True) + _TANH * exact, lower(function, "cutedsl")]
    gradient = ""
    if backward:
        derived = quick(score.fn.grad(score.inputs.index("s")))
        gradient = symbol(derived)
        parts.append(lower(derived, "cutedsl"))
    return Text("\n\n".join(parts), symbol(function), gradient, score.inputs)


def quick(fn: Fn) -> Fn:
    """The function with products where it divides by a number, and numbers that follow each other made one.

    It runs for every score, beside products of matrices that take about as long; FP32 results differ in the last bits.
    """
    new: dict[Expr, Expr] = {}
    for node in walk(fn.out):
        args = tuple(new[arg] for arg in node.args)
        if node.op == "div" and args[1].is_const and abs(args[1].payload) > _LEAST:
            new[node] = _scaled(args[0], 1.0 / float(args[1].payload))
        elif node.op == "mul" and args[1].is_const:
            new[node] = _scaled(args[0], float(args[1].payload))
        else:
            new[node] = intern(node.op, args, node.payload, node.is_mask)
    return Fn(fn.name, fn.inputs, [new[out] for out in fn.out])


def _scaled(x: Expr, factor: float) -> Expr:
    """x * factor."""
    if x.op == "mul" and x.args[1].is_const:
        both = factor * float(x.args[1].payload)
        if _LEAST < abs(both) < 1 / _LEAST:
            return _scaled(x.args[0], both)
    return intern("mul", (x, Const(factor)))
