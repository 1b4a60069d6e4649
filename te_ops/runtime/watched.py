"""What the recorded graph of a module has taken in, so that a change of it makes another signature."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from te_ops.context import join_path
from te_ops.op import GLOBAL_HOOKS, HOOKS, Epoch, Op, Scalar
from te_ops.runtime.cache import _intern, _is_state
from te_ops.runtime.state import DelayedState


class Watched:
    """Tensors, modes, hooks and numbers of a module tree, read again when an op announces a change.

    It keeps the tables of the root, not the root, whose cache it lives in.
    """

    def __init__(self, module: nn.Module, root_hooks: bool) -> None:
        self.epoch = Epoch.now
        modules = list(module.named_modules())
        self.title = type(module).__name__
        kept = [(path, m) for path, m in modules if not _is_state(path)]
        self.structure = _intern(("graphed", tuple((path, type(m), _taken(m)) for path, m in kept)))
        # What ops have of modes and children shows in the epoch; modules of others do not announce theirs.
        self.modes = tuple(m.training for _, m in kept if isinstance(m, Op))
        foreign = [m for _, m in kept if not isinstance(m, Op)]
        self.foreign = [m for m in foreign if m is not module]
        self.children = [(m._modules, tuple(m._modules.values())) for m in foreign]
        self.params = [
            (m._parameters, name)
            for _, m in modules
            for name, p in m._parameters.items()
            if p is not None
        ]
        self.paths = [
            join_path(path, name)
            for path, m in modules
            for name, p in m._parameters.items()
            if p is not None
        ]
        first: dict[int, int] = {}
        for i, (table, name) in enumerate(self.params):
            if type(table[name]) in (nn.Parameter, torch.Tensor):
                first.setdefault(id(table[name]), i)
        self.unique = list(first.values())
        buffers = [
            (m._buffers, name)
            for _, m in modules
            for name, b in m._buffers.items()
            if b is not None and not isinstance(m, DelayedState)
        ]
        self.places = [*self.params, *buffers]
        self.scales = [m._buffers for _, m in modules if isinstance(m, DelayedState)]
        self.hooks = [
            (path, m.__dict__[name]) for path, m in kept for name in HOOKS if path or root_hooks
        ]
        self.tables = [table for _, table in self.hooks]
        self.scalars = [
            value
            for _, m in modules
            if isinstance(m, Op)
            for value in m.__dict__.values()
            if isinstance(value, Scalar)
        ]

    def outdated(self) -> bool:
        """Whether an op has announced a change, or a module of others has other children."""
        if self.epoch != Epoch.now:
            return True
        return bool(self.children) and any([tuple(t.values()) != c for t, c in self.children])  # noqa: C419  (a generator costs more)

    def hooked(self) -> str | None:
        """Where a hook is, since a replay would not run it."""
        if any(GLOBAL_HOOKS):
            return "a global module hook is registered"
        if any(self.tables):
            path = next(path for path, table in self.hooks if table)
            return f"{path or self.title} has a module hook"
        return None

    def tensors(self) -> list[Any]:
        """The dense parameters, as they are now."""
        return [self.params[i][0][self.params[i][1]] for i in self.unique]

    def held(self) -> list[Any]:
        """Parameters and buffers as they are now, None for one that is gone."""
        return [table.get(name) for table, name in self.places]

    def now(self, module: nn.Module, held: Sequence[Any]) -> list[Any]:
        """What a recorded graph has taken in besides the forms of what is held: values that can be a key's."""
        scales: list[Any] = [table["scale"] for table in self.scales]
        try:  # a scale is one FP32 number, wherever it lies
            places: list[Any] = [*map(_address, held), *map(_address, scales)]
        except (RuntimeError, TypeError):  # one is gone, or has no storage of its own
            places = list(map(_place, (*held, *scales)))
        places += (self.structure, self.modes, module.training, *map(_training, self.foreign))
        if self.scalars:
            places += [s.value for s in self.scalars]
        return places


def _taken(m: nn.Module) -> Any:
    """What the forward of a module reads of its attributes: all that is plain, for modules of others."""
    if isinstance(m, Op):
        return m.config()
    return tuple((k, v) for k, v in m.__dict__.items() if type(v) in (bool, int, float, str))


_address = torch.Tensor.data_ptr
_training = attrgetter("training")


def _place(t: torch.Tensor | None) -> Any:
    """Where it lies."""
    try:
        return None if t is None else t.data_ptr()
    except RuntimeError:  # no storage of its own
        return id(t)
