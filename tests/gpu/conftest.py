"""What tests on a device need besides the device."""

from __future__ import annotations

import pytest
import torch

from te_ops.backends.cudnn import library


@pytest.fixture
def frontend() -> None:
    """cuDNN's graphs can be built and run here."""
    reason = library.missing()
    if reason is not None:
        pytest.skip(reason)
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the graphs are for sm_90 and later")
