"""The comparison of `cache_quantized_input` in training: its arms differ in nothing else."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import cached_input
from benchmarks.cached_input import ARMS, MEMORY, TRAINING, Cosines, Kept, Pair, Run
from benchmarks.suite import data
from te_ops.basic.activation import Activation
from te_ops.cli import arms
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
    made = cached_input.pair(TINY, CORPUS, also=[arms.arm("block")])
    assert tuple(made.losses) == tuple(made.ms) == ARMS
    assert len(made.cosines) == 2  # a tenth of four steps is none
    assert all(
        0.999 < c.cached_dense < 1 and c.dense_exact == pytest.approx(1) for c in made.cosines
    )
    assert made.kept < 1
    assert abs(made.gap("nudged")) < 1e-3
    assert {"layers.0", "norm.weight"} <= set(made.layers)
    assert min(made.layers.values()) == made.cosines[-1].cached_dense
    assert made.also["block"].dense_exact < 1


def test_arms_can_be_left_out() -> None:
    assert tuple(cached_input.pair(TINY, CORPUS, ("dense", "cached")).losses) == ("dense", "cached")


def test_comparing_leaves_the_run_alone() -> None:
    runs = [Trainer(replace(TINY), TINY.arms[0], CORPUS) for _ in range(2)]
    cached_input.compared(runs[0])
    assert not any(
        m.cache_quantized_input for m in runs[0].model.modules() if isinstance(m, Activation)
    )
    assert [runs[0].advance() for _ in range(2)] == [runs[1].advance() for _ in range(2)]


def test_a_run_is_shortened_to_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    long = replace(TINY, steps=10**6)
    short = cached_input.affordable(long, CORPUS, time.monotonic(), arms=2)
    assert short.steps == 20  # the least, where nothing fits
    assert cached_input.affordable(TINY, CORPUS, time.monotonic() + 1e6, arms=2) == TINY


PAIRS = [
    Pair(
        seed,
        {"dense": 2.0, "cached": 2.0 + 0.002 * seed, "nudged": 2.0},
        (Cosines(0.9995, 0.99, 0.991),),
        0.7,
        {"layers.0": 0.9995},
        {"bf16": Cosines(0.99991, 0.9998, 0.9999)},
        {"dense": 10.0, "cached": 11.0, "nudged": 10.0},
    )
    for seed in range(3)
]
KEPT = Kept("SwiGLU MLP", "delayed", {"dense": 480, "cached": 375, "te-ops": 592, "te-module": 600})


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    cached_input.report(PAIRS)
    said = capsys.readouterr().out
    assert "cached   gap +0.100%, spread of the paired gaps 0.100%, error 0.058%" in said
    assert "0.99950 0.99000 0.99100" in said


def test_seeds_of_several_files_make_a_table(tmp_path: Path) -> None:
    key = ("delayed", "GPU", "12 layers", 30_000_000)
    files = [tmp_path / f"{pair.seed}.json" for pair in PAIRS]
    for file, pair in zip(files, PAIRS, strict=True):
        cached_input.write(file, [Run(*key, pair)], [KEPT])
    groups, memory = cached_input.merged([*reversed(files), files[0]])
    assert groups == {key: PAIRS}
    assert memory == [KEPT]
    made = cached_input.tables(groups, memory)
    assert "| GPU: 12 layers, 30.0 M tokens | delayed | 3 | +0.100% (0.058%) |" in made[TRAINING]
    assert (
        "| the same weights | bf16 | 3 |  |  | 0.99991 | 0.99990 | 0.99980 |  |  |"
        in made[TRAINING]
    )
    assert "| SwiGLU MLP | delayed | 0 | 0 | 0 | 0 | 0.633 | 0.625 |" in made[MEMORY]
    alone = cached_input.tables({key: PAIRS[1:2]}, [])
    assert (
        "| delayed | 1 | +0.100% | +0.000% | 0.99950 | 0.99100 | 0.99000 | 10.0 | 11.0 |"
        in alone[TRAINING]
    )
    assert cached_input.tables({}, []) == {}


def test_arms_of_several_files_make_a_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ("delayed", "GPU", "12 layers", 30_000_000)
    parts = []
    for arm in ARMS:
        own = replace(PAIRS[1], losses={arm: PAIRS[1].losses[arm]}, ms={arm: PAIRS[1].ms[arm]})
        cached_input.write(tmp_path / f"{arm}.json", [Run(*key, own)], [])
        parts.append(str(tmp_path / f"{arm}.json"))
    groups, _ = cached_input.merged([Path(p) for p in parts])
    assert groups == {key: PAIRS[1:2]}
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["it", "--merge", *parts[1:], "--page", str(page)])
    with pytest.raises(SystemExit, match="no dense run of seed 1"):
        cached_input.main()
    monkeypatch.setattr("sys.argv", ["it", "--merge", *parts[1:]])
    cached_input.main()
    assert "gap" not in capsys.readouterr().out.split("pass lines")[0]


def test_bytes_are_counted_without_weights() -> None:
    """BF16: gate and up and what is multiplied; cached: a byte and a 32nd instead of two."""
    layers = data.swiglu_mlp(64, 96)[1:]
    found = cached_input.kept("MLP", layers, "none", 40, torch.device("cpu"))
    assert set(found.bytes) >= {"dense", "cached"}
    assert found.bytes["dense"] - found.bytes["cached"] == 40 * 192 * 2 - 40 * (192 + 4 * 2)
