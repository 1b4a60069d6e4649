"""Who launches a graph, without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_ops.runtime.bundle import BUNDLERS
from te_ops.runtime.engines import _Replay


class Driver:
    """Launches, counted."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int]] = []

    def launcher(self, executable: int) -> Any:
        return lambda stream: self.launched.append((executable, stream))


@pytest.mark.parametrize("draws", [False, True])
def test_a_graph_that_draws_random_numbers_is_launched_by_torch(
    draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, offset = Driver(), [0]
    replays: list[int] = []

    def replay() -> None:
        offset[0] += 4 * draws
        replays.append(offset[0])

    generator = SimpleNamespace(get_offset=lambda: offset[0])
    monkeypatch.setitem(BUNDLERS, "cuda", driver)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    current = [0]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 3, raising=False)
    graph = SimpleNamespace(replay=replay, raw_cuda_graph_exec=lambda: 11)
    call = _Replay(graph, torch.device("cuda", 0))
    for _ in range(3):
        call()
    assert len(replays) == (3 if draws else 1)
    assert driver.launched == ([] if draws else [(11, 3)] * 2)
    current[0] = 1  # another device is current: torch makes the graph's the current one
    call()
    assert len(replays) == (4 if draws else 2)
