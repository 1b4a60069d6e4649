"""trace: run `emit` over specs; resolve what it touches to slots by module path and attribute."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize

from te_ops.attrs import Dim
from te_ops.compiler.work import Request
from te_ops.errors import Error, PlanError, ShapeError
from te_ops.graph import Graph, Kind, Resolver, Spec, Value
from te_ops.op import Op, Scalar
from te_ops.quantizers import QuantizedTensor, Usage


class ModuleResolver(Resolver):
    """Slots of one pipeline. Keeps no module alive: graphs that hold a resolver may sit in a reference cycle."""

    def __init__(self, root: nn.Module, device: torch.device | None = None) -> None:
        self._root = weakref.ref(root)
        self._device = device  # where the pipeline runs
        self._paths: dict[int, str] = {}
        self._slots: dict[int, tuple[str, str]] = {}
        for path, module in root.named_modules():
            self._paths[id(module)] = path
            if isinstance(module, Op):
                for name, thing in owned(module):
                    self._slots.setdefault(id(thing), (path, name))

    @property
    def root(self) -> nn.Module:
        """The op that is being planned."""
        root = self._root()
        assert root is not None
        return root

    def slot(self, thing: Any) -> tuple[str, str] | None:
        """(path, attribute) of a tensor or scalar that an op of the pipeline holds."""
        return self._slots.get(id(thing))

    def spec(self, tensor: torch.Tensor) -> Spec:
        """Dense, or a record for a quantized parameter."""
        return spec_of(tensor)

    def path_of(self, module: nn.Module) -> str | None:
        """Path under the root ("" for the root itself)."""
        return self._paths.get(id(module))

    def describe(self, path: str) -> str:
        """`Sequential.1 (Linear)`."""
        root = type(self.root).__name__
        if not path:
            return root
        try:
            kind = type(self.root.get_submodule(path)).__name__
        except AttributeError:
            return f"{root}.{path}"
        return f"{root}.{path} ({kind})"

    def module(
        self, g: Graph, module: nn.Module, specs: tuple[Spec, ...]
    ) -> tuple[str, tuple[Spec, ...]]:
        """Specs of a foreign module's outputs, by calling it on tensors without data, without its hooks or state."""
        path = self.path_of(module)
        if path is None:
            raise PlanError(
                f"{type(module).__name__} is called but not registered as a child of the op that calls it"
            )
        for spec in specs:
            if spec.kind.name != "dense":
                raise PlanError(
                    f"{self.describe(path)}: a module that is not an Op takes dense tensors only"
                )
        if isinstance(module, Op):
            return path, self._op_outputs(g, module, specs)
        _load_meta_kernels()
        try:
            with torch.no_grad(), self._without_data(g) as device:
                shadow = meta_copy(module, {}, device)
                sizes = [[int(d) for d in s.shape] for s in specs]
                result = shadow.forward(
                    *(
                        torch.empty(n, dtype=s.dtype, device=device)
                        for n, s in zip(sizes, specs, strict=True)
                    )
                )
        except Exception as error:
            raise PlanError(
                f"{self.describe(path)}: te_ops must know its output shapes, and calling it on meta tensors failed: "
                f"{type(error).__name__}: {error}. Call it outside the Sequential, or make it an Op"
            ) from error
        results = result if isinstance(result, tuple | list) else (result,)
        for item in results:
            if not isinstance(item, torch.Tensor):
                raise PlanError(
                    f"{self.describe(path)}: returned a {type(item).__name__}; modules must return tensors"
                )
        return path, tuple(_with_dims(tuple(t.shape), t.dtype, specs) for t in results)

    @contextlib.contextmanager
    def _without_data(self, g: Graph) -> Iterator[torch.device | str]:
        """Yields the device of tensors without data. torch's autocast, which decides dtypes, passes meta tensors by."""
        if g.autocast_dtype is None or self._device is None:
            yield "meta"
        else:
            with (
                FakeTensorMode(allow_non_fake_inputs=True),
                torch.autocast(self._device.type, g.autocast_dtype),
            ):
                yield self._device

    def _op_outputs(self, g: Graph, op: Op, specs: tuple[Spec, ...]) -> tuple[Spec, ...]:
        scratch = Graph(ModuleResolver(op, self._device), autocast_dtype=g.autocast_dtype)
        result = op.emit(scratch, *(scratch.input(i, s) for i, s in enumerate(specs)))
        values = (
            result if isinstance(result, tuple) and not isinstance(result, Value) else (result,)
        )
        return tuple(scratch.spec(v) for v in values)


@functools.cache
def _load_meta_kernels() -> None:
    """Make torch's first meta call, which imports a lot, where no frame holds a tensor of the caller.

    The modules that it imports keep the frames of their import in reference cycles.
    """
    thread = threading.Thread(target=lambda: torch.tanh(torch.empty(1, device="meta")))
    thread.start()
    thread.join()


def _with_dims(shape: tuple[int, ...], dtype: torch.dtype, specs: tuple[Spec, ...]) -> Spec:
    """A meta result's shape, with the leading dimensions it shares with an input marked as such."""
    for spec in specs:
        lead = spec.shape[: len(shape) - 1]
        if len(spec.shape) == len(shape) and shape[:-1] == lead:
            return Spec((*lead, shape[-1]), dtype)
    return Spec(shape, dtype)


def spec_of(x: torch.Tensor) -> Spec:
    """Of a plan input or a parameter: a quantized tensor is a record, the row one if it has it."""
    if isinstance(x, QuantizedTensor):
        usage = Usage.ROW if x.rowwise is not None else Usage.COL
        record = x.rowwise if x.rowwise is not None else x.columnwise
        assert record is not None
        return Spec(tuple(x.shape), x.dtype, Kind("record", record.quantizer, usage))
    return Spec(tuple(x.shape), x.dtype)


def owned(op: nn.Module) -> list[tuple[str, Any]]:
    """Tensors and run-time scalars that an op holds: parameters, buffers, parametrized and plain attributes."""
    found: list[tuple[str, Any]] = [(n, t) for n, t in op._parameters.items() if t is not None]
    found += [(n, t) for n, t in op._buffers.items() if t is not None]
    found += [(n, t) for n, t in op.__dict__.items() if isinstance(t, torch.Tensor | Scalar)]
    if parametrize.is_parametrized(op):
        found += [(n, getattr(op, n)) for n in op.parametrizations]  # type: ignore[union-attr]
    return found


def meta_copy(
    module: nn.Module, memo: dict[int, nn.Module], device: torch.device | str = "meta"
) -> nn.Module:
    """A shallow twin with empty tensors and no hooks: running it changes nothing of the original."""
    if id(module) in memo:
        return memo[id(module)]
    twin = memo[id(module)] = copy.copy(module)

    def to_meta(t: torch.Tensor | None) -> Any:
        return None if t is None else torch.empty_like(t, device=device)

    fields = dict(module.__dict__)
    fields["_parameters"] = {n: to_meta(p) for n, p in module._parameters.items()}
    fields["_buffers"] = {n: to_meta(b) for n, b in module._buffers.items()}
    fields["_modules"] = {n: m and meta_copy(m, memo, device) for n, m in module._modules.items()}
    for name in fields:
        if name.endswith(("_hooks", "_hooks_with_kwargs")):
            fields[name] = OrderedDict()
    twin.__dict__.update(fields)
    return twin


def trace(request: Request) -> tuple[Graph, tuple[Value, ...]]:
    """The graph that the op emits, and its outputs.

    Raises:
        ShapeError: the number of inputs is wrong; and what the ops' shape rules raise.
    """
    with (
        parametrize.cached()
    ):  # a parametrized tensor must be one object while emit and resolver look at it
        return _trace(request)


def _trace(request: Request) -> tuple[Graph, tuple[Value, ...]]:
    g = Graph(ModuleResolver(request.op, request.device), autocast_dtype=request.autocast_dtype)
    expected = request.op.num_inputs
    if expected is not None and expected != len(request.inputs):
        names = getattr(request.op, "input_names", ())
        said = f": {', '.join(names)}" if len(names) == expected else ""
        takes = f"takes {expected} input{'s' * (expected != 1)}, got {len(request.inputs)}{said}"
        raise ShapeError(f"{type(request.op).__name__} {takes}")
    leads = leading_dims(request.inputs, request.op.feature_dims)
    xs = [
        g.input(i, marked(spec, i, len(lead)))
        for i, (spec, lead) in enumerate(zip(request.inputs, leads, strict=True))
    ]
    result = request.op.emit(g, *xs)
    outputs = result if isinstance(result, tuple) and not isinstance(result, Value) else (result,)
    for value in outputs:
        if not isinstance(value, Value):
            raise PlanError(
                f"{type(request.op).__name__}.emit returned a {type(value).__name__}, not graph values"
            )
    return g, tuple(outputs)


def marked(spec: Spec, index: int, dynamic: int) -> Spec:
    """An input spec whose dynamic dimensions (the first so many) remember where they come from."""
    shape = tuple(
        Dim(d, (index, axis)) if axis < dynamic else int(d) for axis, d in enumerate(spec.shape)
    )
    return Spec(shape, spec.dtype, spec.kind)


def leading_dims(specs: Sequence[Spec], features: int) -> list[tuple[int, ...]]:
    """The dynamic dimensions of every input; one shaped like the leading dimensions of the first is a value per row."""
    first = dynamic_dims(specs[0], features) if specs else ()
    return [
        s.shape if i and first and s.shape == first else dynamic_dims(s, features)
        for i, s in enumerate(specs)
    ]


def dynamic_dims(spec: Spec, features: int) -> tuple[int, ...]:
    """Dimensions that may vary within a plan: all but the last (features), or all of an integer tensor.

    `features` is the number of trailing dimensions that the op's parameters fix (`Op.feature_dims`).
    """
    if spec.kind.name == "dense" and not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return spec.shape
    return spec.shape[: max(0, len(spec.shape) - features)]


__all__ = ["Error", "ModuleResolver", "dynamic_dims", "leading_dims", "meta_copy", "owned", "trace"]
