"""What every view of a plan says in the same words: sizes, marks of a step, refusals grouped, the
plan's key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_ops.compiler.passes import SLOTS
from te_ops.compiler.work import Note
from te_ops.context import FROZEN

if TYPE_CHECKING:
    from te_ops.compiler.plan import Plan, Saved, Segment, Step

SHAPE_LEVELS = {
    "rows": "serves every row count of the same class, whatever the leading dimensions",
    "dims": "serves leading dimensions of the same classes",
    "exact": "serves exactly these shapes",
}


def size(count: int) -> str:
    """A number of bytes: `64 B`, `2.1 KiB`, `0.47 GiB`.

    >>> size(64), size(2112), size(505_000_000)
    ('64 B', '2.1 KiB', '481.6 MiB')
    """
    if count < 1024:
        return f"{count} B"
    amount, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def saved_total(saved: Sequence[Saved]) -> str:
    """`4 tensors, 0.47 GiB (0.53x of unquantized)`."""
    kept, dense = sum(s.bytes for s in saved), sum(s.reference_bytes for s in saved)
    ratio = f" ({kept / dense:.2f}x of unquantized)" if dense else ""
    return f"{counted(len(saved), 'tensor')}, {size(kept)}{ratio}"


def marks(step: Step) -> tuple[str, ...]:
    """What a reader should know of a step beside its members: recomputed, wgrad, emulated, view; in a scope, cached."""
    told = (
        ("recomputed", step.phase == "recompute"),
        ("wgrad", step.phase == "wgrad"),
        ("emulated", step.emulated),
        ("view", step.view),
        ("cached", step.shared and FROZEN.get() is not None),
    )
    return tuple(word for word, holds in told if holds)


def members(step: Step) -> tuple[str, ...]:
    """The step's members; a lone quantize also says of what."""
    if len(step.nodes) == 1 and step.name in ("quantize", "amax") and step.reads:
        return (f"{step.nodes[0]} of {step.reads[0]}",)
    return step.nodes


def family(kernel: str) -> str:
    """The backend of a kernel: the first part of its name."""
    return kernel.partition(".")[0]


def place(step: Step) -> str:
    """` at 0.1`, or nothing for the root op."""
    return f" at {step.path}" if step.path else ""


@dataclass(frozen=True)
class Refusal:
    """One reason of one kernel (or of the matcher, kernel ""), and where: rule -> matches."""

    kernel: str
    reason: str
    places: dict[str, list[str]]

    @property
    def count(self) -> int:
        """Number of different places."""
        return sum(len(found) for found in self.places.values())

    @property
    def text(self) -> str:
        """The kernel and its reason."""
        return f"{self.kernel}: {self.reason}" if self.kernel else self.reason


def is_remark(note: Note) -> bool:
    """Whether a pass says what it did, rather than a kernel or the matcher why it refused."""
    return not note.kernel and note.rule in SLOTS


def refusals(notes: Iterable[Note]) -> list[Refusal]:
    """Refused matches by kernel and reason, in order of appearance, each place once."""
    found: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for note in notes:
        if not is_remark(note):
            places = found.setdefault((note.kernel, note.reason), {})
            places.setdefault(note.rule, {})[note.at] = None
    return [
        Refusal(kernel, reason, {rule: list(at) for rule, at in places.items()})
        for (kernel, reason), places in found.items()
    ]


def remarks(notes: Iterable[Note]) -> list[str]:
    """What passes say, each once: second roundings, why a plan is keyed on the exact shape,
    alignment copies.
    """
    texts = (f"{n.reason} (at {n.at})" if n.at else n.reason for n in notes if is_remark(n))
    return list(dict.fromkeys(texts))


def headline(plan: Plan) -> str:
    """The plan in one line: op, device, mode, recipe, precision."""
    key = plan.key
    recipe = key.get("recipe")
    name = recipe.get("recipe", "custom recipe") if isinstance(recipe, dict) else recipe
    parts = [
        f"{plan.title} on {key.get('arch', 'unknown')}",
        "forward and backward" if any(s.backward_steps for s in plan.segments) else "forward only",
        f"{name}" if name else "unquantized",
    ]
    if key.get("calibrating"):
        parts.append("calibrating")
    if key.get("autocast_dtype"):
        parts.append(f"autocast {key['autocast_dtype']}")
    return ", ".join(parts)


def inputs(plan: Plan) -> list[str]:
    """`float32 [64, 32]` for each input, with the quantizer of those that come quantized."""
    texts = []
    for spec in plan.inputs:
        kind = f" {spec.kind.quantizer.describe()}" if spec.kind.name == "record" else ""
        texts.append(
            f"{str(spec.dtype).removeprefix('torch.')}{kind} {[int(d) for d in spec.shape]}"
        )
    return texts


def takes(plan: Plan, number: int) -> str:
    """Where a segment's inputs come from: `input 0, segment 1`."""
    made = {
        slot: i
        for i, s in enumerate(plan.segments)
        for slot in s.exports
        if slot >= len(plan.inputs)
    }
    texts = (
        f"input {slot}" if slot < len(plan.inputs) else f"segment {made[slot]}"
        for slot in plan.segments[number].imports
    )
    return ", ".join(dict.fromkeys(texts))


def segment_title(plan: Plan, number: int) -> str:
    """`segment 1 (module 2.norm) takes segment 0`."""
    segment: Segment = plan.segments[number]
    module = (
        f" (module {segment.module}, which is not planned)" if segment.module is not None else ""
    )
    source = takes(plan, number)
    return f"segment {number}{module}" + (f" takes {source}" if source else "")


def plain(value: Any) -> Any:
    """The value in JSON's types; what they do not cover becomes text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value)


def options(value: Any) -> str:
    """A part of the key in words: `DelayedScaling(margin=0, ...)` for a recipe."""
    if isinstance(value, dict):
        inner = ", ".join(f"{k}={options(v)}" for k, v in value.items() if k != "recipe")
        return f"{value.get('recipe', '')}({inner})"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(options(v) for v in value) + "]"
    return str(value)


__all__ = [
    "SHAPE_LEVELS",
    "Refusal",
    "counted",
    "family",
    "headline",
    "inputs",
    "is_remark",
    "marks",
    "members",
    "options",
    "place",
    "plain",
    "refusals",
    "remarks",
    "saved_total",
    "segment_title",
    "size",
    "takes",
]
