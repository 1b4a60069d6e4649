"""`te.make_graphed` and `Sequential(cuda_graph=True)`: calls that replay CUDA graphs, one pair for each signature.

A call looks up its signature, copies the inputs to where the graph reads them, replays, and copies what comes out. A
forward that waits for its backward owns its lane, that is the memory of its graphs: another call takes another lane,
and where there is none left, runs eagerly. Numbers are those of eager calls in every case.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from te_ops.compiler.passes import passes
from te_ops.context import FRAME, FROZEN, PLACE, RECORDING, Key, Region
from te_ops.errors import PlanError
from te_ops.op import Op
from te_ops.registry import REGISTRY
from te_ops.runtime import capture as cap
from te_ops.runtime import engines
from te_ops.runtime.alike import Alike, alike, form
from te_ops.runtime.cache import run_eagerly
from te_ops.runtime.checkpoint import REPLAY, record
from te_ops.runtime.frozen import FrozenWeights, Promise, check, microbatch, promise_of
from te_ops.runtime.state import observe_sheet
from te_ops.runtime.ticket import Ticket, call
from te_ops.runtime.watched import Watched


@dataclass(frozen=True)
class Options:
    """What `make_graphed` takes."""

    in_flight: int = 1
    limit: int = 8
    copies: bool = True
    warmup: int = 3

    def __post_init__(self) -> None:
        for name in ("in_flight", "limit", "warmup"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"make_graphed: {name} must be a positive number, got {value!r}")
        if not isinstance(self.copies, bool):
            raise PlanError(f"make_graphed: copies must be True or False, got {self.copies!r}")


# -- lanes


@dataclass(eq=False, repr=False)
class _Share:
    """Copies of weights between the graph that makes them and the one that reads them, and whose they are now."""

    copies: FrozenWeights
    owner: weakref.ref[FrozenWeights] | None = None  # the scope in which they were made last
    period: int = 0
    promises: tuple[Promise, ...] = ()

    def serves(self, scope: FrozenWeights) -> bool:
        """Whether the copies that lie there were made in this scope."""
        return self.owner is not None and self.owner() is scope and self.period == scope.period


@dataclass(eq=False, repr=False)
class _Lane:
    """Graphs over one pool of memory: one of them at a time may wait for its backward."""

    pool: Any
    pairs: OrderedDict[Any, cap.Pair] = field(default_factory=OrderedDict)
    shares: dict[Any, _Share] = field(default_factory=dict)  # by signature
    ticket: weakref.ref[Ticket] | None = None

    @property
    def busy(self) -> bool:
        """Whether a forward waits for its backward."""
        ticket = self.ticket() if self.ticket is not None else None
        return ticket is not None and not ticket.done


class _Found(NamedTuple):
    """What a call replays."""

    key: Key
    lane: _Lane
    pair: cap.Pair
    watched: Watched
    share: _Share | None
    part: (
        str | None
    )  # what it does with copies of weights: "makes" or "reads" them, None outside of a scope

    def promise(self) -> None:
        """The copies are those of the scope in force from now on."""
        scope, share = FROZEN.get(), self.share
        assert scope is not None
        assert share is not None
        share.owner, share.period = weakref.ref(scope), scope.period
        share.promises = tuple(promise_of(t) for t, _ in self._copied())

    def check(self, title: str) -> None:
        """Raise a PlanError if a weight has changed since its copy was made."""
        assert self.share is not None
        copied = self._copied()
        check(self.share.promises, [t for t, _ in copied], [p for _, p in copied], title)

    def _copied(self) -> list[tuple[torch.Tensor, str]]:
        assert self.share is not None
        read = self.share.copies.read
        tensors = [table[name] for table, name in self.watched.params]
        return [
            (t, path) for t, path in zip(tensors, self.watched.paths, strict=True) if id(t) in read
        ]


# -- all graphs of one module


class Graphs:
    """The graphs of one module, its lanes, and how often a signature was met before it was captured."""

    def __init__(
        self,
        title: str,
        call: Callable[..., Any],
        options: Options,
        root_hooks: bool,
    ) -> None:
        self.title, self.call, self.options, self.root_hooks = title, call, options, root_hooks
        self.copies = options.copies
        self.lanes: dict[torch.device, list[_Lane]] = {}
        self.met: OrderedDict[Any, int] = OrderedDict()
        self.watched: Watched | None = None
        # What the key of the last call was made of, and the comparison with its tensors.
        self.values: list[Any] = []
        self.forms: list[Any] = []
        self.alike: Alike = alike([])
        self.last = Key(())  # it hashes once
        self.recent: _Found | None = None  # of the last call, outside of a scope of frozen weights
        self.lock = threading.RLock()
        self.captured = 0
        self.eager = 0  # calls that are running eagerly: a capture exchanges what they read
        _ALIVE.add(self)

    def engine(self, device: torch.device) -> engines.Engine:
        """The engine of a device that has one."""
        return engines.ENGINES[device.type]

    def free(self) -> None:
        """Drop the lanes in which no forward waits; the next calls capture again."""
        with self.lock:
            self.recent = None
            for lanes in self.lanes.values():
                lanes[:] = [lane for lane in lanes if lane.busy]

    def run(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call: by replay if it can be, else eagerly."""
        with self.lock:
            xs, found = self.prepare(module, args, kwargs, after=2)
            if found is not None:
                return self._replay(found, xs)
            self.eager += 1
        try:
            return self.call(module, *args, **kwargs)
        finally:
            with self.lock:
                self.eager -= 1

    def prepare(
        self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], after: int
    ) -> tuple[Sequence[torch.Tensor], _Found | None]:
        """The tensors of a call, and what to replay on them: None where it runs eagerly.

        A signature is captured when it is met for the `after`-th time.
        """
        leaves, tree = _flat(args, kwargs)
        xs = leaves if tree is None else [x for x in leaves if isinstance(x, torch.Tensor)]
        if not xs:
            return xs, None
        engine = engines.ENGINES.get(xs[0].device.type)
        if engine is None or _eager(engine) or (tree is not None and not all(map(_dense, xs))):
            return xs, None
        watched = self.watched
        if watched is None or watched.outdated():
            watched = self.watched = Watched(module, self.root_hooks)
        hook = watched.hooked()
        if hook is not None:
            raise PlanError(f"{self.title}: {hook}, which the replay of a CUDA graph would not run")
        key, found = self._key(module, leaves, xs, tree, watched), self.recent
        scope: FrozenWeights | None = FROZEN.get()
        known = found is not None and found.key is key and found.watched is watched
        if not known or scope is not None or found.lane.busy:  # type: ignore[union-attr]
            lane = self._lane(xs[0].device)
            if lane is None:
                return xs, None
            found = self._captured(module, leaves, tree, lane, after)
            self.recent = found if scope is None else None
        return xs, None if found is None or found.pair.stale() else found

    def _captured(
        self,
        module: nn.Module,
        leaves: Sequence[Any],
        tree: Any,
        lane: _Lane,
        after: int,
    ) -> _Found | None:
        """The pair of the signature that is last, captured if it is due."""
        key, watched = self.last, self.watched
        assert watched is not None
        scope: FrozenWeights | None = FROZEN.get()
        share = lane.shares.get(key) if scope is not None else None
        reads = share is not None and scope is not None and share.serves(scope)
        part = None if scope is None else "reads" if reads else "makes"
        pair = lane.pairs.get((key, part))
        if pair is not None and share is not None and pair.copies is not share.copies:
            pair = None  # of copies that are gone
        if pair is not None:
            lane.pairs.move_to_end((key, part))
        else:
            if not self._due((key, part), after) or self.eager:
                return None
            if scope is not None and not reads:
                share = _Share(FrozenWeights(watched=False))
            pair = self._capture(module, leaves, tree, lane, share, first=not reads)
            if pair is None:
                return None
            watched = self.watched = Watched(module, self.root_hooks)  # with states made meanwhile
            xs = [x for x in leaves if isinstance(x, torch.Tensor)]
            key = self._key(module, leaves, xs, tree, watched)
            self._remember(lane, key, part, pair, share)
        return _Found(key, lane, pair, watched, share, part)

    def _remember(
        self, lane: _Lane, key: Any, part: str | None, pair: cap.Pair, share: _Share | None
    ) -> None:
        lane.pairs[key, part] = pair
        if share is not None:
            lane.shares[key] = share
        while len(lane.pairs) > self.options.limit:
            (old, gone), _ = lane.pairs.popitem(last=False)
            if gone == "makes":
                lane.shares.pop(old, None)

    def _key(
        self,
        module: nn.Module,
        leaves: Sequence[Any],
        xs: Sequence[torch.Tensor],
        tree: Any,
        watched: Watched,
    ) -> Key:
        frame, held = FRAME.get(), watched.held()
        kind = xs[0].device.type
        value: list[Any] = [
            None if frame is None else frame.key,
            None if frame is None else PLACE.get(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            torch._C._get_deterministic_algorithms(),
            REGISTRY.version,
            passes.version,
            tree,
            len(xs),
            *watched.now(module, held),
        ]
        if tree is not None:
            value += [_value(x) for x in leaves if not isinstance(x, torch.Tensor)]
        same = value == self.values
        if same and self.alike(*xs, *held):
            return self.last
        forms = [*map(_values, xs), *map(form, held)]
        if not same or forms != self.forms:
            self.values, self.forms = value, forms
            self.last = Key((*value, *forms))
        self.alike = alike([*xs, *held])
        return self.last

    def _lane(self, device: torch.device) -> _Lane | None:
        """A lane in which no forward waits, None if there is none and no more are allowed."""
        lanes = self.lanes.setdefault(device, [])
        for lane in lanes:
            if not lane.busy:
                return lane
        if len(lanes) >= self.options.in_flight:
            return None
        made = _Lane(self.engine(device).pool(device))
        lanes.append(made)
        return made

    def _due(self, key: Any, after: int) -> bool:
        count = self.met[key] = self.met.pop(key, 0) + 1
        while len(self.met) > 8 * self.options.limit:
            self.met.popitem(last=False)
        return count >= after

    def _capture(
        self,
        module: nn.Module,
        leaves: Sequence[Any],
        tree: Any,
        lane: _Lane,
        share: _Share | None,
        *,
        first: bool,
    ) -> Any:
        xs = [x for x in leaves if isinstance(x, torch.Tensor)]
        device = xs[0].device
        self._refuse(module, xs)
        fixed = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

        def call(inputs: list[torch.Tensor]) -> Any:
            items = list(fixed)
            for place, value in zip(places, inputs, strict=True):
                items[place] = value
            args, kwargs = _pytree.tree_unflatten(items, tree) if tree is not None else (items, {})
            return self.call(module, *args, **kwargs)

        params = Watched(module, self.root_hooks).tensors()
        copies = share.copies if share is not None else None
        grad = torch.is_grad_enabled()
        task = cap.Task(call, module, cap.static_inputs(xs), params, grad, copies, first)
        pair = cap.capture(task, self.engine(device), lane.pool, device, self.options.warmup)
        self.captured += pair is not None
        return pair

    def _refuse(self, module: nn.Module, xs: Sequence[torch.Tensor]) -> None:
        device = xs[0].device
        for t in (*xs, *module.parameters(), *module.buffers()):
            if t.device != device:
                raise PlanError(
                    f"{self.title}: a graph is captured on one device, but there are tensors on {device} and {t.device}"
                )
        for path, m in module.named_modules():
            if torch.is_grad_enabled() and isinstance(m, Op) and m.main_grads():
                raise PlanError(
                    f"{path or self.title} adds gradients to main_grad, which the passes before a capture would write; "
                    "capture the whole step with torch.cuda.graph, or leave out accumulate_into_main_grad"
                )

    def _replay(self, found: _Found, xs: Sequence[torch.Tensor]) -> Any:
        pair, frame = found.pair, FRAME.get()
        region = frame.region if frame is not None else Region()
        if found.part == "reads":
            found.check(self.title)
        ticket = Ticket(self, pair, frame)
        if pair.backward is not None:
            found.lane.ticket = weakref.ref(ticket)
        outputs = call(ticket, xs, found.watched.tensors())
        if found.part == "makes":
            found.promise()
        seen, ticket.seen = ticket.seen, None
        if seen is not None:
            observe_sheet(region.observed, seen)
        if pair.groups:
            region.groups.update(dict.fromkeys(pair.groups))
        for ref, states in pair.roots:
            op = ref()
            if op is not None:
                record(op, frame, states, torch.is_grad_enabled())
        if frame is None:
            region.close(failed=False)
        if pair.bare:
            return outputs[0]
        return _pytree.tree_unflatten(list(outputs), pair.tree)


def _value(x: Any) -> Any:
    """A plain argument by type and bits, so that 1, True and 1.0, and both zeros, stay apart."""
    return (type(x), x.hex() if isinstance(x, float) else x)


_values = attrgetter("shape", "dtype", "device", "requires_grad")
_ALIVE: weakref.WeakSet[Graphs] = weakref.WeakSet()


def free_all() -> None:
    """Drop the graphs of every module that no forward waits in."""
    for graphs in list(_ALIVE):
        graphs.free()


def _flat(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """Leaves of the arguments and how they were arranged (None: tensors by position)."""
    if not kwargs and all([type(x) is torch.Tensor for x in args]):  # noqa: C419  (a generator costs more)
        return args, None
    leaves, tree = _pytree.tree_flatten((list(args), kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            continue
        try:
            hash(leaf)
        except TypeError:
            raise PlanError(
                f"a graphed module takes tensors and plain values, got a {type(leaf).__name__}"
            ) from None
    return leaves, tree


def _dense(x: torch.Tensor) -> bool:
    """Whether it is no tensor of a class of its own."""
    return type(x) is torch.Tensor or isinstance(x, nn.Parameter)


def _eager(engine: engines.Engine) -> bool:
    """Whether a call has to run eagerly: inside another recording, a recompute, a checkpoint or offloading."""
    return (
        RECORDING.get()
        or torch._C._current_graph_task_id() != -1
        or REPLAY.get() is not None
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or engine.capturing()
    )


# -- what users call


_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Graphed(nn.Module):
    """A module whose calls replay CUDA graphs. Its parameters, buffers, children and modes are the module's own.

    `capture(*args)` captures a signature now; others are captured at their second call.
    """

    def __init__(self, module: nn.Module, options: Options) -> None:
        super().__init__()
        self.__dict__["module"] = module  # not a child: names in state dicts stay
        for name in _SHARED:
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["options"] = options
        self.training = module.training
        self.__dict__["_graphs"] = Graphs(type(module).__name__, _eagerly, options, True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, by replay where there is a graph."""
        module: nn.Module = self.__dict__["module"]
        if self._modules is not module._modules:  # a twin of this one, over tensors without data
            module = copy.copy(module)
            module.__dict__.update({name: self.__dict__[name] for name in _SHARED})
            return _eagerly(module, *args, **kwargs)
        graphs: Graphs = self.__dict__["_graphs"]
        if kwargs.get("is_first_microbatch") is None or not isinstance(module, Op):
            return graphs.run(module, args, kwargs)
        first = kwargs.pop("is_first_microbatch")
        with microbatch(module, first):
            return graphs.run(module, args, kwargs)

    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def capture(self, *args: Any, **kwargs: Any) -> bool:
        """Capture the signature of this call, in the modes and under the recipe in force; nothing is changed by it.

        States of delayed scaling that a first forward would make are there afterwards, fresh.
        Returns whether there is a graph for it now: on a device without CUDA graphs there never is.
        """
        graphs: Graphs = self.__dict__["_graphs"]
        with graphs.lock:
            return graphs.prepare(self.__dict__["module"], args, kwargs, after=1)[1] is not None

    @property
    def captured(self) -> int:
        """How many signatures were captured so far."""
        graphs: Graphs = self.__dict__["_graphs"]
        return graphs.captured

    def train(self, mode: bool = True) -> Graphed:
        """As the module's."""
        self.training = mode
        self.__dict__["module"].train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Graphed:
        self.__dict__["module"]._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["module"]._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["module"]._load_from_state_dict(*args, **kwargs)

    def __reduce__(self) -> Any:
        return Graphed, (self.__dict__["module"], self.__dict__["options"])

    def extra_repr(self) -> str:
        """The options."""
        return str(self.__dict__["options"])


def _eagerly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if isinstance(module, Op) and not kwargs:
        return run_eagerly(module, args)
    return module(*args, **kwargs)


def make_graphed(
    module: nn.Module,
    sample: Any = None,
    *,
    in_flight: int = 1,
    limit: int = 8,
    copies: bool = True,
    warmup: int = 3,
) -> Graphed:
    """The module with its whole forward and backward as CUDA graphs, one pair for each signature.

    A signature: shapes, dtypes and `requires_grad` of the inputs, values of arguments that are no tensors, grad and
    training modes, the recipe and autocast in force, and where the parameters lie. `sample` (a tensor or a tuple of
    arguments) is captured now, others at their second call. Parameters are read where they are, so steps of an
    optimizer are seen. On devices without CUDA graphs every call is eager.

    Args:
        in_flight: forwards that may wait for their backward at once, each with its own memory; more run eagerly.
        limit: graphs kept for each of them, least recently used ones are dropped.
        copies: outputs and gradients are fresh tensors; False returns the graph's own memory, which the next replay
            writes again.
        warmup: eager passes before a capture; they change no state, no gradient and no random numbers.

    Raises:
        PlanError: the module is not a module, has hooks, or does what no graph can hold.
    """
    if not isinstance(module, nn.Module) or isinstance(module, Graphed):
        raise PlanError(
            f"make_graphed takes a module that is not graphed, got {type(module).__name__}"
        )
    made = Graphed(module, Options(in_flight, limit, copies, warmup))
    if sample is not None:
        args = sample if isinstance(sample, tuple) else (sample,)
        if not any(isinstance(x, torch.Tensor) for x in _pytree.tree_leaves(list(args))):
            raise PlanError(
                f"make_graphed: a sample needs a tensor, got {type(sample).__name__}; give one or a tuple of arguments"
            )
        made.capture(*args)
    return made


_OF_OP = "_te_graphs"


def run_graphed(op: Op, xs: Sequence[Any]) -> Any:
    """The call of an op with `cuda_graph=True`."""
    graphs: Graphs | None = op.__dict__.get(_OF_OP)
    if graphs is None:
        graphs = op.__dict__[_OF_OP] = Graphs(type(op).__name__, _eagerly, Options(), False)
    return graphs.run(op, xs, {})
