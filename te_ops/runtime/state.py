"""Delayed-scaling state: buffers owned by the op, observed during a region, committed once at its end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from te_ops.compiler.work import STATE_PREFIX
from te_ops.context import Observed
from te_ops.errors import RecipeError
from te_ops.graph import Phase
from te_ops.op import Op
from te_ops.quantizers import (
    Float8Quantizer,
    delayed_update,
    join_nonfinite,
    resize_history,
    scale_from_history,
    split_nonfinite,
)
from te_ops.recipe import DelayedScaling, Recipe, Role
from te_ops.runtime.observed import (
    Cell,
    Handed,
    Observation,
    Seen,
    Sheet,
    by_state,
    observe,
    observe_sheet,
)
from te_ops.runtime.rolls import (
    UPDATES,
    Formula,
    Rolls,
    again,
    formula_of,
    remember,
    roll_on_device,
)

__all__ = [
    "UPDATES",
    "BackwardCommit",
    "Cell",
    "DelayedState",
    "Handed",
    "Observation",
    "Rolls",
    "Seen",
    "Sheet",
    "by_state",
    "commit",
    "load_state",
    "make_state",
    "observe",
    "observe_sheet",
    "prepare",
    "registered",
    "settle",
    "state_of",
]

KIND = STATE_PREFIX.partition(".")[2]
"""The child of `quantizer` under which the states of an op are."""


class DelayedState(nn.Module):
    """Scale [1], amax history [length] and count of non-finite steps [1] of one operand.

    Moves with its op but is never cast. `maker` is the recipe value that made the scale; under another one the
    scale is derived anew from the history.
    """

    _version = 1
    reads: ClassVar[list[tuple[DelayedState, DelayedScaling, float]] | None] = None  # while watched
    scale: torch.Tensor
    amax_history: torch.Tensor
    nonfinite_steps: torch.Tensor

    def __init__(self, length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, dtype=torch.float32, device=device))
        self.register_buffer(
            "amax_history", torch.zeros(length, dtype=torch.float32, device=device)
        )
        self.register_buffer("nonfinite_steps", torch.zeros(1, dtype=torch.int64, device=device))
        self.maker: tuple[DelayedScaling, float] | None = None
        self.formula: Formula | None = None  # of the last step that a kernel rolled
        self.version = 0
        _REGISTERED.append(weakref.ref(self))

    def _apply(self, fn: Any, recurse: bool = True) -> DelayedState:
        for name, buffer in self._buffers.items():
            assert buffer is not None
            moved = fn(buffer)
            self._buffers[name] = moved if moved.dtype is buffer.dtype else buffer.to(moved.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        if not self.version and not any(f"{prefix}{name}" in state_dict for name in self._buffers):
            return  # no step has touched it: a module that was not prepared would not have it either
        history = state_dict.get(f"{prefix}amax_history")
        known = self.amax_history.shape
        if history is not None and history.dim() == 1 and len(history) and history.shape != known:
            self.amax_history = torch.zeros(
                history.shape, dtype=torch.float32, device=self.scale.device
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.maker = None
        self.version += 1

    def scale_for(self, config: DelayedScaling, fp8_max: float) -> torch.Tensor:
        """The scale under this recipe; the buffer itself if this recipe (or none known) made it."""
        if DelayedState.reads is not None:
            DelayedState.reads.append((self, config, fp8_max))
        maker = self.maker
        if maker is None or (maker[0] is config and maker[1] == fp8_max):
            return self._buffers["scale"]  # type: ignore[return-value]
        if maker == (config, fp8_max):
            return self.scale
        history = resize_history(self.amax_history, config.amax_history_len)
        return scale_from_history(
            history,
            fp8_max=fp8_max,
            margin=config.margin,
            algo=config.amax_compute_algo,
            scale_algo=_scale_algo(config),
            pow2=config.use_power_2_scales,
        ).reshape(1)

    def advance(
        self,
        amax: torch.Tensor,
        config: DelayedScaling,
        fp8_max: float,
        when: torch.Tensor | None = None,
    ) -> None:
        """Roll one step (numerics: docs/guide/recipes), only if `when` (0-dim bool) holds."""
        with torch.inference_mode(False), torch.no_grad():  # buffers that training can write
            history = resize_history(self.amax_history, config.amax_history_len)
            scale, history, count = delayed_update(
                self.scale_for(config, fp8_max),
                history,
                self.nonfinite_steps,
                amax,
                fp8_max=fp8_max,
                margin=config.margin,
                algo=config.amax_compute_algo,
                scale_algo=_scale_algo(config),
                pow2=config.use_power_2_scales,
            )
            if when is not None:
                scale = torch.where(when, scale, self.scale)
                history = torch.where(
                    when, history, resize_history(self.amax_history, len(history))
                )
                count = torch.where(when, count, self.nonfinite_steps)
            if history.shape == self.amax_history.shape:
                self.amax_history.copy_(history)
            else:
                self.amax_history = history
            self.scale.copy_(scale)
            self.nonfinite_steps.copy_(count)
        self.maker = (config, fp8_max)
        self.version += 1


def _scale_algo(config: DelayedScaling) -> Any:
    algo = config.scaling_factor_compute_algo
    return None if algo is None else lambda amax, scale, fp8_max: algo(amax, scale, fp8_max, config)


_REGISTERED: list[weakref.ref[DelayedState]] = []


def registered() -> list[DelayedState]:
    """All live states in order of creation: the layout of a collective, the same on every rank of an SPMD program."""
    live = [(ref, state) for ref in _REGISTERED if (state := ref()) is not None]
    _REGISTERED[:] = [ref for ref, _ in live]
    return [state for _, state in live]


# -- where states live


def state_of(op: nn.Module, operand: str) -> DelayedState | None:
    """The op's state for an operand, or None."""
    tree = op._modules.get("quantizer")
    kind = tree._modules.get(KIND) if tree is not None else None
    found = kind._modules.get(operand) if kind is not None else None
    return found if isinstance(found, DelayedState) else None


def make_state(
    op: nn.Module, operand: str, length: int, device: torch.device | None = None
) -> DelayedState:
    """The op's state for an operand, created if it has none: on `device`, else where the op's own tensors are.

    An op without tensors of its own may have a state elsewhere, from a checkpoint, say: then it moves.
    """
    found = state_of(op, operand)
    if found is not None:
        here = device is None or found._buffers["scale"].device == device  # type: ignore[union-attr]
        return found if here else found.to(device)
    if device is None:
        own = (*op.parameters(recurse=False), *op.buffers(recurse=False))
        device = next((t.device for t in own), None)
    tree = op._modules.get("quantizer")
    if tree is None:
        tree = nn.Module()
        op._modules["quantizer"] = tree
    kind = tree._modules.get(KIND)
    if kind is None:
        kind = nn.Module()
        tree._modules[KIND] = kind
    with torch.inference_mode(
        False
    ):  # a first forward for validation must leave buffers that training can write
        made = DelayedState(length, device)
    kind._modules[operand] = made
    return made


def load_state(op: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Create the states that a checkpoint has keys for."""
    start = f"{prefix}{STATE_PREFIX}."
    for key in state_dict:
        if key.startswith(start) and key.endswith(".amax_history"):
            operand = key[len(start) : -len(".amax_history")]
            if "." not in operand:
                make_state(op, operand, max(1, int(state_dict[key].numel())))


def prepare(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Create the state buffers that a recipe needs, on every op of the model: before DDP, compile or loading.

    Returns the model. Stateless recipes need nothing.

    Raises:
        RecipeError: `recipe` is not a recipe.
    """
    if not isinstance(recipe, Recipe):
        raise RecipeError(
            f"prepare: recipe must be a te.recipe value, got a {type(recipe).__name__}"
        )
    for path, module in model.named_modules():
        if isinstance(module, Op):
            for operand, prim in module.state_operands().items():
                phase = Phase.DGRAD if operand in ("grad_output", "do") else Phase.FORWARD
                role = Role(prim, phase, operand, path)
                config, quantizer = recipe.delayed(role), recipe.quantizer(role)
                if config is not None and isinstance(quantizer, Float8Quantizer):
                    state = make_state(module, operand, config.amax_history_len)
                    state.maker = state.maker or (config, torch.finfo(quantizer.dtype).max)
    return model


# -- observation and commit


_reduces = attrgetter("sheet.reduces")


def settle(observed: Observed, groups: Iterable[Any] = ()) -> None:
    """Roll every state that was observed, once: at the exit of the outermost autocast, and at the end of a backward.

    Sheets that come together again find everything prepared.
    """
    sheets = observed.sheets
    if not sheets or observed.by_state or groups or True in map(_reduces, sheets):
        commit(by_state(observed), groups)
    elif not again(sheets):
        commit(by_state(observed))
        remember(sheets)


def commit(observed: dict[DelayedState, Observation], groups: Iterable[Any] = ()) -> None:
    """Reduce the amaxes over their groups, one collective each, then roll every state once.

    `groups` are reduced even if this rank observed nothing in them, since the other ranks wait.
    """
    found = [o.group for o in observed.values() if o.group is not None and o.config.reduce_amax]
    for group in dict.fromkeys((*groups, *found)):
        _reduce(observed, group)
    left = roll_on_device(observed) if UPDATES else observed
    alike: dict[Any, list[tuple[DelayedState, Observation]]] = {}
    for state, seen in left.items():
        alike.setdefault(_batch_key(state, seen), []).append((state, seen))
    for key, items in alike.items():
        if key is None or len(items) == 1:
            for state, seen in items:
                state.advance(seen.amax, seen.config, seen.fp8_max, seen.when)
        else:
            _advance_together(items)


def _batch_key(state: DelayedState, seen: Observation) -> Any:
    """States with equal keys roll in the same few torch calls; None: one by one."""
    formula = formula_of(seen.config, seen.fp8_max)
    if (
        seen.when is not None
        or formula is None
        or not formula.fits(state.maker, state.amax_history)
    ):
        return None
    return seen.config, seen.fp8_max, state.scale.device, seen.amax.device


def _advance_together(items: list[tuple[DelayedState, Observation]]) -> None:
    """Roll states of one recipe and format at once; the numbers are those of `DelayedState.advance`."""
    states = [state for state, _ in items]
    config, fp8_max = items[0][1].config, items[0][1].fp8_max
    with torch.no_grad():
        scale, history, count = delayed_update(
            torch.cat([s.scale for s in states]),
            torch.stack([s.amax_history for s in states], 1),
            torch.cat([s.nonfinite_steps for s in states]),
            torch.stack([seen.amax.reshape(()) for _, seen in items]),
            fp8_max=fp8_max,
            margin=config.margin,
            algo=config.amax_compute_algo,
            pow2=config.use_power_2_scales,
        )
        torch._foreach_copy_([s.scale for s in states], [s.reshape(1) for s in scale.unbind()])
        torch._foreach_copy_([s.amax_history for s in states], list(history.unbind(1)))
        torch._foreach_copy_(
            [s.nonfinite_steps for s in states], [c.reshape(1) for c in count.unbind()]
        )
    for state in states:
        state.maker = (config, fp8_max)
        state.version += 1


def _reduce(observed: dict[DelayedState, Observation], group: Any) -> None:
    """MAX over ranks of all registered states: amax (-1 where this rank saw nothing) and the non-finite flag."""
    if not dist.is_initialized():
        raise RecipeError(
            "autocast: amax_reduction_group is given but torch.distributed is not initialised"
        )
    states = registered()
    if not states:
        return
    device = next(iter(observed), states[0]).scale.device
    table = torch.zeros(2, len(states), device=device)
    table[0].fill_(-1.0)
    for i, state in enumerate(states):
        seen = observed.get(state)
        if seen is not None and seen.group is group:
            table[0, i], table[1, i] = split_nonfinite(seen.amax.reshape(()))
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    for i, state in enumerate(states):
        seen = observed.get(state)
        if seen is not None and seen.group is group:
            seen.amax = join_nonfinite(table[0, i], table[1, i])
        elif seen is None and state.maker is not None:
            config, fp8_max = (
                state.maker
            )  # if another rank ran it, it rolls here too: the histories stay equal
            amax = join_nonfinite(table[0, i].clamp(min=0), table[1, i])
            observed[state] = Observation(amax, config, fp8_max, group, when=table[0, i] >= 0)


_queue = torch.autograd.Variable._execution_engine.queue_callback


class BackwardCommit:
    """Gradient states observed in one backward, committed once when its outermost graph task ends.

    A backward that was aborted never ends: what it observed is never committed.
    """

    _pending: ClassVar[dict[int, Observed]] = {}  # by outermost graph task
    _roots: ClassVar[dict[int, int]] = {}  # nested graph task -> outermost
    _lock: ClassVar[Any] = threading.Lock()
    _kept: ClassVar[int] = 32  # observations of aborted backwards

    @classmethod
    def open(cls) -> None:
        """A recompute inside a backward: what its own (nested) backward observes belongs to the outer one."""
        task = torch._C._current_graph_task_id()
        with cls._lock:
            cls._into(task, cls._roots.get(task, task))

    @classmethod
    def _into(cls, task: int, root: int) -> Observed:
        """Where observations of a backward go whose outermost one is `root`. The lock is held."""
        if root != task:
            cls._roots[task] = root
        found = cls._pending.get(root)
        if found is None:
            found = cls._pending[root] = Observed()
            while len(cls._pending) > cls._kept:
                cls._pending.pop(next(iter(cls._pending)))
            _queue(partial(cls._finish, root))
        return found

    @classmethod
    def _finish(cls, root: int) -> None:
        with cls._lock:
            observed = cls._pending.pop(root, None)
            if cls._roots:
                for task in [t for t, r in cls._roots.items() if r == root]:
                    del cls._roots[task]
        if observed is not None and (observed.sheets or observed.by_state):
            settle(observed)

    @classmethod
    def observe(
        cls, outer: int, found: Iterable[tuple[DelayedState, torch.Tensor | Cell, Seen]]
    ) -> None:
        """Add observations of the current backward; `outer` is the one that its forward ran in, or -1."""
        task = torch._C._current_graph_task_id()
        with cls._lock:
            into = cls._into(task, task if outer == -1 else cls._roots.get(outer, outer))
            for state, amax, seen in found:
                observe(into, state, amax, seen)

    @classmethod
    def observe_sheet(cls, outer: int, handed: Handed) -> None:
        """As `observe`, for all observations of a call at once."""
        task = torch._C._current_graph_task_id()
        with cls._lock:
            root = task if outer == -1 else cls._roots.get(outer, outer)
            observe_sheet(cls._into(task, root), handed)
