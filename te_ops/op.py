"""Op: an nn.Module that emits graph nodes instead of computing.

`forward` plans, caches and runs; it is filled in by `te_ops.runtime` when the package is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from te_ops.attrs import attr_key
from te_ops.errors import Error, PlanError, RecipeError, ShapeError
from te_ops.graph import Graph, Value, signature_arity


class Runtime:
    """What `Op` calls; the runtime package fills the slots."""

    run: Callable[..., Any] | None = None
    plan: Callable[..., Any] | None = None
    load_state: Callable[..., None] | None = None
    graphed: Callable[..., Any] | None = None  # for ops with cuda_graph=True
    microbatch: Callable[..., Any] | None = None  # for calls with is_first_microbatch=


class Epoch:
    """Counts changes to any op (attributes, children, modes, hooks): a cached fingerprint is valid while it stands."""

    now: ClassVar[int] = 0


class Scalar:
    """A run-time number: changing it never makes a new plan.

    >>> cap = Scalar(30.0)
    >>> cap.set(20.0)
    >>> cap.value
    20.0
    """

    def __init__(self, value: float) -> None:
        self.value = float(value)

    def set(self, value: float) -> None:
        """Use another number from the next call on."""
        self.value = float(value)

    def __repr__(self) -> str:
        return f"te.scalar({self.value})"


STATE_NAME = "quantizer"  # child under which an op keeps the state of stateful recipes

_MODULE_FIELDS = frozenset(nn.Module().__dict__) | {"training"}
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
GLOBAL_HOOKS: tuple[Any, ...] = tuple(
    getattr(nn.modules.module, f"_global{name}") for name in HOOKS
)


class Op(nn.Module):
    """One step (or pipeline of steps) that te_ops can fuse: parameters plus the nodes that it emits.

    Subclasses write `emit(g, *xs)`; the number of inputs is the number of its positional parameters
    (`num_inputs` overrides it). The last `num_extra_outputs` results leave a Sequential as extra outputs.
    """

    num_inputs: int | None = 1
    num_extra_outputs: int = 0
    feature_dims: int = 1  # trailing dimensions of its inputs that a plan fixes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.forward is not Op.forward:  # its own, or that of a base class beside Op
            raise PlanError(
                f"{cls.__name__} overrides forward, which te_ops would have to skip when it fuses; write emit(g, x) "
                "instead, or derive from torch.nn.Module to be a segment of its own"
            )
        if "emit" in cls.__dict__:
            if "num_inputs" not in cls.__dict__:
                cls.num_inputs = signature_arity(cls.__dict__["emit"], skip=2)
            cls.emit = _entered(cls.__dict__["emit"])

    # -- for subclasses

    if TYPE_CHECKING:  # each op names its own inputs
        emit: Callable[..., Any]
    else:

        def emit(self, g: Graph, *xs: Value) -> Value | tuple[Value, ...]:
            """Append this op's nodes to the graph and return its output values."""
            raise PlanError(f"{type(self).__name__} has no emit(g, x)")

    def config(self) -> tuple[Any, ...]:
        """Everything that `emit` read: part of the plan's key. The default takes every plain attribute."""
        items = []
        for name, value in self.__dict__.items():
            if name in _MODULE_FIELDS or name.startswith("_te_") or isinstance(value, torch.Tensor):
                continue
            items.append((name, config_key(value, f"{type(self).__name__}.{name}")))
        return tuple(items)

    def main_grads(self) -> tuple[str, ...]:
        """Names of own parameters whose gradients are added to their `main_grad`, and not given to autograd."""
        return ()

    def state_operands(self) -> dict[str, str]:
        """Operands of this op that stateful recipes keep state for, with the primitive that reads them."""
        return {}

    # -- for users

    def forward(self, *xs: Any, is_first_microbatch: bool | None = None) -> Any:
        """Plan (once per key), run, and return tensors. Never overridden.

        `is_first_microbatch`: True quantizes the weights and keeps the copies, False uses those of the last call with
        True (`te.weights_frozen` says what is checked); None, the default, quantizes for this call only.
        """
        if Runtime.run is None or Runtime.microbatch is None:
            raise PlanError("te_ops.runtime is not imported; use `import te_ops`")
        if is_first_microbatch is not None:
            return Runtime.microbatch(self, xs, is_first_microbatch)
        return Runtime.run(self, xs)

    def plan(self, *xs: Any) -> Any:
        """The plan that a call with these inputs would replay; nothing is executed."""
        if Runtime.plan is None:
            raise PlanError("te_ops.runtime is not imported; use `import te_ops`")
        return Runtime.plan(self, xs)

    def explain(self, *xs: Any) -> str:
        """What fused, with which kernel, what is saved in which format, what was refused and why."""
        return str(self.plan(*xs).explain())

    @property
    def hooked(self) -> bool:
        """Whether module hooks make this op a segment border."""
        fields = self.__dict__
        return any(fields[name] for name in HOOKS) or any(GLOBAL_HOOKS)

    # -- changes that make a cached fingerprint stale

    def __setattr__(self, name: str, value: Any) -> None:
        Epoch.now += 1
        if name == STATE_NAME and isinstance(value, nn.Module):
            raise _reserved(self)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        Epoch.now += 1
        super().__delattr__(name)

    def train(self, mode: bool = True) -> Op:
        """As nn.Module.train; plans of the other mode stay cached."""
        Epoch.now += 1
        super().train(mode)
        return self

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As nn.Module.add_module."""
        Epoch.now += 1
        if name == STATE_NAME:
            raise _reserved(self)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module.register_parameter."""
        Epoch.now += 1
        super().register_parameter(name, param)

    def register_buffer(
        self, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        """As nn.Module.register_buffer."""
        Epoch.now += 1
        super().register_buffer(name, tensor, persistent)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Op:
        Epoch.now += 1
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if (
            Runtime.load_state is not None
        ):  # quantizer state is created from the keys that a checkpoint has
            Runtime.load_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Quantizer state moves by its own rules: DDP must not broadcast it at every forward."""
        return [name for name, _ in self.named_buffers() if ".delayed." in f".{name}"]

    def __getstate__(self) -> dict[str, Any]:
        # Plans are per process and cheap to make again: copies and pickles go without.
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_te_")}


def _reserved(op: Op) -> PlanError:
    return PlanError(
        f"{type(op).__name__}: a child cannot be named {STATE_NAME!r}, which is where an op keeps its quantizer state; "
        "choose another name"
    )


def _entered(emit: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an `emit` so that its nodes carry the op's path, and hooks make it a segment."""

    @functools.wraps(emit)
    def emit_at_path(self: Op, g: Graph, *xs: Value) -> Any:
        resolver = g._resolver
        path = resolver.path_of(self) if resolver is not None else None
        if path is None:
            return emit(self, g, *xs)
        if path and self.hooked and g._path:  # the root's hooks run in its own __call__
            with g.at(path):
                outputs = g.module(self, *xs)
            return outputs if len(outputs) > 1 else outputs[0]
        with g.at(path):
            try:
                return emit(self, g, *xs)
            except Error as error:
                raise g.located(error) from error.__cause__

    return emit_at_path


def config_key(value: Any, name: str) -> Any:
    """The identity of an op's attribute in the plan's key.

    Raises:
        PlanError: it is not a plain value; the op must write `config()`.
    """
    if isinstance(value, Scalar):
        return ("scalar",)
    if isinstance(value, list | tuple):
        return (type(value), tuple(config_key(item, name) for item in value))
    if isinstance(value, dict):
        return (dict, tuple((k, config_key(v, name)) for k, v in value.items()))
    if isinstance(value, nn.Module):
        raise PlanError(f"{name} holds a module that is not registered as a child")
    try:
        return attr_key(value, name)
    except PlanError:
        pass
    try:
        hash(value)
    except TypeError:
        raise PlanError(
            f"{name} is a {type(value).__name__}, not a plain value; write config() on the op"
        ) from None
    return (type(value), value)


__all__ = [
    "Epoch",
    "Error",
    "Op",
    "PlanError",
    "RecipeError",
    "Runtime",
    "Scalar",
    "ShapeError",
    "config_key",
]
