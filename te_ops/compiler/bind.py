"""bind: launches over slots. A call owns its slots; the plan keeps no tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from te_ops.compiler.prologue import Prologue, prologue_of
from te_ops.compiler.work import Group, StateUse, Work
from te_ops.errors import Error
from te_ops.graph import BUFFER, GRAD, INPUT, PARAM, SCALAR, SEED, Node, Phase, Value

Slots = list[Any]
Run = Callable[[Slots], None]


@dataclass(frozen=True)
class Leaf:
    """Where a slot is filled from: an input of the segment, a module's attribute, or the call's seed."""

    kind: str  # input, param, buffer, scalar, seed, grad
    index: int = 0
    path: str = ""
    name: str = ""


@dataclass(frozen=True)
class Bound:
    """The steps of one phase of a segment, over slots."""

    size: int
    loads: tuple[tuple[Leaf, int], ...]
    steps: tuple[Run, ...]
    results: tuple[int | None, ...]
    observed: tuple[tuple[StateUse, int], ...]
    updates: tuple[tuple[Leaf, int, str], ...] = ()
    paths: tuple[str, ...] = ()  # of the ops whose nodes the steps run
    prologue: Prologue | None = None  # the steps that depend on parameters only
    unrecorded: str = ""  # a step whose device operations nobody reports, and its kernel

    def run(self, slots: Slots, title: str, only: Sequence[int] | None = None) -> None:
        """Run every step, or those at some positions; an error gets the path of its op in the pipeline `title`.

        Raises:
            Error: a reference refuses the values that it was given.
        """
        done = 0
        order = range(len(self.steps)) if only is None else only
        steps = self.steps if only is None else [self.steps[i] for i in only]
        try:
            for step in steps:
                step(slots)
                done += 1
        except Error as error:
            if getattr(error, "located", False):
                raise
            where = f"{title}.{self.paths[order[done]]}".rstrip(".")
            made = type(error)(f"{where}: {error}")
            made.located = True  # type: ignore[attr-defined]
            raise made from error
        except Exception as error:  # of a kernel: it stays what it is
            error.add_note(f"te_ops ran {title}.{self.paths[order[done]]}".rstrip("."))
            raise


def launch_of(group: Group) -> Any:
    """The group's launch, bound once."""
    if group.launch is None:
        assert group.call is not None
        try:
            group.launch = group.kernel.bind(group.call)
        except Exception as error:
            error.add_note(f"te_ops bound the kernel {group.kernel.name}")
            raise
    return group.launch


def bind_forward(work: Work) -> tuple[Bound, tuple[int, ...]]:
    """Forward steps, and the slots to save for backward."""
    binder = _Binder(work, work.forward)
    keep = [*work.outputs, *work.saved]
    keep += [s.amax for s in work.states if s.amax is not None and s.phase is Phase.FORWARD]
    keep += [v for _, v, _ in work.g.updates]
    saved = tuple(binder.slot(v) for v in work.saved)  # also leaves that only backward reads
    return binder.bind(keep, work.outputs, Phase.FORWARD), saved


def bind_backward(work: Work, leaves: Sequence[Value]) -> tuple[Bound, tuple[int, ...]]:
    """Backward steps, giving the gradients of these leaves; and the slots that saved values are loaded into."""
    binder = _Binder(work, work.backward)
    saved = tuple(binder.slot(v) for v in work.saved)
    grads = [work.grads.get(leaf) for leaf in leaves]
    keep = [v for v in grads if v is not None]
    keep += [s.amax for s in work.states if s.amax is not None and s.phase is not Phase.FORWARD]
    added = [work.request.main_grad(work.g.node(leaf)) is not None for leaf in leaves]
    given = [None if to else v for v, to in zip(grads, added, strict=True)]
    return binder.bind(keep, given, Phase.DGRAD), saved


class _Binder:
    def __init__(self, work: Work, groups: Sequence[Group]) -> None:
        self.work = work
        self.groups = groups
        self.slots: dict[Value, int] = {}

    def slot(self, value: Value) -> int:
        return self.slots.setdefault(value, len(self.slots))

    def bind(self, keep: Sequence[Value], results: Sequence[Value | None], phase: Phase) -> Bound:
        kept = set(keep)
        last: dict[Value, int] = {}
        for i, group in enumerate(self.groups):
            for value in (*group.reads, *group.writes):
                last[value] = i
        dead: list[list[int]] = [[] for _ in self.groups]
        for value, i in last.items():
            if value not in kept:
                dead[i].append(self.slot(value))
        steps = tuple(
            _step(
                launch_of(group),
                tuple(self.slot(v) for v in group.reads),
                tuple(self.slot(v) for v in group.writes),
                tuple(dead[i]),
            )
            for i, group in enumerate(self.groups)
            if group.writes
        )
        out = tuple(None if v is None else self.slot(v) for v in results)
        observed = tuple(
            (s, self.slot(s.amax))
            for s in self.work.states
            if s.amax is not None and (s.phase is Phase.FORWARD) == (phase is Phase.FORWARD)
        )
        updates: tuple[tuple[Leaf, int, str], ...] = ()
        if phase is Phase.FORWARD:
            updates = tuple(
                (leaf(self.work.g.node(b)), self.slot(v), rule)
                for b, v, rule in self.work.g.updates
            )
        paths = tuple(group.nodes[0].path for group in self.groups if group.writes)
        made = Bound(
            len(self.slots), self._loads(phase), steps, out, observed, updates, paths,
            unrecorded=self._unrecorded(),
        )  # fmt: skip
        if phase is not Phase.FORWARD:
            return made
        return replace(made, prologue=prologue_of(self.work, self.groups, kept, self.slots))

    def _unrecorded(self) -> str:
        for group in self.groups:
            views = all(n.prim.nature == "view" for n in group.nodes)
            if group.writes and not (views or group.kernel.recorded):
                return f"{group.kernel.name} at {group.nodes[0].path or 'the root'} is not recorded"
        return ""

    def _loads(self, phase: Phase) -> tuple[tuple[Leaf, int], ...]:
        loads = []
        for value, slot in self.slots.items():
            node = self.work.g.node(value)
            made = leaf(node)
            if made is None:
                continue
            if phase is Phase.FORWARD or made.kind == "grad" or _read_at_entry(node):
                loads.append((made, slot))
        return tuple(loads)


def _read_at_entry(node: Node) -> bool:
    return node.prim is BUFFER and node.attrs["phase"] is not Phase.FORWARD


def leaf(node: Node) -> Any:
    """The leaf that a node stands for, or None."""
    if node.prim in (INPUT, GRAD):
        return Leaf(node.prim.name, index=node.attrs["index"])
    if node.prim in (PARAM, BUFFER, SCALAR):
        path, name = node.attrs["slot"]
        return Leaf(node.prim.name, path=path, name=name)
    return Leaf("seed") if node.prim is SEED else None


def _step(
    launch: Callable[..., Any],
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    dead: tuple[int, ...],
) -> Run:
    """One flat closure per arity: this is the hot path."""
    if len(writes) != 1:
        return _many(launch, reads, writes, dead)
    (out,) = writes
    if len(reads) == 1:
        (a,) = reads

        def one(s: Slots) -> None:
            s[out] = launch(s[a])
            for d in dead:
                s[d] = None

        return one
    if len(reads) == 2:
        a, b = reads

        def two(s: Slots) -> None:
            s[out] = launch(s[a], s[b])
            for d in dead:
                s[d] = None

        return two

    def some(s: Slots) -> None:
        s[out] = launch(*[s[i] for i in reads])
        for d in dead:
            s[d] = None

    return some


def _many(
    launch: Callable[..., Any],
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    dead: tuple[int, ...],
) -> Run:
    def many(s: Slots) -> None:
        for out, value in zip(writes, launch(*[s[i] for i in reads]), strict=True):
            s[out] = value
        for d in dead:
            s[d] = None

    return many
