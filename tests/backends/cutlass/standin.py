"""Kernels by their reference: whole plans with fused GEMMs run on the CPU, which stands for Hopper."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from te_ops.backends import cublas, cuda
from te_ops.backends.cuda import launch
from te_ops.backends.cutlass import choices, kernels, match, runtime, trial
from te_ops.backends.cutlass.reference import reference
from te_ops.backends.cutlass.spec import GemmSpec, Tiling
from te_ops.pointwise import Fn
from te_ops.registry import REGISTRY, Call
from te_ops.runtime import cache
from tests.backends.cuda import emulator

FUNCTIONS: dict[str, Fn] = {}
"""By symbol: a spec holds the text of its function only."""
SPECS: list[GemmSpec] = []
"""What was run."""


def matched(call: Call) -> Any:
    """`match_of`, remembering functions."""
    found = match.match_of(call)
    if isinstance(found, match.Match) and found.fn is not None:
        FUNCTIONS[found.spec.epilogue.function] = found.fn
        if found.second is not None:
            FUNCTIONS[found.spec.epilogue.rebuilt.function] = found.second
    return found


def kernel(spec: GemmSpec, *_: Any) -> Any:
    """What `runtime.kernel` gives, by the reference; it checks what it is given as a kernel would have to."""

    def run(a: Any, b: Any, *, scale_a: Any, scale_b: Any, loads: Any, **outs: Any) -> None:
        SPECS.append(spec)
        _check(spec, a, b, loads, outs)
        scales = None if scale_a is None else (scale_a, scale_b)
        blocks = (outs.pop("blocks_a"), outs.pop("blocks_b")) if spec.blocks else None
        again = spec.epilogue.rebuilt
        made = reference(
            spec, FUNCTIONS.get(spec.epilogue.function), a, b,
            scales=scales, blocks=blocks, loads=loads, scale=outs["scale"], y=outs["y"],
            second=FUNCTIONS[again.function] if again else None, rebuilt_scale=outs["rebuilt_scale"],
        )  # fmt: skip
        for name, out in outs.items():
            value = None if name in ("scale", "rebuilt_scale") else getattr(made, name)
            if value is None:
                continue
            if name == "sums":
                out.zero_()
                out[0] = value
            elif name == "amax":
                assert out.item() == 0.0
                out.copy_(value)
            elif not (name == "y" and spec.epilogue.accumulate):
                out.copy_(value)

    return run


def _check(spec: GemmSpec, a: Any, b: Any, loads: Any, outs: dict[str, Any]) -> None:
    for x, major in ((a, spec.a_major), (b, spec.b_major)):
        assert x.dim() == 2
        assert x.stride() == ((x.shape[1], 1) if major == "k" else (1, x.shape[0])) or 1 in x.shape
        assert x.data_ptr() % 16 == 0
    rows, columns = a.shape[0], b.shape[0]
    e = spec.epilogue
    width = (columns // 2 if e.acc_pair else columns) * e.outs
    wanted = {
        "acc": e.acc_store and (rows, columns),
        "y": e.store and (rows, width),
        "row": e.quantized and e.quantized.row and (rows, width),
        "col": e.quantized and e.quantized.col and (width, rows),
        "amax": e.quantized and e.quantized.amax and (),
        "sums": e.sums and (-(-rows // spec.tiling.m), width),
        "rebuilt": e.rebuilt and (columns, rows),
    }
    for name, shape in wanted.items():
        assert (outs[name] is not None) == (shape == () or bool(shape)), name
        if outs[name] is not None:
            assert tuple(outs[name].shape) == shape, name
            assert outs[name].is_contiguous()
            assert len(shape) < 2 or outs[name].data_ptr() % 16 == 0
    assert len(loads) == len(e.loads)
    for x, load in zip(loads, e.loads, strict=True):
        assert x.is_contiguous()
        assert x.dim() == (2 if load.shape == "tile" else 1)
        assert load.shape != "tile" or x.data_ptr() % 16 == 0


def build(name: str, text: str, *args: Any, **named: Any) -> Any:
    """The CUDA kernels beside them, emulated."""
    return emulator.build(name, text, *args, **named)


@contextlib.contextmanager
def hopper(
    monkeypatch: pytest.MonkeyPatch,
    mode: str = "prefer",
    *,
    emulated: bool = True,
    arch: str = "sm_90",
) -> Iterator[None]:
    """Within, plans are made for `arch` with fused GEMMs; `emulated`: they can be run."""
    monkeypatch.setattr(cache, "arch_of", lambda device: arch)
    monkeypatch.setattr(launch, "build", build if emulated else lambda *_, **__: lambda *_: None)
    monkeypatch.setattr(launch, "zero_word", emulator.zero_word)
    monkeypatch.setattr(kernels, "match_of", matched)
    for where in (kernels, trial):
        monkeypatch.setattr(where, "runtime", Runtime)
    for where in (kernels, trial, choices):
        monkeypatch.setattr(where, "limits", Limits)
    ours = [replace(k, available=lambda: None) for k in kernels.KERNELS]
    theirs = [replace(k, available=lambda: None) for k in cuda.KERNELS]
    torch_gemms = cublas.KERNELS if not emulated else ()
    hidden = ("cublas.",) if emulated else ()
    with (
        REGISTRY.without(*hidden) if hidden else contextlib.nullcontext(),
        REGISTRY.temporary(*ours, *theirs, *torch_gemms),
        choices.forced(mode),
    ):
        SPECS.clear()
        yield


class Limits:
    """What this backend asks of `limits` when it plans: everything is made."""

    TILINGS = (Tiling(), Tiling(128, 192, 2, 1, pingpong=True))

    @classmethod
    def tilings(cls, _: GemmSpec) -> list[Tiling]:
        return list(cls.TILINGS)

    @staticmethod
    def refuse(_: GemmSpec, __: str = "") -> str | None:
        return None


class Runtime:
    """What this backend asks of `runtime`."""

    reasons: dict[GemmSpec, str] = {}  # noqa: RUF012  (tests fill it)
    kernel = staticmethod(kernel)
    missing = staticmethod(runtime.missing)

    @classmethod
    def refuse(cls, spec: GemmSpec, *_: Any) -> str | None:
        return cls.reasons.get(spec)

    @classmethod
    def wait(cls, specs: list[GemmSpec], *_: Any) -> dict[GemmSpec, str | None]:
        return {spec: cls.reasons.get(spec) for spec in specs}
