"""Real plans for Hopper, where the library can be had: everything that is taken builds, and gates tell the truth."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.backends.cudnn import builds
from tests.backends.cudnn.conftest import Built


@pytest.mark.timeout(600)
def test_real_plans(build_plans: Callable[[str], Built]) -> None:
    lines, ended = build_plans("tests.backends.cudnn.builds")
    names = [name for name, _, _ in lines]
    assert names == list(builds.specs()), f"the process ended with {ended}"
    wrong = [
        line
        for line in lines
        if (line[1] is None) != line[0].startswith("refused") or (line[1] and line[2])
    ]
    assert not wrong
