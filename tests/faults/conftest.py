from __future__ import annotations

import pytest

from te_ops.runtime.cache import CACHE


@pytest.fixture
def no_plans() -> None:
    """Every plan that the test needs is built in it."""
    CACHE.clear()
