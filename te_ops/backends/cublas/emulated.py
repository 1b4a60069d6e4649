"""Products of records that no tensor core reads, in BF16 arithmetic as exact as FP32's.

A dequantized number that BF16 cannot hold is the sum of two that it can, high + low, with 16 bits
between them. The product is then high x high + high x low + low x high; the three stand side by
side along the contraction, so that one BF16 GEMM adds them up in FP32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_ops.backends.cublas.dense import bind_dense, matrix
from te_ops.backends.cublas.problem import Problem
from te_ops.basic.quantize import DEQUANTIZE
from te_ops.compiler.single import launch_of
from te_ops.graph import Spec
from te_ops.registry import Launch

_LARGEST = torch.finfo(torch.bfloat16).max

# Formats whose numbers BF16 holds: few bits times a power of two.
_HELD: dict[str, Callable[[Any], bool]] = {
    "mxfp8": lambda q: True,
    "float8_current": lambda q: bool(q.force_pow_2_scales),
    "float8_block": lambda q: bool(q.force_pow_2_scales),
    "identity": lambda q: q.dtype in (None, torch.bfloat16),
}


def refuse_emulated(problem: Problem) -> str | None:
    """None if a BF16 product stands for the quantized one: operands are BF16, and the result or FP32."""
    if problem.a.kind.name == problem.b.kind.name == "dense":
        return "nothing here is quantized"
    for dtype in (problem.a.dtype, problem.b.dtype):
        if dtype is not torch.bfloat16:
            return f"only BF16 operands are emulated in BF16, not {dtype}"
    if problem.dtype not in (torch.bfloat16, torch.float32):
        return f"a BF16 product has a BF16 or FP32 result, not {problem.dtype}"
    return None


def bind_emulated(problem: Problem) -> Launch:
    """`launch(a, b)` over records, or a record and a dense tensor, with any number of rows."""
    multiply, layout = bind_dense(problem), problem.layout
    decode = tuple(_decoder(spec, problem) for spec in (problem.a, problem.b))
    along = (0 if layout == "tn" else -1), (-1 if layout == "nt" else 0)

    def launch(a: Any, b: Any) -> Tensor:
        left, right = decode[0](a), decode[1](b)
        if layout == "tn":
            left, right = [matrix(x) for x in left], [matrix(x) for x in right]
        pairs = [(x, w) for i, x in enumerate(left) for w in right[: 2 - i]]
        y: Tensor = multiply(
            *(_joined(f, d) for f, d in zip(zip(*pairs, strict=True), along, strict=True))
        )
        return y

    return launch


def _held(spec: Spec) -> bool:
    """Whether BF16 holds every number of the operand."""
    if spec.kind.name == "dense":
        return True
    quantizer = spec.kind.quantizer.of_usage(spec.kind.usage)
    return _HELD.get(quantizer.name, lambda q: False)(quantizer)


def _joined(factors: tuple[Tensor, ...], dim: int) -> Tensor:
    """Side by side along the contraction."""
    return factors[0] if len(factors) == 1 else torch.cat(factors, dim)


def _decoder(spec: Spec, problem: Problem) -> Callable[[Any], list[Tensor]]:
    """From an operand to BF16 tensors whose sum it is: itself, its values, or high and low."""
    if spec.kind.name == "dense":
        return lambda x: [x]
    held = _held(spec)
    dtype = torch.bfloat16 if held else torch.float32
    values = launch_of(DEQUANTIZE, (spec,), problem.device, problem.arch, dtype=dtype)
    return (lambda x: [values(x)]) if held else (lambda x: _high_and_low(values(x)))


def _high_and_low(wide: Tensor) -> list[Tensor]:
    high = wide.clamp(-_LARGEST, _LARGEST).bfloat16()  # finite, so that high + low is never NaN
    return [high, wide.sub_(high).bfloat16()]
