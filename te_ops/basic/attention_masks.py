"""The mask keywords of Transformer Engine as a band, and which further inputs they ask for."""

from __future__ import annotations

import operator
from typing import Literal

from te_ops.basic.arguments import flag
from te_ops.basic.band import Band
from te_ops.errors import PlanError

MaskType = Literal[
    "no_mask",
    "causal",
    "causal_bottom_right",
    "padding",
    "padding_causal",
    "padding_causal_bottom_right",
    "arbitrary",
]
# mask type -> (right side, diagonal where bottom_right_diagonal is None), as Transformer Engine
_MASKS: dict[str, tuple[int | None, bool]] = {
    "no_mask": (None, True),
    "causal": (0, False),
    "causal_bottom_right": (0, True),
    "padding": (None, True),
    "padding_causal": (0, False),
    "padding_causal_bottom_right": (0, True),
    "arbitrary": (None, True),
}
_SPELLINGS = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}


def mask_name(attn_mask_type: str) -> str:
    """The one spelling of a mask type.

    Raises:
        PlanError: there is no such type.
    """
    known = isinstance(attn_mask_type, str)
    name = _SPELLINGS.get(attn_mask_type, attn_mask_type) if known else ""
    if name not in _MASKS:
        raise PlanError(
            f"attn_mask_type must be one of {', '.join(_MASKS)}, got {attn_mask_type!r}"
        )
    return name


def has_padding(attn_mask_type: str) -> bool:
    """Whether a mask type speaks of padding."""
    return mask_name(attn_mask_type).startswith("padding")


def band_of(
    attn_mask_type: str,
    window_size: tuple[int, int] | None = None,
    bottom_right_diagonal: bool | None = None,
) -> Band:
    """The band that Transformer Engine's mask keywords mean; -1 opens a side of the window.

    Raises:
        PlanError: a mask type is unknown, or keywords contradict each other.
    """
    name = mask_name(attn_mask_type)
    right, _ = _MASKS[name]
    left = None
    if window_size is not None:
        left, open_right = (_side(window_size, i) for i in (0, 1))
        if right is not None and open_right not in (None, 0):
            raise PlanError(
                f"window_size={window_size} sees keys after the query, which "
                f"attn_mask_type={attn_mask_type!r} hides; use ({window_size[0]}, 0)"
            )
        right = open_right if right is None else right
    bottom_right = is_bottom_right(name, bottom_right_diagonal)
    return Band(left, right, "bottom_right" if bottom_right else "top_left")


def is_bottom_right(attn_mask_type: str, bottom_right_diagonal: bool | None) -> bool:
    """Where the diagonal ends: for windows and ALiBi, too.

    Raises:
        PlanError: the keywords contradict each other.
    """
    name = mask_name(attn_mask_type)
    if bottom_right_diagonal is not None:
        flag("Attention", "bottom_right_diagonal", bottom_right_diagonal)
    if name.endswith("bottom_right") and bottom_right_diagonal is False:
        way_out = name.removesuffix("_bottom_right")
        raise PlanError(f"{name} contradicts bottom_right_diagonal=False; use {way_out!r}")
    return _MASKS[name][1] if bottom_right_diagonal is None else bottom_right_diagonal


def _side(window: tuple[int, int], i: int) -> int | None:
    fits = isinstance(window, tuple | list) and len(window) == 2
    if not fits or not all(_is_int(side) and side >= -1 for side in window):
        raise PlanError(
            f"window_size must be two ints, each -1 (open) or at least 0, got {window!r}"
        )
    return None if window[i] == -1 else operator.index(window[i])


def _is_int(value: object) -> bool:
    """Also of numpy."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


__all__ = ["MaskType", "band_of", "has_padding", "is_bottom_right", "mask_name"]
