"""Fused GEMMs: the groups of a training step around one product, against that product alone and against the kernels
that would run the group otherwise.

Each group is taken from a plan, over operands made up for it, and all tilings of its kernel are looked at: the figure
is of the best, whether or not plans use it.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import te_ops as te
from te_ops import recipe as recipes
from te_ops.backends.reference.kernels import bind_composed, bind_reference
from te_ops.quantizers import Record
from te_ops.registry import Kernel
from te_ops.runtime.cache import plan_for
from te_ops.runtime.tune import collected

from .measure import rounds, summary, timed


@dataclass(frozen=True)
class Fused:
    """A group around a product.

    Attributes:
        model: key of `MODELS`.
        group: what its members are, the gemm by its layout.
        split: whether FP8 products of this phase are summed in two levels; None: dense.
        of: "product" or "separate": what the limit is a ratio to.
        limit, aim: at most, and what one hopes for.
    """

    name: str
    about: str
    model: str
    group: str
    split: bool | None
    limit: float
    aim: float
    of: str = "product"
    rows: int = 8192
    recipe: str = "delayed"


_GATED = "8192 x 28672 x 4096"
_BACK = "8192 x 14336 x 4096"
CASES: tuple[Fused, ...] = (
    Fused("fused-swiglu", f"fc1 + SwiGLU, gate and up saved, FP8 row + col, amax; {_GATED}",
          "swiglu", "nt swiglu quantize", False, 1.03, 1.00),
    Fused("fused-dswiglu-fast", f"fc2 dgrad + dSwiGLU, FP8 row + col; {_BACK}",
          "swiglu", "nn dswiglu quantize", False, 1.28, 1.12),
    Fused("fused-dswiglu-split", f"the same, summed in two levels; {_BACK}",
          "swiglu", "nn dswiglu quantize", True, 1.33, 1.22),
    Fused("fused-dswiglu-rebuilt", f"the same, and the transposed copy of SwiGLU rebuilt; {_BACK}",
          "swiglu", "nn dswiglu quantize swiglu quantize", True, 0.97, 0.90, of="separate"),
    Fused("fused-gelu", f"fc1 + bias + GELU, FP8 row + col; {_BACK}",
          "gelu", "nt bias + gelu quantize", False, 1.05, 1.00),
    Fused("fused-dgelu", f"fc2 dgrad + dGELU + dbias, FP8 row + col; {_BACK}",
          "gelu", "nn dbias + gelu/d0 reduce quantize", False, 1.20, 1.12),
    Fused("fused-own", f"fc1 + bias + an activation of a user's, FP8 row + col; {_BACK}",
          "own", "nt bias + capped quantize", False, 1.05, 1.00),
    Fused("fused-wgrad-fast", "fc1 wgrad added to FP32; 28672 x 4096 x 8192",
          "added", "tn accumulate", False, 1.03, 1.00),
    Fused("fused-wgrad-split", "the same, summed in two levels", "added", "tn accumulate", True, 1.10, 1.05),
    Fused("fused-plain-fast", "fc2 alone; 8192 x 4096 x 14336", "swiglu", "nt", False, 1.00, 0.97),
    Fused("fused-plain-split", "fc1 dgrad alone; 8192 x 4096 x 28672", "swiglu", "nn", True, 1.00, 0.97),
    Fused("fused-dswiglu-dense", f"BF16 dgrad + dSwiGLU; {_BACK}", "swiglu", "nn dswiglu", None, 0.86, 0.86,
          of="separate", recipe="none"),
)  # fmt: skip
"""With the limits of the product in the same accumulation mode, as torch runs it."""


@te.pointwise
def capped(x: Any, cap: float) -> Any:
    """An activation that te_ops has no kernel for."""
    return cap * te.math.tanh(x / cap)


def _mlp(activation: te.Op, wide: int, bias: bool) -> te.Op:
    return te.Sequential(
        te.Linear(4096, wide, bias=bias), activation, te.Linear(14336, 4096, bias=bias)
    )


MODELS: dict[str, Callable[[], te.Op]] = {
    "swiglu": lambda: _mlp(te.SwiGLU(), 28672, False),
    "gelu": lambda: _mlp(te.GELU(), 14336, True),
    "own": lambda: _mlp(capped(cap=30.0), 14336, True),
    "added": lambda: te.Sequential(
        te.Linear(4096, 28672, bias=False, accumulate_into_main_grad=True)
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Fast(recipes.DelayedScaling):
    split_accumulator = (False, False, False)


@dataclass(frozen=True, kw_only=True)
class _Split(recipes.DelayedScaling):
    split_accumulator = (True, True, True)


def _recipe(case: Fused) -> te.Recipe | None:
    """The recipe in which every product is summed as the case says."""
    if case.recipe == "none":
        return None
    return _Split() if case.split else _Fast()


def named(call: Any) -> str:
    """The members of a group, as `Fused.group` has them."""
    names = [n.attrs["fn"].name if n.prim.name == "pointwise" else n.prim.name for n in call.nodes]
    return " ".join([call.nodes[0].attrs["layout"], *names[1:]])


def group_of(case: Fused, device: torch.device) -> Any:
    """The trial of the case's group in a plan.

    Raises:
        RuntimeError: no plan on this device has the group.
    """
    from te_ops.backends.cutlass.trial import Trial

    with torch.device(device):
        model = MODELS[case.model]().bfloat16()
        x = torch.zeros(case.rows, 4096, dtype=torch.bfloat16, requires_grad=True)
        if case.model == "added":
            weight: Any = next(model.parameters())
            weight.main_grad = torch.zeros(weight.shape)
    made = _recipe(case)
    with collected() as found, te.autocast(enabled=made is not None, recipe=made):
        plan_for(model, (x,))
    trials = [t for t in found if isinstance(t, Trial)]
    exact = [t for t in trials if named(t.call) == case.group]
    longer = [t for t in trials if named(t.call).startswith(f"{case.group} ")]  # rebuilds more
    if not (exact or longer):
        raise RuntimeError(f"no plan here has a group {case.group!r}; it needs a Hopper GPU")
    return (exact or longer)[-1]  # of several dgrads the last is the first layer's


def measure(case: Fused, device: torch.device, *, least: int, seconds: float) -> dict[str, Any]:
    """A row of the table, as plain data.

    Raises:
        RuntimeError: no such group on this device, or a result is wrong.
    """
    from te_ops.backends.cutlass.choices import SEPARATE
    from te_ops.backends.cutlass.trial import operand

    trial = group_of(case, device)
    names = trial.candidates()
    if len(names) < 2:
        raise RuntimeError("no fused kernel could be compiled; te-ops info says why")
    launches = {name: trial.bound(name) for name in names}
    launches |= _products(trial.call)
    reads = [operand(trial.call.spec(v), device) for v in trial.call.reads]
    error = worst(trial.call, {n: launches[n] for n in names}, reads)
    samples = rounds(
        {name: functools.partial(launch, *reads) for name, launch in launches.items()},
        lambda _, call: timed(call, 3, device, 1e-3),
        least=least,
        seconds=seconds,
    )
    us = {name: 1e6 * statistics.median(found) for name, found in samples.items()}
    fused = min((n for n in names if n != SEPARATE), key=us.__getitem__)
    return {
        "case": case.name,
        "about": case.about,
        "tiling": fused,
        "us": {"fused": us[fused], "separate": us[SEPARATE], **{n: us[n] for n in us if n.startswith("product")}},
        "of_product": us[fused] / us["product"],
        "of_separate": us[fused] / us[SEPARATE],
        "error": error,
        "times": {name: summary(found) for name, found in samples.items()},
    }  # fmt: skip


def _products(call: Any) -> dict[str, Callable[..., Any]]:
    """The product alone: as torch runs it, and by the best way that te_ops knows."""
    from te_ops.backends import cublas
    from te_ops.backends.cutlass.separate import part_of, taker

    alone = part_of(call, call.nodes[:1], None)
    places = [call.reads.index(v) for v in alone.reads]
    kernels = {"product": cublas.KERNELS[0], "product_best": taker("gemm", alone)}

    def run(kernel: Kernel) -> Callable[..., Any]:
        launch = kernel.bind(alone)
        return lambda *reads: launch(*(reads[i] for i in places))

    return {name: run(kernel) for name, kernel in kernels.items() if kernel is not None}


def worst(call: Any, launches: dict[str, Callable[..., Any]], reads: list[Any]) -> float:
    """Largest relative difference of a way from the group's reference.

    Raises:
        RuntimeError: it is more than the formats explain.
    """
    adds = call.nodes[-1].prim.name == "accumulate"
    reference = (bind_composed if call.rule is not None else bind_reference)(call)
    right = _dense(reference(*_kept(reads, adds)))
    largest = 0.0
    for name, launch in launches.items():
        for a, b in zip(_dense(launch(*_kept(reads, adds))), right, strict=True):
            found = float((a - b).norm() / b.norm().clamp_min(1e-30))
            if not found <= TOLERANCE:
                raise RuntimeError(f"{name}: {found:.2e} from the reference of the group")
            largest = max(largest, found)
    return largest


TOLERANCE = 2.0**-4
"""FP8 codes may be one apart where the product, summed in the tensor core, is at the edge of two."""


def _kept(reads: list[Any], adds: bool) -> list[Any]:
    """Operands that a run may write."""
    return [x.clone() if adds and isinstance(x, torch.Tensor) else x for x in reads]


def _dense(results: Any) -> list[torch.Tensor]:
    every = results if isinstance(results, tuple) else (results,)
    return [(x.dequantize(torch.float32) if isinstance(x, Record) else x).float() for x in every]


__all__ = ["CASES", "Fused", "measure", "worst"]
