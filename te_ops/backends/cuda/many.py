"""quantize of several tensors in one launch: what a plan's weights need at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.quantize import refuse_state, state_place, wanted_of
from te_ops.backends.cuda.source import CTYPES, plain
from te_ops.backends.cuda.targets import (
    AMAX_BLOCK,
    PER_TENSOR,
    SLOTS,
    UNROLL,
    Memory,
    Part,
    Shape,
    Target,
    allocate_all,
    cleared,
    results,
    shape_of,
    target_of,
)
from te_ops.backends.cuda.wanted import THREADS, Wanted
from te_ops.graph import Node, Value
from te_ops.registry import Call, Launch

MAX_TENSORS = 16
AMAX_SHARE = 4 * AMAX_BLOCK
"""Elements of a tensor that one block of the amax pass looks at."""


def _wanted(call: Call, node: Node) -> Wanted:
    return wanted_of(call, node, None, call.spec(node.inputs[0]).dtype)


def refuse_quantize_together(call: Call) -> str | None:
    """Different formats or copies, formats other than per-tensor FP8, too many tensors."""
    first = call.nodes[0]
    dtype = call.spec(first.inputs[0]).dtype
    if type(first.quantizer) not in PER_TENSOR:
        return f"{first.quantizer.describe()} tensors are quantized one by one"
    if dtype not in CTYPES:
        return f"quantizes FP32, BF16 and FP16, not {dtype}"
    if len(call.nodes) > MAX_TENSORS:
        return f"{len(call.nodes)} tensors; up to {MAX_TENSORS} go into one launch"
    for node in call.nodes:
        if (reason := refuse_state(call, node)) is not None:
            return reason
        if node.quantizer != first.quantizer or call.spec(node.inputs[0]).dtype is not dtype:
            return "the formats or dtypes differ"
        if _wanted(call, node) != _wanted(call, first):
            return "different copies are wanted of the tensors"
    return None


def bind_quantize_together(call: Call) -> Launch:
    """One launch for all tensors; current scaling has one for the amaxes before it."""
    nodes = call.nodes
    wanted = _wanted(call, nodes[0])
    specs = [call.spec(n.inputs[0]) for n in nodes]
    part = Part(nodes[0].quantizer, wanted)
    find = _amax_kernel(specs[0].dtype, len(nodes), call.arch) if part.waits else None
    asked = Wanted(wanted.row, wanted.col, wanted.amax and not part.waits, *_rest(wanted))
    widths = [int(s.shape[-1]) if s.shape else 1 for s in specs]
    source = plain(specs[0].dtype, 8)
    target = target_of(Part(part.quantizer, asked, known=part.waits), source)
    aligned = all(w % 8 == 0 for w in widths)
    codes = wanted.row or wanted.col
    cut = replace(shape_of(source, (target,), call.arch), band=1)  # bands cost 7 % over several
    kernel = _tiles_kernel(target, call, (cut.template(aligned), cut.blocks), part.waits)
    places = [call.reads.index(n.inputs[0]) for n in nodes]
    states = [state_place(call, n) for n in nodes]
    order = [(_position(nodes, v), ("row", "col", "amax")[v.index]) for v in call.writes]

    def launched(*reads: torch.Tensor) -> Any:
        xs = [launch.ready(reads[i]) for i in places]
        device = xs[0].device
        scales = [None if i is None else reads[i] for i in states]
        amaxes = find(xs) if find is not None else None
        if amaxes is not None:
            scales = list(amaxes)
        made = allocate_all(target, [tuple(x.shape) for x in xs], device)
        if codes or find is None:
            _launch_tiles(kernel, cut, xs, made, scales)
        found = [results(part, m, tuple(x.shape)) for m, x in zip(made, xs, strict=True)]
        outs = tuple(
            amaxes[k] if amaxes is not None and name == "amax" else getattr(found[k], name)
            for k, name in order
        )
        return outs[0] if len(outs) == 1 else outs

    return launched


def _rest(wanted: Wanted) -> tuple[None, torch.dtype | None, torch.dtype]:
    return None, wanted.rounds, wanted.source_dtype


def _position(nodes: Sequence[Node], value: Value) -> int:
    return next(i for i, n in enumerate(nodes) if n.id == value.node)


def _launch_tiles(
    kernel: launch.Function,
    cut: Shape,
    xs: Sequence[torch.Tensor],
    made: Sequence[Memory],
    scales: Sequence[torch.Tensor | None],
) -> None:
    """Tiles of all tensors, numbered through."""
    slots: list[int] = []
    end = 0
    for x, memory, scale in zip(xs, made, scales, strict=True):
        rows, width = math.prod(x.shape[:-1]), (x.shape[-1] if x.dim() else 1)
        end += cut.count(rows, width)
        slots += (x.data_ptr(), rows, width, end, *memory.slots(scale))
    kernel(xs[0].device, end, *slots)


def _tiles_kernel(
    target: Target, call: Call, cut: tuple[str, int], reverse: bool
) -> launch.Function:
    """`cut`: template arguments of the pass, and blocks of a multiprocessor."""
    dtype, count = call.spec(call.node.inputs[0]).dtype, len(call.nodes)
    kind = f"te::Tensors<{CTYPES[dtype]}, T0, {count}>"
    head = f"#include <kernels/quantize.cuh>\n{target.define(0)}typedef {kind} Parameters;\n"
    index = "te::blocks() - 1 - te::block()" if reverse else "te::block()"
    body = f"te::tiles_of<{cut[0]}>(p, {index});"
    text = launch.text_of(
        name="quantize_several", head=head, body=body, threads=THREADS, blocks=cut[1]
    )
    return launch.build("quantize_several", text, call.arch, THREADS, (4 + SLOTS) * count)


def _amax_kernel(dtype: torch.dtype, count: int, arch: str) -> Any:
    """find(tensors) -> the amax of each."""
    head = (
        "#include <kernels/quantize.cuh>\n"
        f"struct Parameters {{ te::Amax<{CTYPES[dtype]}> item[{count}]; }};\n"
    )
    body = f"te::amax_of<{CTYPES[dtype]}, {count}, {THREADS}, {UNROLL}>(p.item, te::block());"
    text = launch.text_of(name="amax_several", head=head, body=body, threads=THREADS)
    function = launch.build("amax_several", text, arch, THREADS, 4 * count)

    def find(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        device = xs[0].device
        slots: list[int] = []
        made, end = list(cleared(len(xs), device, True)), 0
        for x, amax in zip(xs, made, strict=True):
            end += max(-(-x.numel() // AMAX_SHARE), 1)
            slots += (x.data_ptr(), amax.data_ptr(), x.numel(), end)
        function(device, end, *slots)
        return made

    return find


__all__ = ["bind_quantize_together", "refuse_quantize_together"]
