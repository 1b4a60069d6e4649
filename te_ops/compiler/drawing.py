"""A segment as a picture: forward from the top down, backward from the bottom up, saved values in
between.

Each step is a row of its column, in execution order, so boxes cannot overlap. A value that the next
step reads is a straight arrow; any other takes a vertical lane beside the column, and lanes whose
spans meet are different ones.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from te_ops.compiler.describe import family, marks, members, place, size

if TYPE_CHECKING:
    from te_ops.compiler.plan import Saved, Segment, Step

CHAR = 7.4  # width of a character of the 12 px monospace font, rounded up
LINE = 16  # px from line to line
PAD = 9
GAP = 28  # between the rows of a column
LANE = 11  # between lanes
PORT = 11  # between edges that meet a box on one side
WRAP = 36  # characters in a line of a box
FAMILIES = ("reference", "cuda", "cublas", "cutlass", "cudnn")  # those with a colour of their own


@dataclass
class Box:
    """A step, a leaf or a saved value: lines of text in a rectangle that fits them."""

    lines: tuple[str, ...]
    kind: str  # CSS classes
    title: str
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0
    ports: dict[str, list[object]] = field(default_factory=lambda: {"left": [], "right": []})

    def measure(self) -> None:
        """Size from the text and the number of edges on the busier side."""
        self.width = max(len(line) for line in self.lines) * CHAR + 2 * PAD
        most = max(len(side) for side in self.ports.values())
        self.height = max(len(self.lines) * LINE + 2 * PAD - 4, (most + 1) * PORT)

    def port(self, side: str, end: object) -> float:
        """The y of an edge's end on one side."""
        ends = self.ports[side]
        return self.y + self.height * (ends.index(end) + 1) / (len(ends) + 1)

    @property
    def middle(self) -> float:
        """The y of the centre."""
        return self.y + self.height / 2


@dataclass
class Wire:
    """A value that leaves a box by a lane: from its maker to readers, all on one side of a column
    (or gutter).
    """

    value: str
    maker: Box
    out: str  # side of the maker
    readers: list[Box]
    into: str  # side of the readers
    kind: str
    lane: float = 0

    def span(self) -> tuple[float, float]:
        """Top and bottom of the vertical part."""
        ys = [self.maker.port(self.out, self), *(r.port(self.into, self) for r in self.readers)]
        return min(ys), max(ys)

    def attach(self) -> None:
        """Take a port at each end."""
        self.maker.ports[self.out].append(self)
        for reader in self.readers:
            reader.ports[self.into].append(self)


@dataclass
class Drawing:
    """Boxes, wires and arrows of one segment, placed."""

    boxes: list[Box]
    wires: list[Wire]
    arrows: list[tuple[Box, Box, str]]  # neighbours of a column, and the values between them
    width: float = 0
    height: float = 0


def draw(segment: Segment) -> Drawing:
    """Place the boxes of a segment and route what flows between them."""
    forward, makers = _column(segment.forward_steps, "input")
    backward, made = _column(segment.backward_steps, "grad")
    arrows: list[tuple[Box, Box, str]] = []
    left = _flows(forward, segment.forward_steps, makers, "left", arrows)
    right = _flows(backward, segment.backward_steps, made, "right", arrows)
    kept = [s for s in segment.saved_values if s.value in makers]
    pills = {s.value: _pill(s) for s in kept}
    stored = [
        Wire(s.value, makers[s.value], "right", [pills[s.value]], "left", "kept") for s in kept
    ]
    readers = _readers(segment.backward_steps, backward)
    loaded = [
        Wire(s.value, pills[s.value], "right", readers.get(s.value, []), "left", "kept")
        for s in kept
    ]
    groups = (left, stored, loaded, right)
    for wire in (w for group in groups for w in group):
        wire.attach()
    for box in (*forward, *backward, *pills.values()):
        box.measure()
    height = _rows(forward, backward)
    height = max(height, _pills(loaded, makers, height))
    for box in (*forward, *backward):
        for side in box.ports.values():
            side.sort(key=lambda end: _other_end(end, box))
    width = _across(forward, list(pills.values()), backward, groups)
    wires = [w for group in groups for w in group if w.readers]
    return Drawing([*forward, *pills.values(), *backward], wires, arrows, width, height)


def _column(steps: Sequence[Step], leaf: str) -> tuple[list[Box], dict[str, Box]]:
    """The boxes of a phase in execution order, leaves (inputs or output gradients) first; and who
    makes what.
    """
    written = {v for s in steps for v in s.writes}
    leaves = dict.fromkeys(
        v
        for s in steps
        for v in s.reads
        if v not in written and v.startswith(leaf) and "." not in v
    )
    boxes = [Box((v,), "leaf", v) for v in sorted(leaves)]
    makers = {b.lines[0]: b for b in boxes}
    for number, step in enumerate(steps):
        box = _step(number + 1, step)
        boxes.append(box)
        makers.update(dict.fromkeys(step.writes, box))
    return boxes, makers


def _step(number: int, step: Step) -> Box:
    told = marks(step)
    body = " + ".join(members(step))
    lines = [
        f"{number} {step.name}",
        step.kernel,
        *(textwrap.wrap(body, WRAP) if body != step.name else []),
    ]
    if step.path or told:
        lines += textwrap.wrap(
            ", ".join([*([place(step).strip()] if step.path else []), *told]), WRAP
        )
    title = "\n".join(
        [
            f"{step.name} by {step.kernel}{place(step)}",
            *(f"- {node}" for node in step.nodes),
            "reads " + ", ".join(step.reads),
            "writes " + ", ".join(step.writes),
            *told,
        ]
    )
    known = family(step.kernel) if family(step.kernel) in FAMILIES else "other"
    again = " again" if step.phase == "recompute" else ""
    return Box(tuple(lines), f"step {known}{again}", title)


def _pill(saved: Saved) -> Box:
    of = (
        f" of {size(saved.reference_bytes)} unquantized"
        if saved.bytes != saved.reference_bytes
        else ""
    )
    lines = (saved.value, *textwrap.wrap(saved.format, WRAP), size(saved.bytes))
    return Box(lines, "saved", f"saved: {saved.value}\n{saved.format}, {size(saved.bytes)}{of}")


def _readers(steps: Sequence[Step], column: Sequence[Box]) -> dict[str, list[Box]]:
    """Readers of each value, except those that read it made anew in the same phase."""
    boxes = column[len(column) - len(steps) :]
    readers: dict[str, list[Box]] = {}
    fresh: set[str] = set()
    for step, box in zip(steps, boxes, strict=True):
        for value in dict.fromkeys(step.reads):
            if value not in fresh:
                readers.setdefault(value, []).append(box)
        fresh.update(step.writes)
    return readers


def _flows(
    column: Sequence[Box],
    steps: Sequence[Step],
    makers: dict[str, Box],
    side: str,
    arrows: list[tuple[Box, Box, str]],
) -> list[Wire]:
    """Wires for values that skip rows; neighbours get one arrow."""
    row = {id(b): i for i, b in enumerate(column)}
    boxes = column[len(column) - len(steps) :]
    wires: dict[str, Wire] = {}
    for step, box in zip(steps, boxes, strict=True):
        near: list[str] = []
        for value in dict.fromkeys(v for v in step.reads if v in makers):
            maker = makers[value]
            if row[id(box)] - row[id(maker)] == 1:
                near.append(value)
            elif maker is not box:
                wires.setdefault(value, Wire(value, maker, side, [], side, "flow")).readers.append(
                    box
                )
        if near:
            arrows.append((column[row[id(box)] - 1], box, ", ".join(near)))
    return list(wires.values())


# -- placement


def _rows(forward: Sequence[Box], backward: Sequence[Box]) -> float:
    """Stack both columns to the same height: forward downwards, backward upwards."""
    needs = [sum(b.height + GAP for b in column) for column in (forward, backward)]
    height = max(needs) + GAP
    for column, need in zip((forward, backward[::-1]), needs, strict=True):
        gap = GAP + (max(needs) - need) / max(len(column), 1)
        y = GAP + (gap - GAP) / 2
        for box in column:
            box.y = y
            y += box.height + gap
    return height


def _pills(loaded: Iterable[Wire], makers: dict[str, Box], height: float) -> float:
    """Saved values between maker and readers, moved apart where they would overlap; returns the
    height needed.
    """

    def wish(wire: Wire) -> float:
        ends = [makers[wire.value], *wire.readers]
        return (ends[0].middle + sum(b.middle for b in ends[1:]) / max(len(ends) - 1, 1)) / (
            2 if ends[1:] else 1
        )

    ordered = sorted(loaded, key=wish)
    y = float(GAP)
    for wire in ordered:
        wire.maker.y = max(y, wish(wire) - wire.maker.height / 2)
        y = wire.maker.y + wire.maker.height + PORT
    limit = max(height, sum(w.maker.height + PORT for w in ordered) + 2 * GAP) - GAP
    for wire in reversed(ordered):  # what ran over the end moves up again
        wire.maker.y = min(wire.maker.y, limit - wire.maker.height)
        limit = wire.maker.y - PORT
    return max((w.maker.y + w.maker.height + GAP for w in ordered), default=0.0)


def _other_end(end: object, box: Box) -> float:
    """Where an edge at this box goes, so that its ports come in that order and lines cross less."""
    assert isinstance(end, Wire)
    others = end.readers if end.maker is box else [end.maker]
    return sum(b.middle for b in others) / max(len(others), 1)


def _across(
    forward: Sequence[Box],
    pills: Sequence[Box],
    backward: Sequence[Box],
    groups: Sequence[Sequence[Wire]],
) -> float:
    """Columns and gutters from left to right; returns the width."""
    left, stored, loaded, right = (_lanes(group) for group in groups)
    widths = [max((b.width for b in column), default=0.0) for column in (forward, pills, backward)]
    x = PAD + LANE * (left + 1.0)
    for wire in groups[0]:
        wire.lane = x - LANE * (wire.lane + 1)
    for column, width, gutter, wires in (
        (forward, widths[0], stored, groups[1]),
        (pills, widths[1], loaded, groups[2]),
        (backward, widths[2], right, groups[3]),
    ):
        if not column:
            continue
        for box in column:
            box.x, box.width = x, width
        x += width
        for wire in wires:
            wire.lane = x + LANE * (wire.lane + 1)
        x += LANE * (gutter + 1) + (LANE if column is not backward else 0)
    return x + PAD


def _lanes(wires: Sequence[Wire]) -> int:
    """Give each wire a lane number such that spans in one lane are apart; returns the number of
    lanes.
    """
    lanes: list[list[tuple[float, float]]] = []
    for wire in sorted(wires, key=lambda w: w.span()[1] - w.span()[0]):
        top, bottom = wire.span()
        free = (
            number
            for number, spans in enumerate(lanes)
            if all(bottom + 4 < t or b + 4 < top for t, b in spans)
        )
        number = next(free, len(lanes))
        if number == len(lanes):
            lanes.append([])
        lanes[number].append((top, bottom))
        wire.lane = number
    return len(lanes)


# -- SVG


def svg(drawing: Drawing) -> str:
    """The drawing as an SVG element; colours are CSS classes, details are in `<title>` elements."""
    width, height = round(drawing.width), round(drawing.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">'
    ]
    parts += [_arrow(*arrow) for arrow in drawing.arrows]
    parts += [_wire(wire) for wire in drawing.wires]
    parts += [_box(box) for box in drawing.boxes]
    return "\n".join([*parts, "</svg>"])


def _arrow(a: Box, b: Box, values: str) -> str:
    x = a.x + min(a.width, b.width) / 2
    down = a.y < b.y
    start, end = (a.y + a.height, b.y) if down else (a.y, b.y + b.height)
    tip = f"M{x:.1f} {end:.1f}l-4 {-7 if down else 7}h8z"
    line = f'<path d="M{x:.1f} {start:.1f}V{end:.1f}"/><path class="tip" d="{tip}"/>'
    return f'<g class="flow"><title>{escape(values)}</title>{line}</g>'


def _wire(wire: Wire) -> str:
    start = wire.maker.x + (wire.maker.width if wire.out == "right" else 0)
    paths = []
    for reader in wire.readers:
        end = reader.x + (reader.width if wire.into == "right" else 0)
        y = reader.port(wire.into, wire)
        back = 7 if wire.into == "right" else -7
        out = wire.maker.port(wire.out, wire)
        paths.append(
            f'<path d="M{start:.1f} {out:.1f}H{wire.lane:.1f}V{y:.1f}H{end:.1f}"/>'
            f'<path class="tip" d="M{end:.1f} {y:.1f}l{back} -4v8z"/>'
        )
    return f'<g class="{wire.kind}"><title>{escape(wire.value)}</title>{"".join(paths)}</g>'


def _box(box: Box) -> str:
    top = box.y + (box.height - len(box.lines) * LINE) / 2 + 12
    texts = "".join(
        f'<text{first} x="{box.x + PAD:.1f}" y="{top + LINE * i:.1f}">{escape(line)}</text>'
        for i, line in enumerate(box.lines)
        for first in (' class="first"' if i == 0 else "",)
    )
    area = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
    title = f"<title>{escape(box.title)}</title>"
    return f'<g class="{box.kind}">{title}<rect {area} rx="5"/>{texts}</g>'


__all__ = ["FAMILIES", "Box", "Drawing", "Wire", "draw", "svg"]
