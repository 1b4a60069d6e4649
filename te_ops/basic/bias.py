"""Bias: a vector added to every row."""

from __future__ import annotations

import torch

from te_ops.basic.arguments import empty, positive_int, show
from te_ops.basic.pointwise import pointwise
from te_ops.graph import Graph, Value, require
from te_ops.op import Op
from te_ops.pointwise import activations


def emit_bias(g: Graph, x: Value, bias: Value) -> Value:
    """x [..., N] + bias [N] in x's dtype; the bias gradient sums the unquantized dy in FP32."""
    shape = g.spec(x).shape
    size = g.spec(bias).shape[0]
    require(
        len(shape) >= 1 and shape[-1] == size,
        f"input has shape {show(shape)}, its last dimension must be the bias's {size} features",
    )
    return pointwise(g, activations["bias"](), x, bias, broadcast=("full", "row"))


class Bias(Op):
    """x [..., size] + bias [size], in x's dtype: added in FP32 (FP64 for FP64), rounded once.

    The bias gradient is the sum of the output gradient over all rows, before any quantization of
    it, accumulated in FP32 and rounded once to the bias's dtype; zeros for zero rows.

    Raises:
        ShapeError: `size` below 1, or an input with another last dimension.
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size = positive_int("Bias", "size", size)
        self.bias = empty("Bias", (self.size,), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros."""
        torch.nn.init.zeros_(self.bias)

    def emit(self, g: Graph, x: Value) -> Value:
        """One pointwise node."""
        return emit_bias(g, x, g.param(self.bias))

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return str(self.size)


__all__ = ["Bias", "emit_bias"]
