"""One pair of CUDA graphs: a module's whole forward, and its backward, over memory that stays where it is.

What delayed scaling observes inside is not rolled inside: the replay hands it to the caller's region (or backward),
which commits as it does for an eager call. Amaxes leave a graph as one tensor for all of its states.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from te_ops.context import FROZEN, RECORDING, Observed, Region, current, observing_into
from te_ops.errors import Error, PlanError
from te_ops.op import Op
from te_ops.runtime import engines
from te_ops.runtime.checkpoint import recorded
from te_ops.runtime.frozen import FrozenWeights
from te_ops.runtime.state import DelayedState, Handed, Sheet, by_state

LOCK = threading.RLock()
"""One recording at a time in a process."""


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Within, this context rehearses or records; copies of weights that calls share are neither taken nor made."""
    tokens = RECORDING.set(True), FROZEN.set(None)
    try:
        yield
    finally:
        RECORDING.reset(tokens[0])
        FROZEN.reset(tokens[1])


class Amaxes:
    """What one phase observes: states, and a tensor with the amaxes of all of them.

    A replay lends the tensor to a commit, which mostly comes before the next replay: that copies it where it did not.
    """

    def __init__(
        self,
        states: tuple[DelayedState, ...] = (),
        used: Sequence[tuple[Any, float]] = (),
        amaxes: torch.Tensor | None = None,
    ) -> None:
        """`used`: the recipe and the format's maximum of each state."""
        self.states, self.used, self.amaxes = states, used, amaxes
        self.handed: weakref.ref[Handed] | None = None  # by the last replay
        self._sheets: dict[Any, Sheet] = {}  # by which of the states were seen

    @staticmethod
    def of(observed: Observed, room: torch.Tensor | None) -> Amaxes:
        """The amaxes of a region, all in `room`: not in memory of the graph's, whose other replays may write there."""
        found = by_state(observed)
        if not found:
            return Amaxes()
        amaxes = [o.amax.reshape(()) for o in found.values()]
        used = [(o.config, o.fp8_max) for o in found.values()]
        out = torch.stack(amaxes, out=None if room is None else room[: len(amaxes)])
        return Amaxes(tuple(found), used, out)

    def hand(self, group: Any, only: frozenset[DelayedState] | None = None) -> Handed:
        """What the replay that has just been issued observed, in the group of the call; `only` of these states."""
        assert self.amaxes is not None
        sheet = self._sheets.get(only)
        if sheet is None or sheet.group is not group:
            sheet = self._sheets[only] = self._sheet(group, only)
        made = Handed(sheet, self.amaxes, lent=True)
        self.handed = weakref.ref(made)
        return made

    def _sheet(self, group: Any, only: frozenset[DelayedState] | None) -> Sheet:
        places = [i for i, state in enumerate(self.states) if only is None or state in only]
        states = tuple([self.states[i] for i in places])
        used = [self.used[i] for i in places]
        return Sheet(states, used, tuple([4 * i for i in places]), group)

    def keep(self) -> None:
        """Before a replay: what was handed over and waits for its commit still gets a copy."""
        waiting = None if self.handed is None else self.handed()
        if waiting is not None:
            waiting.keep()
        self.handed = None


Root = tuple[weakref.ref[Op], list[DelayedState]]
"""An op that was called in a recording, and the states that it read."""


class Reached(NamedTuple):
    """Where gradients of outputs arrive: at which inputs and parameters (by place), and in which states.

    Or what a backward of them alone raises: that of somebody's function may need all.
    """

    leaves: frozenset[int] = frozenset()
    states: frozenset[DelayedState] = frozenset()
    error: str = ""


Slot = tuple[dict[str, Any], str]
"""A module's table of buffers, and a name in it."""


class Buffers(NamedTuple):
    """Those whose version counters count: a backward reads them where they are, or a forward writes them."""

    read: tuple[Slot, ...] = ()
    written: tuple[Slot, ...] = ()


@dataclass(eq=False, repr=False)
class Pair:
    """A captured forward and, where gradients are wanted, the backward of it."""

    engine: engines.Engine
    device: torch.device
    outputs: list[torch.Tensor]
    tree: Any  # how the outputs form the module's result
    forward: engines.Replay
    seen: Amaxes
    groups: tuple[Any, ...]
    roots: list[Root]
    reads: list[tuple[DelayedState, Any]]  # scales that were read from the buffer, and their maker
    backward: engines.Replay | None = None
    dys: list[torch.Tensor | None] = field(default_factory=list)  # by output
    grads: list[torch.Tensor | None] = field(default_factory=list)  # by input, then parameter
    seen_back: Amaxes = field(default_factory=Amaxes)
    copies: FrozenWeights | None = None  # of weights, that it reads or makes
    reached: tuple[Reached, ...] = ()  # by output, where several have gradients
    buffers: Buffers = field(default_factory=Buffers)

    def __post_init__(self) -> None:
        self.parts: dict[tuple[bool, ...], Reached] = {}  # by which outputs' gradients are there
        self.bare = self.tree == _pytree.tree_structure(0)  # the result is one tensor
        self.tables = [state.__dict__ for state, _ in self.reads]  # not through nn.Module's look-up
        self.makers = [maker for _, maker in self.reads]
        self.made = [g for g in self.grads if g is not None]
        self.rooms = list(map(engines.room_for, self.outputs))
        self.rooms_back = list(map(engines.room_for, self.made))
        self.differentiable = None not in map(_kind_of, self.dys)  # every output

    def given(self, dys: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
        """What the backward reads, given the gradients of the outputs: zeros for one that is not there."""
        if self.differentiable and None not in map(_kind_of, dys):
            return dys  # type: ignore[return-value]
        found = []
        for static, dy in zip(self.dys, dys, strict=True):
            if static is not None:
                found.append(static.zero_() if dy is None else dy)
        return found

    def part(self, dys: Sequence[torch.Tensor | None]) -> Reached | None:
        """What these gradients of the outputs reach, None if none of them is missing."""
        given = tuple([dy is not None for dy in dys])
        if given == tuple([static is not None for static in self.dys]):
            return None
        found = self.parts.get(given)
        if found is None:
            there = [r for r, here in zip(self.reached, given, strict=True) if here]
            found = self.parts[given] = Reached(
                frozenset().union(*[r.leaves for r in there]),
                frozenset().union(*[r.states for r in there]),
                next((r.error for r in self.reached if r.error), ""),
            )
        return found

    def by_leaf(self, grads: list[torch.Tensor], part: Reached | None) -> list[torch.Tensor | None]:
        """Gradients at the places of the inputs and parameters that want one, and that were reached."""
        if part is None and len(grads) == len(self.grads):
            return grads  # type: ignore[return-value]
        found = iter(grads)
        all_places = [None if g is None else next(found) for g in self.grads]
        if part is None:
            return all_places
        return [g if i in part.leaves else None for i, g in enumerate(all_places)]

    def stale(self) -> bool:
        """Whether a scale has to be derived anew, for another recipe than made it: that is done eagerly."""
        now = list(map(_maker, self.tables))
        if now == self.makers:
            return False
        return any(m is not None and m != maker for m, maker in zip(now, self.makers, strict=True))


_maker = itemgetter("maker")


def _kind_of(x: Any) -> Any:
    return None if x is None else type(x)


@dataclass(eq=False, repr=False)
class Task:
    """What to capture: a call on static inputs, and the parameters that want gradients."""

    call: Callable[[list[torch.Tensor]], Any]
    module: nn.Module
    inputs: list[torch.Tensor]
    params: list[torch.Tensor]
    grad: bool
    copies: FrozenWeights | None = None  # of weights, shared with other recordings
    first: bool = False  # this one makes the copies
    twins: list[torch.Tensor | None] = field(
        default_factory=list
    )  # of the parameters, see `twinned`


class _Pass:
    """Forward and backward bodies over shared variables: the recorded backward is that of the recorded forward."""

    def __init__(self, task: Task, rooms: Sequence[torch.Tensor | None] = (None, None)) -> None:
        """`rooms`: for the amaxes of forward and backward, None where any memory will do."""
        self.task, self.rooms = task, rooms
        self.region = Region()
        self.outputs: list[torch.Tensor] = []
        self.tree: Any = None
        self.dys: list[torch.Tensor | None] = []
        self.grads: list[torch.Tensor | None] = []
        self.seen, self.seen_back = Amaxes(), Amaxes()

    def forward(self) -> list[torch.Tensor]:
        self.region.observed, self.region.gradients = Observed(), Observed()
        task = self.task
        if task.copies is not None and task.first:
            task.copies.end()
        token = FROZEN.set(task.copies)
        try:
            with observing_into(self.region):
                result = task.call(task.inputs)
        finally:
            FROZEN.reset(token)
        leaves, self.tree = _pytree.tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise PlanError(
                    f"{type(self.task.module).__name__} returned a {type(leaf).__name__}; a graphed module returns "
                    "tensors only, since a replay runs no Python"
                )
        self.outputs = [
            leaf if not any(leaf is x for x in self.task.inputs) else leaf.view_as(leaf)
            for leaf in leaves
        ]
        self.seen = Amaxes.of(self.region.observed, self.rooms[0])
        return self.outputs

    @property
    def differentiable(self) -> bool:
        return self.task.grad and any(y.requires_grad for y in self.outputs)

    def prepare_backward(self, only: int | None = None) -> None:
        """Zeros as the gradients of the outputs (of one output)."""
        self.dys = [
            torch.zeros_like(y, memory_format=torch.contiguous_format)
            if y.requires_grad and only in (None, i)
            else None
            for i, y in enumerate(self.outputs)
        ]

    def backward(self) -> list[torch.Tensor]:
        task = self.task
        leaves = [*task.inputs, *task.params]
        sources = [t for t in (*leaves, *task.twins) if t is not None and t.requires_grad]
        pairs = [(y, dy) for y, dy in zip(self.outputs, self.dys, strict=True) if dy is not None]
        self.region.gradients = Observed()
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], sources, [dy for _, dy in pairs], allow_unused=True
            )
        )
        self.grads = [next(found) if t.requires_grad else None for t in leaves]
        for i, twin in enumerate(task.twins, len(task.inputs)):
            mine, other = self.grads[i], None if twin is None else next(found)
            self.grads[i] = other if mine is None else mine if other is None else mine + other
        self.seen_back = Amaxes.of(self.region.gradients, self.rooms[1])
        return [g for g in self.grads if g is not None]


@contextlib.contextmanager
def twinned(task: Task) -> Iterator[Task]:
    """Within, the module holds twins of its parameters: their memory and version, but leaves of their own.

    For autograd a leaf has one node as long as any graph reaches it, on the stream where that was made: a forward of
    the caller that waits for its backward would tie its stream to the recording, and so would a rehearsal whose graph
    autograd's worker thread has not let go of yet. The inputs of the task get twins for the same reason. Nor does a
    recording run hooks on the gradients of parameters: they run when a replay's gradients arrive there. A module that
    keeps a parameter elsewhere too still gets the gradient of both.
    """
    if not task.grad:
        yield task
        return
    twins: list[torch.Tensor | None] = [_twin(p) for p in task.params]
    by_id: dict[int, Any] = {
        id(p): t for p, t in zip(task.params, twins, strict=True) if t is not None
    }
    places = [
        (m._parameters, name, p)
        for m in task.module.modules()
        for name, p in m._parameters.items()
        if id(p) in by_id
    ]
    try:
        for table, name, p in places:
            table[name] = by_id[id(p)]
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in task.inputs]
        yield replace(task, inputs=inputs, twins=twins)
    finally:
        for table, name, p in places:
            table[name] = p
        read = set() if task.copies is None else task.copies.read
        for i, twin in by_id.items():
            if id(twin) in read:
                read.remove(id(twin))
                read.add(i)


def _twin(p: torch.Tensor) -> nn.Parameter | None:
    if type(p) is not nn.Parameter or not p.requires_grad:
        return None
    made = nn.Parameter(p.detach())
    made.__dict__.update(p.__dict__)
    return made


@contextlib.contextmanager
def untouched(module: nn.Module, device: torch.device) -> Iterator[None]:
    """What runs inside leaves random numbers and the module's buffers as they were."""
    buffers = [(b, b.detach().clone()) for b in module.buffers() if not b.is_meta]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, kept in buffers:
                    sparse = buffer.layout is not torch.strided  # torch compares dense ones only
                    if sparse or not torch.equal(buffer, kept):
                        _put_back(buffer, kept)


def _put_back(buffer: torch.Tensor, kept: torch.Tensor) -> None:
    """Write the value of before; for a backward that saved the buffer then, nothing has happened."""
    if buffer.is_inference():
        buffer.copy_(kept)
        return
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(buffer):
        buffer.copy_(kept)


def _reach(task: Task, wants: Sequence[bool]) -> tuple[Reached, ...]:
    """What the gradient of each output reaches: with others missing, eager calls see and give only that."""
    if not task.grad or sum(wants) < 2:
        return ()
    found = []
    for i, wanted in enumerate(wants):
        made = _Pass(replace(task, copies=None))
        if wanted:
            made.forward()
            made.prepare_backward(only=i)
            try:
                made.backward()
            except Exception as error:  # noqa: BLE001  (of whatever function is in there)
                found.append(Reached(error=f"{type(error).__name__}: {error}"))
                continue
        leaves = [place for place, g in enumerate(made.grads) if g is not None]
        found.append(Reached(frozenset(leaves), frozenset(made.seen_back.states)))
    return tuple(found)


def _buffers_of(module: nn.Module) -> list[Slot]:
    return [
        (m._buffers, name)
        for m in module.modules()
        if not isinstance(m, DelayedState)
        for name, b in m._buffers.items()
        if b is not None and b.layout is torch.strided and not b.is_inference()
    ]


def _watch_buffers(task: Task) -> Buffers:
    """One more forward: which buffers it saves for backward, and which it writes in place."""
    slots = _buffers_of(task.module)
    if not slots:
        return Buffers()
    saved: set[int] = set()

    def pack(x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            saved.add(x.untyped_storage()._cdata)
        return x

    before = [table[name]._version for table, name in slots]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _Pass(replace(task, copies=None)).forward()
    read, written = [], []
    for (table, name), version in zip(slots, before, strict=True):
        if table[name].untyped_storage()._cdata in saved:
            read.append((table, name))
        if table[name]._version != version:
            written.append((table, name))
    return Buffers(tuple(read), tuple(written))


class Rehearsed(NamedTuple):
    """What passes over a task have shown: scales that were read, each with the maker that it needs to be read from its
    buffer, how many states forward and backward observe, and which outputs have gradients."""

    reads: list[tuple[DelayedState, Any]]
    observed: tuple[int, int]
    wants: tuple[bool, ...]


def rehearse(task: Task, times: int) -> Rehearsed:
    """Run forward and backward as eager calls that commit nothing: plans, kernels and libraries are ready after it.

    Raises:
        Error: what the calls raise; PlanError for what no graph can hold.
    """
    reads: dict[Any, None] = {}
    observed = 0, 0
    wants: tuple[bool, ...] = ()
    for _ in range(times):
        made = _Pass(replace(task, copies=None))
        saved, DelayedState.reads = DelayedState.reads, []
        try:
            with _located(task.module):
                made.forward()
                if made.differentiable:
                    made.prepare_backward()
                    made.backward()
            found = DelayedState.reads or []
        finally:
            DelayedState.reads = saved
        reads |= dict.fromkeys((s, (config, fp8_max)) for s, config, fp8_max in found)
        observed = len(made.seen.states), len(made.seen_back.states)
        wants = tuple([y.requires_grad for y in made.outputs])
        _refuse_own_regions(task.module, made.region)
    return Rehearsed(list(reads), observed, wants)


def _refuse_own_regions(module: nn.Module, region: Region) -> None:
    for path, op in module.named_modules():
        last = recorded(op) if isinstance(op, Op) else None
        if last is None or last.frame is None or not last.states:
            continue
        if last.frame.region is not region and current() is None:
            raise PlanError(
                f"{path or type(op).__name__}: the module enters te.autocast inside, whose exit rolls delayed "
                "scaling's state within the graph; put the autocast around the call of the graphed module"
            )


def capture(
    task: Task, engine: engines.Engine, pool: Any, device: torch.device, warmup: int
) -> Pair | None:
    """Rehearse, then record both graphs; None if a scale has to be derived anew first (run eagerly then).

    Raises:
        PlanError: the module does what no graph can hold; it says where.
    """
    foreign = any(not isinstance(m, Op) and _own(m) for m in task.module.modules())
    with LOCK, marked(), untouched(task.module, device):
        with twinned(task) as twin, engine.apart(device):
            versions = [x._version for x in twin.inputs]
            reads, observed, wants = rehearse(twin, warmup)
            if versions != [x._version for x in twin.inputs]:
                raise PlanError(
                    f"{type(task.module).__name__} writes an input in place; a replay would write the graph's copy of "
                    "it instead. Return the new value, or leave the module eager"
                )
            if foreign:
                with engine.strict():  # once more, since modules of others may wait for the device
                    rehearse(twin, 1)
            reached, buffers = _reach(twin, wants), _watch_buffers(twin)
        if any(s.maker is not None and s.maker != maker for s, maker in reads):
            return None
        with _no_gc(), _located(task.module), twinned(task) as twin:
            made = _Pass(twin, [_room(count, device) for count in observed])
            _, forward = engine.record(made.forward, pool, device, task.inputs)
            backward = None
            if made.differentiable:
                made.prepare_backward()
                dys = [dy for dy in made.dys if dy is not None]
                _, backward = engine.record(made.backward, pool, device, dys)
    pair = Pair(
        engine=engine,
        device=device,
        outputs=[y.detach() for y in made.outputs],
        tree=made.tree,
        forward=forward,
        seen=made.seen,
        groups=tuple(made.region.groups),
        roots=_roots(task.module, made.region),
        reads=reads,
        backward=backward,
        dys=made.dys,
        grads=made.grads,
        seen_back=made.seen_back,
        copies=task.copies,
        reached=reached,
        buffers=buffers,
    )
    made.outputs = []
    return pair


def _room(count: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(count, dtype=torch.float32, device=device)


def _own(module: nn.Module) -> bool:
    """Whether a module has a forward of its own (containers for state have none)."""
    return type(module).forward is not nn.Module.forward


def _roots(module: nn.Module, region: Region) -> list[Root]:
    """Ops that were called in the recording; a recompute in a later backward asks for what they ran under."""
    found = []
    for op in module.modules():
        last = recorded(op) if isinstance(op, Op) else None
        if last is not None and last.frame is not None and last.frame.region is region:
            assert isinstance(op, Op)
            found.append((weakref.ref(op), list(last.states)))
    return found


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """A collection inside a recording could free what may not be freed there."""
    gc.collect()
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@contextlib.contextmanager
def _located(module: nn.Module) -> Iterator[None]:
    """An error of something that no graph can hold becomes a PlanError that says in which module it happened."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:
        where = _where(module, error)
        raise PlanError(
            f"{where}: it cannot be part of a CUDA graph ({str(error).splitlines()[0]}); what waits for the device "
            "or reads values on the host has to stay outside of the graphed module"
        ) from error


def _where(module: nn.Module, error: BaseException) -> str:
    """The innermost module of this tree in the error's traceback."""
    names = {id(m): path for path, m in module.named_modules()}
    found: Any = module
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if id(owner) in names:
            found = owner
        trace = trace.tb_next
    path = names[id(found)]
    title = type(module).__name__
    return f"{title}.{path} ({type(found).__name__})" if path else title


def static_inputs(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory that a graph reads its inputs from, with the values of these."""
    with torch.inference_mode(False), torch.no_grad():
        made = [torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x) for x in xs]
    return [s.requires_grad_(x.requires_grad) for s, x in zip(made, xs, strict=True)]
