from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import te_ops as te
from te_ops.cli.train.metrics import (
    OPERANDS,
    OperandName,
    measure,
    number_format,
    operands_of_a_step,
    sqnr,
    underflow,
)
from te_ops.cli.train.text import read
from te_ops.cli.train.trainer import Trainer
from tests.cli.train.small import settings

PATHS = ("self_attention.qkv", "self_attention.proj", "mlp.fc1", "mlp.fc2")


def _trained(folder: Path, name: str, steps: int = 4) -> Trainer:
    s = settings(folder, recipes=("fp32", name), steps=steps)
    trainer = Trainer(s, s.arms[-1], read(s.text, s.context + 1))
    trainer.run(steps, None, lambda _: None)
    return trainer


def test_sqnr_and_underflow_of_known_values() -> None:
    x = torch.tensor([3.0, 4.0, 0.0, 1.0])
    assert sqnr(x, x) == math.inf
    assert sqnr(x, x + torch.tensor([0.0, 0.0, 0.26**0.5, 0.0])) == pytest.approx(20.0)
    assert underflow(x, torch.tensor([3.0, 0.0, 0.0, 1.0])) == pytest.approx(1 / 3)
    assert underflow(torch.zeros(3), torch.zeros(3)) == 0.0


@pytest.mark.parametrize(
    ("quantizer", "mantissa", "smallest", "floor"),
    [
        (te.MXFP8Quantizer(torch.float8_e4m3fn), 3, 2.0**-9, 24.61),
        (te.Float8Quantizer(torch.float8_e5m2), 2, 2.0**-16, 19.08),
        (te.NVFP4Quantizer(), 1, 0.5, 13.98),
        (te.IdentityQuantizer(torch.bfloat16), 7, 2.0**-133, 48.2),
    ],
)
def test_formats(quantizer: te.Quantizer, mantissa: int, smallest: float, floor: float) -> None:
    found = number_format(quantizer)
    assert (found.mantissa, found.smallest) == (mantissa, smallest)
    assert found.sqnr_floor == pytest.approx(floor, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_floor_is_the_worst_relative_error_of_a_format(dtype: torch.dtype) -> None:
    quantizer = te.Float8CurrentScalingQuantizer(dtype)
    low = number_format(quantizer)
    x = torch.linspace(1.0, 2.0, 100_001)
    error = ((x - x.to(dtype).float()).abs() / x).max().item()
    assert error == pytest.approx(10 ** (-low.sqnr_floor / 20), rel=1e-3)


def test_operands_are_those_of_the_quantized_linears(tmp_path: Path) -> None:
    trainer = _trained(tmp_path, "current")
    found = operands_of_a_step(trainer, trainer.held_out[0])
    assert set(found) == {OperandName(f"layers.0.{p}", o) for p in PATHS for o in OPERANDS}
    fc1 = OperandName("layers.0.mlp.fc1", "weight")
    assert torch.equal(found[fc1], trainer.model.get_submodule(fc1.path).weight)
    assert found[OperandName("layers.0.mlp.fc2", "grad_output")].shape == (2, 16, 32)


@pytest.mark.parametrize("name", ["bf16", "delayed", "mxfp8", "nvfp4"])
def test_a_recipe_measures_within_its_format(name: str, tmp_path: Path) -> None:
    trainer = _trained(tmp_path, name)
    state = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    found = measure(trainer)
    assert len(found.errors) == 12 + 3 * (name == "bf16")  # under bf16 the head is rounded too
    for error in found.errors:
        assert error.sqnr_floor <= error.sqnr < error.sqnr_floor + 12
    assert found.cosine_floor < found.cosine_worst <= found.cosine < 1.0
    assert found.saved_bytes > 0
    assert all(torch.equal(v, trainer.model.state_dict()[k]) for k, v in state.items())
    assert all(p.grad is None for p in trainer.model.parameters())


def test_fp32_measures_as_exact(tmp_path: Path) -> None:
    found = measure(_trained(tmp_path, "fp32"))
    assert found.errors == ()
    assert found.cosine == pytest.approx(1.0, abs=1e-12)
    assert found.worst("input") is None


def test_delayed_scaling_is_measured_with_the_scale_of_its_state(tmp_path: Path) -> None:
    trainer = _trained(tmp_path, "delayed")
    good = measure(trainer).worst("weight")
    op = trainer.model.get_submodule("layers.0.mlp.fc1")
    op.get_buffer("quantizer.delayed.weight.scale").fill_(1e-3)
    bad = measure(trainer).worst("weight")
    assert good is not None
    assert bad is not None
    assert bad.operand.path == "layers.0.mlp.fc1"
    assert bad.sqnr < 5 < good.sqnr
    assert bad.underflow > 0.5 > good.underflow
