"""One pass over tiles of a source: per-tensor FP8 copies, values, amaxes and sums over rows.

A source may have several outputs; a `Part` says what becomes of some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.reduce import slices_kernel
from te_ops.backends.cuda.source import CTYPES, Source, flag, plain
from te_ops.backends.cuda.wanted import FORMATS, THREADS, Results, Run, Wanted, scale_rule
from te_ops.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
    Record,
    Usage,
)

PER_TENSOR = (Float8Quantizer, Float8CurrentScalingQuantizer)
TILE_COLS = 128
SLOTS = 7
"""Of a `te::Target`."""
MAX_OUTS = 4
"""Outputs of a source: more need more registers and shared memory than a block has."""


@dataclass(frozen=True)
class Part:
    """What becomes of `outs` adjacent outputs of a source.

    Attributes:
        quantizer: None if they are not quantized.
        known: the amax that current scaling starts from comes with the call.
    """

    quantizer: Quantizer | None
    wanted: Wanted
    outs: int = 1
    known: bool = False

    @property
    def codes(self) -> bool:
        """Whether FP8 codes are made."""
        return self.quantizer is not None and (self.wanted.row or self.wanted.col)

    @property
    def waits(self) -> bool:
        """Whether the scale is known only when all values are."""
        return (
            self.codes
            and isinstance(self.quantizer, Float8CurrentScalingQuantizer)
            and not self.known
        )


Lead = tuple[int, ...] | None
RunParts = Callable[
    [Sequence[int], Lead, torch.device, Sequence[torch.Tensor | None]], list[Results]
]
"""run(slots of the source, leading dimensions, device, a scale or known amax a part) -> Results a part. The leading
dimensions of a tensor without dimensions are None."""


def lead_of(shape: Sequence[int]) -> Lead:
    """The leading dimensions of a shape, as `RunParts` takes them."""
    return tuple(shape[:-1]) if len(shape) else None


# -- the text of a pass


@dataclass(frozen=True)
class Target:
    """One `te::Target` of the text."""

    part: Part
    row: bool
    col: bool
    amax: bool
    dense: torch.dtype | None
    rounds: torch.dtype  # FP32: nothing is rounded

    def define(self, number: int) -> str:
        """The type `T<number>`, with its rule."""
        part, wanted = self.part, self.part.wanted
        codes = self.row or self.col
        fp8 = FORMATS[part.quantizer.dtype] if codes else "te::e4m3"  # type: ignore[union-attr]
        flags = (self.row, self.col, self.amax, self.dense is not None, wanted.sums is not None)
        rule = (
            scale_rule(part.quantizer, wanted.rounds or torch.float32, f"R{number}")
            if codes
            else ""
        )
        listed = ", ".join(flag(f) for f in flags)
        return (
            f"{rule}typedef te::Target<{fp8}, {CTYPES[self.rounds]}, {f'R{number}' if codes else 'void'}, "
            f"{part.outs}, {listed}> T{number};\n"
        )


def target_of(part: Part, source: Source) -> Target:
    """What the first pass does for a part; one that waits gets its values written, to be quantized after."""
    wanted = part.wanted
    dense, codes = wanted.dense, part.codes and not part.waits
    if part.waits and source.computes:
        dense = wanted.rounds or torch.float32
    rounds = wanted.rounds if source.computes or dense is not None else None  # it is as it was read
    return Target(
        part,
        codes and wanted.row,
        codes and wanted.col,
        part.waits or wanted.amax,
        dense,
        rounds or torch.float32,
    )


def whole(aligned: bool) -> str:
    """How chunks of rows lie, as the text says it."""
    return "te::WHOLE" if aligned else "te::ANYWHERE"


@dataclass(frozen=True)
class Shape:
    """How a pass is cut; the values are those that were measured best on sm_90.

    Attributes:
        groups: of sixteen rows, in a tile of 128 columns.
        blocks: of a multiprocessor that registers are kept for.
        loaded: bytes of operands that a thread loads at once.
        ahead: whether the next rows are loaded before these are computed.
        band: tiles are numbered in bands of so many rows of tiles, inside a band column by column: blocks that run at
            the same time then touch the fewest pages of the tensor and of its transposed copy together.
        passing: whether so much is written that nobody will find it in L2, which it then leaves before what is read.
    """

    groups: int
    blocks: int
    loaded: int
    ahead: bool = False
    band: int = 1
    passing: bool = False

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 16 * self.groups

    def template(self, aligned: bool) -> str:
        """The arguments of the pass's template."""
        return f"{whole(aligned)}, {self.groups}, {self.loaded}, {flag(self.ahead)}, {self.band}"

    def count(self, rows: int, width: int) -> int:
        """Tiles of a pass; also where there are no rows, which writes the scale, and sums that are 0."""
        return max(-(-rows // self.rows), 1) * max(-(-width // TILE_COLS), 1)


PASSING = 96 << 20
"""Bytes: twice the L2 of an H200. Below, who reads the results next finds some of them there."""
BAND = 4
"""Rows of tiles of a band where there is a transposed copy: 2 to 3 % faster than 1 or 16 at 8192 x 14336."""


def shape_of(source: Source, targets: Sequence[Target], arch: str) -> Shape:
    """How a pass is cut, so that no register spills: without conversion instructions they are scarcer, and where values
    are written beside two outputs, these are made of many operands, or elements are read one by one.
    """
    outs = source.outs
    summed = any(t.part.wanted.sums is not None for t in targets)
    band = BAND if any(t.col for t in targets) else 1
    if int(arch.removeprefix("sm_")) < 89:
        return Shape(8 if outs == 1 else 4, 2, 96 if source.computes else 64, band=band)
    if not source.computes:
        return Shape(8, 2, 128, band=band, passing=_written(source, targets) > PASSING)
    if outs > 1:
        many = source.in_bytes > 8 or any(t.dense is not None for t in targets)
        return Shape(4, 2 if not source.aligned else 3 if many else 4, 96, band=band)
    loaded = 32 if source.in_bytes > 2 and not summed else 64
    return Shape(8, 4 if source.aligned else 3, loaded, band=band)


def _written(source: Source, targets: Sequence[Target]) -> int:
    """Bytes of copies and values, as far as the rows are known."""
    each = (t.row + t.col + (t.dense.itemsize if t.dense is not None else 0) for t in targets)
    return source.rows * source.width * sum(each)


def tile_kernel(
    source: Source, targets: Sequence[Target], cut: Shape, arch: str, *, reverse: bool = False
) -> launch.Function:
    """The pass over tiles. `reverse`: from the end, where what was read last may still be in L2."""
    types = "".join(target.define(k) for k, target in enumerate(targets))
    members = " ".join(f"T{k} t{k};" for k in range(len(targets)))
    head = ("#define TE_OPS_PASSING\n" if cut.passing else "") + (
        f"#include <kernels/quantize.cuh>\n{source.head}{types}"
        f"struct Parameters {{ {source.ctype} source; {members} te::i64 rows, width; }};\n"
    )
    index = "te::blocks() - 1 - te::block()" if reverse else "te::block()"
    passed = ", ".join(f"p.t{k}" for k in range(len(targets)))
    body = (
        f"te::tiles<{cut.template(source.aligned)}>(p.source, p.rows, p.width, {index}, {passed});"
    )
    text = launch.text_of(name="quantize", head=head, body=body, threads=THREADS, blocks=cut.blocks)
    return launch.build("quantize", text, arch, THREADS, source.count + SLOTS * len(targets) + 2)


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


# -- what a part writes


@dataclass(frozen=True)
class Memory:
    """What one launch writes for a part."""

    amax: torch.Tensor
    scale_inv: torch.Tensor
    dense: torch.Tensor | None
    row: torch.Tensor | None
    col: torch.Tensor | None
    partial: torch.Tensor | None

    def slots(self, scale: torch.Tensor | None) -> tuple[int, ...]:
        """The slots of a `te::Target`."""
        return (
            _address(scale), self.amax.data_ptr(), self.scale_inv.data_ptr(),
            _address(self.dense), _address(self.row), _address(self.col), _address(self.partial),
        )  # fmt: skip


def cleared(words: int, device: torch.device, clear: bool) -> torch.Tensor:
    """FP32 numbers, zero where `clear`."""
    numbers = launch.empty((words,), torch.float32, device)
    if clear:
        launch.zero_word(numbers, words)
    return numbers


def allocate_all(
    target: Target, shapes: Sequence[tuple[int, ...]], device: torch.device
) -> list[Memory]:
    """Memory for what a target without sums writes for tensors of these shapes; amaxes are cleared in one launch."""
    numbers = cleared(8 * len(shapes), device, target.amax)
    return [_memory(target, shape, numbers[8 * k :], 1) for k, shape in enumerate(shapes)]


def allocate(
    target: Target, shape: tuple[int, ...], device: torch.device, tiles_down: int
) -> Memory:
    """Memory for what a target writes, its amax cleared."""
    numbers = cleared(8, device, target.amax)
    return _memory(target, shape, numbers, tiles_down)


def _memory(
    target: Target, shape: tuple[int, ...], numbers: torch.Tensor, tiles_down: int
) -> Memory:
    """`numbers`: first the amax, fifth the inverse scale (cuBLASLt wants it on 16 bytes)."""
    total, device = shape[-1] if shape else 1, numbers.device
    summed = target.part.wanted.sums is not None
    fp8 = getattr(target.part.quantizer, "dtype", torch.float8_e4m3fn)
    turned = (*shape[-1:], *shape[:-1])
    return Memory(
        numbers[0],
        numbers[4],
        launch.empty(shape, target.dense, device) if target.dense is not None else None,
        launch.empty(shape, fp8, device) if target.row else None,
        launch.empty(turned, fp8, device) if target.col else None,
        launch.empty((tiles_down, total), torch.float32, device) if summed else None,
    )


def results(
    part: Part, memory: Memory, shape: tuple[int, ...], sums: torch.Tensor | None = None
) -> Results:
    """The records of what was written."""
    quantizer, kept = part.quantizer, part.wanted.source_dtype
    row, col = (
        None
        if data is None or quantizer is None
        else Record(data, memory.scale_inv, None, quantizer, usage, shape, kept)
        for data, usage in ((memory.row, Usage.ROW), (memory.col, Usage.COL))
    )
    dense = memory.dense if part.wanted.dense is not None else None
    return Results(row, col, memory.amax, dense, sums)


def parts_kernel(source: Source, parts: Sequence[Part], arch: str) -> RunParts:
    """All parts of a source in one pass; those that wait for their amax get a second one each."""
    targets = [target_of(part, source) for part in parts]
    cut = shape_of(source, targets, arch)
    kernel = tile_kernel(source, targets, cut, arch) if _does_anything(targets) else None
    later = [_second_pass(source, part, arch) if part.waits else None for part in parts]
    totals = [
        None if part.wanted.sums is None else slices_kernel(part.wanted.sums, arch)
        for part in parts
    ]
    width = source.width

    def run(
        slots: Sequence[int],
        lead: Lead,
        device: torch.device,
        scales: Sequence[torch.Tensor | None],
    ) -> list[Results]:
        rows = math.prod(lead or ())
        down = max(-(-rows // cut.rows), 1)
        shapes = [() if lead is None else (*lead, part.outs * width) for part in parts]
        made = [allocate(t, s, device, down) for t, s in zip(targets, shapes, strict=True)]
        if kernel is not None:
            used = [x for m, s in zip(made, scales, strict=True) for x in m.slots(s)]
            kernel(device, cut.count(rows, width), *slots, *used, rows, width)
        found = []
        for part, memory, shape, second, total in zip(
            parts, made, shapes, later, totals, strict=True
        ):
            sums = _total(total, memory, part, device) if total is not None else None
            if second is None:
                found.append(results(part, memory, shape, sums))
            else:
                given = (
                    slots if memory.dense is None else (memory.dense.data_ptr(), part.outs * width)
                )
                made_of = second(given, shape, device, memory.amax)
                dense = memory.dense if part.wanted.dense is not None else None
                found.append(Results(made_of.row, made_of.col, memory.amax, dense, sums))
        return found

    return run


def _does_anything(targets: Sequence[Target]) -> bool:
    return any(
        t.row or t.col or t.amax or t.dense is not None or t.part.wanted.sums is not None
        for t in targets
    )


def _total(
    kernel: launch.Function, memory: Memory, part: Part, device: torch.device
) -> torch.Tensor:
    """Sums of the tiles' sums."""
    assert memory.partial is not None
    assert part.wanted.sums is not None
    slices, total = memory.partial.shape
    y = launch.empty((total,), part.wanted.sums, device)
    if total:
        kernel(device, -(-total // 64), memory.partial.data_ptr(), y.data_ptr(), total, slices)
    return y


def _second_pass(source: Source, part: Part, arch: str) -> Callable[..., Results]:
    """Quantize what a first pass wrote (or read), with the amax that it found."""
    wanted = part.wanted
    dtype = wanted.rounds or torch.float32
    values = plain(dtype, part.outs * source.width) if source.computes else source
    asked = Wanted(wanted.row, wanted.col, False, None, dtype, wanted.source_dtype)
    again = Part(part.quantizer, asked, known=True)
    target = target_of(again, values)
    cut = shape_of(values, (target,), arch)
    kernel = tile_kernel(values, (target,), cut, arch, reverse=True)

    def run(
        slots: Sequence[int],
        shape: tuple[int, ...],
        device: torch.device,
        amax: torch.Tensor,
    ) -> Results:
        memory = allocate(target, shape, device, 1)
        rows, width = math.prod(shape[:-1]), values.width
        kernel(device, cut.count(rows, width), *slots, *memory.slots(amax), rows, width)
        return results(part, memory, shape)

    return run


def per_tensor(
    source: Source, quantizer: Quantizer, wanted: Wanted, arch: str, *, known: bool = False
) -> Run:
    """One quantizer for all outputs of a source."""
    part = Part(quantizer, wanted, source.outs, known)
    alone = not source.computes and wanted.dense is None and wanted.sums is None
    if alone and (part.waits or not part.codes):
        return _after_amax(source, part, arch)
    run_parts = parts_kernel(source, (part,), arch)
    return lambda slots, shape, device, scale: run_parts(slots, lead_of(shape), device, (scale,))[0]


def _after_amax(source: Source, part: Part, arch: str) -> Run:
    """The amax of a tensor in a pass of its own, which needs no tiles; then, if they are wanted, the codes."""
    find = amax_kernel(part.wanted.rounds or torch.float32, arch)
    second = _second_pass(source, part, arch) if part.waits else None

    def run(
        slots: Sequence[int],
        shape: tuple[int, ...],
        device: torch.device,
        _: torch.Tensor | None,
    ) -> Results:
        amax = launch.empty((), torch.float32, device)
        launch.zero_word(amax)
        find(device, slots[0], math.prod(shape), amax)
        if second is None:
            return Results(None, None, amax, None)
        made = second(slots, shape, device, amax)
        return Results(made.row, made.col, amax, None)

    return run


Amax = Callable[[torch.device, int, int, torch.Tensor], None]
UNROLL = 4
AMAX_BLOCK = THREADS * UNROLL * 8
"""Elements that a block looks at at once."""


def amax_kernel(dtype: torch.dtype, arch: str) -> Amax:
    """amax(device, pointer, count, out): out, zero before, becomes max |x|."""
    head = (
        "#include <kernels/quantize.cuh>\n"
        f"struct Parameters {{ const {CTYPES[dtype]}* x; te::u32* out; te::i64 count; }};\n"
    )
    body = (
        f"te::amax<{CTYPES[dtype]}, {THREADS}, {UNROLL}>"
        "(p.x, p.out, p.count, te::block(), te::blocks());"
    )
    text = launch.text_of(name="amax", head=head, body=body, threads=THREADS)
    function = launch.build("amax", text, arch, THREADS, 3)

    def run(device: torch.device, pointer: int, count: int, out: torch.Tensor) -> None:
        if count:
            function(device, min(-(-count // AMAX_BLOCK), 2048), pointer, out.data_ptr(), count)

    return run
