"""Activations and the other standard pointwise functions, all as expressions.

Gate is the first half of a gated input. Names and constants follow Transformer Engine's op library;
a scaled variant multiplies by a second input, a probability per row in a mixture of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from te_ops.pointwise import functions as m
from te_ops.pointwise.expr import Const, Expr, Input
from te_ops.pointwise.function import Fn, InputKind, Pair

QGELU_ALPHA = 1.702


def _qgelu(x: Expr) -> Expr:
    return x * m.sigmoid(QGELU_ALPHA * x)


def _srelu(x: Expr) -> Expr:
    return m.square(m.relu(x))


_UNARY: dict[str, Callable[[Expr], Expr]] = {
    "gelu": m.gelu_tanh,
    "gelu_erf": m.gelu_erf,
    "relu": m.relu,
    "srelu": _srelu,
    "qgelu": _qgelu,
    "silu": m.silu,
    "sigmoid": m.sigmoid,
    "tanh": m.tanh,
    "softplus": m.softplus,
}

_GATES: dict[str, Callable[[Expr], Expr]] = {
    "glu": m.sigmoid,
    "geglu": m.gelu_tanh,
    "qgeglu": _qgelu,
    "reglu": m.relu,
    "sreglu": _srelu,
    "swiglu": m.silu,
}


def _fn(name: str, kind: InputKind, out: Expr, scaled: bool) -> Fn:
    """The function `out` of one input, times a second one if `scaled`."""
    if not scaled:
        return Fn(name, (kind,), out)
    return Fn(f"scaled_{name}", (kind, "value"), out * Input(1))


def _unary(name: str, scaled: bool) -> Callable[[], Fn]:
    return lambda: _fn(name, "value", _UNARY[name](Input(0)), scaled)


def _gated(name: str, scaled: bool) -> Callable[[], Fn]:
    return lambda: _fn(name, "pair", _GATES[name](Input(0, "gate")) * Input(0, "linear"), scaled)


def _finite(op: str, **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{op}: {name} = {value} is not finite")


def _positive(op: str, **values: float) -> None:
    _finite(op, **values)
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{op}: {name} = {value} is not positive")


def _suffix(**values: float) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in values.items())


def clamped_swiglu(
    limit: float = 7.0,
    alpha: float = QGELU_ALPHA,
    glu_linear_offset: float = 1.0,
    scaled: bool = False,
) -> Fn:
    """`g sigmoid(alpha g) (l + offset)`, g = min(gate, limit), l = clamp(linear, -limit, limit).

    The gated unit of GPT-OSS: the gate is clamped from above only, and the offset comes after the
    clamp.
    """
    _positive("clamped_swiglu", limit=limit)
    _finite("clamped_swiglu", alpha=alpha, glu_linear_offset=glu_linear_offset)
    gate = m.minimum(Input(0, "gate"), limit)
    linear = m.clamp(Input(0, "linear"), -limit, limit) + glu_linear_offset
    values = _suffix(limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)
    return _fn(f"clamped_swiglu({values})", "pair", gate * m.sigmoid(alpha * gate) * linear, scaled)


def situglu(beta1: float = 4.0, beta2: float = 25.0, scaled: bool = False) -> Fn:
    """`b1 tanh(gate / b1) sigmoid(gate) * b2 tanh(linear / b2)`."""
    _positive("situglu", beta1=beta1, beta2=beta2)
    gate, linear = Pair(Input(0, "gate"), Input(0, "linear"))
    left = beta1 * m.tanh(gate / beta1) * m.sigmoid(gate)
    right = beta2 * m.tanh(linear / beta2)
    return _fn(f"situglu({_suffix(beta1=beta1, beta2=beta2)})", "pair", left * right, scaled)


def scale(factor: float) -> Fn:
    """Input times a constant, forward and backward."""
    return Fn(f"scale({factor:g})", ("value",), Input(0) * factor)


def dropout(p: float) -> Fn:
    """Input / (1 - p) where the second input, the keep mask, is not 0; else 0, even for NaN."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p = {p} is not a probability")
    kept = Input(0) * (1.0 / (1.0 - p)) if p < 1.0 else Const(0.0)
    return Fn(f"dropout({p:g})", ("value", "value"), m.where(m.ne(Input(1), 0.0), kept, 0.0))


def _binary(name: str, out: Callable[[Expr, Expr], Expr]) -> Callable[[], Fn]:
    return lambda: Fn(name, ("value", "value"), out(Input(0), Input(1)))


# Name -> factory of the function; the keyword arguments are those of the functions above.
activations: dict[str, Callable[..., Fn]] = {
    **{name: _unary(name, False) for name in _UNARY},
    **{name: _gated(name, False) for name in _GATES},
    **{f"scaled_{name}": _unary(name, True) for name in _UNARY},
    **{f"scaled_{name}": _gated(name, True) for name in _GATES},
    "clamped_swiglu": clamped_swiglu,
    "situglu": situglu,
    "scaled_clamped_swiglu": lambda **values: clamped_swiglu(**values, scaled=True),
    "scaled_situglu": lambda **values: situglu(**values, scaled=True),
    "add": _binary("add", lambda a, b: a + b),
    "sub": _binary("sub", lambda a, b: a - b),
    "mul": _binary("mul", lambda a, b: a * b),
    "bias": _binary("bias", lambda x, b: x + b),
    "scale": scale,
    "dropout": dropout,
    "identity": lambda: Fn("identity", ("value",), Input(0)),
}
