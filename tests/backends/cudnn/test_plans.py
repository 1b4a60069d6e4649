"""Whole plans: the CPU stands for Hopper, and the stand-in runs what it is given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

import te_ops as te
from te_ops.backends import cudnn as backend
from te_ops.backends.cudnn import launch, launch_whole, sequences
from te_ops.registry import REGISTRY
from te_ops.runtime import cache
from te_ops.testing import assert_close
from tests.backends.cudnn.fake import FakeCudnn


@pytest.fixture
def hopper(cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudnn]:
    monkeypatch.setattr(cache, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(backend, "missing", lambda: None)
    with REGISTRY.without("cuda.", "cublas.", "sdpa."), REGISTRY.temporary(*backend.KERNELS):
        yield cudnn


def step(op: te.Attention, x: torch.Tensor, *extra: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    made = op(leaf, *extra)
    o, lse = made
    parameters = list(op.parameters())
    return [
        o,
        lse,
        *torch.autograd.grad(o, [leaf, *parameters], torch.cos(o.detach().float()).to(o)),
    ]


@pytest.mark.parametrize("kind", ["causal", "padding", "thd", "sink", "alibi"])
def test_a_packed_attention(hopper: FakeCudnn, kind: str) -> None:
    torch.manual_seed(0)
    options = {
        "causal": {},
        "padding": {"attn_mask_type": "padding_causal"},
        "thd": {"qkv_format": "thd"},
        "sink": {"softmax_type": "learnable"},
        "alibi": {"core_attention_bias_type": "alibi"},
    }[kind]
    op = te.Attention(4, 2, packed=True, return_lse=True, **options)
    x = torch.randn(3, 20, 8 * 16).bfloat16()
    extra: list[torch.Tensor] = []
    if kind == "padding":
        extra = [torch.tensor([20, 0, 7])]
    if kind == "thd":
        x = x.flatten(0, 1)
        extra = [te.PackedSequences([0, 5, 5, 40], cu_q_padded=[0, 8, 8, 60])]
    got = step(op, x, *extra)
    assert len(hopper.calls) == 2
    with REGISTRY.without("cudnn."):
        wanted = step(op, x, *extra)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a.float(), b.float(), rtol=0.05, atol=0.03)


def test_packed_without_gaps(hopper: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issued as addresses, on request; each table of lengths is read."""
    monkeypatch.setenv("TE_OPS_CUDNN_WHOLE", "1")
    ran: list[int] = []
    run = launch_whole.Whole.run
    monkeypatch.setattr(
        launch_whole.Whole, "run", lambda self, *xs: (ran.append(1), run(self, *xs))[1]
    )
    torch.manual_seed(0)
    op = te.Attention(4, 2, return_lse=True, qkv_format="thd")
    xs = [torch.randn(60, heads, 16).bfloat16() for heads in (4, 2, 2)]

    def step(table: te.PackedSequences) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in xs]
        o, lse = op(*leaves, table)
        grads = torch.autograd.grad(o, leaves, torch.cos(o.detach().float()).to(o))
        return [o, lse, *grads]

    tables = [te.PackedSequences(lens) for lens in ([0, 5, 40, 60], [0, 17, 18, 60])]
    step(tables[0])  # prepares
    got = [step(table) for table in (*tables, tables[0])]
    assert len(ran) == 6
    with REGISTRY.without("cudnn."):
        wanted = [step(table) for table in (*tables, tables[0])]
    for mine, theirs in zip(got, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert_close(a.float(), b.float(), rtol=0.05, atol=0.03)


def test_the_plan_says_who_runs_and_why_not(hopper: FakeCudnn) -> None:
    x = torch.randn(2, 16, 8 * 16).bfloat16().requires_grad_()
    op = te.Attention(4, 2, packed=True)
    (segment,) = op.plan(x).segments
    kernels = {s.kernel for s in (*segment.forward_steps, *segment.backward_steps)}
    assert {"cudnn.attention", "cudnn.attention_backward"} <= kernels
    capped = te.Attention(4, 2, packed=True, logits_soft_cap=30.0)
    assert "a score modifier excludes every mask" in str(capped.plan(x).explain())


def test_packed_operands_are_not_copied(hopper: FakeCudnn) -> None:
    x = torch.randn(2, 16, 8 * 16).bfloat16()
    with torch.no_grad():
        te.Attention(4, 2, packed=True)(x)
    node = hopper.graphs[0].node
    assert node is not None
    assert node[1]["q"].facts["stride"] == [16 * 128, 16, 128, 1]


class Rows(te.Recipe):
    """q, k and v in FP8, forward."""

    def quantizer(self, role: te.Role) -> te.Quantizer | None:
        """Current scaling for what attention reads forward."""
        return te.Float8CurrentScalingQuantizer() if role.operand in ("q", "k", "v") else None


def test_quantized_operands_run_as_what_they_stand_for(hopper: FakeCudnn) -> None:
    torch.manual_seed(0)
    op = te.Attention(4, 2, packed=True, return_lse=True)
    x = torch.randn(2, 20, 8 * 16).bfloat16()
    with te.autocast(recipe=Rows()):
        got = step(op, x)
        assert len(hopper.calls) == 2
        with REGISTRY.without("cudnn."):
            wanted = step(op, x)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a.float(), b.float(), rtol=0.05, atol=0.03)
    with REGISTRY.without("cudnn."):
        assert not torch.equal(wanted[0], step(op, x)[0]), "nothing was quantized"


def rows_of_blocks(hopper: FakeCudnn) -> list[int]:
    """The longest sequence that each graph was made for."""
    ran = {id(graph): graph for graph, _ in hopper.calls}
    return [graph.node[1]["q"].facts["dim"][2] for graph in ran.values() if graph.node]


def thd(
    table: te.PackedSequences, rows: int
) -> tuple[te.Attention, torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    op = te.Attention(4, 2, packed=True, qkv_format="thd", return_lse=True)
    x = torch.randn(rows, 8 * 16).bfloat16()
    with REGISTRY.without("cudnn."):
        return op, x, step(op, x, table)


def near(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert_close(a.float(), b.float(), rtol=0.05, atol=0.02)


def test_sequences_without_gaps(hopper: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are made for the longest, nothing is cleaned, and what follows from lengths is made once."""
    table = te.PackedSequences([0, 200, 200, 330, 600])
    op, x, wanted = thd(table, 600)
    made: list[int] = []
    facts = launch.facts_of
    monkeypatch.setattr(launch, "facts_of", lambda *xs: (made.append(1), facts(*xs))[1])
    monkeypatch.setattr(sequences, "cleaned", lambda *_: pytest.fail("there is nothing to clean"))
    for _ in range(3):
        near(step(op, x, table), wanted)
    assert rows_of_blocks(hopper) == [512, 512]  # of 270, a power of two
    assert len(made) == 2, "one for each direction"
    near(step(op, x, te.PackedSequences([0, 200, 200, 330, 600])), wanted)
    assert len(hopper.graphs) == 4, "and those that a capture asks for, of which nothing is known"


@pytest.mark.parametrize("padded", [[0, 128, 228], None])
def test_rows_of_no_sequence_are_cleaned(hopper: FakeCudnn, padded: list[int] | None) -> None:
    """In a gap, or behind the last sequence."""
    table = te.PackedSequences([0, 100, 200], cu_q_padded=padded)
    op, x, wanted = thd(table, 228)
    gap = slice(100, 128) if padded else slice(200, 228)
    x[gap] = torch.nan
    got = step(op, x, table)
    near(got[:2], wanted[:2])
    assert not got[0][gap].any()
    assert not got[2][gap].any(), "their gradients are 0"
    assert rows_of_blocks(hopper) == [128, 128]


def test_a_table_that_is_written_to(hopper: FakeCudnn) -> None:
    """What was known of it is not known any longer; it is followed as it is."""
    table = te.PackedSequences([0, 100, 200, 300])
    op, x, wanted = thd(table, 300)
    near(step(op, x, table), wanted)
    table.as_subclass(torch.Tensor).copy_(te.PackedSequences([0, 280, 280, 300]))
    _, _, wanted = thd(table, 300)
    near(step(op, x, table), wanted)
    assert rows_of_blocks(hopper) == [128, 128, 384, 384]


def test_tables_are_let_go() -> None:
    table = te.PackedSequences([0, 5, 9])
    op = te.Attention(2, packed=True, qkv_format="thd")
    op(torch.randn(9, 48), table)
    assert table._parts is not None
    seen = weakref.ref(table._parts[1])
    gc.disable()
    try:
        del table
        op(torch.randn(9, 48), te.PackedSequences([0, 9, 9]))
        assert seen() is None, "without the collector"
    finally:
        gc.enable()
