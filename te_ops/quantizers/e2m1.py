"""FP4 E2M1: values 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign, codes packed two a byte.

The code of a magnitude ``a`` is ``min(2 a, a + 2, a / 2 + 4)`` rounded to an integer, since the
steps are 1/2 up to 2, 1 up to 4 and 2 up to 6; ties go to even codes, as the format wants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_ops.quantizers.codec import constant, pick

E2M1_MAX = 6.0

_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_VALUES = constant(torch.tensor(_POSITIVE + [-v for v in _POSITIVE]))
# The two values in a byte, that of the low nibble first.
_PAIRS = constant(torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], -1))


def encode_e2m1(y: Tensor, uniform: Tensor | None = None) -> Tensor:
    """FP32 `y` as codes, uint8 in 0..15, one an element.

    Values beyond 6 become 6 with their sign; -0 keeps its sign; NaN becomes code 7, as the
    conversion instruction of NVIDIA GPUs has it. Rounds to nearest even, or, given `uniform` in
    [0, 1) of `y`'s shape, to one of the two neighbours with the probability of its closeness.
    """
    limit = torch.full(
        (), E2M1_MAX, dtype=y.dtype, device=y.device
    )  # made there: a copy from the host waits
    # fmin drops the NaN, which clamp would keep.
    clipped = torch.fmin(y, limit).clamp_(min=-E2M1_MAX)
    a = clipped.abs()
    if uniform is None:
        code = a.mul(2.0).round_().clamp_(max=a.round().add_(2.0))
        code.clamp_(max=a.mul_(0.5).round_().add_(4.0))
    else:
        position = torch.minimum(torch.minimum(a.mul(2.0), a.add(2.0)), a.mul_(0.5).add_(4.0))
        code = position.floor()
        # Compared, not added: a value that is representable must stay where it is.
        code.add_(uniform < position.sub_(code))
    sign = torch.signbit(clipped).view(torch.uint8).mul_(8)
    return code.to(torch.uint8).add_(sign)


def values_e2m1(codes: Tensor) -> Tensor:
    """FP32 values of unpacked `codes`."""
    return pick(_VALUES, codes)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes [..., 2 n], contiguous, as bytes [..., n]: the lower index in the low nibble."""
    # As little-endian 16-bit words, low + 256 * high: a shift by 4 brings high beside low.
    words = codes.view(-1).view(torch.int16)
    packed = words.add(words >> 4).bitwise_and_(0xFF).to(torch.uint8)
    return packed.view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Bytes [..., n] as FP32 values [..., 2 n]."""
    values = pick(_PAIRS, packed)
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])


def unpack_codes(packed: Tensor) -> Tensor:
    """Bytes [..., n] as codes [..., 2 n]: the inverse of `pack_e2m1`."""
    codes = torch.stack([packed & 15, packed >> 4], -1)
    return codes.view(*packed.shape[:-1], 2 * packed.shape[-1])
