"""Derivatives of expressions, in forward mode: one pass per input component.

A mask never multiplies a derivative, it selects, and selections stay outermost through the chain
rule: the derivative of `sqrt(relu(x))` is `where(x <= 0, 0, 0.5 / sqrt(relu(x)))`, not `inf * 0`.
So what a selection discards cannot turn a gradient into NaN, whatever stands outside of it, the
output gradient included.
"""

from __future__ import annotations

from te_ops.pointwise.expr import Const, Expr, call, walk
from te_ops.pointwise.table import OPERATORS

ONE = Const(1.0)
ZERO = Const(0.0)

# Pushing a factor into a sum of selections copies it per term. Beyond this many terms and
# selections (nested sums of clamps double them per level) a zero derivative is tested for instead.
MAX_TERMS = 32


def derivative(output: Expr, leaf: Expr) -> Expr | None:
    """d `output` / d `leaf`, or None where it is zero because `output` does not read `leaf`."""
    tangents: dict[Expr, Expr | None] = {}
    for node in walk((output,)):
        tangents[node] = ONE if node is leaf else _tangent(node, tangents)
    return tangents[output]


def _tangent(node: Expr, tangents: dict[Expr, Expr | None]) -> Expr | None:
    """The derivative of `node` from those of its arguments."""
    if node.is_leaf or node.is_mask:
        return None
    incoming = [tangents[arg] for arg in node.args]
    if all(tangent is None for tangent in incoming):
        return None
    if node.op == "where":
        _, a, b = incoming
        return call("where", node.args[0], ZERO if a is None else a, ZERO if b is None else b)
    partials = OPERATORS[node.op].partials
    if partials is None:
        return None
    total: Expr | None = None
    for factor, tangent in zip(partials(*node.args, node), incoming, strict=True):
        if factor is None or tangent is None:
            continue
        term = chain(factor if isinstance(factor, Expr) else Const(factor), tangent)
        total = term if total is None else add(total, term)
    return total


def chain(factor: Expr, tangent: Expr) -> Expr:
    """`factor * tangent` with the selections of both outermost."""
    if factor is ONE or tangent is ONE:
        return tangent if factor is ONE else factor
    if factor.op == "where" and _guards(factor):
        return _multiply(factor, tangent)
    return _multiply(tangent, factor) if _guards(tangent) else call("mul", factor, tangent)


def _multiply(selection: Expr, factor: Expr) -> Expr:
    """`factor` pushed into a selection, or into a sum that holds one."""
    if _too_long(selection):
        return call("where", call("eq", selection, 0.0), 0.0, call("mul", factor, selection))
    if selection.op == "where":
        mask, a, b = selection.args
        return call("where", mask, _branch(a, factor), _branch(b, factor))
    return call(selection.op, *(chain(factor, arg) for arg in selection.args))


def _branch(branch: Expr, factor: Expr) -> Expr:
    """A branch of a selection times `factor`; a literal zero stays one, whatever the factor is."""
    return branch if _is_zero(branch) else chain(factor, branch)


def add(a: Expr, b: Expr) -> Expr:
    """The sum of two derivatives; selections by one mask with zeros in one place are merged."""
    if _is_zero(a) or _is_zero(b):
        return b if _is_zero(a) else a
    if a.op == "where" and b.op == "where" and a.args[0] is b.args[0]:
        mask = a.args[0]
        if any(_is_zero(a.args[k]) and _is_zero(b.args[k]) for k in (1, 2)):
            return call("where", mask, add(a.args[1], b.args[1]), add(a.args[2], b.args[2]))
    return call("add", a, b)


def _is_zero(node: Expr) -> bool:
    return node.is_const and node.payload == 0.0


def _guards(node: Expr) -> bool:
    """Whether `node` is, through sums and selections, a selection with a literal zero."""
    stack, seen = [node], {node}
    while stack:
        top = stack.pop()
        if top.op == "where" and (_is_zero(top.args[1]) or _is_zero(top.args[2])):
            return True
        fresh = [arg for arg in _linear_parts(top) if arg not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return False


def _too_long(node: Expr) -> bool:
    """Whether pushing a factor into `node` would copy it into more than `MAX_TERMS` places."""
    stack, count = [node], 0
    while stack and count <= MAX_TERMS:
        count += 1
        stack.extend(part for part in _linear_parts(stack.pop()) if not _is_zero(part))
    return count > MAX_TERMS


def _linear_parts(node: Expr) -> tuple[Expr, ...]:
    """The arguments that a factor may be pushed into."""
    if node.op == "where":
        return node.args[1:]
    return node.args if node.op in {"add", "sub", "neg"} else ()
