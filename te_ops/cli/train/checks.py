"""What must hold after a run, each with its measured value and where the limit comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from te_ops.cli.train.metrics import OPERANDS, Metrics
from te_ops.cli.train.trainer import Trainer

NOISE = 0.05  # nats: runs that differ by nothing but rounding end up to 0.035 apart
UNDERFLOW = 0.01  # gradients that only rounding errors keep from zero, as at a first position
LONG = 100  # steps after which a model must know more than the frequencies of bytes


@dataclass(frozen=True)
class Run:
    """A trained arm with its metrics."""

    trainer: Trainer
    metrics: Metrics

    @property
    def name(self) -> str:
        """Of the arm."""
        return self.trainer.arm.name

    @property
    def loss(self) -> float:
        """Validation loss at the end, nats a byte."""
        return self.trainer.validation[-1][1]


@dataclass(frozen=True)
class Check:
    """`value` must be at least (or at most) `limit`; `why` says where the limit comes from."""

    arm: str
    what: str
    where: str
    value: float
    limit: float
    at_least: bool
    unit: str
    why: str

    @property
    def ok(self) -> bool:
        """Whether it holds; NaN never does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def checks(runs: list[Run], entropy: float) -> list[Check]:
    """All checks; `runs[0]` is fp32 and `entropy` that of single bytes of the training text."""
    base = runs[0]
    made = list(_baseline(base, entropy))
    for run in runs[1:]:
        made += _formats(run)
        made += _against(run, base)
    return made


def _baseline(base: Run, entropy: float) -> Iterator[Check]:
    long = base.trainer.step >= LONG
    limit = entropy if long else math.log(base.trainer.settings.sizes.vocab)
    why = "entropy of single bytes" if long else "a uniform guess"
    yield Check(base.name, "val loss", "", base.loss, limit, False, "nats", why)


def _formats(run: Run) -> Iterator[Check]:
    name, m = run.name, run.metrics
    for operand in OPERANDS:
        worst = m.worst(operand)
        if worst is not None:
            limit = worst.sqnr_floor
            why = f"rounding error 1/{10 ** (limit / 20):.0f}"
            where = worst.operand.path
            yield Check(name, f"SQNR {operand}", where, worst.sqnr, limit, True, "dB", why)
    most = max(m.errors, key=lambda e: e.underflow / (e.underflow_limit + UNDERFLOW), default=None)
    if most is not None:
        limit = 100 * (most.underflow_limit + UNDERFLOW)
        why = "too small for a code + 1 %"
        where = most.operand.path
        what = f"underflow {most.operand.name}"
        yield Check(name, what, where, 100 * most.underflow, limit, False, "%", why)
    why = "all SQNRs at their limits"
    where = m.worst_parameter
    yield Check(name, "grad cosine", where, m.cosine_worst, m.cosine_floor, True, "", why)


def _against(run: Run, base: Run) -> Iterator[Check]:
    share = lag(run)
    limit = NOISE + lagging_loss(base, share)
    why = f"fp32 {100 * share:.0f} % earlier + {NOISE}"
    yield Check(run.name, "loss gap", "", run.loss - base.loss, limit, False, "nats", why)
    dense, m = base.metrics.saved_bytes, run.metrics
    ratio, limit = m.saved_bytes / dense, 1 + m.weight_bytes / dense
    why = "fp32 + rounded weights"
    yield Check(run.name, "kept bytes", "", ratio, limit, False, "of fp32", why)


def lag(run: Run) -> float:
    """The share of the steps that a format may cost: a fifth, or half with one mantissa bit."""
    floor = min((e.sqnr_floor for e in run.metrics.errors), default=math.inf)
    return 0.2 if floor > 15 else 0.5


def lagging_loss(base: Run, share: float) -> float:
    """How much higher fp32's validation loss was when this share of its steps was left."""
    until = (1 - share) * base.trainer.settings.steps
    early = [loss for step, loss in base.trainer.validation if step <= until]
    return max(0.0, early[-1] - base.loss) if early else math.log(256)
