"""Products of block scales by our own kernel, without a device: what is refused and why, tiles, machine code."""

from __future__ import annotations

import ctypes
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_ops.backends.cublas import choices, lt, scaled
from te_ops.backends.cuda import compile as compiler
from te_ops.backends.cuda import gemm_block, maps
from te_ops.errors import PlanError
from te_ops.registry import Call
from te_ops.runtime.tune import collected
from tests.backends.cublas.problems import FORMATS, fused, operands, single

SINGLE, ADDED, EPILOGUE = gemm_block.KERNELS
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


def test_a_bias_is_taken_where_it_was_measured() -> None:
    for k, reason in ((gemm_block._DEEP_BIAS, None), (gemm_block._DEEP, "what is below 8192")):
        a, b = operands("nt", (192, 128, k), FORMATS["1x128 x 128x128"])
        bias, c = torch.randn(128).bfloat16(), torch.randn(192, 128).bfloat16()
        found = EPILOGUE.refuse(fused(a, b, "nt", "bias", bias))
        assert found is None if reason is None else reason in str(found)
        assert EPILOGUE.refuse(fused(a, b, "nt", "add", c)) == "this kernel adds no matrix"


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


def test_the_address_of_a_bias_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "encode", lambda *_: None)
    monkeypatch.setattr(maps, "mover", lambda into: lambda address: 0)
    monkeypatch.setattr(lt, "device", lambda index: torch.device("cpu"))
    seen: list[bytes] = []

    def prepare(words: Any, base: int) -> Any:
        place = base + gemm_block._MAPS, gemm_block._NUMBERS.size
        return lambda stream: seen.append(ctypes.string_at(*place))

    kernel: Any = SimpleNamespace(blocks=lambda count: SimpleNamespace(prepare=prepare))
    words = [16, 32, 48, 64, 80, 96, 0, 0, 0]
    for bias, there in ((None, 0), (BF16, 96)):
        prepared = gemm_block.Prepared(0, _product(bias=bias), kernel)
        for _ in range(2):
            prepared.run(words, 0)
            numbers = gemm_block._NUMBERS.unpack(seen[-1])
            assert (numbers[:3], numbers[-1]) == ((64, 80, 48), there)


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


# -- te.tune


def _cuda(m: int, n: int) -> tuple[torch.device, lt.Product]:
    return torch.device("cuda", 0), _product(m, n)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What te.tune measured, by product, on a device with as many processors as were measured."""
    made: dict[str, str] = {}
    monkeypatch.setattr(gemm_block, "processors", lambda device: PROCESSORS)
    monkeypatch.setattr(gemm_block, "place", lambda index: "a place")
    monkeypatch.setattr(gemm_block.TABLE, "get", lambda where, key: made.get(key))
    return made


def test_what_te_tune_measured_comes_before_the_rule(table: dict[str, str]) -> None:
    for extents in ((6144, 4096), (4096, 4096)):
        device, product = _cuda(*extents)
        by_the_rule = gemm_block.elsewhere(device, product)
        assert by_the_rule == gemm_block.slower(product, PROCESSORS)
        table[product.key] = gemm_block.OWN
        assert gemm_block.elsewhere(device, product) is None
        table[product.key] = "4200"
        assert "te.tune measured the library" in str(gemm_block.elsewhere(device, product))


def test_while_problems_are_collected_the_rule_is_not_asked() -> None:
    a, b = operands("nt", (96, 128, 2048), FORMATS["1x128 x 1x128"])
    call = single(a, b, "nt")
    assert "50% busy" in str(_reason(call))
    with collected():
        assert _reason(call) is None


@pytest.mark.parametrize(("extents", "first"), [((6144, 4096), True), ((4096, 4096), False)])
def test_a_trial_begins_with_what_runs_without_one(
    extents: tuple[int, int], first: bool, table: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, product = _cuda(*extents)
    algorithms = [lt.Candidate(bytes([n]), 0) for n in (1, 2)]
    monkeypatch.setattr(choices, "place", lambda index: "a place")
    monkeypatch.setattr(lt, "candidates", lambda index, p: algorithms)
    monkeypatch.setattr(lt, "variations", lambda index, p, base: [])
    made: Any = SimpleNamespace(blocks=lambda count: SimpleNamespace(prepare=lambda *_: None))
    monkeypatch.setattr(maps, "mover", lambda into: None)
    trial = gemm_block._Trial(made, 0, product)
    names = trial.candidates()
    assert sorted(names) == ["01", "02", gemm_block.OWN]
    assert (names[0] == gemm_block.OWN) is first
    assert isinstance(trial.prepared(gemm_block.OWN), gemm_block.Prepared)


def test_the_library_never_takes_the_name_for_an_algorithm(
    table: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, product = _cuda(4096, 4096)
    favourite = lt.Candidate(b"favourite", 0)
    monkeypatch.setattr(choices, "place", lambda index: "a place")
    monkeypatch.setattr(choices, "_first", lambda index, p: favourite)
    table[product.key] = gemm_block.OWN
    assert choices.choose(0, product) is favourite


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

BIASED: tuple[dict[str, Any], ...] = ({"bias": BF16}, {"bias": FP32, "d": FP32})


@pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing()))
@pytest.mark.parametrize(
    "product",
    [_product(scales=scales) for scales in gemm_block.SCALES]
    + [_product(d=FP32, accumulate=True), _product(d=BF16, accumulate=True)]
    + [_product(scales=gemm_block.SCALES[1], **more) for more in BIASED],
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
