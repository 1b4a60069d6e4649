"""One forward by replay of a CUDA graph, from its inputs to its backward, and its node in autograd's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from te_ops.context import Frame
from te_ops.errors import PlanError
from te_ops.runtime import capture as cap
from te_ops.runtime import engines
from te_ops.runtime.checkpoint import used
from te_ops.runtime.executor import _refuse_second_order
from te_ops.runtime.state import BackwardCommit, Sheet


class Owner(Protocol):
    """Whose graphs they are."""

    title: str
    copies: bool
    """Whether what leaves a graph is copied to memory of its own."""


class Ticket:
    """One forward by replay, until its backward has run or nobody can run it any more."""

    def __init__(
        self, owner: Owner, engine: engines.Engine, pair: cap.Pair, frame: Frame | None
    ) -> None:
        self.owner, self.engine, self.pair = owner, engine, pair
        self.group = frame.group if frame is not None else None
        self.done = False
        self.seen: tuple[Sheet, torch.Tensor] | None = None

    def forward(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy in, replay, copy out."""
        pair = self.pair
        with self.engine.turn(pair.inputs[0].device):
            _copy(pair.inputs, xs)
            pair.forward()
            if pair.seen.states:
                self.seen = pair.seen.fresh(self.group)
            return self._out(pair.outputs)

    def backward(self, dys: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Copy the gradients in, replay, and copy the results out; what was observed commits with this backward."""
        pair = self.pair
        if self.done:
            raise PlanError(
                f"{self.owner.title}: a second backward through one call of a graphed module; its graph has used up "
                "what the forward saved. Call the module itself where retain_graph=True is needed"
            )
        assert pair.backward is not None
        into, given = [], []
        for static, dy in zip(pair.dys, dys, strict=True):
            if static is not None:
                into.append(static)
                given.append(dy)
        seen = None
        with self.engine.turn(pair.inputs[0].device):
            if None in map(_kind_of, given):
                for static in (s for s, dy in zip(into, given, strict=True) if dy is None):
                    static.zero_()
                into = [s for s, dy in zip(into, given, strict=True) if dy is not None]
                given = [dy for dy in given if dy is not None]
            _copy(into, given)
            pair.backward()
            found = iter(self._out([g for g in pair.grads if g is not None]))
            grads = [None if g is None else next(found) for g in pair.grads]
            if pair.seen_back.states:
                seen = pair.seen_back.fresh(self.group)
        self.done = True
        if seen is not None:
            BackwardCommit.observe_sheet(-1, *seen)
        for ref, _ in pair.roots:
            used(ref())
        return grads

    def _out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self.owner.copies:
            return [t.detach() for t in tensors]
        if len(tensors) == 1:
            return [tensors[0].clone(memory_format=torch.contiguous_format)]
        made = [torch.empty_like(t) for t in tensors]
        _copy(made, tensors)
        return made


def _kind_of(x: Any) -> Any:
    return None if x is None else type(x)


def _copy(into: Sequence[torch.Tensor], values: Sequence[Any]) -> None:
    """Copy all of them, in one launch where torch has one. Nothing here is for autograd to see."""
    if len(into) == 1:
        if not _there(into[0], values[0]):
            into[0].copy_(values[0])
    elif into:
        torch._foreach_copy_(list(into), list(values))


def _there(into: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the value lies where it is to be copied: the caller fills the graph's own memory."""
    return (
        into.data_ptr() == value.data_ptr()
        and into.dtype is value.dtype
        and into.stride() == value.stride()
    )


class _GraphedNode(torch.autograd.Function):
    """A replayed forward in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, ticket: Ticket, inputs: int, *tensors: torch.Tensor) -> Any:
        outputs = ticket.forward(tensors[:inputs])
        ctx.ticket = ticket
        # Backward reads the parameters in place: torch checks their versions.
        ctx.save_for_backward(*tensors[inputs:])
        ctx.set_materialize_grads(False)
        dys = ticket.pair.dys
        if None in map(_kind_of, dys):
            ctx.mark_non_differentiable(
                *[y for y, dy in zip(outputs, dys, strict=True) if dy is None]
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        ticket: Ticket = ctx.ticket
        try:
            ctx.saved_tensors  # noqa: B018
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise PlanError(
                f"{ticket.owner.title}: a parameter has been changed in place since the forward, and the graph of "
                f"the backward reads it where it is. {error}"
            ) from error
        if not torch.is_grad_enabled():
            return (None, None, *ticket.backward(dys))
        with torch.no_grad():
            grads = tuple(ticket.backward(dys))
        return (None, None, *_refuse_second_order(ticket.owner.title, grads))


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
