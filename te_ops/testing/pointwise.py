"""check_pointwise: a pointwise function and its derived gradient, at the numbers where functions
break.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from te_ops.compiler.trace import trace
from te_ops.compiler.work import Request
from te_ops.graph import Spec
from te_ops.op import Op
from te_ops.pointwise import Fn, evaluate
from te_ops.testing.cases import SPECIAL

POINTS = tuple(p for p in SPECIAL if not 1e38 < abs(p) < torch.inf)
"""Special numbers without those whose square overflows FP32."""

_EPS = 2.0**-23
_PLAIN = (0.5, -1.25, 2.0)  # what the other inputs are


def check_pointwise(fn: Fn, *, points: Sequence[float] = POINTS) -> None:
    """Check a pointwise function at special points, one input at a time and in pairs.

    * FP32 agrees with FP64: NaN where FP64 is NaN, infinite where it overflows FP32, else within
      rounding, taking the conditioning of the function into account; the derivatives likewise.
    * The derived gradient agrees with the slopes of the FP64 function on both sides of the point:
      where they differ (a kink) it lies between them.

    Raises:
        AssertionError: names the function, the derivative, the point and both values.
    """
    width = len(fn.inputs)
    xs = _points(fn, points)
    _agree(fn, xs, fn.name)
    for i in range(width):
        grad = fn.grad(i)
        ones = torch.ones(xs[0].shape[0], 1 if fn.out_kind == "value" else 2, dtype=torch.float64)
        _agree(grad, [*xs, ones], f"{fn.name}: derivative by input {i}")
        _slopes(fn, i, xs, ones)


def functions_of(op: Op, inputs: Sequence[torch.Tensor]) -> list[Fn]:
    """Every pointwise function that the op emits for these inputs."""
    specs = tuple(Spec(tuple(x.shape), x.dtype) for x in inputs)
    grads = tuple(x.is_floating_point() for x in inputs)
    g, _ = trace(Request(op, specs, grads, True, torch.device("cpu"), "cpu", 1))
    return list(dict.fromkeys(n.attrs["fn"] for n in g.nodes if n.prim.name == "pointwise"))


def _points(fn: Fn, points: Sequence[float]) -> list[torch.Tensor]:
    """FP64 inputs [cases, 1 or 2] that FP32 holds exactly: each component special in turn, all
    special alike.
    """
    components = [
        (i, part) for i, kind in enumerate(fn.inputs) for part in range(1 + (kind == "pair"))
    ]
    plain = itertools.cycle(_PLAIN)
    base = {c: next(plain) for c in components}
    rows = [base | {c: p} for c in components for p in points]
    rows += [dict.fromkeys(components, p) for p in points]
    made = []
    for i, kind in enumerate(fn.inputs):
        parts = range(1 + (kind == "pair"))
        values = [[row[i, part] for part in parts] for row in rows]
        made.append(torch.tensor(values, dtype=torch.float32).double())
    return made


def _agree(fn: Fn, xs: list[torch.Tensor], name: str) -> None:
    exact = evaluate(fn, *xs, dtype=torch.float64)
    wanted = exact.float().double()  # overflow and underflow of FP32 are not errors
    got = evaluate(fn, *(x.float() for x in xs), dtype=torch.float32).double()
    bound = 256 * _EPS * (exact.abs() + _sensitivity(fn, xs)) + 1e-37
    finite = exact.isfinite() & wanted.isfinite() & bound.isfinite()
    bad = torch.where(
        finite, (got - wanted).abs() > bound, (got != wanted) & ~(got.isnan() & wanted.isnan())
    )
    # Where a factor inside overflows FP32, an infinity is as good as a number: only NaN is wrong.
    bad = torch.where(~bound.isfinite() & exact.isfinite(), got.isnan(), bad)
    _fail(bad, xs, (got, wanted), f"{name}: FP32 and FP64 disagree")


def _sensitivity(fn: Fn, xs: list[torch.Tensor]) -> torch.Tensor:
    """sum |x_i df/dx_i|: what one rounding of each input does."""
    total = torch.zeros(xs[0].shape[0], 1, dtype=torch.float64)
    ones = torch.ones(xs[0].shape[0], 1 + (fn.out_kind == "pair"), dtype=torch.float64)
    for i, x in enumerate(xs):
        slope = evaluate(fn.grad(i), *xs, ones, dtype=torch.float64)
        part = torch.where((x == 0) | (slope == 0), 0.0, (x * slope).abs())
        total = total + part.sum(-1, keepdim=True)
    return total.nan_to_num(nan=0.0, posinf=torch.inf)


def _slopes(fn: Fn, i: int, xs: list[torch.Tensor], ones: torch.Tensor) -> None:
    """The derivative against one-sided differences of the function in FP64."""
    derived = evaluate(fn.grad(i), *xs, ones, dtype=torch.float64)
    for part in range(xs[i].shape[-1]):
        x = xs[i][:, part]
        h = 1e-6 * x.abs().clamp(min=1e-2)
        right, left = (_difference(fn, xs, i, part, sign * h) for sign in (1, -1))
        got = derived[:, part]
        low, high = torch.minimum(left, right), torch.maximum(left, right)
        slack = 1e-4 * (low.abs() + high.abs()) + 1e-6 + 1e-15 * _level(fn, xs, ones).abs() / h
        moderate = (x.abs() < 1e5) & low.isfinite() & high.isfinite()
        bad = moderate & ~((got >= low - slack) & (got <= high + slack))
        shown = got[:, None], ((low + high) / 2)[:, None]
        _fail(bad[:, None], xs, shown, f"{fn.name}: derivative by input {i}")


def _level(fn: Fn, xs: list[torch.Tensor], ones: torch.Tensor) -> torch.Tensor:
    return evaluate(fn, *xs, dtype=torch.float64).sum(-1).nan_to_num()


def _difference(fn: Fn, xs: list[torch.Tensor], i: int, part: int, h: torch.Tensor) -> torch.Tensor:
    moved = xs[i].clone()
    moved[:, part] += h
    there = evaluate(fn, *xs[:i], moved, *xs[i + 1 :], dtype=torch.float64).sum(-1)
    here = evaluate(fn, *xs, dtype=torch.float64).sum(-1)
    return (there - here) / (moved[:, part] - xs[i][:, part])


def _fail(
    bad: torch.Tensor,
    xs: list[torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor],
    what: str,
) -> None:
    got, wanted = values
    if bool(bad.any()):
        at = int(bad.any(-1).to(torch.uint8).argmax())
        column = int(bad[at].to(torch.uint8).argmax())
        shown = ", ".join(str(x[at].tolist() if x.shape[-1] > 1 else float(x[at])) for x in xs)
        raise AssertionError(
            f"{what} at ({shown}): got {float(got[at, column]):.9g}, expected "
            f"{float(wanted[at, column]):.9g}"
        )
