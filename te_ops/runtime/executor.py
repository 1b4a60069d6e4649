"""Replaying a plan: one autograd node per segment, slots owned by the call, observations after success."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from te_ops.compiler.bind import Bound, Leaf, Slots
from te_ops.compiler.plan import Backward, Plan, Segment
from te_ops.compiler.work import StateUse
from te_ops.context import PLACE, Frame, Region, join_path
from te_ops.errors import PlanError
from te_ops.quantizers import QuantizedTensor, Record, Usage
from te_ops.runtime.checkpoint import REPLAY, used
from te_ops.runtime.state import BackwardCommit, DelayedState, Observation, make_state, observe

Fetch = tuple[
    nn.Module | None, str
]  # None stands for the root, so that a runner does not keep it alive


class Call(NamedTuple):
    """What one call of a plan knows besides its tensors; shared by its segments and their backwards."""

    op: nn.Module | None
    device: torch.device
    frame: Frame | None
    region: Region | None  # None: observe nothing (recompute)
    seed: torch.Tensor | None
    task: int  # the backward pass that this call runs in (a recompute), or -1
    done: list[Callable[[], None]]  # what to write if the whole call succeeds
    autocast: tuple[str, torch.dtype] | None = (
        None  # torch's, for the modules inside that are not ours
    )


class SegmentRunner:
    """A segment bound to the modules of one op instance."""

    def __init__(
        self, plan: Plan, segment: Segment, resolve: Callable[[str], nn.Module | None]
    ) -> None:
        assert segment.forward is not None
        self.title = plan.title
        self.segment = segment
        self.forward: Bound = segment.forward
        self.imports = segment.imports
        self.params: tuple[Fetch, ...] = tuple(
            (resolve(leaf.path), leaf.name) for leaf in segment.leaves if leaf.kind == "param"
        )
        positions = {leaf: i for i, leaf in enumerate(segment.leaves)}
        self.tensor_loads = tuple(
            (positions[leaf], slot) for leaf, slot in self.forward.loads if leaf in positions
        )
        self.other_loads = self._others(self.forward.loads, resolve)
        self.observed = self._states(self.forward.observed, resolve)
        self.updates = tuple(
            (resolve(leaf.path), leaf.name, slot, rule) for leaf, slot, rule in self.forward.updates
        )
        # A scale that backward reads again must not be the live buffer: the commit rewrites it in between.
        live_buffers = zip(segment.saved, segment.saved_leaf, strict=True)
        self.copied = tuple(slot for slot, kind in live_buffers if kind == "buffer")
        self.resolve = resolve
        self._backwards: dict[int, _BackwardRunner] = {}

    def _others(
        self, loads: Sequence[tuple[Leaf, int]], resolve: Callable[[str], nn.Module | None]
    ) -> tuple[tuple[Callable[[Call], Any], int], ...]:
        made: list[tuple[Callable[[Call], Any], int]] = []
        for leaf, slot in loads:
            if leaf.kind == "seed":
                made.append((lambda call: call.seed, slot))
            elif leaf.kind == "scalar":
                made.append((_scalar_getter(resolve(leaf.path), leaf.name), slot))
            elif leaf.kind == "buffer":
                made.append((self._buffer_getter(leaf, resolve), slot))
        return tuple(made)

    def _buffer_getter(
        self, leaf: Leaf, resolve: Callable[[str], nn.Module | None]
    ) -> Callable[[Call], Any]:
        segment = self.segment
        assert segment.forward is not None
        use = self.state_uses.get((leaf.path, leaf.name)) if leaf.name.endswith(".scale") else None
        if use is None:
            return _buffer(resolve(leaf.path), leaf.name)
        module, operand, config, fp8_max = (
            resolve(leaf.path),
            use.state,
            use.config,
            use.fp8_max,
        )
        return _scale_getter(module, operand, config, fp8_max)

    @property
    def state_uses(self) -> dict[tuple[str, str], StateUse]:
        """The state uses of this segment by the buffer that they read."""
        return {use.slot: use for use in self.segment.states}

    def _states(
        self, observed: Sequence[tuple[StateUse, int]], resolve: Callable[[str], nn.Module | None]
    ) -> tuple[tuple[nn.Module | None, str, StateUse, int], ...]:
        return tuple((resolve(use.path), use.state, use, slot) for use, slot in observed)

    # -- forward

    def run(self, call: Call, env: list[Any], grad: bool) -> None:
        """Execute on the environment: read the imports, write the exports."""
        op = call.op
        tensors = [env[i] for i in self.imports]
        tensors += [_fetch(op if m is None else m, name) for m, name in self.params]
        if (
            grad
            and self.segment.needs_grad
            and any(t.requires_grad for t in tensors if isinstance(t, torch.Tensor))
        ):
            outs = _SegmentNode.apply(self, call, *tensors)  # type: ignore[no-untyped-call]
        elif grad:
            # Nothing here carries a gradient, whatever the references do inside.
            with torch.no_grad():
                _, outs = self.execute(call, tensors)
        else:
            _, outs = self.execute(call, tensors)
        for slot, out in zip(self.segment.exports, outs, strict=True):
            env[slot] = out

    def execute(self, call: Call, tensors: Sequence[Any]) -> tuple[Slots, tuple[Any, ...]]:
        """Run the forward steps; observe afterwards, so that a failure leaves no trace."""
        bound = self.forward
        slots: Slots = [None] * bound.size
        for position, slot in self.tensor_loads:
            slots[slot] = _entry(tensors[position])
        for get, slot in self.other_loads:
            slots[slot] = get(call)
        for slot in self.copied:
            slots[slot] = slots[slot].clone()
        bound.run(slots, self.title)
        if self.observed and call.region is not None:
            for module, operand, use, slot in self.observed:
                length = use.config.amax_history_len
                state = make_state(_root(call, module), operand, length, call.device)
                call.done.append(
                    partial(observe, call.region.observed, state, slots[slot], _seen(use, call))
                )
        if self.updates and call.region is not None:
            for module, name, slot, rule in self.updates:
                call.done.append(partial(_update, _root(call, module), name, slots[slot], rule))
        outs = [_exit(slots[i]) for i in bound.results]  # type: ignore[index]
        for i in self.segment.copies:
            outs[i] = outs[i].clone()
        return slots, tuple(outs)

    def backward_runner(self, made: Backward) -> _BackwardRunner:
        """The bound backward for one set of given gradients."""
        found = self._backwards.get(id(made))
        if found is None:
            found = self._backwards[id(made)] = _BackwardRunner(self, made)
        return found


class _BackwardRunner:
    """Backward steps of a segment bound to the modules of one op instance."""

    def __init__(self, runner: SegmentRunner, made: Backward) -> None:
        self.made = made
        self.title = runner.title
        self.bound = made.bound
        self.grads = tuple(
            (leaf.index, slot) for leaf, slot in made.bound.loads if leaf.kind == "grad"
        )
        self.others = runner._others(made.bound.loads, runner.resolve)
        self.observed = runner._states(made.bound.observed, runner.resolve)

    def run(self, call: Call, saved: list[Any], dys: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients of the differentiable leaves, None where none is needed."""
        slots: Slots = [None] * self.bound.size
        for pick, slot in zip(self.made.picks, self.made.loads, strict=True):
            slots[slot] = saved[pick]
        saved.clear()
        for index, slot in self.grads:
            slots[slot] = _entry(dys[index])
        for get, slot in self.others:
            slots[slot] = get(call)
        self.bound.run(slots, self.title)
        if self.observed:
            for module, operand, use, slot in self.observed:
                length = use.config.amax_history_len
                state = make_state(_root(call, module), operand, length, call.device)
                BackwardCommit.observe(call.task, state, slots[slot], _seen(use, call))
        return tuple(None if i is None else slots[i] for i in self.bound.results)


def _root(call: Call, module: nn.Module | None) -> nn.Module:
    found = call.op if module is None else module
    assert found is not None
    return found


def _seen(use: StateUse, call: Call) -> Observation:
    group = call.frame.group if call.frame is not None else None
    return Observation(torch.empty(0), use.config, use.fp8_max, group)


def _fetch(module: nn.Module | None, name: str) -> torch.Tensor:
    assert module is not None
    found = module._parameters.get(name)
    return found if found is not None else getattr(module, name)


def _buffer(module: nn.Module | None, name: str) -> Callable[[Call], Any]:
    def get(call: Call) -> Any:
        found: Any = _root(call, module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    return get


def _scalar_getter(module: nn.Module | None, name: str) -> Callable[[Call], Any]:
    return lambda call: torch.tensor(getattr(_root(call, module), name).value, dtype=torch.float32)


def _scale_getter(
    module: nn.Module | None, operand: str, config: Any, fp8_max: float
) -> Callable[[Call], Any]:
    def get(call: Call) -> torch.Tensor:
        length = config.amax_history_len
        state: DelayedState = make_state(_root(call, module), operand, length, call.device)
        replay = REPLAY.get()
        use = (replay.position, state) if replay is not None else (0, state)
        if replay is not None and not replay.recording and use in replay.scales:
            return replay.scales[use]
        scale = state.scale_for(config, fp8_max)
        if replay is not None and replay.recording:
            scale = replay.scales[use] = scale.clone()
        return scale

    return get


def _update(module: nn.Module, name: str, value: torch.Tensor, rule: str) -> None:
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part)
    with torch.no_grad():
        target.copy_(torch.maximum(target, value) if rule == "max" else value)


def _entry(x: Any) -> Any:
    """What kernels may rely on: contiguous, and 16-byte aligned on CUDA."""
    if not isinstance(x, torch.Tensor):
        return x
    if isinstance(x, QuantizedTensor):
        return x.rowwise if x.rowwise is not None else x.columnwise
    if not x.is_contiguous():
        return x.contiguous()
    if x.is_cuda and x.data_ptr() % 16:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _exit(value: Any) -> Any:
    """Records leave a plan as tensors."""
    if not isinstance(value, Record):
        return value
    row, col = (value, None) if value.usage is Usage.ROW else (None, value)
    return QuantizedTensor(row, col, value.quantizer)


class _SegmentNode(torch.autograd.Function):
    """One segment in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, runner: SegmentRunner, call: Call, *tensors: Any) -> tuple[Any, ...]:
        slots, outs = runner.execute(call, tensors)
        segment = runner.segment
        if segment.saves_tensors:
            ctx.save_for_backward(*[slots[i] for i in segment.saved])
            ctx.layout = None
        else:
            ctx.layout = _flatten(ctx, [slots[i] for i in segment.saved])
        ctx.runner, ctx.call = runner, call
        ctx.outs = tuple([(o.shape, o.dtype, o.device) for o in outs])
        ctx.set_materialize_grads(False)
        if not all(segment.full):
            ctx.mark_non_differentiable(
                *[o for o, grad in zip(outs, segment.full, strict=True) if not grad]
            )
        return outs

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> tuple[Any, ...]:
        runner: SegmentRunner = ctx.runner
        try:
            flat = list(ctx.saved_tensors)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise PlanError(
                f"{runner.title}: a tensor that was saved for backward (an input, a parameter or an output) has been "
                f"changed in place since the forward; clone it before changing it. {error}"
            ) from error
        used(ctx.call.op)
        clear = getattr(ctx, "maybe_clear_saved_tensors", None)
        if clear is not None:
            clear()
        if not torch.is_grad_enabled():
            return (None, None, *_backward(ctx, flat, dys))
        with torch.no_grad():
            grads = _backward(ctx, flat, dys)
        return (None, None, *_refuse_second_order(runner.title, grads))


def _flatten(ctx: Any, values: list[Any]) -> list[Any]:
    """Save all tensors, those of records too; returns how to put the values together again."""
    flat: list[torch.Tensor] = []
    layout: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            layout.append(None)
            flat.append(value)
        elif isinstance(value, Record):
            layout.append(_Template(value))
            flat.extend(value.tensors())
        else:
            layout.append((value,))
    ctx.save_for_backward(*flat)
    return layout


def _restore(layout: list[Any], flat: list[torch.Tensor]) -> list[Any]:
    """The values that `_flatten` took apart."""
    saved: list[Any] = []
    for item in layout:
        if item is None:
            saved.append(flat.pop(0))
        elif isinstance(item, _Template):
            saved.append(item.rebuild(flat))
        else:
            saved.append(item[0])
    return saved


class _Template:
    """A record without its tensors."""

    __slots__ = ("dtype", "present", "quantizer", "shape", "usage")

    def __init__(self, record: Record) -> None:
        self.present = tuple(t is not None for t in (record.data, record.scale_inv, record.amax))
        self.quantizer, self.usage = record.quantizer, record.usage
        self.shape, self.dtype = record.shape, record.dtype

    def rebuild(self, tensors: list[torch.Tensor]) -> Record:
        """The record over saved tensors, which are taken from the front of the list."""
        parts = [tensors.pop(0) if there else None for there in self.present]
        assert parts[0] is not None
        return Record(
            parts[0], parts[1], parts[2], self.quantizer, self.usage, self.shape, self.dtype
        )


def _backward(ctx: Any, flat: list[torch.Tensor], dys: Sequence[Any]) -> tuple[Any, ...]:
    runner: SegmentRunner = ctx.runner
    call, outs = ctx.call, ctx.outs
    segment = runner.segment
    saved = flat if ctx.layout is None else _restore(ctx.layout, flat)
    given = tuple([full and dy is not None for full, dy in zip(segment.full, dys, strict=True)])
    if not any(given):
        return (None,) * len(segment.leaves)
    assert segment.derive is not None
    made = segment.derive(given)
    if made is None:
        # It would need values that were not saved: run the full backward on explicit zeros.
        made = segment.derive(segment.full)
        dys = [
            _zeros(*spec) if dy is None and full else dy
            for dy, full, spec in zip(dys, segment.full, outs, strict=True)
        ]
    assert made is not None
    return runner.backward_runner(made).run(call, saved, dys)


def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, title: str, *grads: Any) -> tuple[Any, ...]:
        ctx.title = title
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise PlanError(
            f"{ctx.title}: te_ops does not differentiate its backward (double backward); run this part with "
            "plain torch modules, or without create_graph=True"
        )


def _refuse_second_order(title: str, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients that raise if somebody differentiates them, instead of claiming a wrong second order."""
    places = [i for i, g in enumerate(grads) if g is not None]
    live = [grads[i].detach().requires_grad_() for i in places]
    wrapped = _Refuse.apply(title, *live)  # type: ignore[no-untyped-call]
    result = list(grads)
    for i, g in zip(places, wrapped, strict=True):
        result[i] = g
    return tuple(result)


class PlanRunner:
    """A plan bound to one op instance; holds no reference to the root op."""

    def __init__(self, plan: Plan, op: nn.Module) -> None:
        modules = dict(op.named_modules())
        del modules[
            ""
        ]  # else the op, whose cache holds this runner, would not be freed by its last reference

        def resolve(path: str) -> nn.Module | None:
            return None if path == "" else modules[path]

        self.plan = plan
        self.runners: list[Any] = [
            resolve(s.module) if s.module is not None else SegmentRunner(plan, s, resolve)
            for s in plan.segments
        ]
        ours = [r for r in self.runners if isinstance(r, SegmentRunner)]
        self.needs_seed = any(
            leaf.kind == "seed"
            for r in ours
            for leaf, _ in (*r.forward.loads, *_backward_loads(r.segment))
        )
        self.observes_gradients = any(
            u.is_grad and u.amax is not None for r in ours for u in r.segment.states
        )
        self.state_slots = [
            (resolve(u.path), u.state, u.config.amax_history_len)
            for r in ours
            for u in r.segment.states
            if not u.is_grad
        ]

    def states(self, op: nn.Module, device: torch.device) -> list[DelayedState]:
        """The delayed-scaling states that forward reads (created where missing)."""
        return [
            make_state(op if module is None else module, operand, length, device)
            for module, operand, length in self.state_slots
        ]

    def __call__(self, call: Call, xs: Sequence[Any], grad: bool) -> Any:
        """Run all segments on these inputs and return the plan's results."""
        plan = self.plan
        env: list[Any] = [*xs, *([None] * (plan.size - len(xs)))]
        for segment, runner, dead in zip(plan.segments, self.runners, plan.dead, strict=True):
            if isinstance(runner, SegmentRunner):
                runner.run(call, env, grad)
            elif call.autocast is None:
                _call_module(segment, runner, env)
            else:
                with torch.autocast(*call.autocast):
                    _call_module(segment, runner, env)
            for slot in dead:
                env[slot] = None
        results = tuple(_result(env[r.slot], r) for r in plan.results)
        return results[0] if plan.single else results


def _backward_loads(segment: Segment) -> tuple[tuple[Leaf, int], ...]:
    if segment.derive is None:
        return ()
    made = segment.derive(segment.full)
    return made.bound.loads if made is not None else ()


def _result(value: Any, how: Any) -> Any:
    for function, attrs in how.views:
        value = function(value, **attrs)
    return value.view_as(value) if how.alias else value


def _call_module(segment: Segment, module: nn.Module, env: list[Any]) -> None:
    assert segment.module is not None
    token = PLACE.set(join_path(PLACE.get(), segment.module))
    try:
        result = module(*(env[i] for i in segment.imports))
    finally:
        PLACE.reset(token)
    results = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(results) != len(segment.exports):
        raise PlanError(
            f"{segment.module} ({type(module).__name__}) returned {len(results)} outputs, the plan was made for "
            f"{len(segment.exports)}"
        )
    for slot, value, spec in zip(segment.exports, results, segment.returns, strict=True):
        if value.dtype is not spec.dtype or value.shape[-1:] != spec.shape[-1:]:
            raise PlanError(
                f"{segment.module} ({type(module).__name__}) returned {value.dtype} with {value.shape[-1:]} features, "
                f"the plan was made for {spec.dtype} with {spec.shape[-1:]}; it changed in a way that te_ops "
                "cannot see (set any attribute of the pipeline to plan again)"
            )
        if slot >= 0:
            env[slot] = value
