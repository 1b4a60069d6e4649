"""Fused GEMM kernels on a device against their meaning in torch: every kind of epilogue, every tiling, odd sizes.

Operands are small whole numbers and scales powers of two, so accumulators are exact in every mode: what differs is
the approximation of an activation, by a code at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from te_ops.backends.cutlass import limits, runtime
from te_ops.backends.cutlass.reference import DTYPES, reference
from te_ops.backends.cutlass.spec import Epilogue, GemmSpec, Load, Quantized, Rebuilt
from te_ops.pointwise import (
    Fn,
    Input,
    activations,
    compose,
    elementwise,
    lower,
    prelude,
    symbol,
)
from te_ops.pointwise.functions import silu
from te_ops.runtime.cache import arch_of

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SIZES = {True: ((144, 272, 144), (400, 416, 272)), False: ((1, 32, 16), (333, 416, 272))}
"""Rows, columns and contraction, by whether a transposed copy is written: its rows have to be aligned."""


def sizes(spec: GemmSpec) -> list[tuple[int, int, int]]:
    """Of a spec. Codes of a pair have half of the columns, and rows of codes begin on 16 bytes."""
    e = spec.epilogue
    turned = e.quantized is not None and e.quantized.col
    coded = e.acc_pair and e.quantized is not None and (e.quantized.row or turned)
    return [(m, n + n % 32 if coded else n, k) for m, n, k in SIZES[turned]]


SECOND: dict[str, Fn] = {}
"""Functions of copies that are rebuilt, by symbol."""
GELU, SWIGLU = activations["gelu"](), activations["swiglu"]()
BIASED = compose(GELU, 0, activations["bias"]())
SHIFTED = elementwise("shifted", lambda x, column, word: x * word + column + 1.0, *["value"] * 3)
GATE, LINEAR = (Input(0, part) + Input(1, part) for part in ("gate", "linear"))
PAIR_BIASED = Fn("biased_swiglu", ("pair", "pair"), silu(GATE) * LINEAR)


def fused(fn: Fn, **named: Any) -> tuple[Fn, Epilogue]:
    text = prelude("cutedsl", fast=True) + lower(fn, "cutedsl")
    return fn, Epilogue(symbol(fn), text, **named)


def rebuilds(fn: Fn, second: Fn, **named: Any) -> tuple[Fn, Epilogue]:
    """With a copy of another function of the first load."""
    text = prelude("cutedsl", fast=True) + lower(second, "cutedsl")
    SECOND[symbol(second)] = second
    return fused(fn, rebuilt=Rebuilt(symbol(second), text, (0,), "e4m3"), **named)


def copies(form: Any = "e4m3", row: bool = True, col: bool = True) -> Quantized:
    return Quantized(form, row=row, col=col)


ROUNDED: dict[str, Any] = {
    "store": "bf16",
    "rounds": "bf16",
    "quantized": copies(row=False, col=False),
}
KINDS: dict[str, tuple[Fn | None, Epilogue]] = {
    "plain": (None, Epilogue(acc_store="bf16")),
    "fp32": (None, Epilogue(store="fp32")),
    "accumulate": (None, Epilogue(store="fp32", accumulate=True)),
    "quantize": (None, Epilogue(quantized=copies())),
    "row only": (None, Epilogue(quantized=copies("e5m2", col=False))),
    "col only": (None, Epilogue(quantized=copies(row=False))),
    "rounded": (None, Epilogue(**ROUNDED)),
    "bias gelu": fused(BIASED, loads=(Load("row", "bf16"),), quantized=copies()),
    "gelu, saved": fused(GELU, rounds_acc="bf16", acc_store="bf16", quantized=copies()),
    "column and word": fused(
        SHIFTED, loads=(Load("column", "fp32"), Load("scalar", "fp32")), quantized=copies()
    ),
    "swiglu": fused(SWIGLU, acc_pair=True, rounds_acc="bf16", acc_store="bf16", quantized=copies()),
    "swiglu, biased": fused(
        PAIR_BIASED, acc_pair=True, loads=(Load("row", "bf16", pair=True),), quantized=copies()
    ),
    "swiglu, rounded": fused(SWIGLU, acc_pair=True, rounds_acc="bf16", acc_store="bf16", **ROUNDED),
    "dgelu, sums": fused(
        GELU.grad(0), acc=1, loads=(Load("tile", "bf16"),), quantized=copies("e5m2"), sums=True
    ),
    "dswiglu": fused(
        SWIGLU.grad(0), acc=1, loads=(Load("tile", "bf16", True),), outs=2, quantized=copies("e5m2")
    ),
    "dswiglu, rebuilt": rebuilds(
        SWIGLU.grad(0),
        SWIGLU,
        acc=1,
        loads=(Load("tile", "bf16", True),),
        outs=2,
        quantized=copies("e5m2"),
    ),
    "dgelu, sums, rebuilt": rebuilds(
        GELU.grad(0),
        GELU,
        acc=1,
        loads=(Load("tile", "bf16"),),
        quantized=copies("e5m2"),
        sums=True,
    ),
    "dswiglu, rounded": fused(
        SWIGLU.grad(0), acc=1, loads=(Load("tile", "bf16", True),), outs=2, **ROUNDED
    ),
}
THOROUGHLY = ("plain", "swiglu", "dgelu, sums")
MODES = {
    "fast": {"a": "e4m3", "b": "e4m3", "scaled": True, "fast": True},
    "split": {"a": "e5m2", "b": "e4m3", "scaled": True, "fast": False},
    "bf16": {"a": "bf16", "b": "bf16"},
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = runtime.missing()
    if reason is None and arch_of(CUDA) != "sm_90":
        reason = f"the kernels are for sm_90, this is {arch_of(CUDA)}"
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("TE_OPS_JIT", "sync")


def specs(kind: str, mode: str) -> list[GemmSpec]:
    """In the best tiling; some kinds in every one."""
    spec = GemmSpec(epilogue=KINDS[kind][1], **MODES[mode])  # type: ignore[arg-type]
    tilings = limits.tilings(spec)[: None if kind in THOROUGHLY else 1]
    return [replace(spec, tiling=tiling) for tiling in tilings]


CASES = [(k, m) for k in KINDS for m in MODES if not (m == "bf16" and "rebuilt" in k)]
"""No BF16 recipe has FP8 copies to rebuild."""


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_a_kernel_computes_what_its_spec_means(kind: str, mode: str) -> None:
    """B085: every tiling that may be chosen, at sizes that no tile divides."""
    made = specs(kind, mode)
    assert set(runtime.wait(made, "sm_90", CUDA).values()) == {None}
    for spec in made:
        run = runtime.kernel(spec, "sm_90", CUDA)
        for size in sizes(spec):
            compare(KINDS[kind][0], spec, run, size)


SEVERAL = ("swiglu", "dswiglu", "dswiglu, rebuilt", "dswiglu, rounded")


@pytest.mark.parametrize(("kind", "mode"), [case for case in CASES if case[0] in SEVERAL])
def test_a_thread_block_makes_several_tiles(kind: str, mode: str) -> None:
    """561 tiles or more: what is handed from one to the next, and what is loaded ahead of it."""
    spec = specs(kind, mode)[0]
    assert runtime.wait([spec], "sm_90", CUDA)[spec] is None
    compare(KINDS[kind][0], spec, runtime.kernel(spec, "sm_90", CUDA), (4112, 2080, 144))


def test_nan_and_infinity_reach_codes_and_amax() -> None:
    spec = specs("quantize", "fast")[0]
    assert runtime.wait([spec], "sm_90", CUDA)[spec] is None
    a, b, given = operands(spec, (256, 256, 128))
    a.view(torch.uint8)[5, 7] = 0x7F  # NaN
    runtime.kernel(spec, "sm_90", CUDA)(a, b, **given)
    rows = given["row"].float()
    assert rows[5].isnan().all()
    assert rows[torch.arange(256, device=CUDA) != 5].isfinite().all()
    assert given["amax"].isnan().all()
    a.view(torch.uint8)[5, 7] = 0
    given["scale"].fill_(1e30)
    runtime.kernel(spec, "sm_90", CUDA)(a, b, **given)
    assert given["row"].float().abs().max() == 448


def operands(
    spec: GemmSpec, size: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Operands and results of a call."""
    m, n, k = size
    e, drawn = spec.epilogue, torch.Generator(CUDA).manual_seed(0)

    def whole(form: str, *shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, device=CUDA, generator=drawn).to(DTYPES[form])  # type: ignore[index]

    shapes: dict[str, Callable[[int], tuple[int, ...]]] = {
        "tile": lambda width: (m, width),
        "row": lambda width: (width,),
        "column": lambda _: (m,),
        "scalar": lambda _: (1,),
    }
    a, b = whole(spec.a, m, k), whole(spec.b, n, k)
    given: dict[str, Any] = {}
    if spec.scaled:
        given |= {name: torch.full((1,), 0.25, device=CUDA) for name in ("scale_a", "scale_b")}
    features = n // 2 if e.acc_pair else n  # of one half
    given["loads"] = tuple(
        whole(load.format, *shapes[load.shape](features * (2 if load.pair else 1)))
        for load in e.loads
    )
    if e.store is not None:
        given["y"] = whole(e.store, m, wide_of(spec, n))
    return a, b, given | results(spec, size)


def wide_of(spec: GemmSpec, n: int) -> int:
    """Columns of y."""
    return n // 2 if spec.epilogue.acc_pair else n * spec.epilogue.outs


def results(spec: GemmSpec, size: tuple[int, int, int]) -> dict[str, Any]:
    """Where everything but y is written."""
    m, n, _ = size
    e, wide = spec.epilogue, wide_of(spec, n)

    def empty(form: str, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=CUDA).to(DTYPES[form])  # type: ignore[index]

    made: dict[str, Any] = {}
    if e.acc_store is not None:
        made["acc"] = empty(e.acc_store, m, n)
    if e.sums:
        made["sums"] = torch.full((-(-m // spec.tiling.m), wide), float("nan"), device=CUDA)
    if e.quantized is not None:
        made["amax"] = empty("fp32", 1)
        if e.quantized.row:
            made["row"] = empty(e.quantized.format, m, wide)
        if e.quantized.col:
            made["col"] = empty(e.quantized.format, wide, m)
        if e.quantized.row or e.quantized.col:
            made |= {"scale": torch.full((1,), 8.0, device=CUDA), "scale_inv": empty("fp32", 1)}
    if e.rebuilt is not None:
        made |= {"rebuilt": empty(e.rebuilt.format, n, m), "rebuilt_inv": empty("fp32", 1)}
        made["rebuilt_scale"] = torch.full((1,), 4.0, device=CUDA)
    return made


def compare(
    fn: Fn | None, spec: GemmSpec, run: Callable[..., Any], size: tuple[int, int, int]
) -> None:
    a, b, given = operands(spec, size)
    scales = (given["scale_a"], given["scale_b"]) if spec.scaled else None
    before = given["y"].clone() if spec.epilogue.accumulate else None
    again = spec.epilogue.rebuilt
    right = reference(
        spec, fn, a, b, scales=scales, loads=given["loads"], scale=given.get("scale"), y=before,
        second=SECOND[again.function] if again else None, rebuilt_scale=given.get("rebuilt_scale"),
    )  # fmt: skip
    run(a, b, **given)
    exact = fn is None
    for name in ("acc", "y", "row", "col", "rebuilt"):
        if given.get(name) is not None:
            same(
                given[name],
                getattr(right, name),
                f"{name} of {spec.tiling}",
                exact or name == "acc",
            )
    if given.get("row") is not None and given.get("col") is not None:
        assert torch.equal(given["row"].view(torch.uint8).t(), given["col"].view(torch.uint8))
    if "amax" in given:
        torch.testing.assert_close(
            given["amax"], right.amax.reshape(1), rtol=0 if exact else 1e-2, atol=0
        )
    if "scale_inv" in given:
        assert given["scale_inv"].item() == right.scale_inv.item()  # type: ignore[union-attr]
    if again is not None:
        assert given["rebuilt_inv"].item() == right.rebuilt_inv.item()  # type: ignore[union-attr]
    if "sums" in given:
        torch.testing.assert_close(given["sums"].sum(0), right.sums, rtol=1e-2, atol=1e-1)


def same(found: torch.Tensor, right: torch.Tensor, what: str, exact: bool) -> None:
    """Equal to the bit, or by a step of the format where an activation is approximated.

    The device's approximations flush subnormal numbers: where a factor is one (the sigmoid of -90), the product may be
    0, which is thousands of steps from 1e-35.
    """
    if exact or found.dtype == torch.float32:
        assert torch.equal(bytes_of(found), bytes_of(right)), what
        return
    far = (steps(found) - steps(right)).abs()
    flushed = torch.finfo(torch.float32).smallest_normal * right.float().abs().max()
    far[(found.float() - right.float()).abs() <= flushed] = 0
    assert far.max() <= 1 + 3 * (found.dtype == torch.bfloat16), what
    assert (far > 0).float().mean() < 0.02, what


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def steps(x: torch.Tensor) -> torch.Tensor:
    """The place of every value among those of its format."""
    bits = x.contiguous().view(torch.uint8 if x.element_size() == 1 else torch.int16).int()
    low = (1 << (8 * x.element_size() - 1)) - 1
    negative = bits > low if x.element_size() == 1 else bits < 0
    return torch.where(negative, -(bits & low), bits & low)
