"""K32: the oracles can fail. A 1 % fault in any one number of a case's results is found."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

import te_ops as te
from tests.faults import cases
from tests.faults.cases import Case, every_case


def perturbed(result: cases.Result, which: int) -> cases.Result:
    """One output or gradient multiplied by 1.01."""
    count = -1

    def touch(t: torch.Tensor | None) -> torch.Tensor | None:
        nonlocal count
        count += t is not None
        return 1.01 * t if t is not None and count == which else t

    outputs = [touch(t) for t in result.outputs]
    grads = [touch(t) for t in result.input_grads]
    params = {n: touch(t) for n, t in result.param_grads.items()}
    return cases.Result(outputs, grads, params)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@every_case
def test_one_percent_is_found(case: Case, dtype: torch.dtype) -> None:
    """B161: at the tolerance that test_cases.py uses."""
    op, xs = case.fresh(dtype), case.data(24, dtype)
    actual, expected = cases.run(op, xs), case.expected(op, xs)
    cases.compare(actual, expected, cases.tolerance_of(dtype) * 4)
    tolerance = min(cases.tolerance_of(dtype) * 4, 9e-3)
    tight = cases.Result(expected.outputs, expected.input_grads, expected.param_grads)
    for i in range(sum(t is not None for _, t in actual.tensors())):
        with pytest.raises(AssertionError, match="relative error"):
            cases.compare(perturbed(tight, i), expected, tolerance)


@pytest.mark.parametrize("name", ["Linear", "MLP", "Residual"])
def test_other_faults_are_found(name: str) -> None:
    case = cases.BY_NAME[name]
    op, xs = case.fresh(), case.data(5)
    good, expected = cases.run(op, xs), case.expected(op, xs)
    faults = {
        "missing gradient": cases.Result(good.outputs, [None], good.param_grads),
        "shape": cases.Result([good.outputs[0][:, :-1]], good.input_grads, good.param_grads),
        "sign": cases.Result([-good.outputs[0]], good.input_grads, good.param_grads),
        "nan": cases.Result([good.outputs[0] * torch.nan], good.input_grads, good.param_grads),
        "zeros": cases.Result([0 * good.outputs[0]], good.input_grads, good.param_grads),
        "name": cases.Result(good.outputs, good.input_grads, {}),
        "one element": cases.Result(
            [_one_off(good.outputs[0])], good.input_grads, good.param_grads
        ),
    }
    for fault, result in faults.items():
        assert not _passes(result, expected), fault
    with pytest.raises(AssertionError, match="dtype"):
        cases.compare(good, expected, 1e-3, dtypes=True)
    wrong = cases.Result(
        [good.outputs[0].nextafter(torch.tensor(1e9))], good.input_grads, good.param_grads
    )
    with pytest.raises(AssertionError, match="bit for bit"):
        cases.same(wrong, good)


def _passes(result: cases.Result, expected: cases.Result) -> bool:
    try:
        cases.compare(result, expected, 1e-3)
    except AssertionError:
        return False
    return True


def _one_off(t: torch.Tensor) -> torch.Tensor:
    made = t.clone()
    made.view(-1)[0] += 10 * made.abs().max()
    return made


@every_case
def test_oracles_share_no_code_with_the_ops(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle runs with te_ops' execution switched off."""
    op, xs = case.fresh(), case.data(5)
    if te.Dropout in case.kinds:
        pytest.skip("its mask is read off ones")
    from te_ops.op import Runtime

    def refuse(*_: object) -> None:
        raise AssertionError("an oracle ran te_ops")

    monkeypatch.setattr(Runtime, "run", refuse)
    with pytest.raises(AssertionError, match="ran te_ops"):
        op(*xs)
    assert case.expected(op, xs).outputs


@every_case
def test_results_depend_on_every_input_and_parameter(case: Case) -> None:
    """An op that ignored an operand would pass against an oracle that did too."""
    op, xs = case.fresh(), case.data(5)
    base = cases.run(op, xs)
    for x in xs:
        if not x.is_floating_point():
            continue
        moved = [
            t.detach() + (t is x) * (0.5 + torch.rand_like(t)) if t.is_floating_point() else t
            for t in xs
        ]
        assert any(
            not torch.equal(a, b)
            for a, b in zip(base.outputs, cases.outputs_of(op(*moved)), strict=True)
        )
    for name, p in op.named_parameters():
        kept = p.detach().clone()
        with torch.no_grad():
            p.add_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
            made = cases.outputs_of(op(*xs))
            p.copy_(kept)
        assert any(not torch.equal(a, b) for a, b in zip(base.outputs, made, strict=True)), name


def test_every_test_of_this_folder_can_fail() -> None:
    """Each test function compares, raises or asserts, itself or through a helper of its file."""
    for path in sorted(Path(inspect.getfile(cases)).parent.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        helpers = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for name, node in helpers.items():
            if name.startswith("test_"):
                assert _checks(node, helpers, set()), f"{path.name}: {name} checks nothing"


def _checks(node: ast.FunctionDef, helpers: dict[str, ast.FunctionDef], seen: set[str]) -> bool:
    seen.add(node.name)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert | ast.With) and _is_check(inner):
            return True
        if isinstance(inner, ast.Call):
            called = (
                inner.func.attr
                if isinstance(inner.func, ast.Attribute)
                else getattr(inner.func, "id", "")
            )
            if called in ("compare", "same", "assert_close", "assert_array_equal"):
                return True
            if called in helpers and called not in seen and _checks(helpers[called], helpers, seen):
                return True
    return False


def _is_check(node: ast.Assert | ast.With) -> bool:
    return isinstance(node, ast.Assert) or any(
        "raises" in ast.dump(i) or "builds" in ast.dump(i) for i in node.items
    )
