"""Plan: what a call replays. Immutable, shared by threads, and it keeps no tensor and no module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from te_ops.compiler.bind import Bound, Leaf
from te_ops.compiler.work import Note, StateUse
from te_ops.graph import Spec


@dataclass(frozen=True)
class Step:
    """One step as `explain()` shows it."""

    name: str  # rule or primitive
    kernel: str
    nodes: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    phase: str
    path: str
    emulated: bool = False
    view: bool = False  # its results alias what it reads: nothing is launched
    shared: bool = False  # of the prologue: calls in `te.weights_frozen()` share what it makes


@dataclass(frozen=True)
class Saved:
    """A value kept for backward."""

    value: str
    format: str
    bytes: int
    reference_bytes: int  # of the same value unquantized


@dataclass(frozen=True)
class Backward:
    """Backward of a segment for one set of outputs that have gradients."""

    bound: Bound
    loads: tuple[int, ...]  # slots for the saved values, in the order of `picks`
    picks: tuple[int, ...]  # positions in the segment's saved list
    added: tuple[
        tuple[int, torch.dtype], ...
    ] = ()  # leaves whose main_grad it writes, and its dtype


@dataclass(frozen=True)
class Segment:
    """One autograd node (or one call of a module that is not ours)."""

    name: str
    imports: tuple[int, ...]  # environment slots
    exports: tuple[int, ...]
    module: str | None = None  # path
    returns: tuple[Spec, ...] = ()  # what that module gives
    leaves: tuple[Leaf, ...] = ()  # differentiable tensors in order: imports, then parameters
    forward: Bound | None = None
    saved: tuple[int, ...] = ()
    saves_tensors: bool = False  # no record, shape or number among the saved values
    saved_leaf: tuple[str, ...] = ()  # kind of leaf per saved value, "" for computed ones
    full: tuple[bool, ...] = ()  # outputs that may get gradients
    derive: Callable[[tuple[bool, ...]], Backward | None] | None = field(default=None, repr=False)
    forward_steps: tuple[Step, ...] = ()
    backward_steps: tuple[Step, ...] = ()
    saved_values: tuple[Saved, ...] = ()
    needs_grad: bool = False
    copies: tuple[int, ...] = ()  # outputs that would be an input, or an earlier output, as it is
    states: tuple[StateUse, ...] = ()


@dataclass(frozen=True)
class Result:
    """A plan output: an environment slot, and the views to take outside the autograd nodes."""

    slot: int
    views: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = ()
    alias: bool = False  # an input, or an output that is there already: returned as a view
    quantizer: Any = None


@dataclass(frozen=True)
class Plan:
    """Segments in execution order, how values flow between them, and every reason why something did not fuse."""

    title: str
    segments: tuple[Segment, ...]
    size: int  # environment slots; the inputs come first
    results: tuple[Result, ...]
    single: bool  # one result, returned bare
    notes: tuple[Note, ...]
    key: dict[str, Any]
    inputs: tuple[Spec, ...]
    dead: tuple[tuple[int, ...], ...] = ()  # environment slots to drop after each segment

    def explain(self) -> str:
        """A table: steps with kernels, what is saved in which format, what was refused and why."""
        from te_ops.compiler.explain import to_text

        return to_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, stable between runs: golden tests compare it."""
        from te_ops.compiler.explain import to_dict

        return to_dict(self)

    def to_mermaid(self) -> str:
        """A Mermaid flowchart of the steps."""
        from te_ops.compiler.explain import to_mermaid

        return to_mermaid(self)

    def to_html(self) -> str:
        """A self-contained page with the graph drawn."""
        from te_ops.compiler.explain import to_html

        return to_html(self)

    @property
    def forward(self) -> tuple[Step, ...]:
        """Forward steps of all segments, in execution order."""
        return tuple(step for segment in self.segments for step in segment.forward_steps)

    @property
    def backward(self) -> tuple[Step, ...]:
        """Backward steps of all segments, in execution order."""
        return tuple(step for segment in reversed(self.segments) for step in segment.backward_steps)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from forward to backward, parameters and inputs that are kept anyway not counted twice."""
        return sum(s.bytes for segment in self.segments for s in segment.saved_values)
