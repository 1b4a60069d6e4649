"""What Transformer Engine's layers take beside sizes: returned biases, main_grad, is_first_microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_ops as te
from te_ops import layers
from te_ops.errors import PlanError

F64 = torch.float64
MAKERS: dict[str, Any] = {
    "Linear": lambda **k: layers.Linear(32, 32, **k),
    "LayerNormLinear": lambda **k: layers.LayerNormLinear(32, 32, **k),
    "LayerNormMLP": lambda **k: layers.LayerNormMLP(32, 64, **k),
    "MultiheadAttention": lambda **k: layers.MultiheadAttention(32, 4, attention_dropout=0.0, **k),
    "TransformerLayer": lambda **k: layers.TransformerLayer(
        32, 64, 4, attention_dropout=0.0, hidden_dropout=0.0, **k
    ),
}
RETURNING = [name for name in MAKERS if name != "TransformerLayer"]
LAST = {
    "LayerNormLinear": "linear.bias",
    "LayerNormMLP": "fc2.bias",
    "MultiheadAttention": "proj.bias",
}


def pair(name: str, **keywords: Any) -> tuple[te.Op, te.Op]:
    """The layer with and without these keywords, of equal weights and biases that are not zero."""
    torch.manual_seed(0)
    plain, made = MAKERS[name](params_dtype=F64), MAKERS[name](params_dtype=F64, **keywords)
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.1 * torch.randn_like(p))
    made.load_state_dict(plain.state_dict())
    return plain, made


@pytest.mark.parametrize(
    ("name", "normed"),
    [(name, False) for name in RETURNING] + [(name, True) for name in RETURNING[1:]],
)
def test_a_returned_bias_is_the_one_that_was_not_added(name: str, normed: bool) -> None:
    extra: dict[str, Any] = {"return_layernorm_output": True} if normed else {}
    extra |= {"input_layernorm": True} if normed and name == "MultiheadAttention" else {}
    torch.manual_seed(0)
    plain, made = (
        MAKERS[name](params_dtype=F64, **extra),
        MAKERS[name](params_dtype=F64, return_bias=True, **extra),
    )
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.1 * torch.randn_like(p))
    made.load_state_dict(plain.state_dict())
    x = torch.randn(6, 2, 32, dtype=F64)
    want = plain(x)
    y, bias, *more = made(x)
    assert made.num_extra_outputs == 1 + normed == 1 + len(more)
    assert torch.equal(bias, dict(made.named_parameters())[LAST.get(name, "bias")])
    torch.testing.assert_close(y + bias, want[0] if normed else want)
    if normed:
        torch.testing.assert_close(more[0], want[1])
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y + bias, list(made.parameters()), dy)
    wants = torch.autograd.grad(want[0] if normed else want, list(plain.parameters()), dy)
    for a, b in zip(grads, wants, strict=True):
        torch.testing.assert_close(a, b)


def test_a_returned_bias_has_the_dtype_of_the_result() -> None:
    op = layers.Linear(32, 32, return_bias=True)
    with torch.autocast("cpu", torch.bfloat16), te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        y, bias = op(torch.randn(4, 32))
    assert y.dtype is bias.dtype is torch.bfloat16
    (y.float().sum() + 3 * bias.float().sum()).backward()
    assert torch.equal(op.bias.grad, torch.full((32,), 3.0))


def test_a_returned_bias_must_be_there() -> None:
    for name in RETURNING:
        with pytest.raises(PlanError, match="return_bias needs bias=True"):
            MAKERS[name](bias=False, return_bias=True)
    with pytest.raises(PlanError, match="return_bias is an option of MultiheadAttention"):
        MAKERS["TransformerLayer"](return_bias=True)
    with pytest.raises(PlanError, match="give one of them"):
        te.Linear(2, 2, dtype=torch.float16, params_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", MAKERS)
def test_weight_gradients_go_to_main_grad(name: str) -> None:
    plain, made = pair(name, fuse_wgrad_accumulation=True)
    weights = [key for key, p in made.named_parameters() if p.dim() == 2]
    ours, theirs = dict(made.named_parameters()), dict(plain.named_parameters())
    with pytest.raises(PlanError, match="has none"):
        made(torch.randn(6, 2, 32, dtype=F64))
    for key in weights:
        ours[key].main_grad = torch.ones_like(ours[key])
    for seed in range(2):  # two microbatches
        x = torch.randn(6, 2, 32, dtype=F64, generator=torch.Generator().manual_seed(seed))
        made(x).square().sum().backward()
        plain(x).square().sum().backward()
    assert len(weights) == {"Linear": 1, "LayerNormLinear": 1}.get(
        name, 2 + 2 * (name == "TransformerLayer")
    )
    for key, p in ours.items():
        if key in weights:
            assert p.grad is None
            torch.testing.assert_close(p.main_grad, 1.0 + theirs[key].grad)
        else:
            torch.testing.assert_close(p.grad, theirs[key].grad)


@pytest.mark.parametrize("name", MAKERS)
def test_is_first_microbatch(name: str) -> None:
    """The second microbatch reads the copies of the first: same numbers, and a changed weight is found out."""
    torch.manual_seed(0)
    op = MAKERS[name]()
    xs = [torch.randn(8, 4, 32) for _ in range(2)]
    with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        want = [op(x) for x in xs]
        got = [op(x, is_first_microbatch=i == 0) for i, x in enumerate(xs)]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        for y in got:
            y.sum().backward()
        with torch.no_grad():
            next(p for p in op.parameters() if p.dim() == 2).mul_(2.0)
        with pytest.raises(PlanError, match=r"has changed inside te\.weights_frozen"):
            op(xs[0], is_first_microbatch=False)
        assert not torch.equal(op(xs[0], is_first_microbatch=True), want[0])
