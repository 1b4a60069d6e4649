"""The kernels of this backend: a group around a GEMM in one launch, where that was measured to pay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from te_ops.backends.cutlass import blocks, limits, runtime, versions
from te_ops.backends.cutlass.choices import Chooser
from te_ops.backends.cutlass.launch import bind_fused
from te_ops.backends.cutlass.match import Extents, Match, extents_of, match_of
from te_ops.backends.cutlass.separate import PREFIX, bind_empty, bind_separate
from te_ops.backends.cutlass.spec import GemmSpec, Tiling
from te_ops.backends.cutlass.trial import trials_of
from te_ops.registry import REGISTRY, ArchRange, Call, Kernel, Launch
from te_ops.runtime.tape import recorder
from te_ops.runtime.tune import collecting, offer

PRIORITY = 15
"""Above the library's GEMMs, which run where these refuse."""
MAX_SHAPES = 1024  # whose way a launch remembers
RUNS = (
    "gemm",
    "gemm_epilogue",
    "gemm_epilogue_together",
    "gemm_epilogue_rounded",
    "gemm_accumulate",
)


def refuse(call: Call) -> str | None:
    """Groups that are no fused GEMM, that do not pay, or whose kernel is not there yet."""
    match = match_of(call)
    if isinstance(match, str):
        return match
    reason = _refuse_arch(match.spec, call.arch) or _refuse_spec(match.spec, call.arch)
    if reason is not None:
        return reason
    if collecting():
        for trial in trials_of(call, match):
            offer(trial)
    chooser = Chooser.of(call, match)
    fused = chooser.fused()
    if not fused:
        return chooser.at(chooser.shape.rows).why
    for tiling in fused:
        reason = runtime.refuse(_tiled(match, tiling), call.arch, call.device)
        if reason is not None:
            return reason
    return None


def remark(call: Call) -> str | None:
    """Why the fused kernel was chosen, or at this row count is not."""
    match = match_of(call)
    assert isinstance(match, Match)
    chooser = Chooser.of(call, match)
    choice = chooser.at(chooser.shape.rows)
    if choice.tiling is not None:
        return choice.why
    return f"separate kernels at {chooser.shape.rows} rows, {choice.why}; fused from {min(chooser.fused().values())} on"


def bind(call: Call) -> Launch:
    """One launch where it pays at the row count, the separate kernels elsewhere."""
    match = match_of(call)
    assert isinstance(match, Match)
    chooser = Chooser.of(call, match)
    made = {
        tiling: bind_fused(call, match, spec, runtime.kernel(spec, call.arch, call.device))
        for tiling in chooser.fused()
        for spec in (_tiled(match, tiling),)
    }
    return _Launch(call, match, chooser, made).run


def _refuse_arch(spec: GemmSpec, arch: str) -> str | None:
    """Kernels for sm_100 were not run there: offered are those whose products would be emulated otherwise."""
    if arch == blocks.ARCH and not spec.blocks:
        return f"on {arch} only products whose blocks have scales are made here"
    return None


def _refuse_spec(spec: GemmSpec, arch: str) -> str | None:
    """Why no kernel is made of a spec, None if one is."""
    tilings = limits.tilings(spec)
    if not tilings:
        return "no tiling fits it"
    return limits.refuse(replace(spec, tiling=tilings[0]), versions.target(arch))


def _tiled(match: Match, tiling: Tiling) -> GemmSpec:
    return replace(match.spec, tiling=tiling)


@dataclass
class _Launch:
    """The launches of a group, by row count."""

    call: Call
    match: Match
    chooser: Chooser
    fused: dict[Tiling, Launch]

    def __post_init__(self) -> None:
        where = self.call.reads.index
        self.a, self.b = (where(v) for v in self.match.gemm.inputs)
        self.layout = self.match.gemm.layout
        self.separate: Launch | None = None
        # What the plan was made for is bound now: nothing is compiled in a capture.
        shape = self.chooser.shape
        self.chosen: dict[Extents, tuple[Launch, bool]] = {shape: self._choose(shape)}

    def run(self, *reads: Any) -> Any:
        """Launch at the row count of these operands."""
        shape = extents_of(self.layout, reads[self.a].shape, reads[self.b].shape)
        found = self.chosen.get(shape)
        if found is None:
            if len(self.chosen) >= MAX_SHAPES:
                self.chosen.clear()
            found = self.chosen[shape] = self._choose(shape)
        launch, fused = found
        tape = recorder() if fused else None
        if tape is not None:
            tape.refuse("a fused GEMM takes tensors, whose launch is not recorded")
        return launch(*reads)

    def _choose(self, shape: Extents) -> tuple[Launch, bool]:
        if not all(shape[:3]):
            return bind_empty(self.call), False
        tiling = self.chooser.at(shape.rows).tiling
        launch = None if tiling is None else self.fused.get(tiling)
        if launch is not None:
            return launch, True
        if self.separate is None:
            self.separate = bind_separate(self.call)
        return self.separate, False


KERNELS = tuple(
    Kernel(
        runs=runs,
        name=f"{PREFIX}{runs}",
        bind=bind,
        arch=ArchRange("sm_90..sm_100"),
        priority=PRIORITY,
        refuse=refuse,
        available=runtime.missing,
        recorded=True,
        remark=remark,
    )
    for runs in RUNS
)
"""Every kernel of this backend, by the primitive or rule that it runs."""


def register() -> None:
    """Add the kernels; safe to call again. Nothing of the vendor's is imported."""
    REGISTRY.add(*KERNELS, replace=True)
