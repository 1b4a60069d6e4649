from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from te_ops.cli.arms import NAMES
from te_ops.cli.train.settings import Settings
from te_ops.cli.train.text import read
from te_ops.cli.train.trainer import Trainer, affordable_steps, checkpoint_path
from te_ops.errors import Error
from tests.cli.train.small import settings


def _trainer(s: Settings) -> Trainer:
    return Trainer(s, s.arms[-1], read(s.text, s.context + 1))


def _quiet(trainer: Trainer) -> None:
    pass


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))  # type: ignore[arg-type]
    return a == b


@pytest.mark.parametrize("name", ["fp32", "delayed", "nvfp4"])
def test_resuming_is_bit_exact(name: str, tmp_path: Path) -> None:
    s = settings(tmp_path, recipes=("fp32", name))
    straight = _trainer(s)
    straight.run(6, None, _quiet)
    _trainer(s).run(3, tmp_path, _quiet)
    torch.manual_seed(99)  # another process would be elsewhere
    resumed = _trainer(s)
    assert resumed.load(tmp_path)
    assert resumed.step == 3
    resumed.run(6, None, _quiet)
    assert resumed.losses == straight.losses
    assert resumed.validation == straight.validation
    assert _same(resumed.model.state_dict(), straight.model.state_dict())
    assert _same(resumed.optimizer.state_dict(), straight.optimizer.state_dict())
    if name == "delayed":
        assert any("amax_history" in key for key in straight.model.state_dict())


def test_every_recipe_starts_from_the_same_weights_and_batches(tmp_path: Path) -> None:
    first = {}
    for name in NAMES:
        trainer = _trainer(settings(tmp_path, recipes=("fp32", name)))
        first[name] = (trainer.model["embedding"].weight.detach().clone(), trainer.sampler.next())
    weight, batch = first["fp32"]
    assert all(torch.equal(w, weight) and torch.equal(b, batch) for w, b in first.values())


def test_a_step_lowers_the_loss_and_other_seeds_differ(tmp_path: Path) -> None:
    one = _trainer(settings(tmp_path, recipes=("fp32",), steps=40, lr=1e-2))
    before = one.evaluate()
    one.run(40, None, _quiet)
    assert one.done
    assert one.validation[-1][1] < before - 0.5
    other = _trainer(settings(tmp_path, recipes=("fp32",), seed=1))
    assert other.advance() != one.losses[0]


def test_the_learning_rate_warms_up_and_falls_to_a_tenth(tmp_path: Path) -> None:
    trainer = _trainer(settings(tmp_path, steps=100, warmup=10, lr=1.0))
    rates = []
    for trainer.step in (0, 9, 10, 55, 100):
        rates.append(trainer.learning_rate())
    assert rates == pytest.approx([0.1, 1.0, 1.0, 0.55, 0.1])


def test_only_matrices_decay(tmp_path: Path) -> None:
    decayed, rest = _trainer(settings(tmp_path)).optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in rest["params"]} == {1}
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    trainer = _trainer(settings(tmp_path, recipes=("fp32", "delayed")))
    trainer.run(2, None, _quiet)
    state = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    random = torch.get_rng_state()
    assert math.isfinite(trainer.evaluate())
    assert _same(state, trainer.model.state_dict())
    assert torch.equal(random, torch.get_rng_state())


def test_checkpoints_come_when_due_and_load_without_code(tmp_path: Path) -> None:
    s = settings(tmp_path, checkpoint_every=4, recipes=("fp32", "delayed"))
    _trainer(s).run(5, tmp_path, _quiet)
    path = checkpoint_path(tmp_path, s.arms[-1])
    assert torch.load(path, weights_only=True)["step"] == 5
    _trainer(s).run(4, tmp_path, _quiet)
    assert torch.load(path, weights_only=True)["step"] == 4
    assert [p.name for p in path.parent.iterdir()] == ["delayed.pt"]


def test_broken_checkpoints(tmp_path: Path) -> None:
    trainer = _trainer(settings(tmp_path))
    assert not trainer.load(tmp_path)
    path = checkpoint_path(tmp_path, trainer.arm)
    path.parent.mkdir()
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(Error, match="cannot be read"):
        trainer.load(tmp_path)
    torch.save({"format": 7}, path)
    with pytest.raises(Error, match="has format 7"):
        trainer.load(tmp_path)


def test_steps_from_seconds(tmp_path: Path) -> None:
    s = settings(tmp_path, recipes=("fp32",), seconds=2.0)
    steps = affordable_steps(s, read(s.text, s.context + 1))
    assert 20 < steps < 20_000
