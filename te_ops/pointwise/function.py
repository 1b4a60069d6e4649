"""`Fn`: a pointwise function of tensors with one output, its gradient and its composition."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, TypeAlias

from te_ops.errors import PlanError
from te_ops.pointwise.derive import ONE, ZERO, add, chain, derivative
from te_ops.pointwise.expr import Const, Expr, Input, Number, Part, structure, substitute, walk

InputKind: TypeAlias = Literal["value", "pair"]
KINDS: tuple[InputKind, ...] = ("value", "pair")
COMPONENTS: dict[InputKind, tuple[Part, ...]] = {"value": ("value",), "pair": ("gate", "linear")}

_functions: weakref.WeakValueDictionary[tuple[Any, ...], Fn] = weakref.WeakValueDictionary()
_lock = threading.RLock()


class Pair(NamedTuple):
    """Gate and linear half of a gated value: of an input while it is traced, or as a result."""

    gate: Expr
    linear: Expr


class Fn:
    """A pointwise function: input kinds and the expressions of its output.

    Functions with equal name, inputs and output are one object, so `==`, `hash` and use as a
    dictionary key are by value within a process; `key` is the same in every process.

    Attributes:
        name: what `explain()` prints.
        inputs: "value" (a tensor) or "pair" (a tensor of gate and linear halves, last dimension 2N)
            per input.
        out: one expression, or two (gate, linear) for an output packed like a gated input.
        key: stable text of inputs and output; the name is not part of it.
    """

    __interned__: ClassVar[bool] = True

    name: str
    inputs: tuple[InputKind, ...]
    out: tuple[Expr, ...]

    def __new__(
        cls, name: str, inputs: Sequence[InputKind], out: Sequence[Expr | Number] | Expr | Number
    ) -> Fn:
        """The one function with this name, inputs and output.

        Raises:
            PlanError: an output that is no expression, or reads an input that there is not.
        """
        kinds = tuple(inputs)
        outputs = _outputs(name, out)
        _check(name, kinds, outputs)
        with _lock:
            found = _functions.get((name, kinds, outputs))
            if found is None:
                found = super().__new__(cls)
                found.__dict__.update(name=name, inputs=kinds, out=outputs, _grads={})
                _functions[name, kinds, outputs] = found
        return found

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Fn is immutable: cannot set {name}")

    def __copy__(self) -> Fn:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Fn:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Fn, (self.name, self.inputs, self.out)

    def __repr__(self) -> str:
        return f"Fn({self.name!r}, {self.key})"

    @cached_property
    def key(self) -> str:
        """Stable text of the input kinds and the output expressions."""
        return f"({','.join(self.inputs)}){structure(self.out)}"

    @cached_property
    def leaves(self) -> tuple[Expr, ...]:
        """The input components that the output reads, in order."""
        found = [node for node in walk(self.out) if node.op == "input"]
        return tuple(sorted(found, key=lambda node: node.payload))

    @cached_property
    def used(self) -> tuple[bool, ...]:
        """For each input, whether the output reads it."""
        read = {node.payload[0] for node in self.leaves}
        return tuple(index in read for index in range(len(self.inputs)))

    @cached_property
    def size(self) -> int:
        """Number of operators, shared ones once."""
        return sum(not node.is_leaf for node in walk(self.out))

    @property
    def out_kind(self) -> InputKind:
        """ "pair" when the output is packed as gate and linear halves, else "value"."""
        return "value" if len(self.out) == 1 else "pair"

    def grad(self, index: int) -> Fn:
        """The gradient with respect to input `index`.

        Its inputs are those of this function followed by the output gradient `dy` (a pair where the
        output is one); its output has the kind of input `index`. Inputs that it does not read are
        kept: see `used`. With inputs broadcast against each other it is the gradient before the
        reduction.
        """
        if not 0 <= index < len(self.inputs):
            raise PlanError(f"{self.name} has {len(self.inputs)} inputs, no input {index}")
        grads: dict[int, Fn] = self.__dict__["_grads"]
        if index not in grads:
            kind = self.inputs[index]
            upstream = tuple(Input(len(self.inputs), part) for part in COMPONENTS[self.out_kind])
            out = tuple(self._grad_of(Input(index, part), upstream) for part in COMPONENTS[kind])
            name = f"d{self.name}" if len(self.inputs) == 1 else f"d{self.name}/d{index}"
            grads[index] = Fn(name, (*self.inputs, self.out_kind), out)
        return grads[index]

    def _grad_of(self, leaf: Expr, upstream: tuple[Expr, ...]) -> Expr:
        """Sum over the output components of dy times the derivative with respect to `leaf`."""
        total: Expr = ZERO
        for dy, output in zip(upstream, self.out, strict=True):
            slope = derivative(output, leaf)
            if slope is not None:
                total = add(total, dy if slope is ONE else chain(dy, slope))
        return total


def _outputs(name: str, out: Sequence[Expr | Number] | Expr | Number) -> tuple[Expr, ...]:
    items: Sequence[object] = out if isinstance(out, Sequence) else (out,)
    nodes = []
    for item in items:
        if isinstance(item, int | float) and not isinstance(item, bool):
            item = Const(item)
        if not isinstance(item, Expr):
            raise PlanError(
                f"{name} returns a {type(item).__name__}: an expression, or a (gate, linear) "
                "pair of them, expected"
            )
        if item.is_mask:
            raise PlanError(f"{name} returns a mask: write te.math.where(mask, 1.0, 0.0)")
        nodes.append(item)
    return tuple(nodes)


def _check(name: str, kinds: tuple[InputKind, ...], outputs: tuple[Expr, ...]) -> None:
    if len(outputs) not in {1, 2}:
        raise PlanError(
            f"{name} returns {len(outputs)} values: one, or a (gate, linear) pair, expected"
        )
    for kind in kinds:
        if kind not in KINDS:
            raise PlanError(f"{name}: input kind {kind!r}, expected one of {KINDS}")
    for node in walk(outputs):
        if node.op == "input":
            index, part = node.payload
            if index >= len(kinds) or part not in COMPONENTS[kinds[index]]:
                raise PlanError(f"{name} reads {part} of input {index}, but its inputs are {kinds}")


def compose(outer: Fn, index: int, inner: Fn) -> Fn:
    """`outer` with its input `index` computed by `inner`, whose inputs take that place.

    The inputs are `outer.inputs[:index] + inner.inputs + outer.inputs[index + 1:]`; equal ones are
    not merged (`merge_inputs` does). The composition computes in FP32 throughout: it rounds once,
    at its own output.
    """
    if not 0 <= index < len(outer.inputs):
        raise PlanError(f"{outer.name} has {len(outer.inputs)} inputs, no input {index}")
    if outer.inputs[index] != inner.out_kind:
        raise PlanError(
            f"{outer.name} reads a {outer.inputs[index]} as input {index}, but {inner.name} gives "
            f"a {inner.out_kind}"
        )
    width = len(inner.inputs)
    shifted = tuple(range(index, index + width))
    inside = dict(zip(COMPONENTS[inner.out_kind], _renumber(inner.out, shifted), strict=True))

    def replace(node: Expr) -> Expr | None:
        if node.op != "input":
            return None
        position, part = node.payload
        if position == index:
            return inside[part]
        return Input(position + width - 1, part) if position > index else node

    inputs = (*outer.inputs[:index], *inner.inputs, *outer.inputs[index + 1 :])
    return Fn(f"{inner.name} + {outer.name}", inputs, substitute(outer.out, replace))


def _renumber(outputs: tuple[Expr, ...], mapping: Sequence[int]) -> tuple[Expr, ...]:
    """`outputs` with input `i` read as input `mapping[i]`."""

    def replace(node: Expr) -> Expr | None:
        if node.op != "input":
            return None
        index, part = node.payload
        return Input(mapping[index], part)

    return substitute(outputs, replace)


def merge_inputs(fn: Fn, mapping: Sequence[int]) -> Fn:
    """`fn` with input `i` renamed to `mapping[i]`; inputs with the same new index become one.

    The new indices are 0 .. n - 1, each taken at least once, and inputs that share one have the
    same kind.
    """
    if len(mapping) != len(fn.inputs) or set(mapping) != set(range(len(set(mapping)))):
        raise PlanError(
            f"{fn.name}: mapping {tuple(mapping)} must give each of {len(fn.inputs)} inputs an "
            "index, without gaps from 0"
        )
    kinds: dict[int, InputKind] = {}
    for kind, target in zip(fn.inputs, mapping, strict=True):
        if kinds.setdefault(target, kind) != kind:
            raise PlanError(f"{fn.name}: a pair and a value cannot both become input {target}")
    return Fn(fn.name, [kinds[i] for i in range(len(kinds))], _renumber(fn.out, mapping))


def elementwise(
    name: str, function: Callable[..., Expr | tuple[Expr, Expr]], *kinds: InputKind
) -> Fn:
    """The Fn that `function` computes; a pair input reaches it as a `Pair`."""
    arguments = [
        Pair(Input(i, "gate"), Input(i, "linear")) if kind == "pair" else Input(i)
        for i, kind in enumerate(kinds)
    ]
    return Fn(name, kinds, function(*arguments))
