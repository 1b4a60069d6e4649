"""Replaying a plan: one autograd node per segment, slots owned by the call, observations after success."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from te_ops.compiler.bind import Leaf
from te_ops.compiler.plan import Plan, Segment
from te_ops.context import PLACE, join_path
from te_ops.errors import PlanError
from te_ops.runtime import main_grad
from te_ops.runtime.checkpoint import used
from te_ops.runtime.loads import Call, Places, fetch
from te_ops.runtime.segment import SegmentRunner

__all__ = ["Call", "PlanRunner", "replay_report"]


def _run_segment(
    runner: SegmentRunner, call: Call, imports: list[Any], grad: bool
) -> Sequence[Any]:
    """Run a segment on its imports; the exports."""
    op, segment = call.op, runner.segment
    tensors = [*imports, *[fetch(op if m is None else m, name) for m, name in runner.params]]
    if grad and segment.needs_grad and _differentiable(runner, tensors):
        if torch._C._are_functorch_transforms_active():
            made: Sequence[Any] = _SegmentNode.apply(runner, call, *tensors)  # type: ignore[no-untyped-call]
        else:
            try:
                whole = list(map(_unwrap, tensors))
            except TypeError:  # a record is among them
                whole = [_unwrap(t) if isinstance(t, torch.Tensor) else t for t in tensors]
            made = _apply(runner, call, *whole)
        return made
    if grad:
        # Nothing here carries a gradient, whatever the references do inside.
        with torch.no_grad():
            return runner.execute(call, tensors, save=False).outs
    return runner.execute(call, tensors, save=False).outs


def _differentiable(runner: SegmentRunner, tensors: Sequence[Any]) -> bool:
    """Whether something wants a gradient, which is in the key except for what other segments give."""
    found = runner.differentiable if runner.alone else None
    if found is None:
        found = any(t.requires_grad for t in tensors if isinstance(t, torch.Tensor))
        runner.differentiable = found
    return found


class _SegmentNode(torch.autograd.Function):
    """One segment in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, runner: SegmentRunner, call: Call, *tensors: Any) -> tuple[Any, ...]:
        segment = runner.segment
        made = runner.execute(call, tensors, save=True)
        outs = made.outs
        ctx.save_for_backward(*made.carriers)
        ctx.runner, ctx.call, ctx.layout = runner, call, made.layout
        ctx.outs = _specs(runner, outs) if call.taped else _specs_of(outs)
        ctx.set_materialize_grads(False)
        if False in segment.full:
            ctx.mark_non_differentiable(
                *[o for o, grad in zip(outs, segment.full, strict=True) if not grad]
            )
        return tuple(outs)

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


def _specs_of(outs: Sequence[Any]) -> Any:
    return tuple([(o.shape, o.dtype, o.device) for o in outs])


def _specs(runner: SegmentRunner, outs: Sequence[Any]) -> Any:
    """Of outputs, which are those of the first call: a runner serves one signature."""
    found = runner.specs
    if found is None:
        found = runner.specs = _specs_of(outs)
    return found


# What `Function.apply` does where no functorch transform is active, without its look for a `setup_context`.
_apply: Any = super(torch.autograd.Function, _SegmentNode).apply
_unwrap = torch._C._functorch.unwrap_if_dead


def _backward(ctx: Any, flat: list[torch.Tensor], dys: Sequence[Any]) -> tuple[Any, ...]:
    runner: SegmentRunner = ctx.runner
    call, segment = ctx.call, runner.segment
    given = tuple([full and dy is not None for full, dy in zip(segment.full, dys, strict=True)])
    bound, zeros = runner.backward_runner(given)
    if bound is None:
        return (None,) * len(segment.leaves)
    if zeros is not None:
        dys = [
            _zeros(*spec) if zero else dy
            for dy, zero, spec in zip(dys, zeros, ctx.outs, strict=True)
        ]
    made = bound.made
    if not made.added:
        return bound.run(call, ctx.layout, flat, dys)
    written = runner.added(made, call)  # checks main_grad before anything runs
    main_grad.refuse(ctx, [i for i, _ in made.added], [name for _, name in written])
    grads = list(bound.run(call, ctx.layout, flat, dys))
    for (i, _), (parameter, _) in zip(made.added, written, strict=True):
        grads[i] = main_grad.added(parameter)
    return tuple(grads)


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

    def __init__(self, plan: Plan, op: nn.Module, *, plain: bool = False) -> None:
        """`plain`: a call that nobody asks anything else of runs by torch's own function (`te_ops.runtime.plain`)."""
        self.plain = plain
        self.direct = False  # whether one has
        modules = dict(op.named_modules())
        del modules[
            ""
        ]  # else the op, whose cache holds this runner, would not be freed by its last reference

        def resolve(path: str) -> nn.Module | None:
            return None if path == "" else modules[path]

        self.plan = plan
        table: dict[tuple[str, str], int] = {}
        slots: list[tuple[nn.Module | None, str, int]] = []
        for use in (u for s in plan.segments for u in s.states if not u.is_grad):
            if (use.path, use.state) not in table:
                table[use.path, use.state] = len(table)
                slots.append((resolve(use.path), use.state, use.config.amax_history_len))
        self.states = Places(slots)  # that forward reads
        self.runners: list[Any] = [
            resolve(s.module) if s.module is not None else SegmentRunner(plan, s, resolve, table)
            for s in plan.segments
        ]
        ours = [r for r in self.runners if isinstance(r, SegmentRunner)]
        self.only = self.runners[0] if len(self.runners) == len(ours) == 1 else None
        if self.only is not None:
            self.only.alone = True
        self.single: int | None = None  # the one export that is the one result as it is
        if self.only is not None and plan.single and not plan.results[0].views:
            exports, result = self.only.segment.exports, plan.results[0]
            if not result.alias and result.slot in exports:
                self.single = exports.index(result.slot)
        self.writes = any(r.writes for r in ours)
        self.returned: dict[tuple[int, ...], Any] = {}
        self.needs_seed = any(
            leaf.kind == "seed"
            for r in ours
            for leaf, _ in (*r.forward.loads, *_backward_loads(r.segment))
        )
        self.observes_gradients = any(
            u.is_grad and u.amax is not None for r in ours for u in r.segment.states
        )

    def __call__(self, call: Call, xs: Sequence[Any], grad: bool) -> Any:
        """Run all segments on these inputs and return the plan's results."""
        if self.only is not None:
            outs = _run_segment(self.only, call, [xs[i] for i in self.only.imports], grad)
            if self.single is not None:
                return outs[self.single]
            env: list[Any] = [*xs, *([None] * (self.plan.size - len(xs)))]
            for slot, out in zip(self.only.segment.exports, outs, strict=True):
                env[slot] = out
        else:
            env = [*xs, *([None] * (self.plan.size - len(xs)))]
            self._run(call, env, grad)
        results = tuple([_result(env[r.slot], r) for r in self.plan.results])
        return results[0] if self.plan.single else results

    def _run(self, call: Call, env: list[Any], grad: bool) -> None:
        plan = self.plan
        for segment, runner, dead in zip(plan.segments, self.runners, plan.dead, strict=True):
            if isinstance(runner, SegmentRunner):
                outs = _run_segment(runner, call, [env[i] for i in runner.imports], grad)
                for slot, out in zip(segment.exports, outs, strict=True):
                    env[slot] = out
            else:
                if call.autocast is None:
                    _call_module(segment, runner, env)
                else:
                    with torch.autocast(*call.autocast):
                        _call_module(segment, runner, env)
                if call.taped and not self._as_before(segment, env):
                    call = call._replace(taped=False)
            for slot in dead:
                env[slot] = None

    def _as_before(self, segment: Segment, env: list[Any]) -> bool:
        """Whether a module that is not ours returns what it returned at first, in shapes: they are in no key."""
        found = tuple([env[slot].shape for slot in segment.exports if slot >= 0])
        return bool(self.returned.setdefault(segment.exports, found) == found)


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


def replay_report(op: nn.Module) -> list[str]:
    """How the phases that an op (or a module's ops) has run are issued: a line each.

    "12 operations" for a recorded phase, else why its launches run at every call.
    """
    lines = []
    for path, module in op.named_modules():
        cache = module.__dict__.get("_te_cache")
        for runner in cache.runners.values() if cache is not None else ():
            if runner.direct:
                lines.append(f"{join_path(path, runner.plan.title)}: torch's own linear")
                continue
            for part in runner.runners:
                if isinstance(part, SegmentRunner):
                    where = f"{join_path(path, part.title)}, {part.segment.name}"
                    lines += [f"{where}, {name}: {phase}" for name, phase in part.phases()]
    return lines
