"""cuBLASLt's descriptors, against the library's documentation: a stand-in multiplies what they say."""

from __future__ import annotations

import ctypes

import pytest
import torch

from te_ops.backends.cublas import choices, lt
from te_ops.runtime.tune import TABLE
from tests.backends.cublas.fakelt import FakeLt

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR = ("tensor", "tensor")
M, N, K = 32, 48, 272


def product(**fields: object) -> lt.Product:
    made: dict[str, object] = {"m": M, "n": N, "k": K, "a": BF16, "b": BF16, "d": BF16}
    return lt.Product(**{**made, **fields})  # type: ignore[arg-type]


def scale(mode: str, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale as the library reads it, and the same for each element [rows, k]."""
    blocks = -(-k // 128)
    if mode == "tensor":
        t = torch.rand(1) + 0.5
        return t, t.expand(rows, k)
    if mode == "row":
        t = torch.rand(rows) + 0.5
        return t, t[:, None].expand(rows, k)
    if mode == "1x128":
        t = torch.rand(blocks, rows) + 0.5
        return t, t.t().repeat_interleave(128, 1)[:, :k]
    t = torch.rand(-(-rows // 128), -(-blocks // 4) * 4) + 0.5
    each = t[:, :blocks].repeat_interleave(128, 0)[:rows]
    return t, each.repeat_interleave(128, 1)[:, :k]


def operands(p: lt.Product) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors by word, and the product in FP64."""
    a = torch.randn((p.m, p.k) if p.a_k else (p.k, p.m)).to(p.a)
    b = torch.randn((p.n, p.k) if p.b_k else (p.k, p.n)).to(p.b)
    words = {"a": a, "b": b, "d": torch.randn(p.m, p.n).to(p.d)}
    x = (a if p.a_k else a.t()).double()
    y = (b if p.b_k else b.t()).double()
    if p.scales[0]:
        words["scale_a"], each = scale(p.scales[0], p.m, p.k)
        x = x * each.double()
        words["scale_b"], each = scale(p.scales[1], p.n, p.k)
        y = y * each.double()
    z = x @ y.t()
    if p.accumulate:
        z += words["d"].double()
    if p.plus:
        words["c"] = torch.randn(p.m, p.n).to(p.d)
        z += words["c"].double()
    if p.bias is not None:
        words["bias"] = torch.randn(p.n).to(p.bias)
        z += words["bias"].double()
    return words, z


def addresses(words: dict[str, torch.Tensor]) -> list[int]:
    return [words[w].data_ptr() if w in words else 0 for w in lt.WORDS]


PRODUCTS = {
    "nt": product(),
    "nn": product(b_k=False),
    "tn": product(a_k=False, b_k=False),
    "tt": product(a_k=False),
    "half": product(a=torch.float16, b=torch.float16, d=torch.float16),
    "bias": product(bias=BF16),
    "wide": product(d=FP32),
    "accumulated": product(d=FP32, accumulate=True, a_k=False, b_k=False),
    "accumulated bf16": product(accumulate=True),
    "added": product(plus=True),
    "added, bias": product(a=E4M3, b=E4M3, scales=TENSOR, bias=BF16, plus=True, fast=True),
    "tensor": product(a=E4M3, b=E4M3, scales=TENSOR, fast=True),
    "tensor bias": product(a=E4M3, b=E4M3, scales=TENSOR, bias=BF16),
    "tensor e5m2": product(a=E5M2, b=E4M3, scales=TENSOR),
    "tensor accumulated": product(a=E5M2, b=E4M3, d=FP32, scales=TENSOR, accumulate=True),
    "row": product(a=E4M3, b=E4M3, scales=("row", "row")),
    "1x128 x 128x128": product(a=E4M3, b=E4M3, scales=("1x128", "128x128")),
    "128x128 x 1x128": product(a=E4M3, b=E4M3, scales=("128x128", "1x128")),
    "1x128 x 1x128": product(a=E4M3, b=E4M3, d=FP32, scales=("1x128", "1x128"), accumulate=True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_descriptors_say_the_product(lt_library: FakeLt, name: str) -> None:
    p = PRODUCTS[name]
    words, expected = operands(p)
    first = lt.candidates(0, p)[0]
    lt.Prepared(0, p, first).run(addresses(words), 7)
    assert torch.equal(words["d"], expected.to(p.d))
    assert lt_library.calls[-1]["fast"] is p.fast
    assert lt_library.calls[-1]["stream"] == 7


def test_all_candidates_are_offered_in_the_librarys_order(lt_library: FakeLt) -> None:
    found = lt.candidates(0, product())
    assert [c.algo[0] for c in found] == [1, 2, 3]
    assert [c.algo[0] for c in lt.candidates(0, product(), 2)] == [1, 2]
    assert found[0].describe().startswith("1/")


def test_a_product_that_the_library_refuses_has_no_candidate(lt_library: FakeLt) -> None:
    assert lt.candidates(0, product(a=E5M2, b=E5M2, scales=TENSOR)) == []


def test_an_algorithm_of_another_product_is_checked(lt_library: FakeLt) -> None:
    assert lt.checked(0, product(), bytes([3]) + bytes(63)) is not None
    assert lt.checked(0, product(), bytes([9]) + bytes(63)) is None


def test_pointers_are_patched_only_when_they_change(lt_library: FakeLt) -> None:
    p = PRODUCTS["tensor"]
    words, _ = operands(p)
    made = lt.Prepared(0, p, lt.candidates(0, p)[0])
    made.run(addresses(words), 0)
    before = lt_library.patches
    made.run(addresses(words), 0)
    assert lt_library.patches == before
    words["scale_a"], _ = scale("tensor", M, K)
    made.run(addresses(words), 0)
    assert lt_library.patches == before + 1
    expected = words["a"].double() * words["scale_a"] @ words["b"].double().t() * words["scale_b"]
    assert torch.equal(words["d"], expected.to(BF16))


def test_a_tape_has_descriptors_of_its_own(lt_library: FakeLt) -> None:
    p = PRODUCTS["tensor"]
    made = lt.Prepared(0, p, lt.candidates(0, p)[0])
    place = (ctypes.c_int64 * len(lt.WORDS))()
    words = memoryview(place).cast("B").cast("q")
    issue = made.prepare(words, ctypes.addressof(place))
    first, one = operands(p)
    second, two = operands(p)
    words[:] = memoryview((ctypes.c_int64 * len(lt.WORDS))(*addresses(first))).cast("B").cast("q")
    made.run(addresses(second), 0)
    issue(3)
    assert torch.equal(first["d"], one.to(BF16))
    assert torch.equal(second["d"], two.to(BF16))
    for i, word in enumerate(addresses(second)):
        words[i] = word
    second["d"].zero_()
    issue(3)
    assert torch.equal(second["d"], two.to(BF16))


def test_descriptors_are_freed(lt_library: FakeLt) -> None:
    lt.candidates(0, product())
    before = len(lt_library.objects)
    made = lt.Prepared(0, product(), lt.candidates(0, product())[0])
    assert len(lt_library.objects) > before
    del made
    assert len(lt_library.objects) == before


def test_keys_differ_where_products_do() -> None:
    assert len({p.key for p in PRODUCTS.values()}) == len(PRODUCTS)
    assert product().key == "32x48x272 tt bf16*bf16->bf16"


def test_importing_asks_for_no_vendor_library() -> None:
    assert "nvmath" not in str(getattr(lt, "__dict__", {}).get("nvmath", ""))
    found = lt._import.__wrapped__()
    assert isinstance(found, str) or hasattr(found, "matmul")


def test_variations_are_new_and_accepted(lt_library: FakeLt) -> None:
    p = PRODUCTS["1x128 x 1x128"]
    base = lt.candidates(0, p)
    found = lt.variations(0, p, base)
    algos = {c.algo for c in found}
    assert len(algos) == len(found) > 20
    assert not algos & {c.algo for c in base}
    fields = {
        tuple(lt.configuration(c.algo)[k] for k in ("cta_swizzling", "custom_option"))
        for c in found
    }
    assert (1, 7) in fields


def test_what_is_shipped_is_well_formed(lt_library: FakeLt) -> None:
    for where, table in choices.shipped().items():
        assert ", cuBLASLt " in where
        for key, text in table.items():
            assert len(choices.unpacked(text)) == 64
            assert choices.packed(choices.unpacked(text)) == text
            extents = key.split()[0].split("x")
            assert len(extents) == 3
            assert all(int(n) > 0 for n in extents)


def test_a_measured_algorithm_is_used_where_it_was_measured(
    lt_library: FakeLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = product()
    where = choices.place(0)
    assert where == "Stand-in, cuBLASLt 130100"
    tables = {where: {p.key: "02"}, "another device, cuBLASLt 130100": {p.key: "03"}}
    monkeypatch.setattr(choices, "shipped", lambda: tables)
    assert choices.choose(0, p).algo[0] == 2
    TABLE.add(where, {p.key: "03"})  # what was measured here comes first
    assert choices.choose(0, p).algo[0] == 3
    TABLE.add(where, {p.key: "09"})  # and what this library does not take is passed over
    assert choices.choose(0, p).algo[0] == 2
    assert choices.choose(0, product(n=64)).algo[0] == 1
    assert choices.choose(0, product(a=E5M2, b=E5M2, scales=TENSOR)) is None


@pytest.mark.parametrize("name", [n for n in PRODUCTS if "row" not in n])
def test_a_trial_runs_every_candidate(lt_library: FakeLt, name: str) -> None:
    trial = choices.Trial(0, PRODUCTS[name])
    names = trial.candidates()
    assert (len(names) > 3) is ("128" in name)
    run = trial.start()
    for candidate in names[:4]:
        run(candidate)()
    assert [c["algo"] for c in lt_library.calls][:3] == [1, 2, 3]
