"""RoPE with positions of its own (offsets, ids, packed sequences) and with stretched frequencies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import te_ops as te
from te_ops.basic.rope import ROPE_PACKED_POSITIONS
from te_ops.basic.rope_scaling import frequencies, scaling_of
from te_ops.errors import PlanError, ShapeError

F64 = torch.float64


def turned(
    x: torch.Tensor, positions: torch.Tensor, dim: int, base: float = 10000.0
) -> torch.Tensor:
    """x [..., h, d] rotated at positions [...], pair by pair, in float64."""
    x = x.double()
    out = x.clone()
    half = dim // 2
    for i in range(half):
        angle = positions.double() * base ** (-2.0 * i / dim)
        cos, sin = angle.cos().unsqueeze(-1), angle.sin().unsqueeze(-1)
        out[..., i] = x[..., i] * cos - x[..., half + i] * sin
        out[..., half + i] = x[..., half + i] * cos + x[..., i] * sin
    return out


def check(
    op: te.RoPE, x: torch.Tensor, extras: list[torch.Tensor], positions: torch.Tensor
) -> None:
    x.requires_grad_()
    y = op(x, *extras)
    torch.testing.assert_close(y, turned(x.detach(), positions, op.dim, op.base))
    dy = torch.randn_like(y)
    exact = x.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(turned(exact, positions, op.dim, op.base), exact, dy)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], want)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_each_sequence(layout: Any, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 2, 8, dtype=F64)
    offsets = torch.tensor([0, 7, 100], dtype=dtype)
    positions = offsets[:, None] + torch.arange(5)
    if layout == "sbhd":
        x, positions = x.transpose(0, 1).contiguous(), positions.t()
    check(te.RoPE(6, qkv_format=layout, positions="offsets"), x, [offsets], positions)


@pytest.mark.parametrize("shape", [(3, 5), (5,)])
def test_position_ids(shape: tuple[int, ...]) -> None:
    x = torch.randn(3, 5, 2, 8, dtype=F64)
    ids = torch.randint(0, 50, shape)
    check(te.RoPE(8, positions="ids"), x, [ids], ids.expand(3, 5))
    xt = x.detach().transpose(0, 1).contiguous()
    check(
        te.RoPE(8, positions="ids", qkv_format="sbhd"),
        xt,
        [ids.t() if ids.dim() == 2 else ids],
        ids.expand(3, 5).t(),
    )


def test_ids_of_packed_tokens() -> None:
    ids = torch.randint(0, 50, (7,))
    check(
        te.RoPE(8, positions="ids", qkv_format="thd"), torch.randn(7, 2, 8, dtype=F64), [ids], ids
    )


@pytest.mark.parametrize(
    ("cu", "padded", "tokens"),
    [
        ([0, 3, 3, 7], None, 7),
        ([0, 0, 7], None, 9),
        ([0, 7, 7], None, 7),
        ([0, 5, 12], [2, 8, 20], 24),
        ([0], None, 4),
    ],
)
@pytest.mark.parametrize("offsets", [False, True])
def test_packed_tokens_count_in_their_sequence(
    cu: list[int], padded: Any, tokens: int, offsets: bool
) -> None:
    places = (padded or cu)[:-1]
    first = [10 * i + 3 for i in range(len(places))] if offsets else [0] * len(places)
    positions = torch.zeros(tokens, dtype=torch.int64)
    for start, a, b, f in zip(places, cu, cu[1:], first, strict=False):
        positions[start : start + b - a] = torch.arange(b - a) + f
    op = te.RoPE(8, qkv_format="thd", positions="offsets" if offsets else "start")
    extras: list[torch.Tensor] = [te.PackedSequences(cu, cu_q_padded=padded)]
    extras += [torch.tensor(first, dtype=torch.int64)] if offsets else []
    assert op.num_inputs == 1 + len(extras)
    check(op, torch.randn(tokens, 2, 8, dtype=F64), extras, positions)


def test_generation_by_offsets_equals_the_whole() -> None:
    x = torch.randn(2, 9, 2, 8)
    whole = te.RoPE(8)(x)
    op = te.RoPE(8, positions="offsets")
    parts = [op(x[:, i : i + 3], torch.full((2,), i)) for i in (0, 3, 6)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_far_positions_are_as_good_as_fp32_angles() -> None:
    """An FP32 angle is off by half a unit of 131071; nothing here loses more than that."""
    x = torch.randn(1, 4, 1, 64)
    y = te.RoPE(64, positions="ids")(x, torch.arange(131068, 131072))
    want = turned(x, torch.arange(131068, 131072).expand(1, 4), 64)
    assert float((y.double() - want).abs().max()) < 131072 * 2.0**-24 * 4


# -- stretched frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}


def inverse(dim: int, base: float, given: Any, length: int = 0) -> torch.Tensor:
    return frequencies(dim, base, scaling_of(given, base), length, torch.zeros((), dtype=F64))


def by_pair(dim: int, base: float) -> list[float]:
    return [base ** (-2.0 * i / dim) for i in range(dim // 2)]


def test_linear_and_dynamic() -> None:
    plain = torch.tensor(by_pair(64, 1e4), dtype=F64)
    assert scaling_of({"rope_type": "default"}, 1e4) is None
    torch.testing.assert_close(inverse(64, 1e4, {"type": "linear", "factor": 4.0}), plain / 4)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 100}
    for length in (1, 100):
        torch.testing.assert_close(inverse(64, 1e4, dynamic, length), plain)
    base = 1e4 * (2.0 * 300 / 100 - 1.0) ** (64 / 62)
    torch.testing.assert_close(
        inverse(64, 1e4, dynamic, 300), torch.tensor(by_pair(64, base), dtype=F64)
    )
    torch.testing.assert_close(inverse(2, 1e4, dynamic, 300), torch.ones(1, dtype=F64))


def test_llama3() -> None:
    want = []
    for f in by_pair(128, 5e5):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4.0:
            want.append(f)
        elif wavelength > 8192 / 1.0:
            want.append(f / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            want.append((1 - smooth) * f / 8.0 + smooth * f)
    made = inverse(128, 5e5, LLAMA3)
    torch.testing.assert_close(made, torch.tensor(want, dtype=F64))
    plain = torch.tensor(by_pair(128, 5e5), dtype=F64)
    kinds = {(bool(a == b), bool(a == b / 8)) for a, b in zip(made, plain, strict=True)}
    assert kinds == {(True, False), (False, True), (False, False)}  # all three branches


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(truncate: bool) -> None:
    given = {**YARN, "truncate": truncate, "beta_fast": 32, "beta_slow": 1}

    def pair_of(turns: float) -> float:
        return 64 * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(1e4))

    low, high = pair_of(32), pair_of(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    want = []
    for i, f in enumerate(by_pair(64, 1e4)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        want.append(f / 16.0 * ramp + f * (1 - ramp))
    torch.testing.assert_close(inverse(64, 1e4, given), torch.tensor(want, dtype=F64))
    scaling = scaling_of(given, 1e4)
    assert scaling is not None
    assert scaling.amplitude == pytest.approx(0.1 * math.log(16.0) + 1.0)


def test_yarn_amplitude_scales_the_rotation() -> None:
    x = torch.randn(1, 6, 1, 8, dtype=F64)
    for more, amplitude in (
        ({}, 0.1 * math.log(16.0) + 1.0),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 2.0, "mscale_all_dim": 1.0},
            (0.2 * math.log(16.0) + 1.0) / (0.1 * math.log(16.0) + 1.0),
        ),
    ):
        y = te.RoPE(8, rope_scaling={**YARN, **more})(x)
        torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1) * amplitude)


def test_scaled_tables_reach_every_form() -> None:
    x = torch.randn(2, 300, 2, 8, dtype=F64)
    linear = te.RoPE(8, rope_scaling={"rope_type": "linear", "factor": 3.0})(x)
    torch.testing.assert_close(
        linear, turned(x, (torch.arange(300, dtype=F64) / 3.0).expand(2, 300), 8)
    )
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 100}
    base = 1e4 * (2.0 * 300 / 100 - 1.0) ** (8 / 6)
    want = turned(x, torch.arange(300).expand(2, 300), 8, base)
    torch.testing.assert_close(te.RoPE(8, rope_scaling=dynamic)(x), want)
    by_ids = te.RoPE(8, rope_scaling=dynamic, positions="ids")(x, torch.arange(300))
    torch.testing.assert_close(by_ids, want)
    assert torch.equal(te.RoPE(8, rope_scaling=dynamic)(x[:, :50]), te.RoPE(8)(x[:, :50]))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"rope_scaling": {"rope_type": "long"}}, "rope_type must be one of"),
        ({"rope_scaling": {}}, "rope_type must be one of"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be a dictionary or None, got 'llama3'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "unknown beta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "must be below"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate"),
        ({"rope_scaling": YARN, "base": 1.0}, "needs a base above 1"),
        ({"positions": "there"}, "positions must be one of"),
        ({"positions": "ids", "start_position": 3}, "start_position is for"),
        ({"qkv_format": "thd", "start_position": 3}, "start_position is for"),
    ],
)
def test_constructor_mistakes(keywords: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        te.RoPE(8, **keywords)


def test_input_mistakes() -> None:
    x = torch.randn(2, 5, 2, 8)
    ids = te.RoPE(8, positions="ids")
    with pytest.raises(ShapeError, match="there are positions for"):
        ids(x, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ShapeError, match="int32 or int64"):
        ids(x, torch.zeros(2, 5, 1))
    with pytest.raises(ShapeError, match="takes 2 inputs, got 1"):
        ids(x)
    offsets = te.RoPE(8, positions="offsets")
    with pytest.raises(ShapeError, match="there are positions for"):
        offsets(x, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="one entry a sequence"):
        offsets(x, torch.zeros(2, 5, dtype=torch.int64))
    packed = te.RoPE(8, qkv_format="thd", positions="offsets")
    with pytest.raises(ShapeError, match="offsets for"):
        packed(x[0], te.PackedSequences([0, 2, 5]), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"thd|t x h x d"):
        packed(x, te.PackedSequences([0, 2, 5]), torch.zeros(2, dtype=torch.int64))


def test_tokens_of_no_sequence_have_position_zero() -> None:
    made = ROPE_PACKED_POSITIONS.reference(torch.tensor([2, 6, 6]), torch.tensor([2, 0, 3]), (11,))
    assert made.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 2, 0, 0]
