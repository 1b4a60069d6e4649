"""The other copy of FP8 codes under one scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from te_ops.basic.quantize import TRANSPOSE_RECORD
from te_ops.graph import Kind, Spec
from te_ops.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer, Usage
from tests.backends.cuda.calls import Inputs, make_call
from tests.backends.cuda.cases import BIND, Draw


@dataclass(frozen=True)
class Transposed:
    """A record whose other usage is made."""

    quantizer: Quantizer
    usage: Usage

    @property
    def name(self) -> str:
        """Of a case."""
        return f"transpose-{self.quantizer.describe()}-{self.usage.value}"

    def check(self, draw: Draw, shape: tuple[int, ...], arch: str) -> list[str]:
        """What differs from the reference."""
        x = draw(shape, special=True)
        state = torch.full((1,), 1.7, device=x.device) if self.quantizer.stateful else None
        row, col, _ = self.quantizer.records(x, row=True, col=True, state=state)
        record = row if self.usage is Usage.ROW else col
        assert record is not None
        inputs = Inputs()
        kind = Kind("record", self.quantizer, self.usage)
        given = inputs.g.input(0, Spec(tuple(x.shape), x.dtype, kind))
        y = inputs.g.call(TRANSPOSE_RECORD, given)
        call = make_call(inputs, (inputs.g.node(y),), (y,), arch=arch, device=x.device)
        reason = BIND["transpose_record"].refuse(call)
        if reason is not None:
            return [f"refused: {reason}"]
        got, expected = BIND["transpose_record"].bind(call)(record), record.transposed()
        assert expected is not None
        found = []
        for name in ("usage", "shape", "dtype", "quantizer"):
            if getattr(got, name) != getattr(expected, name):
                found.append(f"{name} {getattr(got, name)}, not {getattr(expected, name)}")
        a, b = (r.data.view(torch.uint8) for r in (got, expected))
        if a.shape != b.shape or not torch.equal(a, b):
            found.append(f"codes {tuple(a.shape)} differ from {tuple(b.shape)}")
        return found


def transpose_cases() -> Iterator[Transposed]:
    """Both formats, both ways."""
    yield Transposed(Float8Quantizer(torch.float8_e5m2), Usage.ROW)
    yield Transposed(Float8CurrentScalingQuantizer(), Usage.COL)


__all__ = ["Transposed", "transpose_cases"]
