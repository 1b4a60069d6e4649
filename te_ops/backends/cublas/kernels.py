"""The kernels of this backend: which pairs of operand formats the library multiplies, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_ops.backends.cublas import lt
from te_ops.backends.cublas.dense import bind_dense, refuse_dense
from te_ops.backends.cublas.direct import bind_direct, refuse_direct
from te_ops.backends.cublas.emulated import bind_emulated, refuse_emulated
from te_ops.backends.cublas.problem import Problem, problem_of
from te_ops.backends.cublas.scaled import bind_blocks, bind_tensorwise, refuse_blocks, refuse_scaled
from te_ops.graph import Spec
from te_ops.registry import REGISTRY, ArchRange, Call, Kernel, Launch


@dataclass(frozen=True)
class _Family:
    """How one pair of formats is multiplied, on which devices."""

    arch: ArchRange
    refuse: Callable[[Problem], str | None]
    bind: Callable[[Problem], Launch]


# Later devices have tensor cores for other block formats, and none for these.
_BLOCKS = _Family(ArchRange("sm_90"), refuse_blocks, bind_blocks)
_FAMILIES: dict[tuple[str, str], _Family] = {
    ("dense", "dense"): _Family(ArchRange("cuda"), refuse_dense, bind_dense),
    ("tensor", "tensor"): _Family(ArchRange("sm_89+"), refuse_scaled, bind_tensorwise),
    ("1x128", "128x128"): _BLOCKS,
    ("128x128", "1x128"): _BLOCKS,
    ("1x128", "1x128"): _BLOCKS,
}
_EMULATED = _Family(ArchRange("sm_80+"), refuse_emulated, bind_emulated)


def scaling_of(spec: Spec) -> str:
    """The scaling of an operand as `_FAMILIES` names it, else what its format is called."""
    if spec.kind.name != "record":
        return spec.kind.name
    quantizer = spec.kind.quantizer.of_usage(spec.kind.usage)
    if quantizer.name in ("float8_delayed", "float8_current"):
        return "tensor"
    if quantizer.name == "float8_block":
        return "1x128" if quantizer.block_scaling_dim == 1 else "128x128"
    return str(quantizer.describe())


def _native(problem: Problem) -> _Family | str:
    """The family that multiplies the operands as they are, or why there is none."""
    pair = (scaling_of(problem.a), scaling_of(problem.b))
    return _FAMILIES.get(pair) or f"the library is given no {pair[0]} x {pair[1]} product"


def _by_torch(problem: Problem) -> _Family | str:
    """The same family through torch's calls."""
    return "torch adds a bias to a product, and no matrix" if problem.c else _native(problem)


def _direct(problem: Problem) -> _Family | str:
    """The same family through cuBLASLt itself; what that does not take goes the way of the family."""
    family = _native(problem)
    if isinstance(family, str):
        return family
    if problem.c is not None and family is _BLOCKS:
        return "cuda.gemm_block and a sum of its own take less time for block scales"
    native = family

    def refuse(problem: Problem) -> str | None:
        return native.refuse(problem) or refuse_direct(problem)

    def bind(problem: Problem) -> Launch:
        pair = (scaling_of(problem.a), scaling_of(problem.b))
        scales = ("", "") if pair == ("dense", "dense") else pair
        return bind_direct(problem, scales, added(native.bind, problem))

    return _Family(family.arch, refuse, bind)


def added(bind: Callable[[Problem], Launch], problem: Problem) -> Launch:
    """The family's launch; torch adds c, or the product to a tensor, for which it is made in FP32."""
    if problem.c is not None:
        alone = bind(replace(problem, c=None))
        return lambda a, b, *more: alone(a, b, *more[:-1]) + more[-1]
    if not problem.accumulate:
        return bind(problem)
    launch = bind(replace(problem, dtype=torch.float32, accumulate=False))

    def add(a: Any, b: Any, total: Any) -> Any:
        return total.add_(launch(a, b))

    return add


def _emulated(_: Problem) -> _Family | str:
    return _EMULATED


@dataclass(frozen=True)
class _Way:
    """A way to multiply: through torch or through the library itself."""

    family_of: Callable[[Problem], _Family | str]
    priority: int
    available: Callable[[], str | None] = lambda: None
    recorded: bool = False


_TORCH, _LT = _Way(_by_torch, 10), _Way(_direct, 12, lambda: lt.missing(), recorded=True)


def _kernel(runs: str, name: str, way: _Way) -> Kernel:
    def refuse(call: Call) -> str | None:
        problem = problem_of(call)
        family = problem if isinstance(problem, str) else way.family_of(problem)
        if isinstance(problem, str) or isinstance(family, str):
            return str(family)
        return family.arch.refuse(call.arch) or family.refuse(problem)

    def bind(call: Call) -> Launch:
        problem = problem_of(call)
        assert isinstance(problem, Problem)
        family = way.family_of(problem)
        assert isinstance(family, _Family)
        return in_order(family.bind(problem), problem.places)

    return Kernel(
        runs,
        name,
        bind,
        ArchRange("cuda"),
        way.priority,
        refuse=refuse,
        available=way.available,
        recorded=way.recorded,
    )


def in_order(launch: Launch, places: tuple[int, ...]) -> Launch:
    """The launch over the values that the call reads, each of which comes once."""
    if places == tuple(range(len(places))):
        return launch
    return lambda *reads: launch(*(reads[i] for i in places))


KERNELS: tuple[Kernel, ...] = (
    _kernel("gemm", "cublas.gemm", _TORCH),
    _kernel("gemm_epilogue", "cublas.gemm_epilogue", _TORCH),
    _kernel("gemm", "cublas.emulated", _Way(_emulated, 5)),
)
"""Through torch."""
DIRECT: tuple[Kernel, ...] = (
    _kernel("gemm", "cublas.lt_gemm", _LT),
    _kernel("gemm_epilogue", "cublas.lt_gemm_epilogue", _LT),
    _kernel("gemm_accumulate", "cublas.lt_gemm_accumulate", _LT),
)
"""Through cuBLASLt itself, preferred where its bindings are there."""


def register() -> None:
    """Add the kernels; safe to call again."""
    REGISTRY.add(*KERNELS, *DIRECT, replace=True)
    REGISTRY.on_release("cublas", lt.release)
