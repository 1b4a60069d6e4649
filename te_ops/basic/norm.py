"""LayerNorm, RMSNorm and L2Normalization: statistics in FP32 (FP64 for FP64) whatever the recipe.

Primitives normalise the last dimension; an op whose `normalized_shape` has several dimensions reads
them as one (a view). A gamma gradient is a primitive of its own, so a frozen gamma costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from te_ops.basic.arguments import empty, flag, floating, number, show, sizes, wide
from te_ops.basic.pointwise import cast, reduce
from te_ops.basic.structure import RESHAPE_LIKE, RESHAPE_TAIL, add
from te_ops.errors import PlanError
from te_ops.graph import Graph, Node, Prim, Spec, Value, gradient, prim, require
from te_ops.op import Op

# -- shape rules


def _rows(x: Spec) -> Spec:
    """One statistic per row."""
    return Spec(x.shape[:-1], wide(x.dtype))


def _norm_infer(x: Spec, *weights: Spec, statistics: int) -> tuple[Spec, ...]:
    require(len(x.shape) >= 1, "input has no dimension, there is nothing to normalise")
    for w in weights:
        require(
            w.shape == x.shape[-1:],
            f"input has shape {show(x.shape)}, the weight has {show(w.shape)}",
        )
    return (x.like(), *(_rows(x) for _ in range(statistics)))


def _like_second(_: Spec, x: Spec, *__: Spec, **___: Any) -> Spec:
    return x.like()


def _features(_: Spec, x: Spec, *__: Spec, dtype: torch.dtype) -> Spec:
    return Spec(x.shape[-1:], dtype)


# -- the maths, on tensors of the wide dtype


def _gain(gamma: torch.Tensor, zero_centered: bool, dtype: torch.dtype) -> torch.Tensor:
    gain = gamma.to(dtype)
    return gain + 1.0 if zero_centered else gain


def _project(
    g: torch.Tensor, xhat: torch.Tensor, rstd: torch.Tensor, *, mean: bool
) -> torch.Tensor:
    """rstd * (g - xhat * <g, xhat>), < > a mean or a sum: the gradient of x / |x|."""
    product = g * xhat
    along = product.mean(-1, keepdim=True) if mean else product.sum(-1, keepdim=True)
    return (g - xhat * along) * rstd.unsqueeze(-1)


def _sum_rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0)


# -- RMSNorm (Zhang and Sennrich, arXiv:1910.07467)


@prim("rmsnorm", n_out=2, infer=lambda x, w, eps, zero_centered: _norm_infer(x, w, statistics=1))
def RMSNORM(
    x: torch.Tensor, gamma: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rstd): rstd = 1 / sqrt(mean(x^2) + eps), y = x * rstd * gamma, or * (1 + gamma)."""
    xw = x.to(wide(x.dtype))
    rstd = torch.rsqrt(xw.square().mean(-1) + eps)
    y = xw * rstd.unsqueeze(-1) * _gain(gamma, zero_centered, xw.dtype)
    return y.to(x.dtype), rstd


@prim("rmsnorm_backward", infer=_like_second)
def RMSNORM_BACKWARD(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor, zero_centered: bool
) -> torch.Tensor:
    """dx = rstd * (g - xhat * mean(g * xhat)) with g = dy * gamma and xhat = x * rstd."""
    g = dy.to(rstd.dtype) * _gain(gamma, zero_centered, rstd.dtype)
    xhat = x.to(rstd.dtype) * rstd.unsqueeze(-1)
    return _project(g, xhat, rstd, mean=True).to(x.dtype)


@prim("rmsnorm_dgamma", infer=_features)
def RMSNORM_DGAMMA(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Sum over rows of dy * x * rstd, rounded once."""
    xhat = x.to(rstd.dtype) * rstd.unsqueeze(-1)
    return _sum_rows(dy.to(rstd.dtype) * xhat).to(dtype)


@gradient(RMSNORM)
def _rmsnorm_gradient(g: Graph, node: Node, dy: Value, _: Value | None) -> tuple[Value, Value]:
    (x, gamma), rstd = node.inputs, node.outs[1]
    dx = g.call(RMSNORM_BACKWARD, dy, x, gamma, rstd, zero_centered=node.zero_centered)
    return dx, g.call(RMSNORM_DGAMMA, dy, x, rstd, dtype=g.spec(gamma).dtype)


# -- LayerNorm (Ba, Kiros and Hinton, arXiv:1607.06450)


@prim(
    "layernorm",
    n_out=3,
    infer=lambda x, w, b, eps, zero_centered: _norm_infer(x, w, b, statistics=2),
)
def LAYERNORM(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, rstd, mean): y = (x - mean) * rstd * gamma + beta with the biased variance of the row."""
    xw = x.to(wide(x.dtype))
    mean = xw.mean(-1)
    centred = xw - mean.unsqueeze(-1)
    # The variance of the differences: E[x^2] - E[x]^2 cancels where the mean is large.
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd.unsqueeze(-1) * _gain(gamma, zero_centered, xw.dtype) + beta.to(xw.dtype)
    return y.to(x.dtype), rstd, mean


def _normalised(x: torch.Tensor, rstd: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return (x.to(rstd.dtype) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)


@prim("layernorm_backward", infer=_like_second)
def LAYERNORM_BACKWARD(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor,
    *,
    zero_centered: bool,
) -> torch.Tensor:
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) with g = dy * gamma."""
    g = dy.to(rstd.dtype) * _gain(gamma, zero_centered, rstd.dtype)
    xhat = _normalised(x, rstd, mean)
    # mean(xhat) is 0, so the mean may be taken off g first.
    return _project(g - g.mean(-1, keepdim=True), xhat, rstd, mean=True).to(x.dtype)


@prim("layernorm_dgamma", infer=_features)
def LAYERNORM_DGAMMA(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, mean: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Sum over rows of dy * (x - mean) * rstd, rounded once."""
    return _sum_rows(dy.to(rstd.dtype) * _normalised(x, rstd, mean)).to(dtype)


@gradient(LAYERNORM)
def _layernorm_gradient(
    g: Graph, node: Node, dy: Value, *_: Value | None
) -> tuple[Value, Value, Value]:
    x, gamma, beta = node.inputs
    _y, rstd, mean = node.outs
    dx = g.call(LAYERNORM_BACKWARD, dy, x, gamma, rstd, mean, zero_centered=node.zero_centered)
    dgamma = g.call(LAYERNORM_DGAMMA, dy, x, rstd, mean, dtype=g.spec(gamma).dtype)
    return dx, dgamma, reduce(g, dy, over="rows", dtype=g.spec(beta).dtype)


# -- L2 normalisation


@prim("l2norm", n_out=2, infer=lambda x, eps: _norm_infer(x, statistics=1))
def L2NORM(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, rnorm): rnorm = 1 / sqrt(sum(x^2) + eps), y = x * rnorm."""
    xw = x.to(wide(x.dtype))
    rnorm = torch.rsqrt(xw.square().sum(-1) + eps)
    return (xw * rnorm.unsqueeze(-1)).to(x.dtype), rnorm


@prim("l2norm_backward", infer=_like_second)
def L2NORM_BACKWARD(dy: torch.Tensor, x: torch.Tensor, rnorm: torch.Tensor) -> torch.Tensor:
    """dx = rnorm * (dy - xhat * sum(dy * xhat)) with xhat = x * rnorm."""
    xhat = x.to(rnorm.dtype) * rnorm.unsqueeze(-1)
    return _project(dy.to(rnorm.dtype), xhat, rnorm, mean=False).to(x.dtype)


@gradient(L2NORM)
def _l2norm_gradient(g: Graph, node: Node, dy: Value, _: Value | None) -> tuple[Value]:
    return (g.call(L2NORM_BACKWARD, dy, node.inputs[0], node.outs[1]),)


# -- ops


class _Norm(Op):
    """What LayerNorm and RMSNorm share: parameters, normalised dimensions, the residual form."""

    normalise: ClassVar[Prim]
    parameters_of: ClassVar[tuple[str, ...]]
    weight: torch.nn.Parameter

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        residual: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.normalized_shape = sizes(name, "normalized_shape", normalized_shape)
        self.eps = number(name, "eps", eps, low=0.0)
        self.zero_centered_gamma = flag(name, "zero_centered_gamma", zero_centered_gamma)
        self.residual = flag(name, "residual", residual)
        for parameter in self.parameters_of:
            setattr(self, parameter, empty(name, self.normalized_shape, device, dtype))
        self.reset_parameters()

    @property
    def num_inputs(self) -> int:  # type: ignore[override]
        """2 with `residual`, else 1."""
        return 1 + self.residual

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        """1 with `residual`, the sum; else 0."""
        return int(self.residual)

    @property
    def feature_dims(self) -> int:  # type: ignore[override]
        """The normalised dimensions: a plan fixes them, and serves any others."""
        return len(self.normalized_shape)

    def reset_parameters(self) -> None:
        """Gamma to what multiplies by 1 (zeros if zero-centered), beta to zeros."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        for parameter in self.parameters_of[1:]:
            torch.nn.init.zeros_(getattr(self, parameter))

    def emit(self, g: Graph, x: Value, other: Value | None = None) -> Value | tuple[Value, Value]:
        """cast + norm; with `residual`, the sum of both inputs first, which is an output too."""
        if not self.residual:
            return self._normalise(g, x)
        if other is None:
            raise PlanError(
                f"{type(self).__name__} with residual=True takes two inputs: x and the residual"
            )
        stream = add(g, x, other)
        return self._normalise(g, stream), stream

    def _normalise(self, g: Graph, x: Value) -> Value:
        floating(g.spec(x))
        shape = g.spec(x).shape
        count = len(self.normalized_shape)
        require(
            tuple(shape[max(len(shape) - count, 0) :]) == self.normalized_shape,
            f"input has shape {show(shape)}, its last dimensions must be {self.normalized_shape}",
        )
        x = cast(g, x, g.autocast_dtype or self.weight.dtype)
        weights = tuple(g.param(getattr(self, parameter)) for parameter in self.parameters_of)
        attrs = {"eps": self.eps, "zero_centered": self.zero_centered_gamma}
        if count == 1:
            return g.calls(self.normalise, x, *weights, **attrs)[0]
        flat = tuple(_flatten(g, value, count) for value in (x, *weights))
        return g.call(RESHAPE_LIKE, g.calls(self.normalise, *flat, **attrs)[0], g.shape(x))

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        options = [str(self.normalized_shape), f"eps={self.eps}"]
        options += [name for name in ("zero_centered_gamma", "residual") if getattr(self, name)]
        return ", ".join(options)


def _flatten(g: Graph, value: Value, count: int) -> Value:
    shape = g.spec(value).shape
    features = torch.Size(shape[len(shape) - count :]).numel()
    return g.call(RESHAPE_TAIL, value, count=count, tail=(features,))


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimensions.

    Computes in the autocast dtype, else in the weight's: the input is cast to it, the maths is FP32
    (FP64 for FP64) and y is rounded once. The weight is read in its own dtype, and its gradient is
    summed in FP32.

    With `residual=True` it takes (x, residual) and returns (norm(x + residual), x + residual), the
    second as an extra output; the sum is rounded once to the inputs' common dtype and then
    normalised.

    Args:
        normalized_shape: size or sizes of the last dimensions.
        eps: added to the mean square.
        device: of the weight.
        dtype: of the weight.
        zero_centered_gamma: multiply by 1 + weight, added in FP32; the weight starts at 0.
        residual: add a second input first.

    Raises:
        ShapeError: a size below 1, or an input with other last dimensions.
        PlanError: a bad eps, flag or dtype.
    """

    normalise = RMSNORM
    parameters_of = ("weight",)


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, over the last dimensions.

    The variance is the biased one. Dtypes, arguments, `residual=True` and errors as for `RMSNorm`.
    """

    normalise = LAYERNORM
    parameters_of = ("weight", "bias")


class L2Normalization(Op):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension, as for queries and keys; no parameters.

    Computes in the autocast dtype, else in the input's, FP32 inside (FP64 for FP64).

    Raises:
        PlanError: eps is negative or not finite.
        ShapeError: the input has no dimension.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = number("L2Normalization", "eps", eps, low=0.0)

    def emit(self, g: Graph, x: Value) -> Value:
        """cast + l2norm."""
        floating(g.spec(x))
        return g.calls(L2NORM, cast(g, x, g.autocast_dtype), eps=self.eps)[0]

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        return f"eps={self.eps}"


__all__ = [
    "L2NORM",
    "L2NORM_BACKWARD",
    "LAYERNORM",
    "LAYERNORM_BACKWARD",
    "LAYERNORM_DGAMMA",
    "RMSNORM",
    "RMSNORM_BACKWARD",
    "RMSNORM_DGAMMA",
    "L2Normalization",
    "LayerNorm",
    "RMSNorm",
]
