"""K04: scale arithmetic at the edges: zero, tiny, huge, Inf, NaN, special scale codes."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import te_ops as te
from te_ops.quantizers import join_nonfinite, scale_from_amax, split_nonfinite
from tests.faults import cases
from tests.faults.cases import (
    RECIPES,
    VALUES,
    Case,
    Values,
    every_quantizer,
    every_value,
    quantized_case,
)

SHAPE = (16, 32)


def is_fp8(t: torch.Tensor) -> bool:
    return t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


@every_value
@every_quantizer
def test_scales_and_values_stay_finite_and_nan_stays_nan(
    quantizer: te.Quantizer, values: Values
) -> None:
    """B021, for every format and value."""
    if values.name == "huge" and "rht" in quantizer.describe():
        pytest.skip("a sum of 16 such values is beyond FP32, and Inf - Inf is NaN")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _check_edges(values.fill(SHAPE).to(dtype), quantizer, values.finite)


def _check_edges(x: torch.Tensor, quantizer: te.Quantizer, finite: bool) -> None:
    q = cases.make_quantized(x, quantizer, rowwise=True, columnwise=True)
    for record in (q.rowwise, q.columnwise):
        assert record is not None
        y = record.dequantize(torch.float32)
        bad = x.isnan()
        if bad.any():
            spread = getattr(record.quantizer, "with_rht", False) or record.quantizer.name in (
                "mxfp8",
                "nvfp4",
            )
            assert y.isnan()[bad].all(), "a NaN became a number"
            if not spread:
                assert torch.equal(y.isnan(), bad)
        else:
            assert not y.isnan().any()
        if finite and not x.isinf().any():
            assert torch.isfinite(y).all()
        if (
            record.scale_inv is not None
            and not bad.any()
            and record.scale_inv.dtype is torch.float32
        ):
            assert torch.isfinite(record.scale_inv).all()
            assert (record.scale_inv > 0).all()


@pytest.mark.parametrize("values", [v for v in VALUES if v.finite], ids=lambda v: v.name)
@every_quantizer
def test_error_is_bounded_by_the_format_at_every_magnitude(
    quantizer: te.Quantizer, values: Values
) -> None:
    """No value is off by more than its block's resolution: a scale that is wrong by 2 would be."""
    if quantizer.stateful:
        pytest.skip("its scale is the user's")
    x = values.fill(SHAPE).float()
    if values.name == "subnormal" or (values.name == "tiny" and _has_floor(quantizer)):
        pytest.skip("below what any scale can reach; finiteness is tested above")
    if values.name == "huge" and "rht" in quantizer.describe():
        pytest.skip("a sum of 16 such values is beyond FP32")
    for usage in ({"rowwise": True}, {"rowwise": False, "columnwise": True}):
        y = cases.make_quantized(x, quantizer, **usage).dequantize()
        amax = float(x.abs().amax())
        assert float((y - x).abs().max()) <= _relative(quantizer) * amax


def _has_floor(quantizer: te.Quantizer) -> bool:
    """An epsilon, or a scale of the whole tensor beside those of blocks: both end before FP32 does."""
    return getattr(quantizer, "amax_epsilon", 0.0) > 0 or "nvfp4" in quantizer.describe()


def _relative(quantizer: te.Quantizer) -> float:
    if isinstance(quantizer, te.HybridQuantizer):
        return max(
            _relative(quantizer.rowwise_quantizer), _relative(quantizer.columnwise_quantizer)
        )
    if isinstance(quantizer, te.NVFP4Quantizer):
        return 0.45  # half the widest step (4 to 6) of 6, the scale's rounding; the RHT adds up such errors
    if getattr(quantizer, "dtype", None) is torch.float8_e5m2:
        return 0.13
    return 0.07


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@every_value
@every_quantizer
def test_scale_arithmetic_does_not_depend_on_the_input_dtype(
    quantizer: te.Quantizer, values: Values, low: torch.dtype
) -> None:
    """B023: quantizing x in FP16 or BF16 gives the bytes of x.float()."""
    if getattr(quantizer, "columnwise_source", "") == "rowwise_dequantized":
        pytest.skip("its columns start from the rows' values in the input dtype")
    x = values.fill(SHAPE).to(low)
    a = cases.make_quantized(x, quantizer, rowwise=True, columnwise=True)
    b = cases.make_quantized(x.float(), quantizer, rowwise=True, columnwise=True)
    if values.name in ("tiny", "subnormal") and low is torch.bfloat16:
        return  # an overflowing scale is the largest value of the input dtype: numerics of the guide
    for r, s in ((a.rowwise, b.rowwise), (a.columnwise, b.columnwise)):
        assert r is not None
        assert s is not None
        torch.testing.assert_close(
            r.dequantize(torch.float32), s.dequantize(torch.float32), rtol=0, atol=0, equal_nan=True
        )


def test_fp16_of_the_report() -> None:
    x = torch.tensor([[0.1, 0.0, 0.0, 0.2]], dtype=torch.float16)
    q = te.quantize(x, te.Float8CurrentScalingQuantizer(torch.float8_e5m2))
    assert torch.isfinite(q.dequantize()).all()
    assert q.rowwise is not None
    torch.testing.assert_close(q.rowwise.scale_inv, x.float().amax() / 57344)


@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
@pytest.mark.parametrize("amax", [1e-38, 1e-44, 1.4e-45, 0.0, 1.0, 3.4e38, math.inf, math.nan])
@pytest.mark.parametrize("pow2", [False, True])
def test_scale_rule(amax: float, fp8_max: float, pow2: bool) -> None:
    scale = scale_from_amax(torch.tensor(amax), fp8_max, pow2)
    assert torch.isfinite(scale)
    assert scale > 0
    assert torch.isfinite(1 / scale)
    if amax in (0.0, math.inf) or math.isnan(amax):
        assert scale == 1
    if pow2:
        assert math.frexp(float(scale))[0] == 0.5
    expected = fp8_max / amax if amax > 0 and math.isfinite(amax) else 1.0
    assert float(scale) <= expected * (1 + 1e-6)


@every_value
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_training_step_on_hard_values(recipe: te.Recipe, values: Values) -> None:
    """Finite in gives finite out and finite state under every recipe; NaN in gives NaN out in its row."""
    case = cases.BY_NAME["Linear"]
    op = case.fresh()
    x = values.fill((5, cases.WIDTH)).requires_grad_()
    for _ in range(2):
        result = cases.step(op, (x,), recipe)
    moderate = values.name not in ("huge",)
    if values.finite and moderate:
        for name, t in result.tensors():
            assert t is None or torch.isfinite(t).all(), name
    rows = x.isnan().any(-1)
    if rows.any():
        assert result.outputs[0].isnan().any(-1)[rows].all(), "a NaN was hidden"
    for name, t in op.state_dict().items():
        if ".delayed." in f".{name}" and not name.endswith("nonfinite_steps"):
            assert torch.isfinite(t).all(), name


@quantized_case
def test_epsilon_and_powers_of_two_of_recipes_reach_the_bytes(case: Case) -> None:
    op, xs = case.fresh(), case.data(5)
    plain = cases.step(op, xs, te.recipe.Float8CurrentScaling())
    for other in (
        te.recipe.Float8CurrentScaling(use_power_2_scales=True),
        te.recipe.Float8CurrentScaling(amax_epsilon=1e4),
    ):
        made = cases.step(op, xs, other)
        assert not torch.equal(made.outputs[0], plain.outputs[0])


# -- B025


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_flagged_reduction_is_the_same_for_every_order(bad: float, rank: int) -> None:
    amaxes = [torch.tensor(3.0), torch.tensor(3.0)]
    amaxes[rank] = torch.tensor(bad)
    parts = [torch.stack(split_nonfinite(a)) for a in amaxes]
    assert all(torch.isfinite(p).all() for p in parts), "what is reduced must not hold a NaN"
    for order in (parts, parts[::-1]):
        amax, flag = torch.maximum(*order)
        assert torch.isnan(join_nonfinite(amax, flag))
        assert amax == 3.0


WORKER = """
    import math, sys, torch, torch.distributed as dist
    import te_ops as te
    torch.set_num_threads(1)
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    op = te.Linear(16, 16)
    with torch.no_grad():
        op.weight.fill_(0.5)
    recipe = te.recipe.DelayedScaling(amax_history_len=8)
    group = dist.group.WORLD

    def step(x, recipe=recipe):
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            y = op(x)
        y.sum().backward()

    def state():
        s = op.quantizer.delayed.input
        return [float(s.scale), int(s.nonfinite_steps), [float(v) for v in s.amax_history]]

    out = []
    step(torch.full((4, 16), 2.0 + rank)); out.append(state())
    for bad_rank in (0, 1):
        for bad in (math.nan, math.inf):
            x = torch.full((4, 16), 2.0 + rank)
            if rank == bad_rank:
                x[1, 1] = bad
            step(x); out.append(state())
    step(torch.full((4, 16), 5.0 - rank)); out.append(state())
    own = te.recipe.DelayedScaling(amax_history_len=8, reduce_amax=False)
    step(torch.full((4, 16), 10.0 + rank), own); out.append(state())
    print(out)
    dist.destroy_process_group()
"""


def test_two_ranks_agree_whoever_holds_the_nan(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    procs = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
        )
        for rank in range(2)
    ]
    results = [p.communicate(timeout=100) for p in procs]
    assert all(p.returncode == 0 for p in procs), results[0][1] + results[1][1]
    a, b = (eval(out) for out, _ in results)
    assert a[:-1] == b[:-1]
    scales = [row[0] for row in a]
    assert scales[0] == pytest.approx(448 / 3)
    assert scales[1:5] == [scales[0]] * 4, "a non-finite step keeps the scale on every rank"
    assert [row[1] for row in a[:5]] == [0, 1, 2, 3, 4]
    assert scales[5] == pytest.approx(448 / 5)
    assert a[-1][2][-1] == 10.0, "reduce_amax=False keeps each rank's own"
    assert b[-1][2][-1] == 11.0


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(te.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
