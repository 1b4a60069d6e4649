from __future__ import annotations

import pytest
import torch

from tests.backends.cublas.library import Library


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """torch's GEMMs replaced by ones that check what the CUDA versions check."""
    made = Library()
    for name in ("mm", "addmm", "_scaled_mm", "_scaled_mm_v2"):
        monkeypatch.setattr(torch, name, getattr(made, name))
    return made
