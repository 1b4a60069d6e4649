"""Cross entropy over the last dimension: FP32 maths, logits only read, one saved number per row."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_ops.basic.arguments import checked_here, floating, indices, integer, number, show, wide
from te_ops.basic.pointwise import reduce
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require
from te_ops.op import Op


class _Targets(NamedTuple):
    safe: torch.Tensor  # int64, a class everywhere
    ignored: torch.Tensor
    bad: torch.Tensor | None  # out of range; None on the CPU, where that is an error


def _targets(targets: torch.Tensor, classes: int, ignore_index: int) -> _Targets:
    ignored = targets == ignore_index
    bad = ~ignored & ((targets < 0) | (targets >= classes))
    safe = targets.masked_fill(ignored | bad, 0).long()
    if not checked_here(targets):
        return _Targets(safe, ignored, bad)
    if bool(bad.any()):
        raise ShapeError(
            f"target {int(targets[bad][0])} is out of range: there are {classes} classes, 0 to "
            f"{classes - 1}, and ignore_index is {ignore_index}"
        )
    return _Targets(safe, ignored, None)


def _cross_entropy_infer(
    logits: Spec, targets: Spec, label_smoothing: float, ignore_index: int
) -> tuple[Spec, Spec]:
    floating(logits)
    indices("targets", targets)
    require(
        len(logits.shape) >= 1 and logits.shape[-1] > 0 and targets.shape == logits.shape[:-1],
        f"logits have shape {show(logits.shape)}, targets {show(targets.shape)}; targets must have "
        "the logits' shape without its last dimension, the classes",
    )
    row = Spec(targets.shape, wide(logits.dtype))
    return row, row


@prim("cross_entropy", n_out=2, infer=_cross_entropy_infer)
def CROSS_ENTROPY(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, lse) per row: lse = log(sum(exp(x))), loss = lse - (1 - s) x[target] - s mean(x).

    The loss is 0 where ignored.
    """
    t = _targets(targets, logits.shape[-1], ignore_index)
    x = logits.to(wide(logits.dtype))
    top = x.amax(-1, keepdim=True)
    x = x - top  # the loss is a difference: taken from the largest logit, large ones do not cancel
    log_sum = torch.logsumexp(x, -1)
    loss = log_sum - (1.0 - label_smoothing) * x.gather(-1, t.safe.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:  # without it, a class masked with -inf takes no part
        loss = loss - label_smoothing * x.mean(-1)
    if t.bad is not None:
        loss = loss.masked_fill(t.bad, torch.nan)
    return loss.masked_fill(t.ignored, 0.0), top.squeeze(-1) + log_sum


@prim("cross_entropy_backward", infer=lambda dloss, logits, *_, **__: logits.like())
def CROSS_ENTROPY_BACKWARD(
    dloss: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    label_smoothing: float,
    *,
    ignore_index: int,
) -> torch.Tensor:
    """dlogits = dloss (softmax - (1 - s) [class is target] - s / classes); 0 where ignored."""
    t = _targets(targets, logits.shape[-1], ignore_index)
    grad = torch.exp(
        logits.to(lse.dtype) - lse.unsqueeze(-1)
    )  # a new tensor: the rest may write in place
    share = torch.full_like(lse, label_smoothing - 1.0).unsqueeze(-1)
    grad.scatter_add_(-1, t.safe.unsqueeze(-1), share)
    if label_smoothing:
        grad.sub_(label_smoothing / logits.shape[-1])
    grad.mul_(dloss.to(lse.dtype).unsqueeze(-1))
    if t.bad is not None:
        grad.masked_fill_(t.bad.unsqueeze(-1), torch.nan)
    return grad.masked_fill_(t.ignored.unsqueeze(-1), 0.0).to(logits.dtype)


@gradient(CROSS_ENTROPY)
def _cross_entropy_gradient(
    g: Graph, node: Node, dloss: Value, _: Value | None
) -> tuple[Value, None]:
    logits, targets = node.inputs
    return g.call(CROSS_ENTROPY_BACKWARD, dloss, logits, targets, node.outs[1], **node.attrs), None


def _counted(targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """How many targets count, at least 1: the mean of nothing is 0 / 1."""
    return (targets != ignore_index).sum().clamp_(min=1)


@prim("mean_loss", infer=lambda loss, targets, ignore_index: loss.like(()))
def MEAN_LOSS(loss: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The sum over rows divided by the number of targets that are not ignored; 0 if none is."""
    return loss.sum() / _counted(targets, ignore_index)


@prim("mean_loss_backward", infer=lambda dy, targets, ignore_index: dy.like(targets.shape))
def MEAN_LOSS_BACKWARD(dy: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """dy / count for every row."""
    return (dy / _counted(targets, ignore_index)).expand(targets.shape)


@gradient(MEAN_LOSS)
def _mean_loss_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value, None]:
    return g.call(MEAN_LOSS_BACKWARD, dy, node.inputs[1], ignore_index=node.ignore_index), None


class CrossEntropy(Op):
    """Cross entropy of logits [..., classes] and int32 or int64 targets [...]; FP32 maths and
    result (FP64 for FP64).

    Takes (logits, targets). The logits are never written; saved for backward are the logits, the
    targets and one number per row. Rows whose target is `ignore_index` have loss 0 and gradient 0
    whatever their logits hold.

    Args:
        label_smoothing: share of the target probability that goes evenly to all classes, within [0,
        1]. ignore_index: the target of rows that do not count.
        reduction: "mean" over the rows that count (0 if there is none, where torch gives NaN),
            "sum", or "none" for one loss per row.

    Raises:
        PlanError: a bad smoothing or reduction.
        ShapeError: shapes or dtypes that do not fit; on the CPU also a target out of range. On a
            GPU such a row has loss NaN and gradient NaN, since checking would wait for the device.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.reduction = reduction
        self._check()

    def _check(self) -> None:
        number("CrossEntropy", "label_smoothing", self.label_smoothing, low=0.0, high=1.0)
        integer("CrossEntropy", "ignore_index", self.ignore_index)
        if self.reduction not in ("mean", "sum", "none"):
            raise PlanError(
                f'CrossEntropy: reduction must be "mean", "sum" or "none", got {self.reduction!r}'
            )

    def emit(self, g: Graph, logits: Value, targets: Value) -> Value:
        """cross_entropy + its reduction."""
        self._check()  # the options may have been assigned since
        ignore, smoothing = self.ignore_index, float(self.label_smoothing)
        loss, _ = g.calls(
            CROSS_ENTROPY, logits, targets, label_smoothing=smoothing, ignore_index=ignore
        )
        if self.reduction == "none":
            return loss
        if self.reduction == "sum":
            return reduce(g, loss, over="all", dtype=g.spec(loss).dtype)
        return g.call(MEAN_LOSS, loss, targets, ignore_index=ignore)

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return (
            f"label_smoothing={self.label_smoothing}, ignore_index={self.ignore_index}, "
            f"reduction={self.reduction!r}"
        )


__all__ = [
    "CROSS_ENTROPY",
    "CROSS_ENTROPY_BACKWARD",
    "MEAN_LOSS",
    "MEAN_LOSS_BACKWARD",
    "CrossEntropy",
]
