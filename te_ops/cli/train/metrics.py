"""What a recipe does to one step: errors of its operands, the gradient, bytes kept."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

import te_ops as te
from te_ops.cli.arms import Arm
from te_ops.cli.train.trainer import Trainer
from te_ops.graph import Phase

OPERANDS = ("input", "weight", "grad_output")
_PHASES = {"input": Phase.FORWARD, "weight": Phase.FORWARD, "grad_output": Phase.DGRAD}


class OperandName(NamedTuple):
    """An operand of a GEMM: the op's path in the model, and "input", "weight" or "grad_output"."""

    path: str
    name: str

    @property
    def role(self) -> te.Role:
        """As a recipe sees it."""
        return te.Role("gemm", _PHASES[self.name], self.name, self.path)


@dataclass(frozen=True)
class Rounding:
    """Quantization of one operand: signal-to-noise ratio (dB), underflow, and what theory allows.

    `sqnr_floor`: 20 log10(2^(m+1) + 1), as a value with m mantissa bits is off by at most
    1 / (2^(m+1) + 1) of itself. `underflow`: share of nonzero values that become zero.
    `underflow_limit`: share that one ideal scale for the tensor could lose, see `_lost`.
    """

    operand: OperandName
    sqnr: float
    sqnr_floor: float
    underflow: float
    underflow_limit: float
    nbytes: int  # of the columnwise record, which backward reads


@dataclass(frozen=True)
class Metrics:
    """Of one arm after training.

    `cosine`: between the gradient of all parameters and that of the unquantized model, on the same
    batch and weights; `cosine_worst`: of the parameter `worst_parameter` alone, the lowest of all.
    """

    errors: tuple[Rounding, ...]
    cosine: float
    cosine_worst: float
    worst_parameter: str
    cosine_floor: float
    saved_bytes: int
    ms: float
    first_ms: float  # of the first step, which plans

    @property
    def weight_bytes(self) -> int:
        """Of the rounded weights that backward reads."""
        return sum(e.nbytes for e in self.errors if e.operand.name == "weight")

    def worst(self, name: str) -> Rounding | None:
        """The operand of this kind whose SQNR is least above its floor."""
        found = [e for e in self.errors if e.operand.name == name]
        return min(found, key=lambda e: e.sqnr - e.sqnr_floor, default=None)


def measure(trainer: Trainer) -> Metrics:
    """Measure an arm on one held-out batch, with the weights that it trained; they stay."""
    arm, device = trainer.arm, trainer.device
    batch = trainer.held_out[0].to(device)
    exact, rounded = _gradients(trainer, Arm("fp32"), batch), _gradients(trainer, arm, batch)
    cosines = {name: _cosine(rounded[name], exact[name]) for name in exact}
    lowest = min(cosines, key=cosines.__getitem__)
    errors = tuple(_errors(trainer, batch))
    with arm.active(device):
        saved = trainer.model.plan(*batch).saved_bytes
    later = trainer.times[3:] or trainer.times
    return Metrics(
        errors=errors,
        cosine=_cosine(torch.cat([*rounded.values()]), torch.cat([*exact.values()])),
        cosine_worst=cosines[lowest],
        worst_parameter=lowest,
        cosine_floor=_cosine_floor(errors, arm.dtype),
        saved_bytes=saved,
        ms=1e3 * statistics.median(later) if later else math.nan,
        first_ms=1e3 * trainer.times[0] if later else math.nan,
    )


def _gradients(trainer: Trainer, arm: Arm, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each parameter's gradient as an FP64 vector, from a copy: recipes with state move theirs."""
    model = copy.deepcopy(trainer.model)
    with arm.active(trainer.device):
        loss = model(*batch)
    loss.backward()
    found = ((name, p.grad) for name, p in model.named_parameters())
    return {name: grad.flatten().double() for name, grad in found if grad is not None}


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    norms = (a.norm() * b.norm()).item()
    return torch.dot(a, b).item() / norms if norms else float(torch.equal(a, b))


_RESULTS = 8  # a Linear: of it, a norm or activation and a residual sum, in both directions


def _cosine_floor(errors: tuple[Rounding, ...], dtype: torch.dtype | None) -> float:
    """1 / sqrt(1 + sum of noise-to-signal ratios): independent errors of all operands add up.

    A gradient has passed each input and weight in forward, and each weight and output gradient in
    backward; every one is taken at its worst allowed SQNR. Under torch.autocast the results of ops
    are rounded to `dtype` too.
    """
    weights = [e for e in errors if e.operand.name == "weight"]
    noise = sum(10 ** (-e.sqnr_floor / 10) for e in (*errors, *weights))
    if dtype is not None:
        floor = number_format(te.IdentityQuantizer(dtype)).sqnr_floor
        noise += _RESULTS * len(weights) * 10 ** (-floor / 10)
    return 1 / math.sqrt(1 + noise)


# -- operands


_NOWHERE = OperandName("", "")

STALE = (
    3.0  # dB: with the scale of earlier steps, the largest values of a growing tensor are clipped
)


@dataclass(frozen=True)
class Capture(te.IdentityQuantizer):
    """Leaves an operand as it is and puts a copy into `into` under its name."""

    name: ClassVar[str] = "te_ops.cli.capture"

    operand: OperandName = _NOWHERE
    into: dict[OperandName, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def records(self, x: torch.Tensor, **asked: Any) -> Any:
        """As the identity, after the copy."""
        self.into[self.operand] = x.detach().clone()
        return super().records(x, **asked)


def operands_of_a_step(trainer: Trainer, batch: torch.Tensor) -> dict[OperandName, torch.Tensor]:
    """Every operand that the arm rounds, from a forward and backward without any rounding."""
    arm, found = trainer.arm, dict[OperandName, torch.Tensor]()

    def capture(role: te.Role) -> te.Quantizer | None:
        if role.prim != "gemm" or arm.quantizer(role) is None:
            return None
        return Capture(operand=OperandName(role.path, role.operand), into=found)

    recipe = te.recipe.CustomRecipe(qfactory=capture)
    _gradients(trainer, Arm("capture", recipe), batch)
    return found


def _errors(trainer: Trainer, batch: torch.Tensor) -> Iterator[Rounding]:
    state = trainer.model.state_dict()
    for operand, x in sorted(operands_of_a_step(trainer, batch).items()):
        quantizer = trainer.arm.quantizer(operand.role)
        assert quantizer is not None
        scale = state.get(f"{operand.path}.quantizer.delayed.{operand.name}.scale")
        seed = torch.tensor(trainer.settings.seed, dtype=torch.int64, device=x.device)
        made = te.quantize(
            x,
            quantizer,
            columnwise=True,
            state=scale if quantizer.stateful else None,
            seed=seed if quantizer.stochastic else None,
        )
        decoded = [r.dequantize() for r in (made.rowwise, made.columnwise) if r is not None]
        low = number_format(quantizer)
        yield Rounding(
            operand,
            sqnr=min(sqnr(x, y) for y in decoded),
            sqnr_floor=low.sqnr_floor - (STALE if quantizer.stateful else 0.0),
            underflow=max(underflow(x, y) for y in decoded),
            underflow_limit=_lost(x, low),
            nbytes=made.columnwise.nbytes if made.columnwise is not None else 0,
        )


def sqnr(x: torch.Tensor, y: torch.Tensor) -> float:
    """10 log10(sum x^2 / sum (x - y)^2); inf if nothing was lost."""
    x, y = x.double(), y.double()
    signal, noise = x.square().sum().item(), (x - y).square().sum().item()
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def underflow(x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of the nonzero values of x that are zero in y."""
    there = x != 0
    return ((y == 0) & there).sum().item() / max(1, there.sum().item())


class NumberFormat(NamedTuple):
    """Of codes: explicit mantissa bits, smallest nonzero and largest finite magnitude."""

    mantissa: int
    smallest: float
    largest: float

    @property
    def sqnr_floor(self) -> float:
        """dB, from the largest relative error of a normal value rounded to nearest."""
        return 20 * math.log10(2 ** (self.mantissa + 1) + 1)


_E2M1 = NumberFormat(1, 0.5, 6.0)


def number_format(quantizer: te.Quantizer) -> NumberFormat:
    """Of a quantizer's codes."""
    dtype = getattr(quantizer, "dtype", None)
    if dtype is None:
        return _E2M1
    about = torch.finfo(dtype)
    return NumberFormat(-round(math.log2(about.eps)), about.smallest_normal * about.eps, about.max)


def _lost(x: torch.Tensor, low: NumberFormat) -> float:
    """The share of x that rounds to zero when its amax is scaled to the largest code.

    One binade is allowed for scales that are powers of two or come from earlier steps. Rounding to
    nearest loses what is below half the smallest code; stochastic rounding less than 1 of it.
    """
    amax = x.abs().max().float()
    limit = amax * (2 * low.smallest / low.largest)
    there = x != 0
    return ((x.abs() <= limit) & there).sum().item() / max(1, there.sum().item())
