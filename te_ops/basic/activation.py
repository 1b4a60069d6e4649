"""Activations: each is one expression; gate = first half of the last dimension in the gated ones."""

from __future__ import annotations

from typing import Any, ClassVar

from te_ops.basic.pointwise import Broadcast, cast, pointwise
from te_ops.errors import PlanError
from te_ops.graph import Graph, Value
from te_ops.op import Op
from te_ops.pointwise import Fn, activations


class Activation(Op):
    """y = f(x), in the autocast dtype, else x's; `f` names an entry of `te_ops.pointwise.activations`.

    Maths in FP32 (FP64 for FP64), one rounding; a chain of activations and biases composes into one expression.
    """

    f: ClassVar[str]

    def function(self) -> Fn:
        """The expression."""
        return activations[self.f]()

    def emit(self, g: Graph, x: Value) -> Value:
        """One pointwise node."""
        dtype = g.autocast_dtype or g.spec(x).dtype
        return pointwise(g, self.function(), cast(g, x, dtype), dtype=dtype)


class Gated(Activation):
    """y = f(gate) * linear with gate and linear the halves of x [..., 2N], or alternating blocks of
    `glu_interleave_size` columns (gate first)."""

    def __init__(self, glu_interleave_size: int | None = None) -> None:
        super().__init__()
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
        dtype = g.autocast_dtype or g.spec(x).dtype
        return pointwise(
            g, self.function(), cast(g, x, dtype), dtype=dtype, interleave=self.glu_interleave_size
        )


class Scaled(Gated):
    """A gated activation times a per-row value: takes (x [..., 2N], scale [...]), and gives the scale its gradient."""

    def emit(self, g: Graph, x: Value, scale: Value) -> Value:  # type: ignore[override]  # one more input
        """One pointwise node with a per-row input."""
        dtype = g.autocast_dtype or g.spec(x).dtype
        kinds: tuple[Broadcast, Broadcast] = ("full", "col")
        x = cast(g, x, dtype)
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

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
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
    ) -> None:
        super().__init__(glu_interleave_size)
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
        self, beta1: float = 4.0, beta2: float = 25.0, *, glu_interleave_size: int | None = None
    ) -> None:
        super().__init__(glu_interleave_size)
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

    def __init__(self) -> None:
        super().__init__()


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
