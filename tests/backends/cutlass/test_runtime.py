"""When a compiled GEMM begins to be used: modes, step boundaries, ranks, failures."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.backends.cutlass import cache, ranks, runtime, selftest
from te_ops.backends.cutlass.ranks import Vote
from te_ops.backends.cutlass.runtime import Kernels
from te_ops.context import RECORDING
from te_ops.errors import PlanError
from te_ops.registry import REGISTRY, Call, Kernel
from tests.backends.cutlass.fake import OTHER, PLAIN, Compiler, Pool

ARCH, CPU = "sm_90", torch.device("cpu")


@dataclass
class World:
    """The kernels of a process, its compiler, and another process on the same machine."""

    kernels: Kernels
    compiler: Compiler
    pool: Pool
    another: Callable[[], Kernels]

    def asked(self, spec: Any = PLAIN) -> str | None:
        return self.kernels.refuse(spec, ARCH, CPU)

    def compiled(self) -> None:
        self.compiler.go.set()
        self.pool.join()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """In mode "async", with a self-test that has passed."""
    folder = tmp_path / "cutlass"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", str(folder))
    monkeypatch.setenv("TE_OPS_AOT_DIR", "off")
    monkeypatch.delenv("TE_OPS_JIT", raising=False)
    compiler = Compiler()
    pool = Pool(compiler, os.getpid())
    monkeypatch.setattr(runtime, "compiler", lambda *_: compiler)
    monkeypatch.setattr(runtime, "prepare", lambda: None)
    monkeypatch.setattr(runtime, "Pool", lambda arch, most: pool)
    monkeypatch.setattr(selftest, "KINDS", {})
    monkeypatch.setattr(REGISTRY, "waiting", {})

    def process() -> Kernels:
        made = Kernels()
        monkeypatch.setattr(runtime, "KERNELS", made)
        return made

    yield World(process(), compiler, pool, process)
    compiler.go.set()
    pool.join()


# -- modes


def test_async_compiles_beside_and_takes_effect_at_a_boundary(world: World) -> None:
    world.compiler.go.clear()
    assert "is being compiled in the background" in str(world.asked())
    assert "is being compiled" in str(world.asked())  # and no second time
    assert not world.kernels.settle()
    assert world.kernels.boundary() == 0
    world.compiled()
    assert world.asked() is not None, "only a boundary changes what plans get"
    assert world.kernels.boundary() == 1
    assert world.kernels.boundary() == 0
    assert world.asked() is None
    assert world.kernels.run(PLAIN, ARCH)() == PLAIN.key
    assert world.compiler.made == world.compiler.loaded == [PLAIN]


def test_sync_waits_and_the_plan_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_OPS_JIT", "sync")
    assert world.asked() is not None
    assert world.asked(OTHER) is not None  # both compile at once
    assert world.kernels.settle()
    assert world.asked() is world.asked(OTHER) is None
    assert not world.kernels.settle()
    assert set(world.compiler.made) == {PLAIN, OTHER}


def test_off_takes_what_is_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.asked()
    world.compiled()
    monkeypatch.setenv("TE_OPS_JIT", "off")
    other = world.another()
    assert other.refuse(PLAIN, ARCH, CPU) is None
    assert "TE_OPS_JIT is off" in str(other.refuse(OTHER, ARCH, CPU))
    assert other.boundary() == 0
    assert other.wait(other.unused()) == 0, "there is nothing to wait for"
    assert world.compiler.made == [PLAIN]


WRONG = {
    "JIT": ("maybe", "TE_OPS_JIT is one of async, sync, off, got 'maybe'"),
    "JIT_WORKERS": ("0", "TE_OPS_JIT_WORKERS is a whole number from 1 on"),
    "AOT_DIR": ("/nowhere", "TE_OPS_AOT_DIR names /nowhere, which is no folder"),
    "CUTLASS_CACHE": (__file__, "set TE_OPS_CUTLASS_CACHE to a folder of your own, or to off"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_reported_and_nothing_waits_for_its_kernel(
    name: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, words = WRONG[name]
    monkeypatch.setenv(f"TE_OPS_{name}", value)
    with pytest.warns(RuntimeWarning, match=words):
        first = world.asked()
    assert words in str(first)
    assert world.asked() == first, "the reason stays, it is not being compiled"
    token = RECORDING.set(True)
    try:
        assert not world.kernels.settle()
        assert world.kernels.boundary() == 0
    finally:
        RECORDING.reset(token)


def test_what_lies_on_disk_is_used_at_once(world: World) -> None:
    world.asked()
    world.compiled()
    assert world.another().refuse(PLAIN, ARCH, CPU) is None
    assert world.compiler.made == [PLAIN]


def test_without_a_cache_kernels_live_as_long_as_the_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_OPS_CUTLASS_CACHE", "off")
    monkeypatch.setenv("TE_OPS_JIT", "sync")
    world.asked()
    assert world.kernels.settle()
    assert world.asked() is None
    assert world.another().refuse(PLAIN, ARCH, CPU) is not None


def test_a_cache_for_reading_only_serves_and_the_rest_lives_as_long_as_the_process(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_OPS_JIT", "sync")
    world.asked()
    world.kernels.settle()
    folder = Path(os.environ["TE_OPS_CUTLASS_CACHE"])
    before = set(folder.iterdir())
    other = world.another()
    monkeypatch.setattr(runtime.os, "access", lambda path, mode: Path(path) != folder)
    assert other.refuse(PLAIN, ARCH, CPU) is None
    other.refuse(OTHER, ARCH, CPU)
    assert other.settle()
    assert set(folder.iterdir()) == before


def test_a_boundary_waits_for_the_rest_but_not_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change of what plans get costs new plans."""
    world.asked()
    world.compiled()
    world.compiler.go.clear()
    world.asked(OTHER)
    assert world.kernels.boundary() == 0
    monkeypatch.setattr(runtime, "BATCH", -1.0)
    assert world.kernels.boundary() == 1
    assert world.asked() is None
    assert world.asked(OTHER) is not None
    monkeypatch.setattr(runtime, "BATCH", 30.0)
    world.kernels.entries[PLAIN.key, ARCH].since = 0.0
    third = replace(PLAIN, a="fp16", b="fp16")
    world.asked(third)
    assert world.kernels.boundary() == 0, "what is used already is not late"


# -- who marks a boundary


def test_the_step_of_an_optimizer_is_a_boundary(world: World) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    world.asked()
    world.compiled()
    version = REGISTRY.version
    optimizer.step()
    assert REGISTRY.version == version + 1
    assert world.asked() is None
    optimizer.step()
    assert REGISTRY.version == version + 1


def test_te_step_is_a_boundary(world: World) -> None:
    world.asked()
    world.compiled()
    version = REGISTRY.version
    assert te.step() == 1
    assert REGISTRY.version == version + 1
    assert te.step() == 0
    assert world.asked() is None


@pytest.mark.parametrize("trained", [False, True])
def test_a_call_is_a_boundary_of_a_program_that_only_infers(world: World, trained: bool) -> None:
    with torch.set_grad_enabled(trained):
        world.asked()
    world.compiled()
    with torch.no_grad():
        version = REGISTRY.version
        REGISTRY.prepare("cpu")  # what every call does first
        assert (REGISTRY.version > version) is not trained
        assert (world.asked() is None) is not trained
        assert not REGISTRY.waiting


def test_a_call_with_gradients_is_no_boundary(world: World) -> None:
    with torch.no_grad():
        world.asked()
    world.compiled()
    REGISTRY.prepare("cpu")
    assert world.asked() is not None
    with torch.no_grad():
        assert world.kernels.boundary() == 1


def test_a_plan_that_prepares_a_graph_waits(world: World) -> None:
    token = RECORDING.set(True)
    try:
        assert world.asked() is not None
        assert world.kernels.settle()
        assert world.asked() is None
    finally:
        RECORDING.reset(token)


def test_a_warm_up_waits_for_what_was_asked_before(world: World) -> None:
    world.compiler.go.clear()
    world.asked()
    version = REGISTRY.version
    threading.Timer(0.1, world.compiler.go.set).start()
    te.warmup(te.Sequential(te.GELU()), torch.randn(2, 2))
    assert REGISTRY.version == version + 1
    assert world.asked() is None


def test_nothing_is_compiled_or_loaded_while_a_graph_is_captured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.asked()
    world.compiled()
    monkeypatch.setattr(runtime, "capturing", lambda: True)
    monkeypatch.setenv("TE_OPS_JIT", "sync")
    assert "captured" in str(world.asked(OTHER))
    assert not world.kernels.settle()
    assert world.kernels.boundary() == 0
    assert world.compiler.loaded == []
    assert world.compiler.made == [PLAIN]
    monkeypatch.setattr(runtime, "capturing", lambda: False)
    assert world.asked(OTHER) is not None
    assert world.kernels.settle()


# -- plans


def test_plans_change_at_boundaries_only(world: World) -> None:
    """Forward, recompute and backward of one call use one plan."""

    def refuse(call: Call) -> str | None:
        return world.asked()

    def bind(call: Call) -> Any:
        run = world.kernels.run(PLAIN, ARCH)
        return lambda a, b: (run(), torch.zeros(a.shape[0], b.shape[0]))[1]

    fused = Kernel("gemm", "fused.gemm", bind, refuse=refuse, priority=99)
    model, x = te.Sequential(te.Linear(16, 16, bias=False)), torch.randn(4, 16)
    world.compiler.go.clear()
    with REGISTRY.temporary(fused):
        assert "is being compiled in the background" in model.explain(x)
        first = model.plan(x)
        world.compiled()
        assert model.plan(x) is first
        assert te.step() == 1
        assert "fused.gemm" in model.explain(x)
        assert model(x).abs().sum() == 0


def test_a_plan_of_mode_sync_has_its_kernels(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_OPS_JIT", "sync")
    asked = []

    def refuse(call: Call) -> str | None:
        asked.append(call)
        return world.asked()

    fused = Kernel("gemm", "fused.gemm", lambda call: lambda a, b: a, refuse=refuse, priority=99)
    model, x = te.Sequential(te.Linear(16, 16, bias=False)), torch.randn(4, 16)
    with torch.no_grad(), REGISTRY.temporary(fused):
        assert "fused.gemm" in model.explain(x)
    assert len(asked) == 2


# -- what goes wrong


def test_failed_compilation_is_told_once_and_kept(world: World) -> None:
    world.compiler.error = PlanError("ptxas gives up")
    world.asked()
    world.compiled()
    with pytest.warns(RuntimeWarning, match="separate kernels .*: ptxas gives up"):
        assert world.kernels.boundary() == 0
    assert str(world.asked()) == "the fused kernel is not used: ptxas gives up"
    assert world.kernels.boundary() == 0
    with pytest.raises(PlanError, match="cannot be bound: the fused kernel is not used"):
        world.kernels.run(PLAIN, ARCH)
    with pytest.raises(PlanError, match="no plan asked for it"):
        world.kernels.run(OTHER, ARCH)


def test_object_that_does_not_load_is_not_used(world: World) -> None:
    world.asked()
    world.compiled()
    cache.find(PLAIN, ARCH).write_text("x")  # type: ignore[union-attr]  # changed behind our back
    with pytest.warns(RuntimeWarning, match="AssertionError"):
        assert world.kernels.boundary() == 0
    assert world.another().refuse(PLAIN, ARCH, CPU) is not None  # and compiles again
    world.compiled()


def test_self_test_that_fails_takes_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "KINDS", {"BF16": OTHER})
    monkeypatch.setattr(selftest, "check", lambda *_: "y is wrong")
    monkeypatch.setenv("TE_OPS_JIT", "sync")
    world.asked()
    with pytest.warns(RuntimeWarning, match="the self-test of compiled GEMMs failed"):
        assert not world.kernels.settle()
    assert "the self-test of compiled GEMMs failed (BF16: y is wrong)" in str(world.asked())
    (verdict,) = Path(os.environ["TE_OPS_CUTLASS_CACHE"]).glob("selftest-*.json")
    assert '"passed": false' in verdict.read_text()
    other = world.another()  # tries again, with the kernels that are there
    with pytest.warns(RuntimeWarning, match="y is wrong"):
        assert "BF16: y is wrong" in str(other.refuse(PLAIN, ARCH, CPU))


def test_self_test_runs_once_a_machine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(selftest, "KINDS", {"BF16": OTHER})
    monkeypatch.setattr(selftest, "check", lambda *_: ran.append(1))
    world.asked()
    world.compiled()
    world.compiler.go.clear()
    assert world.kernels.boundary() == 0, "its kernels are compiled first"
    assert "next step boundary" in str(world.asked())
    world.compiled()
    assert world.kernels.boundary() == 1
    assert world.asked() is None
    assert world.another().refuse(PLAIN, ARCH, CPU) is None
    assert ran == [1]


def test_a_verdict_that_cannot_be_kept_counts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.asked()
    world.compiled()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(selftest, "put", full)
    monkeypatch.setattr(selftest, "KINDS", {"BF16": PLAIN})
    monkeypatch.setattr(selftest, "check", lambda *_: None)
    assert world.another().refuse(PLAIN, ARCH, CPU) is None


def test_without_compiler_and_verdict_nothing_is_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.asked()
    world.compiled()
    monkeypatch.setattr(selftest, "KINDS", {"BF16": OTHER})
    monkeypatch.setenv("TE_OPS_JIT", "off")
    with pytest.warns(RuntimeWarning, match="the self-test are not compiled"):
        assert "TE_OPS_JIT is off" in str(world.another().refuse(PLAIN, ARCH, CPU))


# -- ranks


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Vote]]:
    """This process is rank 0 of two; the test says what rank 1 votes."""
    votes: list[dict[str, Vote]] = [{}]
    monkeypatch.setattr(ranks, "alone", lambda: False)
    monkeypatch.setattr(ranks.Group, "due", lambda self: True)
    monkeypatch.setattr(
        ranks.Group,
        "decide",
        lambda self, mine: {k: ranks._together(k, [mine, votes[0]]) for k in mine},
    )
    return votes


def test_ranks_begin_together(world: World, group: list[dict[str, Vote]]) -> None:
    world.kernels.marked = True
    world.asked()
    assert not world.kernels.settle()
    world.compiled()
    key = cache.key_of(PLAIN, ARCH)
    group[0] = {key: Vote(False)}
    assert te.step() == 0
    assert world.kernels.boundary() == 0, "an optimizer's step is no place to agree"
    assert world.asked() is not None
    group[0] = {key: Vote(True)}
    assert te.step() == 1
    assert world.asked() is None


def test_a_rank_that_never_asked_does_not_hold_others_up(
    world: World, group: list[dict[str, Vote]]
) -> None:
    world.kernels.marked = True
    world.asked()
    world.compiled()
    assert te.step() == 1


def test_failure_on_a_rank_is_one_on_all(world: World, group: list[dict[str, Vote]]) -> None:
    world.kernels.marked = True
    world.asked()
    world.compiled()
    group[0] = {cache.key_of(PLAIN, ARCH): Vote(False, "no memory")}
    assert te.step() == 0
    assert str(world.asked()).endswith("is not used: rank 1 has not got it: no memory")


def test_a_rank_that_cannot_load_says_so(world: World, group: list[dict[str, Vote]]) -> None:
    world.kernels.marked = True
    world.asked()
    world.compiled()
    cache.find(PLAIN, ARCH).write_text("x")  # type: ignore[union-attr]
    with pytest.warns(RuntimeWarning, match="AssertionError"):
        assert te.step() == 0
    assert "rank 0" not in str(world.asked())
    assert "AssertionError" in str(world.asked())


def test_without_marked_steps_plans_of_a_group_wait(
    world: World, group: list[dict[str, Vote]]
) -> None:
    world.asked()
    assert world.kernels.settle()
    assert world.asked() is None
    te.step()
    world.asked(OTHER)
    assert not world.kernels.settle()


def test_when_ranks_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: groups.append(backend))
    monkeypatch.setattr(
        torch.distributed.distributed_c10d, "_get_default_group", lambda: "the default"
    )
    one = ranks.Group()
    due = [step for step in range(1, 200) if one.due()]
    assert due == [*range(1, 33), 64, 96, 128, 160, 192]
    assert groups == ["gloo"]


# -- the functions that plans use


def test_needs_a_device() -> None:
    assert "CUDA device" in str(runtime.refuse(PLAIN, ARCH, CPU))
    with pytest.raises(PlanError, match="no plan asked for it"):
        runtime.kernel(PLAIN, "sm_77", CPU)


def test_collecting_gives_all_and_compiles_nothing(world: World) -> None:
    with runtime.collecting() as found:
        assert runtime.missing() is None
        assert runtime.refuse(PLAIN, ARCH, CPU) is None
        run = runtime.kernel(PLAIN, ARCH, CPU)
    assert found == [(PLAIN, ARCH)]
    with pytest.raises(PlanError, match="cannot run"):
        run()
    assert world.kernels.entries == {}


def test_wait_compiles_several(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "capturing", lambda: False)
    monkeypatch.setattr(runtime, "missing", lambda: None)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(selftest, "device_name", lambda _: "one")
    monkeypatch.setattr(runtime, "_on", lambda _: contextlib.nullcontext())
    wrong = replace(PLAIN, a="fp16")
    made = world.compiler.compile_to

    def compile_to(spec: Any, path: Path) -> None:
        if spec == wrong:
            raise PlanError("no")
        made(spec, path)

    monkeypatch.setattr(world.compiler, "compile_to", compile_to)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = runtime.wait([PLAIN, OTHER, wrong], ARCH, device)
    assert found == {PLAIN: None, OTHER: None, wrong: "the fused kernel is not used: no"}
    assert [e.spec for e in runtime.pending()] == [wrong]


def test_threads_ask_for_one_kernel(world: World) -> None:
    world.compiler.go.clear()
    threads = [threading.Thread(target=world.asked) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    world.compiled()
    assert world.compiler.made == [PLAIN]
