"""An attention call as a value: what gates look at, and the kernel that it needs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from te_ops.backends.cudnn import problem as other
from te_ops.backends.flash.score import text_of
from te_ops.backends.flash.spec import FlashSpec, Format, Mask
from te_ops.registry import Call

FORMATS: dict[torch.dtype, Format] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Problem(other.Problem):
    """An attention call, forward or backward.

    Attributes:
        own: keys have the sequences of the queries.
    """

    own: bool = False

    @property
    def packed(self) -> bool:
        """The kernel gets packed tokens: they are, or a batch with lengths is read as such."""
        return self.form.layout == self.form.kv_layout == "thd" or self.padded

    @property
    def padded(self) -> bool:
        """A batch with lengths, whose rows lie behind one another."""
        return self.form.layout == self.form.kv_layout == "bshd" and self.varied

    @property
    def equal(self) -> bool:
        """Every sequence has as many queries as keys."""
        same = self.sizes.s_q == self.sizes.s_kv
        return self.own and (same or not self.padded) if self.packed else same


def problem_of(call: Call) -> Problem:
    """The problem of a call, with the sizes that it was planned for."""
    made = other.problem_of(call)
    given: dict[str, Any] = {f.name: getattr(made, f.name) for f in fields(made)}
    node = call.node
    values = dict(zip(node.operands, node.inputs, strict=True))
    own = all(values.get(f"q_{x}") == values.get(f"kv_{x}") for x in ("starts", "lens"))
    given["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return Problem(**given, own=own)


def spec_of(problem: Problem) -> FlashSpec:
    """The kernel of a problem that was not refused; it takes other sizes too."""
    band, n = problem.form.band, problem.sizes
    mask: Mask = "window"
    if band.left is None and band.right in (None, 0):
        mask = "full" if band.right is None else "causal"
    assert problem.dtype is not None
    text = text_of(
        problem.form.score, backward=problem.backward, exact=problem.dtype is torch.float16
    )
    return FlashSpec(
        backward=problem.backward,
        dtype=FORMATS[problem.dtype],
        features=n.d_qk,
        values=n.d_v,
        group=n.h_q // n.h_kv,
        mask=mask,
        left=mask == "window" and band.left is not None,
        right=mask == "window" and band.right is not None,
        packed=problem.packed,
        score=text.source,
        function=text.function,
        gradient=text.gradient,
        inputs=text.inputs,
        sink="sink" in problem.has,
    )
