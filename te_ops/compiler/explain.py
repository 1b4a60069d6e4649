"""Views of a plan: text, plain data and a Mermaid flowchart. Only made when asked for; a plan keeps
what they need.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from te_ops.compiler.describe import (
    SHAPE_LEVELS,
    headline,
    inputs,
    marks,
    members,
    place,
    plain,
    refusals,
    remarks,
    saved_total,
    segment_title,
    size,
)
from te_ops.compiler.describe import counted as _counted
from te_ops.compiler.html import to_html
from te_ops.compiler.work import Note

if TYPE_CHECKING:
    from te_ops.compiler.plan import Plan, Saved, Segment, Step

WIDTH = 118
LABEL = 10  # width of the first column: forward, backward, saved, ...
KERNEL = 38  # longer kernel names push their line only
BLANK = "\N{NO-BREAK SPACE}"


# -- text


def to_text(plan: Plan) -> str:
    """The table that `explain()` returns, at most 118 columns wide unless a single name is longer.

    Steps are numbered in execution order and name the rule or primitive, the kernel, the members
    with the usages that a quantize writes, and the op's path. Then what is saved in which format,
    what was refused and why, and notes.
    """
    lines = [headline(plan), *_labelled("inputs", [", ".join(inputs(plan))])]
    level = plan.key.get("shapes")
    if level in SHAPE_LEVELS:
        lines += _labelled("shapes", [SHAPE_LEVELS[level]])
    columns = _columns(
        [s for segment in plan.segments for s in (*segment.forward_steps, *segment.backward_steps)]
    )
    for number, segment in enumerate(plan.segments):
        lines.append("")
        if len(plan.segments) > 1 or segment.module is not None:
            lines += _wrapped(segment_title(plan, number), "", "          ")
        lines += _steps("forward", segment.forward_steps, columns)
        lines += _steps("backward", segment.backward_steps, columns)
        lines += _saved(segment)
    if len(plan.segments) > 1:
        every = [s for segment in plan.segments for s in segment.saved_values]
        lines += ["", *_labelled("in all", [f"saved {saved_total(every)}"])]
    lines += _refused(plan.notes)
    lines += _labelled("notes", remarks(plan.notes), gap=True)
    return "\n".join(line.rstrip() for line in lines)


def _columns(steps: Sequence[Step]) -> tuple[int, int, int]:
    """Widths of number, step name and kernel, the same in every segment."""
    most = max((s for s in (len(steps), 9)), default=9)
    name = max((len(s.name) for s in steps), default=0)
    kernel = min(KERNEL, max((len(s.kernel) for s in steps), default=0))
    return len(str(most)), name, kernel


def _steps(label: str, steps: Sequence[Step], columns: tuple[int, int, int]) -> Iterator[str]:
    number, name, kernel = columns
    indent = " " * (LABEL + number + name + kernel + 5)
    for i, step in enumerate(steps):
        start = f"{label if i == 0 else '':<{LABEL}}{i + 1:>{number}} {step.name:<{name}}  "
        start += f"{step.kernel:<{kernel}}  "
        told = marks(step)
        whole = [_unbroken(m, WIDTH - len(indent)) for m in members(step)]
        text = " + ".join(whole) + place(step) + (f" ({', '.join(told)})" if told else "")
        yield from (line.replace(BLANK, " ") for line in _wrapped(text, start, indent))


def _unbroken(member: str, width: int) -> str:
    """The member with blanks at which lines do not break, if it fits a line."""
    return member.replace(" ", BLANK) if len(member) <= width else member


def _saved(segment: Segment) -> list[str]:
    saved = segment.saved_values
    if not segment.backward_steps and not saved:
        return []
    rows = [(s.value, s.format, _bytes(s)) for s in saved]
    value, form, count = (max((len(r[i]) for r in rows), default=0) for i in range(3))
    value = min(value, WIDTH - LABEL - form - count - 6)
    lines = []
    for name, *rest in rows:
        if len(name) > value:  # a line of its own
            lines.append(name)
            name = ""
        lines.append(f"{name:<{value}}  {rest[0]:<{form}}  {rest[1]:>{count}}")
    return _labelled("saved", [saved_total(saved), *(f"  {line}" for line in lines)], wrap=False)


def _bytes(saved: Saved) -> str:
    of = f" of {size(saved.reference_bytes)}" if saved.reference_bytes != saved.bytes else ""
    return f"{size(saved.bytes)}{of}"


def _refused(notes: Sequence[Note]) -> list[str]:
    """Grouped by reason: the reason with its number of places, then the places by rule."""
    texts: list[str] = []
    found = refusals(notes)
    rule_width = max((len(rule) for r in found for rule in r.places), default=0)
    for refusal in found:
        texts.append(f"{refusal.text} ({_counted(refusal.count, 'place')})")
        for rule, places in refusal.places.items():
            for i, at in enumerate(places):
                texts.append(f"  {rule if i == 0 else '':<{rule_width}}  {at}")
    return _labelled("refused", texts, gap=True)


def _labelled(
    label: str, texts: Sequence[str], *, gap: bool = False, wrap: bool = True
) -> list[str]:
    """Texts under a label of the first column."""
    lines = [""] if gap and texts else []
    for i, text in enumerate(texts):
        start = f"{label if i == 0 else '':<{LABEL}}"
        deeper = " " * (LABEL + 4 + len(text) - len(text.lstrip()))
        lines += _wrapped(text, start, deeper) if wrap else [start + text]
    return lines


def _wrapped(text: str, start: str, indent: str) -> list[str]:
    """Lines of at most WIDTH columns; words are never broken, and the text's own leading blanks
    stay.
    """
    lead = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.lstrip(),
        WIDTH,
        initial_indent=start + lead,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    ) or [start]


# -- data


def to_dict(plan: Plan) -> dict[str, Any]:
    """Plain JSON data: `{"segments": [{"forward", "backward", "saved"}...], "refused": [...],
    "key": {...}}`.

    A step is `{"name", "kernel", "nodes", "reads", "writes"}` with its `"phase"` and `"path"`, a
    saved value `{"value", "format", "bytes"}`. A segment also has its `"name"` and `"module"` (the
    path of a module that is not planned, or None). `"refused"` holds every `{"rule", "at",
    "kernel", "reason"}`, remarks of passes included.
    """
    return {
        "segments": [_segment_dict(segment) for segment in plan.segments],
        "refused": [
            {"rule": n.rule, "at": n.at, "kernel": n.kernel, "reason": n.reason}
            for n in dict.fromkeys(plan.notes)
        ],
        "key": plain(plan.key),
    }


def _segment_dict(segment: Segment) -> dict[str, Any]:
    return {
        "name": segment.name,
        "module": segment.module,
        "forward": [_step_dict(s) for s in segment.forward_steps],
        "backward": [_step_dict(s) for s in segment.backward_steps],
        "saved": [
            {"value": s.value, "format": s.format, "bytes": int(s.bytes)}
            for s in segment.saved_values
        ],
    }


def _step_dict(step: Step) -> dict[str, Any]:
    return {
        "name": step.name,
        "kernel": step.kernel,
        "nodes": list(step.nodes),
        "reads": list(step.reads),
        "writes": list(step.writes),
        "phase": step.phase,
        "path": step.path,
    }


# -- Mermaid


def to_mermaid(plan: Plan) -> str:
    """A Mermaid flowchart: a subgraph per phase of a segment, saved values as dashed edges with
    format and bytes.
    """
    lines = ["flowchart TB"]
    for number, segment in enumerate(plan.segments):
        if segment.module is not None:
            lines.append(f"  s{number}[{_quoted(f'module {segment.module}')}]")
            continue
        for phase, steps in (
            ("forward", segment.forward_steps),
            ("backward", segment.backward_steps),
        ):
            if steps:
                lines.append(
                    f"  subgraph s{number}{phase[0]}[{_quoted(f'{segment.name}: {phase}')}]"
                )
                lines += [
                    f"    {_node(number, phase, i)}[{_quoted(*_box(i, s))}]"
                    for i, s in enumerate(steps)
                ]
                lines.append("  end")
        lines += _edges(number, segment)
    lines += _between(plan)
    return "\n".join(lines) + "\n"


def _node(number: int, phase: str, index: int) -> str:
    return f"s{number}{phase[0]}{index + 1}"


def _box(index: int, step: Step) -> list[str]:
    told = marks(step)
    return [
        f"{index + 1} {step.name}" + (f" ({', '.join(told)})" if told else ""),
        step.kernel,
        " + ".join(members(step)) + place(step),
    ]


def _edges(number: int, segment: Segment) -> Iterator[str]:
    """Values from step to step; each pair of steps gets one edge in a phase."""
    made = {v: ("forward", i) for i, s in enumerate(segment.forward_steps) for v in s.writes}
    saved = {s.value: s for s in segment.saved_values}
    for phase, steps in (("forward", segment.forward_steps), ("backward", segment.backward_steps)):
        for i, step in enumerate(steps):
            for source in dict.fromkeys(
                made[v] for v in step.reads if v in made and made[v][0] == phase
            ):
                yield f"  {_node(number, *source)} --> {_node(number, phase, i)}"
            for value in step.reads:
                if value in made and made[value][0] != phase:
                    text = (
                        f"{value}: {saved[value].format}, {size(saved[value].bytes)}"
                        if value in saved
                        else value
                    )
                    ends = _node(number, *made[value]), _node(number, phase, i)
                    yield f"  {ends[0]} -. {_quoted(text)} .-> {ends[1]}"
            if phase == "backward":
                made.update(dict.fromkeys(step.writes, (phase, i)))


def _between(plan: Plan) -> Iterator[str]:
    """One edge for each pair of segments that a value connects."""
    makers = {slot: i for i, s in enumerate(plan.segments) for slot in s.exports}
    for number, segment in enumerate(plan.segments):
        for source in dict.fromkeys(makers[slot] for slot in segment.imports if slot in makers):
            yield f"  {_gate(plan, source, 'last')} ==> {_gate(plan, number, 'first')}"


def _gate(plan: Plan, number: int, which: str) -> str:
    """The Mermaid node that stands for a segment's entry or exit."""
    steps = plan.segments[number].forward_steps
    if plan.segments[number].module is not None or not steps:
        return f"s{number}"
    return _node(number, "forward", 0 if which == "first" else len(steps) - 1)


def _quoted(*lines: str) -> str:
    escaped = ("#quot;".join(line.replace("#", "#35;").split('"')) for line in lines)
    text = "<br/>".join(line.replace("<", "&lt;").replace(">", "&gt;") for line in escaped)
    return f'"{text}"'


__all__ = ["WIDTH", "to_dict", "to_html", "to_mermaid", "to_text"]
