"""The plan key: what invalidates it, what does not (core contracts 2, 4, 20, 21, 25)."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import te_ops as te
from te_ops.compiler import passes
from te_ops.graph import Graph, Value
from te_ops.registry import REGISTRY, Rule
from te_ops.runtime.cache import CACHE, MAX_PLANS, WARN_AFTER
from te_ops.runtime.shapes import alignment, row_class
from tests.runtime.cases import gradients, mlp


@te.pointwise
def softcap(x, cap: float):  # type: ignore[no-untyped-def]
    return cap * te.math.tanh(x / cap)


def plans() -> int:
    return CACHE.built


# -- what changes must be seen


def changes() -> dict[str, tuple[te.Op, Callable[[Any], Any]]]:
    """An op that has been called, and a change of it."""

    def attribute(name: str, value: Any) -> Callable[[Any], None]:
        return lambda op: setattr(op, name, value)

    def child(name: str, value: Any) -> Callable[[Any], None]:
        return lambda op: setattr(op[0], name, value)

    seq = te.Sequential
    return {
        "dropout_p": (te.Dropout(0.9, seed=3), attribute("p", 0.1)),
        "dropout_eval": (te.Dropout(0.9, seed=3), lambda op: op.eval()),
        "dropout_seed": (te.Dropout(0.5, seed=3), attribute("seed", 4)),
        "nested_eval": (seq(te.Dropout(0.9, seed=3)), lambda op: op[0].eval()),
        "nested_p": (seq(te.Dropout(0.9, seed=3)), child("p", 0.2)),
        "scale": (te.ConstantScale(2.0), attribute("scale", 3.0)),
        "scale_sign": (te.ConstantScale(0.0), attribute("scale", -0.0)),
        "scale_to_scalar": (te.ConstantScale(2.0), attribute("scale", te.scalar(5.0))),
        "cap": (softcap(cap=1.0), attribute("cap", 2.0)),
        "eps": (te.RMSNorm(8), attribute("eps", 0.5)),
        "gelu": (te.GELU(), attribute("approximate", "none")),
        "shape": (te.Reshape((-1, 4)), attribute("shape", (-1, 2))),
        "drop_bias": (te.Linear(8, 8), attribute("bias", None)),
        "register_parameter": (te.Linear(8, 8), lambda op: op.register_parameter("bias", None)),
        "other_weight": (te.Linear(8, 8), attribute("weight", nn.Parameter(torch.ones(8, 8)))),
        "wider": (te.Linear(8, 8, bias=False), attribute("weight", nn.Parameter(torch.ones(4, 8)))),
        "setitem": (seq(te.Linear(8, 8), te.GELU()), lambda op: op.__setitem__(0, te.Linear(8, 8))),
        "setattr_child": (seq(te.Linear(8, 8)), attribute("0", te.Linear(8, 8))),
        "append": (seq(te.Linear(8, 8)), lambda op: op.append(te.GELU())),
        "insert": (seq(te.Linear(8, 8)), lambda op: op.insert(0, te.GELU())),
        "pop": (seq(te.Linear(8, 8), te.GELU()), lambda op: op.pop()),
        "pop_all": (seq(te.GELU()), lambda op: op.pop()),
        "delete": (seq(te.GELU(), te.Linear(8, 8)), lambda op: op.__delitem__(0)),
        "nested_append": (seq(seq(te.Linear(8, 8))), lambda op: op[0].append(te.SiLU())),
        "swap_equal": (seq(te.Linear(8, 8), te.Linear(8, 8)), _swap),
        "activation": (seq(te.GELU()), lambda op: op.__setitem__(0, te.SiLU())),
        "foreign": (seq(te.GELU(), nn.Linear(8, 8)), lambda op: op.__setitem__(1, nn.Linear(8, 8))),
        "foreign_inside": (
            seq(nn.Sequential(te.GELU())),
            lambda op: op[0].__setitem__(0, te.SiLU()),
        ),
        "parametrized": (
            te.Linear(8, 8),
            lambda op: parametrize.register_parametrization(op, "weight", _Twice()),
        ),
        "bfloat16": (te.Linear(8, 8), lambda op: op.bfloat16()),
        "load": (te.Linear(8, 8), lambda op: op.load_state_dict(te.Linear(8, 8).state_dict())),
        "load_assign": (
            te.Linear(8, 8),
            lambda op: op.load_state_dict(te.Linear(8, 8).state_dict(), assign=True),
        ),
    }


class _Twice(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def _swap(op: Any) -> None:
    a, b = op[0], op[1]
    op[0], op[1] = b, a


def outputs(op: te.Op, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return op(x)


@pytest.mark.parametrize("name", changes())
def test_change_is_seen_by_the_next_call(name: str) -> None:
    op, change = changes()[name]
    x = torch.randn(16, 8)
    for parameter in op.parameters():
        nn.init.normal_(parameter)
    before = outputs(op, x)
    change(op)
    if name == "bfloat16":
        x = x.bfloat16()
    got = outputs(op, x)
    CACHE.clear()
    fresh = copy.deepcopy(op)
    want = outputs(fresh, x)
    assert got.shape == want.shape
    assert torch.equal(got, want)
    assert torch.equal(torch.signbit(got), torch.signbit(want))
    changed = got.shape != before.shape or got.dtype != before.dtype or not torch.equal(got, before)
    changed = changed or not torch.equal(torch.signbit(got), torch.signbit(before))
    assert changed, "the change of this test changes nothing"


def test_requires_grad_of_an_input_is_in_the_key() -> None:
    """Also between two models that share plans."""
    a, b = te.Sequential(te.Linear(8, 8), te.GELU()), te.Sequential(te.Linear(8, 8), te.GELU())
    x = torch.randn(4, 8)
    a(x).sum().backward()
    leaf = x.clone().requires_grad_()
    b(leaf).sum().backward()
    assert leaf.grad is not None
    a(leaf).sum().backward()


def test_requires_grad_of_a_parameter_is_in_the_key() -> None:
    model, x = te.Sequential(te.Linear(8, 8), te.Linear(8, 8)), torch.randn(4, 8)
    model(x).sum().backward()
    model.zero_grad()
    model[0].requires_grad_(False)
    model(x).sum().backward()
    assert set(gradients(model)) == {"1.weight", "1.bias"}
    steps = [s for seg in model.plan(x).segments for s in seg.backward_steps]
    assert [s.path for s in steps if s.name == "gemm"] == ["1"]


def test_grad_mode_is_in_the_key() -> None:
    model, x = te.Sequential(te.Linear(8, 8), te.GELU()), torch.randn(4, 8)
    with torch.no_grad():
        assert not model(x).requires_grad
        assert model.plan(x).saved_bytes == 0
    assert model(x).requires_grad
    with torch.inference_mode():
        y = model(x)
    assert y.is_inference()
    model(x).sum().backward()


def test_autocast_dtype_recipe_and_calibration_are_in_the_key() -> None:
    model, x = te.Sequential(te.Linear(32, 32)), torch.randn(32, 32)
    dense = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype is torch.bfloat16
    assert model(x).dtype is torch.float32
    with te.autocast(recipe=te.recipe.MXFP8BlockScaling()):
        quantized = model(x)
        with te.autocast(enabled=False):
            assert torch.equal(model(x), dense)
    assert not torch.equal(quantized, dense)
    assert torch.equal(model(x), dense)


def test_tie_pattern_is_in_the_key() -> None:
    model, x = (
        te.Sequential(te.Linear(8, 8, bias=False), te.Linear(8, 8, bias=False)),
        torch.randn(4, 8),
    )
    model(x).sum().backward()
    tied = copy.deepcopy(model)
    tied[1].weight = tied[0].weight
    tied.zero_grad()
    tied(x).sum().backward()
    w = tied[0].weight.detach().clone().requires_grad_()
    (x @ w.t() @ w.t()).sum().backward()
    torch.testing.assert_close(tied[0].weight.grad, w.grad)


def test_deterministic_flag_and_registry_are_in_the_key() -> None:
    model, x = te.Sequential(te.Linear(8, 8)), torch.randn(4, 8)
    model(x)
    before = plans()
    model(x)
    assert plans() == before
    torch.use_deterministic_algorithms(True)
    try:
        model(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert plans() == before + 1
    with REGISTRY.temporary(Rule("test.rule", ("gemm", "gemm"))):
        model(x)
    assert plans() == before + 2
    added = passes.add("remat", lambda work: None)
    try:
        model(x)
    finally:
        passes.remove("remat", added)
    assert plans() == before + 3


def test_quantized_inputs_are_keyed_by_format() -> None:
    op, x = te.Dequantize(), torch.randn(32, 32)
    for quantizer in (te.MXFP8Quantizer(), te.Float8CurrentScalingQuantizer(), te.NVFP4Quantizer()):
        q = te.quantize(x, quantizer)
        assert torch.equal(op(q), q.dequantize())
        assert quantizer.describe().split()[0].split("(")[0] in str(
            op.plan(q).inputs[0].kind.quantizer.describe()
        )


# -- hooks


@pytest.mark.parametrize("where", ["root", "child", "grandchild"])
def test_hooks_run_once_and_are_borders(where: str) -> None:
    inner = te.Linear(8, 8)
    middle = te.Sequential(inner, te.GELU())
    model = te.Sequential(te.Linear(8, 8), middle, te.SiLU())
    x = torch.randn(4, 8)
    want = model(x)
    log: list[str] = []
    target = {"root": model, "child": middle, "grandchild": inner}[where]
    handles = [
        target.register_forward_pre_hook(lambda *_: log.append("pre")),
        target.register_forward_hook(lambda *_: log.append("post")),
        target.register_full_backward_pre_hook(lambda *_: log.append("backward_pre")),
        target.register_full_backward_hook(lambda *_: log.append("backward")),
    ]
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.sum().backward()
    torch.testing.assert_close(y, want)
    assert log == ["pre", "post", "backward_pre", "backward"]
    kinds = [s.module is not None for s in model.plan(x).segments]
    assert any(kinds) == (where != "root")
    for handle in handles:
        handle.remove()
    model(x)
    assert len(log) == 4
    assert len(model.plan(x).segments) == 1


def test_hook_may_change_the_output() -> None:
    model, x = te.Sequential(te.Linear(8, 8), te.GELU()), torch.randn(4, 8)
    want = torch.zeros(4, 8)
    model(x)
    model[0].register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    assert torch.equal(model(x), want)


def test_global_hooks_are_not_skipped() -> None:
    model, x = te.Sequential(te.Linear(8, 8), te.GELU()), torch.randn(4, 8)
    model(x)
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, *_: seen.append(type(m).__name__)
    )
    try:
        model(x)
    finally:
        handle.remove()
    assert sorted(seen) == ["GELU", "Linear", "Sequential"]
    seen.clear()
    model(x)
    assert seen == []


# -- what must not make a new plan


def test_functional_call_makes_one_plan_and_leaks_nothing() -> None:
    model, x = mlp(), torch.randn(8, 32)
    model(x)
    before, refs = plans(), []
    for _ in range(100):
        params = {n: torch.randn_like(p).requires_grad_() for n, p in model.named_parameters()}
        refs += [weakref.ref(p) for p in params.values()]
        y = functional_call(model, params, (x,))
        y.sum().backward()
        assert all(p.grad is not None for p in params.values())
    del params, y
    gc.collect()
    assert plans() <= before + 1
    assert [r for r in refs if r() is not None] == []


def test_functional_call_uses_the_given_parameters() -> None:
    model, x = te.Linear(4, 4), torch.randn(2, 4)
    given_ = {"weight": torch.zeros(4, 4), "bias": torch.ones(4)}
    model(x)
    assert torch.equal(functional_call(model, given_, (x,)), torch.ones(2, 4))


def test_new_inputs_and_equal_models_share_plans() -> None:
    a, b = mlp(), mlp()
    for model in (a, b):
        model(torch.randn(8, 32))
    before = plans()
    a(torch.randn(8, 32))
    b(torch.randn(24, 32).double().float())
    copy.deepcopy(a)(torch.randn(8, 32))
    assert plans() == before + 1  # 24 rows are in another magnitude bucket than 8
    b(torch.randn(56, 32))
    assert plans() == before + 1


def test_scalars_never_replan() -> None:
    cap, p, scale = te.scalar(1.0), te.scalar(0.0), te.scalar(1.0)
    model = te.Sequential(softcap(cap=cap), te.Dropout(p), te.ConstantScale(scale))
    x = torch.randn(8, 8)
    model(x)
    before = plans()
    for value in (0.5, 2.0, 3.0):
        cap.set(value)
        scale.set(value + 1)
        torch.testing.assert_close(model(x), (value + 1) * value * torch.tanh(x / value))
    assert plans() == before


def test_parameter_values_never_replan() -> None:
    model, x = mlp(), torch.randn(8, 32, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    before = plans()
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        model(x).sum().backward()
    assert plans() == before


# -- row classes


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 24, 64, 127, 128, 130, 4096, 2**31, 2**33 + 8])
def test_row_class(rows: int) -> None:
    align, bucket = row_class(rows)
    assert align == (0 if rows == 0 else math.gcd(rows, 128)) == alignment(rows)
    if rows:
        assert 4**bucket <= rows < 4 ** (bucket + 1)
        assert row_class(rows) != row_class(0)


def test_small_and_large_counts_of_one_alignment_differ() -> None:
    assert row_class(8) != row_class(8200)


def test_counts_of_a_class_share_a_plan_and_other_classes_do_not() -> None:
    model = mlp()
    model(torch.randn(72, 32))  # alignment 8, 64..255
    before = plans()
    for rows in (72, 88, 200, 248):
        model(torch.randn(rows, 32))
    model(torch.randn(2, 4, 25, 32))
    assert plans() == before
    model(torch.randn(73, 32))
    assert plans() == before + 1


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (0, 5, 32)])
@pytest.mark.parametrize(
    "recipe", [None, te.recipe.DelayedScaling(amax_history_len=2), te.recipe.MXFP8BlockScaling()]
)
def test_zero_rows(shape: tuple[int, ...], recipe: te.Recipe | None) -> None:
    model = te.Sequential(
        mlp(), te.Residual(te.LayerNorm(32), te.Dropout(0.5)), te.Recompute(te.Linear(32, 32))
    )
    x = torch.randn(shape, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
    y.sum().backward()
    assert y.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    if isinstance(
        recipe, te.recipe.DelayedScaling
    ):  # an op that saw only empty tensors keeps its history
        assert not model.state_dict()["0.1.quantizer.delayed.input.amax_history"].any()


def test_level_is_found_for_each_pattern_and_rank() -> None:
    """An op that reads its rank or a leading size: planned for one shape, replayed for others."""

    class ByRank(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            return te.basic.structure.add(g, x, x) if len(g.spec(x).shape) == 3 else x

    class BySize(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            return te.basic.structure.add(g, x, x) if int(g.spec(x).shape[0]) == 8 else x

    for op, doubled in ((ByRank(), (2, 4, 4)), (BySize(), (8, 4))):
        for shape in ((4, 4), doubled, (8, 4), (2, 4, 4), (24, 4), (40, 4), (2, 4, 4)):
            x = torch.ones(shape)
            double = len(shape) == 3 if isinstance(op, ByRank) else shape[0] == 8
            assert float(op(x).mean()) == (2.0 if double else 1.0), (op, shape)


def test_exact_keys_are_explained() -> None:
    class Fixes(te.Op):
        def emit(self, g: Graph, x: Value) -> Value:
            rows = int(g.spec(x).shape[0])
            return g.call(
                te.basic.structure.RESHAPE, te.basic.structure.add(g, x, x), shape=(rows, 4)
            )

    text = te.Sequential(Fixes()).explain(torch.ones(8, 4))
    assert "exact" in text
    assert "reshape" in text


def test_other_equality_pattern_of_two_inputs() -> None:
    class Outer(te.Op):
        def emit(self, g: Graph, x: Value, y: Value) -> Value:
            same = g.spec(x).shape[0] == g.spec(y).shape[0]
            return te.basic.structure.add(g, x, x) if same else x

    op = Outer()
    assert float(op(torch.ones(8, 4), torch.ones(8, 4)).mean()) == 2.0
    assert float(op(torch.ones(8, 4), torch.ones(24, 4)).mean()) == 1.0
    assert float(op(torch.ones(8, 4), torch.ones(8, 4)).mean()) == 2.0
    assert float(op(torch.ones(24, 4), torch.ones(8, 4)).mean()) == 1.0


# -- hypothesis: a replay equals a fresh plan

OPS: dict[str, Callable[[], te.Op]] = {
    "linear": lambda: te.Linear(16, 16),
    "gelu": te.GELU,
    "softcap": lambda: softcap(cap=2.0),
    "rms": lambda: te.RMSNorm(16),
    "layer": lambda: te.LayerNorm(16),
    "residual": lambda: te.Residual(te.Linear(16, 16), te.SiLU()),
    "swiglu": lambda: te.Sequential(te.Linear(16, 32), te.SwiGLU()),
    "branch": lambda: te.Sequential(te.Branch(te.GELU(), te.Linear(16, 16)), te.Add()),
    "dropout": lambda: te.Dropout(0.25, seed=5),
    "recompute": lambda: te.Recompute(te.Linear(16, 16), te.GELU()),
    "reshape": lambda: te.Sequential(te.Reshape((-1, 4)), te.SiLU(), te.Reshape((-1, 16))),
    "cut": te.Cut,
    "quantize": te.Quantize,
    "foreign": lambda: te.Sequential(nn.Tanh()),
}
SHAPES = {
    8: [(8,), (2, 4), (1, 8), (24,), (3, 8), (40,), (5, 2, 4), (56,)],
    0: [(0,), (2, 0), (0, 3)],
    1: [(1,), (3,), (5,)],
}


def run(model: te.Op, x: Tensor, recipe: te.Recipe | None) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(7)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(leaf)
    y.square().sum().backward()
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(g for _, g in sorted(gradients(model).items()))]


@settings(max_examples=40)
@given(
    names=st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=5),
    align=st.sampled_from(sorted(SHAPES)),
    picks=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    recipe=st.sampled_from([None, te.recipe.Float8CurrentScaling(), te.recipe.NVFP4BlockScaling()]),
)
def test_replay_equals_a_fresh_plan(
    names: list[str], align: int, picks: tuple[int, int], recipe: te.Recipe | None
) -> None:
    torch.manual_seed(0)
    model = te.Sequential(*(OPS[name]() for name in names))
    shapes = SHAPES[align]
    first, second = (torch.randn(*shapes[i % len(shapes)], 16) for i in picks)
    CACHE.clear()
    run(model, first, recipe)
    got = run(model, second, recipe)
    CACHE.clear()
    want = run(copy.deepcopy(model), second, recipe)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


# -- the cache itself


def test_least_recently_used_plans_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_ops.runtime.cache.MAX_PLANS", 4)
    CACHE.clear()
    ops = [te.Sequential(softcap(cap=float(i + 1))) for i in range(6)]
    for op in ops[:4]:
        op(torch.ones(2, 2))
    before = plans()
    copy.deepcopy(ops[0])(torch.ones(2, 2))  # used again
    ops[4](torch.ones(2, 2))
    assert plans() == before + 1
    copy.deepcopy(ops[0])(torch.ones(2, 2))
    assert plans() == before + 1
    copy.deepcopy(ops[1])(torch.ones(2, 2))
    assert plans() == before + 2
    assert len(CACHE.plans) == 4
    assert MAX_PLANS > 4


def test_many_plans_warn_once_and_name_what_varies() -> None:
    model = te.Sequential(te.GELU(), softcap(cap=1.0))
    x = torch.ones(2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(WARN_AFTER + 10):
            model[1].cap = 1.0 + i
            model(x)
    (warning,) = [w for w in caught if "plans" in str(w.message)]
    assert issubclass(warning.category, RuntimeWarning)
    assert "cap" in str(warning.message)
    assert "te.scalar" in str(warning.message)
    assert "Sequential" in str(warning.message)
    assert warning.filename == __file__


def test_many_shapes_warn_too() -> None:
    model = te.Sequential(te.GELU())
    CACHE.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(WARN_AFTER):
            model(torch.ones(2, 2 + 2 * i))
    (warning,) = caught
    assert "input" in str(warning.message)


def test_a_callable_of_a_recipe_is_named_when_plans_multiply() -> None:
    model, x = te.Sequential(te.Linear(32, 32)), torch.randn(32, 32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(WARN_AFTER):
            recipe = te.recipe.CustomRecipe(qfactory=lambda role: None)
            with te.autocast(recipe=recipe):
                model(x)
    (warning,) = caught
    assert "recipe" in str(warning.message)
    assert "lambda" in str(warning.message)


def test_plans_hold_no_tensor_and_no_module() -> None:
    model, x = mlp(), torch.randn(8, 32)
    model(x).sum().backward()
    refs = (
        [weakref.ref(p) for p in model.parameters()]
        + [weakref.ref(m) for m in model.modules()]
        + [weakref.ref(x)]
    )
    plan = model.plan(x)
    del model, x
    gc.collect()
    assert [r for r in refs if r() is not None] == []
    assert plan.explain()


# -- messages


def test_wrong_inputs_are_our_errors() -> None:
    model = te.Sequential(te.Linear(8, 8))
    with pytest.raises(te.ShapeError, match="Sequential"):
        model(3)
    with pytest.raises(te.ShapeError):
        model()
    with pytest.raises(
        te.ShapeError, match=r"Sequential\.0 \(Linear\): input has 4 features, weight expects 8"
    ):
        model(torch.ones(2, 4))
    with pytest.raises(te.PlanError, match="meta"):
        te.Sequential(te.Linear(8, 8, device="meta"))(torch.ones(2, 8))
