"""K30: kernel compilers below us that make wrong code."""

from __future__ import annotations

import pytest
import torch

from te_ops.backends.cutlass import selftest, versions


@pytest.mark.parametrize("version", ["4.5.0", "4.5.1"])
def test_versions_known_to_drop_predicates_are_refused(version: str) -> None:
    """B149."""
    reason = versions.denied(versions.DSL, version)
    assert reason is not None
    assert "drops predicated copies" in reason


def test_an_unknown_version_is_tried_before_it_is_used() -> None:
    """B149, B151: sizes that no tile divides, bounds of what is written, and the bytes of the transposed copy."""
    assert versions.denied(versions.DSL, "99.0") is None
    m, n, _ = selftest._SIZES
    assert m % 16
    assert n % 128
    copies = selftest.KINDS["FP8 copies"].epilogue.quantized
    assert copies is not None
    assert copies.row
    assert copies.col

    def nothing(*_: object, **__: object) -> None:
        """A kernel whose stores were dropped."""

    for spec in selftest.KINDS.values():
        found = selftest.check(spec, nothing, torch.device("cpu"))
        assert found is not None
        assert found.endswith("is wrong")
