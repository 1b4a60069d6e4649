"""Names of quantizer classes, and quantizers as plain dictionaries.

A quantizer is written to checkpoints and plan dumps as ``{"name": ..., <its fields>}``. Every
subclass of `Quantizer` is entered here when it is defined, those of users too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from te_ops.errors import RecipeError

if TYPE_CHECKING:
    from te_ops.quantizers.base import Quantizer

KINDS: dict[str, type[Quantizer]] = {}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value)
    if dataclasses.is_dataclass(value):
        return quantizer_to_dict(value)  # type: ignore[arg-type]
    return value


def _value(plain: Any) -> Any:
    if isinstance(plain, dict):
        return quantizer_from_dict(plain)
    if isinstance(plain, str) and plain.startswith("torch."):
        return getattr(torch, plain.removeprefix("torch."))
    return plain


def quantizer_to_dict(quantizer: Quantizer) -> dict[str, Any]:
    """`quantizer` as a dictionary of strings, numbers and booleans (nested for a hybrid)."""
    fields = {f.name: _plain(getattr(quantizer, f.name)) for f in dataclasses.fields(quantizer)}
    return {"name": quantizer.name, **fields}


def quantizer_from_dict(plain: dict[str, Any]) -> Quantizer:
    """The inverse of `quantizer_to_dict`. `RecipeError` for a name that no class has."""
    fields = {key: _value(value) for key, value in plain.items() if key != "name"}
    kind = KINDS.get(plain.get("name", ""))
    if kind is None:
        raise RecipeError(
            f"No quantizer is named {plain.get('name')!r}; known: {', '.join(sorted(KINDS))}. "
            "Import the module that defines it first."
        )
    return kind(**fields)
