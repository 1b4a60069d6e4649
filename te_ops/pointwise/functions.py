"""Functions that build expressions; `te_ops.math` exports them to users."""

from __future__ import annotations

from collections.abc import Callable

from te_ops.pointwise.expr import Expr, ExprLike, call


def _unary(op: str, doc: str) -> Callable[[ExprLike], Expr]:
    def function(x: ExprLike) -> Expr:
        return call(op, x)

    function.__name__ = function.__qualname__ = op
    function.__doc__ = doc
    return function


def _binary(op: str, doc: str) -> Callable[[ExprLike, ExprLike], Expr]:
    def function(a: ExprLike, b: ExprLike) -> Expr:
        return call(op, a, b)

    function.__name__ = function.__qualname__ = op
    function.__doc__ = doc
    return function


sqrt = _unary("sqrt", "Square root; NaN below 0.")
rsqrt = _unary("rsqrt", "1 / sqrt(x).")
square = _unary("square", "x * x.")
reciprocal = _unary("reciprocal", "1 / x.")
floor = _unary("floor", "Largest integer <= x; its derivative is 0.")
sign = _unary("sign", "-1, 0 or 1, 0 for NaN; its derivative is 0.")
exp = _unary("exp", "e^x.")
expm1 = _unary("expm1", "e^x - 1, accurate near 0.")
log = _unary("log", "Natural logarithm; NaN below 0.")
log1p = _unary("log1p", "log(1 + x), accurate near 0.")
sin = _unary("sin", "Sine of an angle in radians.")
cos = _unary("cos", "Cosine of an angle in radians.")
erf = _unary("erf", "Error function.")
erfc = _unary("erfc", "1 - erf(x), accurate for large x.")
tanh = _unary("tanh", "Hyperbolic tangent.")
sigmoid = _unary("sigmoid", "1 / (1 + e^-x).")
relu = _unary("relu", "x where x > 0, else 0; NaN stays NaN. Derivative 0 at 0.")
silu = _unary("silu", "x * sigmoid(x).")
softplus = _unary("softplus", "log(1 + e^x), without overflow.")
gelu_tanh = _unary(
    "gelu_tanh", "GELU in the tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."
)
gelu_erf = _unary("gelu_erf", "GELU, exact: 0.5 x (1 + erf(x / sqrt 2)).")
isnan = _unary("isnan", "Mask: x is NaN.")
minimum = _binary("minimum", "The smaller one; NaN if either is. A tie gives its gradient to `a`.")
maximum = _binary("maximum", "The larger one; NaN if either is. A tie gives its gradient to `a`.")
eq = _binary("eq", "Mask: a equals b (`==` on expressions compares identity).")
ne = _binary("ne", "Mask: a differs from b.")


def abs(x: ExprLike) -> Expr:
    """|x|; its derivative is 0 at 0."""
    return call("abs", x)


def pow(x: ExprLike, exponent: float) -> Expr:
    """x to an integer power, or to +-0.5."""
    return call("pow", x, exponent)


def clamp(x: ExprLike, low: ExprLike | None = None, high: ExprLike | None = None) -> Expr:
    """x limited to [low, high]; NaN stays; the gradient passes where low <= x <= high."""
    if low is not None:
        x = call("maximum", x, low)
    return call("add", x, -0.0) if high is None else call("minimum", x, high)


def where(mask: Expr, a: ExprLike, b: ExprLike) -> Expr:
    """a where `mask` is true, else b; what is not selected never enters, not even as 0 * NaN."""
    return call("where", mask, a, b)
