"""The CUDA text, compiled for the host and for sm_90a, and the CuTe DSL text, run on stand-ins."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import te_ops.math as tm
from te_ops.errors import PlanError
from te_ops.pointwise import (
    Expr,
    Fn,
    Input,
    activations,
    evaluate,
    lower,
    parameters,
    prelude,
    symbol,
)
from te_ops.pointwise.expr import call
from te_ops.pointwise.table import OPERATORS
from te_ops.pointwise.text_lowering import expand

X, Y = Input(0), Input(1)

SHIMS = """\
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
using std::signbit;
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static float __int_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
"""


def _operator(name: str) -> Fn:
    """The operator as a function; a mask is made a number."""
    row = OPERATORS[name]
    args = [Input(i) > 0.5 if i in row.masks else Input(i) for i in range(row.arity)]
    out = call(name, *args)
    return Fn(name, ("value",) * row.arity, tm.where(out, 1.0, X) if out.is_mask else out)


def _functions() -> dict[str, Fn]:
    numbers = {"scale": (0.3,), "dropout": (0.25,)}
    forward = [make(*numbers.get(name, ())) for name, make in activations.items()]
    forward += [_operator(name) for name in OPERATORS]
    forward.append(Fn("numbers", ("value",), tm.where(math.inf > X, X * 1e-40, math.nan) + -0.0))
    forward.append(Fn("limits", ("value",), tm.where(-math.inf > X, 1e60, tm.maximum(X, -1e60))))
    forward.append(Fn("pair", ("pair",), (Input(0, "linear"), tm.exp(Input(0, "gate")))))
    every = [*forward, *(f.grad(i) for f in forward for i in range(len(f.inputs)))]
    return {symbol(fn): fn for fn in every}


FUNCTIONS = _functions()

_SPECIAL = [0.0, -0.0, 0.4, -0.4, 1.0, -1.0, 3.0, -3.0, 7.0, -7.0, 30.0, -30.0, 1e-38, -1e-38]
_SPECIAL += [100.0, -100.0, 1e20, -1e20, 3e38, -3e38, math.inf, -math.inf, math.nan]


def _inputs(count: int) -> list[np.ndarray]:
    """Special values against each other, then random ones."""
    generator = np.random.default_rng(0)
    columns = []
    for k in range(count):
        special = np.roll(np.resize(np.array(_SPECIAL, np.float32), 23 * 22), 0)
        special = special if k == 0 else np.repeat(np.roll(special[:23], 5 * k), 22)
        columns.append(np.concatenate([special, generator.normal(0, 3, 1000)]).astype(np.float32))
    return columns


def _reference(fn: Fn, columns: list[np.ndarray], dtype: torch.dtype) -> list[torch.Tensor]:
    """The torch lowering of the same scalars."""
    tensors, at = [], 0
    for kind in fn.inputs:
        width = 2 if kind == "pair" else 1
        data = [torch.from_numpy(c) for c in columns[at : at + width]]
        tensors.append(torch.stack(data, -1).to(dtype))
        at += width
    # Expanded, as the texts are: torch's own GELU cancels where x is very negative.
    out = evaluate(expand(fn), *tensors)
    return list(out.unbind(-1))


def _agree(
    fn: Fn, columns: list[np.ndarray], results: list[np.ndarray], rtol: float = 1e-6
) -> None:
    """As near to the FP64 value as FP32 arithmetic is; NaN, Inf and signs of zero as in torch."""
    wide, narrow = (_reference(fn, columns, d) for d in (torch.float64, torch.float32))
    for result, truth, reference in zip(results, wide, narrow, strict=True):
        actual = torch.from_numpy(result)
        assert torch.equal(actual.isnan(), reference.isnan()), fn
        assert torch.equal(actual.isinf(), reference.isinf()), fn
        known = reference.isfinite()
        error = (actual.double() - truth)[known].abs()
        allowed = 2 * (reference.double() - truth)[known].abs() + rtol * (1.0 + truth[known].abs())
        assert (error <= allowed).all(), (fn, float((error - allowed).max()))
        zero = (actual == 0) & (reference == 0) & (truth == 0)
        if "minimum" not in fn.key and "maximum" not in fn.key:  # their zeros have either sign
            assert torch.equal(actual.signbit()[zero], reference.signbit()[zero]), fn


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to run the CUDA text on the host")
    folder = tmp_path_factory.mktemp("host")
    source = folder / "all.cpp"
    source.write_text(SHIMS + prelude("cuda") + "".join(map(_host_text, FUNCTIONS.values())))
    target = folder / "all.so"
    options = ["-std=c++17", "-O0", "-fPIC", "-shared", "-Wno-unused-function", "-Werror"]
    subprocess.run([compiler, *options, "-o", str(target), str(source)], check=True)
    return ctypes.CDLL(str(target))


def _host_text(fn: Fn) -> str:
    """The function and a loop over arrays that calls it."""
    outs = len(fn.out)
    arguments = [f"x[{k}][i]" for k in range(len(parameters(fn)))] + [
        f"y[{k}][i]" for k in range(outs)
    ]
    return lower(fn, "cuda") + (
        f'extern "C" void run_{symbol(fn)}(const float** x, float** y, int n) {{\n'
        f"  for (int i = 0; i < n; i++) {symbol(fn)}({', '.join(arguments)});\n}}\n"
    )


@pytest.mark.parametrize("name", FUNCTIONS, ids=lambda name: FUNCTIONS[name].name)
def test_cuda_text_computes_what_torch_does(name: str, library: ctypes.CDLL) -> None:
    fn = FUNCTIONS[name]
    columns = _inputs(len(parameters(fn)))
    results = [np.zeros_like(columns[0]) for _ in fn.out]
    pointer = ctypes.POINTER(ctypes.c_float)

    def arrays(items: list[np.ndarray]) -> ctypes.Array[ctypes._Pointer[ctypes.c_float]]:
        return (pointer * len(items))(*(a.ctypes.data_as(pointer) for a in items))

    getattr(library, f"run_{name}")(arrays(columns), arrays(results), len(columns[0]))
    _agree(fn, columns, results)


@pytest.mark.parametrize("fast", [False, True])
def test_cuda_text_compiles_for_sm_90a(fast: bool, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    kernels = [
        f'extern "C" __global__ void k_{symbol(fn)}(float* x, float* y) {{\n'
        f"  {symbol(fn)}({', '.join(f'x[{k}]' for k in range(len(parameters(fn))))}, "
        f"{', '.join(f'y[{k}]' for k in range(len(fn.out)))});\n}}\n"
        for fn in FUNCTIONS.values()
    ]
    texts = [lower(fn, "cuda") for fn in FUNCTIONS.values()]
    source = tmp_path / "all.cu"
    source.write_text(prelude("cuda", fast=fast) + "".join([*texts, *kernels]))
    options = ["-std=c++17", "-arch=sm_90a", "-cubin", "-Xcicc", "-O1", "-Xptxas", "-O1"]
    done = subprocess.run(
        [nvcc, *options, "-o", str(tmp_path / "all.cubin"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _cutlass_stand_ins() -> dict[str, types.ModuleType]:
    """Modules that give the CuTe DSL names that the prelude imports a meaning on NumPy arrays."""
    f32 = np.float32

    def unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., np.ndarray]:
        return lambda x, **_options: np.asarray(function(torch.from_numpy(np.asarray(x, f32))))

    names = (
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "erf",
        "erfc",
        "sqrt",
        "rsqrt",
        "tanh",
        "sin",
        "cos",
    )
    math_module = types.SimpleNamespace(
        **{name: unary(getattr(torch, name)) for name in (*names, "floor")}, absf=unary(torch.abs)
    )

    def nan_aware(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def run(a: object, b: object, *, nan: bool) -> np.ndarray:
            assert nan
            return function(np.asarray(a, f32), np.asarray(b, f32))

        return run

    cutlass, cute, dsl = (types.ModuleType(n) for n in ("cutlass", "cutlass.cute", "cutlass.dsl"))
    cute.math = math_module
    cute.arch = types.SimpleNamespace(
        fmin=nan_aware(np.minimum), fmax=nan_aware(np.maximum), rcp_approx=lambda x: f32(1) / x
    )
    cutlass.cute = cute
    cutlass.Float32 = lambda x: np.asarray(x, f32)
    cutlass.Boolean = np.asarray
    dsl.select_ = np.where
    return {"cutlass": cutlass, "cutlass.cute": cute, "cutlass.cutlass_dsl": dsl}


def _python(*, fast: bool) -> dict[str, Callable[..., Any]]:
    """The CuTe DSL texts as functions of arrays."""
    namespace: dict[str, Callable[..., Any]] = {}
    text = prelude("cutedsl", fast=fast)
    text += "".join(lower(fn, "cutedsl") for fn in FUNCTIONS.values())
    with pytest.MonkeyPatch.context() as patch:
        for name, module in _cutlass_stand_ins().items():
            patch.setitem(sys.modules, name, module)
        exec(compile(text, "<cutedsl>", "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def cutedsl() -> dict[str, Callable[..., Any]]:
    return _python(fast=False)


def _run(function: Callable[..., Any], columns: list[np.ndarray]) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        out = function(*columns)
    shape = columns[0].shape
    return [np.broadcast_to(np.asarray(y, np.float32), shape).copy() for y in _tuple(out)]


@pytest.mark.parametrize("name", FUNCTIONS, ids=lambda name: FUNCTIONS[name].name)
def test_cutedsl_text_computes_what_torch_does(
    name: str, cutedsl: dict[str, Callable[..., Any]]
) -> None:
    fn = FUNCTIONS[name]
    columns = _inputs(len(parameters(fn)))
    _agree(fn, columns, _run(cutedsl[name], columns))


def test_fast_cutedsl_text_is_near_at_ordinary_points() -> None:
    functions = _python(fast=True)
    for name, fn in FUNCTIONS.items():
        columns = [column[-1000:] for column in _inputs(len(parameters(fn)))]
        _agree(fn, columns, _run(functions[name], columns), rtol=1e-4)
    nan = np.array([np.nan], np.float32)
    for name in ("gelu", "silu", "tanh", "softplus", "gelu_erf"):
        assert np.isnan(_run(functions[symbol(activations[name]())], [nan])[0]).all()


def _tuple(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def test_each_node_is_written_once() -> None:
    shared = tm.exp(X) + 1.0
    text = lower(Fn("f", ("value",), shared * shared / (shared - X)), "cuda")
    assert text.count("te_exp") == 1
    assert text.count(" + 1.0f") == 1


def test_a_gated_gradient_shares_its_parts() -> None:
    """One sigmoid for both halves of the gradient."""
    text = lower(activations["swiglu"]().grad(0), "cuda")
    assert text.count("te_sigmoid") == 1


@pytest.mark.parametrize("factors", [(1.0, -1.0), (2.0, -2.0), (-0.5, 0.5)])
def test_sigmoids_of_opposites_share_their_exponential(
    factors: tuple[float, float],
) -> None:
    """In whatever order they come, and whichever of the two is written first."""
    a, b = (call("sigmoid", f * X if abs(f) != 1.0 else (X if f > 0 else -X)) for f in factors)
    for out in (a * b, b - a):
        fn = Fn("opposites", ("value",), out)
        text = lower(fn, "cutedsl")
        assert text.count("_sigmoids(") == 1
        assert "_sigmoid(" not in text
        namespace: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            for name, module in _cutlass_stand_ins().items():
                patch.setitem(sys.modules, name, module)
            exec(compile(prelude("cutedsl") + text, "<cutedsl>", "exec"), namespace)
        columns = _inputs(1)
        _agree(fn, columns, _run(namespace[symbol(fn)], columns))


def test_text_and_symbol_are_stable() -> None:
    fn = Fn("softcap", ("value", "pair"), X + Input(1, "gate") * 0.1)
    assert parameters(fn) == ("x0", "x1_gate", "x1_linear")
    assert lower(fn, "cuda") == (
        f"static __device__ __forceinline__ void {symbol(fn)}"
        "(float x0, float x1_gate, float x1_linear, float& y0) {\n"
        "  const float t0 = x1_gate * 0.1f;\n"
        f"  const float t1 = {'t0 + x0' if 't0 + x0' in lower(fn, 'cuda') else 'x0 + t0'};\n"
        "  y0 = t1;\n"
        "}\n"
    )
    assert symbol(fn) == symbol(Fn("other name", fn.inputs, fn.out))
    assert symbol(fn) != symbol(activations["gelu"]())


@pytest.mark.parametrize(
    ("value", "cuda", "python"),
    [
        (0.1, "0.1f", "0.10000000149011612"),
        (-0.0, "(-0.0f)", "(-0.0)"),
        (2, "2.0f", "2.0"),
        (1e60, "__int_as_float(0x7f800000)", 'float("inf")'),
        (-math.inf, "__int_as_float(0xff800000)", 'float("-inf")'),
        (math.nan, "__int_as_float(0x7fc00000)", 'float("nan")'),
        (1e-45, "1e-45f", "1.401298464324817e-45"),
    ],
)
def test_constants_are_the_fp32_value(value: float, cuda: str, python: str) -> None:
    fn = Fn("f", ("value",), tm.where(value > X, X, value))
    assert f"t0 = x0 < {cuda};" in lower(fn, "cuda")
    assert f"t0 = x0 < {python}\n" in lower(fn, "cutedsl")


@pytest.mark.parametrize("name", [n for n, row in OPERATORS.items() if row.expand])
def test_composite_operators_are_their_expansions(name: str) -> None:
    x = torch.linspace(-40.0, 40.0, 8001, dtype=torch.float64)
    fn = _operator(name)
    torch.testing.assert_close(evaluate(expand(fn), x), evaluate(fn, x), rtol=1e-12, atol=1e-14)
    ends = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    assert str(evaluate(expand(fn), ends)) == str(evaluate(fn, ends))


def test_composite_operators_expand_into_plain_ones() -> None:
    for name, row in OPERATORS.items():
        if row.expand is None:
            assert row.cuda, name
            assert row.cutedsl, name
        else:
            args: list[Expr] = [Input(i) for i in range(row.arity)]
            parts = Fn(name, ("value",) * row.arity, row.expand(*args)).key
            composites = {n for n, other in OPERATORS.items() if other.expand is not None}
            assert not composites & set(parts.replace(";", " ").split()), name


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'hip'.*\['cuda', 'cutedsl'\]"):
        lower(activations["gelu"](), "hip")
