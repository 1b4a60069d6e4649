"""A plan that is one small dense product: torch's own function runs it, in torch's own node of autograd.

A node of ours costs the host more than such a product takes, and has nothing to add to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from te_ops.basic.gemm import Linear
from te_ops.compiler.passes import passes
from te_ops.compiler.plan import Plan
from te_ops.compiler.work import Note
from te_ops.context import FRAME
from te_ops.op import Epoch, Op
from te_ops.registry import REGISTRY
from te_ops.runtime import checkpoint as ckpt
from te_ops.runtime.alike import alike

SMALL = 1 << 28
"""Multiply-adds of a product up to which the host decides: less than a microsecond of tensor cores. Beyond, the
algorithm that `te_ops.tune` or the shipped table names is worth more than what a node costs."""

NOTE = Note(
    "select",
    "",
    "",
    f"up to {SMALL >> 20} Mi multiply-adds torch's own linear runs it, in torch's own node of autograd, unless te.tune "
    "has measured the model",
)

KERNELS = ["cublas.", "cuda."]
"""Whose place torch's takes. A reference, a compiled GEMM that was measured to be better, or a user's kernel stays."""
_DENSE = (torch.Tensor, nn.Parameter)
DEVICES = ["cuda"]
"""Where the host is what such a product waits for."""
PLACE = {False: "_te_direct", True: "_te_direct_grad"}
"""Of an op, by grad mode: the `Direct` of its last call whose plan was plain."""
_TUNED = "_te_tuned"
_GRADIENTS = {"gemm_nn", "gemm_tn", "reduce"}


def keep_plans(model: nn.Module) -> None:
    """The products of this model have been measured: its linears run by their plans, with what was chosen."""
    for module in model.modules():
        if type(module) is Linear:
            module.__dict__[_TUNED] = True
            for place in PLACE.values():
                module.__dict__.pop(place, None)


def is_plain(plan: Plan, op: nn.Module) -> bool:
    """Whether a plan is y = x W^T (+ b) of one dtype, by kernels of the package: what torch's linear computes.

    A recipe, an autocast, a reduction, `main_grad`, a record, or a pass or kernel of the user's makes another plan.
    """
    if type(op) is not Linear or op.return_bias or len(plan.segments) != 1:
        return False
    if op.bias is not None and op.bias.dtype is not op.weight.dtype:
        return False
    segment, (result,) = plan.segments[0], plan.results
    biased = ("bias",) if op.bias is not None else ()
    steps, back = segment.forward_steps, segment.backward_steps
    added = segment.derive is not None and segment.derive(segment.full).added  # type: ignore[union-attr]
    return (
        [n for s in steps for n in s.nodes] == ["gemm_nt", *biased]
        and {n for s in back for n in s.nodes} <= _GRADIENTS
        and [leaf.name for leaf in segment.leaves] == ["", *biased, "weight"]
        and not (result.views or result.alias or segment.copies or segment.states or added)
        and all(s.kernel.startswith(tuple(KERNELS)) for s in (*steps, *back))
    )


def serves(plan: Plan, op: nn.Module, x: torch.Tensor) -> bool:
    """Whether calls of this plan, whose input is like this one, may run by torch's own function."""
    if x.device.type not in DEVICES or type(x) not in _DENSE or not is_plain(plan, op):
        return False
    assert isinstance(op, Linear)
    return math.prod(x.shape) * op.out_features <= SMALL


class Direct:
    """How calls run that are like one of a plain plan, in grad mode or outside of it."""

    __slots__ = ("alike", "biased", "epoch", "grad", "kind", "versions")

    def __init__(self, op: nn.Module, x: torch.Tensor, grad: bool) -> None:
        weight, bias = op._parameters["weight"], op._parameters.get("bias")
        self.biased = bias is not None
        self.alike = alike([x, weight, bias] if self.biased else [x, weight])
        self.grad, self.kind = grad, x.device.type
        self.epoch = Epoch.now
        self.versions = (REGISTRY.version, passes.version)

    def __call__(self, op: Any, xs: Sequence[Any]) -> torch.Tensor | None:
        """The result; None where the plan has to be looked up."""
        if (
            self.epoch != Epoch.now
            or self.versions != (REGISTRY.version, passes.version)
            or len(xs) != 1
            or not _usual(op, self.kind)
        ):
            return None
        x, own = xs[0], op._parameters
        weight, bias = own.get("weight"), own.get("bias")
        if (bias is None) is self.biased:
            return None
        if not (self.alike(x, weight, bias) if self.biased else self.alike(x, weight)):
            return None
        ckpt.record(op, None, (), self.grad)
        return functional.linear(x, weight, bias)


def _usual(op: Op, kind: str) -> bool:
    """Whether nothing around a call on such a device asks for more than the product."""
    return not (
        FRAME.get() is not None
        or ckpt.REPLAY.get() is not None
        or torch.is_autocast_enabled(kind)
        # torch refuses its own GEMM then, unless the environment says how much scratch memory it takes
        or torch._C._get_deterministic_algorithms()
        or not ckpt.unseen(op)
    )


def first(op: Op, xs: Sequence[Any], grad: bool, version: int | None) -> torch.Tensor | None:
    """A call whose plan `serves`: its result, None where the plan runs it. Later ones that are like it need no plan.

    `version`: of the registry, where the call repeats one of then. It says nothing of later calls.
    """
    x, now = xs[0], version in (None, REGISTRY.version)
    if (now and _TUNED in op.__dict__) or not _held(op) or not _usual(op, x.device.type):
        return None
    made = Direct(op, x, grad)
    if now:
        op.__dict__[PLACE[grad]] = made
    return made(op, xs)


def _held(op: Op) -> bool:
    """Whether weight and bias are where `Direct` takes them from, and of torch's own classes.

    They are not where somebody prunes them, say, or makes them anew at every call.
    """
    own, bias = op._parameters, getattr(op, "bias", None)
    plain = type(own.get("weight")) in _DENSE and (bias is None or type(bias) in _DENSE)
    return plain and own.get("bias") is bias
