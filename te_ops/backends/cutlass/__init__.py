"""GEMMs with what the graph wants behind them, compiled by the CuTe DSL for one spec each.

Importing this, and planning, imports no vendor library: a worker process compiles, and what it made is loaded.
"""

from __future__ import annotations

import importlib


def register() -> None:
    """Add the kernels; safe to call again."""
    importlib.import_module("te_ops.backends.cutlass.kernels").register()


__all__ = ["register"]
