"""Checks for ops, rules, kernels and formats of your own: run them in your tests.

Every check raises AssertionError with the case, the worst element and its values, and each fails if
what it checks is off by one percent. `te_ops.testing.cases` has the inputs that they draw from.
"""

from te_ops.testing import cases
from te_ops.testing.close import (
    Tolerance,
    assert_close,
    assert_equal,
    assert_no_worse,
    tolerance,
    unit_roundoff,
)
from te_ops.testing.kernels import check_kernel
from te_ops.testing.ops import check_op
from te_ops.testing.pointwise import check_pointwise
from te_ops.testing.quantizers import check_quantizer
from te_ops.testing.rules import check_rule

__all__ = [
    "Tolerance",
    "assert_close",
    "assert_equal",
    "assert_no_worse",
    "cases",
    "check_kernel",
    "check_op",
    "check_pointwise",
    "check_quantizer",
    "check_rule",
    "tolerance",
    "unit_roundoff",
]
