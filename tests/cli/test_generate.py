"""te-ops generate: token by token is the full forward, and the command from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import te_ops as te
from te_ops.cli import main
from te_ops.cli.arms import Arm, arm
from te_ops.cli.blocks import ModelSizes, language_model
from te_ops.cli.decoding import Choice, decoding
from te_ops.cli.models import KEY, LanguageModel, find_model, load_model, save_model
from te_ops.errors import Error, ShapeError
from tests.cli.train.small import arguments, write_text

CPU = torch.device("cpu")
SIZES = ModelSizes(layers=2, dim=64, heads=2, ffn=96, context=16, batch=2)
BF16 = torch.bfloat16


def trained(way: Arm, *, tied: bool = True) -> LanguageModel:
    """A few steps of plain gradient descent, so that delayed scaling has seen values."""
    torch.manual_seed(0)
    model = language_model(SIZES, tied=tied)
    for step in range(3):
        tokens = torch.randint(256, (2, 2, 16), generator=torch.Generator().manual_seed(step))
        with way.active(CPU):
            model(*tokens).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.5 * p.grad)
                p.grad = None
    return LanguageModel(model, SIZES, way)


def both_ways(made: LanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of one full forward without caches, and of a prompt followed by one token after the other."""
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(9))
    made.model.eval()
    with torch.no_grad(), made.arm.active(CPU):
        whole = made.model[:-1](tokens).float()
    with decoding(made, 16, CPU, batch=2) as decoder:
        parts = [decoder(part) for part in tokens.split([5, *[1] * 11], 1)]
    return whole, torch.cat(parts, 1)


WAYS = {
    "fp32": (arm("fp32"), 1e-5),
    "bf16": (arm("bf16"), 0.02),
    "delayed": (arm("delayed"), 1e-4),
    "delayed in BF16": (arm("delayed", BF16), 0.06),
    "block": (arm("block"), 1e-4),
    "mxfp8": (arm("mxfp8"), 1e-4),
    "mxfp8 in BF16": (arm("mxfp8", BF16), 0.06),
    "current": (arm("current"), 0.1),  # each call has its own amax: equal up to FP8's rounding
}


@pytest.mark.parametrize("name", WAYS)
def test_token_by_token_is_the_full_forward(name: str) -> None:
    way, tolerance = WAYS[name]
    made = trained(way.sparing("head"))
    state = {key: x.clone() for key, x in made.model.state_dict().items()}
    whole, parts = both_ways(made)
    assert float((parts - whole).norm() / whole.norm()) < tolerance
    after = made.model.state_dict()
    assert after.keys() == state.keys()  # no cache stays behind, and no scale moved
    assert all(torch.equal(after[key], state[key]) for key in state)
    if name.startswith("delayed"):
        assert any(key.endswith(".scale") for key in state)


def test_caches_are_limited_and_can_be_reset() -> None:
    made = trained(Arm("fp32"))
    tokens = torch.arange(6).view(1, 6)
    with decoding(made, 8, CPU) as decoder:
        first = decoder(tokens)
        with pytest.raises(ShapeError, match="the cache holds 8"):
            decoder(tokens)
        decoder.reset()
        assert torch.equal(decoder(tokens), first)
        assert not made.model.training
    assert made.model.training
    assert not [op for op in made.model.modules() if isinstance(op, te.KVCache)]


def test_choice() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0], [5.0, 0.0, 0.0, 4.0]])

    def draw(temperature: float, top_k: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        made = [Choice(temperature, top_k)(logits, generator) for _ in range(400)]
        return torch.cat(made, 1).tolist()

    assert [set(row) for row in draw(0.0, 0)] == [{1}, {0}]
    assert [set(row) for row in draw(1.0, 1)] == [{1}, {0}]
    assert [set(row) for row in draw(1.0, 2)] == [{1, 2}, {0, 3}]
    assert [set(row) for row in draw(5.0, 9)] == [{0, 1, 2, 3}, {0, 1, 2, 3}]
    assert draw(1.0, 0) == draw(1.0, 0)
    assert draw(1.0, 0) != draw(1.0, 0, seed=1)
    share = draw(2.0, 2)[0].count(1) / 400
    assert share == pytest.approx(1 / (1 + math.exp(-0.5)), abs=0.07)
    for wrong in ((-1.0, 0), (math.nan, 0), (1.0, -1)):
        with pytest.raises(Error, match="must be at least 0"):
            Choice(*wrong)


@pytest.mark.parametrize("tied", [True, False])
def test_files_hold_model_state_and_recipe(tied: bool, tmp_path: Path) -> None:
    made = trained(arm("delayed", BF16).sparing("head"), tied=tied)
    path = tmp_path / "folder" / "delayed.safetensors"
    save_model(made, path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    loaded = load_model(path, CPU)
    assert loaded.sizes == SIZES
    assert loaded.arm == made.arm
    assert (loaded.model["head"].weight is loaded.model["embedding"].weight) == tied
    state = loaded.model.state_dict()
    assert state.keys() == made.model.state_dict().keys()
    assert all(torch.equal(state[key], x) for key, x in made.model.state_dict().items())
    assert torch.equal(both_ways(loaded)[1], both_ways(made)[1])


def test_files_of_others(tmp_path: Path) -> None:
    te.save_file(te.Linear(2, 2), tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    with pytest.raises(Error, match="is not a language model of te-ops train"):
        load_model(tmp_path / "other.safetensors", CPU)
    with pytest.raises(Error, match="cannot be read"):
        load_model(tmp_path / "broken.safetensors", CPU)
    about = {"sizes": {"dim": 8, "width": 3}, "tied": True, "recipe": "fp32", "dtype": "float32"}
    te.save_file(te.Linear(2, 2), tmp_path / "later.safetensors", {KEY: json.dumps(about)})
    with pytest.raises(Error, match="does not hold the model that its header describes"):
        load_model(tmp_path / "later.safetensors", CPU)
    del about["sizes"]["width"]
    te.save_file(te.Linear(2, 2), tmp_path / "torn.safetensors", {KEY: json.dumps(about)})
    with pytest.raises(Error, match="does not hold the model that its header describes"):
        load_model(tmp_path / "torn.safetensors", CPU)
    with pytest.raises(Error, match="there is no"):
        find_model(tmp_path / "missing.safetensors", None)


def test_a_run_leaves_models_that_continue_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(arguments(tmp_path, "--out", str(out), "--recipes", "delayed")) == 0
    assert f"te-ops generate --model {out}" in capsys.readouterr().out.replace("\n", "")
    one = ["generate", "line ", "--threads", "1", "--device", "cpu", "--tokens", "12"]
    shown = []
    for more in ([], [], ["--seed", "1"], ["--recipe", "delayed", "--temperature", "0"]):
        assert main([*one, "--model", str(out), *more]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("line ")
        assert "12 bytes in" in said.err
        assert "tokens/s" in said.err
        assert "more than the 16" in said.err
        shown.append(said.out)
    assert shown[0] == shown[1] != shown[2]
    assert "delayed on cpu" in said.err
    path = out / "models" / "delayed.safetensors"
    assert main([*one, "--model", str(path), "--temperature", "0"]) == 0
    assert capsys.readouterr().out == shown[3]


def test_without_a_model_a_tiny_one_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["generate", "line", "--steps", "2", "--tokens", "3", "--threads", "1"]
    text = tmp_path / "text.txt"
    text.write_text(Path(write_text(tmp_path)).read_text() * 2)
    assert main([*given, "--device", "cpu", "--text", str(text)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("line")
    assert "no --model: training one" in said.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([""], "the prompt is empty"),
        (["a", "--tokens", "0"], "--tokens must be at least 1"),
        (["a", "--model", "."], ". has no model of fp32; it has none"),
        (["a", "--model", "missing"], "there is no missing"),
        (["a", "--temperature", "-1"], "must be at least 0"),
        (["a", "--recipe", "fp32", "--model", "run/models/fp32.safetensors"], "says itself"),
    ],
)
def test_mistakes(
    more: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = LanguageModel(language_model(SIZES), SIZES, Arm("fp32"))
    save_model(model, tmp_path / "run" / "models" / "fp32.safetensors")
    assert main(["generate", "--threads", "1", "--device", "cpu", *more]) == 2
    assert message in capsys.readouterr().err
