"""The formats once more: numpy scalars and ml_dtypes, loops over blocks, no torch arithmetic.

Written from the definitions, not from te_ops. A record is (codes, scales, amax), codes as the
numpy float type of the format (NVFP4: nibbles, one an element).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

F32 = np.float32
FP8: dict[torch.dtype, Any] = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FP32_MAX = np.finfo(F32).max
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def matrix(x: torch.Tensor) -> np.ndarray:
    """`x` as FP32 [M, K]."""
    columns = x.shape[-1] if x.dim() else 1
    rows = math.prod(x.shape[:-1]) if x.dim() else 1
    return x.detach().float().numpy().reshape(rows, columns)


def amax_of(a: np.ndarray) -> np.float32:
    result = F32(0)
    for v in np.abs(a).ravel():
        result = v if np.isnan(v) or v > result else result
        if np.isnan(result):
            break
    return result


def scale_of(amax, fp8_max, *, pow2=False, eps=0.0, largest=FP32_MAX) -> np.float32:
    amax = F32(amax)
    if not np.isnan(amax) and amax < F32(eps):
        amax = F32(eps)
    if np.isnan(amax) or np.isinf(amax) or amax == 0:
        scale = F32(1)
    else:
        scale = F32(fp8_max) / amax
        if np.isinf(scale):
            scale = F32(largest)
    return F32(2.0 ** math.floor(math.log2(float(scale)))) if pow2 else scale


def cast(a: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    top = F32(FP8_MAX[dtype])
    return np.where(np.isnan(a), a, np.minimum(np.maximum(a, -top), top)).astype(FP8[dtype])


def tiles(shape: tuple[int, int], tile: tuple[int, int]) -> Iterator[Any]:
    for i in range(-(-shape[0] // tile[0])):
        for j in range(-(-shape[1] // tile[1])):
            yield (
                (i, j),
                (
                    slice(i * tile[0], min((i + 1) * tile[0], shape[0])),
                    slice(j * tile[1], min((j + 1) * tile[1], shape[1])),
                ),
            )


def block_fp8(a: np.ndarray, tile, dtype, **rule) -> tuple[np.ndarray, np.ndarray]:
    """Codes [M, K] and scale_inv [tiles down, tiles across]."""
    codes = np.zeros(a.shape, FP8[dtype])
    scales = np.zeros([-(-s // t) for s, t in zip(a.shape, tile, strict=True)], F32)
    for where, part in tiles(a.shape, tile):
        scale = scale_of(amax_of(a[part]), FP8_MAX[dtype], **rule)
        codes[part] = cast(a[part] * scale, dtype)
        scales[where] = F32(1) / scale
    return codes, scales


def e8m0(amax, fp8_max) -> int:
    value = F32(amax) * (F32(1) / F32(fp8_max))
    if np.isnan(value):
        return 255
    if np.isinf(value):
        return 254
    if value == 0:
        return 0
    mantissa, exponent = math.frexp(float(value))
    return min(max((exponent - 1 if mantissa == 0.5 else exponent) + 127, 0), 254)


def mxfp8(a: np.ndarray, tile, dtype) -> tuple[np.ndarray, np.ndarray]:
    """Codes [M, K] and E8M0 codes [tiles down, tiles across]."""
    codes = np.zeros(a.shape, FP8[dtype])
    scales = np.zeros([-(-s // t) for s, t in zip(a.shape, tile, strict=True)], np.uint8)
    for where, part in tiles(a.shape, tile):
        code = e8m0(amax_of(a[part]), FP8_MAX[dtype])
        encode = F32(np.nan) if code == 255 else F32(2.0 ** (127 - code))
        codes[part] = cast(a[part] * encode, dtype)
        scales[where] = code
    return codes, scales


def e4m3(value) -> Any:
    """Scalar to E4M3, saturating."""
    return cast(np.asarray(value, F32), torch.float8_e4m3fn)[()]


def e2m1(value) -> int:
    """FP32 scalar to the 4-bit code; NaN to 7."""
    if np.isnan(value):
        return 7
    clipped = min(max(value, F32(-6)), F32(6))
    return int(np.asarray(clipped, F32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)) & 15


def e2m1_value(code: int) -> np.float32:
    return F32((-1.0 if code & 8 else 1.0) * [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7])


def global_scale(amax, limit) -> np.float32:
    if amax == 0 or np.isinf(amax):
        return F32(1)
    return min(F32(limit) / amax, FP32_MAX)


def nvfp4_value(scale, amax, limit) -> np.float32:
    """What a code is multiplied with."""
    s8, inverse = F32(scale), F32(1) / F32(limit)
    if np.isinf(amax) or amax == 0 or np.isinf(F32(limit) / amax):
        return s8 * (F32(1) / global_scale(amax, limit))
    value = (s8 * amax) * inverse
    return s8 * (amax * inverse) if np.isinf(value) else value


def finite_amax(a: np.ndarray) -> np.float32:
    """max |x| over what is not NaN."""
    return max((v for v in np.abs(a).ravel() if not np.isnan(v)), default=F32(0))


def _codes(block, scale, s_global) -> list[int]:
    product = F32(scale) * (F32(1) / s_global)
    encode = F32(1) / product
    encode = encode if np.isnan(encode) else min(encode, FP32_MAX)
    return [e2m1(v * encode) for v in block.ravel()]


def _error(block, codes, value, mode) -> np.float32:
    total = F32(0)
    for i, row in enumerate(block):
        part = F32(0)
        for j, v in enumerate(row):
            d = e2m1_value(codes[i * len(row) + j]) * value - v
            part = part + (d * d if mode == "MSE" else abs(d))
        total = total + part
    return total


def nvfp4(a: np.ndarray, *, tile=(1, 16), four_over_six=None, bound=448, row_scaled=False):
    """Nibbles [R, C], E4M3 [R, ceil(C / 16)] and amax of the usage's matrix."""
    limit = 6.0 * bound
    codes = np.zeros(a.shape, np.uint8)
    scales = np.zeros((a.shape[0], -(-a.shape[1] // 16)), ml_dtypes.float8_e4m3fn)
    by_row = [finite_amax(row) for row in a] if row_scaled else []
    amaxes = np.array(by_row, F32).reshape(a.shape[0]) if row_scaled else finite_amax(a)
    for (i, j), part in tiles(a.shape, tile):
        amax = amaxes[i] if row_scaled else amaxes
        s_global = global_scale(amax, limit)
        block_amax = amax_of(a[part])
        if four_over_six is None:
            chosen = e4m3(block_amax * (s_global * (F32(1) / F32(6))))
            best = _codes(a[part], chosen, s_global)
        else:
            base = (block_amax / F32(6)) * s_global
            found = []
            for factor in (F32(1), F32(1.5)):
                scale = e4m3(base * factor)
                c = _codes(a[part], scale, s_global)
                value = nvfp4_value(scale, amax, limit)
                found.append((_error(a[part], c, value, four_over_six), c, scale))
            _, best, chosen = found[1] if found[1][0] < found[0][0] else found[0]
        codes[part] = np.array(best, np.uint8).reshape(a[part].shape)
        scales[part[0], j] = abs(chosen)
    return codes, scales, amaxes


def nvfp4_decode(codes, scales, amaxes, *, bound=448) -> np.ndarray:
    out = np.zeros(codes.shape, F32)
    for i, j in np.ndindex(codes.shape):
        amax = amaxes[i] if np.ndim(amaxes) else amaxes
        value = nvfp4_value(scales[i, j // 16], amax, 6.0 * bound)
        out[i, j] = e2m1_value(int(codes[i, j])) * value
    return out


def _hadamard(v: np.ndarray) -> np.ndarray:
    """v H for Sylvester's H, by its definition [[H, H], [H, -H]]."""
    if len(v) == 1:
        return v
    half = len(v) // 2
    a, b = _hadamard(v[:half]), _hadamard(v[half:])
    return np.concatenate([a + b, a - b])


def rht(a: np.ndarray) -> np.ndarray:
    """[R, C] to the transform [R, C rounded up to 16], rounded to BF16."""
    out = np.zeros((a.shape[0], -(-a.shape[1] // 16) * 16), F32)
    out[:, : a.shape[1]] = a
    for row in out:
        for j in range(0, out.shape[1], 16):
            row[j : j + 16] = _hadamard(row[j : j + 16] * np.array(SIGNS, F32)) * F32(0.25)
    return out.astype(ml_dtypes.bfloat16).astype(F32)


def numpy_of(t: torch.Tensor) -> np.ndarray:
    """A tensor's bytes as the numpy type of the same name."""
    if t.dtype in FP8:
        return t.view(torch.uint8).numpy().view(FP8[t.dtype])
    if t.dtype is torch.float8_e8m0fnu:
        return t.view(torch.uint8).numpy()
    return t.numpy()


def same(ours: torch.Tensor, theirs: np.ndarray) -> None:
    """Equal bits, but any NaN equals any NaN."""
    got = numpy_of(ours)
    assert got.shape == np.shape(theirs)
    if got.dtype == np.uint8:
        np.testing.assert_array_equal(got, theirs)
        return
    got, theirs = got.astype(F32), np.asarray(theirs).astype(F32)
    np.testing.assert_array_equal(got, theirs)
    keep = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(got)[keep], np.signbit(theirs)[keep])


def unpack(data: torch.Tensor, columns: int) -> np.ndarray:
    """Packed bytes [R, ceil(columns / 2)] as nibbles [R, columns]."""
    raw = data.numpy()
    both = np.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[0], 2 * raw.shape[1])
    return both[:, :columns]


def same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal dtypes, shapes and bits, NaNs included."""
    return (
        ours.dtype is theirs.dtype
        and ours.shape == theirs.shape
        and ours.cpu().contiguous().reshape(-1).view(torch.uint8).tolist()
        == theirs.cpu().contiguous().reshape(-1).view(torch.uint8).tolist()
    )


INF, NAN = math.inf, math.nan


def sample(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int = 0) -> torch.Tensor:
    """Test data: "normal"; "wide" (every exponent of the dtype); "special" (zeros of both signs,
    subnormals, the largest value, Inf and NaN thinly spread over normal values); "zeros"."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    if kind == "zeros":
        return torch.zeros(shape, dtype=dtype)
    if kind == "wide":
        info = torch.finfo(dtype if dtype is not torch.float64 else torch.float32)
        low, high = math.log2(info.smallest_normal) - 3, math.log2(info.max) - 3
        exponent = torch.rand(shape, generator=g, dtype=torch.float64) * (high - low) + low
        return (x * 2.0**exponent).to(dtype)
    x = x.to(dtype)
    if kind == "special" and x.numel():
        info = torch.finfo(dtype if dtype is not torch.float64 else torch.float32)
        extremes = [0.0, -0.0, info.tiny / 4, -info.tiny, info.max, -info.max, INF, -INF, NAN]
        flat = x.reshape(-1)
        for i, value in enumerate(extremes):
            if flat.numel() > 40 * i + 1:
                flat[(40 * i + 1) :: 997] = value
        x = flat.view(shape)
    return x
