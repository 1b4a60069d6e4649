"""Kernels that no node asks for: products of block scales, copies around a recorded graph, scales in another order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from te_ops.backends.cublas import lt
from te_ops.backends.cuda import around, gemm_block, launch, swizzle
from te_ops.quantizers import MXFP8Quantizer, NVFP4Quantizer, Quantizer
from tests.backends.cuda.cases import Draw

E4M3, FP32 = torch.float8_e4m3fn, torch.float32
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Multiplied:
    """A product of E4M3 codes in blocks of ones."""

    scales: tuple[str, str]
    d: torch.dtype
    accumulate: bool

    @property
    def name(self) -> str:
        """Of a case."""
        into = "added" if self.accumulate else "written"
        return f"gemm_block-{' x '.join(self.scales)}-{self.d}-{into}"

    def check(self, draw: Draw, shape: Shape, arch: str) -> list[str]:
        """What differs from a product in FP64; the extents are the nearest that the kernel takes. No host runs it."""
        if arch != gemm_block.ARCH:
            return ["refused: it is written in Hopper's instructions"]
        m, n, k = (step * max(1, -(-size // step)) for step, size in self._extents(shape))
        product = lt.Product(
            m, n, k, E4M3, E4M3, self.d, scales=self.scales, accumulate=self.accumulate
        )
        kernel = gemm_block.kernel_of(product, arch)
        a, b, d = draw((m, k)), draw((n, k)), draw((m, n), self.d)
        if a.device.type != "cuda":
            return []
        a, b = a.to(E4M3), b.to(E4M3)
        expected = a.double() @ b.double().t() + (d.double() if self.accumulate else 0.0)
        wide = -(-k // 128) * 4  # more than any layout of scales has in a row of blocks
        ones = [torch.ones(wide * max(m, n), device=a.device) for _ in "ab"]
        words = [t.data_ptr() for t in (a, b, d, *ones)]
        index = a.device.index
        prepared = gemm_block.Prepared(index, product, kernel)
        prepared.run(words, launch.stream_of(index))
        worst = float((d.double() - expected).norm() / expected.norm().clamp_min(1e-30))
        return [] if worst < 4e-3 else [f"d is {worst:.1e} off"]

    def _extents(self, shape: Shape) -> Iterator[tuple[int, int]]:
        """(what it is a multiple of, size) of m, n, k."""
        rows, columns = (*shape, 1)[0], shape[-1]
        yield from ((4, rows), (32, columns), (16, rows + columns))


class Copied:
    """Tensors of odd sizes, copied in one launch."""

    name = "copy_several"

    def check(self, draw: Draw, shape: Shape, arch: str) -> list[str]:
        """Which bytes differ."""
        sources = [
            draw((max(1, size) * k,)).view(torch.uint8)[k:].clone()
            for size in shape
            for k in (1, 3)
        ]
        made = [torch.zeros_like(s) for s in sources]
        size = next(s for s in around.SIZES if len(sources) <= s)
        text = around.text_of(size)
        kernel = launch.build("copy_several", text, arch, around.THREADS, 4 * size)
        slots, end = [], 0
        for a, b in zip(made, sources, strict=True):
            end += -(-b.nbytes // around.SHARE)
            slots += [a.data_ptr(), b.data_ptr(), b.nbytes, end]
        slots += [0, 0, 0, end] * (size - len(sources))
        kernel(sources[0].device, end, *slots)
        pairs = enumerate(zip(made, sources, strict=True))
        return [f"tensor {i} differs" for i, (a, b) in pairs if not torch.equal(a, b)]


@dataclass(frozen=True)
class Ordered:
    """Scales of two records in the order of the tensor cores of sm_100."""

    quantizer: Quantizer

    @property
    def name(self) -> str:
        """Of a case."""
        return f"swizzle-{self.quantizer.describe()}"

    def check(self, draw: Draw, shape: Shape, arch: str) -> list[str]:
        """Which scales are missing: each of a record is found in its order, filled up with zeros."""
        rows, columns = max(1, (*shape, 1)[0]), max(1, shape[-1])
        records = []
        for count in (rows, columns):
            record, *_ = self.quantizer.records(draw((count, rows + columns)), row=True, col=False)
            assert record is not None
            records.append(record)
        found = []
        for i, (made, record) in enumerate(
            zip(swizzle.make_swizzle(arch)(*records), records, strict=True)
        ):
            assert record.scale_inv is not None
            ours, theirs = (
                t.contiguous().view(torch.uint8).flatten().sort().values
                for t in (made.blocks, record.scale_inv)
            )
            zeros = theirs.new_zeros(ours.numel() - theirs.numel())
            if not torch.equal(ours, torch.cat([zeros, theirs]).sort().values):
                found.append(f"scales of record {i} differ")
        return found


def alone_cases() -> Iterator[Multiplied | Copied | Ordered]:
    """Every kind of result, number of tensors and form of scales."""
    for scales in gemm_block.SCALES:
        for d, accumulate in ((torch.bfloat16, False), (FP32, True), (torch.float16, False)):
            yield Multiplied(scales, d, accumulate)
    yield Copied()
    yield Ordered(MXFP8Quantizer())
    yield Ordered(NVFP4Quantizer())
