"""Products of dense matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from te_ops.backends.cublas.problem import Problem
from te_ops.registry import Launch

HALF = (torch.bfloat16, torch.float16)
_DENSE = (*HALF, torch.float32, torch.float64)


def matrix(x: Tensor) -> Tensor:
    """x [..., n] as a matrix [rows, n]."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


_FACTORS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "nt": lambda a, b: (matrix(a), b.t()),
    "nn": lambda a, b: (matrix(a), b),
    "tn": lambda a, b: (matrix(a).t(), matrix(b)),
}


def refuse_dense(problem: Problem) -> str | None:
    """None if torch multiplies these two dtypes into the third."""
    a, b, dtype = problem.a.dtype, problem.b.dtype, problem.dtype
    if a is not b or a not in _DENSE:
        return f"the operands are {a} and {b}; they must have one of {', '.join(map(str, _DENSE))}"
    if dtype is not a and not (a in HALF and dtype is torch.float32):
        return f"the library makes no {dtype} of {a} operands"
    if problem.bias is not None and dtype is not a:
        return f"the library adds no bias to a {dtype} result of {a} operands"
    return None


def bind_dense(problem: Problem) -> Launch:
    """`launch(a, b[, bias])` over dense tensors of any strides and any number of rows, zero too."""
    factors, widens = _FACTORS[problem.layout], problem.dtype is not problem.a.dtype
    dtype, biased, keeps_rows = problem.dtype, problem.bias is not None, problem.layout != "tn"

    def launch(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        left, right = factors(a, b)
        if biased:
            y = torch.addmm(bias, left, right)  # type: ignore[arg-type]
        elif not widens:
            y = torch.mm(left, right)
        elif left.numel() and right.numel():
            y = torch.mm(left, right, out_dtype=dtype)
        else:  # the widening product has no case for this
            y = left.new_zeros((left.shape[0], right.shape[1]), dtype=dtype)
        return y.view(*a.shape[:-1], y.shape[1]) if keeps_rows and a.dim() != 2 else y

    return launch
