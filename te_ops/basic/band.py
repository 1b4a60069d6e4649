"""The structural mask of attention: a band of keys that each query row sees, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from te_ops.errors import PlanError

Diagonal = Literal["top_left", "bottom_right"]
_DIAGONALS = ("top_left", "bottom_right")


@dataclass(frozen=True)
class Band:
    """Row i sees the keys j with ``i + shift - left <= j <= i + shift + right``, both inclusive.

    `shift` is 0 for the top-left diagonal and s_kv - s_q for the bottom-right one; a side that is
    None is open. Causal is ``Band(right=0)``, a window of the last W keys ``Band(W - 1, 0)``.

    Raises:
        PlanError: a side is negative, or the diagonal is unknown.
    """

    left: int | None = None
    right: int | None = None
    diagonal: Diagonal = "top_left"

    def __post_init__(self) -> None:
        for name, side in (("left", self.left), ("right", self.right)):
            if side is not None and (isinstance(side, bool) or side < 0):
                raise PlanError(f"Band: {name} must be None (open) or at least 0, got {side!r}")
        if self.diagonal not in _DIAGONALS:
            raise PlanError(f"Band: diagonal must be one of {_DIAGONALS}, got {self.diagonal!r}")

    def normalized(self, s_q: int | None, s_kv: int | None, *, equal: bool = False) -> Band:
        """The one spelling of this mask: sides that hide nothing are open, and the diagonal is
        top-left where it makes no difference.

        Args:
            s_q: number of queries, None if it may change.
            s_kv: number of keys, None if it may change.
            equal: s_q and s_kv are the same number, known or not.
        """
        # The side that binds the last row reaches furthest; each needs one of the lengths only.
        far_left, far_right = (s_q, s_kv) if self.diagonal == "top_left" else (s_kv, s_q)
        left, right = _drop(self.left, far_left), _drop(self.right, far_right)
        same = equal or (s_q is not None and s_q == s_kv) or (left is None and right is None)
        return Band(left, right, "top_left" if same else self.diagonal)

    def shift(self, s_q: int, s_kv: int) -> int:
        """The key on the diagonal of row 0."""
        return 0 if self.diagonal == "top_left" else s_kv - s_q

    def rows(self, s_q: int, s_kv: int) -> tuple[int, int]:
        """The range of rows that see a key; rows outside are empty."""
        shift = self.shift(s_q, s_kv)
        first = 0 if self.right is None else max(0, -shift - self.right)
        last = s_q if self.left is None else min(s_q, s_kv - shift + self.left)
        return (first, max(first, last)) if s_kv > 0 else (0, 0)

    def keys(self, rows: tuple[int, int], s_q: int, s_kv: int) -> tuple[int, int]:
        """The range of keys that some row of a range of rows sees."""
        shift = self.shift(s_q, s_kv)
        low = 0 if self.left is None else max(0, rows[0] + shift - self.left)
        high = s_kv if self.right is None else min(s_kv, rows[1] - 1 + shift + self.right + 1)
        return low, max(low, high)

    def bias(
        self,
        rows: tuple[int, int],
        keys: tuple[int, int],
        offset: int,
        like: torch.Tensor,
    ) -> torch.Tensor | None:
        """What to add to the scores [rows, keys] of a tile: 0, or -inf where hidden.

        None if nothing is hidden. `offset` is `shift(s_q, s_kv)` of the whole; dtype and device
        are those of `like`.
        """
        cuts_left = self.left is not None and rows[1] - 1 + offset - self.left > keys[0]
        cuts_right = self.right is not None and rows[0] + offset + self.right < keys[1] - 1
        if not (cuts_left or cuts_right):
            return None
        shape = (rows[1] - rows[0], keys[1] - keys[0])
        hidden = torch.full(shape, -math.inf, dtype=like.dtype, device=like.device)
        start = rows[0] + offset - keys[0]  # of the diagonal, in the tile
        after = (
            hidden.triu(start + self.right + 1) if cuts_right and self.right is not None else None
        )
        if not cuts_left or self.left is None:
            return after
        before = hidden.tril(start - self.left - 1)
        return before if after is None else before.add_(after)


def _drop(side: int | None, length: int | None) -> int | None:
    return None if side is None or (length is not None and side >= length - 1) else side


__all__ = ["Band", "Diagonal"]
