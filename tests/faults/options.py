"""Keywords of constructors, and whether two things that were observed differ (K31)."""

from __future__ import annotations

import inspect
from typing import Any


def keywords(kind: type) -> list[str]:
    """The constructor's keywords, without *args and **kwargs."""
    return [
        n
        for n, p in inspect.signature(kind).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def differs(a: Any, b: Any) -> bool:
    return a != b and repr(a) != repr(b)  # NaN is not itself
