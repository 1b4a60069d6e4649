"""The --device option."""

from __future__ import annotations

import torch

from te_ops.errors import Error


def device_named(text: str) -> torch.device:
    """The device of this name.

    Raises:
        Error: torch does not know the name, or sees no GPU.
    """
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise Error(f"--device {text}: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Error(f"--device {text}: this torch sees no GPU")
    return device
