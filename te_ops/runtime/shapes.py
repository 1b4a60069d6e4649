"""How much of the shapes of its inputs a plan depends on: what of them is in the key, found out by tracing twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from te_ops.attrs import DynamicAttribute
from te_ops.compiler.trace import leading_dims, trace
from te_ops.compiler.work import Note, Request
from te_ops.errors import Error, PlanError
from te_ops.graph import Spec


def alignment(rows: int) -> int:
    """The largest power of two up to 128 that divides the row count; 0 for none."""
    return min(rows & -rows, 128) if rows else 0


TRACED = (
    "a plan is made for a number of rows, and torch.jit.trace and dynamic shapes give none; "
    "torch.export.export(module, inputs, strict=False) with fixed shapes takes a forward"
)


def row_class(rows: int) -> tuple[int, int]:
    """(alignment, power-of-4 bucket): plans serve every row count of a class; zero rows are a class of their own.

    Raises:
        PlanError: the count is no number.
    """
    if not isinstance(rows, int):
        raise PlanError(TRACED)
    return (0, 0) if rows == 0 else (alignment(rows), (rows.bit_length() - 1) // 2)


def shape_key(specs: Sequence[Spec], level: str, features: int = 1) -> Any:
    """What of the leading dimensions is in the key.

    "rows": one class for the product, rank ignored (all inputs share their leading dimensions). "dims": a class for
    each dimension and which of them are equal. "exact": the shapes.
    """
    leads = leading_dims(specs, features)
    if level == "exact":
        return (level, tuple(leads))
    if level == "rows" and all(lead == leads[0] and lead for lead in leads):
        return (level, row_class(math.prod(leads[0])))
    order: dict[int, int] = {}
    return (
        level,
        tuple(
            tuple((order.setdefault(d, len(order)), row_class(d)) for d in lead) for lead in leads
        ),
    )


LEVELS = ("rows", "dims", "exact")


def level_of(request: Request, graph: Any) -> tuple[str, Note | None]:
    """What of the shapes this graph depends on, and why it is all of them."""
    reason = "an op fixed a leading dimension"
    structure = graph.structure()
    for level in LEVELS[:2]:
        other = _other_shapes(request.inputs, level, request.op.feature_dims)
        if other is None:
            continue
        try:
            again, _ = trace(replace(request, inputs=other))
        except DynamicAttribute as error:
            return "exact", Note("trace", "", "", str(error))
        except Error as error:
            reason = str(error)
            continue
        if again.structure() == structure:
            return level, None
        reason = _first_difference(graph, again)
    return "exact", Note("trace", "", "", f"keyed on the exact shape: {reason}")


def _first_difference(a: Any, b: Any) -> str:
    for x, y, node in zip(a.structure(), b.structure(), a.nodes, strict=False):
        if x != y:
            return f"{node.prim.name} ({node.path}) depends on it"
    return "the number of nodes depends on it"


def _other_shapes(specs: tuple[Spec, ...], level: str, features: int) -> tuple[Spec, ...] | None:
    """Inputs with other leading dimensions of the same classes, to trace again."""
    leads = leading_dims(specs, features)
    if level == "rows":
        if not leads or not all(lead == leads[0] and lead for lead in leads):
            return None
        rows = _other(math.prod(leads[0]), set())
        other = (3, rows) if len(leads[0]) == 1 else (rows,)  # another rank too
        return tuple(
            replace(s, shape=(*other, *s.shape[len(lead) :]))
            for s, lead in zip(specs, leads, strict=True)
        )
    table: dict[int, int] = {}
    taken: set[int] = set()
    for lead in leads:
        for d in lead:
            if d not in table:
                table[d] = _other(d, taken)
                taken.add(table[d])
    return tuple(
        replace(s, shape=(*(table[d] for d in lead), *s.shape[len(lead) :]))
        for s, lead in zip(specs, leads, strict=True)
    )


def _other(rows: int, taken: set[int]) -> int:
    """Another size with the same alignment, unlike those taken."""
    if rows == 0:
        return 0
    align = alignment(rows)
    made = rows + 2 * align
    while made in taken or alignment(made) != align:
        made += align
    return made
