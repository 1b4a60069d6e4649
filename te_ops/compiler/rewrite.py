"""Rewriter: copies a graph node by node into a new one; each pass overrides what happens to some nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from te_ops.graph import INPUT, LEAVES, Graph, Node, Value


@dataclass
class Rewriter:
    """The old graph, the new one, and which new value stands for which old one."""

    old: Graph
    new: Graph = field(init=False)
    map: dict[Value, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.new = Graph(self.old._resolver, autocast_dtype=self.old.autocast_dtype)
        self.new._streams = self.old._streams
        self.new._scopes = self.old._scopes

    def copy(self, node: Node, inputs: tuple[Value, ...] | None = None) -> tuple[Value, ...]:
        """Copy one node, reading the mapped inputs (or those given)."""
        specs = self.old.specs[node.id]
        if node.prim in LEAVES:
            with self.new.position(node):
                if node.prim is INPUT:
                    outs: tuple[Value, ...] = (self.new.input(node.attrs["index"], specs[0]),)
                else:
                    outs = (self.new.leaf(node.prim, specs[0], **node.attrs),)
        else:
            mapped = tuple([self.map[v] for v in node.inputs]) if inputs is None else inputs
            outs = self.new.readd(node, mapped, specs)
        for i, out in enumerate(outs):
            self.map[Value(node.id, i)] = out
        return outs

    def finish(self) -> Graph:
        """Carry the updates over and return the new graph."""
        for buffer, value, rule in self.old.updates:
            if value in self.map:
                if buffer not in self.map:  # written, but read by nobody
                    self.copy(self.old.node(buffer))
                self.new.updates.append((self.map[buffer], self.map[value], rule))
        return self.new
