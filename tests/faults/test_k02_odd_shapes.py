"""K02: shapes that tensor cores dislike work, forward and backward, and padding enters nothing."""

from __future__ import annotations

import pytest
import torch

import te_ops as te
from tests.faults import cases
from tests.faults.cases import Case, every_case, every_mode, every_quantizer, every_recipe

ODD = [(50, 64, 64), (24, 128, 64), (1, 30, 1), (7, 33, 5), (17, 3, 130), (129, 1, 17)]


@pytest.mark.parametrize(("rows", "k", "n"), ODD)
@every_mode
def test_linear_of_every_shape(rows: int, k: int, n: int, recipe: te.Recipe | None) -> None:
    """B009 and B011: and near the unquantized numbers, which a padded amax or a lost row would not be."""
    torch.manual_seed(0)
    op = te.Linear(k, n)
    x = torch.randn(rows, k, requires_grad=True)
    for _ in range(2):
        actual = cases.step(op, (x,), recipe)
    plain = cases.step(op, (x,), None)
    four_bits = isinstance(recipe, te.recipe.NVFP4BlockScaling)
    cases.compare(actual, plain, 0.0 if recipe is None else 0.5 if four_bits else 0.15, dtypes=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_recipe
def test_padded_by_the_user_gives_the_same(recipe: te.Recipe, dtype: torch.dtype) -> None:
    """Zero rows added by hand change no record, no scale and no gradient."""
    if isinstance(recipe, te.recipe.NVFP4BlockScaling) and not recipe.disable_stochastic_rounding:
        recipe = te.recipe.NVFP4BlockScaling(
            **{
                k: v
                for k, v in recipe.to_dict().items()
                if k not in ("recipe", "disable_stochastic_rounding")
            },
            disable_stochastic_rounding=True,
        )
    torch.manual_seed(0)
    op, twin = te.Linear(64, 48, dtype=dtype), te.Linear(64, 48, dtype=dtype)
    twin.load_state_dict(op.state_dict())
    x, dy = torch.randn(50, 64, dtype=dtype), torch.randn(50, 48, dtype=dtype)
    for _ in range(2):
        results = []
        for m, pad in ((op, 0), (twin, 78)):
            m.zero_grad()
            xx = torch.cat([x, torch.zeros(pad, 64, dtype=dtype)]).requires_grad_()
            with te.autocast(recipe=recipe):
                y = m(xx)
            y.backward(torch.cat([dy, torch.zeros(pad, 48, dtype=dtype)]))
            results.append(
                cases.Result(
                    [y.detach()[:50]],
                    [xx.grad[:50]],
                    {n: p.grad.clone() for n, p in m.named_parameters()},
                )
            )
        a, b = results
        assert torch.equal(a.outputs[0], b.outputs[0])
        cases.compare(a, b, 1e-6 if dtype is torch.float32 else 4e-3, dtypes=True)
    for name, value in op.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


@pytest.mark.parametrize(
    "shape", [(50, 64), (1, 1), (7, 33), (129, 257), (5,), (3, 5, 20)], ids=str
)
@every_quantizer
def test_quantizers_of_every_shape(quantizer: te.Quantizer, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    q = cases.make_quantized(x, quantizer, rowwise=True, columnwise=True)
    for record in (q.rowwise, q.columnwise):
        assert record is not None
        y = record.dequantize()
        assert y.shape == x.shape
        assert float((y - x).abs().max()) <= 0.45 * float(x.abs().max())


@pytest.mark.parametrize("rows", cases.ROWS[1:])
@every_case
def test_every_row_count(case: Case, rows: int) -> None:
    op, xs = case.fresh(), case.data(rows)
    cases.compare(cases.run(op, xs), case.expected(op, xs), 1e-4)


@pytest.mark.parametrize("features", [1, 2, 3, 7, 31])
def test_norms_and_activations_of_every_width(features: int) -> None:
    x = torch.randn(5, features, dtype=torch.float64, requires_grad=True)
    for op in (
        te.RMSNorm(features, dtype=torch.float64),
        te.LayerNorm(features, dtype=torch.float64),
        te.GELU(),
    ):
        y = op(x)
        assert torch.autograd.gradcheck(op, (x,)), op
        assert y.shape == x.shape
    wide = torch.randn(5, 2 * features, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(te.SwiGLU(), (wide,))


def test_mismatch_is_refused_at_forward_with_both_numbers() -> None:
    s = te.Sequential(te.GELU(), te.Linear(32, 128))
    with pytest.raises(te.ShapeError, match=r"Sequential\.1 \(Linear\).*30 features.*32.*128x32"):
        s(torch.randn(4, 30))
