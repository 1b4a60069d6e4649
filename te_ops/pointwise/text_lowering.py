"""The text lowerings: a function as CUDA C++ or as CuTe DSL Python, on FP32 scalars.

Both texts hold each node once and follow the special values of the table. They need their target's
prelude, whose `fast` variant approximates `exp`, `tanh` and `sigmoid` (relative error up to 2^-11):
good enough where the result is rounded to BF16 or FP8, not for FP16 or FP32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from te_ops.errors import PlanError
from te_ops.pointwise.expr import Const, Expr, float32, intern, walk
from te_ops.pointwise.function import COMPONENTS, Fn
from te_ops.pointwise.table import OPERATORS

Target: TypeAlias = Literal["cuda", "cutedsl"]

_CUDA_EXACT = """\
static __device__ __forceinline__ float te_exp(float x) { return expf(x); }
static __device__ __forceinline__ float te_tanh(float x) { return tanhf(x); }
static __device__ __forceinline__ float te_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
"""

_CUDA_FAST = """\
static __device__ __forceinline__ float te_exp(float x) { return __expf(x); }
static __device__ __forceinline__ float te_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// A denominator beyond 2^126 gives 0, which is what the sigmoid is there; so it may flush what is denormal, for which
// the other forms of these instructions spend eight more.
static __device__ __forceinline__ float te_sigmoid(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + y));
  return y;
#else
  return __fdividef(1.0f, 1.0f + __expf(-x));
#endif
}
"""

_CUDA_COMMON = """\
// fminf and fmaxf drop a NaN; these return it.
static __device__ __forceinline__ float te_min(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a != a || a < b || (a == b && signbit(a)) ? a : b;
#endif
}
static __device__ __forceinline__ float te_max(float a, float b) {
#ifdef __CUDA_ARCH__
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a != a || a > b || (a == b && signbit(b)) ? a : b;
#endif
}
static __device__ __forceinline__ float te_sign(float x) {
  return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f;
}
"""

_CUTEDSL_IMPORTS = """\
import cutlass.cute as _cute
from cutlass import Boolean as _Boolean, Float32 as _Float32
from cutlass.cutlass_dsl import select_ as _select
from cutlass.cute import math as _math


"""

_CUTEDSL_EXACT = """\
def _exp(x):
    return _math.exp(x)


def _tanh(x):
    return _math.tanh(x)


def _sigmoid(x):
    return 1.0 / (1.0 + _math.exp(-x))


def _sigmoids(x):
    return _sigmoid(x), _sigmoid(-x)


"""

_CUTEDSL_FAST = """\
def _exp(x):
    return _math.exp2(x * 1.4426950408889634, fastmath=True)


def _tanh(x):
    return _math.tanh(x, approx=True)


def _sigmoid(x):
    return _cute.arch.rcp_approx(1.0 + _exp(-x))


def _sigmoids(x):
    small = _exp(-_math.absf(x))
    far = _cute.arch.rcp_approx(1.0 + small)
    near = small * far
    return _where(x > 0.0, far, near), _where(x > 0.0, near, far)


"""

_CUTEDSL_COMMON = """\
def _where(mask, a, b):
    return _Float32(_select(mask, _Float32(a), _Float32(b)))


def _not(mask):
    return _Boolean(mask.__invert__())


def _min(a, b):
    return _cute.arch.fmin(a, b, nan=True)


def _max(a, b):
    return _cute.arch.fmax(a, b, nan=True)


def _sign(x):
    return _where(x > 0.0, 1.0, _where(x < 0.0, -1.0, 0.0))
"""


def prelude(target: Target, *, fast: bool = False) -> str:
    """The helpers that the text of `lower` calls; once per translation unit or module.

    Args:
        target: "cuda" or "cutedsl".
        fast: approximate `exp`, `tanh` and `sigmoid`, for results that are rounded to BF16 or FP8.
    """
    head, exact, approximate, common = _writer(target).prelude
    return head + (approximate if fast else exact) + common


def symbol(fn: Fn) -> str:
    """The name of the function that `lower` writes: stable, and different per `fn.key`."""
    return f"te_pointwise_{hashlib.blake2b(fn.key.encode(), digest_size=8).hexdigest()}"


def parameters(fn: Fn) -> tuple[str, ...]:
    """Its parameters: `x0`, or `x0_gate` and `x0_linear`, per input in order."""
    return tuple(
        _parameter(index, part) for index, kind in enumerate(fn.inputs) for part in COMPONENTS[kind]
    )


def lower(fn: Fn, target: Target) -> str:
    """The text of a function named `symbol(fn)`; it calls the helpers of `prelude(target)`.

    * "cuda": `void symbol(float x0, ..., float& y0[, float& y1])`, a `__device__` function.
    * "cutedsl": `def symbol(x0, ...)` on `Float32` values, which returns y0, or (y0, y1) for a
      pair.

    Raises:
        PlanError: an unknown target.
    """
    writer = _writer(target)
    names: dict[Expr, str] = {}
    lines: list[str] = []
    outputs = expand(fn).out
    opposites = _opposites(outputs) if target == "cutedsl" else {}
    for node in walk(outputs):
        if node in names:
            continue
        if node in opposites:
            x, up, down = opposites[node]
            if x not in names:  # that of the other comes later
                x, up, down = node.args[0], down, up
            names[up], names[down] = f"t{len(lines)}", f"u{len(lines)}"
            lines.append(f"{names[up]}, {names[down]} = _sigmoids({names[x]})")
        elif node.op == "input":
            names[node] = _parameter(*node.payload)
        elif node.is_const:
            names[node] = writer.literal(node.payload)
        else:
            template = getattr(OPERATORS[node.op], target)
            names[node] = f"t{len(lines)}"
            text = template.format(*(names[arg] for arg in node.args))
            lines.append(writer.assign(names[node], node.is_mask, text))
    return writer.function(symbol(fn), parameters(fn), lines, [names[out] for out in outputs])


def _opposites(outputs: Iterable[Expr]) -> dict[Expr, tuple[Expr, Expr, Expr]]:
    """Sigmoids of x and of -x that are both there, as derivatives have them: each with (x, the one, the other).

    One exponential and one reciprocal serve both, exactly; in a GEMM's epilogue these units are what it waits for.
    """
    sigmoids = {node.args[0]: node for node in walk(outputs) if node.op == "sigmoid"}
    found: dict[Expr, tuple[Expr, Expr, Expr]] = {}
    for argument, node in sigmoids.items():
        opposite = _opposite(argument)
        if opposite in sigmoids and node not in found:
            pair = (opposite, sigmoids[opposite], node)
            found |= dict.fromkeys(pair[1:], pair)
    return found


def _opposite(node: Expr) -> Expr | None:
    """What `node` is the negative of, bit for bit."""
    if node.op == "neg":
        return node.args[0]
    if node.op == "mul" and node.args[1].is_const:
        return intern("mul", (node.args[0], Const(-float(node.args[1].payload))))
    return None


def expand(fn: Fn) -> Fn:
    """`fn` in operators that have a text of their own, so that what they share is written once.

    Built with `intern`, since the builder would recognise a composite operator in its expansion.
    """
    new: dict[Expr, Expr] = {}
    for node in walk(fn.out):
        args = tuple(new[arg] for arg in node.args)
        row = OPERATORS.get(node.op)
        if row is not None and row.expand is not None:
            new[node] = row.expand(*args)
        else:
            new[node] = intern(node.op, args, node.payload, node.is_mask)
    return Fn(fn.name, fn.inputs, [new[out] for out in fn.out])


def _parameter(index: int, part: str) -> str:
    return f"x{index}" if part == "value" else f"x{index}_{part}"


def _cuda_literal(value: float) -> str:
    """The FP32 value of a constant in C++; the shortest decimal that reads back as it."""
    if math.isnan(value):
        return "__int_as_float(0x7fc00000)"
    rounded = float32(value)
    if math.isinf(rounded):
        return f"__int_as_float(0x{'ff' if rounded < 0 else '7f'}800000)"
    text = f"{np.float32(rounded)!s}f"
    return f"({text})" if text.startswith("-") else text


def _python_literal(value: float) -> str:
    rounded = float32(value)
    if math.isfinite(rounded):
        return f"({rounded!r})" if math.copysign(1.0, rounded) < 0 else repr(rounded)
    return f'float("{rounded}")'


def _cuda_function(name: str, inputs: tuple[str, ...], lines: list[str], outputs: list[str]) -> str:
    signature = [*(f"float {x}" for x in inputs), *(f"float& y{k}" for k in range(len(outputs)))]
    body = [*lines, *(f"y{k} = {out};" for k, out in enumerate(outputs))]
    text = "".join(f"  {line}\n" for line in body)
    return f"static __device__ __forceinline__ void {name}({', '.join(signature)}) {{\n{text}}}\n"


def _python_function(
    name: str, inputs: tuple[str, ...], lines: list[str], outputs: list[str]
) -> str:
    text = "".join(f"    {line}\n" for line in [*lines, f"return {', '.join(outputs)}"])
    return f"def {name}({', '.join(inputs)}):\n{text}"


@dataclass(frozen=True, slots=True)
class Writer:
    """The syntax of a target; its prelude as head, exact, fast and common helpers."""

    prelude: tuple[str, str, str, str]
    literal: Callable[[float], str]
    assign: Callable[[str, bool, str], str]
    function: Callable[[str, tuple[str, ...], list[str], list[str]], str]


CUDA = Writer(
    ("", _CUDA_EXACT, _CUDA_FAST, _CUDA_COMMON),
    _cuda_literal,
    lambda name, is_mask, text: f"const {'bool' if is_mask else 'float'} {name} = {text};",
    _cuda_function,
)
CUTEDSL = Writer(
    (_CUTEDSL_IMPORTS, _CUTEDSL_EXACT, _CUTEDSL_FAST, _CUTEDSL_COMMON),
    _python_literal,
    lambda name, _is_mask, text: f"{name} = {text}",
    _python_function,
)
WRITERS: dict[str, Writer] = {"cuda": CUDA, "cutedsl": CUTEDSL}


def _writer(target: str) -> Writer:
    if target not in WRITERS:
        raise PlanError(f"no lowering to {target!r}: the targets are {sorted(WRITERS)}")
    return WRITERS[target]
