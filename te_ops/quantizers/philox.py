"""Philox4x32-10, a counter-based random generator, in integer tensor operations.

A number depends on (seed, stream, element index) only, never on how many are made at once, on
which device, or in which order. Element ``i`` is word ``i % 4`` of the block with the counter
(i // 4 as two words, stream, 0) under the key (seed as two words).

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _multiply(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product. int64 wraps, so its bits are those of the
    unsigned product, and masking removes the sign that the shift drags in."""
    product = x * multiplier
    return (product >> 32) & _MASK, product & _MASK


def philox_block(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words for each counter: int64 tensors with values in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _words(block: Tensor, seed: Tensor, stream: int) -> Tensor:
    """The words of the blocks with the given numbers: [blocks, 4]."""
    zero = torch.zeros((), dtype=torch.int64, device=block.device)
    counter = (block & _MASK, (block >> 32) & _MASK, zero + (stream & _MASK), zero)
    seed = seed.to(device=block.device, dtype=torch.int64).reshape(())
    return torch.stack(philox_block(counter, (seed & _MASK, (seed >> 32) & _MASK)), -1)


def philox_u32(
    count: int,
    seed: Tensor,
    stream: int = 0,
    device: torch.device | str | None = None,
    *,
    offset: int = 0,
) -> Tensor:
    """`count` words, as int64 [count] in [0, 2**32), for the element indices from `offset` on.

    Args:
        seed: int64, one element.
        stream: which of 2**32 independent sequences of the seed.
        device: where to make them; the seed's device if ``None``.
    """
    device = seed.device if device is None else device
    first, end = offset // 4, -(-(offset + count) // 4)
    words = _words(torch.arange(first, end, dtype=torch.int64, device=device), seed, stream)
    return words.view(-1).narrow(0, offset - 4 * first, count)


def philox_u32_at(index: Tensor, seed: Tensor, stream: int = 0) -> Tensor:
    """The words of arbitrary element indices (int64, any shape), such as those of a shard."""
    words = _words((index >> 2).reshape(-1), seed, stream)
    return words.gather(1, (index & 3).reshape(-1, 1)).view(index.shape)


def to_uniform(words: Tensor) -> Tensor:
    """FP32 in [0, 1) from the upper 24 bits of each word."""
    return (words >> 8).float().mul_(2.0**-24)


def philox_uniform(
    shape: int | tuple[int, ...],
    seed: Tensor,
    stream: int = 0,
    device: torch.device | str | None = None,
    *,
    offset: int = 0,
) -> Tensor:
    """FP32 uniforms in [0, 1) of `shape`, in row-major order of the element index; the other
    arguments are those of `philox_u32`."""
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    words = philox_u32(math.prod(size), seed, stream, device, offset=offset)
    return to_uniform(words).view(size)
