"""Compiles and loads the kernel of a `FlashSpec`.

Importing this module costs nothing: flash-attn and the CuTe DSL are imported by the functions that compile or load. A
process that compiles has to be started for its arch (`CUTE_DSL_ARCH`), since the DSL reads it at import; it needs no
GPU, and no flash-attn loads what it made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from te_ops.backends.flash.limits import refuse
from te_ops.backends.flash.spec import FlashSpec
from te_ops.errors import PlanError

ENTRY = "te_ops_flash"


def compile_to(spec: FlashSpec, arch: str, path: Path) -> None:
    """Writes the kernel as an object file that `load` takes.

    Args:
        spec: which `limits.refuse` accepts.
        arch: "sm_90a", the one that this process was started for.
        path: of the file, in a folder that exists. It is written in place: give a temporary name and rename it.

    Raises:
        PlanError: the spec is refused.
    """
    reason = refuse(spec, arch)
    if reason is not None:
        raise PlanError(f"attention kernel: {reason}")
    from te_ops.backends.flash import kernel

    kernel.build(spec).export_to_c(object_file_path=str(path), function_name=ENTRY)


def load(path: Path, spec: FlashSpec) -> Callable[..., None]:
    """The kernel in an object file, as a function for the current device, of numbers alone.

    Forward it is `run(q, k, v, o, lse, sink, captured, <places>, sizes, strides, scale, left, right, stream)`, backward
    `run(q, k, v, o, do, lse, dq, dk, dv, rows, sums, captured, <places>, ...)` with the same end. These are addresses:

        q, k, v, o, do and gradients: on 16 bytes, tensors [batch, rows, heads, features], packed [rows, heads,
            features], whose features lie together.
        lse: FP32 [batch, heads, rows], packed [heads, rows]. -inf is written for rows without a key.
        sink: FP32 [heads], None without. captured: FP32 [values that the modifier captures, heads], None without.
        rows: FP32 memory for the sums of `limits.padded` rows of all heads: of dq `limits.wide` features, and two more.
        sums: FP32 zeros for dk and dv in the same way, where query heads share keys, else None.
        <places>: q_starts and kv_starts, int32 [sequences + 1], q_lens and kv_lens, int32 [sequences]; None unless
            packed.

    And these are not:

        sizes: batch or sequences, rows of q and of k, heads of q and of k, features of q and of v, and multiprocessors
            of the device, of which kernels whose blocks of threads stay take one each.
        strides: of each of `limits.TENSORS`, from a batch entry, a row and a head to the next: multiples of 8 elements.
        scale, left, right: a number; the sides of a window, None without.
        stream: a handle.
    """
    import cutlass.cute as cute

    entry: Any = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[ENTRY]
    return entry  # type: ignore[no-any-return]
