"""The operators of pointwise expressions: arity, lowerings, partials, special values.

Special values are the same in all lowerings:

* NaN propagates through everything that computes: `minimum`, `maximum`, `clamp` and `relu` too,
  where C's `fminf` would drop it. A comparison with NaN is false (`ne`: true), so `where` takes its
  second branch.
* The kink keeps the gradient of `minimum`, `maximum` and `clamp` (`x <= limit` passes it on); at a
  tie of two tensors it goes to the first one. `relu` and `abs` have gradient 0 at 0. A NaN input
  passes the gradient on.
* `relu(-0.0)` is `0.0`; `minimum` and `maximum` of zeros with different signs return either; all
  else keeps IEEE signs. `sign(NaN)` is 0.
* A composite operator (one with `expand`) has the same limits as its expansion: `silu(-inf)` is
  NaN.

Derivatives have their own stable forms where the textbook one cancels or overflows in FP32:
`sigmoid' = s(x) s(-x)` (not `s (1 - s)`), `tanh' = 4 s(2x) s(-2x)` (not `1 - t^2`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from te_ops.pointwise.expr import Expr, call, raw

Partials: TypeAlias = Callable[..., tuple[Expr | float | None, ...]]

# gelu_tanh(x) = x s(x (A + B x^2)): 0.5 (1 + tanh u) is s(2u), u is sqrt(2/pi) (x + 0.044715 x^3).
GELU_A = 2.0 * math.sqrt(2.0 / math.pi)
GELU_B = GELU_A * 0.044715
# s(-x (A + B x^2)) is 0, in FP64 too, long before x^2 is this large; the bound keeps x^2 finite.
GELU_SQUARE_LIMIT = 4096.0


@dataclass(frozen=True, slots=True)
class Operator:
    """A row of the table.

    Attributes:
        name: the operator.
        arity: number of arguments.
        torch: computes it on tensors and Python floats (at least one tensor).
        cuda: C++ text over `{0}`, `{1}`, ... in FP32; `""` where `expand` gives it.
        cutedsl: Python text of the same for CuTe DSL; equal to `cuda`'s where that is plain
            arithmetic.
        partials: `(*args, y) ->` one factor per argument: an expression, a number, or None for
            zero.
        expand: the operator in terms of simpler ones, for the text lowerings.
        masks: which arguments are masks.
        returns_mask: whether the result is one.
        native: whether torch's 16-bit kernel computes in FP32 and rounds once, so a cast in and out
            is needless.
    """

    name: str
    arity: int
    torch: Callable[..., Any]
    cuda: str = ""
    cutedsl: str = ""
    partials: Partials | None = None
    expand: Callable[..., Expr] | None = None
    masks: tuple[int, ...] = ()
    returns_mask: bool = False
    native: bool = False


def _where(mask: Expr, a: Expr | float, b: Expr | float) -> Expr:
    return call("where", mask, a, b)


def _sigmoid_slope(x: Expr) -> Expr:
    return call("sigmoid", x) * call("sigmoid", -x)


def _minimum_partials(a: Expr, b: Expr, y: Expr) -> tuple[Expr, Expr]:
    return _where(a > b, 0.0, 1.0), _where(a <= b, 0.0, 1.0)


def _maximum_partials(a: Expr, b: Expr, y: Expr) -> tuple[Expr, Expr]:
    return _where(a < b, 0.0, 1.0), _where(a >= b, 0.0, 1.0)


def _abs_partials(x: Expr, y: Expr) -> tuple[Expr]:
    return (_where(call("eq", x, 0.0), 0.0, _where(x < 0.0, -1.0, 1.0)),)


def _gelu_tanh(x: Expr) -> Expr:
    return x * call("sigmoid", x * (GELU_A + GELU_B * call("square", x)))


def _gelu_tanh_partials(x: Expr, y: Expr) -> tuple[Expr]:
    square = call("square", x)
    inner = x * (GELU_A + GELU_B * square)
    slope = GELU_A + 3.0 * GELU_B * call("minimum", square, GELU_SQUARE_LIMIT)
    return (call("sigmoid", inner) + x * (_sigmoid_slope(inner) * slope),)


def _gelu_erf(x: Expr) -> Expr:
    # 0.5 erfc(-x / sqrt 2), which does not cancel for negative x as 1 + erf does.
    return x * (0.5 * call("erfc", x * -math.sqrt(0.5)))


def _gelu_erf_partials(x: Expr, y: Expr) -> tuple[Expr]:
    density = math.sqrt(0.5 / math.pi) * call("exp", -0.5 * call("square", x))
    return (0.5 * call("erfc", x * -math.sqrt(0.5)) + x * density,)


def _softplus(x: Expr) -> Expr:
    # `call` would make log1p(exp(t)) softplus again.
    return call("maximum", x, 0.0) + raw("log1p", call("exp", -abs(x)))


def _silu_partials(x: Expr, y: Expr) -> tuple[Expr]:
    # 1 - s(x), not s(-x): beside the 1 it need not be exact where it is small, and it takes no second exponential.
    slope = call("sigmoid", x)
    return (slope * (1.0 + x * (1.0 - slope)),)


def _tanh_partials(x: Expr, y: Expr) -> tuple[Expr]:
    return (4.0 * _sigmoid_slope(2.0 * x),)


def _compare(name: str, symbol: str, function: Callable[..., Any]) -> Operator:
    text = f"{{0}} {symbol} {{1}}"
    return Operator(name, 2, function, text, text, returns_mask=True)


def _torch_where(mask: Any, a: Any, b: Any) -> Any:
    return torch.where(mask, a, b)


def _torch_minimum(a: Any, b: Any) -> Any:
    return torch.minimum(a, b) if isinstance(b, torch.Tensor) else torch.clamp_max(a, b)


def _torch_maximum(a: Any, b: Any) -> Any:
    return torch.maximum(a, b) if isinstance(b, torch.Tensor) else torch.clamp_min(a, b)


_ARITHMETIC = (
    Operator(
        "add", 2, operator.add, "{0} + {1}", "{0} + {1}", lambda _a, _b, _y: (1.0, 1.0), native=True
    ),
    Operator(
        "sub",
        2,
        operator.sub,
        "{0} - {1}",
        "{0} - {1}",
        lambda _a, _b, _y: (1.0, -1.0),
        native=True,
    ),
    Operator(
        "mul", 2, operator.mul, "{0} * {1}", "{0} * {1}", lambda a, b, _y: (b, a), native=True
    ),
    Operator(
        "div",
        2,
        operator.truediv,
        "{0} / {1}",
        "{0} / {1}",
        # (a / b) / b instead of a / (b b), whose square overflows first.
        lambda _a, b, y: (1.0 / b, -(y / b)),
    ),
    Operator("neg", 1, torch.neg, "-{0}", "-{0}", lambda _x, _y: (-1.0,), native=True),
    Operator("abs", 1, torch.abs, "fabsf({0})", "_math.absf({0})", _abs_partials, native=True),
    Operator("square", 1, torch.square, "{0} * {0}", "{0} * {0}", lambda x, _y: (2.0 * x,)),
    Operator(
        "reciprocal",
        1,
        torch.reciprocal,
        "1.0f / {0}",
        "1.0 / {0}",
        lambda _x, y: (-call("square", y),),
    ),
    Operator("sqrt", 1, torch.sqrt, "sqrtf({0})", "_math.sqrt({0})", lambda _x, y: (0.5 / y,)),
    Operator(
        "rsqrt",
        1,
        torch.rsqrt,
        "rsqrtf({0})",
        "_math.rsqrt({0})",
        lambda _x, y: (-0.5 * (y * call("square", y)),),
    ),
    Operator("floor", 1, torch.floor, "floorf({0})", "_math.floor({0})", lambda _x, _y: (None,)),
    Operator("sign", 1, torch.sign, "te_sign({0})", "_sign({0})", lambda _x, _y: (None,)),
    Operator("minimum", 2, _torch_minimum, "te_min({0}, {1})", "_min({0}, {1})", _minimum_partials),
    Operator("maximum", 2, _torch_maximum, "te_max({0}, {1})", "_max({0}, {1})", _maximum_partials),
)

_TRANSCENDENTAL = (
    Operator("exp", 1, torch.exp, "te_exp({0})", "_exp({0})", lambda _x, y: (y,)),
    Operator(
        "expm1", 1, torch.expm1, "expm1f({0})", "_math.expm1({0})", lambda x, _y: (call("exp", x),)
    ),
    Operator("log", 1, torch.log, "logf({0})", "_math.log({0})", lambda x, _y: (1.0 / x,)),
    Operator(
        "log1p", 1, torch.log1p, "log1pf({0})", "_math.log1p({0})", lambda x, _y: (1.0 / (1.0 + x),)
    ),
    Operator("sin", 1, torch.sin, "sinf({0})", "_math.sin({0})", lambda x, _y: (call("cos", x),)),
    Operator("cos", 1, torch.cos, "cosf({0})", "_math.cos({0})", lambda x, _y: (-call("sin", x),)),
    Operator(
        "erf",
        1,
        torch.erf,
        "erff({0})",
        "_math.erf({0})",
        lambda x, _y: (2.0 / math.sqrt(math.pi) * call("exp", -call("square", x)),),
    ),
    Operator(
        "erfc",
        1,
        torch.erfc,
        "erfcf({0})",
        "_math.erfc({0})",
        lambda x, _y: (-2.0 / math.sqrt(math.pi) * call("exp", -call("square", x)),),
    ),
    Operator("tanh", 1, torch.tanh, "te_tanh({0})", "_tanh({0})", _tanh_partials, native=True),
    Operator(
        "sigmoid",
        1,
        torch.sigmoid,
        "te_sigmoid({0})",
        "_sigmoid({0})",
        lambda x, _y: (_sigmoid_slope(x),),
        native=True,
    ),
)

# torch computes each of these in one call; the text lowerings expand them, so that a derivative
# shares their parts.
_COMPOSITE = (
    Operator(
        "relu",
        1,
        lambda x: F.threshold(x, 0.0, 0.0),  # not torch.relu, which keeps -0.0 on some devices
        "te_max({0}, 0.0f)",
        "_max({0}, 0.0)",
        lambda x, _y: (_where(x <= 0.0, 0.0, 1.0),),
        native=True,
    ),
    Operator(
        "silu",
        1,
        F.silu,
        partials=_silu_partials,
        expand=lambda x: raw("mul", x, call("sigmoid", x)),  # `call` would make it silu again
        native=True,
    ),
    Operator(
        "softplus",
        1,
        lambda x: F.softplus(x, 1.0, 50.0),  # the default threshold of 20 costs FP64 six digits
        partials=lambda x, _y: (call("sigmoid", x),),
        expand=_softplus,
    ),
    Operator(
        "gelu_tanh",
        1,
        lambda x: F.gelu(x, approximate="tanh"),
        partials=_gelu_tanh_partials,
        expand=_gelu_tanh,
        native=True,
    ),
    Operator(
        "gelu_erf",
        1,
        # F.gelu cancels, and for Inf gives Inf or NaN depending on the length of the tensor.
        lambda x: x * (0.5 * torch.erfc(x * -math.sqrt(0.5))),
        partials=_gelu_erf_partials,
        expand=_gelu_erf,
    ),
)

_SELECTION = (
    _compare("lt", "<", torch.lt),
    _compare("le", "<=", torch.le),
    _compare("gt", ">", torch.gt),
    _compare("ge", ">=", torch.ge),
    _compare("eq", "==", torch.eq),
    _compare("ne", "!=", torch.ne),
    Operator("isnan", 1, torch.isnan, "{0} != {0}", "{0} != {0}", returns_mask=True),
    Operator("and", 2, torch.logical_and, "{0} && {1}", "{0} & {1}", None, None, (0, 1), True),
    Operator("or", 2, torch.logical_or, "{0} || {1}", "{0} | {1}", None, None, (0, 1), True),
    Operator("not", 1, torch.logical_not, "!{0}", "_not({0})", None, None, (0,), True),
    Operator("where", 3, _torch_where, "{0} ? {1} : {2}", "_where({0}, {1}, {2})", masks=(0,)),
)

OPERATORS: dict[str, Operator] = {
    row.name: row for row in (*_ARITHMETIC, *_TRANSCENDENTAL, *_COMPOSITE, *_SELECTION)
}
