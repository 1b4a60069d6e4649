"""Embedding: rows of a table, with a gradient that is summed in FP32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from te_ops.basic.arguments import checked_here, empty, indices, integer, number, positive_int, wide
from te_ops.errors import ShapeError
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require
from te_ops.op import Op


def _outside(index: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Where an index is out of range; None on the CPU, where that is an error."""
    outside = (index < 0) | (index >= rows)
    if not checked_here(index):
        return outside
    if bool(outside.any()):
        worst = int(index[outside][0])
        raise ShapeError(
            f"index {worst} is out of range: the table has {rows} rows, 0 to {rows - 1}"
        )
    return None


def _embedding_infer(index: Spec, weight: Spec, padding_idx: int | None) -> Spec:
    indices("indices", index)
    require(len(weight.shape) == 2, f"the table must be a matrix, its shape is {weight.shape}")
    return weight.like((*index.shape, weight.shape[1]))


@prim("embedding", infer=_embedding_infer)
def EMBEDDING(index: torch.Tensor, weight: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """weight[index]; a bad index raises on the CPU and gives a row of NaN elsewhere (no sync)."""
    outside = _outside(index, weight.shape[0])
    if outside is None:
        return F.embedding(index, weight)
    y = F.embedding(index.masked_fill(outside, 0), weight)
    return y.masked_fill_(outside.unsqueeze(-1), torch.nan)


def _embedding_backward_infer(
    dy: Spec, index: Spec, rows: int, dtype: torch.dtype, **_: Any
) -> Spec:
    return Spec((rows, dy.shape[-1]), dtype)


@prim("embedding_backward", infer=_embedding_backward_infer)
def EMBEDDING_BACKWARD(
    dy: torch.Tensor, index: torch.Tensor, rows: int, padding_idx: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Row i is the sum of dy where index is i, in FP32 (FP64 for FP64), rounded once."""
    total = torch.zeros(rows, dy.shape[-1], dtype=wide(dy.dtype), device=dy.device)
    flat, grads = index.reshape(-1), dy.reshape(-1, dy.shape[-1]).to(total.dtype)
    if checked_here(flat):
        total.index_add_(0, flat, grads)
    else:
        # index_add_ on a device adds in any order; index_put_ sorts first, so that results repeat.
        outside = (flat < 0) | (flat >= rows)
        grads = grads.masked_fill(outside.unsqueeze(-1), 0.0)
        total.index_put_((flat.masked_fill(outside, 0).long(),), grads, accumulate=True)
    if padding_idx is not None:
        total[padding_idx] = 0.0
    return total.to(dtype)


@gradient(EMBEDDING)
def _embedding_gradient(g: Graph, node: Node, dy: Value) -> tuple[None, Value]:
    index, weight = node.inputs
    spec = g.spec(weight)
    attrs = {"rows": spec.shape[0], "padding_idx": node.padding_idx, "dtype": spec.dtype}
    return None, g.call(EMBEDDING_BACKWARD, dy, index, **attrs)


class Embedding(Op):
    """weight[indices]: indices int32 or int64 [...] give [..., embedding_dim] in the weight's
        dtype.

    The gradient of the table is summed in FP32 (FP64 for FP64) in a fixed order and rounded once.
    The autocast dtype does not apply: nothing is computed.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        padding_idx: a row that starts at 0 and gets no gradient; counted from the end if negative.
        device: of the table.
        dtype: of the table.
        init_std: standard deviation of the normal distribution that the table starts from.

    Raises:
        ShapeError: a size below 1, a `padding_idx` or (on the CPU) an index out of range, or
            indices of another dtype. On a GPU a bad index gives a row of NaN, since checking would
            wait for the device.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.num_embeddings = positive_int("Embedding", "num_embeddings", num_embeddings)
        self.embedding_dim = positive_int("Embedding", "embedding_dim", embedding_dim)
        self.padding_idx = None if padding_idx is None else self._row(padding_idx)
        self.init_std = number("Embedding", "init_std", init_std, low=0.0)
        self.weight = empty("Embedding", (self.num_embeddings, self.embedding_dim), device, dtype)
        self.reset_parameters()

    def _row(self, padding_idx: int) -> int:
        rows, index = self.num_embeddings, integer("Embedding", "padding_idx", padding_idx)
        require(
            -rows <= index < rows,
            f"Embedding: padding_idx {index} is out of range, the table has {rows} rows",
        )
        return index % rows

    def reset_parameters(self) -> None:
        """Normal(0, init_std), and zeros for the padding row."""
        with torch.no_grad():
            self.weight.normal_(0.0, self.init_std)
            if self.padding_idx is not None:
                self.weight[self.padding_idx].zero_()

    def emit(self, g: Graph, x: Value) -> Value:
        """embedding."""
        return g.call(EMBEDDING, x, g.param(self.weight), padding_idx=self.padding_idx)

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


__all__ = ["EMBEDDING", "EMBEDDING_BACKWARD", "Embedding"]
