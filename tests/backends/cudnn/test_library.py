"""The frontend and its plans: what is missing, refusals, choices, handles, streams, capture and recordings."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch

from te_ops.backends.cudnn import launch, library, plans
from te_ops.backends.reference.kernels import bind_reference
from te_ops.errors import PlanError
from te_ops.runtime import tune as tuning
from te_ops.runtime.tape import recording
from te_ops.testing import assert_close
from tests.backends.cudnn.calls import call_of, run
from tests.backends.cudnn.fake import FakeCudnn
from tests.backends.cudnn.test_launch import GEN, bias, causal, one_query, qkv, tokens


def forward(xs: dict[str, torch.Tensor], **attrs: Any) -> tuple[Any, Any]:
    """A call, and its launch."""
    call = call_of(xs, writes=(0, 1), scale=0.25, **attrs)
    return call, launch.bind(call)


def test_nothing_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    library.missing.cache_clear()
    monkeypatch.setattr(library, "_import", lambda: "nvidia-cudnn-frontend cannot be imported: no")
    assert library.missing() == "nvidia-cudnn-frontend cannot be imported: no"
    with pytest.raises(PlanError, match="cannot be imported"):
        library.library()
    library.missing.cache_clear()


@pytest.mark.parametrize(
    ("version", "theirs", "reason"),
    [
        (91900, 91900, None),
        (91900, None, None),
        (90500, None, "cuDNN 90500 is not used"),
        (91001, None, "cuDNN 91001 is not used"),
        (92800, 91900, "the frontend loads cuDNN 92800, torch 91900"),
    ],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch, version: int, theirs: int | None, reason: str | None
) -> None:
    library.missing.cache_clear()
    library.version.cache_clear()
    monkeypatch.setattr(library, "_import", lambda: FakeCudnn(version))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: theirs is not None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: theirs)
    found = library.missing()
    assert found is None if reason is None else found is not None and reason in found
    library.missing.cache_clear()
    library.version.cache_clear()


def test_a_graph_is_described_whole(cudnn: FakeCudnn) -> None:
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    run(call, launched, xs)
    (graph,) = cudnn.graphs
    assert graph.steps == [
        "validate",
        "build_operation_graph",
        "create_execution_plans",
        "check_support",
    ]
    assert graph.built == [0]
    assert graph.options["compute_data_type"] == graph.options["intermediate_data_type"] == "FLOAT"
    assert graph.node is not None
    given = graph.node[1]
    assert given["attn_scale"] == 0.25
    assert given["diagonal_band_right_bound"] == 0
    assert "diagonal_band_left_bound" not in given
    assert "use_padding_mask" not in given
    for name in ("q", "k", "v"):
        b, s, h, d = xs[name].shape
        assert given[name].facts["dim"] == [b, h, s, d]
        assert given[name].facts["stride"] == [s * h * d, d, h * d, 1]
    for made in graph.node[2]:
        assert made.facts["dim"]
        assert made.facts["stride"], "an output without strides keeps stale ones"


@pytest.mark.parametrize(("make", "guarded"), [(bias, True), (one_query, True), (causal, False)])
def test_gradients_are_guarded_by_full_lengths(cudnn: FakeCudnn, make: Any, guarded: bool) -> None:
    xs, attrs = make()
    call, launched = forward(xs, **attrs)
    run(call, launched, xs)
    node = cudnn.graphs[0].node
    assert node is not None
    assert ("use_padding_mask" in node[1]) is guarded


def test_a_bias_of_whole_blocks_needs_no_guard(cudnn: FakeCudnn) -> None:
    xs = {**qkv(s=128), "bias": torch.zeros(1, 4, 128, 128, dtype=torch.bfloat16)}
    call, launched = forward(xs)
    run(call, launched, xs)
    node = cudnn.graphs[0].node
    assert node is not None
    assert "use_padding_mask" not in node[1]


@pytest.mark.parametrize("step", ["validate", "check_support"])
def test_what_the_library_refuses_goes_to_the_reference(cudnn: FakeCudnn, step: str) -> None:
    cudnn.failing = step
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    with pytest.warns(RuntimeWarning, match="only supported since later devices"):
        got = run(call, launched, xs)
    assert not cudnn.calls
    for x, wanted in zip(got, run(call, bind_reference(call), xs), strict=True):
        assert torch.equal(x, wanted)
    run(call, launch.bind(call), xs)  # known by now: no second warning, and no second build
    assert len(cudnn.graphs) == 1


def test_dropout_is_not_split_between_families(cudnn: FakeCudnn) -> None:
    xs = {**qkv(), "seed": torch.tensor(5)}
    cudnn.failing = "check_support"
    call, launched = forward(xs, dropout=0.5)
    with pytest.warns(RuntimeWarning), pytest.raises(PlanError, match="hide the kernels"):
        run(call, launched, xs)
    back = {**xs, "o": xs["q"], "lse": torch.zeros(2, 4, 24), "dlse": torch.zeros(2, 4, 24)}
    call = call_of(
        {**back, "do": xs["q"]}, writes=(0, 1, 2), backward=True, scale=0.25, dropout=0.5
    )
    with pytest.raises(PlanError, match="detach the lse"):
        launch.bind(call)


def test_dropout_gives_the_library_a_seed_and_an_offset_of_its_own(cudnn: FakeCudnn) -> None:
    xs = {**qkv(), "seed": torch.tensor(5)}
    call, launched = forward(xs, dropout=0.5, stream=3)
    run(call, launched, xs)
    graph = cudnn.graphs[0]
    assert graph.node is not None
    p, seed, offset = graph.node[1]["dropout"]
    assert (p, seed.facts["data_type"], offset.facts["data_type"]) == (0.5, "INT64", "INT64")


def test_too_much_workspace(cudnn: FakeCudnn) -> None:
    cudnn.workspace = plans.WORKSPACE + 1
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    with pytest.warns(RuntimeWarning, match="MiB of workspace"):
        run(call, launched, xs)
    assert not cudnn.calls


def test_nothing_of_size_zero_reaches_the_library(cudnn: FakeCudnn) -> None:
    for sizes in ({"b": 0}, {"s": 0}, {"s_kv": 0}):
        xs = qkv(**sizes)
        call, launched = forward(xs)
        for x, wanted in zip(
            run(call, launched, xs), run(call, bind_reference(call), xs), strict=True
        ):
            assert torch.equal(x, wanted)
    assert not cudnn.graphs


def test_plans_that_do_not_build_are_skipped(cudnn: FakeCudnn) -> None:
    cudnn.broken = {"first"}
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    run(call, launched, xs)
    assert cudnn.graphs[0].built == [1]
    cudnn.broken = {"first", "second"}
    plans.forget()
    call, launched = forward(xs, **attrs)
    with pytest.warns(RuntimeWarning, match="builds no plan"):
        run(call, launched, xs)


def test_engines_of_the_frontend_are_left_out(cudnn: FakeCudnn) -> None:
    cudnn.foreign = {"first"}
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    run(call, launched, xs)
    assert cudnn.graphs[0].built == [1]


def test_the_measured_plan_is_taken(cudnn: FakeCudnn) -> None:
    xs, attrs = causal()
    with tuning.collected() as offered:
        call, launched = forward(xs, **attrs)
    (trial,) = offered
    assert trial.candidates() == ["first", "second"]
    once = trial.start()("second")
    once()
    assert cudnn.graphs[-1].built == [1]
    tuning.TABLE.add(trial.where, {trial.key: "second"})
    run(call, launched, xs)
    assert cudnn.graphs[-1].built == [1]


def test_packed_sequences_are_measured_over_memory_of_their_tokens(cudnn: FakeCudnn) -> None:
    xs, attrs = tokens()
    with tuning.collected() as offered:
        forward(xs, **attrs)
    (trial,) = offered
    assert isinstance(trial, plans.Trial)
    made = plans.made_up(trial.spec, torch.device("cpu"))
    assert made["q"].numel() <= trial.spec.s_q * 4 * 16
    trial.start()("first")()
    assert len(cudnn.calls) == 1


def test_no_plan_is_built_in_a_capture(cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    monkeypatch.setattr(library, "capturing", lambda: True)
    with pytest.raises(PlanError, match="before the capture"):
        run(call, launched, xs)
    monkeypatch.setattr(library, "capturing", lambda: False)
    run(call, launched, xs)
    monkeypatch.setattr(library, "capturing", lambda: True)
    run(call, launched, xs)
    assert len(cudnn.calls) == 2
    single, attrs = one_query()
    monkeypatch.setattr(library, "capturing", lambda: False)
    call, launched = forward(single, **attrs)
    run(call, launched, single)
    monkeypatch.setattr(library, "capturing", lambda: True)
    with pytest.raises(PlanError, match="first time while a CUDA graph"):
        run(call, launch.bind(call), single)


def test_each_thread_has_a_handle_and_the_stream_is_set(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    run(call, launched, xs)
    monkeypatch.setattr(library, "stream_of", lambda index: 8)
    run(call, launched, xs)
    assert cudnn.handles[0].stream == 8
    other = threading.Thread(target=run, args=(call, launched, xs))
    other.start()
    other.join()
    assert len(cudnn.handles) == 2
    assert [handle for _, handle in cudnn.calls] == [1000, 1000, 1001]


def test_without_the_direct_call_the_public_one_is_used(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.Built, "_direct", lambda self: None)
    GEN.manual_seed(0)
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    for x, wanted in zip(run(call, launched, xs), run(call, bind_reference(call), xs), strict=True):
        assert_close(x.float(), wanted.float(), rtol=0.05, atol=0.02)
    assert cudnn.public == 1


def test_graphs_are_let_go_at_the_end(cudnn: FakeCudnn) -> None:
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    run(call, launched, xs)
    mine = [b for b in library._LIVE if b.graph is cudnn.graphs[0]]
    assert len(mine) == 1
    library._close()
    assert mine[0].graph is None
    assert mine[0].raw is None


def test_a_recorded_launch_is_one_operation_that_runs_elsewhere(cudnn: FakeCudnn) -> None:
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    run(call, launched, xs)
    with recording() as made:
        o, lse = run(call, launched, xs)
    assert made.reason is None
    (issued,) = made.issued
    memory = (ctypes.c_int64 * len(issued.words))(*issued.words)
    words = memoryview(memory).cast("B").cast("q")
    place = issued.issue.prepare(words, ctypes.addressof(memory))
    other = torch.empty_like(o)
    words[3] = other.data_ptr()
    place(7)
    assert torch.equal(other, o)
    assert lse.data_ptr() == words[4]


def test_what_torch_fills_in_is_not_recorded(cudnn: FakeCudnn) -> None:
    xs, attrs = bias()
    call, launched = forward(xs, **attrs)
    run(call, launched, xs)
    with recording() as made:
        run(call, launched, xs)
    assert made.reason is not None


def test_addresses_off_16_bytes_are_copied(cudnn: FakeCudnn) -> None:
    xs, attrs = causal()
    room = torch.empty(xs["k"].numel() + 8, dtype=torch.bfloat16)
    off = room[1 : 1 + xs["k"].numel()].view(xs["k"].shape).copy_(xs["k"])
    call, launched = forward(xs, **attrs)
    wanted = run(call, launched, xs)[0]
    assert torch.equal(run(call, launched, {**xs, "k": off})[0], wanted)


def test_small_workspaces_lie_ready_for_each_thread_and_stream(cudnn: FakeCudnn) -> None:
    """Kernels of two threads may alternate on a stream, so they never share one; a release gives all back."""
    cpu, found = torch.device("cpu"), []
    thread = threading.Thread(target=lambda: found.append(library.scratch(cpu, 7)))
    thread.start()
    thread.join()
    mine = library.scratch(cpu, 7)
    assert library.scratch(cpu, 7) == mine
    assert len({mine, library.scratch(cpu, 8), *found}) == 3
    plans.forget()
    assert not library._SCRATCH


@pytest.mark.parametrize("workspace", [64, library.SCRATCH + 1])
def test_large_workspaces_are_of_the_call(cudnn: FakeCudnn, workspace: int) -> None:
    cudnn.workspace = workspace
    xs, attrs = causal()
    call, launched = forward(xs, **attrs)
    for _ in range(2):  # the first call prepares
        run(call, launched, xs)
    assert bool(library._SCRATCH) == (workspace <= library.SCRATCH)
