"""Where fused GEMMs are used: modes, the shipped table, what te.tune measured, and row counts of one plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import recipe
from te_ops.backends.cutlass import choices, kernels, limits
from te_ops.backends.cutlass.choices import Chooser, kind, power, text_of, tiling_of
from te_ops.backends.cutlass.match import Extents
from te_ops.backends.cutlass.spec import GemmSpec, Tiling
from te_ops.errors import Error, PlanError
from te_ops.runtime import tune as tuning
from tests.backends.cuda import emulator
from tests.backends.cutlass import standin

needs_compiler = pytest.mark.skipif(emulator.compiler_path() is None, reason="needs g++")
SPEC = GemmSpec("bf16", "bf16")
FIRST, SECOND = standin.Limits.TILINGS


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_OPS_TUNE_CACHE", "off")
    monkeypatch.setattr(tuning, "TABLE", tuning.Table())
    monkeypatch.setattr(choices, "TABLE", tuning.TABLE)
    monkeypatch.setattr(choices, "limits", standin.Limits)


def table(monkeypatch: pytest.MonkeyPatch, classes: dict[str, str], spec: GemmSpec = SPEC) -> None:
    monkeypatch.setattr(choices, "shipped", lambda: {"sm_90": {kind(spec): classes}})


def chooser(n: int = 4096, k: int = 1024) -> Chooser:
    return Chooser(SPEC, Extents(1, n, k), "sm_90", "here")


def test_tilings_are_text_and_back() -> None:
    for tiling in (
        Tiling(),
        Tiling(128, 192, 2, 1, pingpong=True),
        Tiling(256, 128, 1, 2),
        Tiling(apart=True),
    ):
        assert tiling_of(text_of(tiling)) == tiling


def test_the_shipped_table_names_what_is_made() -> None:
    for arch, kinds in choices.shipped().items():
        assert arch.startswith("sm_")
        for classes in kinds.values():
            for shape, text in classes.items():
                assert all(int(n) == power(int(n)) for n in shape.split("x"))
                gain, _, tiling = text.partition(" ")
                assert float(gain) > 0
                assert not tiling or limits.refuse(GemmSpec("bf16", "bf16", tiling=tiling_of(tiling))) is None or (
                    "nothing is written" in str(limits.refuse(GemmSpec("bf16", "bf16", tiling=tiling_of(tiling))))
                )  # fmt: skip


def test_row_counts_go_by_the_largest_class_below_them(monkeypatch: pytest.MonkeyPatch) -> None:
    table(monkeypatch, {
        "2048x4096x1024": f"0.95 {text_of(FIRST)}",
        "8192x4096x1024": f"1.10 {text_of(SECOND)}",
    })  # fmt: skip
    choose = chooser()
    assert choose.at(8192).tiling == choose.at(100000).tiling == SECOND
    assert choose.at(4096).tiling is None
    assert "measured 0.95 times as fast as cuBLASLt" in choose.at(4096).why
    assert "te.tune(model, x) measures it" in choose.at(100).why
    assert choose.fused() == {SECOND: 8192}
    assert not chooser(n=8192).fused()
    assert chooser(n=4096 + 16).fused()  # the same class


def test_a_contraction_over_rows_goes_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    table(monkeypatch, {"1024x4096x8192": f"1.10 {text_of(SECOND)}"})
    choose = Chooser(SPEC, Extents(1024, 4096, 64, contracts=True), "sm_90", "here")
    assert choose.at(10000).tiling == SECOND
    assert choose.at(4096).tiling is None
    assert choose.fused() == {SECOND: 8192}


def test_explain_says_why_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {}
    monkeypatch.setattr(choices, "shipped", lambda: {"sm_90": Everything()})
    model = te.Sequential(te.Linear(64, 96), te.GELU()).bfloat16()
    for rows in (16, 48):  # one plan serves both: each makes its own here
        with standin.hopper(monkeypatch, "measured", emulated=False):
            made = model.explain(torch.zeros(rows, 64, dtype=torch.bfloat16))
        texts[rows] = " ".join(made.split())
    assert "cutlass.gemm_epilogue: measured 1.50 times as fast as cuBLASLt" in texts[48]
    assert "separate kernels at 16 rows" in texts[16]
    assert "fused from 32 on" in texts[16]


def test_less_than_three_percent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table(monkeypatch, {"1x4096x1024": f"1.02 {text_of(FIRST)}"})
    assert not chooser().fused()
    table(monkeypatch, {"1x4096x1024": f"1.03 {text_of(FIRST)}"})
    assert chooser().fused()


def test_what_tune_measured_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    table(monkeypatch, {"8192x4096x1024": f"1.10 {text_of(SECOND)}"})
    key = choices.tuned_key(kind(SPEC), Extents(8200, 4096, 1024))
    tuning.TABLE.add("here", {key: choices.SEPARATE})
    assert chooser().at(9000).tiling is None
    assert "te.tune measured" in chooser().at(9000).why
    assert chooser(n=4096 + 16).at(9000).tiling == SECOND  # another problem
    tuning.TABLE.add("here", {key: text_of(FIRST)})
    assert chooser().at(9000).tiling == FIRST
    assert chooser().at(4000).tiling is None


def test_a_tiling_that_is_no_longer_made_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    table(monkeypatch, {"8192x4096x1024": "1.10 64x64 1x1 cooperative"})
    assert not chooser().fused()


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choices.mode() == "measured"
    monkeypatch.setenv("TE_OPS_CUTLASS", "off")
    assert "is off" in chooser().at(8192).why
    monkeypatch.setenv("TE_OPS_CUTLASS", "always")
    with pytest.raises(Error, match=r"TE_OPS_CUTLASS.*always"):
        choices.mode()
    with choices.forced("prefer"):
        assert chooser().at(1).tiling == FIRST
    with pytest.raises(PlanError, match="no mode"), choices.forced("always"):
        pass


def test_kinds_do_not_name_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured of GELU serves an activation of one's own."""
    kinds = []
    for activation in (te.GELU, te.SiLU):
        monkeypatch.setattr(kernels, "refuse", kernels.refuse)
        with pytest.MonkeyPatch.context() as patch, standin.hopper(patch, emulated=False):
            patch.setattr(standin.Runtime, "refuse", lambda spec, *_: kinds.append(kind(spec)))
            model = te.Sequential(te.Linear(64, 64), activation()).bfloat16()
            with te.autocast(recipe=recipe.DelayedScaling()):
                model.plan(torch.zeros(16, 64, dtype=torch.bfloat16, requires_grad=True))
    assert kinds[: len(kinds) // 2] == kinds[len(kinds) // 2 :]
    assert any("1->1 row:bf16 acc:bf16" in k for k in kinds)


# -- one plan, several row counts


@needs_compiler
def test_a_plan_runs_fused_where_it_pays_and_separate_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = te.Sequential(te.Linear(64, 96), te.GELU(), te.Linear(96, 64)).bfloat16()

    def step(rows: int) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        x = torch.linspace(-1, 1, rows * 64).view(rows, 64).bfloat16().requires_grad_()
        y = model(x)
        y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    wanted = {rows: step(rows) for rows in (16, 48, 128, 0)}
    with standin.hopper(monkeypatch, "measured"):
        monkeypatch.setattr(choices, "shipped", lambda: {"sm_90": Everything()})
        for rows, expected in wanted.items():
            standin.SPECS.clear()
            ours = step(rows)
            assert any(s.epilogue.function for s in standin.SPECS) == (rows >= 32), rows
            for a, b in zip(ours, expected, strict=True):
                assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm() + 1e-6


class Everything(dict[str, Any]):
    """A table in which every kind pays from 32 rows on."""

    def get(self, _: str, default: Any = None) -> Any:
        return _Classes()


class _Classes(dict[str, str]):
    def get(self, shape: str, default: Any = None) -> Any:
        return f"1.50 {text_of(FIRST)}" if "32x" in shape[:3] else default


# -- te.tune


@needs_compiler
def test_tune_measures_separate_kernels_and_every_tiling(monkeypatch: pytest.MonkeyPatch) -> None:
    model = te.Sequential(te.Linear(64, 96), te.GELU()).bfloat16()
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    seen: list[list[str]] = []

    def times(runs: list[Callable[[], None]], rounds: int) -> list[float]:
        for run in runs:
            run()
        seen.append([str(len(standin.SPECS))])
        return [100.0, 120.0, 90.0][: len(runs)]

    monkeypatch.setattr(tuning, "_times", times)
    with standin.hopper(monkeypatch, "measured"):
        report = te.tune(model, x, recipe=None)
        fused = [p for p in report.problems if "->" in p.key]
        assert fused
        assert {p.choice for p in fused} == {text_of(SECOND)}
        assert {p.candidates for p in fused} == {3}
        plan = model.plan(x)
    found = [s["kernel"] for s in json.loads(json.dumps(plan.to_dict()))["segments"][0]["forward"]]
    assert "cutlass.gemm_epilogue" in found


@needs_compiler
def test_tune_keeps_separate_kernels_unless_three_percent_are_won(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = te.Sequential(te.Linear(64, 96), te.GELU()).bfloat16()
    x = torch.randn(32, 64).bfloat16()
    monkeypatch.setattr(tuning, "_times", lambda runs, rounds: [100.0, 98.0, 99.0][: len(runs)])
    with standin.hopper(monkeypatch, "measured"):
        report = te.tune(model, x)
        assert {p.choice for p in report.problems} == {choices.SEPARATE}
        plan = model.plan(x)
    reasons = [n.reason for n in plan.notes if n.kernel == "cutlass.gemm_epilogue"]
    assert any("te.tune measured separate kernels" in r for r in reasons)
