"""Where a call's operands come from: parameters, buffers, scales and numbers of its modules, and its own tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from te_ops.context import Frame, Region
from te_ops.quantizers import QuantizedTensor, Record, Usage
from te_ops.runtime.checkpoint import REPLAY
from te_ops.runtime.frozen import FrozenWeights
from te_ops.runtime.state import KIND, DelayedState, make_state

States = Sequence[DelayedState]
"""Those that a phase reads or observes, in the order of its `Places`."""
Getter = Callable[["Call", States], Any]
"""Reads an operand of a phase that is no differentiable tensor."""

Fetch = tuple[
    nn.Module | None, str
]  # None stands for the root, so that a runner does not keep it alive


class Call(NamedTuple):
    """What one call of a plan knows besides its tensors; shared by its segments and their backwards."""

    op: nn.Module | None
    device: torch.device
    frame: Frame | None
    region: Region | None  # None: observe nothing (recompute)
    seed: torch.Tensor | None
    task: int  # the backward pass that this call runs in (a recompute), or -1
    done: list[Callable[[], None]]  # what to write if the whole call succeeds
    autocast: tuple[str, torch.dtype] | None = (
        None  # torch's, for the modules inside that are not ours
    )
    frozen: FrozenWeights | None = None  # where copies of quantized weights are shared
    states: tuple[DelayedState, ...] = ()  # that forward reads, in the order of the plan's runner
    taped: bool = True  # values have the shapes that tapes of the plan's runner were recorded with


def root_of(call: Call, module: nn.Module | None) -> nn.Module:
    """The module, or the op that was called where it is None."""
    found = call.op if module is None else module
    assert found is not None
    return found


def fetch(module: nn.Module | None, name: str) -> torch.Tensor:
    """A parameter (or tensor attribute) as it is now."""
    assert module is not None
    found = module._parameters.get(name)
    return found if found is not None else getattr(module, name)


class Places:
    """Where the states of some operands are found. They are looked up at every call: checkpoints bring others."""

    def __init__(self, wanted: Sequence[tuple[nn.Module | None, str, int]]) -> None:
        """`wanted`: of each state the module (None: the op that is called), the operand, the history's length."""
        self.wanted: tuple[tuple[Any, str, int], ...] = tuple(wanted)
        self.last: tuple[DelayedState, ...] = ()

    def find(self, op: nn.Module | None, device: torch.device) -> tuple[DelayedState, ...]:
        """The states, made or moved to the device where needed; the same tuple as long as they are the same."""
        last = self.last
        try:
            for (module, operand, _), state in zip(self.wanted, last, strict=True):
                tree: Any = (op if module is None else module)._modules["quantizer"]  # type: ignore[union-attr]
                if tree._modules[KIND]._modules[operand] is not state:
                    break
                if state.__dict__["_buffers"]["scale"].device != device:
                    break
            else:
                return last
        except (AttributeError, KeyError, ValueError):
            pass
        made: list[Any] = []  # some are missing, others, or elsewhere
        for module, operand, length in self.wanted:
            owner = op if module is None else module
            assert owner is not None
            made.append(make_state(owner, operand, length, device))
        if last != (now := tuple(made)):
            self.last = now
        return self.last


def buffer_getter(module: nn.Module | None, name: str) -> Getter:
    """Reads a buffer, whose name may be a path."""

    def get(call: Call, states: States) -> Any:
        found: Any = root_of(call, module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    return get


def scalar_getter(module: nn.Module | None, name: str) -> Getter:
    """Reads a `te.scalar` as a 0-dim tensor on the host."""
    return lambda call, states: torch.tensor(
        getattr(root_of(call, module), name).value, dtype=torch.float32
    )


class ScaleGetter:
    """Reads the scale of one of the phase's states: mostly the buffer itself.

    In a checkpoint's recompute it is the scale of the first pass.
    """

    __slots__ = ("at", "config", "fp8_max")

    def __init__(self, at: int, config: Any, fp8_max: float) -> None:
        self.at, self.config, self.fp8_max = at, config, fp8_max

    def __call__(self, call: Call, states: States) -> Any:
        """See `Getter`."""
        state, replay = states[self.at], REPLAY.get()
        if replay is not None:
            return _replayed(replay, state, self.config, self.fp8_max)
        return state.scale_for(self.config, self.fp8_max)


def reader(getters: Sequence[Getter]) -> Callable[[Call, States], list[Any]]:
    """Reads what all of these read. A phase of delayed scaling reads a scale for most of its operands: together."""
    scales = [g for g in getters if isinstance(g, ScaleGetter)]
    if len(scales) < len(getters):
        return lambda call, states: [get(call, states) for get in getters]
    uses = tuple([(g, g.at, g.config, g.fp8_max) for g in scales])

    def read(call: Call, states: States) -> list[Any]:
        plain = REPLAY.get() is None and DelayedState.reads is None
        found: list[Any] = []
        for get, at, config, fp8_max in uses:
            fields = states[at].__dict__  # not through nn.Module's look-up
            maker = fields["maker"]
            if plain and maker is not None and maker[0] is config and maker[1] == fp8_max:
                found.append(fields["_buffers"]["scale"])
            else:
                found.append(get(call, states))
        return found

    return read


def _replayed(replay: Any, state: DelayedState, config: Any, fp8_max: float) -> torch.Tensor:
    use = (replay.position, state)
    if not replay.recording and use in replay.scales:
        found: torch.Tensor = replay.scales[use]
        return found
    scale = state.scale_for(config, fp8_max)
    if replay.recording:
        scale = replay.scales[use] = scale.clone()
    return scale


def update(module: nn.Module, name: str, value: torch.Tensor, rule: str) -> None:
    """Write a buffer: the value, or the larger of both (`rule` "max")."""
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part)
    with torch.no_grad():
        target.copy_(torch.maximum(target, value) if rule == "max" else value)


def entry(x: Any) -> Any:
    """What kernels may rely on: contiguous, and 16-byte aligned on CUDA."""
    if not isinstance(x, torch.Tensor):
        return x
    if isinstance(x, QuantizedTensor):
        return x.rowwise if x.rowwise is not None else x.columnwise
    if not x.is_contiguous():
        return x.contiguous()
    if x.is_cuda and x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def exit_of(value: Any) -> Any:
    """Records leave a plan as tensors."""
    if not isinstance(value, Record):
        return value
    row, col = (value, None) if value.usage is Usage.ROW else (None, value)
    return QuantizedTensor(row, col, value.quantizer)
