from __future__ import annotations

import dataclasses
import json
import pickle
from typing import ClassVar

import pytest
import torch

from te_ops.errors import RecipeError
from te_ops.quantizers import (
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    Usage,
    quantizer_from_dict,
    quantizer_to_dict,
)
from te_ops.quantizers.base import Layout
from tests.quantizers.kinds import QUANTIZERS, every, make, needs, usages

SHAPES = [(), (0,), (7,), (0, 4), (4, 0), (18, 35), (2, 3, 20), (1, 1, 1, 1)]


@every
def test_is_a_value(quantizer):
    twin = quantizer_from_dict(quantizer_to_dict(quantizer))
    assert twin == quantizer
    assert hash(twin) == hash(quantizer)
    assert repr(twin) == repr(quantizer)
    assert [q for q in QUANTIZERS if q == quantizer] == [quantizer]
    assert pickle.loads(pickle.dumps(quantizer)) == quantizer
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantizer.dtype = torch.float8_e5m2


@every
def test_dictionaries_are_plain(quantizer):
    plain = quantizer.to_dict()
    assert quantizer_from_dict(json.loads(json.dumps(plain))) == quantizer


def test_every_kind_and_description_is_there():
    assert {q.name for q in QUANTIZERS} == {
        "float8_delayed",
        "float8_current",
        "float8_block",
        "mxfp8",
        "nvfp4",
        "hybrid",
        "identity",
    }
    assert len({q.describe() for q in QUANTIZERS}) == len(QUANTIZERS)
    assert [q.name for q in QUANTIZERS if q.stateful] == ["float8_delayed"] * 2


def test_unknown_names_and_fields():
    with pytest.raises(RecipeError, match="int3"):
        quantizer_from_dict({"name": "int3"})
    with pytest.raises(TypeError):
        quantizer_from_dict({"name": "mxfp8", "block": 16})


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_says_what_records_hold(quantizer, shape, dtype):
    x = torch.randn(shape).to(dtype)
    row, col, amax = quantizer.records(x, row=True, col=True, **needs(quantizer))
    assert amax.shape == ()
    assert amax.dtype is torch.float32
    for record, usage in ((row, Usage.ROW), (col, Usage.COL)):
        assert record.usage is usage
        assert record.shape == shape
        assert record.dtype is dtype
        layout = quantizer.layout(shape, usage, dtype)
        assert layout == tuple((tuple(t.shape), t.dtype) for t in record.tensors())
        assert all(t.is_contiguous() for t in record.tensors())
        assert record.nbytes == sum(t.numel() * t.element_size() for t in record.tensors())
        values = record.dequantize()
        assert values.shape == shape
        assert values.dtype is dtype
        assert values.is_contiguous()
        assert torch.equal(record.dequantize(torch.float64).to(dtype), values)
        empty = quantizer.make_empty(
            shape, dtype=dtype, rowwise=usage is Usage.ROW, columnwise=usage is Usage.COL
        )
        made = empty.rowwise or empty.columnwise
        assert layout == tuple((tuple(t.shape), t.dtype) for t in made.tensors())
        assert not made.dequantize().any()


@every
def test_asking_for_nothing_gives_nothing(quantizer):
    row, col, _ = quantizer.records(torch.ones(4, 4), row=False, col=False, **needs(quantizer))
    assert row is None
    assert col is None


@every
def test_one_usage_equals_the_same_beside_the_other(quantizer):
    x = torch.randn(20, 40)
    both = quantizer.records(x, row=True, col=True, **needs(quantizer))[:2]
    row = quantizer.records(x, row=True, col=False, **needs(quantizer))[0]
    col = quantizer.records(x, row=False, col=True, **needs(quantizer))[1]
    for a, b in zip(both, (row, col), strict=True):
        assert torch.equal(a.dequantize(), b.dequantize())


@every
def test_transposed_agrees_with_exact_other_usage(quantizer):
    row, col, _ = quantizer.records(torch.randn(20, 40), row=True, col=True, **needs(quantizer))
    if quantizer.exact_other_usage():
        assert torch.equal(row.transposed().dequantize(), col.dequantize())
        assert torch.equal(col.transposed().dequantize(), row.dequantize())
    elif quantizer.name != "hybrid":
        assert row.transposed() is None
        assert col.transposed() is None


@every
def test_the_source_is_left_alone(quantizer):
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        x = torch.randn(20, 40).to(dtype)
        kept = x.clone()
        quantizer.records(x, row=True, col=True, **needs(quantizer))
        make(x, quantizer, columnwise=True).dequantize().zero_()
        assert torch.equal(x, kept)


@every
def test_reading_a_record_twice_gives_the_same(quantizer):
    q = make(torch.randn(20, 40), quantizer, columnwise=True)
    for record in (q.rowwise, q.columnwise):
        first = record.dequantize().clone()
        record.dequantize().zero_()
        assert torch.equal(record.dequantize(), first)


@every
@usages
def test_strides_do_not_matter(quantizer, rowwise, columnwise):
    base = torch.randn(40, 24)
    for x in (base.t(), base[::2, 1::3], base[:1].expand(9, 24), base[0, 0].expand(3, 4)):
        a, b = (
            make(t, quantizer, rowwise=rowwise, columnwise=columnwise) for t in (x, x.contiguous())
        )
        assert torch.equal(a.dequantize(), b.dequantize())


@every
def test_integers_are_refused(quantizer):
    with pytest.raises(RecipeError, match=r"torch\.int32"):
        quantizer.records(torch.ones(3, dtype=torch.int32), row=True, col=False, **needs(quantizer))


@every
def test_tensors_and_their_inverse(quantizer):
    q = make(torch.randn(20, 40), quantizer, columnwise=True)
    for record in (q.rowwise, q.columnwise):
        moved = record.with_tensors(t.clone() for t in record.tensors())
        assert torch.equal(moved.dequantize(), record.dequantize())
        assert moved.data.data_ptr() != record.data.data_ptr()
        with pytest.raises(ValueError, match="zip"):
            record.with_tensors([])


@every
@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 40), (1, 6, 40)])
def test_views_keep_the_bytes(quantizer, shape):
    x = torch.randn(2, 3, 40)
    q = make(x, quantizer, columnwise=True)
    for record in (q.rowwise, q.columnwise):
        view = record.reshaped(shape)
        assert view.data.data_ptr() == record.data.data_ptr()
        assert torch.equal(view.dequantize(), record.dequantize().view(shape))
        torn = record.reshaped((40, 6))
        if torn is not None:
            assert torch.equal(torn.dequantize(), record.dequantize().view(40, 6))


def test_a_quantizer_of_ones_own():
    @dataclasses.dataclass(frozen=True)
    class Sign(Quantizer):
        name: ClassVar[str] = "test_sign"

        def records(self, x, *, row, col, state=None, seed=None):
            base = MXFP8Quantizer().records(x.sign(), row=row, col=col)
            own = [None if r is None else dataclasses.replace(r, quantizer=self) for r in base[:2]]
            return own[0], own[1], base[2]

        def decode(self, record):
            return MXFP8Quantizer().decode(record)

        def layout(self, shape, usage, dtype=torch.float32) -> Layout:
            return MXFP8Quantizer().layout(shape, usage)

        def describe(self):
            return "sign"

    x = torch.randn(5, 7)
    q = Sign().quantize(x, columnwise=True)
    assert torch.equal(Sign().dequantize(q), x.sign())
    assert isinstance(quantizer_from_dict(Sign().to_dict()), Sign)
    with pytest.raises(RecipeError, match="exists"):
        type("Other", (Quantizer,), {"name": "mxfp8"})


def test_switches_show_in_descriptions():
    assert Float8CurrentScalingQuantizer().describe() == "e4m3 per-tensor current"
    assert MXFP8Quantizer().describe() == "mxfp8 e4m3"
    everything = NVFP4Quantizer(with_rht=True, stochastic_rounding=True, row_scaled=True)
    assert everything.describe() == "nvfp4 rht stochastic row-scaled"
