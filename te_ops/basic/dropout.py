"""Dropout: a mask from a counter-based generator, applied by a pointwise node."""

from __future__ import annotations

from typing import Any

import torch

from te_ops.basic.arguments import floating, integer, number
from te_ops.basic.pointwise import pointwise
from te_ops.errors import PlanError
from te_ops.graph import Graph, Spec, Value, prim
from te_ops.math import ne, where
from te_ops.op import Op, Scalar
from te_ops.pointwise import Fn, Input, activations
from te_ops.quantizers.philox import philox_uniform

# Steps of the offset are this far apart in the 64-bit seed (2^64 over the golden ratio, odd):
# offsets that are neighbours give seeds that are not, and all 2^64 of them differ.
_OFFSET_STEP = 0x9E3779B97F4A7C15 - 2**64


@prim(
    "dropout_seed",
    infer=lambda call_seed, *_, **__: call_seed.like(),
    cheap=True,
    differentiable=False,
)
def DROPOUT_SEED(
    call_seed: torch.Tensor, *scalars: torch.Tensor, seed: int | None, offset: int | None
) -> torch.Tensor:
    """A chosen seed for the call's, int64: `seed` + `offset` steps; None: the next of `scalars`."""
    given = iter(scalars)
    parts = [next(given).long() if part is None else part for part in (seed, offset)]
    # Tensors on the device of the call's seed, whose arithmetic wraps.
    first, steps = (torch.zeros_like(call_seed) + part for part in parts)
    return first + steps * _OFFSET_STEP


@prim(
    "dropout_mask",
    infer=lambda seed, shape, *_, **__: Spec(shape.shape, torch.bool),
    nature="random",
    cheap=True,
    differentiable=False,
)
def DROPOUT_MASK(
    seed: torch.Tensor,
    shape: tuple[int, ...],
    *rate: torch.Tensor,
    p: float | None,
    stream: int,
) -> torch.Tensor:
    """True where an element is kept, with probability 1 - p (`rate` if p is None): a function of
    (seed, stream, index).

    Cheap, so backward may make it again from the seed instead of saving a byte per element.
    """
    uniform = philox_uniform(shape, seed, stream, seed.device)
    return uniform >= (rate[0] if p is None else p)


class Dropout(Op):
    """Zeroes elements with probability p and scales the others by 1 / (1 - p) in training; else its
    input.

    In eval mode, and for a float p of 0, it emits nothing. What is dropped is 0 even if it was Inf
    or NaN. The mask depends on the seed and the element's index only, not on fusion or launch
    shape; backward reads the same one, kept as a byte per element or made again from the seed.

    By default every call draws a seed from torch's generator. With `seed`, masks repeat: every call
    with the same (seed, offset) and shape has the same mask, as have two Dropouts that share them.
    Let `offset` (or `seed`) be a `te.scalar` and move it on from step to step, and each step has a
    mask of its own without a new plan:

        step = te.scalar(0)
        dropout = te.Dropout(0.1, seed=1234, offset=step)

    Args:
        p: probability of dropping, within [0, 1]; a `te.scalar` may change from call to call.
        seed: an int64, or a `te.scalar` with an integer below 2^24 (scalars are FP32 on the
        device). offset: further int or `te.scalar`, for use with `seed`.

    Raises:
        PlanError: p outside [0, 1], a seed or offset that is no integer or out of range, or an
            offset without a seed.
    """

    def __init__(
        self,
        p: float | Scalar = 0.5,
        *,
        seed: int | Scalar | None = None,
        offset: int | Scalar = 0,
    ) -> None:
        super().__init__()
        self.p = p
        self._check()
        self.seed = None if seed is None else _counter("seed", seed)
        self.offset = _counter("offset", offset)
        if seed is None and not (isinstance(self.offset, int) and self.offset == 0):
            raise PlanError("Dropout: offset counts from a seed; pass seed= too")

    def _check(self) -> None:
        p = self.p.value if isinstance(self.p, Scalar) else self.p
        number("Dropout", "p", p, low=0.0, high=1.0)

    def emit(self, g: Graph, x: Value) -> Value:
        """dropout_mask + pointwise, or nothing."""
        self._check()  # p may have been assigned since
        floating(g.spec(x))
        if not self.training or self.p == 0.0:
            return x
        seed, stream = self._seed(g)
        if isinstance(self.p, Scalar):
            rate, fn = g.scalar(self.p), _apply_rate()
            mask = g.call(DROPOUT_MASK, seed, g.shape(x), rate, p=None, stream=stream)
            return pointwise(g, fn, x, mask, rate, broadcast=("full", "full", "scalar"))
        mask = g.call(DROPOUT_MASK, seed, g.shape(x), p=self.p, stream=stream)
        # At p = 1 no element is kept, and a factor of 1 / 0 would drop the gradient's node as well.
        fn = activations["dropout"](self.p if self.p < 1.0 else 0.0)
        return pointwise(g, fn, x, mask, broadcast=("full", "full"))

    def _seed(self, g: Graph) -> tuple[Value, int]:
        """The seed and the stream: a new one per draw of the call's seed, 0 of the user's."""
        if self.seed is None:
            return g.seed(), g.stream()
        parts = {"seed": self.seed, "offset": self.offset}
        scalars = [g.scalar(part) for part in parts.values() if isinstance(part, Scalar)]
        fixed = {name: None if isinstance(part, Scalar) else part for name, part in parts.items()}
        return g.call(DROPOUT_SEED, g.seed(), *scalars, **fixed), 0

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        seed = "" if self.seed is None else f", seed={self.seed}, offset={self.offset}"
        return f"p={self.p}{seed}"


def _apply_rate() -> Fn:
    """The table's dropout with p as a third input; at p = 1 nothing is kept, so no Inf enters."""
    kept = Input(0) * (1.0 / (1.0 - Input(2)))
    out = where(ne(Input(1), 0.0), kept, 0.0)
    return Fn("dropout", ("value", "value", "value"), (out,))


def _counter(name: str, value: Any) -> int | Scalar:
    if isinstance(value, Scalar):
        if not value.value.is_integer() or abs(value.value) >= 2**24:
            raise PlanError(
                f"Dropout: a te.scalar {name} must be an integer below 2^24, got {value.value}"
            )
        return value
    result = integer("Dropout", name, value)
    if not -(2**63) <= result < 2**63:
        raise PlanError(f"Dropout: {name} must fit int64, got {result}")
    return result


__all__ = ["DROPOUT_MASK", "DROPOUT_SEED", "Dropout"]
