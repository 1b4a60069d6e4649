"""FP8 products with scales: one a tensor, one for 128 elements along k, or one a 128 x 128 tile.

Hopper multiplies FP8 only with both operands contiguous along the contraction k, which is how
records hold their data (col data is transposed), so the three layouts of a gemm become one:
[rows, k] x [columns, k]. Extents that the library refuses are filled up with zero codes, which add
nothing to a sum, and cut off again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from te_ops.backends.cublas.problem import Problem
from te_ops.graph import Spec
from te_ops.quantizers import Record, Usage
from te_ops.registry import Launch

_USAGES = {
    "nt": (Usage.ROW, Usage.ROW),
    "nn": (Usage.ROW, Usage.COL),
    "tn": (Usage.COL, Usage.COL),
}
_RESULTS = (torch.bfloat16, torch.float16, torch.float32)
MULTIPLE = 16  # of every extent that is contiguous in memory: 16 bytes of FP8
ALIGNMENT = (
    16  # bytes, of a scale: the library refuses others (CUBLAS_STATUS_NOT_SUPPORTED on an H200)
)
_SCALE_ALIGN = 4  # FP32 scales that make 16 bytes
MAX_SHAPES = 1024  # exact ones that a launch remembers


# -- what the library takes


def refuse_scaled(problem: Problem) -> str | None:
    """None if the library multiplies these two records into this dtype."""
    for spec, usage in zip((problem.a, problem.b), _USAGES[problem.layout], strict=True):
        if spec.kind.usage is not usage:
            is_ = spec.kind.usage.value
            return f"gemm {problem.layout} reads a {usage.value} record here, this one is {is_}"
    if problem.dtype not in _RESULTS:
        return f"the library makes no {problem.dtype} of FP8 operands"
    if code_dtype(problem.a) is code_dtype(problem.b) is torch.float8_e5m2:
        return "the library does not multiply E5M2 by E5M2; make one operand E4M3"
    if problem.bias is not None and problem.dtype is torch.float32:
        return "the library adds no bias to an FP32 result of FP8 operands"
    return None


def refuse_blocks(problem: Problem) -> str | None:
    """As `refuse_scaled`; block scales came to cuBLASLt with CUDA 12.9."""
    built = torch.version.cuda
    if built is not None and tuple(int(n) for n in built.split(".")[:2]) < (12, 9):
        return f"block scales need CUDA 12.9, torch is built for {built}"
    if not hasattr(torch, "_scaled_mm_v2"):
        return f"torch {torch.__version__} has no scaled_mm with block scales; 2.11 has"
    if torch.float8_e5m2 in (code_dtype(problem.a), code_dtype(problem.b)):
        return "torch multiplies block-scaled E4M3 only"  # E5M2 x E4M3 was refused on an H200, torch 2.11
    return refuse_scaled(problem)


def code_dtype(spec: Spec) -> torch.dtype:
    """FP8 format of a record's codes."""
    dtype: torch.dtype = spec.kind.quantizer.of_usage(spec.kind.usage).dtype
    return dtype


# -- operands as the library wants them


def k_major(record: Record) -> Tensor:
    """Codes as a matrix [rows, k], contiguous along k, on a 16-byte address."""
    data = record.data
    if data.dim() != 2:
        row = record.usage is Usage.ROW
        data = data.reshape((-1, data.shape[-1]) if row else (data.shape[0], -1))
    if data.stride() != (data.shape[1], 1):
        # One row may have any stride between rows, and is taken for a column where that is 1.
        data = data.contiguous().flatten().view(data.shape)
    if data.storage_offset() % MULTIPLE:
        data = data.clone()
    return data


def filled(codes: Tensor, rows: int, k: int) -> Tensor:
    """`codes` with this many zero rows below and zero columns on the right."""
    if not (rows or k):
        return codes
    return pad(codes.view(torch.uint8), (0, k, 0, rows)).view(codes.dtype)


def vector_scale(scale: Tensor, rows: int) -> Tensor:
    """scale_inv [m, k blocks] of 1 x 128 blocks as the library reads it, with m contiguous.

    Made of the same shape, but for `rows` more zero scales, and strides (1, m + rows). A quantize
    kernel may write these strides right away; then nothing is copied.
    """
    m, blocks = scale.shape
    if not rows and scale.stride(0) == 1 and (scale.stride(1) == m or blocks == 1):
        # One block has any stride between blocks, and the library checks it all the same.
        return scale.as_strided((m, blocks), (1, m))
    made = scale.new_zeros(blocks, m + rows) if rows else scale.new_empty(blocks, m)
    made.narrow(1, 0, m).copy_(scale.t())
    return made.as_strided((m + rows, blocks), (1, m + rows))


def tile_scale(scale: Tensor) -> Tensor:
    """scale_inv [m blocks, k blocks] of 128 x 128 tiles as the library reads it.

    That is [k blocks, m blocks] with k contiguous, filled up with zeros to a multiple of 4. A quantize kernel may
    write it that way right away; then nothing is copied.
    """
    m, blocks = scale.shape
    filled = -(-blocks // _SCALE_ALIGN) * _SCALE_ALIGN
    last = scale.storage_offset() + m * filled
    if (
        scale.stride() == (filled, 1)
        and last * scale.element_size() <= scale.untyped_storage().nbytes()
    ):
        return scale.as_strided((m, filled), (filled, 1)).t()
    return pad(scale, (0, filled - blocks)).t() if filled > blocks else scale.contiguous().t()


# -- launches


@dataclass(frozen=True)
class _Extents:
    """What is added to rows, columns and contraction so that the library takes them."""

    rows: int
    columns: int
    k: int

    @property
    def cut(self) -> bool:
        return bool(self.rows or self.columns)


def bind_tensorwise(problem: Problem) -> Launch:
    """`launch(a, b[, bias])` over records with one scale each. Any number of rows, zero too."""
    fast, dtype = problem.fast, problem.dtype

    def multiply(a: Record, b: Record, more: _Extents, bias: Tensor | None) -> Tensor:
        y: Tensor = torch._scaled_mm(
            filled(k_major(a), more.rows, more.k),
            filled(k_major(b), more.columns, more.k).t(),
            scale_a=_scale(a),
            scale_b=_scale(b),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
        return y

    return _launch(problem, multiply, row_multiple=1)


def bind_blocks(problem: Problem) -> Launch:
    """`launch(a, b[, bias])` over records with block scales; sums are always in two levels."""
    dtype = problem.dtype
    tiled = tuple(_is_tiled(spec) for spec in (problem.a, problem.b))
    kinds = torch.nn.functional.ScalingType
    recipes = [[int((kinds.BlockWise128x128 if t else kinds.BlockWise1x128).value)] for t in tiled]

    def scale(record: Record, is_tiled: bool, rows: int) -> list[Tensor]:
        found = _scale(record)
        return [tile_scale(found) if is_tiled else vector_scale(found, rows)]

    def multiply(a: Record, b: Record, more: _Extents, bias: Tensor | None) -> Tensor:
        y: Tensor = torch._scaled_mm_v2(
            filled(k_major(a), more.rows, more.k),
            filled(k_major(b), more.columns, more.k).t(),
            scale(a, tiled[0], more.rows),
            recipes[0],
            [],
            scale(b, tiled[1], more.columns),
            recipes[1],
            [],
            bias,
            dtype,
        )
        return y

    return _launch(problem, multiply, row_multiple=MULTIPLE)


def _scale(record: Record) -> Tensor:
    scale = record.scale_inv
    assert scale is not None  # every FP8 format of this file has one
    return scale.clone() if scale.data_ptr() % ALIGNMENT else scale


def _is_tiled(spec: Spec) -> bool:
    quantizer = spec.kind.quantizer.of_usage(spec.kind.usage)
    return bool(quantizer.block_scaling_dim == 2)


def _launch(problem: Problem, multiply: Any, row_multiple: int) -> Launch:
    """`multiply` with empty operands, extents and the shape of the result taken care of, once for each exact shape."""
    dtype, keeps_rows = problem.dtype, problem.layout != "tn"
    made: dict[Any, tuple[tuple[int, int, int], tuple[int, ...], _Extents]] = {}

    def prepare(a: Record, b: Record) -> tuple[tuple[int, int, int], tuple[int, ...], _Extents]:
        rows, columns, k = _extents(a, b)
        shape = (*a.shape[:-1], columns) if keeps_rows else (rows, columns)
        more = _Extents(-rows % row_multiple, -columns % MULTIPLE, -k % MULTIPLE)
        if len(made) >= MAX_SHAPES:
            made.clear()
        made[a.data.shape, b.data.shape] = found = (rows, columns, k), shape, more
        return found

    def launch(a: Record, b: Record, bias: Tensor | None = None) -> Tensor:
        (rows, columns, k), shape, more = made.get((a.data.shape, b.data.shape)) or prepare(a, b)
        if not (rows and columns and k):
            empty = a.data.new_zeros(shape, dtype=dtype)
            return empty if bias is None else empty + bias
        if bias is not None:
            bias = pad(bias, (0, more.columns)) if more.columns else bias.contiguous()
        y: Tensor = multiply(a, b, more, bias)
        if more.cut:
            y = y[:rows, :columns].contiguous()
        return y if y.dim() == len(shape) else y.view(shape)

    return launch


def _extents(a: Record, b: Record) -> tuple[int, int, int]:
    """Rows and columns of the product, and what is contracted."""
    ours, theirs = a.data.shape, b.data.shape
    if a.usage is Usage.ROW:  # [..., k] x [columns, k]
        k = ours[-1]
        return (a.data.numel() // k if k else 0), theirs[0], k
    rows = ours[0] if ours else 1  # [rows, ...] x [columns, ...]
    return rows, theirs[0], (a.data.numel() // rows if rows else 0)
