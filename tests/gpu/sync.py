"""A region in which a synchronising CUDA call is an error."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    """Whatever happens inside, the mode is off afterwards: left on, it would fail every later test."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
