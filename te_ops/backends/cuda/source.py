"""The device text of what a kernel reads: C++ types, and the `Source` of a pointwise function."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from te_ops.backends.cuda.launch import ready
from te_ops.graph import Spec
from te_ops.pointwise import Fn, lower, prelude, symbol
from te_ops.pointwise.expr import Expr

CTYPES = {torch.float32: "float", torch.bfloat16: "te::bf16", torch.float16: "te::f16"}
BYTE_CTYPES = {torch.uint8: "te::u8", torch.bool: "te::u8"}


def flag(value: bool) -> str:
    """A C++ truth value."""
    return "true" if value else "false"


def literal(value: float) -> str:
    """The FP32 value of a number as an exact C++ literal."""
    return f"{float(torch.tensor(value, dtype=torch.float32)).hex()}f"


Slots = Callable[[Sequence[torch.Tensor]], list[int]]


@dataclass(frozen=True)
class Source:
    """What a kernel computes its values from.

    Attributes:
        head: text that comes before the kernel.
        ctype: the C++ type with `load_cols`, `load` and `eval`.
        outs: 1, or 2 for a gated pair.
        width: columns of one output (of one half of a pair).
        count: 8-byte slots.
        slots: the slots' values from the tensors that the source reads, in order.
        aligned: whether every row is made of whole chunks of eight columns.
        flat: whether the tensors may be seen as one row, whose last chunk may be cut.
        scattered: whether eight columns of a pair are not contiguous.
        in_bytes: bytes read an element.
        computes: False for a tensor as it is.
        rows: how many are expected, 0 if that is not known; any number is right.
    """

    head: str
    ctype: str
    outs: int
    width: int
    count: int
    slots: Slots
    aligned: bool
    flat: bool = False
    scattered: bool = False
    block: int = 0
    in_bytes: int = 2
    computes: bool = True
    rows: int = 0


INCLUDE = "#include <kernels/sources.cuh>\n"


def plain(dtype: torch.dtype, width: int) -> Source:
    """A tensor as it is."""
    ctype = f"te::Plain<{CTYPES[dtype]}>"
    return Source(
        INCLUDE,
        ctype,
        1,
        width,
        2,
        lambda xs: [xs[0].data_ptr(), width],
        width % 8 == 0,
        True,
        in_bytes=dtype.itemsize,
        computes=False,
    )


def refuse_pointwise(
    fn: Fn,
    specs: Sequence[Spec],
    broadcast: Sequence[str],
    interleave: int | None,
    dtype: torch.dtype,
) -> str | None:
    """Why a function's text is not compiled for these operands, or None."""
    if dtype not in CTYPES:
        return f"output dtype {dtype}; FP32, BF16 and FP16 are written"
    for i, (spec, kind, used) in enumerate(zip(specs, broadcast, fn.used, strict=True)):
        known = spec.dtype in CTYPES or (spec.dtype in BYTE_CTYPES and kind in ("full", "row"))
        if used and not known:
            return f"input {i} is {spec.dtype}; FP32, BF16, FP16 and whole bytes are read"
    if interleave is not None and interleave < 1:
        return f"interleave {interleave}"
    return None


def pointwise_source(
    fn: Fn,
    specs: Sequence[Spec],
    broadcast: Sequence[str],
    interleave: int | None,
    *,
    fast: bool,
) -> Source:
    """The `Source` of a function. `fast`: approximate exp, tanh and sigmoid, for results that are
    rounded to BF16 or FP8."""
    return joined_source(
        (Placed(fn, tuple(range(len(specs)))),), specs, broadcast, interleave, fast=fast
    )


@dataclass(frozen=True)
class Placed:
    """A function, and where each of its inputs stands among the operands of a source."""

    fn: Fn
    places: tuple[int, ...]

    def operand(self, leaf: Expr) -> tuple[int, str]:
        """The operand and the part of it that a leaf of the function is."""
        index, part = leaf.payload
        return self.places[index], part


def joined_source(
    functions: Sequence[Placed],
    specs: Sequence[Spec],
    broadcast: Sequence[str],
    interleave: int | None,
    *,
    fast: bool,
) -> Source:
    """The `Source` of several functions over the same operands, whose outputs come one after the other.

    All of them have the same width; an operand is read once, whatever reads it.
    """
    kinds = {
        place: kind for f in functions for place, kind in zip(f.places, f.fn.inputs, strict=True)
    }
    full = next(i for i, kind in enumerate(broadcast) if kind == "full")
    last = int(specs[full].shape[-1]) if specs[full].shape else 1
    width = last // 2 if kinds[full] == "pair" else last
    paired = "pair" in kinds.values() or any(len(f.fn.out) == 2 for f in functions)
    block = interleave or width
    text = _Struct(functions, kinds, specs, broadcast)
    used = text.used
    lowered = dict.fromkeys(lower(f.fn, "cuda") for f in functions)
    head = INCLUDE + prelude("cuda", fast=fast) + "".join(lowered) + text.define()
    return Source(
        head=head,
        ctype="PointwiseSource",
        outs=text.outs,
        width=width,
        count=len(used) + sum(broadcast[i] == "scalar" for i in used) + 2,
        slots=_slots(used, broadcast, width, block),
        aligned=width % 8 == 0 and block % 8 == 0,
        flat=not paired and all(kind in ("full", "scalar") for kind in broadcast),
        scattered=paired and block != width and block % 8 != 0,
        block=block,
        in_bytes=sum(
            specs[i].dtype.itemsize * (1 + (kinds[i] == "pair"))
            for i in used
            if broadcast[i] == "full"
        ),
    )


def _slots(used: Sequence[int], broadcast: Sequence[str], width: int, block: int) -> Slots:
    kinds = [(i, broadcast[i] == "scalar") for i in used]

    def slots(xs: Sequence[torch.Tensor]) -> list[int]:
        made: list[int] = []
        for i, scalar in kinds:
            x = xs[i]
            if not scalar:
                made.append(x.data_ptr())
            elif x.is_cuda:
                made += (x.data_ptr(), 0)
            else:  # a run-time number lives on the host
                made += (0, _bits(float(x)))
        return [*made, width, block]

    return slots


def prepare(xs: Sequence[torch.Tensor], broadcast: Sequence[str]) -> list[torch.Tensor]:
    """Operands as the kernels read them; a scalar stays where it is."""
    return [x if kind == "scalar" else ready(x) for x, kind in zip(xs, broadcast, strict=True)]


def _bits(value: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


class _Struct:
    """Writes the C++ struct of the operands of functions."""

    def __init__(
        self,
        functions: Sequence[Placed],
        inputs: Mapping[int, str],
        specs: Sequence[Spec],
        broadcast: Sequence[str],
    ) -> None:
        self.functions = functions
        self.inputs = inputs
        self.kinds = broadcast
        leaves = {f.operand(leaf) for f in functions for leaf in f.fn.leaves}
        self.leaves = sorted(leaves)
        self.used = sorted({index for index, _ in leaves})
        self.ctypes = {i: {**CTYPES, **BYTE_CTYPES}[specs[i].dtype] for i in self.used}
        self.outs = sum(len(f.fn.out) for f in functions)

    def define(self) -> str:
        pointers = "".join(self._pointer(i) for i in self.used)
        regs = "".join(self._held(leaf) for leaf in self.leaves if self._by_row(leaf))
        cols = "".join(self._held(leaf) for leaf in self.leaves if not self._by_row(leaf))
        load_cols = "".join(self._load(leaf) for leaf in self.leaves if not self._by_row(leaf))
        load = "".join(self._load(leaf) for leaf in self.leaves if self._by_row(leaf))
        outs = self.outs
        return (
            f"struct PointwiseSource {{\n  static constexpr int outs = {outs};\n"
            f"  static constexpr bool computes = true;\n{pointers}"
            "  te::PairLayout at;\n"
            f"  struct Cols {{\n{cols}  }};\n  struct Regs {{\n{regs}  }};\n"
            "  template <int ALIGNED>\n"
            "  TE_DEVICE void load_cols(Cols& c, te::i64 col, int valid) const {\n"
            f"{load_cols}  }}\n"
            "  template <int ALIGNED, int SCATTERED>\n"
            "  TE_DEVICE void load(Regs& r, te::i64 row, te::i64 col, int valid) const {\n"
            f"{load}  }}\n"
            f"  TE_DEVICE void eval(const Cols& c, const Regs& r, float (&y)[{outs}][8]) const {{\n"
            f"{self._eval()}  }}\n}};\n"
        )

    def _by_row(self, leaf: tuple[int, str]) -> bool:
        return self.kinds[leaf[0]] in ("full", "col")

    def _pointer(self, i: int) -> str:
        value = f"  te::u64 v{i};\n" if self.kinds[i] == "scalar" else ""
        return f"  const {self.ctypes[i]}* x{i};\n{value}"

    def _name(self, leaf: tuple[int, str]) -> str:
        index, part = leaf
        return f"x{index}" if part == "value" else f"x{index}_{part}"

    def _held(self, leaf: tuple[int, str]) -> str:
        index = leaf[0]
        whole = self.kinds[index] in ("full", "row")
        return (
            f"    {f'te::Chunk<{self.ctypes[index]}>' if whole else 'float'} {self._name(leaf)};\n"
        )

    def _load(self, leaf: tuple[int, str]) -> str:
        index, part = leaf
        name, kind, ctype = self._name(leaf), self.kinds[index], self.ctypes[index]
        if kind == "scalar":
            given = f"te::float_of((te::u32)v{index})"
            return f"    c.{name} = x{index} ? te::widen(*x{index}) : {given};\n"
        if kind == "col":
            return f"    r.{name} = valid > 0 ? te::widen(x{index}[row]) : 0.0f;\n"
        holder, row = ("r", "row") if kind == "full" else ("c", "0")
        if part == "value":
            offset = "row * at.width + col" if kind == "full" else "col"
            return f"    te::load<{ctype}, ALIGNED>(x{index} + {offset}, valid, {holder}.{name});\n"
        scattered = "SCATTERED" if kind == "full" else "true"
        half = int(part == "linear")
        return (
            f"    te::load_half<{ctype}, ALIGNED, {scattered}>"
            f"(x{index}, at, {row}, col, {half}, valid, {holder}.{name});\n"
        )

    def _eval(self) -> str:
        lines = []
        for leaf in self.leaves:
            if self.kinds[leaf[0]] in ("full", "row"):
                holder, name = "r" if self._by_row(leaf) else "c", self._name(leaf)
                ctype = self.ctypes[leaf[0]]
                lines.append(
                    f"    float {name}[8];\n    te::unpack<{ctype}>({holder}.{name}, {name});\n"
                )
        calls, first = [], 0
        for placed in self.functions:
            outs = [f"y[{first + k}][i]" for k in range(len(placed.fn.out))]
            first += len(outs)
            calls.append(f"{symbol(placed.fn)}({', '.join([*self._arguments(placed), *outs])});")
        loop = " ".join(calls)
        return "".join(lines) + f"#pragma unroll\n    for (int i = 0; i < 8; ++i) {{ {loop} }}\n"

    def _arguments(self, placed: Placed) -> list[str]:
        """What a function is called with, for column i."""
        arguments = []
        for place, kind in zip(placed.places, placed.fn.inputs, strict=True):
            for part in ("value",) if kind == "value" else ("gate", "linear"):
                leaf = (place, part)
                if leaf not in self.leaves:  # not read
                    arguments.append("0.0f")
                elif self.kinds[place] in ("full", "row"):
                    arguments.append(f"{self._name(leaf)}[i]")
                else:
                    arguments.append(f"{'r' if self._by_row(leaf) else 'c'}.{self._name(leaf)}")
        return arguments
