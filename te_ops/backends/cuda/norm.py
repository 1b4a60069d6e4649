"""RMSNorm, LayerNorm: forward, and backward with the gradients of gamma and beta."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.norm_kernels import (
    Backward,
    backward_kernel,
    backward_shape,
    centered,
    flags_of,
    forward_kernel,
    norm_of,
    slot,
    sums_kernel,
)
from te_ops.backends.cuda.reduce import RowSum, row_sum
from te_ops.backends.cuda.source import CTYPES, INCLUDE, Source, plain
from te_ops.graph import Node, Value
from te_ops.registry import Call, Launch


def refuse(call: Call) -> str | None:
    """Dtypes that are not FP32, BF16 or FP16; no columns."""
    return refuse_inputs(call, call.node)


def refuse_inputs(call: Call, node: Node) -> str | None:
    """The same for a member of a group."""
    for value in node.inputs:
        if call.spec(value).dtype not in CTYPES:
            return f"reads FP32, BF16 and FP16, not {call.spec(value).dtype}"
    if not int(call.spec(node.inputs[0]).shape[-1]):
        return "rows without columns have no statistic"
    return None


def refuse_affine(call: Call) -> str | None:
    """As `refuse`; and gamma and beta have one dtype."""
    return refuse_norm(call, call.node)


def refuse_norm(call: Call, node: Node) -> str | None:
    """The same for a member of a group."""
    dtypes = {call.spec(v).dtype for v in node.inputs[1:3]}
    if centered(node) and len(dtypes) > 1:
        return f"gamma and beta have different dtypes: {', '.join(sorted(map(str, dtypes)))}"
    return refuse_inputs(call, node)


def bind(call: Call) -> Launch:
    """The launch of a forward norm: (y, rstd[, mean])."""
    node = call.node
    x_spec, gamma_spec = call.spec(node.inputs[0]), call.spec(node.inputs[1])
    width, dtype, center = int(x_spec.shape[-1]), x_spec.dtype, centered(node)
    kernel = forward_kernel(norm_of(node, plain(dtype, width), dtype, gamma_spec.dtype), call.arch)
    order = tuple(call.reads.index(v) for v in node.inputs)
    picks = tuple(v.index for v in call.writes)

    def run(*reads: torch.Tensor) -> Any:
        x, gamma, *rest = (launch.ready(reads[i]) for i in order)
        y = launch.empty(x.shape, dtype, x.device) if 0 in picks else None
        rstd = launch.empty(x.shape[:-1], torch.float32, x.device)
        mean = launch.empty(x.shape[:-1], torch.float32, x.device) if center else None
        pointers = (x, width, gamma, rest[0] if center else None, None, y, rstd, mean, None)
        kernel(x.device, math.prod(x.shape[:-1]), *map(slot, pointers))
        outs = (y, rstd, mean)
        return outs[picks[0]] if len(picks) == 1 else tuple(outs[i] for i in picks)

    return run


# -- backward


@dataclass(frozen=True)
class Members:
    """The nodes of a backward group: dx, the sum that it goes into, the gradients of gamma and beta."""

    dx: Node
    total: Node | None
    gamma: Node | None
    beta: Node | None

    @property
    def sums(self) -> int:
        """Gradients of weights."""
        return (self.gamma is not None) + (self.beta is not None)

    def other(self) -> Value | None:
        """What is added to dx."""
        if self.total is None:
            return None
        return next(v for v in self.total.inputs if v != self.dx.out)


def members_of(call: Call) -> Members | str:
    """The members of a group, or why it is no group of these kernels."""
    found: dict[str, Node] = {}
    for node in call.nodes:
        kind = "dgamma" if node.prim.name.endswith("norm_dgamma") else node.prim.name
        kind = "dx" if kind.endswith("norm_backward") else kind
        if kind not in ("dx", "sum", "dgamma", "reduce"):
            return f"{kind} runs in a step of its own"
        if kind in found:
            return f"two {kind} nodes"
        found[kind] = node
    if "dx" not in found:
        return "no gradient of the input"
    return Members(found["dx"], found.get("sum"), found.get("dgamma"), found.get("reduce"))


def refuse_group(call: Call) -> str | None:
    """Sums of something else, gradients of other tensors or in several dtypes, rows that no block holds."""
    group = members_of(call)
    if isinstance(group, str):
        return group
    reason = refuse_inputs(call, group.dx) or _refuse_sum(call, group) or _refuse_weights(group)
    if (
        reason is None
        and group.sums
        and backward_shape(backward_of(call, group), call.arch) is None
    ):
        width = call.spec(group.dx.inputs[0]).shape[-1]
        return f"a block does not hold rows of {width} columns with the sums of its weights"
    return reason


def _refuse_sum(call: Call, group: Members) -> str | None:
    if group.total is None:
        return None
    inputs = group.total.inputs
    if len(inputs) != 2 or inputs.count(group.dx.out) != 1:
        return "the sum is not of the input's gradient and one other"
    if group.dx.out in call.writes:
        return "the input's gradient is read before the sum too"
    dtypes = {call.spec(v).dtype for v in (*inputs, group.total.out)}
    return f"the sum mixes {', '.join(sorted(map(str, dtypes)))}" if len(dtypes) > 1 else None


def _refuse_weights(group: Members) -> str | None:
    dy, x, *_ = group.dx.inputs
    if group.gamma is not None and group.gamma.inputs[:2] != (dy, x):
        return "the gradient of gamma is another norm's"
    if group.beta is None:
        return None
    if group.gamma is None:
        return "a sum over rows alone is a step of its own"
    if group.beta.inputs != (dy,) or group.beta.over != "rows":
        return "the sum is not of the output's gradient over rows"
    return (
        None
        if group.beta.dtype is group.gamma.dtype
        else f"gradients in {group.gamma.dtype} and {group.beta.dtype}"
    )


def backward_of(call: Call, group: Members) -> Backward:
    """What the kernel is made for."""
    dy, x, gamma = (call.spec(v) for v in group.dx.inputs[:3])
    flags = (centered(group.dx), bool(group.dx.zero_centered), group.total is not None)
    return Backward(int(x.shape[-1]), x.dtype, dy.dtype, gamma.dtype, *flags, group.sums)


def bind_backward(call: Call) -> Launch:
    """The launch of a backward group (or of a norm's input gradient alone)."""
    group = members_of(call)
    assert isinstance(group, Members)
    made = backward_of(call, group)
    kernel = backward_kernel(made, call.arch)
    total = sums_kernel(group.gamma.dtype, call.arch) if group.gamma is not None else None
    order = tuple(call.reads.index(v) for v in group.dx.inputs)
    other = group.other()
    added = None if other is None else call.reads.index(other)
    names = {(group.total or group.dx).out: 0}
    for place, node in enumerate((group.gamma, group.beta)):
        if node is not None:
            names[node.out] = 1 + place
    picks = tuple(names[v] for v in call.writes)

    def run(*reads: torch.Tensor) -> Any:
        dy, x, gamma, rstd, *rest = (launch.ready(reads[i]) for i in order)
        more = None if added is None else launch.ready(reads[added])
        dx = launch.empty(x.shape, x.dtype, x.device)
        pointers = (dy, x, more, gamma, rstd, rest[0] if made.centered else None, dx)
        partial = kernel(x.device, math.prod(x.shape[:-1]), tuple(map(slot, pointers)))
        outs = (dx,) if total is None or partial is None else (dx, *total(partial))
        return outs[picks[0]] if len(picks) == 1 else tuple(outs[i] for i in picks)

    return run


# -- the gradient of gamma alone


def gamma_source(node: Node, call: Call) -> Source:
    """dy * xhat, to be summed over rows."""
    dy, x = (call.spec(v) for v in node.inputs[:2])
    center, width = centered(node), int(x.shape[-1])
    ctype = f"te::GammaTerm<{CTYPES[dy.dtype]}, {CTYPES[x.dtype]}, {flags_of(center)}>"

    def slots(xs: Any) -> list[int]:
        return [*(t.data_ptr() for t in xs[:3]), xs[3].data_ptr() if center else 0, width]

    return Source(
        INCLUDE,
        ctype,
        1,
        width,
        5,
        slots,
        width % 8 == 0,
        in_bytes=dy.dtype.itemsize + x.dtype.itemsize,
    )


def bind_dgamma(call: Call) -> Launch:
    """The launch of the gradient of gamma: a sum over rows in two stages, in a fixed order."""
    node = call.node
    source = gamma_source(node, call)
    total: RowSum = row_sum(source, node.dtype, call.arch)
    order = tuple(call.reads.index(v) for v in node.inputs)

    def run(*reads: torch.Tensor) -> torch.Tensor:
        xs = [launch.ready(reads[i]) for i in order]
        return total(source.slots(xs), math.prod(xs[1].shape[:-1]), xs[1].device)

    return run


def refuse_dgamma(call: Call) -> str | None:
    """As `refuse`, and the dtype of the gradient."""
    if call.node.dtype not in CTYPES:
        return f"writes FP32, BF16 and FP16, not {call.node.dtype}"
    return refuse(call)
