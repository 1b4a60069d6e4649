"""The op graph: hash-consed primitive nodes over typed values, shared by forward and backward.

An op emits nodes with `Graph.call`; each primitive has a reference (plain torch), a shape rule and a
gradient rule that emits nodes. Nothing here knows ops, quantizers or kernels.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from te_ops.attrs import Attrs, Dim
from te_ops.errors import Error, PlanError, ShapeError

Nature = Literal["pure", "random", "effect", "view", "placement"]


class Kind(NamedTuple):
    """What a value is: a dense tensor, a quantized record (one usage of it) or a shape."""

    name: Literal["dense", "record", "shape"]
    quantizer: Any = None
    usage: Any = None


DENSE = Kind("dense")
SHAPE = Kind("shape")


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape, dtype and kind of a value; a record has the logical shape and dtype of its source."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind = DENSE

    @property
    def nbytes(self) -> int:
        """Bytes of storage, scales included; 0 for a shape."""
        if self.kind.name == "shape":
            return 0
        if self.kind.name == "record":
            parts = self.kind.quantizer.layout(self.shape, self.kind.usage)
            return sum(_numel(shape) * dtype.itemsize for shape, dtype in parts)
        return _numel(self.shape) * self.dtype.itemsize

    def like(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Spec:
        """A dense spec with this one's shape and dtype where none is given."""
        return Spec(self.shape if shape is None else tuple(shape), dtype or self.dtype)


def _numel(shape: Iterable[int]) -> int:
    total = 1
    for dim in shape:
        total *= int(dim)
    return total


class Value(NamedTuple):
    """One output of a node."""

    node: int
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class Phase(enum.IntEnum):
    """When a node runs. wgrad nodes are those that only parameter gradients need."""

    FORWARD = 0
    RECOMPUTE = 1
    DGRAD = 2
    WGRAD = 3

    @property
    def is_backward(self) -> bool:
        """Whether nodes of this phase run in backward."""
        return self is not Phase.FORWARD


@dataclass(frozen=True, eq=False)
class Prim:
    """A pure function with a name: `reference(*inputs, **attrs)` in plain torch, `infer` on specs.

    `roles(node)` names the operands that a recipe may quantize: one `(operand, usage)` or None per input,
    usage being "row" or "col". `cheap` prims may be rebuilt in backward instead of saved. A `selective`
    reference also takes `live`, one bool per output, and may return None for outputs that nobody reads; a `placed`
    one takes `device`, since none of its inputs is a tensor that tells.
    """

    name: str
    reference: Callable[..., Any]
    infer: Callable[..., Any]
    n_out: int = 1
    nature: Nature = "pure"
    roles: Callable[[Node], Sequence[tuple[str, str] | None]] | None = None
    cheap: bool = False
    differentiable: bool = True
    selective: bool = False
    placed: bool = False

    def __repr__(self) -> str:
        return f"Prim({self.name})"


@dataclass(frozen=True, eq=False)
class Node:
    """A primitive applied to values."""

    id: int
    prim: Prim
    inputs: tuple[Value, ...]
    attrs: Attrs
    phase: Phase = Phase.FORWARD
    scope: tuple[int, ...] = ()  # recompute regions, outermost first
    path: str = ""  # path of the op that emitted it

    @property
    def out(self) -> Value:
        """The only (or first) output."""
        return Value(self.id)

    @property
    def outs(self) -> tuple[Value, ...]:
        """As many outputs as the primitive declares."""
        return tuple(Value(self.id, i) for i in range(self.prim.n_out))

    def __getattr__(self, name: str) -> Any:  # node.eps reads an attribute
        try:
            return self.attrs[name]
        except KeyError:
            raise AttributeError(f"node {self.prim.name} has no attribute {name!r}") from None


def prim(
    name: str,
    *,
    infer: Callable[..., Any] | None = None,
    n_out: int = 1,
    nature: Nature = "pure",
    roles: Callable[[Node], Sequence[tuple[str, str] | None]] | None = None,
    cheap: bool = False,
    differentiable: bool = True,
    selective: bool = False,
    placed: bool = False,
    replace: bool = False,
) -> Callable[[Callable[..., Any]], Prim]:
    """Register a primitive; the decorated function is its torch reference.

    Without `infer`, specs come from running the reference on meta tensors (slower to plan, never wrong).
    Without a `@gradient` rule, the gradient runs the reference under autograd in backward.

    Raises:
        PlanError: a primitive of this name exists and `replace` is not set.
    """

    def register(reference: Callable[..., Any]) -> Prim:
        if name in PRIMS and not replace:
            raise PlanError(
                f"a primitive named {name!r} exists; choose another name or pass replace=True"
            )
        rule = infer or (lambda *specs, **attrs: _infer_on_meta(reference, n_out, specs, attrs))
        made = Prim(
            name, reference, rule, n_out, nature, roles, cheap, differentiable, selective, placed
        )
        PRIMS[name] = made
        return made

    return register


PRIMS: dict[str, Prim] = {}
GRADIENTS: dict[Prim, Callable[..., Any]] = {}


def gradient(of: Prim) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the gradient rule of a primitive: `rule(g, node, *dys) -> one Value or None per input`.

    A missing output gradient arrives as None; at least one is given.
    """

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        GRADIENTS[of] = rule
        return rule

    return register


def same(spec: Spec, *_: Spec, **__: Any) -> Spec:
    """Shape rule of prims whose output looks like the first input."""
    return spec.like()


def _infer_on_meta(
    reference: Callable[..., Any], n_out: int, specs: Sequence[Spec], attrs: dict[str, Any]
) -> Any:
    def fake(spec: Spec) -> Any:
        if spec.kind.name == "shape":
            return spec.shape
        if spec.kind.name == "record":
            raise PlanError("a primitive that reads quantized records needs its own infer")
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    result = reference(*map(fake, specs), **attrs)
    results = result if n_out > 1 else (result,)
    made = tuple(Spec(tuple(t.shape), t.dtype) for t in results)
    return made if n_out > 1 else made[0]


def _shape_infer(spec: Spec) -> Spec:
    return Spec(spec.shape, torch.int64, SHAPE)


INPUT = prim("input", nature="effect", differentiable=False, infer=same)(lambda: None)
PARAM = prim("param", nature="effect", differentiable=False, infer=same)(lambda: None)
BUFFER = prim("buffer", nature="effect", differentiable=False, infer=same)(lambda: None)
SCALAR = prim("scalar", nature="effect", differentiable=False, infer=same)(lambda: None)
SEED = prim("seed", nature="effect", differentiable=False, infer=same)(lambda: None)
GRAD = prim("grad", nature="effect", differentiable=False, infer=same)(lambda: None)
SHAPE_OF = prim("shape_of", nature="view", differentiable=False, infer=_shape_infer)(
    lambda x: tuple(x.shape)
)
LEAVES = frozenset({INPUT, PARAM, BUFFER, SCALAR, SEED, GRAD})


@prim(
    "dim",
    nature="view",
    differentiable=False,
    infer=lambda spec, axis: Spec((spec.shape[axis],), torch.int64, SHAPE),
)
def DIM(x: Any, axis: int) -> tuple[int, ...]:
    """One dimension of a tensor, as a 1-tuple."""
    return (x.shape[axis],)


@prim("cut", nature="effect", infer=same)
def CUT(x: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    """A place where the plan is cut into segments ("forced"), or may be ("stream", "child")."""
    return x


@gradient(CUT)
def _cut_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value]:
    return (dy,)


class Graph:
    """Nodes in topological order; equal pure nodes are one node.

    A graph also carries what emission may read: the context (autocast dtype, training flags through the ops
    themselves) and the resolver that turns a tensor owned by a module into a slot.
    """

    def __init__(
        self, resolver: Resolver | None = None, *, autocast_dtype: torch.dtype | None = None
    ) -> None:
        self.nodes: list[Node] = []
        self.specs: list[tuple[Spec, ...]] = []
        self.autocast_dtype = autocast_dtype
        self.phase = Phase.FORWARD
        self.depth = 0
        self.updates: list[tuple[Value, Value, str]] = []  # (buffer, new value, combine rule)
        self._resolver = resolver
        self._index: dict[Any, int] = {}
        self._path: list[str] = []
        self._scope: tuple[int, ...] = ()
        self._scopes = 0
        self._streams = 0
        self._memo: dict[Any, Any] = {}

    # -- building

    def call(self, prim: Prim, *inputs: Value, **attrs: Any) -> Value:
        """Append (or find) a node with one output."""
        if prim.n_out != 1:
            raise PlanError(f"{prim.name} has {prim.n_out} outputs; use g.calls")
        return Value(self._add(prim, inputs, attrs))

    def calls(self, prim: Prim, *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        """Append (or find) a node and return all its outputs."""
        node = self._add(prim, inputs, attrs)
        return tuple(Value(node, i) for i in range(len(self.specs[node])))

    def _add(self, prim: Prim, inputs: tuple[Value, ...], attrs: dict[str, Any]) -> int:
        try:
            packed = Attrs(attrs)
            key = self._key(prim, inputs, packed)
            found = self._index.get(key)
            if found is not None:
                return found
            result = prim.infer(*(self.spec(v) for v in inputs), **attrs)
        except Error as error:
            raise self.located(error) from error.__cause__
        specs = result if isinstance(result, tuple) else (result,)
        node = self.append(prim, inputs, packed, specs)
        if prim.nature != "effect":
            self._index[key] = node
        return node

    def _key(self, prim: Prim, inputs: tuple[Value, ...], attrs: Attrs) -> Any:
        return prim, inputs, attrs.key, self._scope, self.phase is Phase.RECOMPUTE

    def readd(
        self, node: Node, inputs: tuple[Value, ...], specs: tuple[Spec, ...]
    ) -> tuple[Value, ...]:
        """Append (or find) a node of another graph whose attributes and output specs are known, at its position."""
        saved = self.phase, self._scope
        self.phase, self._scope = node.phase, node.scope
        self._path.append(node.path)
        try:
            key = self._key(node.prim, inputs, node.attrs)
            pure = node.prim.nature != "effect"
            made = self._index.get(key) if pure else None
            if made is None:
                made = self.append(node.prim, inputs, node.attrs, specs)
                if pure:
                    self._index[key] = made
        finally:
            self._path.pop()
            self.phase, self._scope = saved
        return tuple(Value(made, i) for i in range(len(specs)))

    def append(
        self, prim: Prim, inputs: tuple[Value, ...], attrs: Attrs, specs: tuple[Spec, ...]
    ) -> int:
        """Append a node as it is: passes that copy nodes use this, ops use `call`."""
        node = len(self.nodes)
        # A shape is known where its tensor is made: reading it in backward must not save the tensor.
        phase = self.nodes[inputs[0].node].phase if prim in (SHAPE_OF, DIM) else self.phase
        self.nodes.append(Node(node, prim, inputs, attrs, phase, self._scope, self.path))
        self.specs.append(specs)
        return node

    def leaf(self, prim: Prim, spec: Spec, **attrs: Any) -> Value:
        """Append a leaf (input, param, buffer, scalar, seed, grad); equal leaves are one."""
        packed = Attrs(attrs)
        key = (prim, packed.key)
        if key not in self._index:
            with self._in_phase(self.phase if prim in (GRAD, BUFFER) else Phase.FORWARD):
                self._index[key] = self.append(prim, (), packed, (spec,))
        return Value(self._index[key])

    def spec(self, value: Value) -> Spec:
        """Shape, dtype and kind of a value."""
        return self.specs[value.node][value.index]

    def node(self, value: Value) -> Node:
        """The node that makes a value."""
        return self.nodes[value.node]

    # -- what ops read and write

    def param(self, tensor: torch.Tensor) -> Value:
        """The value of a parameter (or buffer) owned by an op of the pipeline; fetched anew at each call."""
        slot = self._slot(tensor, "tensor")
        assert self._resolver is not None  # _slot has asked it
        return self.leaf(PARAM, self._resolver.spec(tensor), slot=slot)

    def buffer(self, tensor: torch.Tensor) -> Value:
        """State read once at entry of the phase that reads it; written only through `update`."""
        slot = self._slot(tensor, "tensor")
        spec = Spec(tuple(tensor.shape), tensor.dtype)
        return self.leaf(BUFFER, spec, slot=slot, phase=self.phase)

    def scalar(self, scalar: Any) -> Value:
        """A run-time number (`te.scalar`), an FP32 0-dim value that never enters the plan's key."""
        return self.leaf(SCALAR, Spec((), torch.float32), slot=self._slot(scalar, "scalar"))

    def seed(self) -> Value:
        """The call's random seed, int64 0-dim; combine it with `stream()` so that every draw differs."""
        return self.leaf(SEED, Spec((), torch.int64))

    def stream(self) -> int:
        """A number unique in the graph, for the counter of a random primitive."""
        self._streams += 1
        return self._streams - 1

    def shape(self, value: Value) -> Value:
        """The shape of a value, as an operand: reading it saves nothing."""
        return self.call(SHAPE_OF, value)

    def dim(self, value: Value, axis: int) -> Value:
        """One dimension of a value, as an operand; equal leading dimensions of the inputs are one value."""
        size = self.spec(value).shape[axis]
        if isinstance(size, Dim) and self._memo.get(("input", size.source[0])) is not None:
            return self.call(DIM, self._memo[("input", size.source[0])], axis=size.source[1])
        return self.call(DIM, value, axis=axis)

    def input(self, index: int, spec: Spec) -> Value:
        """Declare plan input `index`."""
        value = self.leaf(INPUT, spec, index=index)
        self._memo[("input", index)] = value
        return value

    def update(self, buffer: Value, value: Value, combine: str = "replace") -> Value:
        """SSA state: a new version of a buffer, written by the commit step ("replace" or "max" of several)."""
        if self.node(buffer).prim is not BUFFER:
            raise self.located(
                PlanError("update: the first argument is not a buffer; use g.buffer(tensor)")
            )
        self.updates.append((buffer, value, combine))
        return value

    def cut(self, value: Value, kind: str = "forced") -> Value:
        """A segment border at this value: always ("forced"), or where enough parameters have gathered, at a
        residual-stream value ("stream") or, in a pipeline without one, between top-level children ("child")."""
        return self.call(CUT, value, kind=kind, name=self.path)

    @contextlib.contextmanager
    def nested(self) -> Iterator[bool]:
        """Inside a residual branch; yields whether it is the outermost one."""
        self.depth += 1
        try:
            yield self.depth == 1
        finally:
            self.depth -= 1

    def module(self, module: torch.nn.Module, *values: Value) -> tuple[Value, ...]:
        """Call a module that is not ours (or one with hooks): a segment of its own."""
        if self._resolver is None:
            raise PlanError("this graph was made without modules")
        slot, outputs = self._resolver.module(self, module, tuple(self.spec(v) for v in values))
        made = Prim("module", _no_reference, _no_reference, len(outputs), "effect")
        node = self.append(made, values, Attrs({"slot": slot}), outputs)
        return tuple(Value(node, i) for i in range(len(outputs)))

    def _slot(self, thing: Any, kind: str) -> tuple[str, str]:
        if self._resolver is None:
            raise PlanError("this graph was made without modules, so it has no parameters")
        slot = self._resolver.slot(thing)
        if slot is None:
            raise self.located(
                PlanError(
                    f"a {kind} is used that no op of the pipeline owns; register it on the op that emits it"
                )
            )
        return slot

    # -- position: paths and recompute scopes

    @property
    def path(self) -> str:
        """Path of the op that is emitting."""
        return self._path[-1] if self._path else ""

    @contextlib.contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Nodes made inside belong to the op at `path`."""
        self._path.append(path)
        try:
            yield
        finally:
            self._path.pop()

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        """Nodes made inside are recomputed in backward instead of saved."""
        outer = self._scope
        self._scopes += 1
        self._scope = (*outer, self._scopes)
        try:
            yield
        finally:
            self._scope = outer

    @contextlib.contextmanager
    def _in_phase(self, phase: Phase) -> Iterator[None]:
        saved, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = saved

    @contextlib.contextmanager
    def position(self, node: Node, phase: Phase | None = None) -> Iterator[None]:
        """Nodes made inside take this node's path and scope (and the phase given)."""
        saved = self.phase, self._scope
        self.phase, self._scope = phase if phase is not None else node.phase, node.scope
        try:
            with self.at(node.path):
                yield
        finally:
            self.phase, self._scope = saved

    def located(self, error: Error) -> Error:
        """The error with the op's path in front."""
        where = self._resolver.describe(self.path) if self._resolver else self.path
        if getattr(error, "located", False) or not where:
            return error
        made = type(error)(f"{where}: {error}")
        made.located = True  # type: ignore[attr-defined]
        return made

    # -- queries

    def live(self, roots: Iterable[Value]) -> list[bool]:
        """Which nodes the roots need."""
        alive = [False] * len(self.nodes)
        for root in roots:
            alive[root.node] = True
        for node in reversed(self.nodes):
            if alive[node.id]:
                for value in node.inputs:
                    alive[value.node] = True
        return alive

    def structure(self) -> tuple[Any, ...]:
        """Everything but shapes: equal for two traces if a plan of one serves the other."""
        return tuple(
            (n.prim if n.prim.name != "module" else "module", n.inputs, n.attrs.key, n.scope)
            for n in self.nodes
        )


def _no_reference(*_: Any, **__: Any) -> Any:
    raise PlanError("a module segment has no reference")


class Resolver:
    """Turns what `emit` touches into slots of the pipeline (built by the runtime for each trace)."""

    def slot(self, thing: Any) -> tuple[str, str] | None:
        """(module path, attribute) of a tensor or scalar, or None."""
        raise NotImplementedError

    def spec(self, tensor: torch.Tensor) -> Spec:
        """What a parameter is: dense, unless the resolver knows better."""
        return Spec(tuple(tensor.shape), tensor.dtype)

    def module(
        self, g: Graph, module: torch.nn.Module, specs: tuple[Spec, ...]
    ) -> tuple[str, tuple[Spec, ...]]:
        """Path of a foreign module and the specs of its outputs."""
        raise NotImplementedError

    def path_of(self, module: torch.nn.Module) -> str | None:
        """Path of a module of the pipeline, or None."""
        raise NotImplementedError

    def describe(self, path: str) -> str:
        """`Sequential.1 (Linear)` for error messages."""
        raise NotImplementedError


def require(condition: bool, message: str) -> None:
    """Raise a ShapeError unless the condition holds; for shape rules."""
    if not condition:
        raise ShapeError(message)


def verify(graph: Graph) -> None:
    """Check the invariants that passes must keep.

    Raises:
        PlanError: an input comes after its reader, an output index is out of range, or a forward node
            reads a backward value.
    """
    for node in graph.nodes:
        for value in node.inputs:
            if not 0 <= value.node < node.id:
                raise PlanError(
                    f"node {node.id} ({node.prim.name}) reads node {value.node}, which comes later"
                )
            source = graph.nodes[value.node]
            if not 0 <= value.index < len(graph.specs[value.node]):
                raise PlanError(
                    f"node {node.id} reads output {value.index} of {source.prim.name}, which has fewer"
                )
            if node.phase is Phase.FORWARD and source.phase is not Phase.FORWARD:
                raise PlanError(f"forward node {node.id} ({node.prim.name}) reads a backward value")


def signature_arity(function: Callable[..., Any], skip: int) -> int | None:
    """Number of positional parameters after the first `skip`; None if it takes any number."""
    count = 0
    for parameter in list(inspect.signature(function).parameters.values())[skip:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return None
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            count += parameter.default is parameter.empty
    return count
