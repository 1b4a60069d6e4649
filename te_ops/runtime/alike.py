"""Whether tensors are like those of the last call, in one call of torch's instead of several for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_Guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)

Alike = Callable[..., bool]
"""`same(*tensors)`: whether as many tensors have the classes, dtypes, devices, shapes, strides and, in grad mode, the
`requires_grad` of those before. False proves nothing: what torch keeps for a thread (an autocast, say) counts too."""


def alike(tensors: Sequence[Any]) -> Alike:
    """The comparison with these, which it does not keep alive."""
    try:
        same: Alike = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (
        TypeError,
        RuntimeError,
    ):  # another version of torch, or something that is no such tensor
        return _Forms(tensors)
    return same


class _Forms:
    """The same by torch's attributes."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.forms = list(map(form, tensors))

    def __call__(self, *tensors: Any) -> bool:
        return list(map(form, tensors)) == self.forms


def form(t: Any) -> Any:
    """What a value says of itself besides its numbers; None is nothing."""
    if not isinstance(t, torch.Tensor):
        return type(t)
    dense = t.layout is torch.strided
    return type(t), t.shape, t.stride() if dense else t.layout, t.dtype, t.device, t.requires_grad
