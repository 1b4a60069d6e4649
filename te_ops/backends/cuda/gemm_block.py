"""FP8 products of block scales by a kernel of our own on Hopper, where the library's was measured to be slower.

See csrc/kernels/gemm_block.cuh and docs/design/0021. What this kernel does not take, and extents for which it is not
faster, go to the library during the call; `te.tune` measures both.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from te_ops.backends.cublas import lt
from te_ops.backends.cublas.choices import OWN, Trial, place
from te_ops.backends.cublas.direct import (
    Form,
    Product,
    bind_direct,
    by_the_library,
    refuse_direct,
)
from te_ops.backends.cublas.kernels import added, in_order, scaling_of
from te_ops.backends.cublas.problem import Problem, problem_of
from te_ops.backends.cublas.scaled import bind_blocks, refuse_blocks
from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda import launch, maps
from te_ops.backends.cuda.block import processors
from te_ops.backends.cuda.source import CTYPES
from te_ops.backends.cuda.wanted import template
from te_ops.config import flag
from te_ops.registry import ArchRange, Call, Kernel, Launch
from te_ops.runtime.tune import TABLE, collecting

ARCH = "sm_90"
PRIORITY = 14  # before the library's own calls
SCALES = (("1x128", "1x128"), ("1x128", "128x128"))
"""Of a and b: what the kernel multiplies."""
SWITCH = "TE_OPS_BLOCK_GEMM"
_THREADS = 512
# As `GemmBlock` in csrc/kernels/gemm_block.cuh says.
_BLOCK, _ROWS, _COLUMNS, _STAGES, _BARRIERS = 128, 192, 128, 5, 16
_BAND = 8
_FULL = 0.93  # of the last round of tiles: below, processors without one cost more than the kernel gains
_DEEP = 2048  # along k: shorter products were not measured
_DEEP_BIAS = 8192  # the same with a bias, which each tile waits for: the library is faster at 4096


# -- where it is faster


def fill(m: int, n: int, count: int) -> float:
    """The part of the tiles that `count` processors could multiply in the same time that the result needs."""
    rounds = -(-tiles(m, n) // count)
    return m * n / (rounds * count * _ROWS * _COLUMNS)


def tiles(m: int, n: int) -> int:
    """Of a result."""
    return -(-m // _ROWS) * -(-n // _COLUMNS)


def slower(product: lt.Product, count: int) -> str | None:
    """Why the library is left to multiply this on `count` processors, None if it was measured to be slower."""
    least = _DEEP if product.bias is None else _DEEP_BIAS
    if product.k < least:
        return f"a contraction of {product.k} was not measured: the library multiplies what is below {least}"
    part = fill(product.m, product.n, count)
    if part < _FULL:
        return (
            f"tiles of {_ROWS} x {_COLUMNS} keep {count} processors {part:.0%} busy with "
            f"{product.m} x {product.n}: below {_FULL:.0%} the library is faster"
        )
    return None


def elsewhere(device: torch.device, product: lt.Product) -> str | None:
    """Why the library is left to multiply this, None if it is slower, by `te.tune`, else by an earlier measurement."""
    if device.type == "cuda":
        tuned = TABLE.get(place(device.index or 0), product.key)
        if tuned is not None:
            return None if tuned == OWN else "te.tune measured the library to be faster"
    return slower(product, processors(device))


# -- the kernel


def shared_bytes(product: lt.Product) -> int:
    """Shared memory of a block of threads."""
    scales = 4 * (_ROWS + (_COLUMNS if product.scales[1] == "1x128" else 0))
    return 1024 + _STAGES * ((_ROWS + _COLUMNS) * _BLOCK + scales + _BARRIERS)


def kernel_of(product: lt.Product, arch: str = ARCH) -> launch.Function:
    """Compile the kernel of a product, whatever its extents."""
    into = "te::ADD" if product.accumulate else "te::WRITE"
    tiled, biased = product.scales[1] == "128x128", product.bias is not None
    numbers = template(tiled, CTYPES[product.d], into, biased)
    text = launch.text_of(
        name="gemm_block",
        head="#include <kernels/gemm_block.cuh>\ntypedef te::GemmBlockArguments Parameters;\n",
        body=f"te::gemm_block<te::GemmBlock<{numbers}>>(p);",
        threads=_THREADS,
    )
    shared = shared_bytes(product)
    return launch.build("gemm_block", text, arch, _THREADS, _SLOTS, shared=shared)


# -- launches

_MAPS = 2 * maps.BYTES
# Scales of a and b, d, m, n, k, the step of b's scales, the band, the bias.
_NUMBERS = struct.Struct("=9q")
_ADDRESSES, _ADDRESS = struct.Struct("=3q"), struct.Struct("=q")
_BIAS = lt.WORDS.index("bias")
_SLOTS = -(-(_MAPS + _NUMBERS.size) // maps.ALIGNMENT) * maps.ALIGNMENT // 8
_USED = 5  # words: a, b, d and the scales; then, where there is one, the bias


class Prepared:
    """A `te_ops.backends.cublas.direct.Product` by this kernel. Threads may share one."""

    clears = False  # as `te_ops.runtime.tape.Issue` asks

    def __init__(self, index: int, product: lt.Product, kernel: launch.Function) -> None:
        self.product = product
        self.used = tuple(i for i, word in enumerate(lt.WORDS) if word in product.has)
        self.issue = kernel.blocks(min(processors(lt.device(index)), tiles(product.m, product.n)))
        self._own = (ctypes.c_int64 * len(lt.WORDS))()
        self._words = memoryview(self._own).cast("B").cast("q")
        self._place = _Place(self, self._words)
        self._lock = threading.Lock()

    def run(self, words: Sequence[int], stream: int) -> None:
        """See `te_ops.backends.cublas.direct.Product`."""
        own = self._words
        with self._lock:  # the maps are patched, and the parameters copied, during the call
            for i in self.used:
                own[i] = words[i]
            self._place(stream)

    def prepare(self, words: memoryview, address: int) -> Any:
        """A call over the words at another place, with maps of its own: for a tape of launches."""
        return _Place(self, words)


class _Place:
    """A product over the words at one place in host memory, and the parameters of its launch."""

    def __init__(self, prepared: Prepared, words: memoryview) -> None:
        self.words, self.product = words, prepared.product
        self._memory = ctypes.create_string_buffer(8 * _SLOTS + maps.ALIGNMENT)
        start = -ctypes.addressof(self._memory) % maps.ALIGNMENT
        self._base, self._numbers = ctypes.addressof(self._memory) + start, start + _MAPS
        self._launch = prepared.issue.prepare(words, self._base)
        self._moves = tuple(maps.mover(self._base + i * maps.BYTES) for i in range(2))
        self._last: tuple[int, int] | None = None

    def __call__(self, stream: int) -> None:
        a, b, d, a_scale, b_scale = self.words[:_USED]
        if self._last != (a, b):
            last, self._last = self._last, None  # after an error both maps are written anew
            if last is None:
                self._describe(a, b)
            else:
                for move, address in zip(self._moves, (a, b), strict=True):
                    maps.check(move(address))
            self._last = (a, b)
        _ADDRESSES.pack_into(self._memory, self._numbers, a_scale, b_scale, d)
        if self.product.bias is not None:
            end = self._numbers + _NUMBERS.size
            _ADDRESS.pack_into(self._memory, end - _ADDRESS.size, self.words[_BIAS])
        self._launch(stream)

    def _describe(self, a: int, b: int) -> None:
        """Everything but the addresses that change."""
        p = self.product
        maps.encode(self._base, a, (p.k, p.m), (p.k,), (_BLOCK, _ROWS))
        # Columns come in the order that gives a thread four next to each other: see `GemmBlock::store`.
        maps.encode(
            self._base + maps.BYTES,
            b,
            (p.k, 2, 4, 2, p.n // 16),
            (p.k, 4 * p.k, 2 * p.k, 16 * p.k),
            (_BLOCK, 2, 4, 2, _COLUMNS // 16),
        )
        blocks = -(-p.k // _BLOCK)
        step = -(-blocks // 4) * 4  # of tiles: as `lt.Product` says that scales lie
        _NUMBERS.pack_into(self._memory, self._numbers, 0, 0, 0, p.m, p.n, p.k, step, _BAND, 0)


class _Preparer:
    """Products by this kernel, which is compiled once, or by the library where that is faster."""

    def __init__(self, kernel: launch.Function) -> None:
        self.kernel = kernel

    def __call__(self, index: int, product: lt.Product) -> Product | None:
        """See `te_ops.backends.cublas.direct.Prepare`."""
        if elsewhere(lt.device(index), product) is not None:
            return by_the_library(index, product)
        return Prepared(index, product, self.kernel)


class _Trial(Trial):
    """The library's algorithms for a product and this kernel, first of all what runs without a measurement."""

    def __init__(self, kernel: launch.Function, index: int, product: lt.Product) -> None:
        super().__init__(index, product)
        self.kernel = kernel

    def candidates(self) -> list[str]:
        """See `Trial`."""
        found = super().candidates()
        left = slower(self.product, processors(self.device)) is not None
        return [*found, OWN] if left else [OWN, *found]

    def prepared(self, text: str) -> Product:
        """See `Trial`."""
        if text == OWN:
            return Prepared(self.index, self.product, self.kernel)
        made: Product = super().prepared(text)
        return made


# -- the kernel rows


def _pair(problem: Problem) -> tuple[str, str]:
    return scaling_of(problem.a), scaling_of(problem.b)


def refuse(call: Call) -> str | None:
    """None for blocks of E4M3 whose product this kernel was measured to make faster."""
    problem = problem_of(call)
    if isinstance(problem, str):
        return problem
    pair = _pair(problem)
    if pair not in SCALES:
        return f"this kernel multiplies 1x128 blocks by 1x128 or 128x128 ones, not {pair[0]} x {pair[1]}"
    reason = refuse_blocks(problem) or refuse_direct(problem)
    if reason is not None:
        return reason
    if problem.c is not None:
        return "this kernel adds no matrix"
    extents = problem.extents
    form = Form(problem, pair)
    if not form.takes(*extents):
        return f"bulk copies do not take extents of {' x '.join(map(str, extents))}"
    if collecting():
        return None
    return elsewhere(problem.device, form.product(*extents))


def bind(call: Call) -> Launch:
    """`launch(a, b[, bias][, added])` over records, of any number of rows."""
    problem = problem_of(call)
    assert isinstance(problem, Problem)
    pair = _pair(problem)
    kernel = kernel_of(Form(problem, pair).product(*problem.extents), call.arch)
    fallback = added(bind_blocks, problem)
    trial = functools.partial(_Trial, kernel)
    run = bind_direct(problem, pair, fallback, _Preparer(kernel), trial)
    return in_order(run, problem.places)


def missing() -> str | None:
    """None if the kernel can run, else what it lacks."""
    if not flag(SWITCH.removeprefix("TE_OPS_"), True):
        return f"{SWITCH}=0 turns the kernel off"
    return compiler.missing() or lt.missing()


KERNELS = tuple(
    Kernel(
        runs=runs,
        name=f"cuda.{runs}_block",
        bind=bind,
        arch=ArchRange(ARCH),
        priority=PRIORITY,
        refuse=refuse,
        available=missing,
        recorded=True,
    )
    for runs in ("gemm", "gemm_accumulate", "gemm_epilogue")
)
"""Products alone, added to a tensor, and with a bias."""
