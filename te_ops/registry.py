"""Rules ("may be one kernel") and kernels ("can run it, or the reason why not"), by name.

Third parties add theirs on import or through the entry-point group `te_ops.plugins`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from te_ops.errors import PlanError
from te_ops.graph import Graph, Node, Spec, Value

Launch = Callable[..., Any]
"""`launch(*reads) -> one result or a tuple`, in the order of `Call.reads` and `Call.writes`."""


@dataclass(frozen=True)
class Element:
    """One element of a rule's chain: alternatives `a|b`, optional `a?`, repeated `a*` (zero or more)."""

    names: frozenset[str]
    optional: bool
    repeat: bool


@dataclass(frozen=True)
class Rule:
    """Which chain of primitives may become one kernel.

    `stage="joint"` rules are rewrites before differentiation and carry `rewrite`; `"phase"` rules only group nodes.
    `together` groups nodes of the chain's kinds that share an input or, with `key`, those for which it gives the same
    answer (None: none of them), which need not share anything. Nodes of the kinds in `follow` come along when they
    read a result of one of the grouped, which may then be a single node; of a chain, its last node's, and the rule
    matches only where there is one. `beside` are kinds of nodes that share an input (no parameter) with one of the
    chain's, and have followers: these may come along too. `exact` rounds inner values that are not written; without it
    they stay FP32.
    Operands of prims named in `commutes` are shown chain operand first.
    """

    name: str
    chain: tuple[str, ...]
    stage: Literal["joint", "phase"] = "phase"
    together: bool = False
    exact: bool = False
    commutes: tuple[str, ...] = ()
    follow: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    key: Callable[[Graph, Node], Hashable | None] | None = None
    rewrite: Callable[..., Any] | None = None
    elements: tuple[Element, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not self.chain or all(c.endswith(("?", "*")) for c in self.chain):
            raise PlanError(f"rule {self.name}: the chain {self.chain} has no required primitive")
        if (self.rewrite is not None) != (self.stage == "joint"):
            raise PlanError(f"rule {self.name}: joint rules need rewrite=, phase rules take none")
        if self.key is not None and not self.together:
            raise PlanError(f"rule {self.name}: key= is for rules with together=True")
        for word in ("follow", "beside"):
            if isinstance(named := getattr(self, word), str):
                raise PlanError(
                    f"rule {self.name}: {word}= is a tuple of primitives, got {named!r}"
                )
        if self.beside and (self.together or not self.follow):
            raise PlanError(f"rule {self.name}: beside= is for chains with follow=")
        if self.key is not None and not callable(self.key):
            raise PlanError(
                f"rule {self.name}: key= is a function of (graph, node), got {self.key!r}"
            )
        made = tuple(
            Element(frozenset(c.rstrip("?*").split("|")), c.endswith(("?", "*")), c.endswith("*"))
            for c in self.chain
        )
        object.__setattr__(self, "elements", made)


_ARCH = re.compile(r"any|cpu|cuda|sm_(?P<low>\d+)(\+|\.\.sm_(?P<high>\d+))?")


@dataclass(frozen=True)
class ArchRange:
    """Device architectures a kernel runs on: "any", "cpu", "cuda", "sm_90", "sm_90+", "sm_80..sm_90"."""

    text: str

    def __post_init__(self) -> None:
        match = _ARCH.fullmatch(self.text)
        if match is None or (match["high"] and int(match["low"]) > int(match["high"])):
            raise PlanError(
                f"arch {self.text!r} is not 'any', 'cpu', 'cuda', 'sm_90', 'sm_90+' or a range like 'sm_80..sm_90'"
            )

    def refuse(self, arch: str) -> str | None:
        """None if `arch` ("cpu", "sm_90") is inside, else the reason."""
        if (
            self.text == "any"
            or self.text == arch
            or (self.text == "cuda" and arch.startswith("sm_"))
        ):
            return None
        if arch.startswith("sm_") and self.text.startswith("sm_"):
            number = int(arch[3:])
            low, _, high = self.text.partition("..")
            if self.text.endswith("+") and number >= int(self.text[3:-1]):
                return None
            if high and int(low[3:]) <= number <= int(high[3:]):
                return None
        return f"needs {self.text}, the tensors are on {arch}"


Layout = Literal["plain", "transposed", "swizzled", "interleaved"]


@dataclass(frozen=True)
class OperandLayouts:
    """What a kernel reads and writes: layouts by operand position, and which may be strided slices."""

    reads: tuple[tuple[int, Layout], ...] = ()
    writes: tuple[tuple[int, Layout], ...] = ()
    strided_reads: frozenset[int] | None = None  # None: any
    strided_writes: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Call:
    """What a kernel is asked to run: member nodes, the values they read and must write, and where."""

    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    specs: dict[Value, Spec]
    device: torch.device
    arch: str
    align: int  # the largest power of two <= 128 that divides the row count; 0: no rows
    rule: Rule | None = None
    nodes_by_id: dict[int, Node] = field(default_factory=dict, repr=False)

    def spec(self, value: Value) -> Spec:
        """Spec of a value that a member reads or makes."""
        return self.specs[value]

    @property
    def node(self) -> Node:
        """The only member of a single call, else the first."""
        return self.nodes[0]

    def inputs(self, node: Node) -> tuple[Value, ...]:
        """Inputs of a member; operands of commutative prims come with the one made inside the group first."""
        if self.rule is None or node.prim.name not in self.rule.commutes:
            return node.inputs
        inside = {n.id for n in self.nodes}
        return tuple(sorted(node.inputs, key=lambda v: v.node not in inside))

    def live(self, node: Node) -> tuple[bool, ...]:
        """Which outputs of a member are written or read inside the group."""
        used = set(self.writes) | {v for n in self.nodes for v in n.inputs}
        count = len(self.specs_of(node))
        return tuple(Value(node.id, i) in used for i in range(count))

    def specs_of(self, node: Node) -> tuple[Spec, ...]:
        """Specs of all outputs of a member."""
        out: list[Spec] = []
        while (value := Value(node.id, len(out))) in self.specs:
            out.append(self.specs[value])
        return tuple(out)


def _accept(_: Call) -> str | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """Runs a primitive or a rule (`runs`). `refuse(call)` says why not, `bind(call)` prepares a launch once.

    `recorded`: its launches report every device operation that is no torch call to the recorder of
    `te_ops.runtime.tape`, so that a plan may issue them again without running the launch. `remark(call)` is what
    `explain()` says of a call that the kernel took, None for nothing.
    """

    runs: str
    name: str
    bind: Callable[[Call], Launch] = field(compare=False)
    arch: ArchRange = ArchRange("any")
    priority: int = 10
    layouts: OperandLayouts = OperandLayouts()
    refuse: Callable[[Call], str | None] = field(default=_accept, compare=False)
    available: Callable[[], str | None] = field(default=lambda: None, compare=False)
    recorded: bool = False
    remark: Callable[[Call], str | None] = field(default=_accept, compare=False)

    def reason(self, call: Call) -> str | None:
        """None if the kernel takes the call."""
        found = self.arch.refuse(call.arch) or self.available()
        found = found or self.refuse(call)
        if not isinstance(found, str | None):
            raise PlanError(
                f"kernel {self.name}: refuse(call) gives None or the reason in words, got {found!r}"
            )
        return found


class Registry:
    """Rules in declared order and kernels by what they run; `version` moves with every change."""

    def __init__(self) -> None:
        self.version = 0
        self._rules: dict[str, Rule] = {}
        self._kernels: dict[str, Kernel] = {}
        self._only: frozenset[str] | None = None
        self._hidden: tuple[str, ...] = ()
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self._loaded: set[str] = set()  # by `prepare`: they outlive a `temporary`
        self._later: list[tuple[tuple[Rule | Kernel, ...], bool]] = []
        self._releases: dict[str, Callable[[], Any]] = {}
        self._boundaries: dict[str, Callable[[bool], int]] = {}
        self._settles: dict[str, Callable[[], bool]] = {}

    def add(self, *made: Rule | Kernel, replace: bool = False) -> None:
        """Register rules and kernels.

        Raises:
            PlanError: the name is taken and `replace` is not set.
        """
        for item in made:
            if item.name in self._table(item) and not replace:
                raise PlanError(
                    f"{type(item).__name__.lower()} {item.name!r} is registered already; pass replace=True"
                )
        for item in made:
            self._table(item)[item.name] = item
            self.version += 1

    def later(self, *made: Rule | Kernel, replace: bool = False) -> None:
        """Register these at the next step boundary (`te.step()`), so that no kernel changes within a step."""
        self._later.append((made, replace))

    def boundary(self, *, together: bool = False) -> int:
        """Register what waits for a step boundary; returns how many rules and kernels that were.

        `together`: every rank of the process group is at this place.
        """
        waiting, self._later = self._later, []
        for made, replace in waiting:
            self.add(*made, replace=replace)
        ready = sum(hook(together) for hook in list(self._boundaries.values()))
        self.version += ready > 0
        return sum(len(made) for made, _ in waiting) + ready

    def on_boundary(self, name: str, hook: Callable[[bool], int]) -> None:
        """Call `hook(together)` at every step boundary: how many kernels stop or start refusing calls there."""
        self._boundaries[name] = hook

    def on_settle(self, name: str, hook: Callable[[], bool]) -> None:
        """Call `hook` after every plan that was made: whether it is made again, since a kernel refused only for now."""
        self._settles[name] = hook

    def settle(self) -> bool:
        """Let backends wait for what the last plan asked for; True if it is to be made again."""
        return sum(hook() for hook in list(self._settles.values())) > 0  # each of them has its turn

    def on_release(self, name: str, release: Callable[[], Any]) -> None:
        """Call `release` when users free workspaces; a second one of the same name takes the first one's place."""
        self._releases[name] = release

    def release(self) -> None:
        """Let every backend give back the memory that it keeps between calls."""
        for release in list(self._releases.values()):
            release()

    def _table(self, item: Rule | Kernel) -> dict[str, Any]:
        return self._rules if isinstance(item, Rule) else self._kernels

    def when(self, device_type: str, load: Callable[[], None]) -> None:
        """Call `load` before the first plan for a device of this type: it registers the kernels for it."""
        self.waiting.setdefault(device_type, []).append(load)

    def prepare(self, device_type: str | None = None) -> None:
        """Load what waits for this device type (None: for any); cheap once it is done."""
        kinds = list(self.waiting) if device_type is None else [device_type]
        loads = [load for kind in kinds for load in self.waiting.pop(kind, ())]
        if not loads:
            return
        known = {*self._rules, *self._kernels}
        for load in loads:
            load()
        self._loaded |= {*self._rules, *self._kernels} - known

    def remove(self, name: str) -> None:
        """Unregister a rule or a kernel."""
        if self._rules.pop(name, None) is None and self._kernels.pop(name, None) is None:
            raise PlanError(f"no rule or kernel is named {name!r}")
        self.version += 1

    def rules(self, stage: str) -> list[Rule]:
        """Rules of a stage, in declared order."""
        return [
            r
            for r in self._rules.values()
            if r.stage == stage and (self._only is None or r.name in self._only)
        ]

    def kernels(self, runs: str) -> list[Kernel]:
        """Kernels for a primitive or rule, best priority first; `"*"` kernels run any single primitive."""
        found = [
            k
            for k in self._kernels.values()
            if k.runs == runs and not k.name.startswith(self._hidden or "\0")
        ]
        return sorted(found, key=lambda k: -k.priority)

    def all(self) -> Iterable[Rule | Kernel]:
        """Everything that is registered now (`prepare` first for what waits for a device)."""
        return [*self._rules.values(), *self._kernels.values()]

    def find(self, name: str) -> Rule | Kernel:
        """A rule or kernel by name."""
        found = self._rules.get(name) or self._kernels.get(name)
        if found is None and self.waiting:
            self.prepare()
            found = self._rules.get(name) or self._kernels.get(name)
        if found is None:
            raise PlanError(f"no rule or kernel is named {name!r}")
        return found

    @contextlib.contextmanager
    def only(self, *rules: str) -> Iterator[None]:
        """Within, only these phase and joint rules match (none: nothing fuses); for tests."""
        saved, self._only = self._only, frozenset(rules)
        self.version += 1
        try:
            yield
        finally:
            self._only = saved
            self.version += 1

    @contextlib.contextmanager
    def without(self, *prefixes: str) -> Iterator[None]:
        """Within, kernels whose names start with one of these are not used: `without("cublas.", "cuda.")`."""
        saved, self._hidden = self._hidden, (*self._hidden, *prefixes)
        self.version += 1
        try:
            yield
        finally:
            self._hidden = saved
            self.version += 1

    @contextlib.contextmanager
    def temporary(self, *made: Rule | Kernel) -> Iterator[None]:
        """Within, these are registered too; for tests."""
        rules, kernels = dict(self._rules), dict(self._kernels)
        self.add(*made, replace=True)
        # Also with nothing added: plans made inside must not be those made outside.
        self.version += 1
        try:
            yield
        finally:
            # What a device's first plan loaded meanwhile stays: it is loaded only once.
            late = {n: k for n, k in self._kernels.items() if n in self._loaded}
            late_rules = {n: r for n, r in self._rules.items() if n in self._loaded}
            self._rules, self._kernels = {**late_rules, **rules}, {**late, **kernels}
            self.version += 1


rules = REGISTRY = Registry()


def kernel(
    runs: str,
    *,
    name: str,
    arch: str = "any",
    priority: int = 10,
    layouts: OperandLayouts = OperandLayouts(),
    refuse: Callable[[Call], str | None] = _accept,
    available: Callable[[], str | None] = lambda: None,
    recorded: bool = False,
    replace: bool = False,
) -> Callable[[Callable[[Call], Launch]], Kernel]:
    """Register a kernel; the decorated function is its `bind(call) -> launch`."""

    def register(bind: Callable[[Call], Launch]) -> Kernel:
        where = ArchRange(arch)
        made = Kernel(runs, name, bind, where, priority, layouts, refuse, available, recorded)
        REGISTRY.add(made, replace=replace)
        return made

    return register


PLUGINS: dict[str, str | None] = {}
"""Plugins that were loaded, with None or why it failed; for `te-ops info`."""


def load_plugins() -> dict[str, str | None]:
    """Import every `te_ops.plugins` entry point; name -> None or why it failed (one warning each)."""
    result: dict[str, str | None] = {}
    for entry in importlib.metadata.entry_points(group="te_ops.plugins"):
        try:
            loaded = entry.load()
            if callable(loaded):
                loaded()
            result[entry.name] = None
        except Exception as error:  # noqa: BLE001  (a stranger's import: whatever it raises, te_ops works without it)
            result[entry.name] = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"te_ops plugin {entry.name!r} failed to load: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    PLUGINS.update(result)
    return result
