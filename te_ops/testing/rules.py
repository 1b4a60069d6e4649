"""check_rule: a fusion rule fires, and fused gives what unfused gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_ops.backends.reference.kernels import bind_composed
from te_ops.compiler.plan import Plan
from te_ops.compiler.work import Work
from te_ops.graph import Value
from te_ops.op import Op
from te_ops.recipe import Recipe
from te_ops.registry import REGISTRY, ArchRange, Call, Kernel, Launch, Rule
from te_ops.testing.close import assert_equal, assert_no_worse, values
from te_ops.testing.outcome import (
    Outcome,
    Shape,
    context,
    execute,
    float64,
    gradient_for,
    inputs_for,
    materialize,
    references_only,
    registered,
    rerowed,
    same_rows,
    typed,
)
from te_ops.testing.probe import FIRST, Probe

_HALF = (torch.bfloat16, torch.float16)


def check_rule(
    name: str,
    model: Op,
    *inputs: torch.Tensor | Shape,
    rows: int | Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    recipe: Recipe | None = None,
    kernel: Kernel | str | None = None,
    seed: int = 0,
) -> Plan:
    """Check that a rule fires in a model and changes neither values nor gradients.

    The model is planned without any rule and with this one alone, whose groups the composition of
    their members' references runs (or `kernel`, if given). Where the rule is exact, or all inner
    values are written, or none of them is in a half precision, both must agree bit for bit; else an
    inner value stays FP32 that was rounded before, and the fused error against float64 may be at
    most twice the unfused one (with a recipe, a quarter of what quantization itself changes is
    always allowed: a code at a rounding border may fall to either side). A joint rule (a rewrite)
    follows the same rule unless it says `exact`.

    Args:
        name: of a registered rule.
        model: an op or pipeline in which it should fire.
        inputs: tensors or shapes; without any, [rows, width], the width taken from the model's
            first parameter.
        rows: row counts; default 8 (or those of the inputs), then 1 and 0.
        dtypes: what parameters and inputs are cast to.
        recipe: run inside `te.autocast(recipe=recipe)`.
        kernel: runs the groups instead of the composed reference; one that is registered may be
            named.
        seed: of all random numbers.

    Returns:
        The fused plan in the first dtype.

    Raises:
        AssertionError: the rule is not registered or did not fire (with the reasons), or a value
        differs.
    """
    rule = registered(name, Rule)
    counts = [rows] if isinstance(rows, int) else list(rows or ())
    given: Sequence[Any] = inputs or inputs_for(model, counts[0] if counts else 8)
    plan: Plan | None = None
    for dtype in dtypes:
        op = typed(model, dtype)
        device = next((p.device for p in op.parameters()), torch.device("cpu"))
        made = materialize(given, dtype, device, seed)
        shared = same_rows(made)
        for i, count in enumerate(_counts(made, counts, shared)):
            xs = rerowed(made, count) if shared else made
            with context(f"rule {name}, {str(dtype).removeprefix('torch.')}, {count} rows"):
                chosen = _choose(rule, kernel)
                found = _check(rule, op, xs, recipe, chosen, seed=seed, must_fire=i == 0)
                plan = plan or found
    assert plan is not None, "check_rule needs at least one dtype"
    return plan


def _counts(inputs: Sequence[torch.Tensor], rows: Sequence[int], shared: bool) -> list[int]:
    first = inputs[0].shape[0] if inputs and inputs[0].dim() else 1
    if not shared:
        return [first]
    return list(dict.fromkeys([*(rows or [first]), *(() if len(rows) > 1 else (1, 0))]))


def _choose(rule: Rule, kernel: Kernel | str | None) -> Kernel:
    if kernel is None:
        return Kernel(rule.name, f"reference.composed.{rule.name}", bind_composed, ArchRange("any"))
    found = REGISTRY.find(kernel) if isinstance(kernel, str) else kernel
    if not isinstance(found, Kernel) or found.runs != rule.name:
        raise AssertionError(f"{kernel!r} is not a kernel of rule {rule.name}")
    return found


def _check(
    rule: Rule,
    op: Op,
    inputs: list[torch.Tensor],
    recipe: Recipe | None,
    kernel: Kernel,
    *,
    seed: int,
    must_fire: bool,
) -> Plan:
    with references_only():
        unfused = execute(typed(op, None), inputs, recipe=recipe, seed=seed, with_plan=True)
    watch = _Watch(rule, kernel)
    with REGISTRY.temporary(*watch.made), REGISTRY.only(rule.name):
        fused = execute(typed(op, None), inputs, recipe=recipe, seed=seed, with_plan=True)
    assert fused.plan is not None
    if must_fire and not watch.fired:
        raise AssertionError("it did not fire. " + _why(rule, fused.plan))
    if watch.exact and kernel.bind is bind_composed:
        _same(fused, unfused)
        return fused.plan
    wide, xs = float64(op, inputs)
    dys = [gradient_for(y, i, seed).double() for i, y in enumerate(unfused.outputs)]
    with references_only():
        truth = execute(wide, xs, recipe=recipe, seed=seed, dys=dys)
        dense = None if recipe is None else execute(wide, xs, seed=seed, dys=dys)
    _names(fused, unfused)
    for name, value in fused.tensors.items():
        right = truth.tensors[name]
        floor = 0.0 if dense is None else _norm_of_difference(right, dense.tensors[name]) / 4
        assert_no_worse(value, unfused.tensors[name], right, floor=floor, name=name)
    return fused.plan


def _norm_of_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((values(a) - values(b)).norm())


def _names(fused: Outcome, unfused: Outcome) -> None:
    if fused.tensors.keys() != unfused.tensors.keys():
        differing = fused.tensors.keys() ^ unfused.tensors.keys()
        raise AssertionError(
            f"{', '.join(sorted(differing))}: exists either fused or unfused, not both"
        )


def _same(fused: Outcome, unfused: Outcome) -> None:
    _names(fused, unfused)
    for name, value in fused.tensors.items():
        assert_equal(value, unfused.tensors[name], name=f"{name}, fused against unfused")


class _Watch:
    """The rule and its kernel, noting whether they are used and whether bits may change."""

    def __init__(self, rule: Rule, kernel: Kernel) -> None:
        self.fired = False
        self.exact = True
        self.rule = rule
        # A kernel is compared with its members at each launch; the composition is its members.
        self.bind_with = kernel.bind if kernel.bind is bind_composed else Probe(kernel).bind
        self.made: tuple[Rule | Kernel, ...]
        if rule.stage == "joint":
            assert rule.rewrite is not None
            self.exact = rule.exact
            self.made = (dataclasses.replace(rule, rewrite=self.rewrite(rule.rewrite)),)
        else:
            self.made = (dataclasses.replace(kernel, bind=self.bind, priority=FIRST),)

    def rewrite(self, inner: Callable[[Work], Any]) -> Callable[[Work], Any]:
        """A joint rule fires when the graph that it leaves is another one."""

        def watched(work: Work) -> Any:
            before = work.g.structure(), work.outputs
            result = inner(work)
            self.fired = self.fired or before != (work.g.structure(), work.outputs)
            return result

        return watched

    def bind(self, call: Call) -> Launch:
        """Bits may change where an inner value in half precision is not written."""
        self.fired = True
        made = [(Value(n.id, i), s) for n in call.nodes for i, s in enumerate(call.specs_of(n))]
        rounds = [
            v
            for v, s in made
            if s.kind.name == "dense" and s.dtype in _HALF and v not in call.writes
        ]
        self.exact = self.exact and (self.rule.exact or not rounds)
        return self.bind_with(call)


def _why(rule: Rule, plan: Plan) -> str:
    notes = [
        f"at {n.at}: {n.kernel + ': ' if n.kernel else ''}{n.reason}"
        for n in plan.notes
        if n.rule == rule.name
    ]
    names = (
        " + ".join(s.name for s in plan.forward) + " | " + " + ".join(s.name for s in plan.backward)
    )
    chain = " + ".join(rule.chain)
    return f"Its chain is {chain}; the steps are {names}. " + (
        "; ".join(notes) or "Nothing matched the chain."
    )
