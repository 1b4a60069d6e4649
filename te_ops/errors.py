"""The exceptions of te_ops: a message names the op by its path, the value, the rule and the way out."""

from __future__ import annotations


class Error(Exception):
    """Base of every error that te_ops raises for a user's mistake."""


class PlanError(Error):
    """A pipeline cannot be planned or replayed as written."""


class ShapeError(PlanError, ValueError):
    """A shape, dtype or device does not fit the op."""


class RecipeError(Error, ValueError):
    """A recipe, quantizer or quantizer state is wrong or does not fit its use."""


class NoKernelError(PlanError):
    """No registered kernel takes a step; the message lists each candidate and its reason."""
