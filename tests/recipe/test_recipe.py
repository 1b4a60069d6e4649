"""Recipes as values, roles, per-layer recipes, and autocast as a context."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import threading
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.context import current
from te_ops.errors import RecipeError
from te_ops.graph import Phase
from te_ops.recipe import Format, PerLayer, Recipe, Role, default_recipe, from_dict
from tests.runtime.cases import RECIPES

BUILT_IN = [recipe for recipe in RECIPES.values() if recipe is not None]
X = torch.linspace(-1.0, 1.0, 32 * 32).reshape(32, 32)


def role(operand: str, path: str = "0", prim: str = "gemm") -> Role:
    phase = Phase.DGRAD if operand in ("grad_output", "do", "dp") else Phase.FORWARD
    return Role(prim, phase, operand, path)


# -- values


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_recipes_are_values(recipe: Recipe) -> None:
    again = copy.deepcopy(recipe)
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    with pytest.raises(FrozenInstanceError):
        recipe.backward_override = None  # type: ignore[misc]
    with pytest.raises(TypeError):
        type(recipe)(nonsense=1)
    with pytest.raises(TypeError):
        type(recipe)(None)  # type: ignore[call-arg]


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_to_dict_and_back(recipe: Recipe) -> None:
    made = recipe.to_dict()
    assert made["recipe"] == type(recipe).__name__
    assert set(made) == {"recipe"} | {f.name for f in fields(recipe)}
    assert from_dict(made) == recipe


def test_per_layer_to_dict_and_back() -> None:
    recipe = PerLayer(
        layers={"head": None, "layers.*": te.recipe.MXFP8BlockScaling()},
        default=te.recipe.Float8CurrentScaling(fp8_format=Format.E4M3),
    )
    assert from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"recipe": "Nope"}, "Nope"),
        ({}, "unknown recipe None"),
        ({"recipe": "MXFP8BlockScaling", "margin": 1}, "margin"),
    ],
)
def test_from_dict_is_strict(values: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        from_dict(values)


def test_callables_do_not_go_into_a_dict() -> None:
    for recipe in (
        te.recipe.CustomRecipe(qfactory=lambda role: None),
        te.recipe.DelayedScaling(amax_compute_algo=lambda history: history[0]),
    ):
        with pytest.raises(RecipeError, match="function"):
            recipe.to_dict()


@pytest.mark.parametrize(
    "make",
    [
        lambda: te.recipe.DelayedScaling(amax_history_len=0),
        lambda: te.recipe.DelayedScaling(amax_history_len=1.5),  # type: ignore[arg-type]
        lambda: te.recipe.DelayedScaling(margin=0.5),  # type: ignore[arg-type]
        lambda: te.recipe.DelayedScaling(margin=5000),
        lambda: te.recipe.DelayedScaling(scaling_factor_compute_algo="x"),  # type: ignore[arg-type]
        lambda: te.recipe.DelayedScaling(amax_compute_algo="mean"),
        lambda: te.recipe.DelayedScaling(fp8_format="E4M3"),  # type: ignore[arg-type]
        lambda: te.recipe.DelayedScaling(backward_override="dequantized"),
        lambda: te.recipe.Float8CurrentScaling(amax_epsilon=-1.0),
        lambda: te.recipe.Float8CurrentScaling(amax_epsilon=float("nan")),
        lambda: te.recipe.Float8CurrentScaling(split_accumulator=(True, True)),  # type: ignore[arg-type]
        lambda: te.recipe.Float8CurrentScaling(backward_override="none"),  # type: ignore[arg-type]
        lambda: te.recipe.Float8BlockScaling(x_block_scaling_dim=3),
        lambda: te.recipe.Float8BlockScaling(x_block_scaling_dim=2),
        lambda: te.recipe.NVFP4BlockScaling(nvfp4_4over6="some"),
        lambda: te.recipe.CustomRecipe(),
        lambda: te.recipe.CustomRecipe(qfactory=3),  # type: ignore[arg-type]
        lambda: PerLayer(layers={"a": 3}),  # type: ignore[dict-item]
        lambda: PerLayer(layers=[1]),  # type: ignore[arg-type]
        lambda: PerLayer(layers=3),  # type: ignore[arg-type]
        lambda: PerLayer(backward_override="dequantized"),
    ],
)
def test_wrong_values_are_refused(make: Any) -> None:
    with pytest.raises(RecipeError):
        make()


# -- what they say


def test_formats_by_pass() -> None:
    hybrid, e4m3 = (
        te.recipe.Float8CurrentScaling(),
        te.recipe.Float8CurrentScaling(fp8_format=Format.E4M3),
    )
    for operand, first, second in (
        ("input", torch.float8_e4m3fn, torch.float8_e4m3fn),
        ("grad_output", torch.float8_e5m2, torch.float8_e4m3fn),
    ):
        assert hybrid.quantizer(role(operand)).dtype is first  # type: ignore[union-attr]
        assert e4m3.quantizer(role(operand)).dtype is second  # type: ignore[union-attr]


def test_block_shapes_and_nvfp4_options_by_operand() -> None:
    block = te.recipe.Float8BlockScaling()
    assert [
        block.quantizer(role(o)).block_scaling_dim for o in ("input", "weight", "grad_output")
    ] == [1, 2, 1]  # type: ignore[union-attr]
    nv = te.recipe.NVFP4BlockScaling()
    got = {o: nv.quantizer(role(o)) for o in ("input", "weight", "grad_output")}
    assert [q.with_rht for q in got.values()] == [True, False, True]  # type: ignore[union-attr]
    assert [q.with_2d_quantization for q in got.values()] == [False, True, False]  # type: ignore[union-attr]
    assert [q.stochastic_rounding for q in got.values()] == [False, False, True]  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_role_decides_not_its_phase(recipe: Recipe) -> None:
    """x of wgrad is quantized like x of fprop: one quantize node."""
    for operand in ("input", "weight"):
        forward = recipe.quantizer(role(operand))
        for phase in (Phase.RECOMPUTE, Phase.DGRAD, Phase.WGRAD):
            assert recipe.quantizer(Role("gemm", phase, operand, "0")) == forward


def test_accumulation() -> None:
    phases = (Phase.FORWARD, Phase.RECOMPUTE, Phase.DGRAD, Phase.WGRAD)
    current_ = te.recipe.Float8CurrentScaling(split_accumulator=(False, True, False))
    assert [current_.accumulation(p) for p in phases] == ["fast", "fast", "split", "fast"]
    assert {te.recipe.Float8BlockScaling().accumulation(p) for p in phases} == {"split"}


def test_per_layer_first_match_wins() -> None:
    a, b = te.recipe.MXFP8BlockScaling(), te.recipe.Float8CurrentScaling()
    recipe = PerLayer(layers={"layers.0.*": a, "layers.*": b, "head": None}, default=a)
    assert recipe.for_path("layers.0.fc") is a
    assert recipe.for_path("layers.10.fc") is b
    assert recipe.for_path("head") is None
    assert recipe.for_path("other") is a
    assert recipe.quantizer(role("input", "layers.3.x")) == b.quantizer(role("input"))
    assert recipe.quantizer(role("input", "head")) is None
    nested = PerLayer(layers={"a.*": recipe}, default=None)
    assert nested.for_path("a.b") is a
    assert nested.for_path("b") is None


def test_per_layer_in_a_pipeline() -> None:
    model = te.Sequential({"body": te.Linear(32, 32), "head": te.Linear(32, 32)})
    recipe = PerLayer(layers={"head": None}, default=te.recipe.MXFP8BlockScaling())
    with te.autocast(recipe=recipe), torch.no_grad():
        y = model(X)
        with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
            h = model["body"](X)
    assert torch.equal(y, model["head"](h.detach()).detach())


def test_custom_recipe_answers() -> None:
    answers: dict[str, Any] = {
        "input": te.MXFP8Quantizer(),
        "weight": None,
        "grad_output": te.recipe.DelayedScaling(),
    }
    recipe = te.recipe.CustomRecipe(qfactory=lambda r: answers[r.operand])
    assert recipe.quantizer(role("input")) == te.MXFP8Quantizer()
    assert recipe.quantizer(role("weight")) is None
    assert recipe.delayed(role("grad_output")) == te.recipe.DelayedScaling()
    assert recipe.quantizer(role("grad_output")) == te.Float8Quantizer(torch.float8_e5m2)
    assert recipe.delayed(role("input")) is None
    for wrong, match in ((3, "int"), (te.Float8Quantizer(), "DelayedScaling value")):
        answers["input"] = wrong
        with pytest.raises(RecipeError, match=match):
            recipe.quantizer(role("input"))


def test_default_recipe_without_a_gpu() -> None:
    if not torch.cuda.is_available():
        assert default_recipe() == te.recipe.DelayedScaling()


def test_a_recipe_of_ones_own() -> None:
    class Mine(Recipe):
        def quantizer(self, role: Role) -> Any:
            return te.MXFP8Quantizer() if role.operand == "weight" else None

    op = te.Linear(32, 32, bias=False)
    with te.autocast(recipe=Mine()), torch.no_grad():
        y = op(X)
    w = te.quantize(op.weight.detach(), te.MXFP8Quantizer()).dequantize()
    torch.testing.assert_close(y, X @ w.t())
    with pytest.raises(RecipeError, match="does not define quantizer"):
        Recipe().quantizer(role("input"))


# -- autocast


def test_autocast_nests_and_restores() -> None:
    assert current() is None
    outer, inner = te.recipe.MXFP8BlockScaling(), te.recipe.Float8CurrentScaling()
    with te.autocast(recipe=outer):
        frame = current()
        assert frame is not None
        assert (frame.recipe, frame.enabled) == (outer, True)
        with te.autocast(recipe=inner):
            nested = current()
            assert nested is not None
            assert nested.recipe == inner
            assert nested.region is frame.region
        with te.autocast(enabled=False):
            off = current()
            assert off is not None
            assert not off.enabled
        assert current() is frame
    assert current() is None


def test_autocast_is_restored_after_an_error() -> None:
    with pytest.raises(KeyError), te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        raise KeyError
    assert current() is None


def test_an_instance_is_entered_once_at_a_time() -> None:
    region = te.autocast(recipe=te.recipe.MXFP8BlockScaling())
    with region, pytest.raises(RecipeError, match="active already"):
        region.__enter__()
    with region:
        assert current() is not None
    assert current() is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_regions_of_generators_may_end_in_any_order(order: tuple[int, ...]) -> None:
    """Each holds from its entry to its exit, and what is observed is committed with the last."""
    recipes = [te.recipe.DelayedScaling(amax_history_len=n) for n in (4, 5, 6)]

    def held(recipe: Recipe) -> Iterator[None]:
        with te.autocast(recipe=recipe):
            yield

    op, open_ = te.Linear(32, 32), [held(recipe) for recipe in recipes]
    for generator in open_:
        next(generator)
    op(X)
    left, history = [0, 1, 2], "quantizer.delayed.input.amax_history"
    for i in order:
        assert not op.state_dict()[history].any()
        assert next(open_[i], None) is None
        left.remove(i)
        frame = current()
        assert (None if frame is None else frame.recipe) == (recipes[left[-1]] if left else None)
    assert op.state_dict()[history][-1] == X.abs().max()
    with te.autocast(recipe=recipes[0]):
        op(2 * X)
    assert op.state_dict()[history][-1] == 2 * X.abs().max()


def test_an_exit_in_another_thread_is_refused_and_changes_nothing() -> None:
    region, said = te.autocast(recipe=te.recipe.MXFP8BlockScaling()), []

    def leave() -> None:
        with pytest.raises(RecipeError, match="another thread or task than the entry"):
            region.__exit__(None, None, None)
        said.append(current())

    with region:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert said == [None]
        assert current() is not None
    assert current() is None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"recipe": 3}, "int"),
        ({"recipe": te.recipe.MXFP8BlockScaling}, "type|ABCMeta"),
        ({"dtype": torch.bfloat16}, r"torch\.autocast"),
    ],
)
def test_wrong_arguments_of_autocast(options: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        te.autocast(**options)


def test_equal_recipes_are_one_key() -> None:
    keys = []
    for _ in range(2):
        with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
            frame = current()
            assert frame is not None
            keys.append(frame.key)
    assert keys[0] == keys[1]
    assert hash(keys[0]) == hash(keys[1])
    with te.autocast(recipe=replace(te.recipe.Float8CurrentScaling(), amax_epsilon=1.0)):
        frame = current()
        assert frame is not None
        assert frame.key != keys[0]


def test_threads_and_tasks_have_their_own() -> None:
    found: list[Any] = []
    with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        thread = threading.Thread(target=lambda: found.append(current()))
        thread.start()
        thread.join()
    assert found == [None]

    async def one(recipe: Recipe) -> Any:
        with te.autocast(recipe=recipe):
            await asyncio.sleep(0)
            frame = current()
            assert frame is not None
            return frame.recipe

    async def both() -> list[Any]:
        return list(await asyncio.gather(*(one(r) for r in BUILT_IN)))

    assert asyncio.run(both()) == BUILT_IN


def test_enabled_false_is_the_plain_computation() -> None:
    op = te.Linear(32, 32)
    with te.autocast(enabled=False, recipe=te.recipe.NVFP4BlockScaling()):
        y = op(X)
    assert torch.equal(y, op(X))
    assert set(op.state_dict()) == {"weight", "bias"}


def test_roles_are_values() -> None:
    assert role("input") == role("input")
    assert hash(role("q", prim="attention")) == hash(role("q", prim="attention"))
    assert [role(o).is_grad for o in ("input", "weight", "grad_output", "do", "dp", "q")] == [
        False, False, True, True, True, False,
    ]  # fmt: skip
