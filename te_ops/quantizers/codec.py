"""Bytes of small floating-point formats to numbers and back, in a few tensor operations each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_BYTES = torch.arange(256, dtype=torch.uint8)
# On a CPU, looking 256 values up is several times faster than torch's cast from FP8.
_TABLES = {
    dtype: _BYTES.view(dtype).to(torch.float32)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
}


_PLACED: dict[tuple[int, torch.device], Tensor] = {}
_NUMBERS: dict[int, list[Any]] = {}
_PLAIN = (Tensor, torch.nn.Parameter)


def constant(table: Tensor) -> Tensor:
    """A module's table for `on` and `pick`."""
    _NUMBERS[id(table)] = table.tolist()
    return table


def on(table: Tensor, like: Tensor) -> Tensor:
    """A module's `constant` where another tensor is: copied once, since a copy from the host waits for the device."""
    if (
        type(like) not in _PLAIN
    ):  # a tracer's: it meets no tensor that was there before, but numbers
        return torch.tensor(_NUMBERS[id(table)], dtype=table.dtype, device=like.device)
    if like.device == table.device:
        return table
    key = id(table), like.device
    found = _PLACED.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = _PLACED[key] = table.to(like.device)
    return found


def pick(table: Tensor, codes: Tensor) -> Tensor:
    """``table[codes]`` for uint8 `codes`: their shape, followed by the table's inner shape."""
    found = on(table, codes).index_select(0, codes.reshape(-1).int())
    return found.view(codes.shape + table.shape[1:])


def decode_fp8(codes: Tensor) -> Tensor:
    """FP8 `codes` as FP32, exactly."""
    table = _TABLES[codes.dtype]
    # Only a plain CPU tensor can meet the table (a fake tensor says that it is on the CPU too).
    if codes.device == table.device and type(codes) is Tensor:
        return pick(table, codes.view(torch.uint8))
    return codes.to(torch.float32)


def encode_fp8(y: Tensor, dtype: torch.dtype) -> Tensor:
    """FP32 `y` (overwritten) as FP8, round to nearest even. Beyond the range and Inf become the
    largest finite value with their sign: what a bare cast does for an overflow differs between
    versions of torch, so the clamp comes first. NaN becomes 0x7F, as the conversion instruction of
    NVIDIA GPUs has it; torch would keep a sign, which differs between devices."""
    limit = torch.finfo(dtype).max
    codes = y.clamp_(-limit, limit).to(dtype).view(torch.uint8)
    return codes.sub_((codes == 0xFF).view(torch.uint8).mul_(0x80)).view(dtype)


def blocks_along(length: int, block: int) -> int:
    """How many blocks cover `length`."""
    return -(-length // block)


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix `x` grown with zeros so that `rows` and `columns` divide its dimensions.

    Zeros change no block's amax, and what is made from them is cut off again.
    """
    below, right = -x.shape[0] % rows, -x.shape[1] % columns
    return pad(x, (0, right, 0, below)) if below or right else x


def tile_amax(x: Tensor, rows: int, columns: int) -> Tensor:
    """max |x| of each `rows` x `columns` tile of a matrix, NaN propagating; partial tiles at the
    edges are tiles too. FP32 [tiles down, tiles across]."""
    down, across = blocks_along(x.shape[0], rows), blocks_along(x.shape[1], columns)
    tiles = padded(x.abs(), rows, columns).view(down, rows, across, columns)
    return tiles.amax((1, 3)).float()


def scale_tiles_(x: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """Multiply the matrix `x` in place by one `scale` [tiles down, tiles across] a tile."""
    m, k = x.shape
    if m % rows == 0 and k % columns == 0:
        x.view(m // rows, rows, k // columns, columns).mul_(scale[:, None, :, None])
        return x
    return x.mul_(stretch(stretch(scale, 0, rows, m), 1, columns, k))


def stretch(scale: Tensor, dim: int, block: int, length: int) -> Tensor:
    """One `scale` a block repeated for each of the `length` positions of dimension `dim`."""
    if block == 1:
        return scale
    return scale.repeat_interleave(block, dim).narrow(dim, 0, length)


def transpose_bytes(codes: Tensor) -> Tensor:
    """A one-byte tensor with its last dimension first, contiguous."""
    if codes.dim() < 2:
        return codes
    return codes.view(torch.uint8).movedim(-1, 0).contiguous().view(codes.dtype)


def untranspose_bytes(codes: Tensor) -> Tensor:
    """The inverse of `transpose_bytes`."""
    if codes.dim() < 2:
        return codes
    return codes.view(torch.uint8).movedim(0, -1).contiguous().view(codes.dtype)
