"""CUDA graphs without CUDA: a recording is run again, and its results are copied to where the first ones lie; data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


class Rerun:
    """An engine for the CPU, so that all that surrounds the graphs is tested on any machine."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def pool(self, device: torch.device) -> Any:
        return object()

    @contextlib.contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        yield

    def record(
        self,
        body: Callable[[], list[torch.Tensor]],
        pool: Any,
        device: torch.device,
        reads: Sequence[torch.Tensor],
    ) -> tuple[list[torch.Tensor], Callable[..., Any]]:
        first = body()
        self.recorded += 1
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def replay(given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
            for static, value in zip(reads, given, strict=True):
                static.detach().copy_(value)
            with torch.inference_mode(modes[1]), torch.set_grad_enabled(modes[0]):
                again = body()
            self.replayed += 1
            for static, value in zip(first, again, strict=True):
                static.detach().copy_(value.detach())
            for fresh, static in zip(made, first, strict=bool(made)):
                fresh.copy_(static.detach())

        return first, replay

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        yield

    def capturing(self) -> bool:
        return False

    @contextlib.contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        yield


class Still(Rerun):
    """Gives what the recording gave: as a CUDA graph, which runs no Python, on the same inputs."""

    def record(
        self,
        body: Callable[[], list[torch.Tensor]],
        pool: Any,
        device: torch.device,
        reads: Sequence[torch.Tensor],
    ) -> tuple[list[torch.Tensor], Callable[..., Any]]:
        first = body()

        def replay(given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
            self.replayed += 1
            for fresh, static in zip(made, first, strict=True):
                fresh.copy_(static.detach())

        return first, replay


def data(rows: int = 16, grad: bool = True, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 32, generator=generator).requires_grad_(grad)
