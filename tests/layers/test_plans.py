"""Plans of layers: nothing is moved that need not be, and what is saved, in bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import layers
from te_ops.backends.reference import composed
from te_ops.fused import RULES
from tests.compiler.isolation import only, package_rules

# Steps that write what they read once more; views (unpack_heads, split_heads, merge_heads) write nothing.
MOVES = {
    "cat",
    "copy",
    "clone",
    "contiguous",
    "transpose",
    "pack",
    "pack_heads",
    "reshape",
    "slice",
    "cast",
}
RECIPES: dict[str, te.Recipe | None] = {
    "bf16": None,
    "delayed": te.recipe.DelayedScaling(),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
}
# The proportions of Llama 3 8B.
HIDDEN, FFN, HEADS, GROUPS = 512, 1792, 4, 1
KV = HIDDEN // HEADS * GROUPS


def layer(**keywords: Any) -> layers.TransformerLayer:
    form = keywords.get("attn_input_format", "bshd")
    made: dict[str, Any] = {
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "RMSNorm", "activation": "swiglu",
        "bias": False, "attn_input_format": form, "rotary": te.RoPE(HIDDEN // HEADS, qkv_format=form),
        "params_dtype": torch.bfloat16,
    }  # fmt: skip
    return layers.TransformerLayer(HIDDEN, FFN, HEADS, GROUPS, **{**made, **keywords})


@contextlib.contextmanager
def memory_bound_kernels() -> Iterator[None]:
    """Every rule is taken but those of GEMM epilogues, as on a device whose GEMMs are a library's."""
    kernels = [
        composed(rule)
        for rule in RULES
        if rule.stage == "phase" and not rule.name.startswith("gemm")
    ]
    with only(*RULES, *kernels):
        yield


def planned(op: te.Op, recipe: str, shape: tuple[int, ...] = (2, 64, HIDDEN)) -> dict[str, Any]:
    x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    made = RECIPES[recipe]
    with te.autocast(enabled=made is not None, recipe=made):
        plan: dict[str, Any] = op.plan(x).to_dict()
    return plan


def steps(plan: dict[str, Any], direction: str) -> list[str]:
    """Primitives that are run, in order; those of a fused step one by one."""
    return [name for names in _names(plan, direction) for name in names]


def moves(plan: dict[str, Any], direction: str) -> list[str]:
    """Steps that do nothing but move: a placement that another step makes on its way is none."""
    return [
        " + ".join(names) for names in _names(plan, direction) if names and MOVES.issuperset(names)
    ]


def _names(plan: dict[str, Any], direction: str) -> list[list[str]]:
    found = [step["nodes"] for segment in plan["segments"] for step in segment[direction]]
    return [[node.partition("(")[0].split(" ")[0] for node in nodes] for nodes in found]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"attn_input_format": "sbhd"},
        {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True},
        {"bias": True, "normalization": "LayerNorm", "activation": "gelu"},
        {"parallel_attention_mlp": True},
    ],
    ids=lambda k: ",".join(k) or "plain",
)
def test_nothing_is_copied(recipe: str, fused: bool, keywords: dict[str, Any]) -> None:
    """norm, QKV, RoPE, attention, proj, residual, MLP: nothing is moved. Backward, dq, dk and dv are put beside each
    other by what turns or quantizes them; the reference does it in a step of its own."""
    with package_rules(taken=fused):
        plan = planned(layer(**keywords), recipe)
    assert len(plan["segments"]) == 1
    forward, backward = steps(plan, "forward"), steps(plan, "backward")
    assert forward.count("attention") == backward.count("attention_backward") == 1
    assert not moves(plan, "forward")
    assert moves(plan, "backward") == ([] if fused else ["pack_heads"])


def saved(plan: dict[str, Any]) -> dict[str, int]:
    """Bytes that backward keeps, without parameters and their copies."""
    found = [entry for segment in plan["segments"] for entry in segment["saved"]]
    return {v["value"]: v["bytes"] for v in found if "(weight)" not in v["format"]}


def transformer_engine(tokens: int) -> int:
    """What its FP8 layer keeps: BF16 of x twice, of QKV, of the attention's output and of gate and up; FP8 of what its
    four Linears read."""
    return tokens * (
        2 * 2 * HIDDEN + 2 * (HIDDEN + 2 * KV) + 2 * HIDDEN + 2 * 2 * FFN + (3 * HIDDEN + FFN)
    )


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
def test_saved_bytes(recipe: str) -> None:
    """With the kernels that a GPU has, the attention's FP8 output and the activation are rebuilt in backward."""
    with memory_bound_kernels():
        kept = saved(planned(layer(), recipe))
    table = kept.pop("rope_table0")  # cos and sin of each position, shared by all layers of a model
    assert table == 64 * HIDDEN // HEADS * 4
    assert sum(kept.values()) / transformer_engine(2 * 64) <= 0.86
    largest = sorted(kept, key=kept.__getitem__)[-2:]
    assert [kept[name] for name in largest] == [
        128 * 2 * (HIDDEN + 2 * KV),
        128 * 2 * 2 * FFN,
    ]  # QKV; gate and up


def test_saved_bytes_without_those_kernels() -> None:
    """The reference rebuilds what is only moved; the activation is kept: rebuilding it would be a pass of its own."""
    with package_rules(taken=False):
        kept = saved(planned(layer(), "delayed"))
    kept.pop("rope_table0")
    assert sum(kept.values()) / transformer_engine(2 * 64) == pytest.approx(0.968, abs=2e-3)


def test_layers_of_a_model_share_one_table_and_one_plan() -> None:
    config = layers.LlamaConfig(32, 64, 96, 3, 4, tied=True)
    model = layers.llama_model(config)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        plan = model.plan(tokens).to_dict()
    assert len(plan["segments"]) == 1
    forward, backward = steps(plan, "forward"), steps(plan, "backward")
    assert forward.count("rope_table") == 1
    assert forward.count("attention") == 3
    assert not moves(plan, "forward")
    assert moves(plan, "backward") == ["pack_heads"] * 3
    assert backward.count("rope_heads") == 3
