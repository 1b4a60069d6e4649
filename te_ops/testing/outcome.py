"""Running an op as a check needs it: on copies, with given output gradients, twice the same random
numbers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from te_ops.compiler.plan import Plan
from te_ops.context import autocast
from te_ops.errors import Error
from te_ops.op import Op
from te_ops.recipe import Recipe
from te_ops.registry import REGISTRY, Kernel, Rule
from te_ops.testing.cases import with_rows

Shape = tuple[int, ...]


@dataclass
class Outcome:
    """Outputs of a call and the gradients of everything that asked for one, by name (`input0`,
    `0.weight`).
    """

    outputs: tuple[torch.Tensor, ...]
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    plan: Plan | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All results by name."""
        found = {f"output {i}": y for i, y in enumerate(self.outputs)}
        return found | {f"gradient of {n}": t for n, t in self.grads.items() if t is not None}


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's generators start from `seed`; afterwards they are as before."""
    ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if ready else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def references_only() -> Iterator[None]:
    """Inside, nothing fuses and every step is its primitive's reference."""
    with REGISTRY.temporary(), REGISTRY.only():
        for found in REGISTRY.all():
            if isinstance(found, Kernel) and found.runs != "*":
                REGISTRY.remove(found.name)
        yield


@contextlib.contextmanager
def context(text: str) -> Iterator[None]:
    """Errors raised inside say what was being checked."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{text}: {error}") from error
    except Exception as error:
        error.add_note(f"te_ops.testing: while checking {text}")
        raise


def materialize(
    inputs: Sequence[torch.Tensor | Shape], dtype: torch.dtype, device: Any, seed: int
) -> list[torch.Tensor]:
    """Tensors for a call: shapes become random numbers, floating tensors are cast, others stay."""
    made = []
    with seeded(seed):
        for x in inputs:
            if not isinstance(x, torch.Tensor):
                x = torch.randn(x)
            made.append(x.detach().to(device, dtype if x.is_floating_point() else x.dtype))
    return made


def inputs_for(model: torch.nn.Module, rows: int) -> list[Shape]:
    """The one input of a model whose first parameter is a Linear's or a norm's: [rows, its last
    dimension].

    Raises:
        AssertionError: the model has no parameter to read the width from.
    """
    first = next(iter(model.parameters()), None)
    if first is None or not first.dim():
        raise AssertionError(
            "the model has no parameter that tells its input width; pass inputs or their shapes"
        )
    return [(rows, first.shape[-1])]


def typed(op: Op, dtype: torch.dtype | None) -> Op:
    """A copy of the op whose floating parameters and buffers have this dtype."""
    twin = copy.deepcopy(op)
    return twin if dtype is None else twin.to(dtype)


def same_rows(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the first dimension is the number of rows of every input: it may be varied."""
    varied = [x for x in inputs if _has_rows(x, inputs)]
    return bool(varied) and len({x.shape[0] for x in varied}) == 1


def rerowed(inputs: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """The inputs with another number of rows (numbers, and vectors of a value per column, stay)."""
    return [with_rows(x, rows) if _has_rows(x, inputs) else x for x in inputs]


def _has_rows(x: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """A matrix, integers, or a vector as long as the first matrix is high and not as it is wide."""
    if x.dim() != 1 or not x.is_floating_point():
        return x.dim() > 0
    first = next((m for m in inputs if m.dim() >= 2), None)
    return first is not None and x.shape[0] == first.shape[0] != first.shape[-1]


def recipe_scope(recipe: Recipe | None) -> contextlib.AbstractContextManager[Any]:
    """`te.autocast(recipe=recipe)`, or nothing."""
    return contextlib.nullcontext() if recipe is None else autocast(recipe=recipe)


def gradient_for(y: torch.Tensor, index: int, seed: int) -> torch.Tensor:
    """A random output gradient that depends on the shape, the index and the seed only."""
    with seeded(seed + 7919 * (index + 1)):
        return torch.randn(y.shape).to(y.device, y.dtype)


def execute(
    op: Op,
    inputs: Sequence[torch.Tensor],
    *,
    recipe: Recipe | None = None,
    wanted: set[str] | None = None,
    seed: int = 0,
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None,
    dys: Sequence[torch.Tensor] | None = None,
    with_plan: bool = False,
) -> Outcome:
    """Run the op on leaves made from the inputs and, where something wants a gradient, its
    backward.

    Args:
        op: run as it is; its parameters' `requires_grad` are set and its gradients overwritten.
        inputs: values; the op gets detached aliases of them, laid out by `arrange`.
        recipe: of the autocast around it.
        wanted: names that ask for a gradient; None is all.
        seed: of random numbers inside, and of the output gradients.
        arrange: another memory layout for the inputs.
        dys: output gradients; default: random ones.
        with_plan: keep the plan.
    """
    leaves = []
    for i, x in enumerate(inputs):
        leaf = x.detach() if arrange is None else arrange(x.detach())
        wants = x.is_floating_point() and (wanted is None or f"input{i}" in wanted)
        leaves.append(leaf.requires_grad_(wants))
    parameters = dict(op.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(
            parameter.is_floating_point() and (wanted is None or name in wanted)
        )
        parameter.grad = None
    named: dict[str, torch.Tensor] = {f"input{i}": x for i, x in enumerate(leaves)} | parameters
    asking = {n: t for n, t in named.items() if t.requires_grad}
    with seeded(seed), recipe_scope(recipe):
        plan = op.plan(*leaves) if with_plan else None
        result = op(*leaves)
    outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
    roots = [
        (y, i) for i, y in enumerate(outputs) if isinstance(y, torch.Tensor) and y.requires_grad
    ]
    grads: dict[str, torch.Tensor | None] = dict.fromkeys(asking)
    if roots and asking:
        given = [gradient_for(y, i, seed) if dys is None else dys[i].to(y.dtype) for y, i in roots]
        found = torch.autograd.grad(
            [y for y, _ in roots], list(asking.values()), given, allow_unused=True
        )
        grads = dict(zip(asking, found, strict=True))
    return Outcome(tuple(y.detach() for y in outputs), grads, plan)


def steps(plan: Plan | None) -> tuple[int, int]:
    """How many steps forward and backward have, at least one each."""
    if plan is None:
        return 1, 1
    return max(len(plan.forward), 1), max(len(plan.backward), 1)


def longest_sum(op: Op, inputs: Sequence[torch.Tensor]) -> int:
    """No sum inside is longer than the largest tensor, nor than its longest dimension by the
    rows.
    """
    return max((t.numel() for t in (*inputs, *op.parameters())), default=1) or 1


def float64(op: Op, inputs: Sequence[torch.Tensor]) -> tuple[Op, list[torch.Tensor]]:
    """The op and its inputs in FP64, with exactly the same numbers."""
    return typed(op, torch.float64), [x.double() if x.is_floating_point() else x for x in inputs]


Registered = TypeVar("Registered", Rule, Kernel)


def registered(name: str, kind: type[Registered]) -> Registered:
    """The rule or kernel of this name.

    Raises:
        AssertionError: there is none; lists those there are.
    """
    try:
        found = REGISTRY.find(name)
    except Error:
        found = None
    if not isinstance(found, kind):
        known = ", ".join(item.name for item in REGISTRY.all() if isinstance(item, kind))
        raise AssertionError(f"no {kind.__name__.lower()} is named {name!r}; registered: {known}")
    return found
