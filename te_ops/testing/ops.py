"""check_op: an op's forward and all gradients, in every dtype, gradient mask, row count and memory
layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.compiler.plan import Plan
from te_ops.op import Op
from te_ops.recipe import Recipe
from te_ops.registry import REGISTRY
from te_ops.testing.cases import LAYOUTS, REPLAYS
from te_ops.testing.close import (
    Tolerance,
    assert_close,
    assert_equal,
    largest,
    tolerance,
    unit_roundoff,
)
from te_ops.testing.outcome import (
    Outcome,
    Shape,
    context,
    execute,
    float64,
    gradient_for,
    longest_sum,
    materialize,
    references_only,
    rerowed,
    same_rows,
    steps,
    typed,
)
from te_ops.testing.pointwise import check_pointwise, functions_of


@dataclass(frozen=True)
class _Job:
    """One op in one dtype."""

    op: Op
    inputs: list[torch.Tensor]
    dtype: torch.dtype
    recipe: Recipe | None
    slack: float
    seed: int


def check_op(
    op: Op,
    *inputs: torch.Tensor | Shape,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    recipe: Recipe | None = None,
    reference: Callable[..., Any] | None = None,
    rows: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    numeric: bool = True,
    propagates_nan: bool = True,
    slack: float = 1.0,
    seed: int = 0,
) -> Plan:
    """Check an op: forward and every gradient, and that a plan serves what it claims to serve.

    In each dtype, the op is compared with itself in FP64 on the same numbers; in FP64 its gradients
    are compared with differences of its own forward, and both with `reference`, if given. Further:
    each set of tensors that may ask for a gradient gives the same gradients; zero, one and odd row
    counts; strided, transposed and expanded inputs and output gradients; a plan replayed for
    another row count of its class gives what a fresh plan gives; inputs are not written; a call
    repeated with the same seed gives the same bits; NaN comes out where NaN went in; pointwise
    functions at special points (`check_pointwise`). Works on copies: the op stays as it is.

    Args:
        op: the op or pipeline.
        inputs: tensors or shapes; floating tensors are cast to each dtype.
        dtypes: what parameters and inputs are cast to.
        recipe: run inside `te.autocast(recipe=recipe)`, after the same checks without it.
        reference: independent torch code, `reference(*inputs, **parameters) -> output or tuple`, on
            FP64 tensors; the op's parameters come by name, a dot as an underscore. Gradients by
            autograd.
        rows: row counts to try; default 0, 1, 5 and 7 if all inputs share their first dimension,
            else none.
        device: where to run; default: where the op's parameters are.
        numeric: compare gradients with finite differences; not for functions whose gradient is not
            their slope.
        propagates_nan: whether an input full of NaN, or such a gradient, must reach a result.
        slack: multiplies the computed tolerance, for ill-conditioned ops.
        seed: of all random numbers.

    Returns:
        The plan in the first dtype.

    Raises:
        AssertionError: what differs, where, by how much and in which case.
    """
    device = device or next((p.device for p in op.parameters()), torch.device("cpu"))
    plan: Plan | None = None
    for dtype in dtypes:
        made = materialize(inputs, dtype, device, seed)
        job = _Job(typed(op, dtype).to(device), made, dtype, None, slack, seed)
        with context(f"{type(op).__name__} in {str(dtype).removeprefix('torch.')}"):
            found = _check_dtype(job, rows, propagates_nan)
            plan = plan or found
            if recipe is not None:
                with context(f"recipe {type(recipe).__name__}"):
                    _check_values(_Job(job.op, made, dtype, recipe, slack, seed), "")
    made = materialize(inputs, torch.float64, device, seed)
    job = _Job(typed(op, torch.float64).to(device), made, torch.float64, None, slack, seed)
    with context(f"{type(op).__name__} in float64"):
        _check_masks(job)
        if numeric:
            _check_slopes(job)
        if reference is not None:
            _check_reference(job, reference)
        for fn in functions_of(job.op, made):
            check_pointwise(fn)
    assert plan is not None, "check_op needs at least one dtype"
    return plan


def _check_dtype(job: _Job, rows: Sequence[int] | None, propagates_nan: bool) -> Plan:
    plan = _check_values(job, "")
    _check_layouts(job)
    if propagates_nan:
        _check_nan(job)
    shared = same_rows(job.inputs)
    counts = rows if rows is not None else ((0, 1, 5, 7) if shared else ())
    for count in counts:
        resized = _Job(job.op, rerowed(job.inputs, count), job.dtype, None, job.slack, job.seed)
        _check_values(resized, f"{count} rows")
    if rows is None and shared:
        _check_replay(job)
    return plan


# -- values


def _check_values(job: _Job, case: str) -> Plan:
    """Against FP64, and that nothing is written and the same call gives the same bits."""
    with context(case) if case else context("given inputs"):
        before = [x.clone() for x in job.inputs]
        got = _run(job, with_plan=True)
        for i, (x, old) in enumerate(zip(job.inputs, before, strict=True)):
            assert_equal(x, old, name=f"input {i} after the call (ops may not write their inputs)")
        again = _run(job)
        for name, value in got.tensors.items():
            assert_equal(again.tensors[name], value, name=f"{name} of a second call")
        wide, xs = float64(job.op, job.inputs)
        dys = [gradient_for(y, i, job.seed).double() for i, y in enumerate(got.outputs)]
        with references_only():
            exact = execute(wide, xs, recipe=job.recipe, seed=job.seed, dys=dys)
        _compare(job, got, exact)
    assert got.plan is not None
    return got.plan


def _run(job: _Job, **options: Any) -> Outcome:
    """On a copy of the op: a stateful recipe moves its state with each call."""
    return execute(typed(job.op, None), job.inputs, recipe=job.recipe, seed=job.seed, **options)


def _compare(job: _Job, got: Outcome, exact: Outcome) -> None:
    if len(got.outputs) != len(exact.outputs):
        raise AssertionError(f"{len(got.outputs)} outputs, {len(exact.outputs)} in float64")
    forward, backward = steps(got.plan)
    for name, value in got.tensors.items():
        if name not in exact.tensors:
            raise AssertionError(f"{name} exists, but not in float64")
        roundings = forward if name.startswith("output") else forward + backward
        wanted = exact.tensors[name]
        bound = _bound(job, value.dtype, roundings, largest(wanted.double()))
        close(value, wanted, bound, name)
    missing = [n for n in exact.tensors if n not in got.tensors]
    if missing:
        raise AssertionError(f"{missing[0]} is missing")


def _bound(job: _Job, dtype: torch.dtype, roundings: int, scale: float) -> Tolerance:
    if not dtype.is_floating_point:
        return Tolerance(0.0, 0.0)
    finest = max((dtype, job.dtype), key=unit_roundoff)
    made = tolerance(
        finest, terms=longest_sum(job.op, job.inputs), roundings=roundings, scale=scale
    )
    assert made.norm is not None
    extra = (
        0.0 if job.recipe is None else 2.0**-4
    )  # codes next to a rounding border differ between dtypes
    norm = job.slack * made.norm + extra
    return Tolerance(2 * norm, (2 * norm if extra == 0 else 8 * norm) * scale, norm)


def close(actual: torch.Tensor, expected: torch.Tensor, bound: Tolerance, name: str) -> None:
    """assert_close with a tolerance that is at hand, its norm included."""
    assert_close(actual, expected, rtol=bound.rtol, atol=bound.atol, name=name)
    if bound.norm is None:
        return
    a, e = actual.double(), expected.double()
    error = torch.where(e.isfinite(), a - e, 0.0).norm()
    size = torch.where(e.isfinite(), e, 0.0).norm()
    if float(error) > bound.norm * float(size) + 1e-300 and a.numel():
        raise AssertionError(
            f"{name}: the error is {float(error):.3g} in norm, {bound.norm:.3g} of the norm of the "
            f"result "
            f"({float(size):.3g}) is allowed"
        )


# -- gradients


def _names(job: _Job) -> list[str]:
    xs = [f"input{i}" for i, x in enumerate(job.inputs) if x.is_floating_point()]
    return xs + [n for n, p in job.op.named_parameters() if p.is_floating_point()]


def _masks(names: list[str]) -> list[set[str]]:
    """Every subset up to four names; of more, the empty one, each alone and all but each."""
    if len(names) <= 4:
        return [set(c) for n in range(len(names)) for c in itertools.combinations(names, n)]
    return [set(), *({n} for n in names), *(set(names) - {n} for n in names)]


def _check_masks(job: _Job) -> None:
    """The gradients of a subset are those of the full set, and the outputs stay the same."""
    names = _names(job)
    full = _run(job)
    for mask in _masks(names):
        case = "gradients of " + (", ".join(sorted(mask)) or "nothing")
        with context(case):
            got = _run(job, wanted=mask)
            if set(got.grads) != mask:
                raise AssertionError(f"gradients came for {sorted(got.grads)}")
            for name, value in got.tensors.items():
                assert_close(
                    value, full.tensors[name], terms=longest_sum(job.op, job.inputs), name=name
                )
            for name in mask:
                if got.grads[name] is None and full.grads[name] is not None:
                    raise AssertionError(f"the gradient of {name} is missing")


def _check_slopes(job: _Job) -> None:
    """Directional derivatives of <outputs, dy> by central differences in FP64."""
    base = _run(job)
    dys = [gradient_for(y, i, job.seed) for i, y in enumerate(base.outputs)]
    for name in _names(job):
        grad = base.grads.get(name)
        target = _value(job, name)
        if not target.numel():
            continue
        for trial in range(2):
            direction = gradient_for(target, 100 + trial, job.seed)
            h = 1e-6 * max(largest(target), 1e-3)
            ends = [_project(_moved(job, name, sign * h * direction), dys) for sign in (1, -1)]
            slope = (ends[0] - ends[1]) / (2 * h)
            got = 0.0 if grad is None else float((grad * direction).sum())
            scale = 0.0 if grad is None else float((grad * direction).norm())
            level = max(abs(ends[0]), abs(ends[1]))
            if not abs(got - slope) <= 1e-5 * (abs(slope) + scale) + 1e-14 * level / h + 1e-9:
                raise AssertionError(
                    f"gradient of {name}: along a random direction it is {got:.9g}, differences of "
                    f"the forward give "
                    f"{slope:.9g}" + (" (no gradient came)" if grad is None else "")
                )


def _value(job: _Job, name: str) -> torch.Tensor:
    return (
        job.inputs[int(name[5:])]
        if name.startswith("input") and name[5:].isdigit()
        else job.op.get_parameter(name)
    )


def _moved(job: _Job, name: str, by: torch.Tensor) -> Outcome:
    op, inputs = typed(job.op, None), list(job.inputs)
    if name.startswith("input") and name[5:].isdigit():
        inputs[int(name[5:])] = inputs[int(name[5:])] + by
    else:
        with torch.no_grad():
            op.get_parameter(name).add_(by)
    return execute(op, inputs, wanted=set(), seed=job.seed)


def _project(outcome: Outcome, dys: list[torch.Tensor]) -> float:
    pairs = [(y, dy) for y, dy in zip(outcome.outputs, dys, strict=True) if y.is_floating_point()]
    return float(sum((y.double() * dy.double()).sum() for y, dy in pairs))


def _check_reference(job: _Job, reference: Callable[..., Any]) -> None:
    """The user's own formula in FP64, forward and by autograd."""
    got = _run(job)
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in job.inputs]
    twin = typed(job.op, None)
    parameters = dict(twin.named_parameters())
    with torch.enable_grad():
        result = reference(*leaves, **{n.replace(".", "_"): p for n, p in parameters.items()})
    outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
    named = {f"input{i}": x for i, x in enumerate(leaves)} | parameters
    asking = {n: t for n, t in named.items() if t.requires_grad}
    roots = [(y, i) for i, y in enumerate(outputs) if y.requires_grad]
    dys = [gradient_for(y, i, job.seed) for y, i in roots]
    found: Sequence[torch.Tensor | None] = [None] * len(asking)
    if roots and asking:
        found = torch.autograd.grad(
            [y for y, _ in roots], list(asking.values()), dys, allow_unused=True
        )
    terms = longest_sum(job.op, job.inputs)
    with context("the reference"):
        assert_close(
            got.outputs, outputs, terms=64 * terms, roundings=64 * job.slack, name="output"
        )
        for name, wanted in zip(asking, found, strict=True):
            value = got.grads.get(name)
            if (value is None or not value.any()) and (wanted is None or not wanted.any()):
                continue
            zero = torch.zeros_like(asking[name])
            assert_close(
                zero if value is None else value,
                zero if wanted is None else wanted,
                terms=64 * terms,
                roundings=64 * job.slack,
                name=f"gradient of {name}",
            )


# -- layouts, rows, special values


def _check_layouts(job: _Job) -> None:
    """Inputs that are not contiguous, against contiguous copies; an expanded output gradient."""
    for name, arrange in LAYOUTS.items():

        def lay(
            x: torch.Tensor, arrange: Callable[..., torch.Tensor] = arrange, name: str = name
        ) -> torch.Tensor:
            if x.dim() < 2 or not x.is_floating_point():
                return x
            return arrange(x)

        with context(f"{name} inputs"):
            got = _run(job, arrange=lay)
            plain = _run(job, arrange=lambda x, lay=lay: lay(x).contiguous())
            _like(job, got, plain)
    with context("an expanded output gradient"):
        outputs = _run(job, wanted=set()).outputs
        ones = [torch.ones((), dtype=y.dtype, device=y.device).expand(y.shape) for y in outputs]
        _like(job, _run(job, dys=ones), _run(job, dys=[d.contiguous() for d in ones]))


def _like(job: _Job, got: Outcome, wanted: Outcome) -> None:
    """The same up to the order of sums."""
    for name, value in wanted.tensors.items():
        other = got.tensors.get(name)
        if other is None:
            raise AssertionError(f"{name} is missing")
        bound = _bound(job, value.dtype, 8, largest(value.double()))
        close(other, value, bound, name)


def _check_replay(job: _Job) -> None:
    """A plan made for one row count and replayed for another one of its class gives what a fresh
    plan gives.
    """
    for first, second in REPLAYS:
        with context(f"the plan of {first} rows replayed for {second}"):
            twin = typed(job.op, None)
            xs = rerowed(job.inputs, second)
            execute(twin, rerowed(job.inputs, first), seed=job.seed)
            replayed = execute(twin, xs, seed=job.seed)
            REGISTRY.version += 1  # plans of another version are not found
            fresh = execute(typed(job.op, None), xs, seed=job.seed)
            for name, value in fresh.tensors.items():
                assert_equal(replayed.tensors[name], value, name=name)


def _check_nan(job: _Job) -> None:
    """NaN in an input, or in the output gradients, must show."""
    for i, x in enumerate(job.inputs):
        if not x.is_floating_point() or not x.numel():
            continue
        xs = list(job.inputs)
        xs[i] = torch.full_like(x, torch.nan)
        got = execute(typed(job.op, None), xs, wanted=set(), seed=job.seed)
        if not any(bool(y.isnan().any()) for y in got.outputs if y.is_floating_point()):
            raise AssertionError(
                f"input {i} is all NaN, but no output shows it (propagates_nan=False if it may "
                f"hide)"
            )
    plain = _run(job)
    dys = [torch.full_like(y, torch.nan) for y in plain.outputs]
    got = _run(job, dys=dys)
    for name, grad in got.grads.items():
        usual = plain.grads[name]
        if (
            grad is not None
            and usual is not None
            and bool(usual.any())
            and not bool(grad.isnan().any())
        ):
            raise AssertionError(
                f"the output gradients are all NaN, but the gradient of {name} does not show it"
            )
