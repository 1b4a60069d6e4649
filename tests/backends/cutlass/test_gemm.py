"""Which fused GEMMs there are, how they are tiled, and how a compiled one is called; nothing is compiled here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from te_ops.backends.cutlass import gemm, limits
from te_ops.backends.cutlass.spec import (
    Epilogue,
    GemmSpec,
    Load,
    Quantized,
    Rebuilt,
    Tiling,
    arguments,
)
from te_ops.errors import PlanError
from te_ops.pointwise import Fn, activations, lower, prelude, symbol

PLAIN = Epilogue(store="bf16")
BOTH = Quantized("e4m3", row=True, col=True)


def fused(fn: Fn, **named: Any) -> Epilogue:
    return Epilogue(symbol(fn), prelude("cutedsl", fast=True) + lower(fn, "cutedsl"), **named)


SWIGLU = fused(
    activations["swiglu"](),
    acc_pair=True,
    rounds_acc="bf16",
    acc_store="bf16",
    quantized=BOTH,
)
DSWIGLU = fused(
    activations["swiglu"]().grad(0),
    acc=1,
    loads=(Load("tile", "bf16", pair=True),),
    outs=2,
    quantized=BOTH,
    sums=True,
)
AGAIN = Rebuilt("swiglu", "def swiglu(pair): ...", (0,), "e4m3")
REBUILDS = replace(DSWIGLU, rebuilt=AGAIN)


def fp8(epilogue: Epilogue = PLAIN, **named: Any) -> GemmSpec:
    return GemmSpec("e4m3", "e4m3", epilogue, scaled=True, **named)


@pytest.mark.parametrize(
    "epilogue",
    [PLAIN, SWIGLU, DSWIGLU, REBUILDS],
    ids=["plain", "swiglu", "dswiglu", "dswiglu, rebuilt"],
)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "split"])
def test_every_tiling_that_is_offered_is_taken(epilogue: Epilogue, fast: bool) -> None:
    spec = fp8(epilogue, fast=fast)
    offered = limits.tilings(spec)
    assert offered
    assert len(set(offered)) == len(offered)
    assert {limits.refuse(replace(spec, tiling=tiling)) for tiling in offered} == {None}


def test_split_sums_are_not_offered_where_they_do_not_fit_the_registers() -> None:
    assert not any(t.pingpong or t.m == 256 for t in limits.tilings(fp8(fast=False)))
    why = limits.refuse(fp8(fast=False, tiling=Tiling(128, 128, pingpong=True)))
    assert "split accumulation" in str(why)
    assert limits.refuse(GemmSpec("bf16", "bf16", PLAIN, Tiling(pingpong=True), fast=False)) is None


def test_an_epilogue_apart_is_for_split_sums_and_what_is_read_again() -> None:
    apart = Tiling(128, 128, apart=True)
    assert limits.tilings(fp8(DSWIGLU, fast=False))[0] == apart
    assert apart not in limits.tilings(fp8(DSWIGLU))
    for other in (Tiling(128, 192, apart=True), Tiling(128, 128, pingpong=True, apart=True)):
        assert "128x128" in str(limits.refuse(fp8(tiling=other, fast=False)))
    assert "where sums are split" in str(limits.refuse(fp8(tiling=apart)))
    assert "one group of threads" in str(limits.refuse(fp8(tiling=apart, fast=False), "sm_100a"))


def test_wide_tiles_of_one_warp_group_are_for_lean_epilogues() -> None:
    wide = Tiling(128, 192, pingpong=True)
    assert wide in limits.tilings(fp8(SWIGLU))
    assert wide in limits.tilings(fp8(Epilogue(quantized=BOTH)))
    heavy = fp8(DSWIGLU, tiling=wide)
    assert wide not in limits.tilings(heavy)
    assert "registers" in str(limits.refuse(heavy))
    saved = Epilogue(acc_store="bf16", quantized=BOTH)
    assert wide not in limits.tilings(fp8(saved))
    assert wide in limits.tilings(GemmSpec("bf16", "bf16", saved))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (GemmSpec("bf16", "fp16", PLAIN), "both FP8, both BF16 or both FP16"),
        (GemmSpec("e4m3", "bf16", PLAIN), "both FP8"),
        (GemmSpec("fp32", "fp32", PLAIN), "both FP8"),
        (fp8(a_major="mn"), "contiguous along K"),
        (GemmSpec("bf16", "bf16", PLAIN, scaled=True), "scales belong to FP8"),
        (fp8(Epilogue()), "nothing is written"),
        (fp8(Epilogue(store="e4m3")), "store is one of"),
        (fp8(Epilogue(function="f", store="bf16")), "with its text"),
        (fp8(Epilogue(store="bf16", outs=2)), "comes of a function"),
        (fp8(Epilogue(store="bf16", acc_pair=True)), "takes a pair"),
        (fp8(Epilogue(store="bf16", loads=(Load("row", "bf16"),))), "function that reads them"),
        (fp8(replace(SWIGLU, outs=2)), "paired accumulator"),
        (fp8(replace(SWIGLU, sums=True)), "sums over a paired accumulator"),
        (fp8(replace(SWIGLU, acc_store="fp32")), "BF16 or FP16"),
        (fp8(replace(SWIGLU, loads=(Load("tile", "bf16"),))), "not tiles"),
        (fp8(replace(DSWIGLU, loads=(Load("tile", "bf16", pair=True),) * 2)), "more than 3 tiles"),
        (fp8(replace(DSWIGLU, loads=(Load("column", "bf16", pair=True),))), "no halves"),
        (fp8(replace(DSWIGLU, loads=(Load("tile", "e4m3", pair=True),))), "loads are one of"),
        (fp8(replace(DSWIGLU, acc=2)), "one of the function's inputs"),
        (fp8(replace(DSWIGLU, store="fp32", accumulate=True)), "one output of full width"),
        (fp8(Epilogue(quantized=Quantized("e4m3", False, False, False))), "nothing is written"),
        (fp8(Epilogue(quantized=Quantized("bf16"))), "E4M3 or E5M2"),
        (fp8(replace(REBUILDS, rebuilt=replace(AGAIN, format="bf16"))), "E4M3 or E5M2"),
        (fp8(replace(REBUILDS, rebuilt=replace(AGAIN, loads=(1,)))), "reads the epilogue's loads"),
        (fp8(replace(REBUILDS, quantized=None, store="bf16")), "rebuilt beside those of"),
        (fp8(replace(SWIGLU, rebuilt=replace(AGAIN, loads=()))), "rebuilt beside those of"),
        (fp8(REBUILDS, tiling=Tiling(128, 192)), "rebuilt by threads of its own"),
        (fp8(tiling=Tiling(96, 128)), "tile 96x128 is not made"),
        (fp8(tiling=Tiling(256, 128, pingpong=True)), "256x128 pingpong is not made"),
        (fp8(tiling=Tiling(128, 128, cluster_m=3)), "cluster of 3x1"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_rule(spec: GemmSpec, why: str) -> None:
    assert why in str(limits.refuse(spec))


def test_blackwell_has_rules_of_its_own() -> None:
    mixed = GemmSpec("e5m2", "e4m3", PLAIN, scaled=True)
    assert limits.refuse(mixed) is None
    assert "one format" in str(limits.refuse(mixed, "sm_100a"))
    assert "one group of threads" in str(
        limits.refuse(fp8(tiling=Tiling(pingpong=True)), "sm_100a")
    )
    assert limits.refuse(fp8(SWIGLU), "sm_100a") is None
    assert "no copy is rebuilt" in str(limits.refuse(fp8(REBUILDS), "sm_100a"))


def test_a_refused_spec_is_not_compiled(tmp_path: Any) -> None:
    with pytest.raises(PlanError, match="fused GEMM: FP8 operands have to be contiguous"):
        gemm.compile_to(fp8(a_major="mn"), "sm_90a", tmp_path / "kernel.o")


def called(spec: GemmSpec, **given: Any) -> tuple[Any, ...]:
    """What the compiled function gets."""
    got: list[tuple[Any, ...]] = []
    gemm.caller(spec, lambda *args: got.append(args), (66,))("a", "b", **given)
    return got[0]


def test_a_plain_product_has_its_result_as_main_output() -> None:
    one, two = torch.ones(1), torch.ones(1)
    got = called(fp8(), scale_a=one, scale_b=two, y="y")
    assert got == ("a", "b", "y", None, (one.data_ptr(), two.data_ptr()), (66,), None, None, None)
    assert called(GemmSpec("bf16", "bf16", Epilogue(acc_store="bf16")), acc="acc")[2:5] == (
        "acc",
        None,
        (),
    )


def test_halves_are_passed_twice_and_words_as_addresses() -> None:
    words = {n: torch.ones(1) for n in ("scale_a", "scale_b", "scale", "scale_inv", "amax")}
    at = {name: word.data_ptr() for name, word in words.items()}
    got = called(fp8(DSWIGLU), **words, loads=("z",), row="row", col="col", sums="sums")
    assert got[2] is None
    scales, copies = (at["scale_a"], at["scale_b"]), (at["amax"], at["scale"], at["scale_inv"])
    assert got[4] == (*scales, "z", "z", "row", "col", *copies, "sums", "sums")
    again = {n: torch.ones(1) for n in ("rebuilt_scale", "rebuilt_inv")}
    got = called(
        fp8(REBUILDS),
        **words,
        **again,
        loads=("z",),
        row="row",
        col="col",
        sums="sums",
        rebuilt="r",
    )
    assert got[4][-3:] == ("r", *(word.data_ptr() for word in again.values()))
    got = called(fp8(SWIGLU), **words, acc="acc", row="row", col="col")
    assert got[4] == (*scales, "acc", "acc", "row", "col", *copies)


def test_a_row_of_pairs_is_one_argument_of_a_paired_accumulator() -> None:
    biased = replace(
        SWIGLU, loads=(Load("row", "bf16", pair=True), Load("scalar", "fp32")), quantized=None
    )
    names = [name for name, _ in arguments(fp8(biased))]
    assert names == ["scale_a", "scale_b", "load0", "load1", "acc", "acc"]


def test_machine_code_is_found_inside_an_object() -> None:
    def elf(machine: int, rest: bytes) -> bytes:
        return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + rest

    cubin = elf(gemm.CUBIN, b"code")
    assert gemm.device_code(elf(62, b"host") + elf(62, b"") + cubin) == cubin
    with pytest.raises(PlanError, match="no CUDA code"):
        gemm.device_code(elf(62, b"host"))
