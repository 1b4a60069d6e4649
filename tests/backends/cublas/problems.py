"""Calls of one gemm, alone or with what follows it, over operands of given formats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import te_ops as te
from te_ops.backends.cublas import KERNELS
from te_ops.basic.gemm import GEMM
from te_ops.basic.pointwise import cast, pointwise
from te_ops.graph import Graph, Kind, Node, Spec, Value
from te_ops.pointwise import Fn, activations
from te_ops.quantizers import Quantizer, Record, Usage
from te_ops.registry import Call, Kernel, Rule

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPILOGUE = Rule("gemm_epilogue", ("gemm", "pointwise*"), commutes=("sum", "pointwise"))
USAGES = {
    "nt": (Usage.ROW, Usage.ROW),
    "nn": (Usage.ROW, Usage.COL),
    "tn": (Usage.COL, Usage.COL),
}
NATIVE, FUSED, EMULATED = KERNELS

Operand = Tensor | Record


def shapes(layout: str, rows: int, columns: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Logical shapes of the operands of a product [rows, columns] over k."""
    return {
        "nt": ((rows, k), (columns, k)),
        "nn": ((rows, k), (k, columns)),
        "tn": ((k, rows), (k, columns)),
    }[layout]


def record(x: Tensor, quantizer: Quantizer, usage: Usage) -> Record:
    """One usage of x."""
    state = torch.tensor([3.0], device=x.device) if quantizer.stateful else None
    row, col, _ = quantizer.records(x, row=usage is Usage.ROW, col=usage is Usage.COL, state=state)
    made = row if usage is Usage.ROW else col
    assert made is not None
    return made


def operands(
    layout: str,
    extents: tuple[int, int, int],
    quantizers: tuple[Quantizer | None, Quantizer | None],
    dtype: torch.dtype = torch.bfloat16,
    *,
    usages: tuple[Usage, Usage] | None = None,
    device: torch.device | str = "cpu",
) -> list[Operand]:
    """Random operands; None for a dense one."""
    made: list[Operand] = []
    places = zip(shapes(layout, *extents), quantizers, usages or USAGES[layout], strict=True)
    for shape, quantizer, usage in places:
        x = torch.randn(shape).to(device, dtype)
        made.append(x if quantizer is None else record(x, quantizer, usage))
    return made


def spec_of(x: Operand) -> Spec:
    if isinstance(x, Record):
        return Spec(tuple(x.shape), x.dtype, Kind("record", x.quantizer, x.usage))
    return Spec(tuple(x.shape), x.dtype)


def single(
    a: Operand,
    b: Operand,
    layout: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    accumulation: str | None = None,
    arch: str = "sm_90",
) -> Call:
    """A gemm alone."""
    g, y = _gemm(a, b, layout, dtype, accumulation)
    return _call(g, (g.node(y),), (_device(a), arch))


def fused(
    a: Operand,
    b: Operand,
    layout: str,
    then: str | Fn,
    *extra: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    result: torch.dtype | None = None,
    write: bool = False,
    accumulation: str | None = None,
    arch: str = "sm_90",
) -> Call:
    """A gemm and one pointwise node: "cast", or a function of the product and `extra`."""
    g, y = _gemm(a, b, layout, dtype, accumulation)
    if then == "cast":
        assert result is not None
        z = cast(g, y, result)
    else:
        fn = activations[then]() if isinstance(then, str) else then
        others = [g.input(2 + i, spec_of(x)) for i, x in enumerate(extra)]
        z = pointwise(g, fn, y, *others, dtype=result)
    return _call(g, (g.node(y), g.node(z)), (_device(a), arch), (y,) if write else ())


def _gemm(
    a: Operand, b: Operand, layout: str, dtype: torch.dtype, accumulation: str | None
) -> tuple[Graph, Value]:
    g = Graph()
    values = [g.input(0, spec_of(a)), g.input(1, spec_of(b))]
    return g, g.call(GEMM, *values, layout=layout, dtype=dtype, accumulation=accumulation)


def _device(x: Operand) -> torch.device:
    return x.data.device


def _call(
    g: Graph,
    nodes: tuple[Node, ...],
    where: tuple[torch.device, str],
    also: tuple[Value, ...] = (),
) -> Call:
    inside = {n.id for n in nodes}
    reads = tuple(dict.fromkeys(v for n in nodes for v in n.inputs if v.node not in inside))
    writes = (*also, nodes[-1].out)
    specs = {v: g.spec(v) for v in (*reads, *(n.out for n in nodes))}
    rule = EPILOGUE if len(nodes) > 1 else None
    return Call(nodes, reads, writes, specs, *where, 16, rule)


def run(kernel: Kernel, call: Call, *xs: Any) -> Any:
    """The kernel's result, once it took the call."""
    assert kernel.reason(call) is None, kernel.reason(call)
    return kernel.bind(call)(*xs)


def exact(a: Operand, b: Operand, layout: str) -> Tensor:
    """The product in FP64."""
    x, w = (t.dequantize(torch.float64) if isinstance(t, Record) else t.double() for t in (a, b))
    if layout == "tn":
        return x.reshape(-1, x.shape[-1]).t() @ w.reshape(-1, w.shape[-1])
    return x @ (w.t() if layout == "nt" else w)


FORMATS: dict[str, tuple[Quantizer, Quantizer]] = {
    "current": (te.Float8CurrentScalingQuantizer(), te.Float8CurrentScalingQuantizer()),
    "delayed": (te.Float8Quantizer(), te.Float8Quantizer()),
    "hybrid": (te.Float8CurrentScalingQuantizer(E5M2), te.Float8Quantizer()),
    "1x128 x 128x128": (
        te.Float8BlockQuantizer(),
        te.Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False),
    ),
    "128x128 x 1x128": (te.Float8BlockQuantizer(block_scaling_dim=2), te.Float8BlockQuantizer()),
    "1x128 x 1x128": (
        te.Float8BlockQuantizer(force_pow_2_scales=False),
        te.Float8BlockQuantizer(),
    ),
}
"""Pairs of formats that the library multiplies on Hopper."""
