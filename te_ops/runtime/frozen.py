"""`te.weights_frozen()`: copies of quantized weights that several calls share.

The caller promises that no weight changes; version counters, addresses and specs are checked and prove nothing, since
fused optimizers, `.data` and raw pointers write without moving them. Outside of a scope no copy outlives its call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_ops.config import flag
from te_ops.context import FROZEN, RECORDING, join_path
from te_ops.errors import PlanError
from te_ops.op import Op, Runtime
from te_ops.quantizers import QuantizedTensor


class Promise(NamedTuple):
    """What can be checked of a parameter: its address, version (None if it has none), shape, dtype and bytes' sum."""

    address: Any
    version: int | None
    shape: torch.Size
    dtype: torch.dtype
    checksum: int | None


class _Copies(NamedTuple):
    values: tuple[Any, ...]
    promises: tuple[Promise, ...]


class FrozenWeights:
    """The copies of one scope, by the op that was called and what its plan makes of its parameters.

    Those of a graph's recording are not watched: the graph reads them where they are, and its caller checks.
    """

    def __init__(self, *, watched: bool = True) -> None:
        self.copies: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Copies]] = (
            weakref.WeakKeyDictionary()
        )
        self.period = 0  # moves when an optimizer's step ends the sharing so far
        self.watched = watched
        self.read: set[int] = set()  # ids of the parameters that were copied
        if watched:
            _watch(self)

    def end(self) -> None:
        """Forget the copies: the next call makes new ones. What a backward still needs, it keeps."""
        self.copies.clear()
        self.period += 1

    def run(self, runner: Any, op: nn.Module, slots: list[Any]) -> None:
        """Run a segment's forward steps with the copies of its prologue, made now if there are none.

        Raises:
            PlanError: a parameter is not what it was when its copy was made.
        """
        bound = runner.forward
        prologue = bound.prologue
        tensors = runner.frozen_tensors(op)
        table = self.copies.setdefault(op, {})
        found = table.get(prologue.key)
        if found is None:
            _run_prologue(bound, slots, runner.title)
            self.read.update(map(id, tensors))
            promises = tuple(map(promise_of, tensors)) if self.watched else ()
            table[prologue.key] = _Copies(tuple(slots[i] for i in prologue.results), promises)
        else:
            if self.watched:
                paths = [join_path(*param) for param in prologue.params]
                check(found.promises, tensors, paths, runner.title)
            for slot, value in zip(prologue.results, found.values, strict=True):
                slots[slot] = value
        bound.run(slots, runner.title, only=prologue.rest)


def _run_prologue(bound: Any, slots: list[Any], title: str) -> None:
    """Fill the results and the amaxes of the prologue. Its steps drop slots that others read: they get a list apart."""
    prologue = bound.prologue
    apart = list(slots)
    if torch.is_inference_mode_enabled():  # a training call may save the copies for its backward
        with torch.inference_mode(False), torch.no_grad():
            bound.run(apart, title, only=prologue.steps)
    else:
        bound.run(apart, title, only=prologue.steps)
    for slot in (*prologue.results, *prologue.observed):
        slots[slot] = apart[slot]


def promise_of(tensor: torch.Tensor) -> Promise:
    """What a parameter is now, as far as it can be told (`TE_OPS_CHECK_FROZEN=1`: by its bytes, which waits)."""
    parts = tensors_of(tensor)
    version = None if any(t.is_inference() for t in parts) else sum(t._version for t in parts)
    address = tuple(t.data_ptr() for t in parts)
    checksum = _checksum(parts) if flag("CHECK_FROZEN", False) else None
    return Promise(address, version, tensor.shape, tensor.dtype, checksum)


def tensors_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors behind a parameter: itself, or the parts of a quantized one."""
    if not isinstance(tensor, QuantizedTensor):
        return (tensor,)
    records = (tensor.rowwise, tensor.columnwise)
    return tuple(t for r in records if r is not None for t in r.tensors())


def _checksum(parts: Sequence[torch.Tensor]) -> int:
    total = 0
    for part in parts:
        data = part.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
        places = torch.arange(1, data.numel() + 1, device=data.device) % 65521
        total = 31 * total + int((data * places).sum())
    return total


def check(
    promises: Sequence[Promise], tensors: Sequence[torch.Tensor], paths: Sequence[str], title: str
) -> None:
    """Raise a PlanError that names the first parameter that is not as it was promised to stay."""
    for then, tensor, path in zip(promises, tensors, paths, strict=True):
        now = promise_of(tensor)
        if now != then:
            changed = [f for f, a, b in zip(Promise._fields, then, now, strict=True) if a != b]
            raise PlanError(
                f"{title}.{path} has changed inside te.weights_frozen() (its "
                f"{' and '.join(changed)}), after a quantized copy of it was made; leave the scope before weights "
                "are written"
            )


# -- scopes


_ALIVE: weakref.WeakSet[FrozenWeights] = weakref.WeakSet()
_HOOKS: list[Any] = []


def _watch(scope: FrozenWeights) -> None:
    _ALIVE.add(scope)
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_stepped))


def _stepped(*_: Any) -> None:
    """An optimizer has written weights: whatever was shared is no longer."""
    end_all()


def end_all() -> None:
    """Forget the copies of every scope; calls inside make new ones."""
    for scope in list(_ALIVE):
        scope.end()


class weights_frozen:  # noqa: N801  (a context manager, like autocast)
    """Within, each weight is quantized once and the copy serves every call: for gradient accumulation.

    A promise by the caller that no weight changes inside. What can be checked is (address, version counter, shape,
    dtype; with `TE_OPS_CHECK_FROZEN=1` a checksum), at each call that takes a copy. A step of a torch optimizer inside
    ends the sharing so far. Under delayed scaling the weight's amax is observed once, when its copy is made.
    Scopes nest: the outer one's copies are used.
    """

    def __init__(self) -> None:
        self._tokens: list[Any] = []

    def __enter__(self) -> weights_frozen:
        scope = FROZEN.get()
        self._tokens.append(FROZEN.set(FrozenWeights() if scope is None else scope))
        return self

    def __exit__(self, *_: Any) -> None:
        token = self._tokens.pop()
        scope = FROZEN.get()
        FROZEN.reset(token)
        if FROZEN.get() is None and scope is not None:
            scope.end()


_MICROBATCHES = "_te_frozen"


@contextlib.contextmanager
def microbatch(op: Op, first: bool) -> Iterator[None]:
    """The scope of a call with `is_first_microbatch=`: True opens a new one of the op's own, False uses it.

    Raises:
        PlanError: False without a call with True before; inside a recording, which no flag of a later call changes.
    """
    if RECORDING.get():
        raise PlanError(
            f"{type(op).__name__}: is_first_microbatch= inside of a graphed module; give it to the graphed module, or "
            "call that in te.weights_frozen()"
        )
    if not isinstance(first, bool):
        raise PlanError(
            f"{type(op).__name__}: is_first_microbatch must be True, False or None, got {first!r}"
        )
    fields = op.__dict__
    if first:
        scope = fields[_MICROBATCHES] = FrozenWeights()
    elif _MICROBATCHES in fields:
        scope = fields[_MICROBATCHES]
    else:
        raise PlanError(
            f"{type(op).__name__}: is_first_microbatch=False comes without a call with True before it"
        )
    token = FROZEN.set(scope)
    try:
        yield
    finally:
        FROZEN.reset(token)


def run_microbatch(op: Op, xs: Sequence[Any], first: bool) -> Any:
    """A call with `is_first_microbatch=`; raises what `microbatch` and `weights_frozen` refuse."""
    assert Runtime.run is not None
    with microbatch(op, first):
        return Runtime.run(op, xs)
