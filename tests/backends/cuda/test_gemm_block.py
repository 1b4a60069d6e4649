"""Products of block scales by our own kernel, without a device: what is refused and why, tiles, machine code."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_ops.backends.cublas import lt, scaled
from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda import gemm_block, maps
from te_ops.errors import PlanError
from te_ops.registry import Call
from tests.backends.cublas.problems import FORMATS, operands, single

SINGLE, ADDED = gemm_block.KERNELS
BF16, FP32 = torch.bfloat16, torch.float32
E4M3 = torch.float8_e4m3fn
PROCESSORS = 132


def _product(m: int = 6144, n: int = 4096, k: int = 8192, **more: Any) -> lt.Product:
    return lt.Product(m, n, k, E4M3, E4M3, **{"d": BF16, "scales": gemm_block.SCALES[0], **more})


def _reason(call: Call) -> str | None:
    return SINGLE.arch.refuse(call.arch) or SINGLE.refuse(call)


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with block scales, whatever is installed, and as many processors as were measured."""
    monkeypatch.setattr(scaled.torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "_scaled_mm_v2", object(), raising=False)
    monkeypatch.setattr(gemm_block, "processors", lambda device: 1)


# -- what it takes


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("pair", ["1x128 x 128x128", "1x128 x 1x128"])
def test_block_scales_are_taken(pair: str, layout: str) -> None:
    a, b = operands(layout, (192, 128, gemm_block._DEEP), FORMATS[pair])
    assert _reason(single(a, b, layout)) is None


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        ("128x128 x 1x128", "not 128x128 x 1x128"),
        ("current", "not tensor x tensor"),
        ("dense", "not dense x dense"),
    ],
)
def test_other_formats_are_refused(pair: str, text: str) -> None:
    a, b = operands("nt", (192, 128, 2048), FORMATS.get(pair, (None, None)))
    assert text in str(_reason(single(a, b, "nt")))


def test_other_devices_are_refused() -> None:
    a, b = operands("nt", (192, 128, 2048), FORMATS["1x128 x 1x128"])
    for arch in ("sm_80", "sm_100"):
        assert "sm_90" in str(_reason(single(a, b, "nt", arch=arch)))


@pytest.mark.parametrize(
    ("extents", "text"),
    [
        ((192, 128, 1024), "a contraction of 1024 was not measured"),
        ((192, 120, 2048), "bulk copies do not take extents of 192 x 120 x 2048"),
        ((96, 128, 2048), "keep 1 processors 50% busy with 96 x 128: below 93%"),
    ],
)
def test_what_the_library_makes_faster_is_left_to_it(
    extents: tuple[int, int, int], text: str
) -> None:
    a, b = operands("nt", extents, FORMATS["1x128 x 1x128"])
    assert text in str(_reason(single(a, b, "nt")))


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gemm_block.SWITCH, raising=False)
    assert SINGLE.available() == (compiler.missing() or lt.missing())
    monkeypatch.setenv(gemm_block.SWITCH, "0")
    assert f"{gemm_block.SWITCH}=0" in str(SINGLE.available())


class _Driver:
    """Stands for the driver: keeps the address of each map, and refuses those that are odd."""

    def __init__(self) -> None:
        self.maps: dict[int, int] = {}

    def move(self, into: int, address: int) -> int:
        if address % 2:
            return 1
        self.maps[into] = address
        return 0

    def encode(self, into: int, address: int, *layout: Any) -> None:
        maps.check(self.move(into, address))


def test_an_address_that_the_driver_refuses_leaves_no_map_of_another_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = _Driver()
    monkeypatch.setattr(maps, "encode", driver.encode)
    monkeypatch.setattr(maps, "mover", lambda into: functools.partial(driver.move, into))
    monkeypatch.setattr(maps, "error_text", str)
    seen: list[list[int]] = []
    launched = SimpleNamespace(
        prepare=lambda words, base: lambda stream: seen.append(list(driver.maps.values()))
    )
    kernel: Any = SimpleNamespace(blocks=lambda count: launched)
    monkeypatch.setattr(lt, "device", lambda index: torch.device("cpu"))
    prepared = gemm_block.Prepared(0, _product(), kernel)
    prepared.run([16, 32, 0, 0, 0], 0)
    with pytest.raises(PlanError, match="takes no such address"):
        prepared.run([48, 33, 0, 0, 0], 0)
    prepared.run([16, 32, 0, 0, 0], 0)
    prepared.run([64, 32, 0, 0, 0], 0)
    assert seen == [[16, 32], [16, 32], [64, 32]]


# -- where it is faster: docs/design/0021


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (28672, 4096, 8192),
        (4096, 14336, 8192),
        (6144, 4096, 8192),
        (16384, 4096, 8192),
        (8192, 28672, 4096),
        (8192, 4096, 14336),
        (8192, 4096, 4096),
    ],
)
def test_measured_to_be_faster(m: int, n: int, k: int) -> None:
    assert gemm_block.slower(_product(m, n, k), PROCESSORS) is None


def test_measured_to_be_slower() -> None:
    assert "86% busy" in str(gemm_block.slower(_product(4096, 4096), PROCESSORS))


# -- tiles


def _fragment(thread: int, i: int) -> tuple[int, int]:
    """A sum of a thread: (row, column) of 64 x 128, as PTX lays out m64n128."""
    warp, lane = divmod(thread, 32)
    return 16 * warp + lane // 4 + i % 4 // 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2


def test_a_thread_stores_the_columns_that_it_has() -> None:
    """The order in which the map of b brings columns, against where `GemmBlock::store` puts them."""
    order = [
        16 * i + 4 * q + 2 * h + e
        for i in range(8)
        for h in (0, 1)
        for q in range(4)
        for e in (0, 1)
    ]
    stored = {}
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for half in (0, 1):
            row = 16 * warp + lane // 4 + 8 * half
            for i in range(0, 64, 8):
                values = (i + 2 * half, i + 2 * half + 1, i + 2 * half + 4, i + 2 * half + 5)
                for place, value in enumerate(values):
                    stored[row, i * 2 + 4 * (lane % 4) + place] = (thread, value)
    assert len(stored) == 64 * 128
    for (row, column), (thread, value) in stored.items():
        own_row, place = _fragment(thread, value)
        assert (own_row, order[place]) == (row, column)


# -- machine code


@pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing()))
@pytest.mark.parametrize(
    "product",
    [_product(scales=scales) for scales in gemm_block.SCALES]
    + [_product(d=FP32, accumulate=True), _product(d=BF16, accumulate=True)],
    ids=lambda product: product.key,
)
def test_products_overlap_and_nothing_spills(
    product: lt.Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(gemm_block.launch, "build", lambda _, text, *__, **___: texts.append(text))
    gemm_block.kernel_of(product)
    log = compiler.compile_text(texts[0], "sm_90", options=("--ptxas-options=-v",)).log
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "wgmma" not in log  # the assembler says so where it waits for each product
    assert gemm_block.shared_bytes(product) <= 227 << 10
