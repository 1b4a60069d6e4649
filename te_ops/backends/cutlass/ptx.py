"""Instructions that the CuTe DSL has no good spelling for: byte permutes without side effects, matrix stores to shared
memory, predicated stores, pairs of FP8 conversions, a maximum that keeps a NaN.

Shared memory is addressed by 32-bit integers, global memory by 64-bit ones. A predicate is an `Int32`, true if not 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm as _llvm

KINDS: dict[Any, str] = {Float32: "f", Int32: "r", Int64: "l"}
llvm: Any = _llvm  # its dialect is written at run time


def _asm(
    text: str, operands: Sequence[Any], results: Sequence[Any] = (), *, effects: bool = False
) -> list[Any]:
    """`text` with its results as $0.. and its operands after them."""
    constraints = [f"={KINDS[kind]}" for kind in results] + [
        KINDS[type(value)] for value in operands
    ]
    types = [kind.mlir_type for kind in results]
    result = llvm.inline_asm(
        None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types),
        [value.ir_value() for value in operands],
        text,
        ",".join(constraints),
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(types) < 2:
        return [kind(result) for kind in results]
    return [kind(llvm.extractvalue(kind.mlir_type, result, [i])) for i, kind in enumerate(results)]


def permute(a: Any, b: Any, selector: int) -> Any:
    """Four bytes of {b, a}: `prmt.b32`."""
    return _asm(f"prmt.b32 $0, $1, $2, {selector:#x};", [a, b], [Int32])[0]


def larger(a: Any, b: Any) -> Any:
    """max(|a|, |b|) in FP32; NaN if one of them is."""
    text = "{.reg .f32 s, t; abs.f32 s, $1; abs.f32 t, $2; max.NaN.f32 $0, s, t;}"
    return _asm(text, [a, b], [Float32])[0]


def bits(value: Any) -> Any:
    """The 32 bits of an FP32 value."""
    return _asm("mov.b32 $0, $1;", [value], [Int32])[0]


def choose(condition: Any, value: int) -> Any:
    """`value` where the condition holds, else 0."""
    return _asm(
        f"{{.reg .pred p; setp.ne.b32 p, $1, 0; selp.b32 $0, {value}, 0, p;}}",
        [Int32(condition)],
        [Int32],
    )[0]


def select(condition: Any, a: Any, b: Any) -> Any:
    """The word a where the condition holds, else b."""
    text = "{.reg .pred p; setp.ne.b32 p, $1, 0; selp.b32 $0, $2, $3, p;}"
    return _asm(text, [Int32(condition), a, b], [Int32])[0]


def thread_index() -> Any:
    """%tid.x, read where this stands: what is made of it is not kept in registers from earlier on."""
    return _asm("mov.u32 $0, %tid.x;", [], [Int32], effects=True)[0]


def after(address: Any, word: Any) -> Any:
    """The address, which is known only when this word is; the word is not negative."""
    text = "{.reg .b32 sign; shr.u32 sign, $2, 31; add.s32 $0, $1, sign;}"
    return _asm(text, [address, word], [Int32])[0]


def masked(value: Any, mask: Any) -> Any:
    """An FP32 value whose bits are cut to those of the mask."""
    text = "{.reg .b32 t; mov.b32 t, $1; and.b32 t, t, $2; mov.b32 $0, t;}"
    return _asm(text, [value, mask], [Float32])[0]


def reciprocal(value: Any) -> Any:
    """1 / value, correctly rounded."""
    return _asm("div.rn.f32 $0, 0f3F800000, $1;", [value], [Float32])[0]


def four_codes(values: Sequence[Any], kind: str) -> Any:
    """Four FP32 values as FP8 codes ("e4m3" or "e5m2"), the first in the lowest byte.

    What is too large becomes the largest finite code, Inf too; NaN stays NaN.
    """
    convert = f"cvt.rn.satfinite.{kind}x2.f32"
    text = f"{{.reg .b16 s, t; {convert} s, $2, $1; {convert} t, $4, $3; mov.b32 $0, {{s, t}};}}"
    return _asm(text, list(values), [Int32])[0]


def store_matrices(address: Any, words: Sequence[Any], *, transposed: bool) -> None:
    """`stmatrix` of 8x8 matrices of 16-bit elements, one word of each a lane."""
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    layout = ".trans" if transposed else ""
    text = f"stmatrix.sync.aligned.m8n8.x{len(words)}{layout}.shared.b16 [$0], {{{names}}};"
    _asm(text, [address, *words], effects=True)


def load_shared(address: Any) -> list[Any]:
    """Four words of shared memory, from a multiple of 16."""
    return _asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [address], [Int32] * 4, effects=True)


def load_floats(address: Any) -> list[Any]:
    """Four FP32 values of shared memory, from a multiple of 16."""
    text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    return _asm(text, [address], [Float32] * 4, effects=True)


def store_shared(address: Any, values: Sequence[Any]) -> None:
    """Four FP32 values to shared memory, at a multiple of 16."""
    _asm("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", [address, *values], effects=True)


def store_global(predicate: Any, address: Any, words: Sequence[Any]) -> None:
    """One, two or four words to global memory, where the predicate holds."""
    names = ", ".join(f"${i + 2}" for i in range(len(words)))
    data = f".v{len(words)}.b32 [$1], {{{names}}}" if len(words) > 1 else ".b32 [$1], $2"
    _asm(
        f"{{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.global{data};}}",
        [Int32(predicate), address, *words],
        effects=True,
    )


def store_float(predicate: Any, address: Any, value: Any) -> None:
    """An FP32 value to global memory, where the predicate holds."""
    _asm(
        "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.f32 [$1], $2;}",
        [Int32(predicate), address, value],
        effects=True,
    )


def store_byte(predicate: Any, address: Any, word: Any, index: int) -> None:
    """One byte of a word to global memory, where the predicate holds."""
    text = f"{{.reg .pred p; .reg .b32 b; setp.ne.b32 p, $0, 0; shr.b32 b, $2, {8 * index}; @p st.global.b8 [$1], b;}}"
    _asm(text, [Int32(predicate), address, word], effects=True)


def raise_to(predicate: Any, address: Any, word: Any) -> None:
    """Atomic maximum of a signed word in global memory, where the predicate holds."""
    _asm(
        "{.reg .pred p; setp.ne.b32 p, $0, 0; @p red.global.max.s32 [$1], $2;}",
        [Int32(predicate), address, word],
        effects=True,
    )
