"""fuse: group nodes by the phase rules, wherever a kernel takes the group; select: a kernel for
every other node.

The longest match that a kernel takes wins, backing off to shorter ones; the quotient graph stays
acyclic.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

from te_ops.compiler.work import Group, Work, display
from te_ops.errors import NoKernelError, PlanError
from te_ops.graph import BUFFER, LEAVES, PARAM, SCALAR, Graph, Node, Phase, Value
from te_ops.registry import REGISTRY, Call, Kernel, Rule

MAX_SIBLINGS = 6  # beyond, only all nodes that share an input are tried as one group
MAX_KEYED = 16  # nodes with the same key that are tried as one group
_EVERYWHERE = frozenset({PARAM, BUFFER, SCALAR})


@dataclass
class _Matcher:
    work: Work
    alive: list[bool]
    consumers: dict[Value, list[Node]] = field(default_factory=dict)
    roots: set[Value] = field(default_factory=set)
    taken: dict[int, int] = field(default_factory=dict)  # node -> index of its group
    groups: list[Group] = field(default_factory=list)
    furthest: int = -1  # the last node that is in a group

    def __post_init__(self) -> None:
        self.roots = set(self.work.roots())
        for node in self.work.g.nodes:
            if self.alive[node.id]:
                for value in dict.fromkeys(node.inputs):
                    self.consumers.setdefault(value, []).append(node)

    def run(self) -> None:
        """Match at every node in topological order: chains, and nodes with what follows them, first; then nodes that
        share inputs or a key."""
        rules = [
            (rule, rule.together and not rule.follow, _first_names(rule))
            for rule in REGISTRY.rules("phase")
        ]
        for node in self.work.g.nodes:
            for last in (False, True):
                if self._free(node):
                    self._try(
                        [
                            r
                            for r, after, names in rules
                            if after is last and node.prim.name in names
                        ],
                        node,
                    )

    def _free(self, node: Node) -> bool:
        return self.alive[node.id] and node.id not in self.taken and node.prim not in LEAVES

    def _try(self, rules: list[Rule], node: Node) -> None:
        """Take the longest match that a kernel takes; of equals, the rule declared first."""
        matches = [
            (rule, nodes) for rule in rules for nodes in self._matches(rule, node) if len(nodes) > 1
        ]
        matches.sort(key=lambda match: -len(match[1]))
        missing: set[str] = set()
        for rule, nodes in matches:
            if rule.name in missing:
                continue
            nowhere = self._runs_nowhere(rule)
            if nowhere is not None:
                missing.add(rule.name)
                self.work.note(rule.name, nodes, "", nowhere)
            elif self._closes_cycle(nodes):
                self.work.note(
                    rule.name, nodes, "", "fusing it would close a cycle with its other readers"
                )
            elif self._take(rule, nodes):
                return

    def _runs_nowhere(self, rule: Rule) -> str | None:
        """Why no kernel of the rule runs on this device, or None if one may."""
        arch = self.work.request.arch
        kernels = REGISTRY.kernels(rule.name)
        if not kernels:
            return f"no kernel for it is registered ({arch})"
        if any(kernel.arch.refuse(arch) is None for kernel in kernels):
            return None
        listed = ", ".join(f"{kernel.name} needs {kernel.arch.text}" for kernel in kernels)
        return f"no kernel for it runs on {arch} ({listed})"

    def _take(self, rule: Rule, nodes: tuple[Node, ...]) -> bool:
        """Make the group if a kernel takes it."""
        call = make_call(self.work, nodes, self.roots, self.consumers, rule)
        kernel, reasons = choose(rule.name, call)
        for name, reason in reasons:
            self.work.note(rule.name, nodes, name, reason)
        if kernel is None:
            return False
        _remark(self.work, kernel, call)
        for member in nodes:
            self.taken[member.id] = len(self.groups)
            self.furthest = max(self.furthest, member.id)
        self.groups.append(Group(nodes, kernel, rule, call.reads, call.writes, call=call))
        return True

    def _matches(self, rule: Rule, node: Node) -> list[tuple[Node, ...]]:
        if rule.together:
            return self._siblings(rule, node)
        found = self._chains(rule, node)
        return self._followed(rule, found) if rule.follow else found

    def _chains(self, rule: Rule, node: Node) -> list[tuple[Node, ...]]:
        """All matches of the chain that start at the node, along any operand and any output."""
        found: dict[tuple[int, ...], tuple[Node, ...]] = {}

        def walk(position: int, nodes: tuple[Node, ...]) -> None:
            if all(e.optional for e in rule.elements[position:]):
                found[tuple(n.id for n in nodes)] = nodes
            for nxt, after in _next(rule, position):
                for follower in self._followers(nodes[-1]):
                    if (
                        follower.prim.name in nxt
                        and follower not in nodes
                        and _one_phase(nodes[-1], follower)
                    ):
                        walk(after, (*nodes, follower))

        for names, after in _next(rule, 0):
            if node.prim.name in names:
                walk(after, (node,))
        return list(found.values())

    def _followed(self, rule: Rule, chains: list[tuple[Node, ...]]) -> list[tuple[Node, ...]]:
        """Chains with the readers of their last node that come along: all of them, or those of one kind."""
        found: dict[tuple[Node, ...], tuple[Node, ...]] = {}  # with the chain of each
        for chain in chains:
            last = chain[-1]
            readers = {n.id: n for n in self._followers(last) if _one_phase(last, n)}
            for kinds in (rule.follow, *((name,) for name in rule.follow)):
                more = tuple(readers[i] for i in sorted(readers) if readers[i].prim.name in kinds)
                if more:
                    found[(*chain, *more)] = chain
        if not rule.beside:
            return list(found)
        others = {chain: self._beside(rule, chain) for chain in dict.fromkeys(found.values())}
        return [*found, *((*n, *others[chain]) for n, chain in found.items() if others[chain])]

    def _beside(self, rule: Rule, chain: tuple[Node, ...]) -> tuple[Node, ...]:
        """Values made of what the chain's nodes read, each with its followers. Who shares a parameter only is not
        one: the same layer may be called twice."""
        inside = {n.id for n in chain}
        shared = dict.fromkeys(v for n in chain for v in n.inputs)
        found: dict[int, Node] = {}
        for value in (v for v in shared if self.work.g.node(v).prim not in _EVERYWHERE):
            for node in self.consumers.get(value, ()):
                apart = node.id not in inside and inside.isdisjoint(v.node for v in node.inputs)
                if (
                    apart
                    and node.prim.name in rule.beside
                    and self._free(node)
                    and _one_phase(chain[-1], node)
                ):
                    group = self._with_followers(rule, (node,))
                    if len(group) > 1:
                        found |= {n.id: n for n in group}
        return tuple(found[i] for i in sorted(found))

    def _followers(self, node: Node) -> Iterator[Node]:
        for i in range(len(self.work.g.specs[node.id])):
            for reader in self.consumers.get(Value(node.id, i), ()):
                if self._free(reader):
                    yield reader

    def _siblings(self, rule: Rule, node: Node) -> list[tuple[Node, ...]]:
        """Nodes of the rule's kinds that belong with this one, the first of them, and what follows them; all, and
        each smaller set of those that share an input.
        """
        names = frozenset().union(*(e.names for e in rule.elements))
        required = [e.names for e in rule.elements if not e.optional]
        found: dict[tuple[Node, ...], None] = {}
        for others in self._families(rule, node, names):
            found[(node, *others)] = None
            if rule.key is not None:
                continue
            for size in range(min(len(others), MAX_SIBLINGS - 1), 0, -1):
                found.update(
                    dict.fromkeys(
                        (node, *some) for some in combinations(others[: MAX_SIBLINGS - 1], size)
                    )
                )
        if rule.follow:
            found[(node,)] = None
            found = {self._with_followers(rule, group): None for group in found}
        return [group for group in found if _covers(group, required)]

    def _families(self, rule: Rule, node: Node, names: frozenset[str]) -> Iterator[list[Node]]:
        """Later nodes of these kinds that have the node's key, or share an input with it."""
        g = self.work.g
        if rule.key is not None:
            key = _key(rule, g, node)
            later = [] if key is None else self._later(node, g.nodes[node.id + 1 :], names)
            yield [n for n in later if _key(rule, g, n) == key][: MAX_KEYED - 1]
            return
        for value in dict.fromkeys(node.inputs):
            yield self._later(node, self.consumers.get(value, ()), names)

    def _later(self, node: Node, among: Iterable[Node], names: frozenset[str]) -> list[Node]:
        return [
            n
            for n in among
            if n.id > node.id and n.prim.name in names and self._free(n) and _one_phase(node, n)
        ]

    def _with_followers(self, rule: Rule, group: tuple[Node, ...]) -> tuple[Node, ...]:
        """The group with the readers of its results that follow it, in topological order."""
        members = {n.id: n for n in group}
        for node in group:
            for reader in self._followers(node):
                if reader.prim.name in rule.follow and _one_phase(node, reader):
                    members[reader.id] = reader
        return tuple(members[i] for i in sorted(members))

    def _closes_cycle(self, nodes: tuple[Node, ...]) -> bool:
        """Whether a path leaves the group and comes back, through single nodes and the groups made
        so far.
        """
        inside = {n.id for n in nodes}
        horizon = max(*inside, self.furthest)  # beyond it every edge leads further away
        stack = [r for n in nodes for r in self._readers(n) if r.id not in inside]
        seen: set[int] = set()
        while stack:
            node = stack.pop()
            members = self.groups[self.taken[node.id]].nodes if node.id in self.taken else (node,)
            for member in members:
                if member.id in seen:
                    continue
                seen.add(member.id)
                if member.id in inside:
                    return True
                for reader in self._readers(member):
                    if reader.id in inside:
                        return True
                    if reader.id not in seen and reader.id <= horizon:
                        stack.append(reader)
        return False

    def _readers(self, node: Node) -> Iterator[Node]:
        for i in range(len(self.work.g.specs[node.id])):
            yield from self.consumers.get(Value(node.id, i), ())


def _key(rule: Rule, g: Graph, node: Node) -> Hashable | None:
    assert rule.key is not None
    try:
        return rule.key(g, node)
    except Exception as error:
        raise PlanError(
            f"rule {rule.name}: key= raised {type(error).__name__} for {node.prim.name} ({error}); it gives the same "
            "value for nodes that belong together, and None for the others"
        ) from error


def _covers(group: tuple[Node, ...], required: list[frozenset[str]]) -> bool:
    """Whether every required element of a rule has a node, and there are enough nodes for all of
    them.
    """
    return len(group) >= len(required) and all(
        any(n.prim.name in names for n in group) for names in required
    )


@lru_cache(maxsize=256)
def _first_names(rule: Rule) -> frozenset[str]:
    names: set[str] = set()
    for element in rule.elements:
        names |= element.names
        if not element.optional and not rule.together:
            break
    return frozenset(names)


@lru_cache(maxsize=1024)
def _next(rule: Rule, position: int) -> list[tuple[frozenset[str], int]]:
    """What may come next in a chain: (names, position after it)."""
    result = []
    while position < len(rule.elements):
        element = rule.elements[position]
        result.append((element.names, position if element.repeat else position + 1))
        if not element.optional:
            break
        position += 1
    return result


def _one_phase(a: Node, b: Node) -> bool:
    """Forward nodes group with forward nodes, what runs in backward with what does, each within a recompute scope."""
    return a.phase.is_backward == b.phase.is_backward and a.scope == b.scope


def make_call(
    work: Work,
    nodes: tuple[Node, ...],
    roots: set[Value],
    consumers: dict[Value, list[Node]],
    rule: Rule | None = None,
) -> Call:
    """What a kernel sees of the nodes: reads, and writes with inner values that others read."""
    g = work.g
    inside = {n.id for n in nodes}
    reads = tuple(dict.fromkeys(v for n in nodes for v in n.inputs if v.node not in inside))
    made = [Value(n.id, i) for n in nodes for i in range(len(g.specs[n.id]))]
    writes = tuple(
        v for v in made if v in roots or any(r.id not in inside for r in consumers.get(v, ()))
    )
    specs = {v: g.spec(v) for v in (*reads, *made)}
    request = work.request
    return Call(
        nodes, reads, writes, specs, request.device, request.arch, request.align, rule,
        {v.node: g.node(v) for v in reads},
    )  # fmt: skip


def choose(runs: str, call: Call) -> tuple[Kernel | None, list[tuple[str, str]]]:
    """The first kernel that takes the call, and the reasons of those before it."""
    reasons: list[tuple[str, str]] = []
    for kernel in REGISTRY.kernels(runs):
        reason = kernel.reason(call)
        if reason is None:
            return kernel, reasons
        reasons.append((kernel.name, reason))
    return None, reasons


def _remark(work: Work, kernel: Kernel, call: Call) -> None:
    """What the kernel has to say of a call that it took."""
    said = kernel.remark(call)
    if said is not None:
        work.note("select", call.nodes, "", f"{kernel.name}: {said}")


def groups_of(work: Work) -> list[Group]:
    """The groups of the phase rules; forward and backward of a segment are matched together."""
    matcher = _Matcher(work, work.g.live(work.roots()))
    matcher.run()
    return matcher.groups


def fuse(work: Work) -> None:
    """Group the nodes that become one step."""
    work.groups = groups_of(work)


def select(work: Work) -> None:
    """A kernel for every node left single; then steps in topological order, by phase."""
    matcher = _Matcher(work, work.g.live(work.roots()))
    grouped = {n.id for group in work.groups for n in group.nodes}
    singles = []
    for node in work.g.nodes:
        if not matcher._free(node) or node.id in grouped:
            continue
        call = make_call(work, (node,), matcher.roots, matcher.consumers)
        kernel, reasons = choose(node.prim.name, call)
        if kernel is None:
            kernel, more = choose("*", call)
            reasons += more
        if kernel is None:
            listed = (
                "; ".join(f"{name}: {reason}" for name, reason in reasons) or "none is registered"
            )
            raise NoKernelError(
                f"{node.path or work.name}: no kernel takes {display(node)} ({listed})"
            )
        for name, reason in reasons:
            if not reason.startswith("needs "):  # a kernel for other devices is no news
                work.note(node.prim.name, (node,), name, reason)
        _remark(work, kernel, call)
        singles.append(Group((node,), kernel, None, call.reads, call.writes, call=call))
    ordered = toposort([*work.groups, *singles])
    work.forward = [s for s in ordered if s.nodes[0].phase is Phase.FORWARD]
    work.backward = [s for s in ordered if s.nodes[0].phase is not Phase.FORWARD]


def toposort(groups: list[Group]) -> list[Group]:
    """Stable topological order: by the last member's position, producers first.

    Raises:
        PlanError: groups need each other (a pass made one without asking the matcher).
    """
    home = {n.id: group for group in groups for n in group.nodes}
    done: set[int] = set()
    result: list[Group] = []

    def visit(group: Group) -> None:
        stack: list[tuple[Group, Iterator[Value]]] = [(group, iter(group.reads))]
        while stack:
            current, reads = stack[-1]
            pending = next(
                (v for v in reads if v.node in home and id(home[v.node]) not in done), None
            )
            if pending is not None:
                nxt = home[pending.node]
                if any(nxt is waiting for waiting, _ in stack):
                    steps = " and ".join(
                        " + ".join(display(n) for n in x.nodes) for x in (current, nxt)
                    )
                    raise PlanError(f"the steps {steps} need each other's results")
                stack.append((nxt, iter(nxt.reads)))
                continue
            stack.pop()
            if id(current) not in done:
                done.add(id(current))
                result.append(current)

    for group in sorted(groups, key=lambda s: s.nodes[-1].id):
        if id(group) not in done:
            visit(group)
    return result
