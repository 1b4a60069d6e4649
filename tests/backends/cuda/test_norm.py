"""Norm kernels on the host: ways to deal rows out, groups, what is refused; what compiles without spills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import te_ops as te
from scripts import kernel_report
from te_ops.backends.cuda import KERNELS, launch
from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda.norm_kernels import (
    BACKWARD,
    FORWARD,
    Backward,
    Norm,
    Shape,
    added,
    backward_kernel,
    backward_shape,
    forward_kernel,
    forward_shape,
    slot,
    sums_kernel,
)
from te_ops.backends.cuda.norm_tiles import Tile, Wants, shared_of, tile_for, tiles_kernel
from te_ops.backends.cuda.source import plain
from te_ops.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, NVFP4Quantizer
from te_ops.registry import REGISTRY
from te_ops.runtime import cache
from tests.backends.cuda import emulator
from tests.backends.cuda.cases import BIND, Case, check, drawer
from tests.backends.cuda.cases_norm import backward, cases, forward

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
DELAYED = Float8Quantizer()
GROUPS = {case.name: case for case in cases()}
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
WIDTHS = (1, 8, 33, 128, 1024, 2560, 4096, 8192, 12288, 14336, 16384, 28672, 32768, 40000)

needs_host = pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")
needs_nvrtc = pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing()))


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "build", emulator.build)
    monkeypatch.setattr(launch, "zero_word", emulator.zero_word)


def norm_of(
    width: int, *, layer: bool = False, dtype: torch.dtype = BF16, add: bool = False
) -> Norm:
    source = added(dtype, width) if add else plain(dtype, width)
    return Norm(source, dtype, dtype, dtype, layer, False, 1e-5)


# -- how rows are dealt out


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_shape_covers_the_row_and_fits(arch: str, width: int, dtype: torch.dtype) -> None:
    most = {"sm_80": 163, "sm_86": 99, "sm_120": 99}.get(arch, 227) * 1024
    norm = norm_of(width, dtype=dtype)
    shape = forward_shape(norm, arch)
    if shape.chunks:
        assert shape.group * shape.chunks * 8 >= width
        assert shape.threads % shape.group == 0
        assert shape.threads % 32 == 0
        assert shape.stages * shape.chunks * shape.threads * norm.copied <= most
        assert shape.resident * shape.threads <= 2048
    else:
        assert width > 16384 or most < 100 * 1024
    for sums in (0, 1, 2):
        made = Backward(width, dtype, dtype, dtype, sums == 2, False, True, sums)
        found = backward_shape(made, arch)
        assert found is None or found.cluster * found.group * found.chunks * 8 >= width
    assert found is not None or width > 4096 or dtype is FP32


def test_tiles_by_width_and_architecture() -> None:
    wants = Wants("te::e4m3", BF16, True, True, True)
    clusters = {w: tile_for(norm_of(w), wants, "sm_90") for w in (8, 512, 520, 4096, 4104, 8192)}
    assert [t.cluster for t in clusters.values() if t is not None] == [1, 1, 2, 8, 5, 8]
    assert tile_for(norm_of(8200), wants, "sm_90") is None
    assert tile_for(norm_of(516), wants, "sm_90") is None  # no whole chunks
    assert tile_for(norm_of(520), wants, "sm_80") is None  # no clusters
    assert tile_for(norm_of(512), wants, "sm_80") is not None


# -- results


SHAPES = (
    (9, 128, Shape(4, 4, 128, 2, 1), False),
    (17, 200, Shape(32, 1, 256, 3, 1), True),
    (5, 1000, Shape(64, 2, 128, 0, 1), True),
    (5, 1000, Shape(64, 2, 192, 2, 1), False),
    (4, 2056, Shape(160, 2, 160, 1, 1), True),
)
"""Rows, columns, ways to deal them out (part of a warp, a warp, no copies, groups of warps, all warps), LayerNorm."""
SHARED = (
    (9, 520, Shape(32, 1, 96, 2, 1, 0, 3), False),
    (11, 1000, Shape(32, 2, 64, 1, 1, 0, 2), True),
)
"""Rows that the blocks of a cluster share (backward)."""
SHORT = (
    (133, 128, Shape(16, 1, 128, 0, 10, 1, at_once=2), False),
    (37, 100, Shape(8, 2, 64, 0, 1, 1, at_once=4), True),
    (5, 8, Shape(4, 1, 32, 0, 1, 1, at_once=3), False),
)
"""Several rows of a thread at once (forward): the last ones missing, columns missing, more threads than chunks."""
LONG = tuple((2, 513, Shape(128, 0, 128, 0, 1), layer) for layer in (False, True))
"""Rows that are not held."""


@needs_host
@pytest.mark.parametrize(("rows", "width", "shape", "layer"), SHAPES + SHORT + LONG)
def test_forward(rows: int, width: int, shape: Shape, layer: bool) -> None:
    draw = drawer(rows, "cpu")
    x, other, gamma, beta = (draw(s) for s in ((rows, width), (rows, width), (width,), (width,)))
    norm = norm_of(width, layer=layer, add=True)
    y, stream = torch.empty_like(x), torch.empty_like(x)
    rstd, mean, amax = torch.empty(rows), torch.empty(rows), torch.zeros(())
    forward_kernel(norm, "sm_90", shape)(
        CPU, rows, *norm.source.slots([x, other]), gamma.data_ptr(), beta.data_ptr(),
        *map(slot, (stream, y, rstd, mean, amax)),
    )  # fmt: skip
    assert torch.equal(stream, x + other)
    assert amax.item() == y.abs().max().item()
    wide = stream.double()
    centred = wide - wide.mean(-1, keepdim=True) if layer else wide
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    expected = centred * scale * gamma.double() + (beta.double() if layer else 0.0)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(rstd.double(), scale.view(-1), rtol=1e-6, atol=0.0)
    if layer:
        torch.testing.assert_close(mean.double(), wide.mean(-1), rtol=1e-5, atol=1e-6)


@needs_host
@pytest.mark.parametrize(("rows", "width", "shape", "layer"), SHAPES + SHARED)
def test_backward(rows: int, width: int, shape: Shape, layer: bool) -> None:
    draw = drawer(rows, "cpu")
    x, dy, other = (draw((rows, width)) for _ in range(3))
    gamma, sums = draw((width,)), 1 + layer
    wide = x.float()
    mean = wide.mean(-1) if layer else torch.zeros(rows)
    rstd = torch.rsqrt((wide - mean[:, None]).square().mean(-1) + 1e-5)
    made = Backward(width, BF16, BF16, BF16, layer, False, True, sums)
    dx = torch.empty_like(x)
    partial = backward_kernel(made, "sm_90", shape)(
        CPU, rows, tuple(map(slot, (dy, x, other, gamma, rstd, mean, dx)))
    )
    assert partial is not None
    totals = sums_kernel(FP32, "sm_90")(partial)
    xhat = (x.double() - mean[:, None]) * rstd[:, None]
    g = dy.double() * gamma.double()
    level = g.mean(-1, keepdim=True) if layer else 0.0
    expected = (g - level - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd[:, None]
    torch.testing.assert_close(dx.double(), expected + other.double(), rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(totals[0].double(), (dy * xhat).sum(0), rtol=1e-5, atol=1e-5)
    if layer:
        torch.testing.assert_close(totals[1].double(), dy.double().sum(0), rtol=1e-5, atol=1e-5)


@needs_host
@pytest.mark.parametrize(
    ("shape", "tile", "layer"),
    [
        ((70, 512), Tile(32, 512, 1, 256, 1, 2, 1), False),
        ((48, 1024), Tile(32, 512, 2, 128, 1, 1, 1), False),
        ((33, 1000), Tile(16, 512, 2, 128, 1, 1, 4), True),
        ((130, 520), Tile(64, 512, 2, 512, 1, 2, 2), False),
        ((40, 2048), Tile(32, 1024, 2, 512, 1, 1, 2), True),
    ],
)
def test_tiles(shape: tuple[int, int], tile: Tile, layer: bool) -> None:
    rows, width = shape
    draw = drawer(rows, "cpu")
    x, other, gamma, beta = draw(shape), draw(shape), draw((width,)), draw((width,))
    norm = norm_of(width, layer=layer, add=layer)
    wants = Wants("te::e4m3", BF16, True, True, True, stream=layer, dense=True)
    stream = torch.empty_like(x)
    y, rstd, mean = torch.empty_like(x), torch.empty(rows), torch.empty(rows)
    scale, scale_inv, amax = torch.tensor([3.0]), torch.zeros(1), torch.zeros(())
    row = torch.empty(rows, width, dtype=torch.float8_e4m3fn)
    col = torch.empty(width, rows, dtype=torch.float8_e4m3fn)
    outs = (gamma, beta, scale, amax, scale_inv, stream, y, rstd, mean, row, col)
    slots = norm.source.slots([x, other][: 1 + layer])
    tiles_kernel(norm, wants, tile, "sm_90")(CPU, rows, *slots, *map(slot, outs))
    wide = (x + other if layer else x).double()
    assert not layer or torch.equal(stream, x + other)
    centred = wide - wide.mean(-1, keepdim=True) if layer else wide
    expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    expected = expected * gamma.double() + (beta.double() if layer else 0.0)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)
    codes = (y.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    assert torch.equal(row.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(col.view(torch.uint8), codes.view(torch.uint8).t())
    assert amax.item() == y.abs().max().item()
    assert scale_inv.item() == (1.0 / scale).item()


@needs_host
def test_a_nan_reaches_the_amax() -> None:
    x = torch.ones(40, 64, dtype=BF16)
    x[37, 3] = float("nan")
    case = forward("", False, DELAYED, "t")
    group = case.make(drawer(0, "cpu"), (40, 64))
    call = group.call("sm_90", "cpu")
    given = [group.inputs.tensors[v] for v in call.reads]
    given[0] = x
    made = BIND["norm_quantize"].bind(call)(*given)
    assert made[-1].isnan()


@needs_host
@pytest.mark.parametrize("name", GROUPS)
def test_groups_equal_the_reference(name: str) -> None:
    """At no rows, at whole chunks of columns, or at rows that are not: in turn."""
    odd = list(GROUPS).index(name) % 3 == 2
    for shape in ((0, 131), (35, 131)) if odd else ((0, 40), (2, 3, 40)):
        assert check(GROUPS[name].make(drawer(3, "cpu"), shape), "sm_90", "cpu") == [], shape


@needs_host
@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (forward("add", False, DELAYED, "st"), "sm_90"),
        (forward("", True, DELAYED, "t"), "sm_90"),
        (forward("add", True, DELAYED, "st"), "sm_80"),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_wide_rows_with_and_without_clusters(case: Case, arch: str) -> None:
    assert check(case.make(drawer(5, "cpu"), (35, 1544)), arch, "cpu") == []


# -- refused


def reason(case: Case, shape: tuple[int, ...] = (4, 64), runs: str = "") -> str:
    group = case.make(drawer(0, "cpu"), shape)
    return str(BIND[runs or group.runs].refuse(group.call("sm_90", "cpu")))


def test_what_is_refused() -> None:
    current = Float8CurrentScalingQuantizer()
    assert "amax of all values" in reason(forward("", False, current, ""))
    assert "no value is read again" in reason(
        forward("", False, DELAYED, "t", rule="norm_quantize_rounded")
    )
    assert "amax of all values" in reason(forward("", False, NVFP4Quantizer(), "t"))
    assert "not torch.float64" in reason(forward("add", False, None, "sy", dtype=torch.float64))
    assert "a sum over rows alone" in reason(backward(True, "b"))
    assert "does not hold rows of 70000 columns" in reason(backward(False, "g"), (2, 70000))


# -- plans


def test_what_a_plan_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second norm's gradient goes into a sum that needs it by another way; the first one's takes its sum along."""
    monkeypatch.setattr(cache, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(launch, "build", lambda *_, **__: lambda *_: None)
    model = te.Sequential(
        te.Residual(te.LayerNorm(64), te.Linear(64, 64, bias=False)),
        te.RMSNorm(64),
        te.Linear(64, 64),
    ).bfloat16()
    x = torch.zeros(16, 64, dtype=BF16, requires_grad=True)
    kernels_here = [replace(k, available=lambda: None) for k in KERNELS]
    recipe = te.recipe.DelayedScaling()
    with REGISTRY.without("cublas."), REGISTRY.temporary(*kernels_here), te.autocast(recipe=recipe):
        (segment,) = model.plan(x).to_dict()["segments"]
    steps = [s for phase in ("forward", "backward") for s in segment[phase] if "norm" in s["name"]]
    assert [s["name"] for s in steps] == [
        "norm_quantize", "add_norm_quantize", "norm_backward_weights", "norm_backward_together",
    ]  # fmt: skip
    assert steps[1]["nodes"][:2] == ["add", "rmsnorm"]
    assert set(steps[2]["nodes"]) == {"rmsnorm_backward", "rmsnorm_dgamma"}
    assert set(steps[3]["nodes"]) == {"layernorm_backward", "layernorm_dgamma", "reduce", "sum"}


# -- machine code


def text_of(make: Callable[[], object], patch: pytest.MonkeyPatch) -> str:
    """The text that a kernel is built from, which is not compiled."""
    texts: list[str] = []
    patch.setattr(launch, "build", lambda name, text, *_, **__: texts.append(text))
    make()
    return texts[-1]


MEASURED = (
    *((False, layer, *entry) for layer, table in FORWARD.items() for entry in table),
    *((True, layer, *entry) for layer, table in BACKWARD.items() for entry in table),
)
"""Whether it is a backward kernel, a LayerNorm's, and what the tables say about a width."""


@needs_nvrtc
def test_no_kernel_of_the_tables_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_90, where they are used; the report of all kernels has what other architectures choose."""
    wants = Wants("te::e4m3", BF16, True, True, True)
    makes: list[Callable[[], object]] = []
    for gradient, layer, width, shape in MEASURED:
        made: Any = Backward(width, BF16, BF16, BF16, layer, False, False, 1 + layer)
        if not gradient:
            made = norm_of(width, layer=layer)
        makes.append(partial(backward_kernel if gradient else forward_kernel, made, "sm_90", shape))
    for width, layer, add in ((4096, False, True), (4096, True, False), (8192, False, False)):
        norm = norm_of(width, layer=layer, add=add)
        tile = tile_for(norm, wants, "sm_90")
        assert tile is not None
        makes.append(partial(tiles_kernel, norm, wants, tile, "sm_90"))
    for make in makes:
        text = text_of(make, monkeypatch)
        report = kernel_report.examine(("norm", text, "sm_90"))
        assert report.wrong == "", f"{report.instance}: {report.wrong}"


def test_shared_memory_counts_copies_codes_and_sums() -> None:
    tile = Tile(32, 512, 8, 256, 2, 2, 2)
    wants = Wants("te::e4m3", BF16, True, True, True)
    assert shared_of(norm_of(4096), wants, tile) == 2 * 32 * 512 * 2 + 32 * 512 + 4096 + 16
    once = replace(tile, stages=1)
    assert shared_of(norm_of(4096, add=True), wants, once) == 2 * 32 * 512 * 2 + 4096 + 16
