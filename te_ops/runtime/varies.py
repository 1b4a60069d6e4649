"""What makes so many plans: the parts in which their keys differ, in words."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

from te_ops.context import Key


def varies(keys: Sequence[Any], limit: int = 3) -> str:
    """Which parts differ among keys, in words: the path of names to the part, and some of its values."""
    found: list[str] = []

    def walk(items: list[Any], where: str) -> None:
        items = [i.value if isinstance(i, Key) else i for i in items]
        first = items[0]
        if all(i == first for i in items) or len(found) >= limit:
            return
        if _all(items, tuple) and first and first[0] == "float":
            items = [struct.unpack("<d", i[1])[0] if i[0] == "float" else i for i in items]
        elif _all(items, tuple) and all(len(i) == len(first) for i in items):
            label = (
                f"{where}.{first[0]}"
                if first and isinstance(first[0], str) and _all(items, tuple)
                else where
            )
            for k in range(len(first)):
                walk([i[k] for i in items], label.strip("."))
            return
        elif dataclasses.is_dataclass(first) and _all(items, type(first)):
            for f in dataclasses.fields(first):
                walk([getattr(i, f.name) for i in items], f"{where}.{f.name}")
            return
        shown = dict.fromkeys(getattr(i, "__qualname__", None) or repr(i)[:40] for i in items)
        found.append(f"{where} ({', '.join(list(shown)[:3])}, ...)")

    walk(list(keys), "")
    return "; ".join(found) or "nothing in the key"


def _all(items: Sequence[Any], kind: type) -> bool:
    return all(isinstance(i, kind) for i in items)
