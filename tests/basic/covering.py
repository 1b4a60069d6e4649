"""A pairwise covering array: few rows in which every pair of values of two factors occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any


def pairs_of(factors: Mapping[str, Sequence[Any]]) -> set[Any]:
    """Every pair of values (by index) of two factors."""
    return {
        ((a, i), (b, j))
        for a, b in combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }


def covering(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Rows that cover every pair which occurs in an allowed row; greedy and deterministic.

    `allowed` also gets partial rows, and says whether they can still become one.
    """
    names = list(factors)
    left = pairs_of(factors)
    rows: list[dict[str, Any]] = []
    while left:
        first, second = min(
            left, key=lambda p: (names.index(p[0][0]), p[0][1], names.index(p[1][0]), p[1][1])
        )
        made = _row(factors, names, dict((first, second)), left, allowed)
        if made is None:
            left.discard((first, second))  # no allowed row has it
            continue
        left -= set(combinations(((n, made[n]) for n in names), 2))
        rows.append({name: factors[name][i] for name, i in made.items()})
    return rows


def _row(
    factors: Mapping[str, Sequence[Any]],
    names: list[str],
    fixed: dict[str, int],
    left: set[Any],
    allowed: Callable[[dict[str, Any]], bool],
) -> dict[str, int] | None:
    """A row with the fixed values: for each other factor the value that covers most, backtracking."""

    def values(chosen: dict[str, int]) -> dict[str, Any]:
        return {name: factors[name][i] for name, i in chosen.items()}

    def gain(chosen: dict[str, int], name: str, i: int) -> int:
        return sum(
            (((a, v), (name, i)) if names.index(a) < names.index(name) else ((name, i), (a, v)))
            in left
            for a, v in chosen.items()
        )

    def extend(chosen: dict[str, int]) -> dict[str, int] | None:
        if not allowed(values(chosen)):
            return None
        rest = [name for name in names if name not in chosen]
        if not rest:
            return chosen
        name = rest[0]
        order = sorted(
            range(len(factors[name])),
            key=lambda i: (-gain(chosen, name, i), (i + len(left)) % len(factors[name])),
        )
        for i in order:
            made = extend({**chosen, name: i})
            if made is not None:
                return made
        return None

    return extend(dict(fixed))
