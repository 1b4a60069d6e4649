"""Which specs `kernel.py` makes: no library is needed to know."""

from __future__ import annotations

from typing import Any

from te_ops.backends.flash.spec import FlashSpec

ARCH = "sm_90a"
FEATURES = 256
STEP = 32  # features of a gradient: the kernels before and after it pad to this, it to 16
TILE = 128  # rows of the largest block
STAYS = 128  # features of kernels whose blocks of threads stay
WIDE = 64  # features of FP32 sums are padded to this at most

# flash-attn picks tiles by the features of q and k: of wider values, one kernel in three asks for more shared memory
# than an H200 has (backward 64/128: 248,832 bytes of 232,448), or for more registers, and some compile all the same.
WIDER = "the kernels take no more features of v than of q and k"

TENSORS = {False: ("q", "k", "v", "o"), True: ("q", "k", "v", "o", "do", "dq", "dk", "dv")}
"""Whose strides a call names, forward and backward."""


def padded(rows: Any, sequences: Any = 1) -> Any:
    """Rows of the FP32 sums of a gradient, where every sequence begins on a block: a multiple of 128."""
    return (rows + (sequences + 2) * TILE - 1) // TILE * TILE


def wide(features: int) -> int:
    """Features of a head in them."""
    return -(-features // WIDE) * WIDE


def stays(spec: FlashSpec) -> bool:
    """Whether blocks of threads take one block of rows after the other, see `persistent`.

    For windows and packed tokens they save time, for others they only add the sink. o has a place beside q. Without a
    mask, three warpgroups of up to 96 features leave no room for it (239,616 bytes of 232,448), or spill registers.
    """
    wanted = spec.mask == "window" or spec.packed or spec.sink
    room = spec.features <= STAYS and (spec.mask != "full" or spec.features > 96)
    return not spec.backward and wanted and room


def refuse(spec: FlashSpec, arch: str = ARCH) -> str | None:
    """None if the spec can be compiled for this arch, else the rule that it breaks."""
    if arch != ARCH:
        return f"it is made for {ARCH}, not for {arch}"
    if spec.dtype not in ("bf16", "fp16"):
        return f"q, k and v are BF16 or FP16, not {spec.dtype}"
    for name, size in (("q and k", spec.features), ("v", spec.values)):
        if size % 8 or not 8 <= size <= FEATURES:
            return f"heads of {name} have {size} features; the kernel takes 8 to {FEATURES} that divide by 8"
    if spec.values > spec.features:
        return WIDER
    reason = _refuse_gradient(spec) if spec.backward else None
    if reason is not None:
        return reason
    if (spec.mask == "window") != (spec.left or spec.right):
        return "a window has a side, other masks have none"
    if spec.sink and not stays(spec):
        return (
            f"a sink is added forward, with up to {STAYS} features, without a mask with 97 or more"
        )
    if bool(spec.score) != bool(spec.function) or (
        spec.backward and spec.score and not spec.gradient
    ):
        return "a function of a score comes with its text, and backward with its gradient"
    return None


def _refuse_gradient(spec: FlashSpec) -> str | None:
    if spec.features % STEP or spec.values % STEP:
        return f"the features of a gradient divide by {STEP}, not {spec.features} and {spec.values}"
    if spec.group > 1 and spec.features != spec.values:
        return (
            "where query heads share keys, the gradient needs as many features of v as of q and k"
        )
    return None
