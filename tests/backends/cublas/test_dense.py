"""Dense products, and the BF16 ones that stand for formats which nothing multiplies."""

from __future__ import annotations

import pytest
import torch

from te_ops.testing import assert_no_worse
from te_ops.testing.cases import row_strided, transposed
from tests.backends.cublas.problems import (
    EMULATED,
    FUSED,
    NATIVE,
    exact,
    fused,
    operands,
    run,
    single,
)

DENSE = (None, None)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("extents", [(16, 32, 48), (1, 1, 5), (7, 3, 1), (0, 4, 5)], ids=str)
def test_dense_equals_the_reference(layout, dtype, extents) -> None:
    if layout == "tn":  # no rows are an empty sum here, not an empty result
        extents = extents[::-1]
    a, b = operands(layout, extents, DENSE, dtype)
    call = single(a, b, layout, dtype=dtype)
    assert torch.equal(run(NATIVE, call, a, b), call.node.prim.reference(a, b, layout, dtype))


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("lead", [(2, 3), (2, 0), (1, 2, 2), ()], ids=str)
def test_leading_dimensions(layout, lead) -> None:
    a = torch.randn(*lead, 5)
    b = {
        "nt": torch.randn(4, 5),
        "nn": torch.randn(5, 4),
        "tn": torch.randn(*lead, 4),
    }[layout]
    y = run(NATIVE, single(a, b, layout, dtype=torch.float32), a, b)
    torch.testing.assert_close(y, exact(a, b, layout).float())


@pytest.mark.parametrize("change", [row_strided, transposed])
def test_strides_are_free(change) -> None:
    a, b = operands("nt", (6, 4, 8), DENSE, torch.float32)
    call = single(a, b, "nt", dtype=torch.float32)
    torch.testing.assert_close(run(NATIVE, call, change(a), change(b)), run(NATIVE, call, a, b))


def test_a_value_that_is_read_twice_comes_once() -> None:
    x = torch.randn(4, 4)
    call = single(x, x, "nt", dtype=torch.float32)
    node = call.node
    same = type(call)(
        (type(node)(node.id, node.prim, (node.inputs[0],) * 2, node.attrs),),
        call.reads[:1], call.writes, call.specs, call.device, call.arch, call.align,
    )  # fmt: skip
    torch.testing.assert_close(run(NATIVE, same, x), x @ x.t())


@pytest.mark.parametrize("extents", [(16, 32, 48), (7, 1, 5), (4, 3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_gradient_is_written_in_fp32(library, dtype, extents) -> None:
    a, b = operands("tn", extents, DENSE, dtype)
    call = fused(a, b, "tn", "cast", dtype=dtype, result=torch.float32)
    y = run(FUSED, call, a, b)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, exact(a, b, "tn").float(), rtol=1e-5, atol=1e-5)
    assert len(library.calls) == (1 if extents[2] else 0)


@pytest.mark.parametrize("lead", [(7,), (2, 3), (0,)], ids=str)
def test_a_bias_is_added_inside(library, lead) -> None:
    a, b = torch.randn(*lead, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    bias = torch.randn(4).bfloat16()
    y = run(FUSED, fused(a, b, "nt", "bias", bias), a, b, bias)
    assert y.shape == (*lead, 4)
    assert len(library.named("addmm")) == 1
    expected = exact(a, b, "nt") + bias.double()
    assert_no_worse(y, expected.bfloat16(), expected)


@pytest.mark.parametrize(
    ("then", "extra", "options", "words"),
    [
        ("gelu", (), {}, "no 'gelu' epilogue"),
        ("bias", (torch.randn(4),), {}, "the bias is torch.float32, the product torch.bfloat16"),
        (
            "add",
            (torch.randn(6, 4).bfloat16(),),
            {},
            "torch adds a bias to a product, and no matrix",
        ),
        ("mul", (torch.randn(6, 4).bfloat16(),), {}, "no 'mul' epilogue"),
        ("cast", (), {"result": torch.float16}, "makes no torch.float16 of torch.bfloat16"),
        ("cast", (), {"result": torch.float32, "write": True}, "read elsewhere too"),
    ],
)
def test_other_epilogues_are_refused_in_words(then, extra, options, words) -> None:
    a, b = operands("nt", (6, 4, 8), DENSE)
    assert words in str(FUSED.reason(fused(a, b, "nt", then, *extra, **options)))


def test_mixed_and_integer_operands_are_refused() -> None:
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(4, 8)
    assert "torch.bfloat16 and torch.float32" in str(NATIVE.reason(single(a, b, "nt")))


def test_the_cpu_is_the_references() -> None:
    a, b = operands("nt", (4, 4, 4), DENSE)
    for kernel in (NATIVE, EMULATED):
        reason = kernel.reason(single(a, b, "nt", arch="cpu"))
        assert reason == "needs cuda, the tensors are on cpu"
