"""What the benchmark of fused GEMMs takes from plans, and what it writes."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import fused_gemms
from te_ops.backends.cutlass import choices
from tests.backends.cutlass import standin

META = torch.device("meta")


def test_groups_cover_forward_backward_and_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    with standin.hopper(monkeypatch, "measured", emulated=False):
        found = fused_gemms.groups(fused_gemms.SMALL, META)
    kinds = {(tag, kind) for tag, kind, _ in found}
    for wanted in (
        ("", "e4m3*e4m3 fast pair->1 acc:bf16 e4m3:row+amax"),
        ("", "e4m3*e4m3 fast pair->1 acc:bf16 e4m3:row+col+amax"),
        ("", "e5m2*e4m3 split 1->2 tiles:bf16 e5m2:row+col+amax"),
        ("", "e5m2*e4m3 fast 1->1 tile:bf16 row:bf16 e5m2:row+col+amax sums"),
        ("", "e5m2*e4m3 split 1->2 tiles:bf16 y:bf16 e5m2:amax"),
        ("own", "e4m3*e4m3 fast 1->1 row:bf16 acc:bf16 e4m3:row+amax"),
        ("", "bf16*bf16 mnmn plain y+=fp32"),
    ):
        assert wanted in kinds, wanted
    assert all(fused_gemms.ways(trial) for trial in found.values())


def test_the_table_holds_what_pays_and_what_does_not() -> None:
    rows = {
        "bf16*bf16 pair->1 acc:bf16 y:bf16": {
            "8192x16384x4096": "1.04 128x192 2x1 pingpong",
            "512x16384x4096": "1.20 128x192 2x1 pingpong",
        },
        "bf16*bf16 plain y:bf16": {
            "8192x8192x4096": "1.05 128x128 2x1 pingpong",
            "8192x4096x8192": "1.04 128x128 2x1 pingpong",
            "4096x4096x8192": "0.99 128x128 2x1 pingpong",
        },
        "bf16*bf16 mnmn plain y+=fp32": {"16384x4096x512": "1.30 128x128 2x1 pingpong"},
    }
    assert fused_gemms.table(rows) == {
        "bf16*bf16 pair->1 acc:bf16 y:bf16": {"8192x16384x4096": "1.04 128x192 2x1 pingpong"},
        "bf16*bf16 plain y:bf16": {
            "4096x4096x8192": "0.99",
            "8192x8192x4096": "1.05 128x128 2x1 pingpong",
        },
    }


def test_rows_that_were_not_measured_stay() -> None:
    shipped = json.loads(json.dumps(choices.shipped()))
    assert fused_gemms.merged(shipped, {}) == shipped
    made = fused_gemms.merged(shipped, {"a kind": {"2048x2048x2048": "1.50 128x128 2x1 pingpong"}})
    assert len(made["sm_90"]) == len(shipped["sm_90"]) + 1


def test_a_run_goes_on_after_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    run = fused_gemms.Run(seconds=100.0)

    def fails() -> None:
        raise RuntimeError("no such kernel")

    assert run.attempt("a group", fails) is None
    assert run.attempt("another", lambda: 3) == 3
    assert fused_gemms.Run(seconds=0.0).attempt("the last", lambda: 3) is None
    said = capsys.readouterr().out
    assert "FAILED a group: RuntimeError: no such kernel" in said
    assert "left out, no time: the last" in said
