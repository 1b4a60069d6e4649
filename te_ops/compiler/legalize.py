"""legalize: what a kernel reads must be in the layout that it asked for, and its producer must write that layout."""

from __future__ import annotations

from te_ops.compiler.work import Group, Work, display
from te_ops.errors import PlanError
from te_ops.graph import Value


def legalize(work: Work) -> None:
    """Check that all readers of a value agree with its writer about its layout.

    Raises:
        PlanError: they do not; names the value, both kernels and both layouts.
    """
    groups = [*work.forward, *work.backward]
    written: dict[Value, tuple[Group, str]] = {}
    for group in groups:
        offered = dict(group.kernel.layouts.writes)
        for i, value in enumerate(group.writes):
            written[value] = (group, offered.get(i, "plain"))
    for group in groups:
        wishes = dict(group.kernel.layouts.reads)
        for i, value in enumerate(group.reads):
            wish = wishes.get(i, "plain")
            writer, offer = written.get(value, (None, "plain"))
            if wish != offer:
                source = writer.kernel.name if writer is not None else "an input of the segment"
                made_by = display(work.g.node(value))
                raise PlanError(
                    f"{group.kernel.name} reads {made_by} in layout {wish!r}, but {source} writes {offer!r}; "
                    f"register a kernel for {made_by} that writes {wish!r}, or lower this kernel's priority"
                )
    for value in work.roots():
        writer, offer = written.get(value, (None, "plain"))
        if writer is not None and offer != "plain":
            raise PlanError(
                f"{writer.kernel.name} writes {display(work.g.node(value))}, which leaves the segment, "
                f"in layout {offer!r}; only plain tensors do: the kernel must refuse calls "
                "whose result has no reader in the segment"
            )
