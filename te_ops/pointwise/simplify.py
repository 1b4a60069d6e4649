"""The builder behind every operator: checks, constant folding and rewrites that are exact.

A rewrite may not hide a non-finite value (`0 * x` stays) nor the sign of a zero (`x + 0.0` stays,
`x - 0.0` is `x`). Four spellings that overflow are recognised and become the operators with stable
values and derivatives: `1 / (1 + exp(-x))`, `exp(x) / (1 + exp(x))`, `x / (1 + exp(-x))` and `log(1
+ exp(x))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from te_ops.errors import PlanError
from te_ops.pointwise.expr import FALSE, TRUE, Const, Expr, ExprLike, call, intern
from te_ops.pointwise.table import OPERATORS, Operator

Rule: TypeAlias = Callable[..., Expr | None]

COMMUTATIVE = frozenset({"add", "mul", "eq", "ne", "and", "or"})


def build(op: str, args: tuple[ExprLike, ...]) -> Expr:
    """Operator `op` of `args`, checked, folded and simplified.

    Raises:
        PlanError: an unknown operator, a wrong number of arguments, an argument that is neither an
            expression nor a number, a mask in arithmetic or a number as a mask.
    """
    if op == "pow":
        return _power(*args)
    row = OPERATORS.get(op)
    if row is None:
        raise PlanError(f"unknown operator {op!r}; te_ops.math lists the functions there are")
    if len(args) != row.arity:
        raise PlanError(f"{op} takes {row.arity} arguments, {len(args)} given")
    nodes = tuple(_node(row, position, arg) for position, arg in enumerate(args))
    if op in COMMUTATIVE and _rank(nodes[0]) > _rank(nodes[1]):
        nodes = (nodes[1], nodes[0])
    if all(node.is_const for node in nodes):
        return _fold(row, nodes)
    rule = RULES.get(op)
    simpler = rule(*nodes) if rule is not None else None
    return intern(op, nodes, (), row.returns_mask) if simpler is None else simpler


def _node(row: Operator, position: int, arg: ExprLike) -> Expr:
    """`arg` as a node of the kind that argument `position` of `row` has."""
    wants_mask = position in row.masks
    if isinstance(arg, Expr):
        if arg.is_mask == wants_mask:
            return arg
        if wants_mask:
            raise PlanError(
                f"{row.name} needs a mask, not a number: compare it, e.g. te.math.ne(x, 0)"
            )
        raise PlanError(
            f"{row.name} of a mask: a mask does not compute, it selects; write "
            "te.math.where(mask, a, b)"
        )
    if wants_mask:
        raise PlanError(
            f"{row.name} needs a mask, {arg!r} given: == on expressions compares identity, so use "
            "te.math.eq or te.math.ne; if the choice depends on numbers only, use a Python if"
        )
    if isinstance(arg, bool) or not isinstance(arg, int | float):
        value = getattr(arg, "item", None)
        # numpy scalars are numbers; a tensor is data, which an expression may only read as an
        # input.
        if value is None or isinstance(arg, torch.Tensor) or isinstance(value(), bool):
            raise PlanError(
                f"{row.name} of {type(arg).__name__}: an argument is an expression or a number; a "
                "tensor enters as an input of the function, a number that varies as te.scalar()"
            )
        arg = float(value())
    return Const(arg)


def _rank(node: Expr) -> tuple[bool, bytes]:
    """Order of commutative arguments: constants last, then by structure."""
    return node.is_const, node.digest


def _fold(row: Operator, nodes: tuple[Expr, ...]) -> Expr:
    """The constant that FP64 arithmetic gives."""
    if row.name == "sqrt" and nodes[0].payload >= 0:
        # Correctly rounded everywhere; a vectorised square root may be one ulp off, and keys are bits.
        return Const(math.sqrt(nodes[0].payload))
    result = row.torch(*(torch.tensor(n.payload, dtype=torch.float64) for n in nodes)).item()
    if row.returns_mask:
        return TRUE if result else FALSE
    return Const(result)


def _is(node: Expr, value: float) -> bool:
    """Whether `node` is the constant `value`, bit for bit."""
    return node.is_const and node.payload.hex() == value.hex()


def _power(base: ExprLike, exponent: ExprLike) -> Expr:
    """Integer powers by repeated squaring, and the powers +-1/2."""
    if isinstance(exponent, Expr) or not isinstance(exponent, int | float):
        raise PlanError(
            "x ** n needs a number n: write te.math.exp(y * te.math.log(x)) for an expression y"
        )
    if abs(exponent) == 0.5:
        return call("sqrt" if exponent > 0 else "rsqrt", base)
    if exponent != int(exponent):
        raise PlanError(
            f"x ** {exponent}: integers and +-0.5 only; write "
            f"te.math.exp({exponent} * te.math.log(x))"
        )
    n = abs(int(exponent))
    result: ExprLike | None = None
    factor: ExprLike = base
    while n:
        if n & 1:
            result = factor if result is None else call("mul", result, factor)
        n >>= 1
        if n:
            factor = call("square", factor)
    if result is None:
        return Const(1.0)
    return call("reciprocal", result) if exponent < 0 else call("add", result, -0.0)


def _one_plus_exp(node: Expr) -> Expr | None:
    """`t` where `node` is `1 + exp(t)`."""
    if node.op == "add" and _is(node.args[1], 1.0) and node.args[0].op == "exp":
        return node.args[0].args[0]
    return None


def _add(a: Expr, b: Expr) -> Expr | None:
    if _is(b, -0.0):
        return a
    if b.op == "neg":
        return call("sub", a, b.args[0])
    return call("sub", b, a.args[0]) if a.op == "neg" else None


def _sub(a: Expr, b: Expr) -> Expr | None:
    if _is(b, 0.0):
        return a
    return call("add", a, b.args[0]) if b.op == "neg" else None


def _mul(a: Expr, b: Expr) -> Expr | None:
    if a is b:
        return call("square", a)
    if _is(b, 1.0):
        return a
    if _is(b, -1.0):
        return call("neg", a)
    if b.is_const and a.op == "neg":
        return call("mul", a.args[0], -b.payload)
    for x, s in ((a, b), (b, a)):
        if s.op == "sigmoid" and s.args[0] is x:
            return call("silu", x)
    return None


def _div(a: Expr, b: Expr) -> Expr | None:
    if _is(a, 1.0):
        return call("reciprocal", b)
    if _is(b, 1.0):
        return a
    t = _one_plus_exp(b)
    if t is None:
        return None
    # exp(t) / (1 + exp(t)) is s(t); a / (1 + exp(t)) is a s(-t), and x s(x) is silu(x).
    return call("sigmoid", t) if a is b.args[0] else a * call("sigmoid", -t)


def _reciprocal(a: Expr) -> Expr | None:
    t = _one_plus_exp(a)
    return None if t is None else call("sigmoid", -t)


def _neg(a: Expr) -> Expr | None:
    if a.op == "neg":
        return a.args[0]
    # A constant factor takes the sign: exact, and -(1.702 * x) meets (-1.702) * x.
    if a.op == "mul" and a.args[1].is_const:
        return call("mul", a.args[0], -a.args[1].payload)
    return None


def _even(op: str) -> Rule:
    """`f(-x) = f(x)`."""
    return lambda a: call(op, a.args[0]) if a.op == "neg" else None


def _log(a: Expr) -> Expr | None:
    t = _one_plus_exp(a)
    return None if t is None else call("softplus", t)


def _log1p(a: Expr) -> Expr | None:
    return call("softplus", a.args[0]) if a.op == "exp" else None


def _extremum(op: str) -> Rule:
    def rule(a: Expr, b: Expr) -> Expr | None:
        if a is b:
            return a
        # The constant goes second, where the kink rule gives the gradient to the other one.
        return call(op, b, a) if a.is_const else None

    return rule


def _not(a: Expr) -> Expr | None:
    if a is TRUE or a is FALSE:
        return FALSE if a is TRUE else TRUE
    return a.args[0] if a.op == "not" else None


def _junction(neutral: Expr, absorbing: Expr) -> Rule:
    def rule(a: Expr, b: Expr) -> Expr | None:
        if a is absorbing or b is absorbing:
            return absorbing
        if a is neutral or a is b:
            return b
        return a if b is neutral else None

    return rule


def _where(mask: Expr, a: Expr, b: Expr) -> Expr | None:
    if mask is TRUE or a is b:
        return a
    if mask is FALSE:
        return b
    if mask.op == "not":
        return call("where", mask.args[0], b, a)
    if a.op == "where" and a.args[0] is mask:
        return call("where", mask, a.args[1], b)
    if b.op == "where" and b.args[0] is mask:
        return call("where", mask, a, b.args[2])
    return None


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "reciprocal": _reciprocal,
    "abs": lambda a: a if a.op == "abs" else _even("abs")(a),
    "square": _even("square"),
    "cos": _even("cos"),
    "log": _log,
    "log1p": _log1p,
    "minimum": _extremum("minimum"),
    "maximum": _extremum("maximum"),
    "not": _not,
    "and": _junction(TRUE, FALSE),
    "or": _junction(FALSE, TRUE),
    "where": _where,
}

Expr.build = build
