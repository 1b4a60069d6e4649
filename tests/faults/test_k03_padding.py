"""K03: no padding, tail or uninitialised byte reaches an answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import te_ops as te
from tests.faults import cases
from tests.faults.cases import Case, every_quantizer


@pytest.fixture
def _poisoned() -> Iterator[None]:
    """torch.empty gives NaN (and the largest integer) instead of what happens to be there."""
    torch.use_deterministic_algorithms(True)
    kept = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    assert torch.empty(4).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = kept  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(False)


PAIRS = [
    pytest.param(case, recipe, id=f"{case.name}-{name}")
    for case in cases.CASES
    for name, recipe in cases.MODES.items()
    if recipe is None or case.name in cases.CORE
]


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(("case", "recipe"), PAIRS)
def test_poisoned_memory_changes_nothing(case: Case, recipe: te.Recipe | None) -> None:
    """B015, B017: odd row counts, where there would be padding."""
    op = case.fresh()
    poisoned = cases.step(op, case.data(7), recipe)
    assert all(t is None or torch.isfinite(t).all() for _, t in poisoned.tensors())
    torch.use_deterministic_algorithms(False)
    clean = cases.step(case.fresh(), case.data(7), recipe)
    cases.same(poisoned, clean)


@pytest.mark.usefixtures("_poisoned")
@every_quantizer
def test_quantizing_into_poisoned_memory(quantizer: te.Quantizer) -> None:
    x = torch.randn(96 + 5, 160 + 3)
    a = cases.make_quantized(x, quantizer, rowwise=True, columnwise=True)
    torch.use_deterministic_algorithms(False)
    b = cases.make_quantized(x, quantizer, rowwise=True, columnwise=True)
    for r, s in ((a.rowwise, b.rowwise), (a.columnwise, b.columnwise)):
        assert r is not None
        assert s is not None
        for t, u in zip(r.tensors(), s.tensors(), strict=True):
            assert torch.equal(t.float(), u.float())


@pytest.mark.parametrize("shape", [(96, 160), (5, 7), (33, 100), (2, 3, 40)], ids=str)
@every_quantizer
def test_records_have_no_padding_to_leak(quantizer: te.Quantizer, shape: tuple[int, ...]) -> None:
    """B015: data has as many elements as the source (half of that in FP4), scales one a block of it."""
    q = cases.make_quantized(torch.randn(shape), quantizer, rowwise=True, columnwise=True)
    rows, features = torch.Size(shape[:-1]).numel(), shape[-1]
    for usage, record in (("row", q.rowwise), ("col", q.columnwise)):
        assert record is not None
        made = record.quantizer
        along, across = (features, rows) if usage == "row" else (rows, features)
        if isinstance(made, te.NVFP4Quantizer):
            padded = (
                -(-along // 16) * 16 if made.with_rht and usage == "col" else along
            )  # the transform pads
            assert record.data.numel() == across * -(-padded // 2)
        else:
            assert record.data.numel() == rows * features
        block = {"mxfp8": 32, "nvfp4": 16, "float8_block": 128}.get(made.name)
        square = (
            getattr(made, "with_2d_quantization", False)
            or getattr(made, "block_scaling_dim", 1) == 2
        )
        if block is not None and not square:
            assert record.scale_inv is not None
            assert record.scale_inv.numel() == across * -(-along // block)


@pytest.mark.parametrize("rows", [1, 7, 33])
@every_quantizer
def test_amax_and_scales_are_those_of_the_real_rows(quantizer: te.Quantizer, rows: int) -> None:
    """What lies behind the tensor in its own storage is not looked at."""
    storage = torch.full((rows + 64, 96), 1e30)
    storage[:rows] = torch.randn(rows, 96)
    view = storage[:rows]
    a = cases.make_quantized(view, quantizer, rowwise=True, columnwise=True)
    b = cases.make_quantized(view.clone(), quantizer, rowwise=True, columnwise=True)
    for r, s in ((a.rowwise, b.rowwise), (a.columnwise, b.columnwise)):
        assert r is not None
        assert s is not None
        assert torch.equal(r.dequantize(), s.dequantize())


def test_row_count_changes_leave_no_stale_rows() -> None:
    """A plan that serves several row counts keeps no buffer of the largest."""
    for case in cases.QUANTIZED:
        for recipe in (None, te.recipe.MXFP8BlockScaling(), te.recipe.Float8CurrentScaling()):
            op = case.fresh()
            cases.step(op, case.data(61), recipe)
            cases.same(
                cases.step(op, case.data(35), recipe),
                cases.step(case.fresh(), case.data(35), recipe),
            )
