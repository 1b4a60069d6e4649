"""transpose_record: the other copy of FP8 codes that have one scale."""

from __future__ import annotations

import math
from typing import Any

from te_ops.backends.cuda import launch
from te_ops.backends.cuda.pointwise import check_chunks
from te_ops.backends.cuda.targets import PER_TENSOR, TILE_COLS, whole
from te_ops.backends.cuda.wanted import THREADS
from te_ops.quantizers import Record, Usage
from te_ops.registry import Call, Launch

GROUPS = 8
"""Of sixteen rows, in a tile."""


def refuse(call: Call) -> str | None:
    """Formats whose scales are transposed too."""
    quantizer = call.spec(call.node.inputs[0]).kind.quantizer
    if type(quantizer) not in PER_TENSOR:
        return f"no kernel for {quantizer.describe()}: codes under one scale are transposed"
    return None


def bind(call: Call) -> Launch:
    """The launch of one node."""
    spec = call.spec(call.node.inputs[0])
    row = spec.kind.usage is Usage.ROW
    # A row copy is [rows, width], a transposed one [width, rows]; only the last size is the plan's for sure.
    width = int(spec.shape[-1]) if spec.shape else 1
    aligned = row and width % 8 == 0
    head = (
        "#include <kernels/transpose.cuh>\n"
        "struct Parameters { const te::u8* x; te::u8* y; te::i64 rows, width; };\n"
    )
    body = (
        f"te::transpose_bytes<{whole(aligned)}, {GROUPS}>(p.x, p.y, p.rows, p.width, te::block());"
    )
    text = launch.text_of(name="transpose", head=head, body=body, threads=THREADS)
    function = launch.build("transpose", text, call.arch, THREADS, 4)

    def run(record: Record) -> Any:
        data, shape = launch.ready(record.data), record.shape
        lead = shape[:-1]
        long, short = math.prod(lead), shape[-1] if shape else 1
        to = (short, *lead) if row else (*lead, short)
        y = launch.empty(to if shape else (), data.dtype, data.device)
        if data.numel():
            rows, cols = (long, short) if row else (short, long)
            check_chunks(data.numel() // 8, data)
            tiles = -(-rows // (16 * GROUPS)) * -(-cols // TILE_COLS)
            function(data.device, tiles, data.data_ptr(), y.data_ptr(), rows, cols)
        usage = record.usage.other
        return Record(y, record.scale_inv, None, record.quantizer, usage, shape, record.dtype)

    return run


__all__ = ["bind", "refuse"]
