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
from te_ops.runtime.state import DelayedState, make_state

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
    states: Sequence[DelayedState] = ()  # that forward reads, in the order of the plan's runner
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


def buffer_getter(module: nn.Module | None, name: str) -> Callable[[Call], Any]:
    """Reads a buffer, whose name may be a path."""

    def get(call: Call) -> Any:
        found: Any = root_of(call, module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    return get


def scalar_getter(module: nn.Module | None, name: str) -> Callable[[Call], Any]:
    """Reads a `te.scalar` as a 0-dim tensor on the host."""
    return lambda call: torch.tensor(
        getattr(root_of(call, module), name).value, dtype=torch.float32
    )


def scale_getter(
    find: Callable[[Call], DelayedState], config: Any, fp8_max: float
) -> Callable[[Call], Any]:
    """Reads the scale of an operand's state; in a checkpoint's recompute, the one of its first pass."""

    def get(call: Call) -> torch.Tensor:
        state, replay = find(call), REPLAY.get()
        if replay is None:
            return state.scale_for(config, fp8_max)
        use = (replay.position, state)
        if not replay.recording and use in replay.scales:
            return replay.scales[use]
        scale = state.scale_for(config, fp8_max)
        if replay.recording:
            scale = replay.scales[use] = scale.clone()
        return scale

    return get


def forward_scale_getter(at: int, config: Any, fp8_max: float) -> Callable[[Call], Any]:
    """As `scale_getter` for one of the call's states, with the usual case first: the buffer itself."""
    other = scale_getter(lambda call: call.states[at], config, fp8_max)

    def get(call: Call) -> torch.Tensor:
        state = call.states[at]
        maker = state.maker
        if (
            maker is not None
            and maker[0] is config
            and maker[1] == fp8_max
            and DelayedState.reads is None
            and REPLAY.get() is None
        ):
            return state._buffers["scale"]  # type: ignore[return-value]
        found: torch.Tensor = other(call)
        return found

    return get


def state_finder(
    module: nn.Module | None, operand: str, length: int
) -> Callable[[Call], DelayedState]:
    """Finds (or makes) an operand's state."""
    return lambda call: make_state(root_of(call, module), operand, length, call.device)


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
