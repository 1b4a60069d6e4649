"""Launches of FP8 attention: what reads codes, and scales beside them; the rest is that of dense attention.

v's scale never meets the kernel: it multiplies codes, so what it writes are codes under v's scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_ops.backends.cudnn.graphs import GraphSpec
from te_ops.backends.cudnn.launch import Attention, Plain, Ready, moved, refuse_capture
from te_ops.backends.cudnn.problem import Problem
from te_ops.basic.attention_fp8 import LARGEST, output, output_scale_inv
from te_ops.quantizers import Record
from te_ops.registry import Call, Launch
from te_ops.runtime.tape import recorder

DESCALES = ("descale_q", "descale_k")
CONSTANTS = ("descale_v", "descale_s", "scale_s", "scale_o")
_BYTES = 15


def _codes(record: Record) -> Tensor:
    return record.data


class AttentionFp8(Attention):
    """The launch of an attention_fp8 call."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.opened = _codes

    def _shares(self, problem: Problem) -> bool:
        """Never: every shape has a plan of its own, since those with lengths and offsets may be refused."""
        return False

    def _own(self, problem: Problem, spec: GraphSpec) -> dict[str, Tensor]:
        """Scales that depend on nothing: exp(s - largest) is 1 at most, 1 / (1 - dropout) with dropout."""
        refuse_capture(spec)
        left = 1.0 - problem.form.dropout
        values = (1.0, 1.0 / (LARGEST * left), LARGEST * left, left)
        return {
            name: torch.full((1,), value, dtype=torch.float32, device=self.device)
            for name, value in zip(CONSTANTS, values, strict=True)
        }

    def _general(self, ready: Ready, by_name: dict[str, Any], given: list[Any]) -> tuple[Any, ...]:
        records = dict(zip(self.names, given, strict=True))
        for name in ("q", "k"):
            scale = records[name].scale_inv
            by_name[f"descale_{name}"] = moved(scale) if scale.data_ptr() & _BYTES else scale
        o, lse, peak = super()._general(ready, by_name, given)
        v = records["v"]
        scale_inv = output_scale_inv(v.scale_inv, ready.problem.form.dropout)
        return output(o, scale_inv, v.dtype), lse, peak


class PlainFp8(Plain):
    """A prepared shape of q, k and v alone."""

    def __init__(self, ready: Ready, launch: Attention, xs: dict[str, Any]) -> None:
        super().__init__(ready, launch, xs)
        self.constants = [ready.given[name] for name in CONSTANTS]
        self.words = [x.data_ptr() for x in self.constants]

    def run(self, xs: list[Any], given: list[Any]) -> Any:
        """As of `Plain`."""
        q, k, v = (given[i] for i in self.order)
        codes, scales = (q.data, k.data, v.data), (q.scale_inv, k.scale_inv)
        words = [x.data_ptr() for x in codes]
        tail = [x.data_ptr() for x in scales]
        if (words[0] | words[1] | words[2] | tail[0] | tail[1]) & _BYTES:
            return None
        made: list[Any] = self.fresh()
        words += [x.data_ptr() for x in made]
        words += tail
        words += self.words
        self.issue(words)
        tape = recorder()
        if tape is not None:
            for constant in self.constants:
                tape.keep(constant)
        made[0] = output(made[0], v.scale_inv, v.dtype)
        writes = self.writes
        return made[writes[0]] if len(writes) == 1 else tuple([made[i] for i in writes])


AttentionFp8.plain = PlainFp8


def bind(call: Call) -> Launch:
    """The launch of an attention_fp8 call."""
    return AttentionFp8(call)


__all__ = ["AttentionFp8", "bind"]
