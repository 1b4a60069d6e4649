"""The plan key, made of values only, and the caches: exact signature -> runner, key -> plan."""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._dynamo import eval_frame

from te_ops.compiler.build import assemble
from te_ops.compiler.passes import passes
from te_ops.compiler.plan import Plan
from te_ops.compiler.trace import dynamic_dims, leading_dims, owned, spec_of, trace
from te_ops.compiler.work import Request
from te_ops.context import ARCH, FRAME, FROZEN, PLACE, Frame, Region, current
from te_ops.errors import Error, PlanError, ShapeError
from te_ops.graph import Spec
from te_ops.op import GLOBAL_HOOKS, HOOKS, Epoch, Op, Runtime, Scalar
from te_ops.quantizers import QuantizedTensor
from te_ops.registry import REGISTRY
from te_ops.runtime import checkpoint as ckpt
from te_ops.runtime import plain
from te_ops.runtime.alike import Alike, alike
from te_ops.runtime.executor import Call, PlanRunner
from te_ops.runtime.main_grad import dtype_of
from te_ops.runtime.shapes import LEVELS, TRACED, alignment, level_of, shape_key
from te_ops.runtime.state import BackwardCommit
from te_ops.runtime.varies import varies

MAX_PLANS = 256
MAX_RUNNERS = 512
WARN_AFTER = 64  # plans of one pipeline


class PlanCache:
    """Plans of all pipelines, least recently used first; equal layers share one plan."""

    def __init__(self) -> None:
        self.plans: OrderedDict[Any, Plan] = OrderedDict()
        self.levels: OrderedDict[Any, str] = OrderedDict()
        self.built = 0
        self.lock = threading.RLock()

    def clear(self) -> None:
        """Forget every plan."""
        with self.lock:
            self.plans.clear()
            self.levels.clear()

    def remember(self, key: Any, plan: Plan) -> None:
        """Add a plan, and forget the least recently used beyond the limit."""
        self.plans[key] = plan
        self.built += 1
        while len(self.plans) > MAX_PLANS:
            self.plans.popitem(last=False)


CACHE = PlanCache()


_OURS = ("te_ops", "torch")


def _outside() -> int:
    """Stack level of the caller's caller outside te_ops and torch: where a warning belongs."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    return level


# -- fingerprint of an op's structure


_PARTS = (
    "inputs", "parameters", "ties", "recipe", "grad mode", "autocast dtype", "deterministic", "hooks",
    "registry", "passes", "foreign modules", "main gradients", "shapes",
)  # fmt: skip


class _Last(NamedTuple):
    """A call, and what ran it: the next one that is like it needs no key."""

    values: tuple[Any, ...]
    alike: Alike
    runner: PlanRunner


class OpCache:
    """Per op instance: its fingerprint while nothing changed, its parameter slots and its runners."""

    def __init__(self, op: Op) -> None:
        self.runners: dict[Any, PlanRunner] = {}
        self.last: dict[bool, _Last] = {}  # by grad mode
        self.history: list[Any] = []  # keys of the plans that this op made
        self.epoch = -1
        self.modules: list[nn.Module] = []
        self.refresh(op)

    def refresh(self, op: Op) -> None:
        """Read the structure again. Threads may do so at once: what others read is replaced, never edited."""
        epoch = Epoch.now  # a change from here on is seen by the next call
        modules = [(path, m) for path, m in op.named_modules() if not _is_state(path)]
        ops = [(path, m) for path, m in modules if isinstance(m, Op)]
        fetches: list[tuple[nn.Module | None, str]] = []
        places: list[tuple[str, str]] = []
        added: list[int] = []
        hash_parts: list[Any] = []
        for path, module in ops:
            for name, thing in owned(module):
                if not isinstance(thing, Scalar):
                    if name in module.main_grads():
                        added.append(len(fetches))
                    fetches.append((None if module is op else module, name))
                    places.append((path, name))
            children = tuple(name for name in module._modules if name != "quantizer")
            hash_parts.append((path, type(module), module.training, module.config(), children))
        foreign = tuple((p, type(m)) for p, m in modules if not isinstance(m, Op))
        paths = {path for path, _ in ops}
        self.foreign = [m for p, m in modules if p not in paths and p.rpartition(".")[0] in paths]
        # The root is not kept: the cache lives in its __dict__.
        others = [m for _, m in modules if m is not op]
        if len(others) != len(self.modules) or any(
            a is not b for a, b in zip(others, self.modules, strict=True)
        ):
            self.runners = {}  # they are bound to modules that may be gone
        self.last = {}
        self.modules = others
        self.ops = [(path, m) for path, m in ops if m is not op]
        self.fetches = fetches
        self.places, self.added = places, added
        self.hooks = [*GLOBAL_HOOKS, *(m.__dict__[name] for _, m in ops for name in HOOKS)]
        self.fingerprint = ("op", tuple(hash_parts), foreign)
        self.token = _intern(self.fingerprint)
        self.epoch = epoch

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of an op starts without (where the op's `__getstate__` is not asked, as for parametrized ones)."""

    def made(self, plan: Plan, key: Any) -> None:
        """Count a plan; warn once when this op makes very many, naming what varies."""
        self.history.append(key)
        if len(self.history) == WARN_AFTER:
            warnings.warn(
                f"te_ops made {WARN_AFTER} plans for one {plan.title}; what varies: {varies(self.history)}. "
                "Numbers that change every step belong into te.scalar() slots, tensors or inputs",
                RuntimeWarning,
                stacklevel=_outside(),
            )
            self.history = []

    def main_grads(
        self, op: Op, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[tuple[str, str], torch.dtype], ...]:
        """Which parameters have their gradients added to main_grad, by the place that a plan knows them by.

        Raises:
            PlanError: a parameter has no main_grad that fits.
        """
        first: dict[int, tuple[str, str]] = {}
        for place, tensor in zip(self.places, tensors, strict=True):
            first.setdefault(id(tensor), place)
        found: dict[tuple[str, str], torch.dtype] = {}
        for k in self.added:
            if tensors[k].requires_grad:
                path, name = self.places[k]
                where = ".".join(x for x in (type(op).__name__, path, name) if x)
                found[first[id(tensors[k])]] = dtype_of(tensors[k], where)
        return tuple(found.items())

    def strangers(self) -> tuple[Any, ...]:
        """What plans read of modules that are not ours, whose changes are not announced."""
        return tuple(
            (
                *map(type, m.modules()),
                *((p.shape, p.dtype, p.requires_grad) for p in m.parameters()),
            )
            for m in self.foreign
        )

    def tensors(self, op: Op) -> list[torch.Tensor]:
        """Parameters, buffers and tensors of all ops, as they are now."""
        found = []
        for module, name in self.fetches:
            owner = op if module is None else module
            tensor = owner._parameters.get(name)
            found.append(tensor if tensor is not None else getattr(owner, name))
        return found


def _is_state(path: str) -> bool:
    """Whether a module path belongs to the quantizer state of an op: it comes and goes without a new plan."""
    return "quantizer" in path.split(".")


_TOKENS: dict[Any, int] = {}


def _intern(fingerprint: Any) -> int:
    if len(_TOKENS) > 4096:
        _TOKENS.clear()
    return _TOKENS.setdefault(fingerprint, Epoch.now * 1_000_003 + len(_TOKENS))


def _cache_of(op: Op) -> OpCache:
    cache: OpCache | None = op.__dict__.get("_te_cache")
    if cache is None:
        cache = op.__dict__["_te_cache"] = OpCache(op)
    elif cache.epoch != Epoch.now:
        cache.refresh(op)
    return cache


# -- running


def run(op: Op, xs: Sequence[Any]) -> Any:
    """`op(*xs)`: as a CUDA graph where the op asks for it, else `run_eagerly`."""
    if op.__dict__.get("cuda_graph") and Runtime.graphed is not None:
        return Runtime.graphed(op, xs)
    return run_eagerly(op, xs)


def run_eagerly(op: Op, xs: Sequence[Any]) -> Any:
    """Find or make the plan and replay it; where it is plain, torch's own function is all that runs."""
    grad = torch.is_grad_enabled()
    known: plain.Direct | None = op.__dict__.get(plain.PLACE[grad])
    if known is not None and (direct := known(op, xs)) is not None:
        return direct
    task = torch._C._current_graph_task_id()
    recomputing = task != -1  # a forward inside a backward pass
    replay = ckpt.REPLAY.get()
    frame, version = FRAME.get(), None
    if recomputing or replay is not None:
        frame, version = ckpt.surroundings(op, recomputing)
    runner, autocast_dtype, device = _runner(op, xs, frame, grad, version)
    if runner.plain and (direct := plain.first(op, xs, grad, version)) is not None:
        runner.direct = True
        return direct
    if replay is not None and replay.recording:  # now: the first plan for a device adds kernels
        replay.versions[replay.position] = REGISTRY.version if version is None else version
    region: Region | None = None
    if not recomputing and (replay is None or replay.recording):
        region = frame.region if frame is not None else Region() if runner.writes else None
    states = runner.states.find(op, device) if runner.states.wanted else ()
    if not recomputing:
        ckpt.record(op, frame, states, grad)
    else:
        _recomputes(op, runner, states)
    seed = (
        torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
        if runner.needs_seed
        else None
    )
    autocast = None if autocast_dtype is None else (device.type, autocast_dtype)
    call = Call(op, device, frame, region, seed, task, [], autocast, FROZEN.get(), states)
    try:
        if autocast is None:
            result = runner(call, xs, grad)
        else:  # references do their own casts: torch's autocast must not add more
            with torch.autocast(device.type, enabled=False):
                result = runner(call, xs, grad)
        for write in call.done:
            write()
    finally:  # the writes hold the call, and the autograd nodes keep it
        call.done.clear()
    if frame is None and region is not None:
        region.close(failed=False)
    return result


def _recomputes(op: Op, runner: PlanRunner, states: Sequence[Any]) -> None:
    """Before a forward inside a backward: it sees what the first one saw; its own backward commits with that one."""
    ckpt.check_recompute(op, states, ckpt.recorded(op))
    if runner.observes_gradients:
        BackwardCommit.open()


# Under torch.compile a pipeline is one graph break: the mark keeps Dynamo from inlining the call, the strategy from
# compiling it, and all that it calls, as frames of their own. (`torch.compiler.disable` would import all of Dynamo.)
run._torchdynamo_disable = True  # type: ignore[attr-defined]
eval_frame.set_code_exec_strategy(
    run.__code__,
    eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP),
)


def plan_for(op: Op, xs: Sequence[Any]) -> Plan:
    """The plan of a call, without running it."""
    runner, _, _ = _runner(op, xs, current(), torch.is_grad_enabled())
    return runner.plan


def _runner(
    op: Op, xs: Sequence[Any], frame: Frame | None, grad: bool, version: int | None = None
) -> tuple[PlanRunner, torch.dtype | None, torch.device]:
    cache = _cache_of(op)
    tensors = cache.tensors(op)
    try:
        device: torch.device = xs[0].device
    except (AttributeError, IndexError):
        raise ShapeError(_bad_input(op, xs)) from None
    kind = device.type
    autocasts = kind != "meta" and torch.is_autocast_enabled(kind)
    if kind in REGISTRY.waiting:  # before the key is made: its version moves
        REGISTRY.prepare(kind)
    autocast_dtype = torch.get_autocast_dtype(kind) if autocasts else None
    around = (
        (frame.key, PLACE.get()) if frame is not None else None,
        grad,
        autocast_dtype,
        torch._C._get_deterministic_algorithms(),
        tuple(map(bool, cache.hooks)) if any(cache.hooks) else (),
        REGISTRY.version if version is None else version,
        passes.version,
    )
    # Equal ids now and then mean that the same places held one tensor: nothing is kept, and forms are compared.
    values = (cache.token, around, len(xs), list(map(id, tensors)))
    last = cache.last.get(grad)
    if last is not None and last.values == values and last.alike(*xs, *tensors):
        return last.runner, autocast_dtype, device
    found = _keyed(op, xs, tensors, frame, around)
    in_key = not cache.foreign and not (grad and cache.added)  # what the values above hold is all
    if in_key and not any(isinstance(x, QuantizedTensor) for x in (*xs, *tensors)):
        cache.last[grad] = _Last(values, alike([*xs, *tensors]), found)
    return found, autocast_dtype, device


def _keyed(
    op: Op,
    xs: Sequence[Any],
    tensors: list[torch.Tensor],
    frame: Frame | None,
    around: tuple[Any, ...],
) -> PlanRunner:
    """The runner of a key, made where there is none."""
    cache, grad = _cache_of(op), around[1]
    ids: dict[int, int] = {}
    if not all(isinstance(x, torch.Tensor) for x in xs):
        raise ShapeError(_bad_input(op, xs))
    key = (
        cache.token,
        tuple([(x.shape, x.dtype, x.device, x.requires_grad, _kind(x)) for x in xs]),
        tuple([(t.shape, t.dtype, t.device, t.requires_grad, _format(t)) for t in tensors]),
        tuple([ids.setdefault(id(t), k) for k, t in enumerate(tensors)]),
        *around,
        cache.strangers() if cache.foreign else (),
        cache.main_grads(op, tensors) if grad and cache.added else (),
    )
    try:
        found = cache.runners.get(key)
    except TypeError as error:
        if any(isinstance(size, torch.SymInt) for x in xs for size in x.shape):
            raise PlanError(TRACED) from error
        raise
    if found is None:
        plan = _plan(op, cache, xs, frame, key)
        found = PlanRunner(plan, op, plain=plain.serves(plan, op, xs[0]))
        if len(cache.runners) >= MAX_RUNNERS:
            cache.runners.clear()
        cache.runners[key] = found
    return found


def _kind(x: torch.Tensor) -> Any:
    """What the shape and dtype of an input do not tell: the format of a quantized one."""
    if x.layout is not torch.strided:
        raise ShapeError(
            f"te_ops takes dense tensors, got one with layout {x.layout}; use to_dense()"
        )
    return spec_of(x).kind if isinstance(x, QuantizedTensor) else type(x)


def _format(t: torch.Tensor) -> Any:
    """The format of a quantized parameter, None for a dense one."""
    return spec_of(t).kind if type(t) is QuantizedTensor else None


def _bad_input(op: Op, xs: Sequence[Any]) -> str:
    if not xs:
        return f"{type(op).__name__} takes at least one tensor, got none"
    kinds = ", ".join(type(x).__name__ for x in xs) or "nothing"
    return f"{type(op).__name__} takes tensors, got {kinds}"


def _plan(
    op: Op, cache: OpCache, xs: Sequence[Any], frame: Frame | None, key: tuple[Any, ...]
) -> Plan:
    _check_devices(op, cache, xs)
    specs = tuple(spec_of(x) for x in xs)
    features = op.feature_dims
    leads = leading_dims(specs, features)
    inputs = tuple(
        (s.shape[len(lead) :], s.dtype, s.kind, x.device, x.requires_grad, type(x))
        for s, lead, x in zip(specs, leads, xs, strict=True)
    )
    family = (cache.fingerprint, inputs, _same_leads(specs, features), *key[2:])
    with CACHE.lock:
        level = CACHE.levels.get(family)
        if level is not None:
            full = (family, shape_key(specs, level, features))
            if (plan := CACHE.plans.get(full)) is not None:
                CACHE.plans.move_to_end(full)
                return plan
        request = _request(op, xs, specs, frame, key)
        plan, level = _build(request, key, level)
        while REGISTRY.settle():  # a kernel that it asked for has been compiled meanwhile
            plan, level = _build(request, key, level)
        CACHE.levels[family] = level
        while len(CACHE.levels) > 4 * MAX_PLANS:
            CACHE.levels.popitem(last=False)
        full = (family, shape_key(specs, level, features))
        CACHE.remember(full, plan)
        cache.made(
            plan, (cache.fingerprint, *zip(_PARTS, (inputs, *key[2:], full[1]), strict=True))
        )
        return plan


def _check_devices(op: Op, cache: OpCache, xs: Sequence[Any]) -> None:
    device = xs[0].device if xs else None
    for i, x in enumerate(xs):
        if x.device != device:
            raise PlanError(f"{type(op).__name__}: input {i} is on {x.device}, input 0 on {device}")
    for (module, name), tensor in zip(cache.fetches, cache.tensors(op), strict=True):
        device = device or tensor.device
        if tensor.device != device:
            where = next((p for p, m in cache.ops if m is module), "")
            path = f"{type(op).__name__}.{where}" if where else type(op).__name__
            owner = type(module if module is not None else op).__name__
            hint = " (meta: call to_empty and reset_parameters first)" if tensor.is_meta else ""
            raise PlanError(
                f"{path} ({owner}): {name} is on {tensor.device}, the input on {device}{hint}"
            )


def _same_leads(specs: Sequence[Spec], features: int) -> Any:
    """Which leading dimensions are equal: how much of them a graph depends on is found out for each pattern."""
    leads = leading_dims(specs, features)
    if leads and all(lead == leads[0] and lead for lead in leads):
        return True
    order: dict[int, int] = {}
    return tuple(tuple(order.setdefault(d, len(order)) for d in lead) for lead in leads)


def _request(
    op: Op, xs: Sequence[Any], specs: tuple[Spec, ...], frame: Frame | None, key: tuple[Any, ...]
) -> Request:
    device = xs[0].device
    lead = dynamic_dims(specs[0], op.feature_dims)
    return Request(
        op=op,
        inputs=specs,
        input_grads=tuple(bool(x.requires_grad) for x in xs),
        grad=key[5],
        device=device,
        arch=arch_of(device),
        align=alignment(math.prod(lead)),
        recipe=frame.recipe if frame is not None else None,
        quantized=frame.enabled if frame is not None else False,
        calibrating=frame.calibrating if frame is not None else False,
        autocast_dtype=key[6],
        place=PLACE.get(),
        main_grads=key[-1],
    )


def arch_of(device: torch.device) -> str:
    """ "cpu", or "sm_90" and the like."""
    if device.type != "cuda" or ARCH.get():
        return ARCH.get() or "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


# -- building


def _build(request: Request, key: tuple[Any, ...], level: str | None) -> tuple[Plan, str]:
    """Trace, find out by a second trace how much of the shape the graph depends on, and plan."""
    graph, outputs = trace(request)
    found, note = level_of(request, graph)
    level = found if level is None else max(level, found, key=LEVELS.index)
    plan = assemble(request, graph, outputs, {**_describe(request, key), "shapes": level})
    direct = request.arch != "cpu" and plain.is_plain(plan, request.op)
    more = [note, plain.NOTE if direct else None]
    return replace(plan, notes=(*plan.notes, *[n for n in more if n is not None])), level


def _describe(request: Request, key: tuple[Any, ...]) -> dict[str, Any]:
    recipe, dtype = request.recipe, request.autocast_dtype
    try:
        shown: Any = None if recipe is None else recipe.to_dict()
    except Error:
        shown = repr(recipe)
    return {
        "op": type(request.op).__name__,
        "inputs": [
            [str(s.dtype).removeprefix("torch."), [int(d) for d in s.shape]] for s in request.inputs
        ],
        "arch": request.arch,
        "grad": request.grad,
        "recipe": shown if request.quantized else None,
        "calibrating": request.calibrating,
        "autocast_dtype": dtype and str(dtype).removeprefix("torch."),
    }
