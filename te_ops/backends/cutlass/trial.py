"""A group with the ways to run it, for `te.tune`: separate kernels, and each tiling of a fused one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from te_ops.backends.cutlass import limits, runtime
from te_ops.backends.cutlass.choices import (
    PAYS,
    SEPARATE,
    kind,
    place,
    text_of,
    tiling_of,
    tuned_key,
)
from te_ops.backends.cutlass.launch import bind_fused
from te_ops.backends.cutlass.match import Match, match_of
from te_ops.backends.cutlass.separate import bind_separate
from te_ops.backends.cutlass.spec import GemmSpec
from te_ops.graph import Spec, Value
from te_ops.registry import Call, Launch
from te_ops.runtime.tune import drawn


class Trial:
    """See `te_ops.runtime.tune.Trial`; the operands are made up."""

    gain = 1 / PAYS

    def __init__(self, call: Call, match: Match) -> None:
        self.call, self.match = call, match
        self.where = place(call.device, call.arch)
        self.key = tuned_key(kind(match.spec), match.extents(call))
        self.device = call.device

    def candidates(self) -> list[str]:
        """Separate kernels, and the tilings that could be compiled; none where no row is multiplied."""
        if not all(self.match.extents(self.call)[:3]):
            return []
        specs = self.specs()
        reasons = runtime.wait(list(specs.values()), self.call.arch, self.device)
        return [SEPARATE, *(text for text, spec in specs.items() if reasons[spec] is None)]

    def start(self) -> Callable[[str], Callable[[], None]]:
        """Allocate operands; gives a run for each candidate."""
        reads = [operand(self.call.spec(v), self.device) for v in self.call.reads]

        def run(name: str) -> Callable[[], None]:
            launch = self.bound(name)

            def once() -> None:
                launch(*reads)

            return once

        return run

    def bound(self, name: str) -> Launch:
        """The launch of a candidate."""
        if name == SEPARATE:
            return bind_separate(self.call)
        spec = replace(self.match.spec, tiling=tiling_of(name))
        run = runtime.kernel(spec, self.call.arch, self.device)
        return bind_fused(self.call, self.match, spec, run)

    def specs(self) -> dict[str, GemmSpec]:
        """Of the fused kernels, by what their tilings are called."""
        spec = self.match.spec
        return {text_of(t): replace(spec, tiling=t) for t in limits.tilings(spec)}


def trials_of(call: Call, match: Match) -> Iterator[Trial]:
    """The group as it is, and with the transposed FP8 copy: whether that is written here depends on what is chosen for
    the backward."""
    yield Trial(call, match)
    node = match.quantize
    col = None if node is None else Value(node.id, 1)
    if col is not None and col not in call.writes and Value(col.node, 0) in call.writes:
        wider = replace(call, writes=tuple(sorted((*call.writes, col))))
        found = match_of(wider)
        if isinstance(found, Match):
            yield Trial(wider, found)


def operand(spec: Spec, device: torch.device) -> Any:
    """A value that fits a spec: random numbers, scales of 1, codes of random numbers."""
    shape = tuple(int(n) for n in spec.shape)
    if spec.kind.name == "dense" and math.prod(shape) == 1:
        return torch.ones(shape, dtype=spec.dtype, device=device)
    width = shape[-1] if shape else 1
    x = drawn(math.prod(shape[:-1]), width, spec.dtype, device).view(shape)
    if spec.kind.name == "dense":
        return x
    quantizer = spec.kind.quantizer.of_usage(spec.kind.usage)
    state = torch.ones(1, device=device) if quantizer.stateful else None
    seed = torch.zeros((), dtype=torch.int64, device=device) if quantizer.stochastic else None
    row = spec.kind.usage.value == "row"
    made = quantizer.records(x, row=row, col=not row, state=state, seed=seed)
    return made[0] if row else made[1]
