"""quantize, alone or behind a producer: per-tensor FP8, 1x128 and 128x128 blocks, MXFP8; NVFP4 alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from te_ops.backends.cuda import launch, nvfp4
from te_ops.backends.cuda.block import make_blocked, refuse_blocks
from te_ops.backends.cuda.source import CTYPES, Source, plain
from te_ops.backends.cuda.targets import PER_TENSOR, amax_kernel, per_tensor
from te_ops.backends.cuda.wanted import Run, Wanted
from te_ops.graph import Node, Value
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_ops.registry import Call, Launch

BLOCKED = (Float8BlockQuantizer, MXFP8Quantizer)


def refuse_quantizer(
    quantizer: Quantizer, source_width: int, outs: int, *, fused: bool
) -> str | None:
    """Why a quantizer has no kernel, or None."""
    if isinstance(quantizer, NVFP4Quantizer):
        return "NVFP4 needs the amax of all values before the first is quantized"
    if type(quantizer) not in (*PER_TENSOR, *BLOCKED):
        return f"no kernel for {quantizer.describe()}"
    if fused and isinstance(quantizer, Float8CurrentScalingQuantizer):
        return "current scaling needs the amax of all values before the first is quantized"
    return refuse_blocks(quantizer, source_width, outs) if isinstance(quantizer, BLOCKED) else None


def refuse(call: Call) -> str | None:
    """A quantize node on its own."""
    node = call.node
    spec = call.spec(node.inputs[0])
    if spec.dtype not in CTYPES:
        return f"quantizes FP32, BF16 and FP16, not {spec.dtype}"
    if isinstance(node.quantizer, NVFP4Quantizer):
        return nvfp4.refuse(call)
    return refuse_state(call, node) or refuse_quantizer(node.quantizer, 0, 1, fused=False)


def refuse_state(call: Call, node: Node) -> str | None:
    """The scale of delayed scaling is read as FP32."""
    if node.quantizer.stateful and call.spec(node.inputs[1]).dtype is not torch.float32:
        return f"the scale is {call.spec(node.inputs[1]).dtype}; FP32 is read"
    return None


def bind(call: Call) -> Launch:
    """The launch of one quantize node."""
    node = call.node
    quantizer = node.quantizer
    if isinstance(quantizer, NVFP4Quantizer):
        return nvfp4.bind(call)
    spec = call.spec(node.inputs[0])
    width = int(spec.shape[-1]) if spec.shape else 1
    wanted = wanted_of(call, node, None, spec.dtype)
    reads = tuple(call.reads.index(v) for v in node.inputs)
    picks = tuple(v.index for v in call.writes)
    source = replace(plain(spec.dtype, width), rows=math.prod(spec.shape[:-1]))
    known = is_known(node)
    run = make_run(source, quantizer, wanted, call.arch, known=known)
    scaled = quantizer.stateful or known

    def launched(*xs: Any) -> Any:
        x = launch.ready(xs[reads[0]])
        scale = xs[reads[1]] if scaled else None
        made = run(
            [x.data_ptr(), width], tuple(x.shape), x.device, scale if scale is not None else x
        )
        outs = (made.row, made.col, made.amax)
        return outs[picks[0]] if len(picks) == 1 else tuple(outs[i] for i in picks)

    return launched


def is_known(node: Node) -> bool:
    """Whether a quantize node gets the amax that its scale is made from."""
    return bool(node.attrs.get("known", False))


def state_place(call: Call, node: Node) -> int | None:
    """Where the scale, or the known amax, of a quantize node is among what the call reads."""
    scaled = node.quantizer.stateful or is_known(node)
    return call.reads.index(node.inputs[1]) if scaled else None


def wanted_of(
    call: Call, node: Node, dense: torch.dtype | None, rounds: torch.dtype | None
) -> Wanted:
    """What the call wants of a quantize node."""
    live = [Value(node.id, i) in call.writes for i in range(3)]
    return Wanted(live[0], live[1], live[2], dense, rounds, call.spec(node.inputs[0]).dtype)


def make_run(
    source: Source, quantizer: Quantizer, wanted: Wanted, arch: str, *, known: bool = False
) -> Run:
    """Compile what a quantizer needs. `known`: the amax of current scaling comes in place of the scale."""
    if isinstance(quantizer, PER_TENSOR):
        return per_tensor(source, quantizer, wanted, arch, known=known)
    assert isinstance(quantizer, BLOCKED)
    return make_blocked(source, quantizer, wanted, arch)


# -- the amax alone


def refuse_amax(call: Call) -> str | None:
    """The amax prim."""
    dtype = call.spec(call.node.inputs[0]).dtype
    return None if dtype in CTYPES else f"reads FP32, BF16 and FP16, not {dtype}"


def bind_amax(call: Call) -> Launch:
    """The launch of one amax node."""
    kernel = amax_kernel(call.spec(call.node.inputs[0]).dtype, call.arch)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = launch.ready(x)
        out = launch.empty((), torch.float32, x.device)
        launch.zero_word(out)
        kernel(x.device, x.data_ptr(), x.numel(), out)
        return out

    return run
