"""Drop path (stochastic depth): a residual branch is dropped for whole samples."""

from __future__ import annotations

import torch

from te_ops.basic.arguments import floating, number, on_host
from te_ops.basic.pointwise import pointwise
from te_ops.basic.rope import SEQUENCE_AXIS
from te_ops.basic.sequences import packed_parts
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Spec, Value, prim
from te_ops.op import Op
from te_ops.pointwise import activations
from te_ops.quantizers.philox import philox_uniform


@prim(
    "drop_path_mask",
    infer=lambda seed, shape, *_, **__: Spec(shape.shape[:-1], torch.bool),
    nature="random",
    cheap=True,
    differentiable=False,
)
def DROP_PATH_MASK(
    seed: torch.Tensor,
    shape: tuple[int, ...],
    *places: torch.Tensor,
    p: float,
    stream: int,
    axis: int,
) -> torch.Tensor:
    """True for the rows of the samples that are kept: samples lie along `axis`, or are the sequences
    that start at `places[0]` with lengths `places[1]`; rows of no sequence are kept."""
    if not places:
        size = [1] * (len(shape) - 1)
        size[axis] = shape[axis]
        keep = philox_uniform((shape[axis],), seed, stream, seed.device) >= p
        return keep.view(size).expand(shape[:-1]).contiguous()
    starts, lens = places
    keep = philox_uniform((starts.shape[0],), seed, stream, seed.device) >= p
    rows = torch.ones(shape[:-1], dtype=torch.bool, device=seed.device)
    for start, length, kept in zip(*map(on_host, (starts, lens, keep)), strict=True):
        rows[start : start + length] = kept
    return rows


class DropPath(Op):
    """In training, x or 0 for each sample, divided by 1 - p; else x.

    Args:
        p: probability of dropping a sample, within [0, 1).
        qkv_format: "bshd" for x [b, s, n], "sbhd" for [s, b, n], or "thd" for packed tokens [t, n],
            with a `te.PackedSequences` as second input, whose sequences are the samples.

    Raises:
        PlanError: p or the format is out of range.
    """

    def __init__(self, p: float, *, qkv_format: str = "bshd") -> None:
        super().__init__()
        self.p, self.qkv_format = p, qkv_format
        self._check()

    def _check(self) -> None:
        if number("DropPath", "p", self.p, low=0.0, high=1.0) == 1.0:
            raise PlanError(
                "DropPath: p must be below 1; a branch that is always dropped is no branch"
            )
        if self.qkv_format not in SEQUENCE_AXIS:
            raise PlanError(
                f"DropPath: qkv_format must be one of {', '.join(SEQUENCE_AXIS)}, got "
                f"{self.qkv_format!r}"
            )

    @property
    def num_inputs(self) -> int:  # type: ignore[override]
        """x, and the sequences of packed tokens."""
        return 2 if self.qkv_format == "thd" else 1

    def emit(self, g: Graph, *xs: Value) -> Value:
        """drop_path_mask + pointwise, or nothing."""
        self._check()
        floating(g.spec(xs[0]))
        packed = self.qkv_format == "thd"
        if len(xs) != self.num_inputs or len(g.spec(xs[0]).shape) != (2 if packed else 3):
            raise ShapeError(
                f"DropPath takes {self.num_inputs} inputs, the first {'[t, n]' if packed else '3-d'}"
            )
        if not self.training or self.p == 0.0:
            return xs[0]
        places: tuple[Value, ...] = ()
        if packed:
            parts = packed_parts(g, xs[1], own=False)
            places = (parts["q_starts"], parts["q_lens"])
        axis = 0 if self.qkv_format == "bshd" else 1
        attrs = {"p": float(self.p), "stream": g.stream(), "axis": axis}
        mask = g.call(DROP_PATH_MASK, g.seed(), g.shape(xs[0]), *places, **attrs)
        fn = activations["dropout"](self.p)
        return pointwise(g, fn, xs[0], mask, broadcast=("full", "col"))

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return f"p={self.p}"


__all__ = ["DROP_PATH_MASK", "DropPath"]
