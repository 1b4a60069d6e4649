"""A kernel under test: every launch is compared with its members' references on the same
numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from te_ops.attrs import Attrs
from te_ops.backends.reference.kernels import bind_composed, bind_reference
from te_ops.graph import Spec
from te_ops.quantizers import Record
from te_ops.registry import Call, Kernel, Launch
from te_ops.testing.cases import row_strided
from te_ops.testing.close import assert_equal, assert_no_worse, values

FIRST = 1_000_000  # a priority above every kernel
_FAST, _APPROXIMATED = 2.0**-13, 2.0**-11


class Probe:
    """Stands in for a kernel: `kernel` is the one to register, the rest is what it saw."""

    def __init__(self, kernel: Kernel, *, factor: float = 2.0) -> None:
        self.tested = kernel
        self.factor = factor
        self.calls: list[Call] = []
        self.refused: dict[str, int] = {}
        self.launches = 0
        self.kernel = dataclasses.replace(
            kernel, bind=self.bind, refuse=self.refuse, priority=FIRST
        )

    def refuse(self, call: Call) -> str | None:
        """The kernel's own answer, which must be None or a reason, and the same each time."""
        answer = self.tested.refuse(call)
        if answer is not None and not (isinstance(answer, str) and answer.strip()):
            raise AssertionError(
                f"{self.tested.name}: refuse(call) returned {answer!r}; it must return None, or "
                f"the reason in words"
            )
        if self.tested.refuse(call) != answer:
            raise AssertionError(
                f"{self.tested.name}: refuse(call) gave two answers for one call; the first: "
                f"{answer!r}"
            )
        if answer is not None:
            self.refused[answer] = self.refused.get(answer, 0) + 1
        return answer

    def bind(self, call: Call) -> Launch:
        """A launch that runs the kernel and then compares."""
        launch = self.tested.bind(call)
        if not callable(launch):
            raise AssertionError(
                f"{self.tested.name}: bind(call) returned {launch!r}; it must return the launch"
            )
        self.calls.append(call)
        where = self._where(call)
        single = call.rule is None
        reference = (bind_reference if single else bind_composed)(call)
        exact = (bind_reference if single else bind_composed)(_in_float64(call))

        def checked(*xs: Any) -> Any:
            self.launches += 1
            before = [_copied(x) for x in xs]
            result = launch(*xs)
            for i, (x, old) in enumerate(zip(xs, before, strict=True)):
                if _is_data(x):
                    assert_equal(
                        x,
                        old,
                        name=f"{where}: operand {i} after the launch (it may not be written)",
                    )
            wanted = _each(reference(*before), call)
            truth = _each(exact(*(_doubled(x) for x in before)), call)
            self.compare(call, result, wanted, truth, "")
            self._strided(call, launch, before, (wanted, truth))
            self._other_stream(call, launch, before, (wanted, truth))
            return result

        return checked

    def compare(
        self, call: Call, result: Any, wanted: Sequence[Any], truth: Sequence[Any], case: str
    ) -> None:
        """Number, shapes, dtypes and values of the results."""
        where = self._where(call) + case
        count = len(call.writes)
        got = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(got) != count or (count > 1 and not isinstance(result, tuple | list)):
            raise AssertionError(
                f"{where}: launch returned {len(got)} results, the call writes {count}"
            )
        for i, value in enumerate(call.writes):
            name = f"{where}: result {i} ({_label(call, i)})"
            _check_kind(got[i], call.spec(value), wanted[i], name)
            if isinstance(wanted[i], torch.Tensor) and not wanted[i].is_floating_point():
                assert_equal(got[i], wanted[i], name=name)
            elif _is_data(wanted[i]):
                floor = _granted(call) * float(values(truth[i]).norm())
                assert_no_worse(
                    got[i], wanted[i], truth[i], factor=self.factor, floor=floor, name=name
                )

    def _strided(
        self, call: Call, launch: Launch, xs: Sequence[Any], expected: tuple[Any, Any]
    ) -> None:
        """Operands that may be strided, each with gaps between its rows."""
        allowed = self.tested.layouts.strided_reads
        able = [
            i
            for i, x in enumerate(xs)
            if isinstance(x, torch.Tensor)
            and x.dim() >= 2
            and x.numel()
            and (allowed is None or i in allowed)
        ]
        for i in able:
            moved = [row_strided(x) if k == i else x for k, x in enumerate(xs)]
            note = f", operand {i} with gaps between its rows (see OperandLayouts.strided_reads)"
            self.compare(call, launch(*moved), *expected, note)

    def _other_stream(
        self, call: Call, launch: Launch, xs: Sequence[Any], expected: tuple[Any, Any]
    ) -> None:
        """On a stream that is not the default one, whose inputs arrive late."""
        if call.device.type != "cuda":
            return
        stream = torch.cuda.Stream(call.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(call.device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            late = [_copied(x) for x in xs]
            result = launch(*late)
        stream.synchronize()
        self.compare(call, result, *expected, ", on a side stream")

    def _where(self, call: Call) -> str:
        chain = " + ".join(n.prim.name for n in call.nodes)
        return f"{self.tested.name} at {chain}"


def _granted(call: Call) -> float:
    """What a group's options let its results lose, as a share of their norm: an FP32 result, as an amax, has no
    rounding of its own that would cover it, and the reference computes it exactly.

    A fast product keeps 13 bits behind the point at each step of 32 terms. An activation before FP8 codes may be the
    device's approximation (2^-11 of its hyperbolic tangent).
    """
    share, names = 0.0, {n.prim.name for n in call.nodes}
    for node in call.nodes:
        if node.prim.name == "gemm" and node.attrs.get("accumulation") == "fast":
            a = call.spec(node.inputs[0]).shape
            terms = math.prod(a[:-1]) if node.layout == "tn" else a[-1]
            share += _FAST * math.sqrt(max(1.0, int(terms) / 32))
    if {"gemm", "pointwise", "quantize"} <= names:
        share += _APPROXIMATED
    return share


def _in_float64(call: Call) -> Call:
    """The call with members that compute in FP64."""

    def wide(value: Any) -> Any:
        half = isinstance(value, torch.dtype) and value in (
            torch.bfloat16,
            torch.float16,
            torch.float32,
        )
        return torch.float64 if half else value

    nodes = tuple(
        dataclasses.replace(n, attrs=Attrs({k: wide(v) for k, v in n.attrs.items()}))
        for n in call.nodes
    )
    specs = {
        v: dataclasses.replace(s, dtype=wide(s.dtype)) if s.kind.name == "dense" else s
        for v, s in call.specs.items()
    }
    return dataclasses.replace(call, nodes=nodes, specs=specs)


def _doubled(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _is_data(x: Any) -> bool:
    return isinstance(x, torch.Tensor | Record)


def _copied(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    return x.map(torch.clone) if isinstance(x, Record) else x


def _each(result: Any, call: Call) -> tuple[Any, ...]:
    return tuple(result) if len(call.writes) > 1 else (result,)


def _label(call: Call, i: int) -> str:
    value = call.writes[i]
    made = next(n for n in call.nodes if n.id == value.node)
    return f"{made.prim.name} output {value.index}"


def _check_kind(got: Any, spec: Spec, wanted: Any, name: str) -> None:
    if not _is_data(wanted):
        return
    if isinstance(wanted, Record) != isinstance(got, Record) or not _is_data(got):
        raise AssertionError(
            f"{name} is a {type(got).__name__}, expected a {type(wanted).__name__}"
        )
    if tuple(got.shape) != tuple(wanted.shape):
        raise AssertionError(f"{name} has shape {tuple(got.shape)}, expected {tuple(wanted.shape)}")
    if got.dtype is not spec.dtype:
        raise AssertionError(f"{name} is {got.dtype}, expected {spec.dtype}")
    if isinstance(wanted, Record) and isinstance(got, Record):
        layouts = [[(tuple(t.shape), t.dtype) for t in r.tensors()] for r in (got, wanted)]
        if (
            layouts[0] != layouts[1]
            or got.usage is not wanted.usage
            or got.quantizer != wanted.quantizer
        ):
            raise AssertionError(
                f"{name} holds {layouts[0]} ({got.usage.value}, {got.quantizer.describe()}), "
                f"expected {layouts[1]} "
                f"({wanted.usage.value}, {wanted.quantizer.describe()})"
            )
