"""Pointwise expressions as interned, immutable DAGs.

A node is an operator name and its arguments; two nodes with the same structure are the same object,
so `is` compares structure, a memo keyed by node visits shared parts once, and a nested GELU stays
small. Arithmetic on nodes builds nodes (`simplify` installs the builder); nothing here computes a
number.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, NoReturn, TypeAlias

import numpy as np

from te_ops.errors import PlanError

Part: TypeAlias = Literal["value", "gate", "linear"]
Number: TypeAlias = int | float
ExprLike: TypeAlias = "Expr | int | float"

PARTS: tuple[Part, ...] = ("value", "gate", "linear")

_Key: TypeAlias = tuple[Any, ...]
_Row: TypeAlias = tuple[str, tuple[int, ...], Any, bool]
_table: weakref.WeakValueDictionary[_Key, Expr] = weakref.WeakValueDictionary()
_lock = threading.RLock()


class Expr:
    """A node of an expression: an operator applied to nodes, an input or a constant.

    Made by `Input`, `Const`, Python operators and the functions of `te_ops.math`, never by the
    class itself. `==` and `hash` are identity, which is structure because nodes are interned;
    compare *values* with `te_ops.math.eq`.

    Attributes:
        op: operator name in `te_ops.pointwise.table.OPERATORS`, or "input", "const", "true",
            "false".
        args: the argument nodes.
        payload: `(index, part)` of an input, the float of a constant, else `()`.
        is_mask: whether it is a truth value; a mask selects (`where`), it never takes part in
            arithmetic.
        digest: 8 bytes that depend on the structure only, the same in every process.
    """

    __slots__ = ("__weakref__", "_key", "args", "digest", "is_mask", "op", "payload")

    op: str
    args: tuple[Expr, ...]
    payload: Any
    is_mask: bool
    digest: bytes
    _key: str | None

    __interned__: ClassVar[bool] = True
    build: ClassVar[Callable[[str, tuple[ExprLike, ...]], Expr]]

    def __init__(self) -> None:
        raise PlanError(
            "Expr is made by Input, Const, operators and te_ops.math, not by calling it"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Expr is immutable: cannot set {name}")

    @property
    def key(self) -> str:
        """Stable structural text: every node once, constants by their bits."""
        if self._key is not None:
            return self._key
        text = structure((self,))
        object.__setattr__(self, "_key", text)
        return text

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Expr:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (flatten(self),)

    def __repr__(self) -> str:
        return f"Expr({self.key})"

    def __bool__(self) -> bool:
        raise PlanError(
            "an expression has no truth value while it is traced: choose per element with "
            "te_ops.math.where(condition, a, b), compare with < <= > >= or te_ops.math.eq, "
            "combine masks with & | ~"
        )

    def __float__(self) -> float:
        raise PlanError("an expression is not a number: use te_ops.math instead of the math module")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        name = getattr(function, "__name__", "a function")
        raise PlanError(
            f"an expression is no tensor: torch's {name} does not take it; use te_ops.math"
        )

    def __add__(self, other: ExprLike) -> Expr:
        return Expr.build("add", (self, other))

    def __radd__(self, other: ExprLike) -> Expr:
        return Expr.build("add", (other, self))

    def __sub__(self, other: ExprLike) -> Expr:
        return Expr.build("sub", (self, other))

    def __rsub__(self, other: ExprLike) -> Expr:
        return Expr.build("sub", (other, self))

    def __mul__(self, other: ExprLike) -> Expr:
        return Expr.build("mul", (self, other))

    def __rmul__(self, other: ExprLike) -> Expr:
        return Expr.build("mul", (other, self))

    def __truediv__(self, other: ExprLike) -> Expr:
        return Expr.build("div", (self, other))

    def __rtruediv__(self, other: ExprLike) -> Expr:
        return Expr.build("div", (other, self))

    def __pow__(self, exponent: Number) -> Expr:
        return Expr.build("pow", (self, exponent))

    def __neg__(self) -> Expr:
        return Expr.build("neg", (self,))

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return Expr.build("abs", (self,))

    def __lt__(self, other: ExprLike) -> Expr:
        return Expr.build("lt", (self, other))

    def __le__(self, other: ExprLike) -> Expr:
        return Expr.build("le", (self, other))

    def __gt__(self, other: ExprLike) -> Expr:
        return Expr.build("gt", (self, other))

    def __ge__(self, other: ExprLike) -> Expr:
        return Expr.build("ge", (self, other))

    def __and__(self, other: Expr) -> Expr:
        return Expr.build("and", (self, other))

    def __or__(self, other: Expr) -> Expr:
        return Expr.build("or", (self, other))

    def __invert__(self) -> Expr:
        return Expr.build("not", (self,))

    @property
    def is_const(self) -> bool:
        """Whether this is a float constant."""
        return self.op == "const"

    @property
    def is_leaf(self) -> bool:
        """Whether it has no arguments: an input, a constant or a literal mask."""
        return not self.args


def intern(op: str, args: tuple[Expr, ...], payload: Any = (), is_mask: bool = False) -> Expr:
    """The one node with this structure, as given: no simplification, no checks."""
    # Two floats are the same constant when their bits are: 0.0 is not -0.0, and NaN is found again.
    identity = payload.hex() if op == "const" else payload
    key = (op, args, identity)
    with _lock:
        node = _table.get(key)
        if node is None:
            node = object.__new__(Expr)
            text = "|".join((op, repr(identity), *(a.digest.hex() for a in args)))
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            fields = (op, args, payload, is_mask, digest, None)
            names = ("op", "args", "payload", "is_mask", "digest", "_key")
            for name, value in zip(names, fields, strict=True):
                object.__setattr__(node, name, value)
            _table[key] = node
    return node


def flatten(output: Expr) -> tuple[_Row, ...]:
    """The nodes of `output` in `walk` order, arguments by their place: picklable at any depth."""
    nodes = walk((output,))
    place = {node: k for k, node in enumerate(nodes)}
    return tuple(
        (node.op, tuple(place[arg] for arg in node.args), node.payload, node.is_mask)
        for node in nodes
    )


def restore(rows: tuple[_Row, ...]) -> Expr:
    """The expression that `flatten` took apart."""
    nodes: list[Expr] = []
    for op, places, payload, is_mask in rows:
        nodes.append(intern(op, tuple(nodes[k] for k in places), payload, is_mask))
    return nodes[-1]


def call(op: str, *args: ExprLike) -> Expr:
    """Operator `op` of `args`, checked and simplified."""
    return Expr.build(op, args)


def raw(op: str, *args: Expr) -> Expr:
    """Operator `op` of `args` as it stands, where `call` would rewrite it; not for masks."""
    return intern(op, args)


def Input(index: int, part: Part = "value") -> Expr:
    """Input `index` of a function: its value, or the gate or linear half of a gated pair."""
    if index < 0 or part not in PARTS:
        raise PlanError(f"input {index!r} part {part!r}: an index >= 0 and one of {PARTS} expected")
    return intern("input", (), (index, part))


def Const(value: Number) -> Expr:
    """A float constant, known to FP64 and rounded where it is used."""
    return intern("const", (), float(value))


TRUE = intern("true", (), (), True)
FALSE = intern("false", (), (), True)


def float32(value: float) -> float:
    """`value` rounded to FP32: Inf beyond its range, where torch and C refuse it."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def walk(outputs: Iterable[Expr]) -> list[Expr]:
    """Every node that `outputs` reach, once, arguments first; the structure fixes the order."""
    order: list[Expr] = []
    seen: set[Expr] = set()
    # A stack instead of recursion: a chain of a thousand operators is legal.
    stack: list[tuple[Expr, bool]] = [(out, False) for out in reversed(tuple(outputs))]
    while stack:
        node, done = stack.pop()
        if node in seen:
            continue
        if done:
            seen.add(node)
            order.append(node)
        else:
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args) if arg not in seen)
    return order


def leaf_text(node: Expr) -> str:
    """Text of a leaf in keys: `x0`, `x1.gate`, a constant in hexadecimal."""
    if node.op == "input":
        index, part = node.payload
        return f"x{index}" if part == "value" else f"x{index}.{part}"
    return str(node.payload.hex()) if node.op == "const" else node.op


def structure(outputs: tuple[Expr, ...]) -> str:
    """`op arg arg;...>out`: one entry per node in `walk` order, `%k` naming the k-th entry."""
    names: dict[Expr, str] = {}
    lines: list[str] = []
    for node in walk(outputs):
        if node.is_leaf:
            names[node] = leaf_text(node)
        else:
            names[node] = f"%{len(lines)}"
            lines.append(" ".join((node.op, *(names[arg] for arg in node.args))))
    return ";".join(lines) + ">" + ",".join(names[out] for out in outputs)


def substitute(
    outputs: tuple[Expr, ...], replace: Callable[[Expr], Expr | None]
) -> tuple[Expr, ...]:
    """`outputs` with nodes exchanged where `replace` gives one, rebuilt through `call`."""
    new: dict[Expr, Expr] = {}
    for node in walk(outputs):
        found = replace(node)
        if found is not None:
            new[node] = found
        elif node.is_leaf or all(new[arg] is arg for arg in node.args):
            new[node] = node
        else:
            new[node] = call(node.op, *(new[arg] for arg in node.args))
    return tuple(new[out] for out in outputs)
