"""Numbers in, numbers out: what a run of an op gave, and how two of them are compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class Result:
    """Outputs, input gradients and parameter gradients of one run."""

    outputs: list[torch.Tensor]
    input_grads: list[torch.Tensor | None]
    param_grads: dict[str, torch.Tensor | None]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """All of them with names."""
        for i, t in enumerate(self.outputs):
            yield f"output {i}", t
        for i, g in enumerate(self.input_grads):
            yield f"gradient of input {i}", g
        for name, g in self.param_grads.items():
            yield f"gradient of {name}", g


def outputs_of(result: Any) -> list[torch.Tensor]:
    """A call's result as a list."""
    return list(result) if isinstance(result, tuple | list) else [result]


def loss_weights(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Output gradients that differ from element to element, of the outputs' dtypes."""
    made = []
    for k, y in enumerate(outputs):
        ramp = torch.arange(y.numel(), dtype=torch.float64)
        made.append((torch.sin(ramp * 0.7 + k) + 0.25).reshape(y.shape).to(y.dtype))
    return made


def backward(outputs: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    """Backward from all outputs at once, each with its own gradient."""
    live = [
        (y, w * scale)
        for y, w in zip(outputs, loss_weights(outputs), strict=True)
        if y.requires_grad
    ]
    torch.autograd.backward([y for y, _ in live], [w for _, w in live])


def run(op: nn.Module, xs: Sequence[torch.Tensor]) -> Result:
    """Forward and backward; outputs are detached."""
    outputs = outputs_of(op(*xs))
    if any(y.requires_grad for y in outputs):
        backward(outputs)
    return Result(
        [y.detach() for y in outputs],
        [x.grad for x in xs],
        {n: p.grad for n, p in op.named_parameters()},
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected value; Inf if NaNs differ."""
    a, e = actual.double(), expected.double()
    if not torch.equal(a.isnan(), e.isnan()):
        return math.inf
    a, e = a.nan_to_num(0.0), e.nan_to_num(0.0)
    size, off = e.norm().item(), (a - e).norm().item()
    if size == 0.0:
        return 0.0 if off == 0.0 else math.inf
    return off / size


def compare(actual: Result, expected: Result, tolerance: float, dtypes: bool = False) -> None:
    """The one oracle comparison of these tests: shapes, presence, and values within a relative error.

    A gradient of zeros that the oracle does not give (an unused input) is fine; anything else is not.
    """
    got, want = dict(actual.tensors()), dict(expected.tensors())
    assert list(got) == list(want)
    for name, e in want.items():
        a = got[name]
        if e is None:
            assert a is None or not a.any(), f"{name}: not expected"
            continue
        assert a is not None, f"{name}: missing"
        assert a.shape == e.shape, f"{name}: shape {tuple(a.shape)}, expected {tuple(e.shape)}"
        if dtypes:
            assert a.dtype == e.dtype, f"{name}: dtype {a.dtype}, expected {e.dtype}"
        error = relative_error(a, e)
        assert error <= tolerance, f"{name}: relative error {error:.3g} > {tolerance:.3g}"


def same(actual: Result, expected: Result) -> None:
    """Bit for bit."""
    got, want = dict(actual.tensors()), dict(expected.tensors())
    assert list(got) == list(want)
    for name, e in want.items():
        a = got[name]
        assert (a is None) == (e is None), name
        if a is not None and e is not None:
            assert a.dtype == e.dtype, f"{name}: {a.dtype} and {e.dtype}"
            assert a.shape == e.shape, f"{name}: {tuple(a.shape)} and {tuple(e.shape)}"
            assert torch.equal(a.nan_to_num(), e.nan_to_num()), f"{name}: not equal bit for bit"
            assert torch.equal(a.isnan(), e.isnan()), f"{name}: NaNs differ"


def tolerance_of(dtype: torch.dtype) -> float:
    """Relative Frobenius error of a few roundings; far below 1 %, so that a 1 % fault shows."""
    return {
        torch.float64: 1e-11,
        torch.float32: 2e-5,
        torch.float16: 4e-3,
        torch.bfloat16: 8e-3,
    }[dtype]


def grad_masks(
    op: nn.Module, xs: Sequence[torch.Tensor]
) -> list[tuple[tuple[bool, ...], tuple[bool, ...]]]:
    """All subsets of what can have a gradient (all, none, each alone, all but each, beyond six)."""
    slots = [x.is_floating_point() for x in xs] + [True] * len(list(op.parameters()))
    free = [i for i, s in enumerate(slots) if s]
    picks: list[tuple[int, ...]]
    if len(free) <= 4:
        picks = [
            tuple(i for k, i in enumerate(free) if bits >> k & 1) for bits in range(2 ** len(free))
        ]
    else:
        ones = [(i,) for i in free]
        rest = [tuple(k for k in free if k != i) for i in free]
        picks = [(), tuple(free), *ones, *rest]
    made = []
    for pick in picks:
        mask = tuple(i in pick for i in range(len(slots)))
        made.append((mask[: len(xs)], mask[len(xs) :]))
    return made
