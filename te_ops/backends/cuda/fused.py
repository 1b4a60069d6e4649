"""Fused groups: norm_quantize, pointwise_quantize, pointwise_reduce."""

from __future__ import annotations

from typing import Any

import torch

from te_ops.backends.chains import Chain, compose_chain, rounding
from te_ops.backends.cuda.pointwise import FAST, output_shape
from te_ops.backends.cuda.quantize import (
    BLOCKED,
    is_known,
    make_run,
    refuse_quantizer,
    refuse_state,
    state_place,
    wanted_of,
)
from te_ops.backends.cuda.reduce import column_sum, row_sum, whole_sum
from te_ops.backends.cuda.source import (
    CTYPES,
    Source,
    pointwise_source,
    prepare,
    refuse_pointwise,
)
from te_ops.backends.cuda.wanted import Results
from te_ops.graph import Node, Value
from te_ops.quantizers import Float8CurrentScalingQuantizer
from te_ops.registry import Call, Launch

# -- chains of pointwise nodes


def refuse_chain(call: Call, chain: Chain | str) -> str | None:
    """Why a chain's text is not compiled, or None."""
    if isinstance(chain, str):
        return chain
    if "full" not in chain.kinds:
        return "no operand has the full shape"
    return refuse_pointwise(
        chain.fn, [call.spec(v) for v in chain.values], chain.kinds, chain.interleave, chain.dtype
    )


def _source(call: Call, chain: Chain, fast: bool) -> Source:
    return pointwise_source(
        chain.fn, [call.spec(v) for v in chain.values], chain.kinds, chain.interleave, fast=fast
    )


# -- pointwise + quantize


def refuse_pointwise_quantize(call: Call) -> str | None:
    """Chains that do not compose, formats without a kernel, interleaved outputs."""
    *nodes, last = call.nodes
    if last.inputs[0] != nodes[-1].out:
        return "the pointwise output is not what is quantized"
    chain = compose_chain(call, nodes)
    reason = refuse_chain(call, chain)
    if reason is not None or isinstance(chain, str):
        return reason
    source = _source(call, chain, False)
    if source.scattered or (source.outs == 2 and source.block != source.width):
        return f"an interleave of {source.block} columns"
    rounds = rounding(call, nodes[-1].out in call.writes, chain.dtype)
    waits = isinstance(last.quantizer, Float8CurrentScalingQuantizer) and not is_known(last)
    kept = isinstance(last.quantizer, BLOCKED) and len(nodes) == 1
    if call.rule is not None and call.rule.exact:
        if not (waits or kept):
            return "no value is read again"
        if len(nodes) > 1:
            return "values inside the chain are not rounded"
    elif kept and rounds is None:
        return "a block's values wait for its scale as they would be written: rounded"
    return refuse_state(call, last) or refuse_quantizer(
        last.quantizer, source.width, source.outs, fused=waits and rounds is None
    )


def bind_pointwise_quantize(call: Call) -> Launch:
    """One pass: values, row and column copies, amax."""
    *nodes, last = call.nodes
    chain = compose_chain(call, nodes)
    assert isinstance(chain, Chain)
    dense = nodes[-1].out in call.writes
    source = _source(call, chain, True)
    rounds = rounding(call, dense, chain.dtype)
    wanted = wanted_of(call, last, chain.dtype if dense else None, rounds)
    run = make_run(source, last.quantizer, wanted, call.arch, known=is_known(last))
    order = tuple(call.reads.index(v) for v in chain.values)
    state = state_place(call, last)
    full = chain.kinds.index("full")
    emit = _emitter(call, {nodes[-1].out: "dense"}, last)

    def launched(*reads: torch.Tensor) -> Any:
        xs = prepare([reads[i] for i in order], chain.kinds)
        shape = output_shape(xs[full], source)[0]
        return emit(
            run(source.slots(xs), shape, xs[full].device, None if state is None else reads[state]),
            {},
        )

    return launched


def _emitter(call: Call, names: dict[Value, str], quantize: Node) -> Any:
    """Results in the order of `call.writes`."""
    names = {
        **names,
        **{Value(quantize.id, i): name for i, name in enumerate(("row", "col", "amax"))},
    }
    order = [names[v] for v in call.writes]

    def emit(results: Results, more: dict[str, Any]) -> Any:
        outs = tuple(more[name] if name in more else getattr(results, name) for name in order)
        return outs[0] if len(outs) == 1 else outs

    return emit


# -- pointwise + reduce


def refuse_pointwise_reduce(call: Call) -> str | None:
    """A pointwise value that is read elsewhere, a dtype, an interleave."""
    node, reduce = call.nodes
    if reduce.inputs[0] != node.out or node.out in call.writes:
        return "the pointwise value is read elsewhere"
    chain = compose_chain(call, (node,))
    reason = refuse_chain(call, chain)
    if reason is not None or isinstance(chain, str):
        return reason
    if reduce.dtype not in CTYPES:
        return f"writes FP32, BF16 and FP16, not {reduce.dtype}"
    if node.dtype is not torch.float32:
        return (
            None if not (call.rule and call.rule.exact) else "an exact rule rounds the inner value"
        )
    source = _source(call, chain, False)
    return f"an interleave of {source.block} columns" if source.scattered else None


def bind_pointwise_reduce(call: Call) -> Launch:
    """Sum a function of tensors without writing its values."""
    node, reduce = call.nodes
    chain = compose_chain(call, (node,))
    assert isinstance(chain, Chain)
    source = _source(call, chain, reduce.dtype in FAST)
    order = tuple(call.reads.index(v) for v in chain.values)
    full = chain.kinds.index("full")
    if reduce.over == "rows":
        total = row_sum(source, reduce.dtype, call.arch)

        def run(*reads: torch.Tensor) -> torch.Tensor:
            xs = prepare([reads[i] for i in order], chain.kinds)
            return total(source.slots(xs), output_shape(xs[full], source)[1], xs[full].device)

        return run
    other = (column_sum if reduce.over == "cols" else whole_sum)(source, reduce.dtype, call.arch)

    def run_other(*reads: torch.Tensor) -> torch.Tensor:
        xs = prepare([reads[i] for i in order], chain.kinds)
        return other(source.slots(xs), output_shape(xs[full], source)[0][:-1], xs[full].device)

    return run_other


__all__ = [
    "bind_pointwise_quantize",
    "bind_pointwise_reduce",
]
