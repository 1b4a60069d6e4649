"""Comparing tensors: computed tolerances, and the rule "at most twice the error of the reference".

Nothing here hides a non-finite value: NaN must meet NaN, and an infinity one of its own sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.quantizers import QuantizedTensor, Record

_EPS = {
    torch.float8_e4m3fn: 2.0**-3,
    torch.float8_e5m2: 2.0**-2,
    torch.uint8: 2.0**-1,  # two E2M1 codes
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
    torch.float32: 2.0**-23,
    torch.float64: 2.0**-52,
}


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to `dtype`: half the gap above 1 (0.25 for E2M1 pairs
    in uint8, 0 for integers)."""
    return _EPS.get(dtype, 0.0) / 2


@dataclass(frozen=True)
class Tolerance:
    """`|error| <= rtol * |expected| + atol` for each element, and `norm(error) <= norm *
    norm(expected)`.

    `atol` is in the units of the tensor; `norm=None` leaves the second test out.
    """

    rtol: float
    atol: float
    norm: float | None = None


def tolerance(
    dtype: torch.dtype,
    *,
    terms: int = 1,
    roundings: float = 1,
    scale: float = 1.0,
    accumulate: torch.dtype | None = None,
) -> Tolerance:
    """The tolerance of a result in `dtype` made by sums of `terms` and `roundings` roundings in a
    row.

    Roundings and terms of a sum are independent errors, so both grow with the square root:
    `sqrt(roundings) * u(dtype) + 4 * sqrt(terms) * u(accumulate)` in norm, and 4 times that for an
    element. The factor 4 is room for cancellation in a sum of random signs.

    Args:
        dtype: of the result.
        terms: longest sum.
        roundings: roundings to `dtype` one after the other.
        scale: largest magnitude in the tensor; small elements may err by as much as large ones.
        accumulate: dtype of the sums; default FP32, or FP64 for an FP64 result.
    """
    wide = accumulate or (torch.float64 if dtype is torch.float64 else torch.float32)
    norm = math.sqrt(roundings) * unit_roundoff(dtype) + 4 * math.sqrt(terms) * unit_roundoff(wide)
    return Tolerance(rtol=2 * norm, atol=2 * norm * scale, norm=norm)


def assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    terms: int = 1,
    roundings: float = 1,
    name: str = "result",
) -> None:
    """Fail unless `actual` is `expected` within the tolerance; NaN only equals NaN, an infinity
    only itself.

    Both may be tensors, numbers, quantized tensors or records (their values count), or tuples of
    these. Shapes must agree. Without `rtol` and `atol` the tolerance is computed from the coarser
    dtype of the two and the number of `terms` and `roundings` (see `tolerance`), and the error is
    bounded in norm as well, which shows a systematic error far below the bound of an element.

    Raises:
        AssertionError: names the worst element and its values.

    >>> assert_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 2e-7]))
    >>> assert_close(torch.tensor([1.0, float("nan")]), torch.ones(2))
    Traceback (most recent call last):
    AssertionError: result: 1 of 2 elements: NaN on one side only; first at [1]: got nan, expected 1
    """
    if isinstance(expected, tuple | list):
        _same_length(actual, expected, name)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(
                a, e, rtol=rtol, atol=atol, terms=terms, roundings=roundings, name=f"{name}[{i}]"
            )
        return
    a, e = values(actual), values(expected)
    _same_shape(a, e, name)
    _same_special(a, e, name)
    if rtol is not None or atol is not None:
        bound = Tolerance(rtol or 0.0, atol or 0.0)
    else:
        dtype = max((_dtype(actual), _dtype(expected)), key=unit_roundoff)
        bound = tolerance(dtype, terms=terms, roundings=roundings, scale=largest(e))
    _check_elements(a, e, bound, name)
    _check_norm(a, e, bound, name)


def assert_equal(actual: Any, expected: Any, *, name: str = "result") -> None:
    """Fail unless both have the same bits (every NaN counts as one; 0 and -0 differ)."""
    if isinstance(expected, tuple | list):
        _same_length(actual, expected, name)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(a, e, name=f"{name}[{i}]")
        return
    if isinstance(expected, Record):
        assert_equal(actual.tensors(), expected.tensors(), name=name)
        return
    if actual.dtype is not expected.dtype:
        raise AssertionError(f"{name}: dtype {actual.dtype}, expected {expected.dtype}")
    a, e = values(actual), values(expected)
    _same_shape(a, e, name)
    _same_special(a, e, name)
    _report(a, e, ~a.isnan() & ((a != e) | (a.signbit() != e.signbit())), "differ", name)


def assert_no_worse(
    actual: Any,
    reference: Any,
    exact: Any,
    *,
    factor: float = 2.0,
    floor: float = 0.0,
    name: str = "result",
) -> None:
    """Fail if the error of `actual` against float64 is more than `factor` times that of the
    same-dtype `reference`.

    Both errors are taken against `exact`, in norm; a single element may err by twice `factor` times
    the reference's worst. A result that is `exact` correctly rounded always passes, and so does an
    error up to `floor` in norm. Records are compared by their values, and by the share of elements
    that differ from the exact codes, since a wrong value often rounds to the right code. One of their
    elements may also be the code beside: a value near the middle of two can take either.

    Raises:
        AssertionError: says both errors and the worst element.
    """
    a, r, x = values(actual), values(reference), values(exact)
    _same_shape(a, x, name)
    _same_special(a, r, name)
    if isinstance(reference, QuantizedTensor | Record):
        _check_codes(a, r, x, factor, name)
    r, x = (
        torch.where(a.isfinite(), t, a) for t in (r, x)
    )  # overflow of the dtype is not an error to compare
    unit = unit_roundoff(_dtype(actual))
    error, allowed = _norm(a - x), max(factor * _norm(r - x), unit * _norm(x), floor)
    worst = 2 * max(factor * largest(r - x), unit * largest(x), floor) + _smallest(_dtype(actual))
    beside = (a - x).abs() <= _gap(reference) * torch.minimum(a.abs(), x.abs())
    _check_elements(torch.where(beside, x, a), x, Tolerance(0.0, worst), name)
    if error > allowed:
        raise AssertionError(
            f"{name}: the error against float64 is {error:.3g} in norm, {allowed:.3g} is allowed "
            f"({factor:g} times "
            f"that of the reference in {_dtype(reference)}); norm of the result {_norm(x):.3g}. "
            + _worst(a, x, (a - x).abs())
        )


# -- parts


def values(x: Any) -> torch.Tensor:
    """The numbers of a tensor, number, quantized tensor or record, in FP64 without autograd."""
    if isinstance(x, QuantizedTensor | Record):
        x = x.dequantize(torch.float64)
    return torch.as_tensor(x).detach().to(torch.float64)


def largest(x: torch.Tensor) -> float:
    """The largest finite magnitude, 0 where there is none."""
    finite = x.detach()[x.detach().isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _dtype(x: Any) -> torch.dtype:
    found = getattr(x, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float64


def _gap(x: Any) -> float:
    """The most that neighbouring codes differ by, as a share of the smaller; 0 where values are no codes."""
    rounding = 1 + 2.0**-20  # of the product with the scale
    return 2 * unit_roundoff(x.data.dtype) * rounding if isinstance(x, Record) else 0.0


def _smallest(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).smallest_normal) if dtype.is_floating_point else 0.0


def _norm(x: torch.Tensor) -> float:
    return float(x[x.isfinite()].norm()) if x.numel() else 0.0


def _same_length(actual: Any, expected: Any, name: str) -> None:
    count = len(actual) if isinstance(actual, tuple | list) else 1
    if not isinstance(actual, tuple | list) or count != len(expected):
        raise AssertionError(f"{name}: {count} results, expected {len(expected)}")


def _same_shape(a: torch.Tensor, e: torch.Tensor, name: str) -> None:
    if a.shape != e.shape:
        raise AssertionError(f"{name}: shape {tuple(a.shape)}, expected {tuple(e.shape)}")


def _same_special(a: torch.Tensor, e: torch.Tensor, name: str) -> None:
    _report(a, e, a.isnan() != e.isnan(), "NaN on one side only", name)
    infinite = (a.isinf() | e.isinf()) & (a != e)
    _report(a, e, infinite, "infinite on one side only, or of another sign", name)


def _check_elements(a: torch.Tensor, e: torch.Tensor, bound: Tolerance, name: str) -> None:
    finite = a.isfinite() & e.isfinite()
    error = torch.where(finite, (a - e).abs(), 0.0)
    limit = bound.rtol * torch.where(finite, e.abs(), 0.0) + bound.atol
    bad = error > limit
    if bool(bad.any()):
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {a.numel()} elements differ by more than "
            f"{bound.rtol:.3g} * |expected| + {bound.atol:.3g}. " + _worst(a, e, error - limit)
        )


def _check_norm(a: torch.Tensor, e: torch.Tensor, bound: Tolerance, name: str) -> None:
    if bound.norm is None:
        return
    error, size = _norm(torch.where(e.isfinite(), a - e, 0.0)), _norm(e)
    if error > bound.norm * size:
        raise AssertionError(
            f"{name}: relative error {error / size if size else math.inf:.3g} in norm, "
            f"{bound.norm:.3g} is allowed. " + _worst(a, e, (a - e).abs())
        )


def _check_codes(
    a: torch.Tensor, r: torch.Tensor, x: torch.Tensor, factor: float, name: str
) -> None:
    wrong, usual = int((a != x).sum()), int((r != x).sum())
    allowed = factor * usual + 0.01 * a.numel()
    if wrong > allowed and int((a != r).sum()) > 0.01 * a.numel():
        raise AssertionError(
            f"{name}: {wrong} of {a.numel()} quantized elements are not those of float64, "
            f"{allowed:.0f} may be "
            f"({factor:g} times those of the reference, {usual}, and 1 %). "
            + _worst(a, x, (a - x).abs())
        )


def _report(a: torch.Tensor, e: torch.Tensor, bad: torch.Tensor, what: str, name: str) -> None:
    if bool(bad.any()):
        at = _index(bad, int(bad.reshape(-1).to(torch.uint8).argmax()))
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {a.numel()} elements: {what}; first at {list(at)}: "
            f"got {float(a[at]):.9g}, expected {float(e[at]):.9g}"
        )


def _worst(a: torch.Tensor, e: torch.Tensor, error: torch.Tensor) -> str:
    if not error.numel():
        return "There are no elements."
    at = _index(error, int(error.nan_to_num(nan=-math.inf).reshape(-1).argmax()))
    got, wanted = float(a[at]), float(e[at])
    return f"Worst at {list(at)}: got {got:.9g}, expected {wanted:.9g} (off by {got - wanted:.3g})"


def _index(x: torch.Tensor, flat: int) -> tuple[int, ...]:
    found = []
    for size in reversed(x.shape):
        found.append(flat % size)
        flat //= size
    return tuple(reversed(found))
