"""Products of records that no tensor core reads, in BF16 arithmetic that loses nothing beside a 16-bit result.

A code times the scale of its block is few bits times a power of two, which BF16 holds. A scale of the whole tensor has
24 bits: it multiplies the result instead, in FP32. What BF16 does not hold in this way is the sum of two numbers that
it holds, high + low, with 16 bits between them. The product is then high x high + high x low + low x high; the three
stand side by side along the contraction, so that one BF16 GEMM adds them up in FP32. Of an FP32 result such a pair
keeps 2^-17 of the largest summand; products whose values BF16 holds keep FP32's exactness.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_ops import math as te_math
from te_ops.backends.cublas.dense import bind_dense, matrix
from te_ops.backends.cublas.problem import Problem
from te_ops.basic.pointwise import POINTWISE
from te_ops.basic.quantize import DEQUANTIZE
from te_ops.compiler.single import launch_of
from te_ops.graph import Kind, Spec
from te_ops.pointwise import Expr, Fn, Input, InputKind
from te_ops.quantizers import NVFP4Quantizer, Record, Usage
from te_ops.registry import Launch

_LARGEST = torch.finfo(torch.bfloat16).max
_FP32_LARGEST = torch.finfo(torch.float32).max
_GROUP = 16  # rows that go through a Hadamard transform together

# Formats whose numbers BF16 holds: few bits times a power of two.
_HELD: dict[str, Callable[[Any], bool]] = {
    "mxfp8": lambda q: True,
    "float8_current": lambda q: bool(q.force_pow_2_scales),
    "float8_block": lambda q: bool(q.force_pow_2_scales),
    "identity": lambda q: q.dtype in (None, torch.bfloat16),
}
_PER_TENSOR = ("float8_delayed", "float8_current")


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


class _Numbers(NamedTuple):
    """An operand: BF16 tensors whose sum it is, and what the scale of the tensor is made of, if it has one."""

    terms: list[Tensor]
    number: Tensor | None = None


class _Decoder(NamedTuple):
    """What makes the numbers of an operand, and the scale of the tensor from its number, if it has one."""

    run: Callable[[Any], _Numbers]
    scale: Callable[[Expr], Expr] | None = None


def bind_emulated(problem: Problem) -> Launch:
    """`launch(a, b)` over records, or a record and a dense tensor, with any number of rows."""
    decode = _decoders(problem)
    scale = _scaling(problem, [d.scale for d in decode if d.scale is not None])
    multiply = bind_dense(replace(problem, dtype=torch.float32) if scale else problem)
    layout = problem.layout
    along = (0 if layout == "tn" else -1), (-1 if layout == "nt" else 0)

    def launch(a: Any, b: Any) -> Tensor:
        (left, of_a), (right, of_b) = decode[0].run(a), decode[1].run(b)
        if layout == "tn":
            left, right = [matrix(x) for x in left], [matrix(x) for x in right]
        pairs = [(x, w) for i, x in enumerate(left) for w in right[: 2 - i]]
        y: Tensor = multiply(
            *(_joined(f, d) for f, d in zip(zip(*pairs, strict=True), along, strict=True))
        )
        if scale is None:
            return y
        made: Tensor = scale(matrix(y), *(x for x in (of_a, of_b) if x is not None))
        return made.view(y.shape)

    return launch


def _scaling(problem: Problem, scales: list[Callable[[Expr], Expr]]) -> Launch | None:
    """`launch(y, *numbers)`: an FP32 product times the scales of tensors, rounded once; the smaller one first, so that
    nothing overflows before the result does.
    """
    if not scales:
        return None
    found = [scale(Input(i + 1)) for i, scale in enumerate(scales)]
    out = Input(0) * found[0]
    if len(found) == 2:
        out = Input(0) * te_math.minimum(*found) * te_math.maximum(*found)
    kinds: list[InputKind] = ["value"] * (1 + len(found))
    fn = Fn("scales", kinds, (out,))
    rows, columns, _ = problem.extents
    product, number = Spec((rows, columns), torch.float32), Spec((), torch.float32)
    return launch_of(
        POINTWISE,
        (product, *(number for _ in found)),
        problem.device,
        problem.arch,
        fn=fn,
        dtype=problem.dtype,
        broadcast=("full", *("scalar" for _ in found)),
        interleave=None,
    )


def _joined(factors: tuple[Tensor, ...], dim: int) -> Tensor:
    """Side by side along the contraction."""
    return factors[0] if len(factors) == 1 else torch.cat(factors, dim)


# -- numbers of an operand


def _decoders(problem: Problem) -> tuple[_Decoder, _Decoder]:
    """Of both operands. The Hadamard transform is orthonormal: it stays in two operands that both went through it."""
    specs = (problem.a, problem.b)
    both = all(map(_transformed, specs))
    a, b = (
        _decoder(_as_it_lies(spec) if both else spec, problem, as_it_lies=both) for spec in specs
    )
    return a, b


def _decoder(spec: Spec, problem: Problem, *, as_it_lies: bool) -> _Decoder:
    if spec.kind.name == "dense":
        return _Decoder(lambda x: _Numbers([x]))
    quantizer = spec.kind.quantizer.of_usage(spec.kind.usage)

    def values_in(dtype: torch.dtype) -> Launch:
        return launch_of(DEQUANTIZE, (spec,), problem.device, problem.arch, dtype=dtype)

    if _HELD.get(quantizer.name, lambda q: False)(quantizer):
        values = values_in(torch.bfloat16)
        return _Decoder(lambda x: _Numbers([values(x)]))
    if quantizer.name in _PER_TENSOR:
        return _per_tensor(values_in(torch.bfloat16), problem.device)
    if quantizer.name == "nvfp4" and not quantizer.row_scaled and not _transformed(spec):
        run, scale = _nvfp4(values_in(torch.bfloat16), quantizer.limit, problem.device)
        return _Decoder((lambda x: run(_record_as_it_lies(x))) if as_it_lies else run, scale)
    wide = values_in(torch.float32)
    return _Decoder(lambda x: _Numbers(_high_and_low(wide(x))))


def _per_tensor(values: Launch, device: torch.device) -> _Decoder:
    """FP8 with one scale: codes as they are."""
    one = torch.ones(1, device=device)

    def run(record: Record) -> _Numbers:
        assert record.scale_inv is not None
        return _Numbers([values(replace(record, scale_inv=one))], record.scale_inv.reshape(()))

    return _Decoder(run, lambda scale_inv: scale_inv)


def _nvfp4(values: Launch, limit: float, device: torch.device) -> _Decoder:
    """Codes times scales of blocks: what a record decodes to whose amax was mapped to itself."""
    mapped = torch.full((), limit, device=device)

    def run(record: Record) -> _Numbers:
        return _Numbers([values(replace(record, amax=mapped))], record.amax)

    def scale(amax: Expr) -> Expr:
        """By the rule that decodes a record (te_ops.quantizers.nvfp4)."""
        regular = te_math.where(
            amax < limit / _FP32_LARGEST, 1.0 / _FP32_LARGEST, amax * (1.0 / limit)
        )
        return te_math.where((amax > 0.0) & (amax <= _FP32_LARGEST), regular, 1.0)

    return _Decoder(run, scale)


def _high_and_low(wide: Tensor) -> list[Tensor]:
    high = wide.clamp(-_LARGEST, _LARGEST).bfloat16()  # finite, so that high + low is never NaN
    return [high, wide.sub_(high).bfloat16()]


# -- what went through the Hadamard transform


def _transformed(spec: Spec) -> bool:
    """Whether an operand's codes are of numbers that went through it."""
    if spec.kind.name == "dense":
        return False
    quantizer = spec.kind.quantizer.of_usage(spec.kind.usage)
    is_col = spec.kind.usage is Usage.COL
    return isinstance(quantizer, NVFP4Quantizer) and quantizer.with_rht and is_col


def _as_it_lies(spec: Spec) -> Spec:
    """A transformed operand as numbers that did not: whole groups of rows."""
    rows, width = math.prod(spec.shape[:-1]), spec.shape[-1]
    quantizer = replace(spec.kind.quantizer.of_usage(spec.kind.usage), with_rht=False)
    kind = Kind("record", quantizer, spec.kind.usage)
    return Spec((-(-rows // _GROUP) * _GROUP, width), spec.dtype, kind)


def _record_as_it_lies(record: Record) -> Record:
    """The same of a record."""
    kind = Kind("record", record.quantizer, record.usage)
    spec = _as_it_lies(Spec(tuple(record.shape), record.dtype, kind))
    data = record.data.reshape(record.data.shape[0], -1)
    return replace(record, data=data, quantizer=spec.kind.quantizer, shape=spec.shape)
