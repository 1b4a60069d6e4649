"""Providers: the same numbers from all, checks that can fail, what is absent."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.suite import blocks, data, peers

CPU = torch.device("cpu")
OURS, TORCH = (next(p for p in peers.PROVIDERS if p.name == n) for n in ("te_ops", "torch"))


def small(name: str) -> peers.Data:
    case = next(c for c in data.CASES if c.name == name)
    return peers.Data.draw(case.smaller(64, 32), CPU)


@pytest.mark.parametrize("recipe", data.RECIPES)
@pytest.mark.parametrize("name", ["mlp", "linear", "norm_linear", "gelu_mlp", "layer"])
def test_te_ops_is_within_the_tolerance(name: str, recipe: str) -> None:
    drawn = small(name)
    if recipe.endswith(data.DPA) and name != "layer":
        with pytest.raises(peers.Unsupported, match="no attention"):
            OURS.build(drawn, recipe)
        return
    arm = OURS.build(drawn, recipe)
    for _ in range(3):  # delayed scaling finds its scales
        arm.step()
    found = peers.errors(arm.results(), peers.reference(drawn))
    assert max(found.values()) <= peers.tolerance(drawn.case, recipe), found


@pytest.mark.parametrize("name", ["mlp", "linear", "norm_linear", "gelu_mlp", "layer"])
def test_torch_is_within_the_tolerance_and_in_bf16_only(name: str) -> None:
    drawn = small(name)
    found = peers.errors(TORCH.build(drawn, "none").results(), peers.reference(drawn))
    assert max(found.values()) <= peers.tolerance(drawn.case, "none"), found
    with pytest.raises(peers.Unsupported):
        TORCH.build(drawn, "delayed")


@pytest.mark.parametrize("recipe", data.NATIVE)
def test_wrong_results_are_seen_under_every_recipe(recipe: str) -> None:
    drawn = small("mlp")
    right = peers.reference(drawn)
    limit = peers.tolerance(drawn.case, recipe)
    swapped = small("mlp")
    gate, up = swapped.weights[1].chunk(2)
    swapped.weights[1] = torch.cat([up, gate])
    wrong = {
        "gate and up swapped": peers.reference(swapped),
        "a gradient twice": {**right, "dw1": 2 * right["dw1"]},
        "a row missing": {**right, "y": right["y"].index_fill(0, torch.arange(16), 0.0)},
        "a NaN": {**right, "dx": right["dx"].index_fill(0, torch.tensor([3]), float("nan"))},
    }
    for what, results in wrong.items():
        assert not max_or_nan(peers.errors(results, right)) <= limit, what
    assert max_or_nan(peers.errors(right, right)) == 0


def max_or_nan(found: dict[str, float]) -> float:
    return float("nan") if any(e != e for e in found.values()) else max(found.values())


def test_what_is_not_installed_is_absent() -> None:
    pytest.importorskip("torch")
    absent = [p for p in peers.PROVIDERS if p.name in ("te-module", "te-ops", "liger", "torchao")]
    for provider in absent:
        recipe = "current" if provider.name == "torchao" else "none"
        with pytest.raises(ImportError):
            provider.build(small("mlp"), recipe)


def test_all_arms_hold_the_same_weights() -> None:
    drawn = small("gelu_mlp")
    arms = [OURS.build(drawn, "none"), TORCH.build(drawn, "none")]
    for arm in arms:
        assert all(map(torch.equal, arm.parameters, drawn.weights))
    with pytest.raises(RuntimeError, match="do not fit"):
        peers._copy(arms[0].parameters[:-1], drawn)


@pytest.mark.parametrize("name", ["layer", "layer_small"])
def test_transformer_engine_cannot_fall_back_to_unfused_attention(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice is made at each call, from the environment as it is then. Its heads are views of one weight, whose
    rows are in the order of ours."""
    seen: list[str | None] = []

    class Layer(nn.Module):
        def __init__(self, *_: Any, **keywords: Any) -> None:
            super().__init__()
            assert (keywords["fuse_qkv_params"], keywords["qkv_weight_interleaved"]) == (
                True,
                False,
            )

        def forward(self, x: torch.Tensor, rotary_pos_emb: torch.Tensor) -> torch.Tensor:
            seen.append(os.environ.get("NVTE_UNFUSED_ATTN"))
            return x

    library = ModuleType("transformer_engine.pytorch")
    library.TransformerLayer = Layer  # type: ignore[attr-defined]
    library.RotaryPositionEmbedding = lambda *_, **__: lambda length: torch.zeros(length)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", library)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    layer = next(c for c in data.CASES if c.name == name).layers[0]
    made = blocks.transformer_engine(layer, 8, CPU)
    made(torch.zeros(1, 8, layer.width))
    assert seen == ["0"]
