"""What a training loop may say between steps: a step boundary, warm-up, and giving memory back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from te_ops.errors import PlanError
from te_ops.op import Op
from te_ops.registry import REGISTRY
from te_ops.runtime import capture as cap
from te_ops.runtime import frozen, graphs
from te_ops.runtime.graphs import Graphed


def step() -> int:
    """A step boundary: kernels that became ready during a step take effect now, on all ranks or on none.

    A plan never changes after it was made; call this where no backward is pending, at the same place on all ranks of
    the default process group (now and then they agree here, without a device). A single process need not call it:
    the step of an optimizer is a boundary too. Returns how many rules and kernels took effect.
    """
    return REGISTRY.boundary(together=True)


def warmup(model: nn.Module, *samples: Any, passes: int = 3) -> None:
    """Plan, compile and load everything for these shapes, and let libraries prepare themselves.

    Each sample is a tensor or a tuple of arguments; forward and, in grad mode, backward run `passes` times under the
    autocast in force. States, gradients, buffers and random numbers stay as they are. It is a step boundary of this
    process alone; kernels that have to be compiled are waited for. A graphed model is captured for these samples too.

    Raises:
        PlanError: no module, no sample, or no tensor in one; with gradients, an op that adds them to `main_grad`.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"warmup takes a module, got a {type(model).__name__}")
    if not isinstance(passes, int) or passes < 1:
        raise PlanError(f"warmup: passes must be a positive number, got {passes!r}")
    if not samples:
        raise PlanError("warmup: give at least one sample (a tensor or a tuple of arguments)")
    for path, op in model.named_modules():
        if torch.is_grad_enabled() and isinstance(op, Op) and op.main_grads():
            raise PlanError(
                f"warmup: {path or type(op).__name__} adds gradients to main_grad, which its passes would write; warm "
                "up under torch.no_grad(), or run a step"
            )
    with cap.marked():
        REGISTRY.boundary()
    for sample in samples:
        args = sample if isinstance(sample, tuple) else (sample,)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if not tensors:
            raise PlanError("warmup: a sample needs a tensor")
        device = tensors[0].device
        inner: nn.Module = model.__dict__["module"] if isinstance(model, Graphed) else model
        inputs = cap.static_inputs(tensors)
        task = cap.Task(
            _call(inner, args), inner, inputs, list(inner.parameters()), torch.is_grad_enabled()
        )
        with cap.LOCK, cap.marked(), cap.untouched(inner, device):
            cap.rehearse(task, passes)
        if isinstance(model, Graphed):
            model.capture(*args)


def _call(module: nn.Module, args: tuple[Any, ...]) -> Any:
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

    def call(inputs: list[torch.Tensor]) -> Any:
        items = list(args)
        for place, value in zip(places, inputs, strict=True):
            items[place] = value
        return module(*items)

    return call


def free_workspaces() -> None:
    """Give back memory that is kept between calls: CUDA graphs, scratch memory of libraries, shared weight copies.

    For the time between phases of a program (training and generation, say). Graphs with a forward that waits for its
    backward stay. Calling it again does nothing, and the next step makes what it needs.
    """
    graphs.free_all()
    frozen.end_all()
    REGISTRY.release()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
