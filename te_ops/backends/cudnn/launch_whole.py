"""Launches over packed tokens without gaps: as plain ones, with lengths and offsets that were made before.

`TE_OPS_CUDNN_WHOLE=1` asks for them: they were compared with the ordinary launch on a stand-in of the library only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_ops import config
from te_ops.backends.cudnn import library
from te_ops.backends.cudnn.launch import Attention, Plain, Ready
from te_ops.backends.cudnn.problem import LENGTHS
from te_ops.runtime.replay import like

OPERANDS = {False: {"q", "k", "v"}, True: {"q", "k", "v", "o", "lse", "do"}}


class Whole(Plain):
    """A prepared shape of q, k, v and sequences that cover all rows."""

    def __init__(self, ready: Ready, launch: Attention, xs: dict[str, Any]) -> None:
        super().__init__(ready, launch, xs)
        self.launch = launch
        self.backward = ready.problem.backward
        if not self.backward:  # statistics lie by rows
            n = ready.problem.sizes
            rows = torch.Size((n.s_q, n.h_q))
            self.results[1] = like(rows, torch.float32, launch.device)
            self.makers[1] = library.fresh(self.results[1])
        self.lens = tuple(launch.names.index(name) for name in LENGTHS)
        self.written = len(self.order) + len(self.results)  # operands before those of sequences
        self.recent: tuple[list[Tensor], list[int], list[Tensor]] = ([], [], [])

    def run(self, xs: list[Any], given: list[Any]) -> Any:
        """As of `Plain`; None also where the statistics of forward do not lie by rows."""
        words = [xs[i].data_ptr() for i in self.order]
        off = 0
        for word in words:
            off |= word
        if off & 15 or (self.backward and not xs[self.order[4]].t().is_contiguous()):
            return None
        made = self.fresh()
        words += [x.data_ptr() for x in made]
        tail = self.sequences(xs)
        words += [x.data_ptr() for x in tail]
        self.issue(words)
        if not self.backward:
            made[1] = made[1].t()
        writes = self.writes
        return made[writes[0]] if len(writes) == 1 else tuple([made[i] for i in writes])

    def sequences(self, xs: list[Any]) -> list[Tensor]:
        """Lengths and offsets, in the order of the graph; those of the last call where they are of the same tensors."""
        lens = [xs[i] for i in self.lens]
        seen, versions, made = self.recent
        now = [-1 if x.is_inference() else x._version for x in lens]
        same = -1 not in now and now == versions and all(map(_is, lens, seen))
        if same:
            return made
        facts = self.launch.facts(self.ready, dict(zip(self.launch.names, xs, strict=True)))
        made = [facts.operands[name] for name in self.built.operands[self.written :]]
        self.recent = (lens, now, made)
        return made


def _is(a: Any, b: Any) -> bool:
    return a is b


def is_whole(launch: Attention, ready: Ready) -> bool:
    """Whether nothing is done but issuing the plan over tensors as they lie, and what belongs to sequences."""
    problem, spec = ready.problem, ready.spec
    wanted = OPERANDS[problem.backward] | set(LENGTHS)
    usual = set(launch.names) == wanted and problem.whole and not ready.copied
    usual = usual and not (spec.peak or spec.dropout or problem.quantized)
    return usual and config.flag("CUDNN_WHOLE", False)


Attention.whole = (is_whole, Whole)
"""When it is taken, and how it is made."""
