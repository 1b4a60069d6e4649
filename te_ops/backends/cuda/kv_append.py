"""New tokens into a KV cache: each sequence's behind its length, which the host does not read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_ops.backends.cuda import launch
from te_ops.basic.kvcache import KV_APPEND_PAGES
from te_ops.registry import Call, Launch

THREADS = 256
VECTOR = 16  # bytes
_SLOTS = 15


def refuse(call: Call) -> str | None:
    """Tokens that are not made of whole 16 bytes."""
    cache = call.spec(call.node.inputs[0])
    width = int(cache.shape[-1]) * int(cache.shape[-2]) * cache.dtype.itemsize
    if width % VECTOR:
        return f"a token has {width} bytes; whole {VECTOR} are written"
    return None


def bind(call: Call) -> Launch:
    """The launch of a call, which gives the cache, or its pages."""
    node = call.node
    paged = node.prim is KV_APPEND_PAGES
    head = "#include <kernels/kv_append.cuh>\ntypedef te::KvAppend Parameters;\n"
    text = launch.text_of(
        name="kv_append", head=head, body=f"te::kv_append<{THREADS}>(p);", threads=THREADS
    )
    kernel = launch.build("kv_append", text, call.arch, THREADS, _SLOTS)
    places = tuple(call.reads.index(v) for v in node.inputs)
    last, page = node.layout == "sbhd", None if paged else node.page

    def run(*reads: Any) -> Tensor:
        cache, new, lengths, total, *more = (reads[i] for i in places)
        table, starts = (more[0], more[1:]) if paged else (None, more)
        rows = _fit(new.transpose(0, 1) if last else new)
        batch, steps = rows.shape[:2]
        unit = VECTOR // rows.element_size()
        width = cache.stride(1) // unit
        integers = [_whole(x) for x in (lengths, total, *starts[:1])]
        pages = None if table is None else _whole(table)
        count = batch * steps * width
        if count:
            kernel(
                cache.device, -(-count // THREADS), rows.data_ptr(), cache.data_ptr(),
                integers[0].data_ptr(), integers[1].data_ptr(),
                integers[2].data_ptr() if starts else 0, 0 if pages is None else pages.data_ptr(),
                rows.stride(0) // unit, rows.stride(1) // unit, cache.stride(0) // unit, width,
                batch, steps, width, cache.shape[1], 0 if pages is None else pages.shape[1],
            )  # fmt: skip
        made: Tensor = cache if page is None else cache.view(-1, page, *cache.shape[2:])
        return made

    return run


def _fit(rows: Tensor) -> Tensor:
    """Rows [b, s, h, d] whose tokens lie together, on whole 16 bytes."""
    token = rows.shape[2] * rows.shape[3]
    unit = VECTOR // rows.element_size()
    together = rows.stride(3) == 1 and (rows.stride(2) == rows.shape[3] or rows.shape[2] == 1)
    steps = [s for n, s in zip(rows.shape[:2], rows.stride()[:2], strict=True) if n > 1]
    whole = token % unit == 0 and rows.data_ptr() % VECTOR == 0 and not any(s % unit for s in steps)
    return rows if together and whole else launch.ready(rows.contiguous())


def _whole(x: Tensor) -> Tensor:
    """Contiguous int64."""
    return x.to(torch.int64).contiguous()


__all__ = ["bind", "refuse"]
