"""Keywords of constructors, and whether two things that were observed differ (K31)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import te_ops as te
from tests.faults import cases

Inputs = tuple[torch.Tensor, ...]


def keywords(kind: type) -> list[str]:
    """The constructor's keywords, without *args and **kwargs."""
    return [
        n
        for n, p in inspect.signature(kind).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def differs(a: Any, b: Any) -> bool:
    return a != b and repr(a) != repr(b)  # NaN is not itself


def observe(
    make: Callable[[], nn.Module], inputs: Callable[[], Inputs], recipe: te.Recipe | None = None
) -> Any:
    """All that a user can see of a training step, or the error."""
    try:
        torch.manual_seed(7)
        op = make()
        if any(p.is_meta for p in op.parameters()):
            return ["meta"]
        xs = tuple(x.requires_grad_() if x.is_floating_point() else x for x in inputs())
        result = cases.step(op, xs, recipe, seed=5)
    except te.Error as error:
        return ["error", type(error).__name__, str(error)]
    seen: list[Any] = []
    for name, t in result.tensors():
        t = t.dequantize() if isinstance(t, te.QuantizedTensor) else t
        seen.append(
            (name, None if t is None else (t.dtype, tuple(t.shape), t.double().numpy().tobytes()))
        )
    return [
        *seen,
        [
            (n, tuple(p.shape), p.dtype, p.detach().double().numpy().tobytes())
            for n, p in op.named_parameters()
        ],
    ]
