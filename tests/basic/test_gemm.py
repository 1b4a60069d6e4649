"""Linear and the GEMM primitive: layouts, dtypes, roles, gradients for every mask."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import te_ops as te
from te_ops.basic.gemm import GEMM
from te_ops.graph import Graph, Spec

RECIPES = {
    "delayed": te.recipe.DelayedScaling(),
    "current": te.recipe.Float8CurrentScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
    "nvfp4": te.recipe.NVFP4BlockScaling(),
}
NOISE = {"nvfp4": 0.35}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (0, 5), (1, 5), (5,)], ids=str)
@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)), ids=str)
def test_linear_equals_torch_for_every_gradient_mask(bias, shape, mask) -> None:
    ours = te.Linear(5, 7, bias=bias, dtype=torch.float64)
    theirs = torch.nn.Linear(5, 7, bias=bias, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    for module in (ours, theirs):
        module.weight.requires_grad_(mask[1])
        if bias:
            module.bias.requires_grad_(mask[2])
    x = torch.randn(shape, dtype=torch.float64)
    a, b = x.clone().requires_grad_(mask[0]), x.clone().requires_grad_(mask[0])
    y, expected = ours(a), theirs(b)
    torch.testing.assert_close(y, expected)
    assert y.requires_grad == expected.requires_grad
    if y.requires_grad:
        dy = torch.randn_like(y)
        y.backward(dy)
        expected.backward(dy)
        for p, q in [(a, b), *zip(ours.parameters(), theirs.parameters(), strict=True)]:
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adjacent_linears_work_under_every_recipe(recipe, dtype) -> None:
    model = te.Sequential(te.Linear(64, 48, dtype=dtype), te.Linear(48, 1, bias=False, dtype=dtype))
    x = torch.randn(24, 64, dtype=dtype, requires_grad=True)
    expected = F.linear(
        F.linear(x.double(), model[0].weight.double(), model[0].bias.double()),
        model[1].weight.double(),
    )
    reference = torch.autograd.grad(expected.sum(), (x, *model.parameters()))
    for _ in range(2):  # delayed scaling: a second step with real scales
        with te.autocast(recipe=RECIPES[recipe]):
            y = model(x)
        grads = torch.autograd.grad(y.sum(), (x, *model.parameters()))
    noise = NOISE.get(recipe, 0.12)
    assert y.dtype is dtype
    assert (y.double() - expected).norm() <= noise * expected.norm()
    for ours, theirs in zip(grads, reference, strict=True):
        assert (ours.double() - theirs.double()).norm() <= noise * theirs.double().norm()


def test_emulated_gemm_of_fp32_inputs_is_fp32() -> None:
    recipe = te.recipe.MXFP8BlockScaling()
    layer = te.Linear(64, 32, bias=False)
    x = torch.randn(16, 64)
    with te.autocast(recipe=recipe):
        y = layer(x)
    role = te.Role("gemm", te.graph.Phase.FORWARD, "input", "")
    q = [te.quantize(t, recipe.quantizer(role)).dequantize() for t in (x, layer.weight.detach())]
    torch.testing.assert_close(y, q[0] @ q[1].t(), rtol=1e-6, atol=1e-6)


def test_dtype_is_autocasts_else_the_weights() -> None:
    layer = te.Linear(8, 4)
    assert layer(torch.randn(2, 8).half()).dtype is torch.float32
    x = torch.randn(2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype is torch.float32
    assert layer.weight.grad.dtype is torch.float32


@pytest.mark.parametrize(
    ("layout", "a", "b", "out"),
    [
        ("nt", (6, 5), (7, 5), (6, 7)),
        ("nn", (6, 7), (7, 5), (6, 5)),
        ("tn", (2, 3, 7), (2, 3, 5), (7, 5)),
    ],
)
def test_layouts_and_their_gradients(layout, a, b, out) -> None:
    class Gemm(te.Op):
        def emit(self, g, x, y):
            return g.call(GEMM, x, y, layout=layout, dtype=torch.float64)

    x = torch.randn(a, dtype=torch.float64, requires_grad=True)
    y = torch.randn(b, dtype=torch.float64, requires_grad=True)
    assert Gemm()(x, y).shape == out
    assert torch.autograd.gradcheck(Gemm(), (x, y))


def test_wrong_features_name_the_op_the_value_and_the_rule() -> None:
    model = te.Sequential(te.Linear(16, 32), te.Linear(32, 128))
    with pytest.raises(te.ShapeError) as caught:
        te.Sequential(te.Identity(), te.Linear(32, 128))(torch.randn(4, 30))
    assert str(caught.value) == (
        "Sequential.1 (Linear): input has 30 features, weight expects 32 (weight is 128x32)"
    )
    assert model(torch.randn(4, 16)).shape == (4, 128)
    for bad in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(te.PlanError, match="must be at least 1"):
            te.Linear(*bad)
    for option in ("accumulate_into_main_grad", "fuse_wgrad_accumulation"):
        with pytest.raises(te.PlanError, match=f"Linear: {option} must be True or False, got 'no'"):
            te.Linear(4, 4, **{option: "no"})  # type: ignore[arg-type]


def test_specs_are_inferred_without_tensors() -> None:
    g = Graph()
    x = g.input(0, Spec((4, 16), torch.bfloat16))
    w = g.input(1, Spec((8, 16), torch.bfloat16))
    y = g.call(GEMM, x, w, layout="nt", dtype=torch.float32)
    assert g.spec(y) == Spec((4, 8), torch.float32)


def test_meta_construction_allocates_nothing_and_resets_like_eager() -> None:
    layer = te.Linear(256, 256, device="meta", init_std=0.5)
    assert layer.weight.is_meta
    with pytest.raises(te.PlanError, match="meta"):
        layer(torch.randn(2, 256))
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert abs(layer.weight.std().item() - 0.5) < 0.02
    assert layer(torch.randn(2, 256)).shape == (2, 256)
