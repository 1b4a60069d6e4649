"""Properties of random pipelines: every op that maps [rows, 64] to [rows, 64], nested in residuals,
branches, recompute regions and cuts, against plain torch in FP64."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import te_ops as te
from tests.faults import cases

PIPES = [case for case in cases.CASES if case.pipes and case.smooth]
NAMES = [case.name for case in PIPES]
Oracle = Callable[[Any, torch.Tensor], torch.Tensor]

# -- trees of ops: ("op", name) | (kind, [trees])

leaves = st.sampled_from(NAMES).map(lambda name: ("op", name))


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    chains = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        chains.map(lambda c: ("sequential", c)),
        chains.map(lambda c: ("residual", c)),
        chains.map(lambda c: ("recompute", c)),
        st.lists(inner, min_size=2, max_size=3).map(lambda c: ("branch", c)),
    )


trees = st.recursive(leaves, _nested, max_leaves=6).map(lambda t: ("sequential", [t]))
rows = st.sampled_from([1, 2, 5, 16, 33])
modes = st.sampled_from(list(cases.MODES))


@dataclass
class Built:
    """A pipeline and its oracle, which reads parameters by the pipeline's names."""

    op: nn.Module
    oracle: Oracle


def build(tree: Any, dtype: torch.dtype, prefix: str = "") -> Built:
    """The te_ops pipeline of a tree, and the same in plain torch."""
    kind, rest = tree
    if kind == "op":
        case = cases.BY_NAME[rest]
        return Built(case.fresh(dtype), case.oracle)
    parts = [build(t, dtype) for t in rest]
    ops = [p.op for p in parts]
    if kind == "branch":
        made: nn.Module = te.Sequential(te.Branch(*ops), te.Add())
    else:
        made = {"sequential": te.Sequential, "residual": te.Residual, "recompute": te.Recompute}[
            kind
        ](*ops)

    def oracle(m: Any, x: torch.Tensor) -> torch.Tensor:
        if kind == "branch":
            return sum(
                (p.oracle(m.get_submodule(f"0.{i}"), x) for i, p in enumerate(parts)),
                torch.zeros_like(x),
            )
        y = x
        for i, p in enumerate(parts):
            y = p.oracle(m.get_submodule(str(i)), y)
        return x + y if kind == "residual" else y

    return Built(made, oracle)


def data(count: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(count)
    return torch.randn(count, cases.WIDTH, dtype=torch.float64).to(dtype).requires_grad_()


def expected(built: Built, x: torch.Tensor) -> cases.Result:
    case = cases.Case("", lambda _: built.op, lambda *_: (), built.oracle)
    return case.expected(built.op, (x,))


@settings(max_examples=80)
@given(tree=trees, count=rows)
def test_equals_plain_torch_in_output_and_every_gradient(tree: Any, count: int) -> None:
    built = build(tree, torch.float64)
    x = data(count, torch.float64)
    actual = cases.run(built.op, (x,))
    cases.compare(actual, expected(built, x), 1e-9, dtypes=True)


@settings(max_examples=40)
@given(tree=trees, count=rows)
def test_low_precision_is_near(tree: Any, count: int) -> None:
    """BF16 against FP64: a wrong operand would show, rounding may not."""
    built = build(tree, torch.bfloat16)
    x = data(count, torch.bfloat16)
    actual, wanted = cases.run(built.op, (x,)), expected(built, x)
    for (name, a), (_, e) in zip(actual.tensors(), wanted.tensors(), strict=True):
        assert a is not None
        assert e is not None
        assert a.dtype is torch.bfloat16
        assert cases.relative_error(a, e) < 0.15, name


@settings(max_examples=80)
@given(tree=trees, count=rows, mode=modes)
def test_shapes_dtypes_and_finiteness_under_every_recipe(tree: Any, count: int, mode: str) -> None:
    built = build(tree, torch.float32)
    x = data(count, torch.float32)
    for _ in range(2):
        result = cases.step(built.op, (x,), cases.MODES[mode])
    for name, t in result.tensors():
        assert t is not None, name
        t = t.dequantize() if isinstance(t, te.QuantizedTensor) else t
        assert t.dtype is torch.float32
        assert torch.isfinite(t).all(), name
    assert result.outputs[0].shape == x.shape


@settings(max_examples=40)
@given(tree=trees, count=rows, mode=modes)
def test_plans_are_deterministic(tree: Any, count: int, mode: str) -> None:
    """Two models made alike have equal plans, in words and in steps; and equal numbers."""
    results, texts = [], []
    for _ in range(2):
        built = build(tree, torch.float32)
        x = data(count, torch.float32)
        with cases.within(cases.MODES[mode]):
            plan = built.op.plan(x)  # type: ignore[operator]
        texts.append(json.dumps(plan.to_dict(), sort_keys=True, default=str))
        results.append(cases.step(built.op, (x,), cases.MODES[mode]))
        te.runtime.cache.CACHE.clear()
    assert texts[0] == texts[1]
    cases.same(*results)


@settings(max_examples=60)
@given(tree=trees, first=rows, second=rows, mode=modes)
def test_replay_with_another_row_count_equals_a_fresh_plan(
    tree: Any, first: int, second: int, mode: str
) -> None:
    recipe = cases.MODES[mode]
    if recipe is not None and mode in cases.DELAYED:  # its state remembers the first rows
        return
    built = build(tree, torch.float32)
    cases.step(built.op, (data(first, torch.float32),), recipe)
    replayed = cases.step(built.op, (data(second, torch.float32),), recipe)
    te.runtime.cache.CACHE.clear()
    fresh = build(tree, torch.float32)
    cases.same(replayed, cases.step(fresh.op, (data(second, torch.float32),), recipe))


@settings(max_examples=40)
@given(tree=trees, count=rows)
def test_recompute_regions_change_nothing(tree: Any, count: int) -> None:
    """The pipeline with its recompute regions turned into plain ones.

    Neighbours compose into one expression where no region ends between them, so the last bit may differ; regions
    under recipes are compared bit for bit in tests/faults/test_k11_recompute.py.
    """

    def plain(t: Any) -> Any:
        kind, rest = t
        return (
            t
            if kind == "op"
            else ("sequential" if kind == "recompute" else kind, [plain(c) for c in rest])
        )

    made = [
        cases.run(build(shape, torch.float64).op, (data(count, torch.float64),))
        for shape in (tree, plain(tree))
    ]
    a, b = (cases.Result(m.outputs, m.input_grads, dict(m.param_grads)) for m in made)
    cases.compare(a, b, 1e-12)


@settings(max_examples=60)
@given(
    quantizer=st.sampled_from([q for q in cases.QUANTIZERS if not q.stateful and not q.stochastic]),
    count=rows,
    between=st.lists(st.sampled_from(["identity", "dequantize", "quantize"]), max_size=3),
)
def test_folding_never_changes_bytes(
    quantizer: te.Quantizer, count: int, between: list[str]
) -> None:
    """quantize(dequantize(r)) is r, however often; a pipeline's record is the one made alone."""
    x = data(count, torch.float32).detach()
    alone = te.quantize(x, quantizer)
    made = {
        "identity": te.Identity,
        "dequantize": te.Dequantize,
        "quantize": lambda: te.Quantize(quantizer=quantizer),
    }
    s = te.Sequential(
        te.Quantize(quantizer=quantizer),
        *(made[name]() for name in between),
        te.Quantize(quantizer=quantizer),
    )
    for q in (s(x), s(alone)):
        assert isinstance(q, te.QuantizedTensor)
        assert q.rowwise is not None
        assert alone.rowwise is not None
        for t, u in zip(q.rowwise.tensors(), alone.rowwise.tensors(), strict=True):
            assert torch.equal(t.float(), u.float())
