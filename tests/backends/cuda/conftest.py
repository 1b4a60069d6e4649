"""Device text on the host: what every test of kernels without a GPU starts from."""

from __future__ import annotations

import pytest

from te_ops.backends.cuda import launch
from tests.backends.cuda import emulator


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run the device text that g++ compiled."""
    if emulator.compiler_path() is None:
        pytest.skip("needs g++")
    monkeypatch.setattr(launch, "build", emulator.build)
    monkeypatch.setattr(launch, "zero_word", emulator.zero_word)
