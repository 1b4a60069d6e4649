"""check_quantizer passes on every format of the package, and fails on each broken promise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import te_ops as te
from te_ops.quantizers import Quantizer, Record, Usage
from te_ops.testing import cases, check_quantizer

SMALL = {"shapes": ((0, 32), (1,), (5, 7)), "dtypes": (torch.float32,)}


@pytest.mark.parametrize("quantizer", cases.QUANTIZERS, ids=lambda q: q.describe())
def test_formats_of_the_package(quantizer: Quantizer) -> None:
    check_quantizer(quantizer)


@pytest.mark.parametrize(
    "quantizer",
    [
        te.Float8Quantizer(),
        te.MXFP8Quantizer(),
        te.Float8BlockQuantizer(),
        te.IdentityQuantizer(torch.bfloat16),
    ],
    ids=lambda q: q.describe(),
)
def test_formats_that_round_trip(quantizer: Quantizer) -> None:
    check_quantizer(quantizer, idempotent=True, **SMALL)


@dataclass(frozen=True)
class Int8(Quantizer):
    """Per-tensor INT8; `broken` says in which way it is wrong."""

    name: ClassVar[str] = "test_int8"
    broken: str = ""

    def records(
        self, x: torch.Tensor, *, row: bool, col: bool, state: Any = None, seed: Any = None
    ) -> Any:
        x = x.detach()
        amax = x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
        amax = amax * (1.0005 if self.broken == "drift" else 1.0)
        step = torch.where(amax.isinf() | (amax == 0), 1.0, amax / 127).clamp(min=1e-38)
        y = (
            (x.float() / step).nan_to_num()
            if not math.isnan(step)
            else torch.zeros_like(x, dtype=torch.float32)
        )
        codes = y.round().clamp(-127, 127).to(torch.int8)
        made = [Record(codes, step, None, self, usage, tuple(x.shape), x.dtype) for usage in Usage]
        made = [self._damage(x, record) for record in made]
        return made[0] if row else None, made[1] if col else None, amax

    def _damage(self, x: torch.Tensor, record: Record) -> Record:
        change: dict[str, Callable[[], Record]] = {
            "1.01": lambda: replace(record, scale_inv=record.scale_inv * 1.01),
            "col 0.99": lambda: (
                record
                if record.usage is Usage.ROW
                else replace(record, scale_inv=record.scale_inv * 0.99)
            ),
            "nan": lambda: replace(record, scale_inv=record.scale_inv.nan_to_num(nan=1.0)),
            "usage": lambda: replace(record, usage=Usage.ROW),
            "dtype": lambda: replace(record, dtype=torch.float64),
            "layout": lambda: replace(record, data=record.data.int()),
            "strides": lambda: (
                record if x.is_contiguous() else replace(record, data=record.data + 1)
            ),
            "saturate": lambda: replace(record, data=record.data.clamp(-64, 64)),
        }
        return change[self.broken]() if self.broken in change else record

    def decode(self, record: Record) -> torch.Tensor:
        return record.data * record.scale_inv

    def layout(self, shape: Any, usage: Any, dtype: Any = None) -> Any:
        return (tuple(shape), torch.int8), ((), torch.float32)

    def describe(self) -> str:
        return "int8"


def test_a_format_of_ones_own() -> None:
    check_quantizer(Int8())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("1.01", "single numbers among zeros, row"),
        ("col 0.99", "single numbers among zeros, col"),
        ("nan", "nan, row: NaN at"),
        ("usage", "col: usage, shape, dtype and quantizer"),
        ("dtype", "usage, shape, dtype and quantizer"),
        ("layout", r"layout\(\) says"),
        ("strides", "input: records"),
        ("saturate", "relative error|single numbers"),
    ],
)
def test_broken_promises(broken: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_quantizer(Int8(broken), **SMALL)


@pytest.mark.parametrize(
    "quantizer",
    [
        te.Float8CurrentScalingQuantizer(),
        te.Float8BlockQuantizer(force_pow_2_scales=False),
        te.Float8Quantizer(),
    ],
    ids=lambda q: q.describe(),
)
@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_scales_off_by_one_percent(
    quantizer: Quantizer, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = type(quantizer).decode
    monkeypatch.setattr(
        type(quantizer), "decode", lambda self, record: factor * decode(self, record)
    )
    with pytest.raises(AssertionError, match="single numbers among zeros"):
        check_quantizer(quantizer, **SMALL)


@pytest.mark.parametrize(
    "quantizer",
    [
        te.MXFP8Quantizer(),
        te.NVFP4Quantizer(),
        te.NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    ],
    ids=lambda q: q.describe(),
)
@pytest.mark.parametrize("factor", [1.01, 0.99])
def test_block_formats_off_by_one_percent(
    quantizer: Quantizer, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = type(quantizer).decode
    monkeypatch.setattr(
        type(quantizer), "decode", lambda self, record: factor * decode(self, record)
    )
    with pytest.raises(AssertionError, match="single numbers among zeros"):
        check_quantizer(quantizer, **SMALL)


def test_a_biased_stochastic_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = te.NVFP4Quantizer
    records = kind.records
    monkeypatch.setattr(
        kind,
        "records",
        lambda self, x, *, seed=None, **options: records(self, x, seed=torch.tensor(5), **options),
    )
    with pytest.raises(AssertionError, match="every seed gives the same values"):
        check_quantizer(kind(stochastic_rounding=True), **SMALL)


def test_a_drifting_format(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))
    kind = te.Float8CurrentScalingQuantizer
    scale = kind._scale
    monkeypatch.setattr(
        kind, "_scale", lambda self, *a: scale(self, *a) * (1 + 0.01 * (next(calls) % 2))
    )
    with pytest.raises(AssertionError):
        check_quantizer(kind(), **SMALL)


def test_not_idempotent() -> None:
    with pytest.raises(AssertionError, match="a second round trip"):
        check_quantizer(Int8("drift"), idempotent=True, **SMALL)
    check_quantizer(Int8("drift"), **SMALL)


def test_a_bound_of_ones_own() -> None:
    with pytest.raises(AssertionError, match=r"relative error .* 0\.001 is allowed"):
        check_quantizer(te.MXFP8Quantizer(), bound=0.001, **SMALL)
