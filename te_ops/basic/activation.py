"""Activations: each is one expression; gate = first half of the last dimension in the gated ones."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch

from te_ops.basic.arguments import flag
from te_ops.basic.pointwise import Broadcast, cast, pointwise
from te_ops.basic.quantize import CACHED
from te_ops.errors import PlanError
from te_ops.graph import Graph, Value
from te_ops.op import Op
from te_ops.pointwise import Fn, activations
from te_ops.quantizers import Float8BlockQuantizer

CACHE_FORMAT = Float8BlockQuantizer(torch.float8_e4m3fn)
"""What `cache_quantized_input` keeps: in 1x128 blocks one large value costs 127 others their precision, not all."""


class Activation(Op):
    """y = f(x), in the autocast dtype, else x's; `f` names an entry of `te_ops.pointwise.activations`.

    Maths in FP32 (FP64 for FP64), one rounding; a chain of activations and biases composes into one expression.

    Args:
        cache_quantized_input: backward gets x as E4M3 in 1x128 blocks, about half the bytes of BF16, with every recipe
            and with none. y is made from x itself; the gradient is that of f at the decoded values.

    Raises:
        PlanError: `cache_quantized_input` is not a bool.
    """

    f: ClassVar[str]

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = flag(
            type(self).__name__, "cache_quantized_input", cache_quantized_input
        )

    def function(self) -> Fn:
        """The expression."""
        return activations[self.f]()

    def emit(self, g: Graph, x: Value) -> Value:
        """One pointwise node."""
        x, dtype = self._read(g, x)
        return pointwise(g, self.function(), x, dtype=dtype)

    def _read(self, g: Graph, x: Value) -> tuple[Value, torch.dtype]:
        """x as the expression reads it, and the dtype of the result."""
        dtype = g.autocast_dtype or g.spec(x).dtype
        if self.cache_quantized_input:  # before the cast: that composes with the expression
            x = g.call(CACHED, x, quantizer=CACHE_FORMAT)
        return cast(g, x, dtype), dtype

    def extra_repr(self) -> str:
        """The arguments that are not at their defaults."""
        arguments = inspect.signature(type(self)).parameters.values()
        given = [(a.name, getattr(self, a.name)) for a in arguments if hasattr(self, a.name)]
        defaults = {a.name: a.default for a in arguments}
        return ", ".join(f"{name}={value!r}" for name, value in given if value != defaults[name])


class Gated(Activation):
    """y = f(gate) * linear with gate and linear the halves of x [..., 2N], or alternating blocks of
    `glu_interleave_size` columns (gate first)."""

    def __init__(
        self, glu_interleave_size: int | None = None, *, cache_quantized_input: bool = False
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        if glu_interleave_size is not None and (
            type(glu_interleave_size) is not int or glu_interleave_size < 1
        ):
            raise PlanError(
                f"{type(self).__name__}: glu_interleave_size must be a positive int or None, "
                f"got {glu_interleave_size!r}"
            )
        self.glu_interleave_size = glu_interleave_size

    def emit(self, g: Graph, x: Value) -> Value:
        """One pointwise node on a pair."""
        x, dtype = self._read(g, x)
        return pointwise(g, self.function(), x, dtype=dtype, interleave=self.glu_interleave_size)


class Scaled(Gated):
    """A gated activation times a per-row value: takes (x [..., 2N], scale [...]), and gives the scale its gradient.

    `cache_quantized_input` is about x; the scale is kept as it is.
    """

    def emit(self, g: Graph, x: Value, scale: Value) -> Value:  # type: ignore[override]  # one more input
        """One pointwise node with a per-row input."""
        x, dtype = self._read(g, x)
        kinds: tuple[Broadcast, Broadcast] = ("full", "col")
        return pointwise(
            g,
            self.function(),
            x,
            scale,
            dtype=dtype,
            broadcast=kinds,
            interleave=self.glu_interleave_size,
        )


class GELU(Activation):
    """Gaussian error linear unit: the tanh form, or the exact one with `approximate="none"`."""

    def __init__(self, approximate: str = "tanh", *, cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        if approximate not in ("tanh", "none"):
            raise PlanError(f'GELU: approximate must be "tanh" or "none", got {approximate!r}')
        self.approximate = approximate

    def function(self) -> Fn:
        """gelu or gelu_erf."""
        return activations["gelu" if self.approximate == "tanh" else "gelu_erf"]()


class ReLU(Activation):
    """max(x, 0); NaN propagates."""

    f = "relu"


class SReLU(Activation):
    """relu(x)^2."""

    f = "srelu"


class QGELU(Activation):
    """x * sigmoid(1.702 x)."""

    f = "qgelu"


class SiLU(Activation):
    """x * sigmoid(x)."""

    f = "silu"


class GLU(Gated):
    """sigmoid(gate) * linear."""

    f = "glu"


class GEGLU(Gated):
    """gelu(gate) * linear (tanh form)."""

    f = "geglu"


class QGEGLU(Gated):
    """qgelu(gate) * linear."""

    f = "qgeglu"


class ReGLU(Gated):
    """relu(gate) * linear."""

    f = "reglu"


class SReGLU(Gated):
    """relu(gate)^2 * linear."""

    f = "sreglu"


class SwiGLU(Gated):
    """silu(gate) * linear."""

    f = "swiglu"


class _ClampedArguments(Gated):
    def __init__(
        self,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        *,
        glu_interleave_size: int | None = None,
        cache_quantized_input: bool = False,
    ) -> None:
        super().__init__(glu_interleave_size, cache_quantized_input=cache_quantized_input)
        self.limit, self.alpha, self.glu_linear_offset = (
            float(limit),
            float(alpha),
            float(glu_linear_offset),
        )
        _try(type(self).__name__, self.function)

    def function(self) -> Fn:
        """The expression with these constants."""
        return activations[self.f](
            limit=self.limit, alpha=self.alpha, glu_linear_offset=self.glu_linear_offset
        )


class ClampedSwiGLU(_ClampedArguments):
    """g sigmoid(alpha g) * (l + offset) with g = min(gate, limit), l = clamp(linear, -limit, limit)."""

    f = "clamped_swiglu"


class _SiTUArguments(Gated):
    def __init__(
        self,
        beta1: float = 4.0,
        beta2: float = 25.0,
        *,
        glu_interleave_size: int | None = None,
        cache_quantized_input: bool = False,
    ) -> None:
        super().__init__(glu_interleave_size, cache_quantized_input=cache_quantized_input)
        self.beta1, self.beta2 = float(beta1), float(beta2)
        _try(type(self).__name__, self.function)

    def function(self) -> Fn:
        """The expression with these constants."""
        return activations[self.f](beta1=self.beta1, beta2=self.beta2)


class SiTUGLU(_SiTUArguments):
    """b1 tanh(gate / b1) sigmoid(gate) * b2 tanh(linear / b2)."""

    f = "situglu"


class ScaledSwiGLU(Scaled):
    """swiglu(x) times a per-row probability."""

    f = "scaled_swiglu"


class ScaledSReLU(Scaled):
    """srelu(x [..., N]) times a per-row probability; not gated."""

    f = "scaled_srelu"

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)


class ScaledClampedQGeGLU(Scaled, _ClampedArguments):
    """ClampedSwiGLU times a per-row probability (Transformer Engine's name for it)."""

    f = "scaled_clamped_swiglu"


class ScaledSiTUGLU(Scaled, _SiTUArguments):
    """SiTUGLU times a per-row probability."""

    f = "scaled_situglu"


def _try(name: str, function: Any) -> None:
    """Constants are checked where they are given, not at the first call."""
    try:
        function()
    except ValueError as error:
        raise PlanError(f"{name}: {error}") from None
