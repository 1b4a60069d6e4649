"""Pipelines: Sequential with the list API, Residual, Branch, Recompute and Cut."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Value
from te_ops.op import Op


class Sequential(Op):
    """Modules one after the other, planned as one graph (modules that are not te_ops ops are segments of their own).

    Takes modules or one dict of name -> module. The value that flows may be a tuple: an op with n inputs takes what
    flows, and further tensors from the caller, in order. Extra outputs (`num_extra_outputs`) are appended to the
    result, in op order.

    `cuda_graph=True` replays whole forwards and backwards as CUDA graphs where the device has them, one for each
    signature from its second call on (`te.make_graphed` says what that is); inside another pipeline it has no effect.
    Slices keep it, and a sum has that of its left side.
    """

    num_inputs = None
    cuda_graph: bool

    def __init__(
        self, *modules: nn.Module | Mapping[str, nn.Module], cuda_graph: bool = False
    ) -> None:
        super().__init__()
        if not isinstance(cuda_graph, bool):
            raise PlanError(f"Sequential: cuda_graph must be True or False, got {cuda_graph!r}")
        self.cuda_graph = cuda_graph
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            items: Iterable[tuple[str, Any]] = modules[0].items()
        else:
            items = ((str(i), m) for i, m in enumerate(modules))
        for name, module in items:
            self.add_module(name, _checked(module))

    @property
    def feature_dims(self) -> int:  # type: ignore[override]
        """That of the first op."""
        first = next(iter(self._modules.values()), None)
        return first.feature_dims if isinstance(first, Op) else 1

    def emit(self, g: Graph, *xs: Value) -> Any:
        """Fold the children over the inputs."""
        flow, rest, extras = _first(self, xs)
        for i, (_, child) in enumerate(self._modules.items()):
            if i and not g.depth and self._is_root(g):
                flow = tuple(
                    g.cut(v, kind="child") if g.spec(v).kind.name == "dense" else v for v in flow
                )
            flow, rest, more = _apply(g, child, flow, rest)
            extras += more
        if rest:
            raise ShapeError(
                f"{len(rest)} more input{'s' * (len(rest) > 1)} given than the ops take"
            )
        outputs = (*flow, *extras)
        return outputs if len(outputs) != 1 else outputs[0]

    def _is_root(self, g: Graph) -> bool:
        return g.path == ""

    # -- list API: every change makes new plans

    def _renumber(self, modules: Iterable[nn.Module]) -> None:
        names = list(self._modules)
        made = list(modules)
        for name in names:
            delattr(self, name)
        for i, module in enumerate(made):
            self.add_module(str(i), _checked(module))

    def _name_at(self, index: int) -> str:
        names = list(self._modules)
        index = operator.index(index)
        if not -len(names) <= index < len(names):
            raise IndexError(
                f"index {index} is out of range for a Sequential of {len(names)} modules"
            )
        return names[index]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            return self._modules[index]
        if isinstance(index, slice):
            chosen: Any = dict(list(self._modules.items())[index])
            return Sequential(chosen, cuda_graph=self.cuda_graph)
        return self._modules[self._name_at(index)]

    def __setitem__(self, index: int | str, module: nn.Module) -> None:
        name = index if isinstance(index, str) else self._name_at(index)
        self.add_module(name, _checked(module))

    def __delitem__(self, index: int | slice | str) -> None:
        if isinstance(index, str):
            delattr(self, index)
            return
        modules = list(self)
        del modules[index]
        self._renumber(modules)

    def append(self, module: nn.Module) -> Sequential:
        """Add a module at the end."""
        return self.insert(len(self), module)

    def extend(self, modules: Iterable[nn.Module]) -> Sequential:
        """Add modules at the end."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Sequential:
        """Insert a module before a position."""
        modules = list(self)
        modules.insert(index, _checked(module))
        self._renumber(modules)
        return self

    def pop(self, index: int = -1) -> nn.Module:
        """Remove a module and return it."""
        module: nn.Module = self[index]
        del self[index]
        return module

    def __add__(self, other: Sequential) -> Sequential:
        return Sequential(*self, *other, cuda_graph=self.cuda_graph)

    def __iadd__(self, other: Sequential) -> Sequential:
        return self.extend(other)


class Residual(Sequential):
    """x + body(x): the body's ops in order, added to the (first) input; the sum is rounded once.

    Its input and output are residual-stream values, where a large pipeline may be cut into segments.
    """

    def emit(self, g: Graph, *xs: Value) -> Any:
        """add(x, body(x))."""
        from te_ops.basic.structure import add

        with g.nested() as outermost:
            x = g.cut(xs[0], kind="stream") if outermost else xs[0]
            result = super().emit(g, x, *xs[1:])
        outputs = result if not isinstance(result, Value) else (result,)
        body, extras = outputs[0], outputs[1:]
        if g.spec(body).shape != g.spec(x).shape:
            raise ShapeError(
                f"the body maps {_shape(g, x)} to {_shape(g, body)}; a residual needs equal shapes"
            )
        y = add(g, x, body)
        y = g.cut(y, kind="stream") if outermost else y
        return (y, *extras) if extras else y


class Branch(Op):
    """Every child on the same inputs; returns their outputs as a tuple, for an op that takes several (`te.Add`)."""

    num_inputs = None

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        if len(branches) < 2:
            raise PlanError(f"Branch needs at least two branches, got {len(branches)}")
        for i, branch in enumerate(branches):
            self.add_module(str(i), _checked(branch))

    def emit(self, g: Graph, *xs: Value) -> Any:
        """The outputs of all branches."""
        outputs: tuple[Value, ...] = ()
        for child in self._modules.values():
            flow, _, extras = _apply(g, child, xs, ())
            outputs += (*flow, *extras)
        return outputs


class Recompute(Sequential):
    """A Sequential whose inside is recomputed in backward instead of saved: same recipe, scales, seeds and kernels."""

    def emit(self, g: Graph, *xs: Value) -> Any:
        """The children, inside a recompute scope."""
        with g.recompute():
            return super().emit(g, *xs)


class Cut(Op):
    """A segment border: gradients of what comes after are ready before backward goes on."""

    def emit(self, g: Graph, x: Value) -> Value:
        """The same value, in the next segment."""
        return g.cut(x)


def _checked(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise PlanError(f"a Sequential holds modules, got a {type(module).__name__}: {module!r}")
    return module


def _first(
    op: Op, xs: tuple[Value, ...]
) -> tuple[tuple[Value, ...], tuple[Value, ...], tuple[Value, ...]]:
    """What flows first: as many inputs as the first child takes; the rest is for later ones."""
    if not xs:
        raise ShapeError("at least one input is needed")
    first = next(iter(op._modules.values()), None)
    count = getattr(first, "num_inputs", 1)
    if count is None:
        count = max(1, _wanted(first, 1)) if isinstance(first, Sequential | Branch) else len(xs)
    return xs[:count], xs[count:], ()


def _apply(
    g: Graph, child: Any, flow: tuple[Value, ...], rest: tuple[Value, ...]
) -> tuple[tuple[Value, ...], tuple[Value, ...], tuple[Value, ...]]:
    """One child: (what flows on, inputs left, extra outputs)."""
    if not isinstance(child, Op):
        return g.module(child, *flow), rest, ()
    wanted = _wanted(child, len(flow))
    missing = max(0, wanted - len(flow))
    if missing > len(rest) or len(flow) > wanted:
        takes = f"takes {wanted} input{'s' * (wanted != 1)}"
        if missing:
            takes += f": {len(flow)} flow here and {len(rest)} more were given"
        else:
            takes += f", {len(flow)} flow here"
        with g.at((g._resolver and g._resolver.path_of(child)) or ""):
            raise g.located(ShapeError(takes))
    result = child.emit(g, *flow, *rest[:missing])
    outputs = result if not isinstance(result, Value) else (result,)
    extra = _extra_outputs(child)
    return outputs[: len(outputs) - extra], rest[missing:], outputs[len(outputs) - extra :]


def _wanted(child: Any, flowing: int) -> int:
    """Inputs that a child takes. A Branch: as many as the greediest child; a nested pipeline: what its first op takes,
    plus what later ops take beyond what flows there; an op that takes any number: what flows."""
    wanted = getattr(child, "num_inputs", 1)
    if wanted is not None:
        return int(wanted)
    if isinstance(child, Branch):
        return max(_wanted(branch, flowing) for branch in child._modules.values())
    if not isinstance(child, Sequential):
        return flowing
    total, have = 0, 0
    for i, op in enumerate(child):
        count = _wanted(op, have or flowing)
        total += count if i == 0 else max(0, count - have)
        have = _outputs(op, count)
    return max(total, 1)


def _outputs(op: Any, count: int) -> int:
    return len(op._modules) if isinstance(op, Branch) else 1


def _extra_outputs(op: Any) -> int:
    """Extra outputs of an op, those inside a nested pipeline included."""
    if isinstance(op, Sequential):
        return sum(_extra_outputs(child) for child in op)
    return int(getattr(op, "num_extra_outputs", 0))


def _shape(g: Graph, v: Value) -> str:
    return str(tuple(int(d) for d in g.spec(v).shape))
