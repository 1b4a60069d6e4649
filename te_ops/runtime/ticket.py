"""One forward by replay of a CUDA graph, from its inputs to its backward, and its node in autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version

from te_ops.context import Frame
from te_ops.errors import PlanError
from te_ops.runtime import capture as cap
from te_ops.runtime import engines
from te_ops.runtime.checkpoint import used
from te_ops.runtime.executor import _refuse_second_order
from te_ops.runtime.state import BackwardCommit, Handed


class Owner(Protocol):
    """Whose graphs they are."""

    title: str
    copies: bool
    """Whether what leaves a graph is copied to memory of its own."""


class Ticket:
    """One forward by replay, until its backward has run or nobody can run it any more."""

    __slots__ = (
        "__weakref__", "done", "group", "owner", "pair", "parameters", "seen", "versions",
    )  # fmt: skip

    def __init__(self, owner: Owner, pair: cap.Pair, frame: Frame | None) -> None:
        self.owner, self.pair = owner, pair
        self.group = frame.group if frame is not None else None
        self.done = False
        self.seen: Handed | None = None
        # What backward reads in place (buffers behind parameters), and how often each was written when the forward ran.
        self.parameters: Sequence[torch.Tensor] = ()
        self.versions: list[int] = []

    def forward(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replay on these inputs."""
        pair = self.pair
        with pair.engine.turn(pair.device):
            outputs = self._replay(pair.forward, xs, pair.rooms, pair.outputs, pair.seen)
            if pair.seen.states:
                self.seen = pair.seen.hand(self.group)
        if pair.buffers.written:
            increment_version(tensors_of(pair.buffers.written))
        return outputs

    def backward(self, dys: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Replay on these gradients; what was observed commits with this backward."""
        pair = self.pair
        if self.done:
            raise PlanError(
                f"{self.owner.title}: a second backward through one call of a graphed module; its graph has used up "
                "what the forward saved. Call the module itself where retain_graph=True is needed"
            )
        assert pair.backward is not None
        part = pair.part(dys) if pair.reached else None
        if part is not None and part.error:
            raise PlanError(
                f"{self.owner.title}: an output has no gradient, and a backward of some outputs alone raises "
                f"({part.error}); give each a gradient, or call the module itself"
            )
        states = None if part is None else part.states
        seen = None
        with pair.engine.turn(pair.device):
            grads = self._replay(
                pair.backward, pair.given(dys), pair.rooms_back, pair.made, pair.seen_back
            )
            if pair.seen_back.states if states is None else states:
                seen = pair.seen_back.hand(self.group, states)
        self.done = True
        if seen is not None:
            BackwardCommit.observe_sheet(-1, seen)
        for ref, _ in pair.roots:
            used(ref())
        return pair.by_leaf(grads, part)

    def _replay(
        self,
        replay: engines.Replay,
        given: Sequence[torch.Tensor],
        rooms: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        seen: cap.Amaxes,
    ) -> list[torch.Tensor]:
        if seen.handed is not None:
            seen.keep()
        if not self.owner.copies:
            replay(given, ())
            return [t.detach() for t in results]
        made = list(map(_empty_like, rooms))
        replay(given, made)
        return made


_empty_like = torch.empty_like


class _GraphedNode(torch.autograd.Function):
    """A replayed forward in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, ticket: Ticket, inputs: int, *tensors: torch.Tensor) -> Any:
        outputs = ticket.forward(tensors[:inputs])
        ctx.ticket = ticket
        ticket.parameters = tensors[inputs:]
        if ticket.pair.buffers.read:
            ticket.parameters = (*ticket.parameters, *tensors_of(ticket.pair.buffers.read))
        ticket.versions = versions_of(ticket.parameters)
        ctx.set_materialize_grads(False)
        if not ticket.pair.differentiable:
            ctx.mark_non_differentiable(
                *[y for y, dy in zip(outputs, ticket.pair.dys, strict=True) if dy is None]
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        ticket: Ticket = ctx.ticket
        if versions_of(ticket.parameters) != ticket.versions:
            raise PlanError(
                f"{ticket.owner.title}: a parameter or a buffer has been changed in place since the forward, and the "
                "graph of the backward reads it where it is; step the optimizer, and write buffers, after the backward"
            )
        if not torch.is_grad_enabled():
            return (None, None, *ticket.backward(dys))
        with torch.no_grad():
            grads = tuple(ticket.backward(dys))
        return (None, None, *_refuse_second_order(ticket.owner.title, grads))


def tensors_of(slots: Sequence[cap.Slot]) -> list[torch.Tensor]:
    """The buffers that are there now."""
    return [table[name] for table, name in slots]


_version = attrgetter("_version")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each has been written in place; those of inference mode, which nobody trains, do not count."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in tensors]


# What `Function.apply` does where no functorch transform is active, without its look for a `setup_context`.
_apply: Any = super(torch.autograd.Function, _GraphedNode).apply


def call(ticket: Ticket, xs: Sequence[torch.Tensor], parameters: Sequence[Any]) -> Any:
    """The outputs of a forward by replay, with a backward where the graph has one."""
    if ticket.pair.backward is None:
        with torch.no_grad():
            return ticket.forward(xs)
    if torch._C._are_functorch_transforms_active():
        return _GraphedNode.apply(ticket, len(xs), *xs, *parameters)  # type: ignore[no-untyped-call]
    return _apply(ticket, len(xs), *xs, *parameters)
