"""The launch of a fused GEMM: operands as the kernel reads them, memory for what it writes, and what comes after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_ops.backends.cuda import launch as device_launch
from te_ops.backends.cuda.quantize import make_run
from te_ops.backends.cuda.reduce import slices_kernel
from te_ops.backends.cuda.source import plain
from te_ops.backends.cuda.swizzle import Swizzled, make_swizzle
from te_ops.backends.cuda.targets import cleared
from te_ops.backends.cuda.wanted import Run, Wanted
from te_ops.backends.cutlass import blocks
from te_ops.backends.cutlass.match import Match
from te_ops.backends.cutlass.reference import DTYPES
from te_ops.backends.cutlass.spec import GemmSpec, Load
from te_ops.graph import Value
from te_ops.quantizers import Record, Usage
from te_ops.registry import Call, Launch

Compiled = Callable[..., None]
"""What `runtime.kernel` gives: run(a, b, scale_a=, scale_b=, loads=, acc=, y=, row=, col=, scale=, scale_inv=, amax=,
sums=, blocks_a=, blocks_b=, rebuilt=, rebuilt_scale=, rebuilt_inv=) over matrices, on torch's current stream."""


def bind_fused(call: Call, match: Match, spec: GemmSpec, run: Compiled) -> Launch:
    """`launch(*reads)` of a group by one kernel, for any number of rows but none.

    `spec` is the match's with a tiling, and `run` the kernel of it.
    """
    plan = _plan(call, match, spec)
    emit = _emitter(call, match)

    def launched(*reads: Any) -> Any:
        return emit(plan.run(run, reads))

    def guarded(*reads: Any) -> Any:
        if call.device.index in (None, torch.cuda.current_device()):
            return launched(*reads)
        with torch.cuda.device(call.device):
            return launched(*reads)

    return guarded if call.device.type == "cuda" else launched


@dataclass
class _Made:
    """What one launch made, by the names that `_emitter` uses."""

    acc: Tensor | None = None
    value: Tensor | None = None
    row: Record | None = None
    col: Record | None = None
    amax: Tensor | None = None
    sums: Tensor | None = None
    rebuilt: Record | None = None


@dataclass(frozen=True)
class _Plan:
    """A match with everything decided that does not depend on the row count."""

    match: Match
    spec: GemmSpec
    a: int
    b: int
    loads: tuple[int, ...]
    scale: int | None
    total: int | None
    dtype: torch.dtype  # of the value
    second: Run | None
    finish: tuple[device_launch.Function, torch.dtype] | None
    swizzle: Callable[[Record, Record], tuple[Swizzled, Swizzled]] | None = None
    second_scale: int | None = None  # of the copy that is rebuilt
    second_dtype: torch.dtype | None = None

    def run(self, kernel: Compiled, reads: Sequence[Any]) -> _Made:
        """Launch on these operands."""
        layout = self.match.gemm.layout
        a, b = reads[self.a], reads[self.b]
        left, right, scales = self._operands(a, b)
        lead = tuple(a.shape[:-1]) if layout != "tn" else (left.shape[0],)
        rows, columns = left.shape[0], right.shape[0]
        loads = tuple(
            _load(reads[i], load, left.device)
            for i, load in zip(self.loads, self.spec.epilogue.loads, strict=True)
        )
        out = _Outputs(self, rows, columns, left.device)
        if self.total is not None:
            out.y = device_launch.ready(reads[self.total])
        kernel(
            left,
            right,
            loads=loads,
            **scales,
            acc=out.acc,
            y=out.y,
            row=out.row,
            col=out.col,
            scale=None if self.scale is None else reads[self.scale],
            scale_inv=out.scale_inv,
            amax=out.amax,
            sums=out.sums,
            rebuilt=out.rebuilt,
            rebuilt_scale=None if self.second_scale is None else reads[self.second_scale],
            rebuilt_inv=out.rebuilt_inv,
        )
        return (
            self._results(out, lead) if self.total is None else _Made(value=self._added(out, reads))
        )

    def _operands(self, a: Any, b: Any) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
        """The operands as matrices, and their scales by the kernel's names."""
        if self.swizzle is not None:
            of_a, of_b = self.swizzle(a, b)
            scales = {"scale_a": of_a.tensor, "scale_b": of_b.tensor}
            named = {**scales, "blocks_a": of_a.blocks, "blocks_b": of_b.blocks}
            return blocks.codes(a), blocks.codes(b), named
        layout = self.match.gemm.layout
        left, right = _operand(a, layout == "tn"), _operand(b, layout != "nt")
        if not isinstance(a, Record):
            return left, right, {"scale_a": None, "scale_b": None}
        return left, right, {"scale_a": a.scale_inv, "scale_b": b.scale_inv}

    def _added(self, out: _Outputs, reads: Sequence[Any]) -> Tensor:
        """The tensor that was added to: the caller's, in which the sum has to be whatever its strides are."""
        assert self.total is not None
        assert out.y is not None
        total: Tensor = reads[self.total]
        return total if out.y is total else total.copy_(out.y)

    def _results(self, out: _Outputs, lead: tuple[int, ...]) -> _Made:
        acc = None if out.acc is None else _shaped(out.acc, lead)
        value = _shaped(out.y, lead) if out.y is not None else None
        row, col = self._records(out, lead)
        if self.second is not None:
            assert out.y is not None
            assert out.amax is not None
            shape = (*lead, out.width)
            made = self.second((out.y.data_ptr(), out.width), shape, out.device, out.amax)
            row, col = made.row, made.col
        return _Made(acc, value, row, col, out.amax, self._sums(out), self._rebuilt(out, lead))

    def _rebuilt(self, out: _Outputs, lead: tuple[int, ...]) -> Record | None:
        node = self.match.rebuilt
        if node is None:
            return None
        assert out.rebuilt is not None
        assert self.second_dtype is not None
        width = out.rebuilt.shape[0]
        data = out.rebuilt if len(lead) == 1 else out.rebuilt.view(width, *lead)
        shape, dtype = (*lead, width), self.second_dtype
        return Record(data, out.rebuilt_inv, None, node.quantizer, Usage.COL, shape, dtype)

    def _records(self, out: _Outputs, lead: tuple[int, ...]) -> tuple[Record | None, Record | None]:
        node = self.match.quantize
        if node is None:
            return None, None
        quantizer, shape = node.quantizer, (*lead, out.width)
        row = col = None
        if out.row is not None:
            data = _shaped(out.row, lead)
            row = Record(data, out.scale_inv, None, quantizer, Usage.ROW, shape, self.dtype)
        if out.col is not None:
            turned = out.col if len(lead) == 1 else out.col.view(out.width, *lead)
            col = Record(turned, out.scale_inv, None, quantizer, Usage.COL, shape, self.dtype)
        return row, col

    def _sums(self, out: _Outputs) -> Tensor | None:
        if out.sums is None:
            return None
        assert self.finish is not None
        (finish, dtype), (slices, width) = self.finish, out.sums.shape
        y = device_launch.empty((width,), dtype, out.device)
        finish(out.device, -(-width // 64), out.sums.data_ptr(), y.data_ptr(), width, slices)
        return y


class _Outputs:
    """Memory for what the kernel writes, as matrices."""

    def __init__(self, plan: _Plan, rows: int, columns: int, device: torch.device) -> None:
        epilogue, spec = plan.spec.epilogue, plan.spec
        self.device = device
        self.width = (columns // 2 if epilogue.acc_pair else columns) * epilogue.outs
        shape, quantized = (rows, self.width), epilogue.quantized
        empty = device_launch.empty

        def made(wanted: Any, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
            return empty(shape, dtype, device) if wanted else None

        self.acc = self.y = self.row = self.col = self.sums = None
        self.amax = self.scale_inv = self.rebuilt = self.rebuilt_inv = None
        if epilogue.acc_store is not None:
            self.acc = empty((rows, columns), DTYPES[epilogue.acc_store], device)
        if epilogue.store is not None and not epilogue.accumulate:
            self.y = empty(shape, DTYPES[epilogue.store], device)
        if quantized is not None:
            fp8 = DTYPES[quantized.format]
            self.row = made(quantized.row, shape, fp8)
            self.col = made(quantized.col, shape[::-1], fp8)
            # The first number is the amax, the fifth the inverse scale (which GEMMs want on 16 bytes), the ninth that
            # of the copy that is rebuilt.
            numbers = cleared(12 if epilogue.rebuilt else 8, device, quantized.amax)
            self.amax = numbers[0] if quantized.amax else None
            self.scale_inv = numbers[4] if quantized.row or quantized.col else None
            if epilogue.rebuilt is not None:
                self.rebuilt = empty((columns, rows), DTYPES[epilogue.rebuilt.format], device)
                self.rebuilt_inv = numbers[8]
        if epilogue.sums:
            self.sums = empty((-(-rows // spec.tiling.m), self.width), torch.float32, device)


def _plan(call: Call, match: Match, spec: GemmSpec) -> _Plan:
    where = call.reads.index
    quantize, reduce = match.quantize, match.reduce
    dtype = call.spec(match.value).dtype
    stateful = quantize is not None and quantize.quantizer.stateful
    row, col = (quantize is not None and Value(quantize.id, i) in call.writes for i in range(2))
    second = None
    if quantize is not None and match.waits and (row or col):
        width = int(call.spec(match.value).shape[-1])
        wanted = Wanted(row, col, False, None, dtype, dtype)
        second = make_run(plain(dtype, width), quantize.quantizer, wanted, call.arch, known=True)
    return _Plan(
        match,
        spec,
        a=where(match.gemm.inputs[0]),
        b=where(match.gemm.inputs[1]),
        loads=tuple(where(v) for v in match.loads),
        scale=where(quantize.inputs[1]) if quantize is not None and stateful else None,
        total=None if match.total is None else where(match.total),
        dtype=dtype,
        second=second,
        finish=None if reduce is None else (slices_kernel(reduce.dtype, call.arch), reduce.dtype),
        swizzle=make_swizzle(call.arch, paired=spec.epilogue.acc_pair) if spec.blocks else None,
        **_second(call, match),
    )


def _second(call: Call, match: Match) -> dict[str, Any]:
    """Of the copy that is rebuilt: where its scale is read, and the dtype of its source."""
    node = match.rebuilt
    if node is None:
        return {}
    source, scale = node.inputs
    return {"second_scale": call.reads.index(scale), "second_dtype": call.spec(source).dtype}


def _emitter(call: Call, match: Match) -> Callable[[_Made], Any]:
    """Results in the order of `call.writes`."""
    names = {match.gemm.out: "acc", match.value: "value"}
    if match.quantize is not None:
        names |= {Value(match.quantize.id, i): n for i, n in enumerate(("row", "col", "amax"))}
    if match.reduce is not None:
        names[match.reduce.out] = "sums"
    if match.rebuilt is not None:
        names[Value(match.rebuilt.id, 1)] = "rebuilt"
    order = [names[v] for v in call.writes]

    def emit(made: _Made) -> Any:
        outs = tuple(getattr(made, name) for name in order)
        return outs[0] if len(outs) == 1 else outs

    return emit


def _operand(x: Any, turned: bool) -> Tensor:
    """[rows, K] of an operand, contiguous along K for codes; of a dense tensor a view, of its transpose if `turned`."""
    if isinstance(x, Record):
        data = x.data
        if data.dim() != 2:
            row = x.usage is Usage.ROW
            data = data.reshape((-1, data.shape[-1]) if row else (data.shape[0], -1))
        return device_launch.ready(data)
    ready = device_launch.ready(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    return ready.t() if turned else ready


def _load(x: Tensor, load: Load, device: torch.device) -> Tensor:
    """An operand of the epilogue: a tile's tensor as a matrix, others as a vector on the device."""
    if load.shape == "scalar" and x.device.type != device.type:  # a run-time number: on the host
        return torch.full((1,), float(x), dtype=x.dtype, device=device)
    x = device_launch.ready(x)
    if load.shape != "tile":
        return x.view(-1)
    return x if x.dim() == 2 else x.view(-1, x.shape[-1])


def _shaped(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    return x if len(lead) == 1 else x.view(*lead, x.shape[-1])
