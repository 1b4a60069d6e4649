"""What a `GemmSpec` means, in plain torch: every kernel is compared with it, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from te_ops.backends.cutlass.blocks import Blocked
from te_ops.backends.cutlass.spec import Epilogue, Format, GemmSpec, Load, Quantized
from te_ops.pointwise import Fn, evaluate
from te_ops.quantizers.codec import encode_fp8
from te_ops.quantizers.state import divide, observe_amax

DTYPES: dict[Format, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float4_e2m1fn_x2,
}
FORMATS: dict[torch.dtype, Format] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Results:
    """What a kernel writes; None where it is not asked to."""

    acc: Tensor | None = None
    y: Tensor | None = None
    row: Tensor | None = None
    col: Tensor | None = None
    amax: Tensor | None = None
    scale_inv: Tensor | None = None
    sums: Tensor | None = None
    rebuilt: Tensor | None = None
    rebuilt_inv: Tensor | None = None


def reference(
    spec: GemmSpec,
    fn: Fn | None,
    a: Tensor,
    b: Tensor,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    blocks: tuple[Tensor, Tensor] | None = None,
    loads: Sequence[Tensor] = (),
    scale: Tensor | None = None,
    y: Tensor | None = None,
    second: Fn | None = None,
    rebuilt_scale: Tensor | None = None,
) -> Results:
    """The kernel's results, computed in FP32 with the roundings that the spec names.

    Args:
        spec: of the kernel.
        fn: the function whose text `spec.epilogue` holds; None if it has none.
        a: [M, K]; of E2M1 pairs of codes, [M, K / 2].
        b: [N, K], likewise; of a paired accumulator the gate rows, then the linear rows.
        scales: of the tensors a and b, one FP32 value each, if the spec is scaled.
        blocks: scales of the blocks of a and b as the kernel reads them (`blocks.swizzled`), if the spec has blocks.
        loads: the epilogue's other operands: [M, N], [N], [M] or one value, as the spec says.
        scale: of the FP8 copies, one FP32 value.
        y: what the result is added to, in place.
        second, rebuilt_scale: the function of the copy that is rebuilt, and its scale, if there is one.
    """
    epilogue = spec.epilogue
    if blocks is None:
        acc = a.float() @ b.float().t()
    else:
        left = Blocked(a, blocks[0]).values(spec.blocks)
        right = Blocked(b, blocks[1]).values(spec.blocks, paired=epilogue.acc_pair)
        acc = left @ right.t()
    if scales is not None:
        acc = acc * (scales[0].reshape(()) * scales[1].reshape(()))
    acc = _rounded(acc, epilogue.rounds_acc)
    value = _rounded(_applied(epilogue, fn, acc, loads), epilogue.rounds)
    made = _quantized(epilogue.quantized, value, scale)
    return Results(
        None if epilogue.acc_store is None else acc.to(DTYPES[epilogue.acc_store]),
        _stored(epilogue, value, y),
        *made,
        value.sum(0) if epilogue.sums else None,
        *_rebuilt(epilogue, second, loads, rebuilt_scale),
    )


def _rounded(x: Tensor, format: Format | None) -> Tensor:
    return x if format is None else x.to(DTYPES[format]).float()


def _applied(epilogue: Epilogue, fn: Fn | None, acc: Tensor, loads: Sequence[Tensor]) -> Tensor:
    if fn is None:
        return acc
    operands = [_shaped(x, load) for x, load in zip(loads, epilogue.loads, strict=True)]
    operands.insert(epilogue.acc, acc)
    return evaluate(fn, *operands, dtype=torch.float32)


def _rebuilt(
    epilogue: Epilogue, fn: Fn | None, loads: Sequence[Tensor], scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The copy that is rebuilt, and the inverse of its scale."""
    again = epilogue.rebuilt
    if again is None:
        return None, None
    assert fn is not None
    operands = [_shaped(loads[i], epilogue.loads[i]) for i in again.loads]
    value = evaluate(fn, *operands, dtype=torch.float32)
    made = _quantized(Quantized(again.format, row=False, col=True, amax=False), value, scale)
    return made[1], made[3]


def _shaped(x: Tensor, load: Load) -> Tensor:
    if load.shape == "column":
        return x.reshape(-1, 1)
    return x.reshape(()) if load.shape == "scalar" else x


def _stored(epilogue: Epilogue, value: Tensor, y: Tensor | None) -> Tensor | None:
    if epilogue.store is None:
        return None
    if not epilogue.accumulate:
        return value.to(DTYPES[epilogue.store])
    assert y is not None
    return y.copy_(y.float() + value)


def _quantized(
    asked: Quantized | None, value: Tensor, scale: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Row codes, column codes, amax and the inverse of the scale."""
    if asked is None:
        return None, None, None, None
    amax = observe_amax(value) if asked.amax else None
    if not (asked.row or asked.col):
        return None, None, amax, None
    assert scale is not None
    scale = scale.float().reshape(())
    codes = encode_fp8((value * scale).contiguous(), DTYPES[asked.format])
    col = codes.view(torch.uint8).t().contiguous().view(codes.dtype) if asked.col else None
    return (codes if asked.row else None), col, amax, divide(1.0, scale)
