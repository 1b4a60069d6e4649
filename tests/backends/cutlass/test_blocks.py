"""Products of MXFP8 and NVFP4 records for sm_100: which plans take them, and that they compute what the reference does.

The kernels were compiled and looked at (test_compile.py) and not run: here their reference runs in their place.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import recipe
from te_ops.backends.cutlass import (
    blocks,
    choices,
    gemm,
    kernels,
    limits,
    manifest,
    selftest,
    trial,
)
from te_ops.backends.cutlass.reference import reference
from te_ops.backends.cutlass.spec import Epilogue, GemmSpec, Tiling
from te_ops.testing import check_kernel
from tests.backends.cuda import emulator
from tests.backends.cutlass import standin

needs_compiler = pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")

PLAIN = Epilogue(store="bf16")
MX = GemmSpec("e4m3", "e4m3", PLAIN, Tiling(256, 256), blocks=32)
NV = GemmSpec("e2m1", "e2m1", PLAIN, Tiling(256, 256), scaled=True, blocks=16)
RECIPES: dict[str, te.Recipe] = {
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8 hybrid": recipe.MXFP8BlockScaling(fp8_format=recipe.Format.HYBRID),
    "mxfp8 2d": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "nvfp4 4over6": recipe.NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True),
}


# -- what is made


@pytest.mark.parametrize("spec", [MX, NV, replace(MX, a="e5m2", a_major="mn", b_major="mn")])
def test_for_sm_100_only(spec: GemmSpec) -> None:
    assert limits.refuse(spec, "sm_100a") is None
    assert "tensor cores of sm_100" in str(limits.refuse(spec))
    offered = limits.tilings(spec)
    assert {limits.refuse(replace(spec, tiling=t), "sm_100a") for t in offered} == {None}
    assert GemmSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert len({s.key for s in (spec, replace(spec, blocks=0), MX, NV)}) >= 3


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (replace(MX, blocks=64), "MXFP8 has 32, NVFP4 16"),
        (replace(MX, a="bf16"), "blocks of 32 are of e4m3 and e5m2, not bf16 and e4m3"),
        (replace(MX, blocks=16), "blocks of 16 are of e2m1"),
        (replace(NV, blocks=32, scaled=False), "not e2m1 and e2m1"),
        (replace(NV, b_major="mn"), "E2M1 operands have to be contiguous along K"),
        (replace(NV, scaled=False), "a scale of the tensor"),
        (replace(MX, scaled=True), "MXFP8 ones have none"),
        (replace(MX, tiling=Tiling(128, 192)), "tile 128x192 is not made"),
        (replace(MX, tiling=Tiling(128, 128, pingpong=True)), "is not made"),
        (replace(MX, epilogue=Epilogue(store="bf16", sums=True)), "128 rows"),
        (replace(MX, epilogue=Epilogue()), "nothing is written"),
        (GemmSpec("e2m1", "e2m1", PLAIN), "both FP8, both BF16 or both FP16"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_rule(spec: GemmSpec, why: str) -> None:
    assert why in str(limits.refuse(spec, "sm_100a"))


def test_sums_are_offered_with_small_tiles() -> None:
    spec = replace(MX, epilogue=Epilogue(store="bf16", sums=True))
    assert {t.m for t in limits.tilings(spec)} == {128}


def test_the_scales_are_the_last_arguments() -> None:
    got: list[tuple[Any, ...]] = []
    run = gemm.caller(NV, lambda *args: got.append(args), (66,))
    one, two = torch.ones(1), torch.ones(1)
    run("a", "b", scale_a=one, scale_b=two, y="y", blocks_a="sa", blocks_b="sb")
    words = (one.data_ptr(), two.data_ptr())
    assert got[0] == ("a", "b", "y", None, words, (66,), None, "sa", "sb")


def test_the_manifest_has_them_for_sm_100() -> None:
    hopper, blackwell = (manifest.rows(["llama-8b"], arch=arch) for arch in manifest.ARCHES)
    assert not any(spec.blocks for spec in hopper.values())
    kinds = {name.split(" [")[0] for name, spec in blackwell.items() if spec.blocks}
    assert {
        "e4m3*e4m3 1x32 pair->1 acc:bf16 y:bf16",
        "e4m3*e4m3 1x32 kmn 1->2 tiles:bf16 y:bf16",
        "e5m2*e4m3 1x32 mnmn plain y+=fp32",
        "e2m1*e2m1 1x16 pair->1 acc:bf16 y:bf16",
        "e2m1*e2m1 1x16 plain y+=fp32",
    } <= kinds
    assert set(selftest.BLOCK_KINDS.values()) <= set(blackwell.values())


# -- what plans take


def mlp() -> te.Sequential:
    return te.Sequential(
        te.RMSNorm(64), te.Linear(64, 192, bias=False), te.SwiGLU(), te.Linear(96, 64)
    )


def planned(
    model: te.Op, made: te.Recipe, patch: pytest.MonkeyPatch, rows: int = 32, **named: Any
) -> te.Plan:
    with standin.hopper(patch, emulated=False, **{"arch": "sm_100", **named}):
        x = torch.zeros(rows, 64, dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(recipe=made):
            return model.plan(x)


def products(plan: te.Plan) -> dict[str, list[list[str]]]:
    """The nodes of steps with a gemm, by the kernel's library."""
    found: dict[str, list[list[str]]] = {"cutlass": [], "cublas": []}
    for segment in plan.to_dict()["segments"]:
        for each in (*segment["forward"], *segment["backward"]):
            nodes = [n.partition("(")[0] for n in each["nodes"]]
            if nodes[0].startswith("gemm"):
                found[each["kernel"].partition(".")[0]].append(nodes)
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_every_product_of_a_step_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(mlp().bfloat16(), RECIPES[name], monkeypatch)
    found = products(plan)
    assert not found["cublas"]
    assert "emulated" not in plan.explain()
    assert ["gemm_nt", "swiglu"] in found["cutlass"]
    assert ["gemm_nn", "dswiglu"] in found["cutlass"]
    assert ["gemm_nt", "bias"] in found["cutlass"]
    assert found["cutlass"].count(["gemm_tn"]) == 2


def test_what_te_tune_makes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands for a measurement, of formats that round at random too."""
    offered: list[Any] = []
    monkeypatch.setattr(kernels, "collecting", lambda: True)
    monkeypatch.setattr(kernels, "offer", offered.append)
    planned(mlp().bfloat16(), RECIPES["nvfp4"], monkeypatch)
    assert offered
    for each in offered:
        for v in each.call.reads:
            assert trial.operand(each.call.spec(v), torch.device("cpu")) is not None


def reasons(plan: te.Plan) -> str:
    return "\n".join(n.reason for n in plan.notes if n.kernel.startswith("cutlass."))


@pytest.mark.parametrize(
    ("made", "named", "words"),
    [
        (RECIPES["mxfp8"], {"mode": "measured"}, "not measured for this shape class"),
        (RECIPES["mxfp8"], {"mode": "off"}, "TE_OPS_CUTLASS is off"),
        (RECIPES["mxfp8"], {"arch": "sm_90"}, "one scale a tensor, not mxfp8 e4m3"),
        (RECIPES["nvfp4"], {"rows": 16}, "E2M1 is contracted over multiples of 32 rows"),
        (recipe.NVFP4BlockScaling(row_scaled_activation=True), {}, "not one a row"),
        (recipe.DelayedScaling(), {}, "only products whose blocks have scales"),
    ],
    ids=["measured", "off", "hopper", "rows", "row-scaled", "one scale"],
)
def test_reasons(
    made: te.Recipe, named: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words in reasons(planned(mlp().bfloat16(), made, monkeypatch, **named))


def test_a_transform_of_one_operand_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(role: te.Role) -> te.Quantizer:
        return te.NVFP4Quantizer(with_rht=role.is_grad)

    plan = planned(mlp().bfloat16(), recipe.CustomRecipe(qfactory=of), monkeypatch)
    assert "one operand went through the Hadamard transform" in reasons(plan)


def test_two_formats_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(role: te.Role) -> te.Quantizer:
        return te.NVFP4Quantizer() if role.operand == "weight" else te.MXFP8Quantizer()

    plan = planned(mlp().bfloat16(), recipe.CustomRecipe(qfactory=of), monkeypatch)
    assert "of one format" in reasons(plan)


@pytest.mark.parametrize("width", [48, 72])
def test_widths_that_the_copies_do_not_take(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """K of E2M1 is a multiple of 32, that of FP8 of 16."""
    model = te.Sequential(te.Linear(64, width), te.Linear(width, 64)).bfloat16()
    told = reasons(planned(model, RECIPES["nvfp4"], monkeypatch))
    assert f"K = {width} is not a multiple of 32" in told
    told = reasons(planned(model, RECIPES["mxfp8"], monkeypatch))
    assert (f"K = {width} is not a multiple of 16" in told) is bool(width % 16)


# -- what it computes


def step(model: te.Op, made: te.Recipe) -> list[torch.Tensor]:
    """Results and gradients of a step."""
    model = copy.deepcopy(model)
    torch.manual_seed(3)
    x = torch.randn(2, 32, 64).bfloat16().requires_grad_()
    with te.autocast(recipe=made):
        y = model(x)
    y.backward(torch.randn(y.shape).bfloat16())
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@needs_compiler
@pytest.mark.parametrize("name", RECIPES)
def test_products_of_the_same_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, dgrad and wgrad of one layer, whose operands are the same in both: sums differ in their order alone."""
    torch.manual_seed(0)
    model = te.Linear(64, 96).bfloat16()
    theirs = step(model, RECIPES[name])
    with standin.hopper(monkeypatch, arch="sm_100"):
        ours = step(model, RECIPES[name])
        assert len(standin.SPECS) == 3
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b.float()).norm() <= 2e-3 * b.float().norm()


@needs_compiler
@pytest.mark.parametrize("name", RECIPES)
def test_a_training_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = mlp().bfloat16()
    theirs = step(model, RECIPES[name])
    with standin.hopper(monkeypatch, arch="sm_100"):
        ours = step(model, RECIPES[name])
        taken = {s.epilogue.acc_pair for s in standin.SPECS if s.blocks}
    assert taken == {True, False}
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        # A value that is rounded otherwise may move to the next code, which in E2M1 is up to a third away.
        limit = 0.1 if name.startswith("nvfp4") else 3e-2
        assert (a.float() - b.float()).norm() <= limit * b.float().norm()


@needs_compiler
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_kernels_equal_the_reference_of_their_group(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standin.hopper(monkeypatch, arch="sm_100"):
        assert check_kernel(
            "cutlass.gemm_epilogue", mlp().bfloat16(), (32, 64), rows=(32, 64, 0),
            dtypes=(torch.bfloat16,), recipes=[RECIPES[name]], device="cpu",
        )  # fmt: skip


@needs_compiler
def test_a_gradient_is_added_to_main_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = te.Sequential(te.Linear(64, 32, bias=False, accumulate_into_main_grad=True)).bfloat16()
    weight, x = model[0].weight, torch.randn(32, 64).bfloat16()
    weight.main_grad = torch.ones(32, 64)
    with standin.hopper(monkeypatch, arch="sm_100"), te.autocast(recipe=RECIPES["mxfp8"]):
        model(x).sum().backward()
        assert standin.SPECS[-1].epilogue.accumulate
        assert standin.SPECS[-1].blocks == 32
    wanted = 1 + x.float().sum(0).expand(32, 64)
    assert torch.allclose(weight.main_grad, wanted, rtol=5e-2, atol=0.2)


# -- the test that runs before the first kernel is used on a device


@pytest.mark.parametrize("name", selftest.BLOCK_KINDS)
def test_the_self_test_sees_scales_at_wrong_places(name: str) -> None:
    spec = selftest.BLOCK_KINDS[name]

    def right(a: Any, b: Any, *, blocks_a: Any, blocks_b: Any, y: Any, **scales: Any) -> None:
        given = tuple(scales.values()) or None
        fn = selftest._GATE if spec.epilogue.function else None
        made = reference(spec, fn, a, b, scales=given, blocks=(blocks_a, blocks_b))  # type: ignore[arg-type]
        y.copy_(made.y)

    def wrong(a: Any, b: Any, *, blocks_a: Any, **named: Any) -> None:
        right(a, b, blocks_a=blocks_a.transpose(2, 3).reshape(blocks_a.shape), **named)

    def halves(a: Any, b: Any, *, blocks_b: Any, **named: Any) -> None:
        """Those of b in natural order, where pairs are wanted, or the other way round."""
        flat = blocks.unswizzled(blocks_b, len(b), 160 // spec.blocks).view(torch.uint8)
        turned = flat.view(2, -1, flat.shape[1]).transpose(0, 1).reshape(flat.shape)
        right(a, b, blocks_b=blocks.swizzled(turned.view(blocks_b.dtype)), **named)

    assert selftest.check(spec, right, torch.device("cpu")) is None
    assert selftest.check(spec, halves, torch.device("cpu")) == "y is wrong"
    assert selftest.check(spec, wrong, torch.device("cpu")) == "y is wrong"


def test_it_runs_them_on_sm_100_alone() -> None:
    others = {name for name, spec in selftest.KINDS.items() if not spec.tiling.apart}
    assert set(selftest.kinds("sm_100")) == {*others, *selftest.BLOCK_KINDS}
    assert selftest.kinds("sm_90") == selftest.KINDS


def test_kinds_are_filed_apart() -> None:
    names = {choices.kind(s) for s in (MX, NV, replace(MX, blocks=0, scaled=True))}
    assert len(names) == 3
