"""schedule: what is saved, what runs again in backward, and in which order backward runs."""

from __future__ import annotations

from te_ops.compiler.work import Group, Work
from te_ops.graph import GRAD, LEAVES, Graph, Node, Phase, Value


def schedule(work: Work) -> None:
    """Fill `work.saved` and place the steps of recompute regions before their first reader in backward.

    A region's steps run again as they are: the same kernels on the same groups, so the same bits. What does not
    depend on the region's inputs (its quantized weights) is saved as usual.
    """
    rerun = _rerun(work)
    home = {n.id: group for group in work.forward for n in group.nodes}
    saved: dict[Value, None] = {}
    ordered: list[Group] = []
    placed: set[int] = set()

    def need(value: Value) -> None:
        node = work.g.node(value)
        if node.phase is not Phase.FORWARD or node.prim is GRAD:
            return
        group = home.get(node.id)
        if group is None or id(group) not in rerun:
            saved[value] = None
        elif id(group) not in placed:
            placed.add(id(group))
            for read in group.reads:
                need(read)
            ordered.append(group)

    for group in work.backward:
        for value in group.reads:
            need(value)
        ordered.append(group)
    for value in work.grads.values():
        need(value)
    work.backward = ordered
    work.saved = tuple(v for v in saved if not _backward_buffer(work.g.node(v)))


def _backward_buffer(node: Node) -> bool:
    """State that backward reads at its own entry (gradient scales)."""
    return node.prim.name == "buffer" and node.attrs["phase"] is not Phase.FORWARD


def _rerun(work: Work) -> set[int]:
    """Forward steps inside a recompute region that depend on the region's inputs."""
    g = work.g
    depends: set[int] = set()
    for node in g.nodes:
        if (
            node.scope
            and node.phase is Phase.FORWARD
            and node.prim not in LEAVES
            and _depends(g, node, depends)
        ):
            depends.add(node.id)
    return {id(group) for group in work.forward if all(n.id in depends for n in group.nodes)}


def _depends(g: Graph, node: Node, depends: set[int]) -> bool:
    for value in node.inputs:
        source = g.node(value)
        if source.id in depends or source.prim.name == "input":
            return True
        if source.prim not in LEAVES and source.scope != node.scope:
            return True
    return False
