"""check_kernel: a kernel against its members' references, on every case that it accepts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.op import Op
from te_ops.recipe import Recipe
from te_ops.registry import REGISTRY, Call, Kernel
from te_ops.runtime.cache import arch_of
from te_ops.testing.cases import PIPELINES, RECIPES
from te_ops.testing.outcome import (
    Shape,
    context,
    execute,
    inputs_for,
    materialize,
    registered,
    rerowed,
    same_rows,
    typed,
)
from te_ops.testing.probe import Probe

_ROWS = (8, 5, 7, 1, 0)


@dataclass(frozen=True)
class _Source:
    """A model that may hold what the kernel runs."""

    name: str
    op: Op
    inputs: tuple[torch.Tensor | Shape, ...]


def check_kernel(
    name: str,
    model: Op | None = None,
    *inputs: torch.Tensor | Shape,
    rows: Sequence[int] = _ROWS,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    recipes: Sequence[Recipe | str | None] | None = None,
    device: torch.device | str | None = None,
    factor: float = 2.0,
    seed: int = 0,
) -> tuple[Call, ...]:
    """Check a registered kernel on cases that its `refuse` accepts.

    The cases are real ones: small pipelines (`te_ops.testing.cases.PIPELINES`, or `model`) are run
    forward and backward with this kernel preferred, and at each of its launches the results are
    compared with the composition of its members' references on the same operands: the error against
    float64 may be at most `factor` times that of the same-dtype reference, in norm, and twice that
    for an element; integers must be equal. A launch is also run with strided operands, where
    `layouts` allows them, and on a CUDA device on a side stream. Operands may not be written, zero
    rows must be run or refused, one launch serves other row counts of its class, and `refuse` must
    answer None or a reason, twice the same.

    Args:
        name: of the kernel.
        model: an op or pipeline that holds what the kernel runs; needed for primitives and rules of
            your own.
        inputs: of the model, tensors or shapes; without any, [rows, width of its first parameter].
        rows: row counts to run.
        dtypes: what parameters and inputs are cast to.
        recipes: recipes or names in `cases.RECIPES`; default: dense, current scaling and MXFP8.
        device: where to run; default: the GPU if the kernel does not run on the CPU, else the CPU.
        factor: how much worse than the reference it may be.
        seed: of all random numbers.

    Returns:
        The calls that were bound, for tests of what the kernel takes.

    Raises:
        AssertionError: a result differs, with the case; or the kernel took no case, with its
        reasons.
    """
    kernel = registered(name, Kernel)
    where = torch.device(device) if device is not None else _device(kernel)
    REGISTRY.prepare(where.type)  # not while the probe stands in for the kernel
    probe = Probe(kernel, factor=factor)
    options = (
        rows,
        dtypes,
        tuple(recipes) if recipes is not None else ("dense", "current", "mxfp8"),
        seed,
    )
    for source in _sources(model, inputs):
        with _registered(probe):
            _run_source(probe, source, where, options)
    if not probe.launches:
        reasons = "; ".join(f"{r} ({n} times)" for r, n in probe.refused.items())
        raise AssertionError(
            f"{name} runs {kernel.runs}, and took none of the cases. "
            + (
                f"It refused: {reasons}"
                if reasons
                else f"No case holds {kernel.runs}: pass a model that does"
            )
        )
    return tuple(probe.calls)


def _device(kernel: Kernel) -> torch.device:
    """Where the kernel runs here."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    reasons = []
    for device in devices:
        reason = kernel.arch.refuse(arch_of(device)) or kernel.available()
        if reason is None:
            return device
        reasons.append(reason)
    raise AssertionError(f"{kernel.name} does not run on this machine: {'; '.join(reasons)}")


def _sources(model: Op | None, inputs: Sequence[torch.Tensor | Shape]) -> Iterator[_Source]:
    if model is not None:
        yield _Source(type(model).__name__, model, tuple(inputs) or tuple(inputs_for(model, 8)))
        return
    for pipeline in PIPELINES:
        yield _Source(pipeline.name, pipeline.make(), tuple((8, w) for w in pipeline.widths))


@contextlib.contextmanager
def _registered(probe: Probe) -> Iterator[None]:
    """The probe in the kernel's place, and the kernel's rule alone."""
    names = [r.name for r in REGISTRY.rules("phase") if r.name == probe.tested.runs]
    joint = [r.name for r in REGISTRY.rules("joint")]
    with REGISTRY.temporary(probe.kernel), REGISTRY.only(*names, *joint):
        yield


def _run_source(
    probe: Probe, source: _Source, device: torch.device, options: tuple[Any, ...]
) -> None:
    rows, dtypes, recipes, seed = options
    for dtype in dtypes:
        op = typed(source.op, dtype).to(device)
        made = materialize(source.inputs, dtype, device, seed)
        for recipe in recipes:
            value = RECIPES[recipe] if isinstance(recipe, str) else recipe
            counts = rows if same_rows(made) else (None,)
            for count in counts:
                xs = made if count is None else rerowed(made, count)
                kind = str(dtype).removeprefix("torch.")
                label = f"{source.name}, {kind}, {count} rows, recipe {recipe}"
                seen = len(probe.calls) + sum(probe.refused.values())
                with context(label):
                    execute(op, xs, recipe=value, seed=seed)
                if seen == len(probe.calls) + sum(probe.refused.values()) and count == counts[0]:
                    break  # this model does not hold what the kernel runs
