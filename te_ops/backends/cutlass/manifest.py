"""Which kernels are compiled ahead of time: those that the plans of known models ask for, and those of the self-test.

A model is planned as its users would, on no device, for every recipe that these kernels serve; what it asks for is
noted instead of compiled, and FP8 products are taken with both ways of summing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from te_ops import recipe
from te_ops.backends.cutlass import blocks, choices, kernels, limits, runtime, selftest, versions
from te_ops.backends.cutlass.spec import GemmSpec
from te_ops.context import ARCH, autocast
from te_ops.errors import PlanError
from te_ops.recipe import Recipe
from te_ops.registry import REGISTRY

ARCHES = ("sm_90a", "sm_100a")
"""What kernels are compiled for; the rules are those of sm_90, where they run, and of sm_100 for scales of blocks."""
_PLANNED = "sm_90"
_ROWS = 8192
RECIPES: dict[str, tuple[Recipe | None, ...]] = {
    _PLANNED: (None, recipe.DelayedScaling(), recipe.Float8CurrentScaling()),
    blocks.ARCH: (
        recipe.MXFP8BlockScaling(),
        recipe.MXFP8BlockScaling(fp8_format=recipe.Format.HYBRID),
        recipe.NVFP4BlockScaling(),
    ),
}
"""By what is planned for."""


def _llama(te: Any, added: bool) -> Any:
    """The MLP of Llama 3 8B."""
    return te.Sequential(
        te.Linear(4096, 28672, bias=False, accumulate_into_main_grad=added),
        te.SwiGLU(),
        te.Linear(14336, 4096, bias=False, accumulate_into_main_grad=added),
    )


def _gelu(te: Any, added: bool) -> Any:
    """An MLP of width 4096 with biases."""
    return te.Sequential(
        te.Linear(4096, 16384, accumulate_into_main_grad=added),
        te.GELU(),
        te.Linear(16384, 4096, accumulate_into_main_grad=added),
    )


def _residual(te: Any, added: bool) -> Any:
    """A projection behind attention, with its residual."""
    return te.Sequential(
        te.Residual(te.Linear(4096, 4096, bias=False, accumulate_into_main_grad=added))
    )


MODELS: dict[str, Callable[[Any, bool], Any]] = {
    "llama-8b": _llama,
    "gelu-mlp": _gelu,
    "projection": _residual,
}
"""By name: a pipeline, whose weight gradients may be added to a main_grad."""


def rows(
    models: Sequence[str] = tuple(MODELS), *, arch: str = _PLANNED, every: bool = False
) -> dict[str, GemmSpec]:
    """The kernels of some models and of the self-test, by names that say what they do.

    Args:
        models: names out of `MODELS`.
        arch: what they are compiled for: with other tilings where it has others, without what it does not multiply.
        every: with each tiling that `te.tune` tries, instead of the one that is used.

    Raises:
        PlanError: a model that is not known.
    """
    target = versions.target(arch)
    planned = [each for each in RECIPES if each == _PLANNED or versions.target(each) == target]
    found: dict[GemmSpec, None] = dict.fromkeys(selftest.specs(target))
    for name in models:
        if name not in MODELS:
            raise PlanError(f"no model is named {name!r}; models: {', '.join(MODELS)}")
        for each in planned:
            for asked in _asked(MODELS[name], each):
                for spec in _both_ways(asked):
                    found.update(dict.fromkeys(_both_sums(spec)))
    if every:
        found = dict.fromkeys(
            replace(spec, tiling=tiling) for spec in found for tiling in limits.tilings(spec)
        )
    made = {fit for spec in found if (fit := _fitted(spec, target)) is not None}
    return {name_of(spec): spec for spec in sorted(made, key=name_of)}


def _fitted(spec: GemmSpec, target: str) -> GemmSpec | None:
    """The kernel as it is, else with the first tiling that an architecture has; None if it has none."""
    others = (replace(spec, tiling=tiling) for tiling in limits.tilings(spec))
    return next((s for s in (spec, *others) if limits.refuse(s, target) is None), None)


def _both_ways(spec: GemmSpec) -> Iterator[GemmSpec]:
    """A kernel as it is, and where a copy is not rebuilt but saved: without it, or with one more copy to save."""
    yield spec
    e = spec.epilogue
    if e.rebuilt is not None:
        yield replace(spec, epilogue=replace(e, rebuilt=None))
    if e.quantized is not None and e.quantized.row and not e.quantized.col:
        yield replace(spec, epilogue=replace(e, quantized=replace(e.quantized, col=True)))


def _both_sums(spec: GemmSpec) -> Iterator[GemmSpec]:
    """A kernel as it is, and of FP8 products with the other way of summing, which a recipe may choose."""
    yield spec
    if spec.scaled and not spec.blocks:
        other = replace(spec, fast=not spec.fast)
        yield replace(other, tiling=limits.tilings(other)[0])


def name_of(spec: GemmSpec) -> str:
    """What it multiplies, what follows, how it is tiled, and the beginning of its key."""
    function = spec.epilogue.function or "plain"
    tiling = choices.text_of(spec.tiling)
    return f"{choices.kind(spec)} [{function}] {tiling} {spec.key[:8]}"


def _asked(make: Callable[[Any, bool], Any], arch: str) -> Iterator[GemmSpec]:
    """What plans of a pipeline ask for: where it was measured to pay, and wherever it can be."""
    token = ARCH.set(arch)
    try:
        for mode in ("measured", "prefer"):
            with choices.forced(mode), runtime.collecting() as found:
                REGISTRY.add(*kernels.KERNELS, replace=True)
                for each in RECIPES[arch]:
                    for added in (False, True):
                        _plan(make, each, added)
            yield from (spec for spec, _ in found if isinstance(spec, GemmSpec))
    finally:
        ARCH.reset(token)


def _plan(make: Callable[[Any, bool], Any], with_recipe: Recipe | None, added: bool) -> None:
    """Plan a pipeline without any data."""
    te = importlib.import_module("te_ops")  # whole pipelines are above this layer
    dtype, device = torch.bfloat16, torch.device("meta")
    with device:
        model = make(te, added).to(dtype)
    for parameter in model.parameters():
        parameter.main_grad = torch.empty_like(parameter, dtype=torch.float32) if added else None
    width = next(model.parameters()).shape[-1]
    x = torch.empty(_ROWS, width, dtype=dtype, device=device, requires_grad=True)
    with autocast(enabled=with_recipe is not None, recipe=with_recipe):
        model.plan(x)
