"""K33: modes, options, hooks and children of a pipeline may change after a call; the next one sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_ops as te
from te_ops.compiler.passes import passes
from tests.faults import cases
from tests.faults.pairs import builds, check_pair, pair, plain

pytestmark = pytest.mark.usefixtures("no_plans")


def test_train_and_eval_have_a_plan_each() -> None:
    s = te.Sequential(te.Linear(8, 8), te.Dropout(0.5))
    x = torch.randn(64, 8)
    with builds(2):
        for _ in range(3):
            s.train()
            assert (s(x) == 0).any()
            s.eval()
            torch.testing.assert_close(s(x), F.linear(x, s[0].weight, s[0].bias))
    s[1].train()
    assert (s(x) == 0).any()


Edit = Callable[[Any], None]


def _set(name: str, value: Any) -> Edit:
    return lambda op: setattr(op, name, value)


EDITS: list[
    tuple[
        str, Callable[[], te.Op], Edit, Callable[[], te.Op], Callable[[], tuple[torch.Tensor, ...]]
    ]
] = [
    (
        "scale",
        lambda: te.ConstantScale(2.0),
        _set("scale", 3.0),
        lambda: te.ConstantScale(3.0),
        lambda: _row(8),
    ),
    (
        "eps",
        lambda: te.RMSNorm(8),
        _set("eps", 1.0),
        lambda: te.RMSNorm(8, eps=1.0),
        lambda: _row(8),
    ),
    (
        "approximate",
        lambda: te.GELU(),
        _set("approximate", "none"),
        lambda: te.GELU("none"),
        lambda: _row(8),
    ),
    (
        "interleave",
        lambda: te.SwiGLU(),
        _set("glu_interleave_size", 2),
        lambda: te.SwiGLU(2),
        lambda: _row(8),
    ),
    (
        "limit",
        lambda: te.ClampedSwiGLU(),
        _set("limit", 0.5),
        lambda: te.ClampedSwiGLU(0.5),
        lambda: _row(8),
    ),
    (
        "beta",
        lambda: te.SiTUGLU(),
        _set("beta2", 0.5),
        lambda: te.SiTUGLU(beta2=0.5),
        lambda: _row(8),
    ),
    (
        "smoothing",
        lambda: te.CrossEntropy(),
        _set("label_smoothing", 0.5),
        lambda: te.CrossEntropy(0.5),
        lambda: (torch.randn(4, 8), torch.tensor([0, 1, 2, 3])),
    ),
    (
        "reduction",
        lambda: te.CrossEntropy(),
        _set("reduction", "none"),
        lambda: te.CrossEntropy(reduction="none"),
        lambda: (torch.randn(4, 8), torch.tensor([0, 1, 2, 3])),
    ),
    (
        "p",
        lambda: te.Dropout(0.2, seed=1),
        _set("p", 0.7),
        lambda: te.Dropout(0.7, seed=1),
        lambda: _row(8),
    ),
    (
        "base",
        lambda: te.RoPE(4),
        _set("base", 10.0),
        lambda: te.RoPE(4, 10.0),
        lambda: (torch.randn(2, 3, 2, 4),),
    ),
    (
        "softmax_scale",
        lambda: te.Attention(2, packed=True),
        _set("softmax_scale", 2.0),
        lambda: te.Attention(2, packed=True, softmax_scale=2.0),
        lambda: (torch.randn(2, 5, 24),),
    ),
    (
        "shape",
        lambda: te.Reshape((-1, 4)),
        _set("shape", (-1, 2)),
        lambda: te.Reshape((-1, 2)),
        lambda: _row(8),
    ),
    (
        "quantizer",
        lambda: te.Quantize(),
        _set("quantizer_value", te.MXFP8Quantizer()),
        lambda: te.Quantize(quantizer=te.MXFP8Quantizer()),
        lambda: _row(8),
    ),
    (
        "cap",
        lambda: cases.softcap(2.0),
        _set("cap", 0.5),
        lambda: cases.softcap(0.5),
        lambda: _row(8),
    ),
]


def _row(features: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, features),)


@pytest.mark.parametrize("nested", [False, True], ids=["root", "child"])
@pytest.mark.parametrize("case", EDITS, ids=[e[0] for e in EDITS])
def test_attribute_edits_are_seen(case: tuple[Any, ...], nested: bool) -> None:
    _, make, edit, wanted, inputs = case
    op, other = make(), wanted()
    root = te.Sequential(te.Sequential(op)) if nested else op
    xs = inputs()
    before = root(*xs)
    edit(op)
    after, expected = root(*xs), other(*xs)
    assert torch.equal(cases_dense(after), cases_dense(expected))
    assert before.shape != after.shape or not torch.equal(cases_dense(before), cases_dense(after))


def cases_dense(y: torch.Tensor) -> torch.Tensor:
    return y.dequantize() if isinstance(y, te.QuantizedTensor) else y


def test_hooks_run_and_stop_running() -> None:
    s = pair()
    check_pair(s)
    seen: list[str] = []
    x = torch.randn(4, 8, requires_grad=True)
    handles = [
        s[0].register_forward_pre_hook(lambda *_: seen.append("pre")),
        s[0].register_forward_hook(lambda *_: seen.append("post")),
        s[2].register_full_backward_hook(lambda *_: seen.append("backward")),
    ]
    check = plain(s, x)
    y = s(x)
    torch.testing.assert_close(y, check)
    y.sum().backward()
    assert seen == ["pre", "post", "backward"]
    for handle in handles:
        handle.remove()
    seen.clear()
    check_pair(s)
    assert seen == []


def test_hook_that_changes_the_value_is_obeyed() -> None:
    s = pair()
    x = torch.randn(4, 8)
    s(x)
    handle = s[0].register_forward_hook(lambda _m, _i, y: 2 * y)
    h = F.silu(2 * F.linear(x, s[0].weight, s[0].bias))
    torch.testing.assert_close(s(x), F.linear(h, s[2].weight, s[2].bias))
    handle.remove()
    torch.testing.assert_close(s(x), plain(s, x))


def test_hook_on_the_root_and_on_a_nested_pipeline() -> None:
    inner = pair()
    outer = te.Sequential(inner, te.Bias(8))
    x = torch.randn(4, 8)
    expected = outer(x)
    seen = []
    for module in (inner, outer):
        module.register_forward_hook(lambda m, *_: seen.append(len(m)))
    torch.testing.assert_close(outer(x), expected)
    assert seen == [3, 2]


# -- children


def test_list_edits_are_seen() -> None:
    s = te.Sequential(te.ConstantScale(2.0))
    x = torch.randn(3, 8)

    def factor() -> float:
        return float((s(x) / x).mean())

    assert factor() == pytest.approx(2)
    s.append(te.ConstantScale(3.0))
    assert factor() == pytest.approx(6)
    s.insert(0, te.ConstantScale(5.0))
    assert factor() == pytest.approx(30)
    s[0] = te.ConstantScale(7.0)
    assert factor() == pytest.approx(42)
    del s[0]
    assert factor() == pytest.approx(6)
    s.pop()
    assert factor() == pytest.approx(2)
    s.extend([te.ConstantScale(0.5), te.ConstantScale(4.0)])
    assert factor() == pytest.approx(4)
    s += te.Sequential(te.ConstantScale(2.0))
    assert factor() == pytest.approx(8)


def test_edits_deep_inside_are_seen() -> None:
    inner = te.Residual(te.ConstantScale(1.0))
    s = te.Sequential(te.Branch(inner, te.Identity()), te.Add())
    x = torch.randn(3, 8)
    torch.testing.assert_close(s(x), 3 * x)
    inner[0] = te.ConstantScale(2.0)
    torch.testing.assert_close(s(x), 4 * x)
    s[0].add_module("2", te.Identity())
    torch.testing.assert_close(s(x), 5 * x)


def test_child_of_a_foreign_module_may_change() -> None:
    foreign = nn.Sequential(nn.Linear(8, 8))
    s = te.Sequential(foreign, te.SiLU())
    x = torch.randn(3, 8)
    torch.testing.assert_close(s(x), F.silu(foreign(x)))
    foreign[0] = nn.Linear(8, 5)
    torch.testing.assert_close(s(x), F.silu(foreign(x)))
    foreign.append(nn.Linear(5, 6, dtype=torch.float32))
    y = s(x)
    torch.testing.assert_close(y, F.silu(foreign(x)))
    y.sum().backward()


def test_shape_that_no_longer_fits_is_reported_when_a_foreign_child_changes() -> None:
    foreign = nn.Sequential(nn.Linear(8, 8))
    s = te.Sequential(foreign, te.Linear(8, 4))
    x = torch.randn(3, 8)
    s(x)
    foreign[0] = nn.Linear(8, 5)
    with pytest.raises(te.Error, match="5 features"):
        s(x)


def test_extra_output_added_and_removed_after_a_forward() -> None:
    s = te.Sequential(te.SiLU(), te.SiLU())
    x = torch.randn(3, 8)
    assert isinstance(s(x), torch.Tensor)
    s.insert(1, te.MakeExtraOutput())
    y, extra = s(x)
    torch.testing.assert_close(extra, F.silu(x))
    torch.testing.assert_close(y, F.silu(F.silu(x)))
    del s[1]
    assert isinstance(s(x), torch.Tensor)


def test_registered_pass_makes_new_plans() -> None:
    s = pair()
    check_pair(s)
    seen: list[Any] = []
    made = passes.add("select", lambda work: seen.append(work))
    try:
        check_pair(s)
        assert seen
    finally:
        passes.remove("select", made)
