"""The engine that stands in for CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from te_ops.runtime import engines
from tests.runtime.graph_engine import Rerun


@pytest.fixture
def engine() -> Iterator[Rerun]:
    """Within the test, the CPU has graphs: recordings are run again."""
    engines.ENGINES["cpu"] = made = Rerun()
    yield made
    del engines.ENGINES["cpu"]
