"""A region in which a synchronising CUDA call is an error, and how much memory is held once all is quiet."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from functools import cache

import torch


@contextlib.contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    """Whatever happens inside, the mode is off afterwards: left on, it would fail every later test."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def allocated() -> int:
    """Bytes of live tensors on the current device.

    Autograd's worker thread lets go of the last backward's results a moment after that backward has returned, but
    before it takes up another one: hence a backward that allocates nothing. Without it the figure wanders by the size
    of the gradients.
    """
    leaf, dy = _leaf(torch.cuda.current_device())
    torch.autograd.grad(leaf.view_as(leaf), leaf, dy)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@cache
def _leaf(device: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, device=device, requires_grad=True), torch.ones(1, device=device)


def held(step: Callable[[], object], times: int) -> list[int]:
    """`allocated()` after each of some steps.

    Without the collector of cycles: what earlier tests left in cycles (a failed one leaves all of its locals) is
    collected before, not in between, and a cycle that the steps make shows as growth.
    """
    gc.collect()
    gc.disable()
    try:
        return [(step(), allocated())[1] for _ in range(times)]
    finally:
        gc.enable()
