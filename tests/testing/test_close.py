from __future__ import annotations

import math

import pytest
import torch

from te_ops.quantizers import Float8CurrentScalingQuantizer, MXFP8Quantizer
from te_ops.testing import assert_close, assert_equal, assert_no_worse, tolerance, unit_roundoff

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 4096])
def test_one_percent_is_seen(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(size, dtype=torch.float64)
    assert_close(x.to(dtype), x)
    with pytest.raises(AssertionError, match=r"in norm|elements differ"):
        assert_close((1.01 * x).to(dtype), x)


def test_one_wrong_element_is_seen() -> None:
    x = torch.randn(1000)
    y = x.clone()
    y[613] += 0.02 * x.abs().max()
    with pytest.raises(AssertionError, match=r"1 of 1000 elements .* \[613\]"):
        assert_close(y, x)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, -INF), (INF, -INF), (NAN, INF)],
)
def test_special_values_never_pass_for_others(actual: float, expected: float) -> None:
    a, e = torch.tensor([0.0, actual]), torch.tensor([0.0, expected])
    for options in ({}, {"rtol": 1e9, "atol": 1e9}):
        with pytest.raises(AssertionError, match=r"one side only.* first at \[1\]"):
            assert_close(a, e, **options)
    with pytest.raises(AssertionError):
        assert_no_worse(a, e, e)


def test_equal_special_values_pass() -> None:
    x = torch.tensor([NAN, INF, -INF, 0.0])
    assert_close(x, x.clone())
    assert_equal(x, x.clone())
    assert_no_worse(x, x, x)


def test_shape_dtype_and_length_must_agree() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close(torch.ones(3), torch.ones(1, 3))
    with pytest.raises(AssertionError, match="dtype"):
        assert_equal(torch.ones(3), torch.ones(3, dtype=torch.float64))
    with pytest.raises(AssertionError, match="1 results, expected 2"):
        assert_close((torch.ones(1),), (torch.ones(1), torch.ones(1)))


def test_equal_is_bit_for_bit() -> None:
    assert_equal(torch.tensor([NAN]), torch.tensor([NAN]))
    with pytest.raises(AssertionError, match="got 0, expected -0"):
        assert_equal(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_explicit_tolerance() -> None:
    assert_close(torch.tensor([1.5]), torch.tensor([1.0]), atol=0.6)
    with pytest.raises(AssertionError, match=r"got 1\.5, expected 1"):
        assert_close(torch.tensor([1.5]), torch.tensor([1.0]), atol=0.4)


def test_tolerance_grows_with_terms_and_roundings() -> None:
    one = tolerance(torch.bfloat16)
    assert one.norm == pytest.approx(unit_roundoff(torch.bfloat16), rel=1e-3)
    assert tolerance(torch.float32, terms=100).rtol > tolerance(torch.float32).rtol
    assert tolerance(torch.bfloat16, roundings=4).norm == pytest.approx(2 * one.norm, rel=1e-3)
    assert tolerance(torch.bfloat16, scale=10.0).atol == pytest.approx(10 * one.atol)


def test_twice_the_error_of_the_reference() -> None:
    exact = torch.randn(2000, dtype=torch.float64)
    noise = 0.003 * torch.randn(2000, dtype=torch.float64)
    reference = (exact + noise).bfloat16()
    assert_no_worse((exact - noise).bfloat16(), reference, exact)
    assert_no_worse(exact.bfloat16(), exact.bfloat16(), exact)
    with pytest.raises(AssertionError, match="error against float64"):
        assert_no_worse((exact + 3 * noise).bfloat16(), reference, exact)


@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_quantized_results_are_compared_by_their_codes(factor: float) -> None:
    q = MXFP8Quantizer()
    x = torch.randn(64, 64, dtype=torch.float64)
    exact, reference, wrong = (
        q.records(v, row=True, col=False)[0] for v in (x, x.float(), (factor * x).float())
    )
    assert_no_worse(reference, reference, exact)
    with pytest.raises(AssertionError, match="are not those of float64"):
        assert_no_worse(wrong, reference, exact)


@pytest.mark.parametrize("codes", [1, 2])
@pytest.mark.parametrize("place", range(8))
def test_a_code_beside_the_exact_one_passes_and_the_next_one_does_not(
    place: int, codes: int
) -> None:
    values = torch.linspace(0.01, 1.0, 1024).bfloat16().repeat(4, 1)
    exact = Float8CurrentScalingQuantizer().records(values, row=True, col=False)[0]
    data = exact.data.view(torch.uint8).clone()
    data[0, -1 - 64 * place] -= codes
    wrong = exact.with_tensors((data.view(exact.data.dtype), exact.scale_inv))
    if codes == 1:
        assert_no_worse(wrong, exact, exact)
    else:
        with pytest.raises(AssertionError, match="1 of 4096 elements differ"):
            assert_no_worse(wrong, exact, exact)


def test_empty() -> None:
    empty = torch.zeros(0, 4)
    assert_close(empty, empty.clone())
    assert_equal(empty, empty.clone())
    assert_no_worse(empty, empty, empty)
