"""What the layers are made of, by Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from te_ops.basic.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from te_ops.basic.gemm import Linear
from te_ops.basic.norm import L2Normalization, LayerNorm, RMSNorm
from te_ops.errors import PlanError
from te_ops.graph import Value
from te_ops.op import Op

Init = Callable[[torch.Tensor], Any]
Normalization = Literal["LayerNorm", "RMSNorm"]
INIT_STD = 0.023
_NORMS: dict[str, Callable[..., Op]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
# name -> (op, whether fc1 makes gate and linear half)
_ACTIVATIONS: dict[str, tuple[Callable[..., Op], bool]] = {
    "gelu": (GELU, False),
    "qgelu": (QGELU, False),
    "relu": (ReLU, False),
    "srelu": (SReLU, False),
    "silu": (SiLU, False),
    "glu": (GLU, True),
    "geglu": (GEGLU, True),
    "qgeglu": (QGEGLU, True),
    "reglu": (ReGLU, True),
    "sreglu": (SReGLU, True),
    "swiglu": (SwiGLU, True),
    "clamped_swiglu": (ClampedSwiGLU, True),
}
Places = dict[str, Any]  # device and dtype of parameters


def linear(sizes: tuple[int, int], places: Places, **keywords: Any) -> Linear:
    """A Linear from sizes[0] to sizes[1] features, whose weight is N(0, 0.023) unless given an `init_method`."""
    return Linear(sizes[0], sizes[1], init_std=INIT_STD, **{**places, **keywords})


def outputs(y: Value | tuple[Value, ...], *more: Value | None) -> Value | tuple[Value, ...]:
    """What a layer returns: y with its extra outputs, and those of `more` that there are."""
    made = (*((y,) if isinstance(y, Value) else y), *(value for value in more if value is not None))
    return made if len(made) > 1 else made[0]


def norm(
    layer: str, kind: str, size: int, *, eps: float, zero_centered_gamma: bool, places: Places
) -> Op:
    """LayerNorm or RMSNorm over `size` features.

    Raises:
        PlanError: another kind.
    """
    make = _choice(layer, "normalization", kind, _NORMS)
    made: Op = make(size, eps, zero_centered_gamma=zero_centered_gamma, **places)
    return made


def qk_norm(layer: str, kind: str | None, size: int, *, eps: float, places: Places) -> Op | None:
    """The norm of q and of k over the features of a head; None for none.

    Raises:
        PlanError: an unknown kind.
    """
    if kind is None:
        return None
    made: dict[str, Callable[[], Op]] = {
        "L2Normalization": lambda: L2Normalization(eps=eps),
        **{name: lambda name=name: _NORMS[name](size, eps, **places) for name in _NORMS},  # type: ignore[misc]
    }
    chosen: Op = _choice(layer, "qk_norm_type", kind, made)()
    return chosen


def activation(layer: str, name: str, params: Mapping[str, Any] | None) -> tuple[Op, int]:
    """The op, and how many times as wide as its output its input is.

    Raises:
        PlanError: an unknown name, or parameters that the activation does not have.
    """
    make, gated = _choice(layer, "activation", name, _ACTIVATIONS)
    try:
        return make(**(params or {})), 1 + gated
    except TypeError as error:
        raise PlanError(f"{layer}: activation_params of {name!r}: {error}") from None


def _choice(layer: str, what: str, name: Any, table: Mapping[str, Any]) -> Any:
    if name not in table:
        raise PlanError(f"{layer}: {what} must be one of {', '.join(table)}, got {name!r}")
    return table[name]


__all__ = [
    "INIT_STD",
    "Init",
    "Normalization",
    "Places",
    "activation",
    "linear",
    "norm",
    "outputs",
    "qk_norm",
]
