"""Attributes of nodes: what they may hold, and their identity by type and bits."""

from __future__ import annotations

import dataclasses
import enum
import struct
from typing import Any

import torch

from te_ops.errors import PlanError


class Dim(int):
    """A leading dimension of a plan input: an int that remembers which input and axis it is.

    Shape rules pass it on by slicing; arithmetic gives a plain int. An attribute may never hold one, since
    a plan serves every row count of its class.
    """

    source: tuple[int, int]

    def __new__(cls, value: int, source: tuple[int, int]) -> Dim:
        """The size `value` of axis `source[1]` of plan input `source[0]`."""
        dim = super().__new__(cls, value)
        dim.source = source
        return dim


class Attrs(dict[str, Any]):
    """Attributes of a node, checked and keyed by type *and* bits, so that 1, True, 1.0 and -0.0 stay apart."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(sorted(values.items()))
        self.key = tuple((name, attr_key(value, name)) for name, value in self.items())


def attr_key(value: Any, name: str = "attribute") -> Any:
    """Identity of an attribute value.

    Raises:
        PlanError: the value is not a bool, int, float, str, dtype, enum, a tuple of these, or a frozen value.
    """
    if isinstance(value, Dim):
        raise DynamicAttribute(
            f"{name}={int(value)} is the size of a leading dimension, which a plan may not fix; "
            "pass g.shape(v) or g.dim(v, axis) as an input"
        )
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if value is None or isinstance(
        value, bool | int | str | torch.dtype | torch.device | enum.Enum
    ):
        return (type(value), value)
    if isinstance(value, tuple):
        return ("tuple", tuple(attr_key(item, name) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise PlanError(f"{name}: {type(value).__name__} is not frozen; attributes are values")
        fields = tuple(
            (f.name, attr_key(getattr(value, f.name), f"{name}.{f.name}"))
            for f in dataclasses.fields(value)
            if f.compare
        )
        return (type(value), fields)
    if getattr(type(value), "__interned__", False):  # pointwise expressions: one object per value
        return (type(value), value)
    if callable(value) and not isinstance(value, type):
        return ("callable", value)  # by identity, inside frozen values and for foreign code
    raise PlanError(
        f"{name}: a {type(value).__name__} cannot be an attribute; use bool, int, float, str, dtype, enum, "
        "tuples of these, a frozen dataclass, or pass tensors as inputs"
    )


class DynamicAttribute(PlanError):
    """An attribute holds a leading dimension: the plan is keyed on the exact shape instead."""
