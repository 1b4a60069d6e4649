"""GEMM launches through cuBLASLt: each exact shape is prepared once, a call passes addresses.

What the library does not take as it lies in memory (extents of FP8 that do not divide by 16, strides, addresses)
goes to torch's call, which fills up and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from te_ops.backends.cublas import lt
from te_ops.backends.cublas.choices import Trial, choose
from te_ops.backends.cublas.dense import HALF
from te_ops.backends.cublas.problem import Problem
from te_ops.backends.cublas.scaled import MULTIPLE, tile_scale, vector_scale
from te_ops.quantizers import Record
from te_ops.registry import Launch
from te_ops.runtime.tape import Issue, recorder
from te_ops.runtime.tune import collecting, offer

MAX_SHAPES = 1024  # prepared ones of a launch
_BYTES = lt.ALIGNMENT - 1
_VECTOR_ROWS = 4  # FP32 scales that make 16 bytes: 1x128 scales come in columns of that many rows


def refuse_direct(problem: Problem) -> str | None:
    """None if cuBLASLt sums these operands as torch does; FP32 and FP64 are torch's, which knows its TF32 switch."""
    if problem.a.kind.name == "dense" and problem.a.dtype not in HALF:
        return f"{problem.a.dtype} operands are left to torch"
    for what, spec in (("bias", problem.bias), ("matrix", problem.c)):
        if spec is not None and spec.dtype is not problem.dtype:
            return f"a {spec.dtype} {what} is not added to a {problem.dtype} result"
    return None


@dataclass(frozen=True)
class Form:
    """What a problem says of its products, whatever the extents."""

    problem: Problem
    scales: tuple[str, str]  # of a and b, as `lt.Product` names them

    def product(self, m: int, n: int, k: int) -> lt.Product:
        """With exact extents."""
        p = self.problem
        dense = p.a.kind.name == "dense"
        return lt.Product(
            m=m,
            n=n,
            k=k,
            a=p.a.dtype if dense else _codes(p.a),
            b=p.b.dtype if dense else _codes(p.b),
            d=p.dtype,
            a_k=not dense or p.layout != "tn",
            b_k=not dense or p.layout == "nt",
            scales=self.scales,
            bias=None if p.bias is None else p.dtype,
            accumulate=p.accumulate,
            plus=p.c is not None,
            fast=p.fast and not dense,
        )

    def takes(self, m: int, n: int, k: int) -> bool:
        """Whether the library takes these extents as they are."""
        if not (m and n and k):
            return False
        if not self.scales[0]:
            return True
        multiple = _VECTOR_ROWS if self.scales[0] != "tensor" else 1
        return not (n % MULTIPLE or k % MULTIPLE or m % multiple)


def _codes(spec: Any) -> torch.dtype:
    dtype: torch.dtype = spec.kind.quantizer.of_usage(spec.kind.usage).dtype
    return dtype


class Product(Issue, Protocol):
    """A product of exact extents, ready to run."""

    def run(self, words: Sequence[int], stream: int) -> None:
        """Issue it over the addresses `lt.WORDS` on a stream of its device, which is the current one."""


Prepare = Callable[[int, lt.Product], Product | None]
"""What makes a product ready on a device; None if it cannot be multiplied that way."""


def by_the_library(index: int, product: lt.Product) -> Product | None:
    """By the algorithm that was measured to be the best, else by the library's favourite."""
    chosen = choose(index, product)
    return None if chosen is None else lt.Prepared(index, product, chosen)


def bind_direct(
    problem: Problem,
    scales: tuple[str, str],
    fallback: Launch,
    prepare: Prepare = by_the_library,
    trial: Callable[[int, lt.Product], Trial] = Trial,
) -> Launch:
    """`launch(a, b[, bias][, c][, added])` over dense tensors or records, of any number of rows.

    `trial`: what `te.tune` is offered of a product.
    """
    form, index = Form(problem, scales), problem.device.index or 0
    if collecting():
        extents = problem.extents
        if form.takes(*extents):
            offer(trial(index, form.product(*extents)))
    calls = _Calls(form, index, fallback, prepare)
    return calls.scaled if scales[0] else calls.dense


class _Calls:
    """The launches of a problem, and the products that they prepared."""

    def __init__(self, form: Form, index: int, fallback: Launch, prepare: Prepare) -> None:
        problem = form.problem
        self.form, self.index, self.fallback, self.prepare = form, index, fallback, prepare
        self.dtype, self.device = problem.dtype, problem.device
        self.accumulates, self.biased = problem.accumulate, problem.bias is not None
        self.adds = problem.c is not None
        self.row_first = problem.layout != "tn"
        self.read_scales = tuple(_READ[mode] for mode in form.scales if mode)
        self.made: dict[Any, tuple[Product, tuple[int, ...]] | None] = {}

    def dense(self, a: Tensor, b: Tensor, *more: Tensor) -> Tensor:
        """Over dense operands."""
        key = (a.shape, b.shape)
        found = self.made.get(key, self)
        if found is self:
            found = self._prepare(key, a.shape, b.shape)
        if found is not None and a.is_contiguous() and b.is_contiguous():
            made = self._run(found, (a.data_ptr(), b.data_ptr(), 0, 0), more)
            if made is not None:
                return made
        other: Tensor = self.fallback(a, b, *more)
        return other

    def scaled(self, a: Record, b: Record, *more: Tensor) -> Tensor:
        """Over records."""
        x, w = a.data, b.data
        key = (x.shape, w.shape)
        found = self.made.get(key, self)
        if found is self:
            found = self._prepare(key, a.shape, b.shape)
        if found is not None and x.is_contiguous() and w.is_contiguous():
            of_a, of_b = self.read_scales
            left, right = of_a(_scale(a)), of_b(_scale(b))
            words = (x.data_ptr(), w.data_ptr(), left.data_ptr(), right.data_ptr())
            made = self._run(found, words, more)
            if made is not None:
                return made
        other: Tensor = self.fallback(a, b, *more)
        return other

    def _prepare(self, key: Any, a: Any, b: Any) -> Any:
        m, n, k = self.form.problem.extents_of(a, b)
        found = None
        if self.form.takes(m, n, k):
            prepared = self.prepare(self.index, self.form.product(m, n, k))
            if prepared is not None:
                found = (prepared, (*a[:-1], n) if self.row_first else (m, n))
        if len(self.made) >= MAX_SHAPES:
            self.made.clear()
        self.made[key] = found
        return found

    def _run(self, found: Any, words: tuple[int, ...], more: tuple[Tensor, ...]) -> Tensor | None:
        """The result; None where an address or a stride is not what the library takes."""
        prepared, shape = found
        bias = c = 0
        if self.biased:
            if more[0].stride(-1) != 1:
                return None
            bias = more[0].data_ptr()
        if self.adds:
            if not more[-1].is_contiguous():
                return None
            c = more[-1].data_ptr()
        a, b, scale_a, scale_b = words
        if (a | b | scale_a | scale_b | bias | c) & _BYTES:
            return None
        if self.accumulates:
            d = more[-1]
            if d.data_ptr() & _BYTES or not d.is_contiguous():
                return None
        else:
            d = torch.empty(shape, dtype=self.dtype, device=self.device)
        given = (a, b, d.data_ptr(), scale_a, scale_b, bias, 0, 0, c)
        index = self.index
        if lt.current_device() != index:
            with lt.entered(index):
                prepared.run(given, lt.stream_of(index))
        else:
            prepared.run(given, lt.stream_of(index))
        tape = recorder()
        if tape is not None:
            tape.launched(prepared, given)
        return d


def _scale(record: Record) -> Tensor:
    scale = record.scale_inv
    assert scale is not None  # every format of a scaled product has one
    return scale


def _vector(scale: Tensor) -> Tensor:
    """Its address is what counts: nothing is made where the numbers lie as the library reads them."""
    return scale if scale.stride() == (1, scale.shape[0]) else vector_scale(scale, 0)


def _tile(scale: Tensor) -> Tensor:
    in_place = scale.is_contiguous() and not scale.shape[1] % _VECTOR_ROWS
    return scale if in_place else tile_scale(scale)


def _same(scale: Tensor) -> Tensor:
    return scale


_READ: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor": _same,
    "1x128": _vector,
    "128x128": _tile,
}
