"""The reference backend: every primitive in plain torch, on any device."""

from __future__ import annotations

from te_ops.backends.reference.kernels import composed, register

__all__ = ["composed", "register"]
