"""Safetensors files: round trips with quantizer state, tied weights, the format's version."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file as plain_save

import te_ops as te


def trained() -> te.Sequential:
    torch.manual_seed(0)
    model = te.Sequential(te.Linear(16, 16), te.GELU(), te.Linear(16, 16))
    with te.autocast(recipe=te.recipe.DelayedScaling(amax_history_len=4)):
        y = model(torch.randn(4, 16))
    y.sum().backward()
    return model


def test_a_fresh_model_loads_weights_and_state_strictly(tmp_path) -> None:
    model = trained()
    te.save_file(model, tmp_path / "m.safetensors", {"note": "mine"})
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert file.metadata()["te_ops.state"] == "1"
        assert file.metadata()["note"] == "mine"
    fresh = te.Sequential(te.Linear(16, 16), te.GELU(), te.Linear(16, 16))
    te.load_file(fresh, tmp_path / "m.safetensors")
    state = fresh.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert any(".delayed." in name for name in state)


def test_tied_weights_are_written_once_and_stay_tied(tmp_path) -> None:
    def tied() -> te.Sequential:
        model = te.Sequential(te.Linear(8, 8, bias=False), te.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        return model

    model, fresh = tied(), tied()
    te.save_file(model, tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert list(file.keys()) == ["0.weight"]
    te.load_file(fresh, tmp_path / "m.safetensors")
    assert torch.equal(fresh[1].weight, model[0].weight)
    assert fresh[1].weight is fresh[0].weight


def test_a_later_format_is_refused_and_a_plain_file_loads(tmp_path) -> None:
    model = te.Sequential(te.Linear(4, 4))
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    plain_save(weights, tmp_path / "late.safetensors", metadata={"te_ops.state": "9"})
    with pytest.raises(te.RecipeError, match=r"format 9.*newer te_ops"):
        te.load_file(model, tmp_path / "late.safetensors")
    plain_save(weights, tmp_path / "plain.safetensors")
    te.load_file(te.Sequential(te.Linear(4, 4)), tmp_path / "plain.safetensors")
