"""The comparison of `cache_quantized_input` in training: its arms differ in nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import cached_input
from benchmarks.cached_input import ARMS, Cosines, Pair
from te_ops.basic.activation import Activation
from te_ops.cli.train import settings, text
from te_ops.cli.train.trainer import Trainer

TINY = settings.completed(
    {
        "device": "cpu", "recipes": ("fp32",), "steps": 4, "layers": 1, "dim": 32, "ffn": 128,
        "heads": 2, "context": 16, "batch": 2,
    }
)  # fmt: skip
CORPUS = text.Text(torch.arange(200, dtype=torch.uint8), torch.arange(120, dtype=torch.uint8), "")


def test_a_pair() -> None:
    made = cached_input.pair(TINY, CORPUS)
    assert tuple(made.losses) == ARMS
    assert len(made.cosines) == 2  # a tenth of four steps is none
    assert all(
        0.999 < c.cached_dense < 1 and c.dense_exact == pytest.approx(1) for c in made.cosines
    )
    assert made.kept < 1
    assert abs(made.gap("nudged")) < 1e-3


def test_comparing_leaves_the_run_alone() -> None:
    runs = [Trainer(replace(TINY), TINY.arms[0], CORPUS) for _ in range(2)]
    cached_input.compared(runs[0])
    assert not any(
        m.cache_quantized_input for m in runs[0].model.modules() if isinstance(m, Activation)
    )
    assert [runs[0].advance() for _ in range(2)] == [runs[1].advance() for _ in range(2)]


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [
        Pair(
            seed,
            {"dense": 2.0, "cached": 2.0 + 0.002 * seed, "nudged": 2.0},
            (Cosines(0.9995, 0.99, 0.991),),
            0.7,
        )
        for seed in range(3)
    ]
    cached_input.report(pairs)
    said = capsys.readouterr().out
    assert "cached   gap +0.100%, spread of the paired gaps 0.100%" in said
    assert "0.99950 0.99000 0.99100" in said
