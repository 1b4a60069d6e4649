"""A plain interpreter of op graphs, so that ops are tested without compiler and runtime.

It traces an op over specs, differentiates with the gradient rules, runs the live nodes in order and
checks every result against its inferred spec.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from te_ops.attrs import Dim
from te_ops.basic.pointwise import SUM
from te_ops.graph import (
    BUFFER,
    GRAD,
    GRADIENTS,
    INPUT,
    LEAVES,
    PARAM,
    SCALAR,
    SEED,
    Graph,
    Phase,
    Resolver,
    Spec,
    Value,
    verify,
)
from te_ops.op import Op, Scalar

torch.set_num_threads(1)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Slots(Resolver):
    def __init__(self, op: nn.Module) -> None:
        self.op = op
        self.things: dict[tuple[str, str], Any] = {}
        for path, module in op.named_modules():
            for name, thing in (*module._parameters.items(), *module.__dict__.items()):
                if isinstance(thing, torch.Tensor | Scalar):
                    self.things[path, name] = thing

    def slot(self, thing: Any) -> tuple[str, str] | None:
        return next((slot for slot, own in self.things.items() if own is thing), None)

    def path_of(self, module: nn.Module) -> str | None:
        return next((path for path, own in self.op.named_modules() if own is module), None)

    def describe(self, path: str) -> str:
        return f"{type(self.op).__name__}.{path}" if path else type(self.op).__name__


@dataclass
class Program:
    """A traced and differentiated op, which runs on inputs of any row count."""

    op: Op
    g: Graph
    outputs: tuple[Value, ...]
    grads: dict[Value, Value]  # leaf -> its gradient
    ran: list[str] = field(default_factory=list)
    saved: list[tuple[str, int, torch.dtype]] = field(default_factory=list)

    def run(self, *xs: torch.Tensor, dys: Sequence[Any] = (), seed: int = 0) -> list[Any]:
        """Outputs, then the gradients of `grads` in order."""
        things = _Slots(self.op).things
        values: dict[Value, Any] = {}
        specs = [self.g.specs[n.id][0] for n in self.g.nodes if n.prim is INPUT]
        traced = all(spec.shape == x.shape for spec, x in zip(specs, xs, strict=True))
        roots = (*self.outputs, *self.grads.values())
        alive = self.g.live(roots)
        self.ran.clear()
        self.saved.clear()
        for node in self.g.nodes:
            if not alive[node.id]:
                continue
            leaves = {
                INPUT: lambda n: xs[n.attrs["index"]],
                GRAD: lambda n: dys[n.attrs["index"]],
                SEED: lambda n: torch.tensor(seed),
                PARAM: lambda n: things[n.attrs["slot"]].detach(),
                BUFFER: lambda n: things[n.attrs["slot"]],
                SCALAR: lambda n: torch.tensor(things[n.attrs["slot"]].value),
            }
            if node.prim in leaves:
                results = (leaves[node.prim](node),)
            else:
                with torch.no_grad():
                    made = node.prim.reference(*(values[v] for v in node.inputs), **node.attrs)
                results = made if node.prim.n_out > 1 else (made,)
                self.ran.append(node.prim.name)
                self._save(node)
            for i, result in enumerate(results):
                values[Value(node.id, i)] = result
                _check(result, self.g.spec(Value(node.id, i)), node.prim.name, exact=traced)
        return [values[v] for v in roots]

    def _save(self, node: Any) -> None:
        for v in node.inputs if node.phase.is_backward else ():
            source = self.g.node(v)
            if source.phase.is_backward or self.g.spec(v).kind.name == "shape":
                continue
            entry = (source.prim.name, v.index, self.g.spec(v).dtype)
            if entry not in self.saved:
                self.saved.append(entry)


def _check(result: Any, spec: Spec, name: str, *, exact: bool) -> None:
    if isinstance(result, tuple):
        assert len(result) == len(spec.shape), name
        return
    assert result.dtype is spec.dtype, (name, result.dtype, spec.dtype)
    assert result.dim() == len(spec.shape), (name, result.shape, spec.shape)
    for size, expected in zip(result.shape, spec.shape, strict=True):
        assert size == expected or not exact, (name, tuple(result.shape), spec)


def spec_of(x: torch.Tensor, index: int) -> Spec:
    """As the compiler marks inputs: all sizes but the last are symbols; of integers, all."""
    symbols = x.dim() - x.is_floating_point()
    dims = [Dim(n, (index, a)) if a < symbols else n for a, n in enumerate(x.shape)]
    return Spec(tuple(dims), x.dtype)


def program(
    op: Op,
    *xs: torch.Tensor,
    wanted: Callable[[str], bool] = lambda name: True,
    autocast: torch.dtype | None = None,
    given: Sequence[bool] | None = None,
) -> Program:
    """Trace `op`, and differentiate by inputs "0", "1", ... and parameters by name."""
    g = Graph(_Slots(op), autocast_dtype=autocast)
    inputs = [g.input(i, spec_of(x, i)) for i, x in enumerate(xs)]
    made = op.emit(g, *inputs)
    outputs = (made,) if isinstance(made, Value) else made
    forward = len(g.nodes)
    grads: dict[Value, list[Value]] = {}
    g.phase = Phase.DGRAD
    for i, out in enumerate(outputs):
        if given is None or given[i]:
            grads.setdefault(out, []).append(g.leaf(GRAD, g.spec(out), index=i))
    for node in reversed(g.nodes[:forward]):
        outs = [Value(node.id, i) for i in range(len(g.specs[node.id]))]
        dys = [_total(g, grads.get(out)) for out in outs]
        if node.prim in LEAVES or node.prim not in GRADIENTS or not any(dys):
            continue
        with g.position(node, Phase.DGRAD):
            for v, dx in zip(node.inputs, GRADIENTS[node.prim](g, node, *dys), strict=True):
                if dx is not None:
                    grads.setdefault(v, []).append(dx)
    wants: dict[Value, Value] = {}
    for node in g.nodes[:forward]:
        if node.prim in (INPUT, PARAM) and node.out in grads and wanted(leaf_name(node)):
            wants[node.out] = _total(g, grads[node.out])
    verify(g)
    return Program(op, g, outputs, wants)


def leaf_name(node: Any) -> str:
    return str(node.attrs["index"]) if node.prim is INPUT else ".".join(filter(None, node.slot))


def _total(g: Graph, values: list[Value] | None) -> Any:
    if not values:
        return None
    return values[0] if len(values) == 1 else g.call(SUM, *values, dtype=g.spec(values[0]).dtype)


def forward(op: Op, *xs: torch.Tensor, seed: int = 0, **options: Any) -> Any:
    """The output (or the list of outputs) alone."""
    outputs = program(op, *xs, wanted=lambda _: False, **options).run(*xs, seed=seed)
    return outputs if len(outputs) > 1 else outputs[0]


# -- comparison with float64


def layouts(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same values in other strides (and, for "expanded", equal rows)."""
    yield "contiguous", x.contiguous()
    if x.dim() > 1:
        yield "transposed", x.transpose(0, -1).contiguous().transpose(0, -1)
        yield "expanded", x[:1].expand(x.shape)
    wide = torch.empty(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)
    wide[..., 1::2] = x
    yield "strided", wide[..., 1::2]


def subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Every subset, the empty one included."""
    for count in range(len(names) + 1):
        yield from itertools.combinations(names, count)


def close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 8.0
) -> None:
    """Equal to `expected` (float64) within `scale` roundings of its largest value, or of 1.

    Inputs of the tests are of size 1, so that is what cancels where a result is small.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    eps = torch.finfo(dtype).eps
    largest = float(expected.abs().amax()) if expected.numel() else 0.0
    bound = scale * eps * max(largest, 1.0)
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=bound)


def check(
    op: Op,
    xs: Sequence[torch.Tensor],
    function: Callable[..., Any],
    *,
    scale: float = 8.0,
    seed: int = 0,
    masks: bool = True,
    live: bool = True,
) -> None:
    """Outputs and gradients against float64 autograd of `function(*inputs, **parameters)`.

    With `masks`, every subset of inputs and parameters asks for gradients in turn; with `live` the
    call of the op itself must agree, too (not for ops that draw a seed).
    """
    named = {name: p.detach() for name, p in op.named_parameters()}
    leaves = {str(i): x for i, x in enumerate(xs)} | named
    exact = {
        name: x.double().clone().requires_grad_() if x.is_floating_point() else x
        for name, x in leaves.items()
    }
    result = function(
        *(exact[str(i)] for i in range(len(xs))), **{name: exact[name] for name in named}
    )
    expected = result if isinstance(result, tuple) else (result,)
    torch.manual_seed(seed)
    dtype = next(x.dtype for x in leaves.values() if x.is_floating_point())
    dys = [torch.randn(y.shape, dtype=torch.float64).to(dtype) for y in expected]
    floats = [name for name, x in exact.items() if x.is_floating_point()]
    wants = torch.autograd.grad(
        expected,
        [exact[name] for name in floats],
        [dy.double() for dy in dys],
        allow_unused=True,
        materialize_grads=True,
    )
    for subset in subsets(floats) if masks else [tuple(floats)]:
        made = program(op, *xs, wanted=lambda name, subset=subset: name in subset)
        dys_cast = [dy.to(made.g.spec(v).dtype) for dy, v in zip(dys, made.outputs, strict=True)]
        actual = made.run(*xs, dys=dys_cast, seed=seed)
        for y, want in zip(actual, expected, strict=False):
            close(y, want.detach(), y.dtype, scale)
        names = [leaf_name(made.g.node(v)) for v in made.grads]
        assert set(names) == set(subset)
        for name, grad in zip(names, actual[len(expected) :], strict=True):
            assert grad.dtype is leaves[name].dtype
            close(grad, wants[floats.index(name)], grad.dtype, scale)
        if live:
            by_name = dict(zip(names, actual[len(expected) :], strict=True))
            check_call(op, xs, dys_cast, actual[: len(expected)], by_name)


def check_call(
    op: Op,
    xs: Sequence[torch.Tensor],
    dys: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    grads: dict[str, torch.Tensor],
) -> None:
    """Call the op with gradients asked for as in `grads`: it gives what the interpreter got.

    To a few roundings, since entry copies strided inputs and torch then sums in another order.
    """
    leaves = {str(i): x.detach() for i, x in enumerate(xs)} | dict(op.named_parameters())
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in grads)
    result = op(*(leaves[str(i)] for i in range(len(xs))))
    ys = result if isinstance(result, tuple) else (result,)
    for y, want in zip(ys, outputs, strict=True):
        close(y.detach(), want.double(), want.dtype)
    if grads:
        live = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
        made = torch.autograd.grad(
            [y for y, _ in live], [leaves[name] for name in grads], [dy for _, dy in live]
        )
        for grad, want in zip(made, grads.values(), strict=True):
            close(grad, want.double(), want.dtype)
            assert grad.dtype is want.dtype
