"""What a fused GEMM computes and how it is tiled, as picklable values: the key of every cache, the manifest's rows and
what the compiler is asked for are this one object.

    acc = scale_a * scale_b * (A B^T)                       FP32; A is [M, K], B is [N, K], both K-major for FP8
                                                            with one scale; on sm_100a, blocks along K may have one each
    y, ... = fn(acc, loads...)                              FP32; one output, or two halves of a pair
    stores of acc and of y

A paired accumulator takes B as [2, F, K] (gate rows, then linear rows) and N = 2 F; the kernel sees gate f and linear f
beside each other, in tensors they keep the natural order (gate half, linear half).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from te_ops.errors import PlanError

Format: TypeAlias = Literal["fp32", "bf16", "fp16", "e4m3", "e5m2", "e2m1"]
Shape: TypeAlias = Literal["tile", "row", "column", "scalar"]
"""Of an operand of the epilogue: [M, N], [N] (one value a column of the result, as a bias), [M], or one value."""


@dataclass(frozen=True)
class Load:
    """An operand of the epilogue beside the accumulator.

    Attributes:
        shape: how it lies over the result.
        format: of its elements.
        pair: two halves (gate, linear) of a tensor [M, 2 N] or [2 N]; the function gets both.
    """

    shape: Shape
    format: Format
    pair: bool = False


@dataclass(frozen=True)
class Quantized:
    """Per-tensor FP8 copies of y, made of one fragment.

    Attributes:
        format: "e4m3" or "e5m2".
        row: whether the codes are written as [M, N].
        col: whether they are written transposed, [N, M].
        amax: whether max |y| is found (NaN > Inf > finite: integer maximum of the bits), over rows that exist.
    """

    format: Format
    row: bool = True
    col: bool = False
    amax: bool = True


@dataclass(frozen=True)
class Rebuilt:
    """A transposed FP8 copy [N, M] of a value that is made of the epilogue's loads alone: what backward would else keep
    from the forward, and what a pass over the same loads makes for next to nothing.

    Attributes:
        function, text: of the value, as those of the epilogue; its result is one value.
        loads: which of the epilogue's loads it reads, in the order of its inputs.
        format: "e4m3" or "e5m2"; the scale is one of its own.
    """

    function: str
    text: str = field(repr=False)
    loads: tuple[int, ...]
    format: Format


@dataclass(frozen=True)
class Epilogue:
    """What follows the product.

    Attributes:
        function: name of the function in `text`; "" for y = acc.
        text: its source in the CuTe DSL, as `te_ops.pointwise.lower(fn, "cutedsl")` writes it, with its prelude.
        acc: which of the function's inputs is the accumulator.
        acc_pair: the accumulator is a pair.
        loads: its other inputs, in order.
        outs: 1, or 2 for a pair (gate, linear), which is stored in natural order.
        rounds_acc: acc is rounded to this format before the function reads it (it is stored, or the rule is exact).
        rounds: y is rounded to this format before it is quantized.
        acc_store: acc is written in this format ([M, N]; a pair in natural order).
        store: y is written in this format.
        quantized: FP8 copies and amax of y; codes are y * scale, scale a scalar in device memory.
        sums: y's sums over the rows of each tile are made, in FP32, before any rounding but `rounds`; their total is
            the gradient of a bias.
        accumulate: y is added to the FP32 (or 16-bit) tensor that `store` names, in place.
        rebuilt: a copy of another value.
    """

    function: str = ""
    text: str = field(default="", repr=False)
    acc: int = 0
    acc_pair: bool = False
    loads: tuple[Load, ...] = ()
    outs: int = 1
    rounds_acc: Format | None = None
    rounds: Format | None = None
    acc_store: Format | None = None
    store: Format | None = None
    quantized: Quantized | None = None
    sums: bool = False
    accumulate: bool = False
    rebuilt: Rebuilt | None = None


@dataclass(frozen=True)
class Tiling:
    """How the result is cut among thread blocks.

    Attributes:
        m, n: of a block's tile.
        cluster_m, cluster_n: thread blocks of a cluster, which share operands.
        pingpong: two warp groups take turns with whole tiles; else they share one.
        apart: two warp groups share a tile and go on with the next one, while a third makes its epilogue: they hand
            the accumulators over in shared memory. For products whose accumulators leave pingpong no registers.
    """

    m: int = 128
    n: int = 128
    cluster_m: int = 2
    cluster_n: int = 1
    pingpong: bool = False
    apart: bool = False


@dataclass(frozen=True)
class GemmSpec:
    """One fused GEMM kernel.

    Attributes:
        a, b: formats of the operands.
        a_major, b_major: "k" if an operand is contiguous along K, else "mn"; FP8 with one scale and E2M1 want "k".
        scaled: FP8 and E2M1 operands come with a scale of the tensor each, scalars in device memory.
        blocks: elements along K that have a scale of their own, in both operands, which the tensor cores of sm_100a
            multiply with: 32 of FP8 with E8M0 scales (MXFP8), 16 of E2M1 with E4M3 scales (NVFP4); 0: there are none.
        fast: FP8 products are summed in the tensor core's own accumulator; else promoted to FP32 every K tile.
        epilogue, tiling: see there.
    """

    family: ClassVar[str] = "gemm"

    a: Format
    b: Format
    epilogue: Epilogue = Epilogue()
    tiling: Tiling = Tiling()
    a_major: Literal["k", "mn"] = "k"
    b_major: Literal["k", "mn"] = "k"
    scaled: bool = False
    fast: bool = True
    blocks: Literal[0, 16, 32] = 0

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for manifests and messages."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GemmSpec:
        """The spec that `to_dict` wrote, also after a way through JSON.

        Raises:
            PlanError: a name is not known, or one that has no default is missing.
        """
        try:
            epilogue = dict(values.get("epilogue", {}))
            epilogue["loads"] = tuple(Load(**load) for load in epilogue.get("loads", ()))
            if epilogue.get("quantized") is not None:
                epilogue["quantized"] = Quantized(**epilogue["quantized"])
            if epilogue.get("rebuilt") is not None:
                again = epilogue["rebuilt"]
                epilogue["rebuilt"] = Rebuilt(**{**again, "loads": tuple(again["loads"])})
            made = {"epilogue": Epilogue(**epilogue), "tiling": Tiling(**values.get("tiling", {}))}
            return cls(**{**values, **made})
        except (TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"this is no GemmSpec: {error}; `to_dict` shows what one is") from error

    @property
    def key(self) -> str:
        """Short and stable: the same for equal specs in every process."""
        return hashlib.blake2b(
            repr(sorted(_flat(self.to_dict()))).encode(), digest_size=12
        ).hexdigest()


def arguments(spec: GemmSpec) -> list[tuple[str, bool]]:
    """The epilogue's arguments in the compiled function's order: (name, whether it is passed as an address).

    A name that comes twice stands for the halves of one tensor.
    """
    e = spec.epilogue
    found = [(name, True) for name in ("scale_a", "scale_b") if spec.scaled]
    for index, load in enumerate(e.loads):
        both = load.pair and not (e.acc_pair and load.shape == "row")
        found += [(f"load{index}", load.shape == "scalar")] * (2 if both else 1)
    main = main_output(e)
    if e.acc_store is not None and main != "acc":
        found += [("acc", False)] * (2 if e.acc_pair else 1)
    if e.store is not None and main != "y":
        found += [("y", False)] * e.outs
    q = e.quantized
    if q is not None:
        found += [(name, name == "amax") for name in ("row", "col", "amax") if getattr(q, name)]
        found += [(name, True) for name in ("scale", "scale_inv") if q.row or q.col]
    found += [("sums", False)] * (e.outs if e.sums else 0)
    if e.rebuilt is not None:
        found += [("rebuilt", False), ("rebuilt_scale", True), ("rebuilt_inv", True)]
    return found


def main_output(epilogue: Epilogue) -> str | None:
    """The output that the main loop's own store writes: "y" or "acc", of full width and not quantized."""
    if epilogue.store is not None:
        return "y" if epilogue.outs == 1 and not epilogue.acc_pair else None
    return "acc" if epilogue.acc_store is not None and not epilogue.function else None


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [item for k, v in value.items() for item in _flat(v, f"{path}.{k}")]
    if isinstance(value, list | tuple):
        listed = [item for i, v in enumerate(value) for item in _flat(v, f"{path}.{i}")]
        return [*listed, (f"{path}.#", str(len(value)))]
    return [(path, repr(value))]
