"""A plan as one self-contained HTML page: the graph as SVG, what is saved, what was refused, and
the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from te_ops.compiler.describe import (
    SHAPE_LEVELS,
    family,
    headline,
    inputs,
    options,
    refusals,
    remarks,
    saved_total,
    segment_title,
    size,
)
from te_ops.compiler.drawing import FAMILIES, draw, svg

if TYPE_CHECKING:
    from te_ops.compiler.plan import Plan, Segment

STYLE = """
:root {
  color-scheme: light dark; --page: #ffffff; --text: #1c2430; --dim: #5b6675; --line: #8a94a3;
  --rule: #d9dee5; --kept: #b3541e; --saved: #fff1e6; --leaf: #f3f5f8; --reference: #e9edf3;
  --cuda: #dff3dc; --cublas: #dcebfb; --cutlass: #ece3fb; --cudnn: #fbf3cf; --other: #fbe3ea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181f; --text: #e4e8ee; --dim: #9aa5b4; --line: #77828f; --rule: #333c49;
    --kept: #f0955a; --saved: #3a2819; --leaf: #202733; --reference: #2a323e; --cuda: #1f3d24;
    --cublas: #1d3450; --cutlass: #35294f; --cudnn: #423a17; --other: #4a2431;
  }
}
body {
  margin: 2em auto; max-width: 1240px; padding: 0 1.5em; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.4em; margin-bottom: 0; }
h2 { font-size: 1.1em; margin-top: 2em; }
p, .legend { color: var(--dim); margin: .3em 0; }
.graph { overflow-x: auto; }
.legend span { display: inline-block; margin-right: 1.2em; }
.legend i {
  display: inline-block; width: 1em; height: 1em; margin-right: .4em; vertical-align: -.15em;
  border: 1px solid var(--line); border-radius: 3px;
}
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td {
  text-align: left; vertical-align: top; padding: .3em .8em .3em 0;
  border-bottom: 1px solid var(--rule); overflow-wrap: anywhere;
}
td.number, th.number { text-align: right; white-space: nowrap; }
td.name { white-space: nowrap; }
code, svg text { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
svg text { font-size: 12px; fill: var(--text); }
svg .first { font-weight: bold; }
svg rect { stroke: var(--line); fill: var(--other); }
svg .leaf rect { fill: var(--leaf); rx: 12px; }
svg .saved rect { fill: var(--saved); stroke: var(--kept); }
svg .again rect { stroke-dasharray: 5 3; }
svg path { fill: none; stroke: var(--line); stroke-width: 1.3; }
svg .kept path { stroke: var(--kept); }
svg path.tip { fill: var(--line); stroke: none; }
svg .kept path.tip { fill: var(--kept); }
svg g.flow:hover path, svg g.kept:hover path { stroke: var(--text); stroke-width: 2.5; }
svg g.step:hover rect, svg g.saved:hover rect { stroke: var(--text); stroke-width: 2; }
"""


def to_html(plan: Plan) -> str:
    """A page that needs nothing from the network; follows the reader's light or dark theme.

    Forward steps run down on the left, backward steps up on the right, and what is saved is
    between them with its format and bytes. Hovering shows what a step reads and writes.
    """
    title = escape(headline(plan))
    style = STYLE + "\n".join(f"svg .{name} rect {{ fill: var(--{name}); }}" for name in FAMILIES)
    level = SHAPE_LEVELS.get(str(plan.key.get("shapes")), "")
    body = [
        f"<h1>{title}</h1>",
        f"<p>inputs {escape(', '.join(inputs(plan)))}{'; ' if level else ''}{escape(level)}</p>",
        _legend(plan),
        *(_segment(plan, number) for number in range(len(plan.segments))),
        _refused(plan),
        _notes(plan),
        _key(plan),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def _legend(plan: Plan) -> str:
    steps = [
        s for segment in plan.segments for s in (*segment.forward_steps, *segment.backward_steps)
    ]
    found = dict.fromkeys(family(s.kernel) for s in steps)
    items = [(name, f"var(--{name if name in FAMILIES else 'other'})", "") for name in found]
    if any(s.phase == "recompute" for s in steps):
        items.append(("recomputed", "transparent", "border-style: dashed"))
    if any(segment.saved_values for segment in plan.segments):
        items.append(("saved for backward", "var(--saved)", "border-color: var(--kept)"))
    spans = (
        f'<span><i style="background: {colour}; {more}"></i>{escape(name)}</span>'
        for name, colour, more in items
    )
    return f'<div class="legend">{"".join(spans)}</div>'


def _segment(plan: Plan, number: int) -> str:
    segment = plan.segments[number]
    titled = len(plan.segments) > 1 or segment.module is not None
    heading = f"<h2>{escape(segment_title(plan, number))}</h2>" if titled else ""
    if segment.module is not None:
        return (
            f"{heading}<p>a module that is not te_ops': nothing in it is planned or quantized</p>"
        )
    text = "forward runs down" + (", backward runs up" if segment.backward_steps else "")
    picture = svg(draw(segment))
    return f'{heading}<p>{text}</p><div class="graph">{picture}</div>{_saved(segment)}'


def _saved(segment: Segment) -> str:
    if not segment.saved_values:
        return ""
    rows = [
        (
            f"<code>{escape(s.value)}</code>",
            escape(s.format),
            size(s.bytes),
            size(s.reference_bytes),
        )
        for s in segment.saved_values
    ]
    heads = ("value", "format", "bytes", "unquantized")
    total = escape(saved_total(segment.saved_values))
    return f"<h2>Saved for backward: {total}</h2>" + _table(heads, rows, numbers=(2, 3))


def _refused(plan: Plan) -> str:
    rows = [
        (
            escape(refusal.kernel or "-"),
            escape(refusal.reason),
            escape(rule),
            f"<code>{escape(at)}</code>",
        )
        for refusal in refusals(plan.notes)
        for rule, places in refusal.places.items()
        for at in places
    ]
    if not rows:
        return ""
    return "<h2>Refused</h2>" + _table(("kernel", "reason", "rule", "at"), rows)


def _notes(plan: Plan) -> str:
    found = "".join(f"<li>{escape(text)}</li>" for text in remarks(plan.notes))
    return f"<h2>Notes</h2><ul>{found}</ul>" if found else ""


def _key(plan: Plan) -> str:
    rows = [
        (escape(name), f"<code>{escape(options(value))}</code>") for name, value in plan.key.items()
    ]
    return "<h2>Key</h2>" + _table(("part", "value"), rows) if rows else ""


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: tuple[int, ...] = ()
) -> str:
    """A table of cells that are HTML already; columns in `numbers` are aligned right."""

    def line(cells: Sequence[str], tag: str) -> str:
        classes = (
            'class="number"' if i in numbers else ('class="name"' if not i else "")
            for i in range(len(cells))
        )
        made = (f"<{tag} {c}>{cell}</{tag}>" for cell, c in zip(cells, classes, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    return f"<table>{line(heads, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


__all__ = ["to_html"]
