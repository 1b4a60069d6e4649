"""Tensor maps: how a bulk copy of sm_90 finds the boxes of a matrix in global memory.

A map is 128 bytes that the driver writes; a launch passes it by value. For other memory only its address changes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from te_ops.backends.cuda.launch import error_text
from te_ops.errors import PlanError

BYTES = 128
ALIGNMENT = 64
"""Bytes: of a map in host memory and among the parameters of a kernel."""
ROW = 128
"""Bytes of a row of a box, which the copy swizzles over as many."""
_UINT8, _SWIZZLE_128, _PROMOTE_256, _ZEROS = 0, 3, 3, 0
_NOT_INTERLEAVED = 0


def encode(
    into: int, address: int, extents: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> None:
    """Write the map of a matrix of bytes at `into`.

    Args:
        into: host address, a multiple of `ALIGNMENT`.
        address: of the matrix, a multiple of 16.
        extents: innermost first; the copy fills what lies beyond with zeros.
        strides: bytes of every extent but the first, multiples of 16.
        box: of one copy, `ROW` bytes in the first extent.

    Raises:
        PlanError: the driver refuses it.
    """
    rank = len(extents)
    many, few = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    code = _driver().cuTensorMapEncodeTiled(
        into,
        _UINT8,
        rank,
        address,
        many(*extents),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        few(*box),
        few(*([1] * rank)),
        _NOT_INTERLEAVED,
        _SWIZZLE_128,
        _PROMOTE_256,
        _ZEROS,
    )
    if code:
        raise PlanError(
            f"a tensor map of {tuple(extents)} bytes, strides {tuple(strides)}, box {tuple(box)}: "
            f"the driver answers {error_text(code)}"
        )


def check(code: int) -> None:
    """Raise for what a mover answers.

    Raises:
        PlanError: the driver refuses the address.
    """
    if code:
        raise PlanError(f"a tensor map takes no such address: {error_text(code)}")


def mover(into: int) -> Callable[[int], int]:
    """A call that gives the map at this host address another matrix of the same extents and strides."""
    return functools.partial(_driver().cuTensorMapReplaceAddress, into)


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.cuTensorMapEncodeTiled.argtypes = [
        pointer, number, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer,
        number, number, number, number,
    ]  # fmt: skip
    library.cuTensorMapReplaceAddress.argtypes = [pointer, pointer]
    return library
