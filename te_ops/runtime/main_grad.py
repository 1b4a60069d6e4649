"""Gradients that a backward adds to `parameter.main_grad` itself, instead of handing them to autograd.

`main_grad` is the caller's: a tensor of the parameter's shape that outlives the steps (FP32 gradients of BF16 weights,
summed over microbatches). The forward checks that it is there, the backward checks again before it runs anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_ops.errors import PlanError

DTYPES = (torch.float32, torch.bfloat16)


def dtype_of(parameter: torch.Tensor, where: str) -> torch.dtype:
    """Dtype of the parameter's main_grad.

    Raises:
        PlanError: it has none, or one that does not fit; `where` names the parameter.
    """
    found = getattr(parameter, "main_grad", None)
    way_out = (
        "make one before the forward (weight.main_grad = torch.zeros_like(weight, dtype="
        "torch.float32)), or leave out accumulate_into_main_grad"
    )
    if not isinstance(found, torch.Tensor):
        raise PlanError(f"{where} accumulates its gradient into main_grad, but has none: {way_out}")
    if found.shape != parameter.shape or found.device != parameter.device:
        raise PlanError(
            f"{where}.main_grad is {tuple(found.shape)} on {found.device}, the parameter "
            f"{tuple(parameter.shape)} on {parameter.device}: {way_out}"
        )
    if found.dtype not in DTYPES and found.dtype is not parameter.dtype:
        raise PlanError(
            f"{where}.main_grad is {found.dtype}; it must be FP32, BF16 or the parameter's dtype"
        )
    if not found.is_contiguous() and torch._debug_has_internal_overlap(found) == 1:
        raise PlanError(f"{where}.main_grad has elements that share memory (expand): {way_out}")
    if getattr(parameter, "overwrite_main_grad", False):
        raise PlanError(
            f"{where} has overwrite_main_grad set, but gradients are only added: zero main_grad "
            "at the start of a step and unset it"
        )
    return found.dtype


def refuse(ctx: Any, positions: Sequence[int], names: Sequence[str]) -> None:
    """Raise unless autograd runs the backward of each of these inputs of the node.

    A partial backward (`autograd.grad`, `backward(inputs=...)`) asks for no gradient of a parameter that would be
    written all the same.
    """
    for position, name in zip(positions, names, strict=True):
        node = ctx.next_functions[position][0]
        try:
            runs = node is not None and torch._C._will_engine_execute_node(node)
        except RuntimeError:  # a leaf that autograd.grad asks for
            runs = False
        if not runs:
            raise PlanError(
                f"{name} accumulates its gradient into main_grad, and this backward "
                "(torch.autograd.grad, or backward(inputs=...)) is not for all parameters; call "
                "backward() without inputs, or leave out accumulate_into_main_grad"
            )


def added(parameter: Any) -> torch.Tensor | None:
    """What autograd gets for a parameter whose main_grad has been written: nothing.

    Where the parameter has `grad_added_to_main_grad`, it is set, and autograd gets zeros: data-parallel hooks of
    Megatron wait for a gradient and then skip it.
    """
    torch.autograd.graph.increment_version(parameter.main_grad)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter)
