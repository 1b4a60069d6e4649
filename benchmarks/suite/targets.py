"""What the cases must show: each target as data, its figure taken from the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import attention, fused
from .data import DPA

TE = ("te-module", "te-ops")
FP8 = ("delayed", "current", "block")

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """`figure(results)` may be at most (or must be at least) `limit`; `aim` is what one hopes for.

    `figure` gives None where the results do not hold what it needs.
    """

    name: str
    limit: float
    figure: Callable[[Results], float | None]
    aim: float | None = None
    least: bool = False
    unit: str = ""

    def judge(self, results: Results) -> dict[str, Any]:
        """The figure and the verdict: ok, missed, or not measured."""
        figure = self.figure(results)
        good = figure is not None and (figure >= self.limit if self.least else figure <= self.limit)
        verdict = "not measured" if figure is None else "ok" if good else "missed"
        return {
            "target": self.name,
            "limit": self.limit,
            "aim": self.aim,
            "least": self.least,
            "unit": self.unit,
            "figure": figure,
            "verdict": verdict,
        }


def time_of(results: Results, case: str, arm: str) -> float | None:
    """Median milliseconds of an arm."""
    found = results.get("pipelines", {}).get(case, {}).get("arms", {}).get(arm, {})
    ms: float | None = found.get("time", {}).get("ms")
    return ms


def ratio(case: str, arm: str, *peers: str) -> Callable[[Results], float | None]:
    """Time of an arm over that of the fastest of the peers."""

    def figure(results: Results) -> float | None:
        ours = time_of(results, case, arm)
        theirs = [t for p in peers if (t := time_of(results, case, p)) is not None]
        return ours / min(theirs) if ours is not None and theirs else None

    return figure


def number(
    case: str, arm: str, *path: str, scale: float = 1.0
) -> Callable[[Results], float | None]:
    """A number that an arm's entry holds."""

    def figure(results: Results) -> float | None:
        found: Any = results.get("pipelines", {}).get(case, {}).get("arms", {}).get(arm)
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return scale * found if isinstance(found, int | float) else None

    return figure


def quotient(
    above: Callable[[Results], float | None], *below: Callable[[Results], float | None]
) -> Callable[[Results], float | None]:
    """A figure over the smallest of others."""

    def figure(results: Results) -> float | None:
        a = above(results)
        b = [x for f in below if (x := f(results))]
        return a / min(b) if a is not None and b else None

    return figure


def _named(recipe: str) -> str:
    base, dpa = recipe.removesuffix(DPA), recipe.endswith(DPA)
    return "BF16" if recipe == "none" else base + " with FP8 attention" * dpa


def _te(recipe: str) -> tuple[str, ...]:
    return tuple(f"{p}/{recipe}" for p in TE)


def _large() -> Iterator[Target]:
    mlp = {"delayed": (0.975, 0.955), "current": (0.99, 0.97), "block": (0.94, 0.92),
           "none": (1.01, 1.0)}  # fmt: skip
    for recipe, (limit, aim) in mlp.items():
        yield Target(f"mlp, {_named(recipe)}: of the best of Transformer Engine", limit,
                     ratio("mlp", f"te_ops/{recipe}", *_te(recipe)), aim)  # fmt: skip
    compiled = ("compile/none", "compile-max/none")
    yield Target("mlp, delayed: of torch.compile in BF16", 0.58,
                 ratio("mlp", "te_ops/delayed", *compiled))  # fmt: skip
    others = {
        "linear": (0.82, 0.74, 0.92),
        "norm_linear": (0.98, 0.90, 0.88),
        "gelu_mlp": (0.96, 0.96, 0.93),
    }
    for case, limits in others.items():
        for recipe, limit in zip(FP8, limits, strict=True):
            yield Target(f"{case}, {recipe}: of the best of Transformer Engine", limit,
                         ratio(case, f"te_ops/{recipe}", *_te(recipe)))  # fmt: skip


def _layers() -> Iterator[Target]:
    limits = {"delayed": (0.92, 0.88), "current": (0.95, 0.92), "block": (0.93, 0.88),
              "none": (1.0, 1.0), "delayed" + DPA: (0.92, 0.88)}  # fmt: skip
    for recipe, (limit, aim) in limits.items():
        yield Target(f"layer, {_named(recipe)}: of Transformer Engine", limit,
                     ratio("layer", f"te_ops/{recipe}", f"te-module/{recipe}"), aim)  # fmt: skip
    for recipe in FP8:
        saved = (number("layer", f"{who}/{recipe}", "saved") for who in ("te_ops", "te-module"))
        yield Target(f"layer, {recipe}: saved activations of Transformer Engine's", 0.86,
                     quotient(*saved))  # fmt: skip
        yield Target(f"layer_small, {recipe}, eager: of Transformer Engine", 0.20,
                     ratio("layer_small", f"te_ops/{recipe}", f"te-module/{recipe}"))  # fmt: skip
        yield Target(f"layer_small, {recipe}, graphed: of Transformer Engine", 0.12,
                     ratio("layer_small", f"te_ops-graph/{recipe}", f"te-module/{recipe}"))  # fmt: skip


def _small() -> Iterator[Target]:
    for case, bf16 in (("small", 0.65), ("medium", 0.80)):
        yield Target(f"{case}, BF16, eager: of torch in BF16", bf16,
                     ratio(case, "te_ops/none", "torch/none"))  # fmt: skip
        for recipe in FP8:
            yield Target(f"{case}, {recipe}, eager: of the best of Transformer Engine", 0.30,
                         ratio(case, f"te_ops/{recipe}", *_te(recipe)))  # fmt: skip
            yield Target(f"{case}, {recipe}, eager: of torch in BF16", 1.1,
                         ratio(case, f"te_ops/{recipe}", "torch/none"))  # fmt: skip
            engine, torch_ = (0.35, 0.35) if case == "small" else (
                0.60 if recipe == "block" else 0.50, 0.60)  # fmt: skip
            yield Target(f"{case}, {recipe}, graphed: of Transformer Engine graphed", engine,
                         ratio(case, f"te_ops-graph/{recipe}", f"te-graph/{recipe}"))  # fmt: skip
            yield Target(f"{case}, {recipe}, graphed: of torch in BF16", torch_,
                         ratio(case, f"te_ops-graph/{recipe}", "torch/none"))  # fmt: skip


def _rest() -> Iterator[Target]:
    for recipe in FP8:
        peaks = [number("mlp", p, "memory", "peak") for p in _te(recipe)]
        yield Target(f"mlp, {recipe}: peak memory of Transformer Engine's", 1.0,
                     quotient(number("mlp", f"te_ops/{recipe}", "memory", "peak"), *peaks))  # fmt: skip
    for recipe, limit in (("delayed", 0.35), ("current", 0.38)):
        yield Target(f"small, {recipe}: time to issue a step", limit,
                     number("small", f"te_ops/{recipe}", "host_us", scale=1e-3), unit="ms")  # fmt: skip
    for recipe in ("none", *FP8):
        yield Target(f"small, {_named(recipe)}: bytes grown over 1,000 steps", 0,
                     number("small", f"te_ops/{recipe}", "growth", "bytes_grown"), unit="B")  # fmt: skip
        yield Target(f"small, {_named(recipe)}: kernels grown over 1,000 steps", 0,
                     number("small", f"te_ops/{recipe}", "growth", "kernels_grown"))  # fmt: skip


_SHORT = ("norm-131072x128", "norm_backward-131072x128", "layernorm-1024x12288",
          "layernorm_backward-1024x12288")  # fmt: skip


def share_wanted(name: str, recipe: str) -> float:
    """Which share of a copy's rate a stream must reach."""
    if name == "quantize-nvfp4-full":
        return 0.25
    special = {"nvfp4": 0.45, "mxfp8": 0.75}
    if recipe in special:
        return special[recipe]
    if name in _SHORT:
        return 0.75
    if recipe == "none" or name.startswith(("weights", "quantize")):
        return 0.80 if recipe == "block" else 0.90
    return 0.80 if recipe == "block" else 0.85


def _streams(rows: Mapping[str, Any]) -> Iterator[Target]:
    for name, row in rows.items():
        wanted = share_wanted(name, row.get("recipe", "none"))
        yield Target(f"{name}: rate of a copy's", wanted, _of_copy(name), least=True)
        if set(row.get("us", {})) & {"te", "compile"}:
            yield Target(f"{name}: time of the best of Transformer Engine and torch.compile", 1.0,
                         _of_peers(name))  # fmt: skip


def _of_copy(name: str) -> Callable[[Results], float | None]:
    return lambda results: results.get("streams", {}).get(name, {}).get("of_copy")


def _of_peers(name: str) -> Callable[[Results], float | None]:
    def figure(results: Results) -> float | None:
        us = results.get("streams", {}).get(name, {}).get("us", {})
        peers = [us[p] for p in ("te", "compile") if p in us]
        return us["te_ops"] / min(peers) if peers and "te_ops" in us else None

    return figure


def _fused() -> Iterator[Target]:
    for case in fused.CASES:
        whose = "the product alone" if case.of == "product" else "separate kernels"
        yield Target(
            f"{case.name}: of {whose}", case.limit, _of_group(case.name, f"of_{case.of}"), case.aim
        )


def _of_group(name: str, figure: str) -> Callable[[Results], float | None]:
    return lambda results: results.get("fused", {}).get(name, {}).get(figure)


def _attention() -> Iterator[Target]:
    whose = {
        "peer": "time of the best of torch's kernels",
        "fp8": "BF16 time of the FP8 kernel's",
        "tile": "time a tile of causal attention's",
        "host": "time of the host",
    }
    for case in attention.CASES:
        for side, limit in zip(attention.SIDES, case.limits, strict=True):
            if limit is not None:
                yield Target(f"{case.name}, {side}: {whose[case.of]}", limit,
                             _of_attention(case.name, side), least=case.of == "fp8",
                             unit="us" if case.of == "host" else "")  # fmt: skip


def _of_attention(name: str, side: str) -> Callable[[Results], float | None]:
    return lambda results: results.get("attention", {}).get(name, {}).get(side)


def judge(results: Results, *, measured_only: bool = False) -> list[dict[str, Any]]:
    """Every target with its figure and verdict; those of streams only for streams that were measured."""
    targets = (
        *_large(),
        *_layers(),
        *_small(),
        *_rest(),
        *_fused(),
        *_attention(),
        *_streams(results.get("streams", {})),
    )
    found = [t.judge(results) for t in targets]
    return [x for x in found if x["figure"] is not None] if measured_only else found


__all__ = ["Target", "judge", "share_wanted"]
