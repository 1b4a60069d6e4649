"""What the passes hand on: the request, and the work on the whole pipeline or on one segment of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from te_ops.graph import PARAM, Graph, Node, Phase, Spec, Value
from te_ops.op import Op
from te_ops.recipe import DelayedScaling, Recipe
from te_ops.registry import Call, Kernel, Launch, Rule


@dataclass(frozen=True)
class Request:
    """Everything that a plan depends on, as values (the op is read for its structure only)."""

    op: Op
    inputs: tuple[Spec, ...]
    input_grads: tuple[bool, ...]
    grad: bool  # grad mode
    device: torch.device
    arch: str
    align: int
    recipe: Recipe | None = None
    quantized: bool = False  # the recipe is enabled
    calibrating: bool = False
    autocast_dtype: torch.dtype | None = None
    place: str = ""  # path of the op in the outermost pipeline (a hook makes it a segment of that)
    # (path, name) of each parameter whose gradient is added to its main_grad, and the dtype of that
    main_grads: tuple[tuple[tuple[str, str], torch.dtype], ...] = ()

    def main_grad(self, node: Node) -> torch.dtype | None:
        """Dtype of what a parameter's gradient is added to, None if autograd gets it."""
        slot = node.attrs.get("slot") if node.prim is PARAM else None
        return dict(self.main_grads).get(slot) if slot is not None else None


@dataclass(frozen=True)
class Note:
    """Why a match was not fused, or what a pass did that a reader should know."""

    rule: str
    at: str
    kernel: str
    reason: str


STATE_PREFIX = "quantizer.delayed"


@dataclass(frozen=True)
class StateUse:
    """A delayed-scaling state that a quantize node reads; `amax` is what it observes (None: reads only)."""

    path: str
    operand: str
    config: DelayedScaling
    phase: Phase
    amax: Value | None
    fp8_max: float = 448.0

    @property
    def state(self) -> str:
        """Name of the op's state: several uses of one op in a plan have operands `input`, `input#7`."""
        return self.operand.partition("#")[0]

    @property
    def slot(self) -> tuple[str, str]:
        """The buffer that holds its scale."""
        return self.path, f"{STATE_PREFIX}.{self.state}.scale"

    @property
    def is_grad(self) -> bool:
        """Whether it is read and observed in backward."""
        return self.phase is not Phase.FORWARD


@dataclass
class Group:
    """Nodes that become one step, and the kernel that takes them."""

    nodes: tuple[Node, ...]
    kernel: Kernel
    rule: Rule | None = None
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    call: Call | None = None
    launch: Launch | None = None  # filled by bind


@dataclass
class Work:
    """One graph on its way to a plan (segment). Passes read and replace the fields."""

    request: Request
    g: Graph
    outputs: tuple[Value, ...]
    notes: list[Note] = field(default_factory=list)
    # of a segment
    name: str = ""
    number: int = 0
    wanted: tuple[Value, ...] = ()  # leaves that need gradients
    final: tuple[bool, ...] = ()  # outputs that only the caller reads: they may be records
    output_grads: tuple[bool, ...] = ()  # which outputs get a gradient
    grads: dict[Value, Value] = field(default_factory=dict)  # leaf -> its gradient
    states: list[StateUse] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)  # fused ones, after `fuse`
    forward: list[Group] = field(default_factory=list)
    backward: list[Group] = field(default_factory=list)
    saved: tuple[Value, ...] = ()

    def roots(self) -> list[Value]:
        """Everything that must be computed."""
        amaxes = [s.amax for s in self.states if s.amax is not None]
        return [*self.outputs, *self.grads.values(), *amaxes, *(v for _, v, _ in self.g.updates)]

    def replace_graph(self, new: Graph, mapping: dict[Value, Value]) -> None:
        """Continue with a rewritten graph."""
        self.g = new
        self.outputs = tuple(mapping[v] for v in self.outputs)
        self.grads = {mapping[k]: mapping[v] for k, v in self.grads.items() if k in mapping}
        self.wanted = tuple(mapping[v] for v in self.wanted if v in mapping)
        self.states = [
            replace(s, amax=None if s.amax is None else mapping[s.amax]) for s in self.states
        ]

    def note(self, rule: str, nodes: Sequence[Node], kernel: str, reason: str) -> None:
        """Keep a reason for `explain()`."""
        made = Note(rule, " + ".join(display(n) for n in nodes), kernel, reason)
        if made not in self.notes:
            self.notes.append(made)


def display(node: Node) -> str:
    """How explain() names a node: a pointwise node by its expression, a quantize node by its format."""
    fn: Any = node.attrs.get("fn")
    if fn is not None:
        return str(fn.name)
    quantizer: Any = node.attrs.get("quantizer")
    if quantizer is not None and node.prim.name == "quantize":
        return f"quantize({quantizer.describe()})"
    layout = node.attrs.get("layout")
    return f"gemm_{layout}" if node.prim.name == "gemm" else node.prim.name
