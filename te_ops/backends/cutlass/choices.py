"""Where a fused GEMM pays: what `te.tune` measured, else what was measured beforehand; without a measurement it is
not used.

A kernel is chosen where it needs at most 1 / 1.03 of the time of the library's GEMM and a separate kernel. Shapes go
by classes: the powers of two below M, N and K (`te.tune`: of the row count alone). A row count above all that were
measured goes by the largest of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from te_ops import config
from te_ops.backends.cutlass import limits, versions
from te_ops.backends.cutlass.match import Extents, Match
from te_ops.backends.cutlass.spec import Epilogue, GemmSpec, Load, Tiling
from te_ops.errors import PlanError
from te_ops.registry import REGISTRY, Call
from te_ops.runtime.tune import TABLE

SHIPPED = "measured.json"
"""Beside this file: architecture -> kind -> class of shape -> "gain tiling" (or "gain", of one that does not pay)."""
PAYS = 1.03
SEPARATE = "separate"
MODES = ("measured", "prefer", "off")
_ROW_BITS = 31


@dataclass(frozen=True)
class Choice:
    """Which way a group goes at a row count.

    Attributes:
        tiling: of the fused kernel; None: separate kernels.
        why: in words.
    """

    tiling: Tiling | None
    why: str


# -- modes


_forced: list[str] = []


def mode() -> str:
    """`TE_OPS_CUTLASS`: "measured" (the default), "prefer" (fuse wherever a kernel can) or "off".

    Raises:
        Error: another value.
    """
    return _forced[-1] if _forced else config.choice("CUTLASS", MODES[0], MODES)


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Within, the mode is this one; for tests and measurements.

    Raises:
        PlanError: there is no such mode.
    """
    if name not in MODES:
        raise PlanError(f"no mode of fused GEMMs is named {name!r}; modes: {', '.join(MODES)}")
    _forced.append(name)
    REGISTRY.version += 1
    try:
        yield
    finally:
        _forced.pop()
        REGISTRY.version += 1


# -- what a measurement is valid for


def place(device: torch.device, arch: str) -> str:
    """Device and versions, as `te.tune` files its measurements."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else arch
    listed = ", ".join(f"{package} {version}" for package, version in versions.versions().items())
    return f"{name}, {listed}"


def kind(spec: GemmSpec) -> str:
    """What a kernel does, whatever its function is: a measurement of one serves those of the same kind."""
    product = f"{spec.a}*{spec.b}"
    if spec.blocks:
        product += f" 1x{spec.blocks}"
    elif spec.scaled:
        product += " fast" if spec.fast else " split"
    majors = f"{spec.a_major}{spec.b_major}"
    return " ".join([product, *([majors] if majors != "kk" else []), _epilogue(spec.epilogue)])


def _epilogue(e: Epilogue) -> str:
    parts = [f"{'pair' if e.acc_pair else '1'}->{e.outs}" if e.function else "plain"]
    parts += [_load(load) for load in e.loads]
    if e.acc_store:
        parts.append(f"acc:{e.acc_store}")
    if e.store:
        parts.append(f"y{'+=' if e.accumulate else ':'}{e.store}")
    if e.quantized is not None:
        q = e.quantized
        written = (("row", q.row), ("col", q.col), ("amax", q.amax))
        parts.append(f"{q.format}:{'+'.join(name for name, on in written if on)}")
    parts += ["sums"] if e.sums else []
    return " ".join([*parts, *([f"rebuilt:{e.rebuilt.format}"] if e.rebuilt is not None else [])])


def _load(load: Load) -> str:
    return f"{load.shape}{'s' if load.pair else ''}:{load.format}"


def power(count: int) -> int:
    """The largest power of two up to a count."""
    return 1 << (count.bit_length() - 1) if count > 0 else 0


def class_of(shape: Extents) -> str:
    """The class of a shape, as the shipped table files it."""
    return "x".join(str(power(n)) for n in shape[:3])


def tuned_key(named: str, shape: Extents) -> str:
    """A problem of a kind, as `te.tune` files it: rows by their class."""
    return f"{named} " + "x".join(map(str, shape.at(power(shape.rows))[:3]))


# -- tilings as text


def text_of(tiling: Tiling) -> str:
    """E.g. "128x192 2x1 pingpong"."""
    schedule = "pingpong" if tiling.pingpong else "apart" if tiling.apart else "cooperative"
    return f"{tiling.m}x{tiling.n} {tiling.cluster_m}x{tiling.cluster_n} {schedule}"


def tiling_of(text: str) -> Tiling:
    """What `text_of` wrote."""
    tile, cluster, schedule = text.split()
    m, n = map(int, tile.split("x"))
    cluster_m, cluster_n = map(int, cluster.split("x"))
    return Tiling(m, n, cluster_m, cluster_n, schedule == "pingpong", schedule == "apart")


# -- choosing


@functools.cache
def shipped() -> dict[str, dict[str, dict[str, str]]]:
    """The table in this package."""
    text = importlib.resources.files(__package__).joinpath(SHIPPED).read_text()
    found: dict[str, dict[str, dict[str, str]]] = json.loads(text)
    return found


@dataclass(frozen=True)
class Chooser:
    """The choices of one group: its kind, its extents at some row count, where it runs."""

    spec: GemmSpec
    shape: Extents
    arch: str
    where: str

    @classmethod
    def of(cls, call: Call, match: Match) -> Chooser:
        """For a group of a plan."""
        return cls(match.spec, match.extents(call), call.arch, place(call.device, call.arch))

    @functools.cached_property
    def known(self) -> list[tuple[int, Choice]]:
        """Every choice with the row count from which it holds, ascending; looked up once, as a plan is bound once."""
        current = mode()
        if current == "off":
            return [(1, Choice(None, "TE_OPS_CUTLASS is off"))]
        if current == "prefer":
            tiling = limits.tilings(self.spec)[0]
            return [(1, Choice(tiling, "TE_OPS_CUTLASS prefers fused GEMMs"))]
        named = kind(self.spec)
        classes = shipped().get(self.arch, {}).get(named, {})
        found = []
        for bits in range(_ROW_BITS):
            shape = self.shape.at(1 << bits)
            text = TABLE.get(self.where, tuned_key(named, shape))
            choice = self._tuned(text) if text else self._shipped(classes.get(class_of(shape)))
            if choice is not None:
                found.append((1 << bits, choice))
        return found

    def at(self, count: int) -> Choice:
        """The choice for a row count."""
        below = [choice for rows, choice in self.known if rows <= count]
        if below:
            return below[-1]
        return Choice(None, "not measured for this shape class: te.tune(model, x) measures it")

    def fused(self) -> dict[Tiling, int]:
        """The tilings of fused kernels that some row count wants, each with the smallest such count."""
        found: dict[Tiling, int] = {}
        for rows, choice in self.known:
            if choice.tiling is not None:
                found.setdefault(choice.tiling, rows)
        return found

    def _tuned(self, text: str) -> Choice | None:
        if text == SEPARATE:
            return Choice(None, "te.tune measured separate kernels to be as fast at this shape")
        return self._checked(text, "te.tune measured it fastest at this shape")

    def _shipped(self, text: str | None) -> Choice | None:
        if text is None:
            return None
        gain, _, tiling = text.partition(" ")
        if not tiling or float(gain) < PAYS:
            return Choice(
                None,
                f"a fused GEMM measured {gain} times as fast as cuBLASLt and a separate kernel at this shape class; "
                f"{PAYS} is wanted",
            )
        return self._checked(
            tiling, f"measured {gain} times as fast as cuBLASLt and a separate kernel"
        )

    def _checked(self, text: str, why: str) -> Choice | None:
        """A choice with a tiling that this version still makes."""
        tiling = tiling_of(text)
        return Choice(tiling, why) if tiling in limits.tilings(self.spec) else None
