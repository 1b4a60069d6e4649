"""Every op with its inputs and an oracle in plain torch, written without te_ops."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_ops as te
from tests.faults.cases.results import Result, backward, outputs_of

WIDTH = 64
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 3, 24, 33, 128)


Make = Callable[[torch.dtype], nn.Module]
Inputs = Callable[[int, torch.dtype], tuple[torch.Tensor, ...]]
Oracle = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An op, its inputs for a row count, and its oracle: `oracle(op, *xs)` in plain torch."""

    name: str
    make: Make
    inputs: Inputs
    oracle: Oracle
    quantized: bool = False  # recipes change its numbers
    pipes: bool = False  # maps [rows, WIDTH] to [rows, WIDTH]: may stand anywhere in a pipeline
    smooth: bool = True  # no kink that a rounding of the input could cross
    kinds: tuple[type, ...] = ()

    def fresh(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The op with filled parameters, the same at every call."""
        with _seed(11):
            op = self.make(dtype)
            with torch.no_grad():
                for p in op.parameters():
                    p.copy_(0.3 * torch.randn(p.shape, dtype=torch.float64) + 0.1)
        return op

    def data(
        self, rows: int, dtype: torch.dtype = torch.float32, grad: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Inputs, the same at every call."""
        with _seed(5):
            xs = self.inputs(rows, dtype)
        return tuple(x.requires_grad_(grad and x.is_floating_point()) for x in xs)

    def expected(self, op: nn.Module, xs: Sequence[torch.Tensor]) -> Result:
        """The oracle in FP64 on the same numbers, gradients included."""
        twin = wide_twin(op)
        wide = [
            x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
            for x in xs
        ]
        outputs = outputs_of(self.oracle(twin, *wide))
        if any(y.requires_grad for y in outputs):
            backward(outputs)
        return Result(
            [y.detach() for y in outputs],
            [x.grad for x in wide],
            {n: p.grad for n, p in twin.named_parameters()},
        )


class _Names(nn.Module):
    """Parameters in FP64 under the op's own names, for the oracle: no te_ops code runs in it."""

    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        for name, child in op._modules.items():
            if child is not None:
                self.add_module(name, _Names(child))
        for name, p in op._parameters.items():
            made = None if p is None else nn.Parameter(p.detach().double().clone(), p.requires_grad)
            self.register_parameter(name, made)


def wide_twin(op: nn.Module) -> nn.Module:
    """What an oracle reads: the parameters in FP64."""
    return _Names(op)


class _seed:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.state = torch.get_rng_state()
        torch.manual_seed(self.seed)

    def __exit__(self, *_: Any) -> None:
        torch.set_rng_state(self.state)


def _x(*tail: int) -> Inputs:
    """[rows, *tail], away from 0 by less than a rounding nowhere in particular."""
    return lambda rows, dtype: (torch.randn(rows, *tail, dtype=torch.float64).to(dtype),)


def _xs(*tails: tuple[int, ...]) -> Inputs:
    return lambda rows, dtype: tuple(
        torch.randn(rows, *t, dtype=torch.float64).to(dtype) for t in tails
    )


def _halves(x: torch.Tensor, interleave: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    if interleave is None:
        gate, linear = x.chunk(2, -1)
        return gate, linear
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * interleave), 2, interleave)
    flat = (*x.shape[:-1], x.shape[-1] // 2)
    return blocks[..., 0, :].reshape(flat), blocks[..., 1, :].reshape(flat)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _clamped(x: torch.Tensor) -> torch.Tensor:
    gate, linear = _halves(x)
    gate = gate.clamp(max=1.5)
    return gate * torch.sigmoid(1.2 * gate) * (linear.clamp(-1.5, 1.5) + 0.5)


def _situ(x: torch.Tensor) -> torch.Tensor:
    gate, linear = _halves(x)
    return 2.0 * torch.tanh(gate / 2.0) * torch.sigmoid(gate) * 3.0 * torch.tanh(linear / 3.0)


@te.pointwise
def softcap(x, cap: float):  # type: ignore[no-untyped-def]
    """cap * tanh(x / cap): an op of a user's own."""
    return cap * te.math.tanh(x / cap)


def _unary(
    kind: type, f: Callable[[torch.Tensor], torch.Tensor], smooth: bool = True, **options: Any
) -> Case:
    name = kind.__name__ + "".join(f"_{v}" for v in options.values())
    return Case(
        name,
        lambda _: kind(**options),
        _x(WIDTH),
        lambda _, x: f(x),
        pipes=True,
        smooth=smooth,
        kinds=(kind,),
    )


def _gated(kind: type, f: Callable[[torch.Tensor], torch.Tensor], smooth: bool = True) -> Case:
    def oracle(_: Any, x: torch.Tensor) -> torch.Tensor:
        gate, linear = _halves(x)
        return f(gate) * linear

    return Case(
        kind.__name__, lambda _: kind(), _x(2 * WIDTH), oracle, smooth=smooth, kinds=(kind,)
    )


def _scaled(
    kind: type,
    f: Callable[[torch.Tensor], torch.Tensor],
    features: int,
    smooth: bool,
    **options: Any,
) -> Case:
    return Case(
        kind.__name__,
        lambda _: kind(**options),
        _xs((features,), ()),
        lambda _, x, s: f(x) * s.unsqueeze(-1),
        smooth=smooth,
        kinds=(kind,),
    )


def _rms(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * w


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    *,
    cap: float | None = None,
) -> torch.Tensor:
    """Causal, [b, s, h, d], grouped; scores capped, then biased; a sink is one more key with value 0."""
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = (scores if bias is None else scores + bias).masked_fill(hidden, -math.inf)
    if sink is not None:
        more = sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.einsum(
            "bhqk,bkhd->bqhd", torch.cat([scores, more], -1).softmax(-1)[..., :-1], v
        )
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def _rope(x: torch.Tensor, dim: int, base: float = 10000.0) -> torch.Tensor:
    half = dim // 2
    freq = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * freq
    cos, sin = (f(angle)[:, None, :] for f in (torch.cos, torch.sin))
    a, b, rest = x[..., :half], x[..., half:dim], x[..., dim:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _dropout(op: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Its mask is read off ones; that the kept values are x / (1 - p) is what is tested."""
    ones = te.Dropout(0.4, seed=9)(torch.ones(x.shape))
    return x * (ones != 0) / 0.6


def _cross_entropy(_: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets.long(), label_smoothing=0.1, reduction="none")


def _ce_inputs(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, 17, dtype=torch.float64).to(dtype), torch.randint(0, 17, (rows,))


def _lin(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, m.weight, getattr(m, "bias", None))


def _mlp(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = _rms(x, m.get_submodule("0").weight)
    h = _lin(m.get_submodule("1"), h)
    gate, linear = _halves(h)
    return _lin(m.get_submodule("3"), F.silu(gate) * linear)


def _make_mlp(dtype: torch.dtype) -> nn.Module:
    return te.Sequential(
        te.RMSNorm(WIDTH, dtype=dtype),
        te.Linear(WIDTH, 2 * WIDTH, dtype=dtype),
        te.SwiGLU(),
        te.Linear(WIDTH, WIDTH, bias=False, dtype=dtype),
    )


def _child(m: Any, path: str) -> Any:
    return m.get_submodule(path)


_UNARY = [
    _unary(te.GELU, _gelu),
    _unary(te.GELU, F.gelu, approximate="none"),
    _unary(te.ReLU, F.relu, smooth=False),
    _unary(te.SReLU, _srelu),
    _unary(te.QGELU, _qgelu),
    _unary(te.SiLU, F.silu),
    _unary(te.L2Normalization, lambda x: x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)),
    _unary(te.Identity, lambda x: x),
    _unary(te.Cut, lambda x: x),
    _unary(te.Quantize, lambda x: x),
    _unary(te.Dequantize, lambda x: x),
    _unary(te.ConstantScale, lambda x: 0.75 * x, scale=0.75),
    _unary(te.Reshape, lambda x: x, shape=(-1, WIDTH)),
    _unary(softcap, lambda x: 2.0 * torch.tanh(x / 2.0), cap=2.0),
]

_GATED = [
    _gated(te.GLU, torch.sigmoid),
    _gated(te.GEGLU, _gelu),
    _gated(te.QGEGLU, _qgelu),
    _gated(te.ReGLU, F.relu, smooth=False),
    _gated(te.SReGLU, _srelu),
    _gated(te.SwiGLU, F.silu),
    Case(
        "SwiGLU_interleaved",
        lambda _: te.SwiGLU(glu_interleave_size=8),
        _x(2 * WIDTH),
        lambda _, x: F.silu(_halves(x, 8)[0]) * _halves(x, 8)[1],
        kinds=(te.SwiGLU,),
    ),
    Case(
        "ClampedSwiGLU",
        lambda _: te.ClampedSwiGLU(1.5, 1.2, 0.5),
        _x(2 * WIDTH),
        lambda _, x: _clamped(x),
        smooth=False,
        kinds=(te.ClampedSwiGLU,),
    ),
    Case(
        "SiTUGLU",
        lambda _: te.SiTUGLU(2.0, 3.0),
        _x(2 * WIDTH),
        lambda _, x: _situ(x),
        kinds=(te.SiTUGLU,),
    ),
    _scaled(te.ScaledSwiGLU, lambda x: F.silu(_halves(x)[0]) * _halves(x)[1], 2 * WIDTH, True),
    _scaled(te.ScaledSReLU, _srelu, WIDTH, True),
    _scaled(
        te.ScaledClampedQGeGLU,
        _clamped,
        2 * WIDTH,
        False,
        limit=1.5,
        alpha=1.2,
        glu_linear_offset=0.5,
    ),
    _scaled(te.ScaledSiTUGLU, _situ, 2 * WIDTH, True, beta1=2.0, beta2=3.0),
]

_BASIC = [
    Case(
        "Linear",
        lambda d: te.Linear(WIDTH, WIDTH, dtype=d),
        _x(WIDTH),
        _lin,
        quantized=True,
        pipes=True,
        kinds=(te.Linear,),
    ),
    Case(
        "Linear_odd",
        lambda d: te.Linear(WIDTH, 7, bias=False, dtype=d),
        _x(WIDTH),
        _lin,
        quantized=True,
        kinds=(te.Linear,),
    ),
    Case(
        "Bias",
        lambda d: te.Bias(WIDTH, dtype=d),
        _x(WIDTH),
        lambda m, x: x + m.bias,
        pipes=True,
        kinds=(te.Bias,),
    ),
    Case(
        "RMSNorm",
        lambda d: te.RMSNorm(WIDTH, dtype=d),
        _x(WIDTH),
        lambda m, x: _rms(x, m.weight),
        pipes=True,
        kinds=(te.RMSNorm,),
    ),
    Case(
        "RMSNorm_zero_centered",
        lambda d: te.RMSNorm(WIDTH, dtype=d, zero_centered_gamma=True),
        _x(WIDTH),
        lambda m, x: _rms(x, 1 + m.weight),
        pipes=True,
        kinds=(te.RMSNorm,),
    ),
    Case(
        "RMSNorm_residual",
        lambda d: te.RMSNorm(WIDTH, dtype=d, residual=True),
        _xs((WIDTH,), (WIDTH,)),
        lambda m, x, r: (_rms(x + r, m.weight), x + r),
        kinds=(te.RMSNorm,),
    ),
    Case(
        "LayerNorm",
        lambda d: te.LayerNorm(WIDTH, dtype=d),
        _x(WIDTH),
        lambda m, x: F.layer_norm(x, (WIDTH,), m.weight, m.bias),
        pipes=True,
        kinds=(te.LayerNorm,),
    ),
    Case(
        "LayerNorm_two_dims",
        lambda d: te.LayerNorm((4, 16), dtype=d),
        _x(4, 16),
        lambda m, x: F.layer_norm(x, (4, 16), m.weight, m.bias),
        kinds=(te.LayerNorm,),
    ),
    Case(
        "Dropout",
        lambda _: te.Dropout(0.4, seed=9),
        _x(WIDTH),
        _dropout,
        pipes=False,
        kinds=(te.Dropout,),
    ),
    Case(
        "Embedding",
        lambda d: te.Embedding(11, WIDTH, padding_idx=3, dtype=d),
        lambda rows, _: (torch.randint(0, 11, (rows,)),),
        lambda m, i: F.embedding(i, m.weight, padding_idx=3),
        kinds=(te.Embedding,),
    ),
    Case(
        "CrossEntropy",
        lambda _: te.CrossEntropy(label_smoothing=0.1, reduction="none"),
        _ce_inputs,
        _cross_entropy,
        kinds=(te.CrossEntropy,),
    ),
    Case(
        "Add",
        lambda _: te.Add(),
        _xs((WIDTH,), (WIDTH,), (WIDTH,)),
        lambda _, a, b, c: a + b + c,
        kinds=(te.Add,),
    ),
    Case(
        "AddExtraInput",
        lambda _: te.AddExtraInput(),
        _xs((WIDTH,), (WIDTH,)),
        lambda _, a, b: a + b,
        kinds=(te.AddExtraInput,),
    ),
    Case(
        "RoPE",
        lambda _: te.RoPE(8),
        _x(3, 2, 16),
        lambda _, x: _rope(x, 8),
        kinds=(te.RoPE,),
    ),
    Case(
        "Attention",
        lambda _: te.Attention(4, 2),
        _xs((5, 4, 16), (5, 2, 16), (5, 2, 16)),
        lambda _, q, k, v: _attention(q, k, v),
        kinds=(te.Attention,),
    ),
    Case(
        "Attention_bias_sink",
        lambda dtype: te.Attention(
            4,
            2,
            core_attention_bias_type="post_scale_bias",
            softmax_type="learnable",
            logits_soft_cap=3.0,
            dtype=dtype,
        ),
        _xs((5, 4, 16), (5, 2, 16), (5, 2, 16), (4, 5, 5)),
        lambda m, q, k, v, bias: _attention(q, k, v, bias, m.softmax_offset, cap=3.0),
        kinds=(te.Attention,),
    ),
    Case(
        "Attention_packed_rope",
        lambda _: te.Attention(4, 2, packed=True, rotary=te.RoPE(8)),
        _x(5, 8 * 16),
        lambda _, x: _packed(x),
        kinds=(te.Attention, te.RoPE),
    ),
]


def _packed(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.unflatten(-1, (-1, 16)) for t in x.split([64, 32, 32], -1))
    return _attention(_rope(q, 8), _rope(k, 8), v).flatten(-2)


_PIPELINES = [
    Case("MLP", _make_mlp, _x(WIDTH), _mlp, quantized=True, pipes=True, kinds=(te.Sequential,)),
    Case(
        "Residual",
        lambda d: te.Residual(
            te.RMSNorm(WIDTH, dtype=d), te.Linear(WIDTH, WIDTH, dtype=d), te.GELU()
        ),
        _x(WIDTH),
        lambda m, x: x + _gelu(_lin(_child(m, "1"), _rms(x, _child(m, "0").weight))),
        quantized=True,
        pipes=True,
        kinds=(te.Residual,),
    ),
    Case(
        "Branch",
        lambda d: te.Sequential(
            te.Branch(
                te.Linear(WIDTH, WIDTH, dtype=d), te.Sequential(te.SiLU(), te.Bias(WIDTH, dtype=d))
            ),
            te.Add(),
        ),
        _x(WIDTH),
        lambda m, x: _lin(_child(m, "0.0"), x) + F.silu(x) + _child(m, "0.1.1").bias,
        quantized=True,
        pipes=True,
        kinds=(te.Branch, te.Sequential),
    ),
    Case(
        "Recompute",
        lambda d: te.Sequential(
            te.Linear(WIDTH, WIDTH, dtype=d),
            te.Recompute(te.GELU(), te.Linear(WIDTH, WIDTH, dtype=d)),
            te.Bias(WIDTH, dtype=d),
        ),
        _x(WIDTH),
        lambda m, x: _lin(_child(m, "1.1"), _gelu(_lin(_child(m, "0"), x))) + _child(m, "2").bias,
        quantized=True,
        pipes=True,
        kinds=(te.Recompute, te.Sequential),
    ),
    Case(
        "Cuts",
        lambda d: te.Sequential(
            te.Linear(WIDTH, WIDTH, dtype=d), te.Cut(), te.SiLU(), te.Bias(WIDTH, dtype=d)
        ),
        _x(WIDTH),
        lambda m, x: F.silu(_lin(_child(m, "0"), x)) + _child(m, "3").bias,
        quantized=True,
        pipes=True,
        kinds=(te.Cut, te.Sequential),
    ),
    Case(
        "ForeignModule",
        lambda d: te.Sequential(
            te.Linear(WIDTH, WIDTH, dtype=d), nn.Tanh(), te.Linear(WIDTH, WIDTH, dtype=d)
        ),
        _x(WIDTH),
        lambda m, x: _lin(_child(m, "2"), torch.tanh(_lin(_child(m, "0"), x))),
        quantized=True,
        pipes=True,
        kinds=(te.Sequential,),
    ),
    Case(
        "Extras",
        lambda d: te.Sequential(
            te.AddExtraInput(),
            te.MakeExtraOutput(),
            te.Linear(WIDTH, WIDTH, bias=False, dtype=d),
            te.AddExtraInput(),
        ),
        _xs((WIDTH,), (WIDTH,), (WIDTH,)),
        lambda m, x, a, b: (_lin(_child(m, "2"), x + a) + b, x + a),
        quantized=True,
        kinds=(te.MakeExtraOutput, te.AddExtraInput, te.Sequential),
    ),
    Case(
        "Head",
        lambda d: te.Sequential(te.Linear(WIDTH, 17, dtype=d), te.CrossEntropy(reduction="none")),
        lambda rows, d: (*_x(WIDTH)(rows, d), torch.randint(0, 17, (rows,))),
        lambda m, x, t: F.cross_entropy(_lin(_child(m, "0"), x), t, reduction="none"),
        quantized=True,
        kinds=(te.CrossEntropy, te.Sequential),
    ),
    Case(
        "MakeExtraOutput",
        lambda _: te.Sequential(te.SiLU(), te.MakeExtraOutput(), te.SiLU()),
        _x(WIDTH),
        lambda _, x: (F.silu(F.silu(x)), F.silu(x)),
        kinds=(te.MakeExtraOutput,),
    ),
]

CASES: list[Case] = [*_UNARY, *_GATED, *_BASIC, *_PIPELINES]
BY_NAME = {case.name: case for case in CASES}
QUANTIZED = [case for case in CASES if case.quantized]

CORE = ("Linear_odd", "MLP", "Extras")  # stand for the quantized ones where every recipe is tried

every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
quantized_case = pytest.mark.parametrize("case", QUANTIZED, ids=lambda c: c.name)


def op_classes() -> dict[str, type]:
    """Every op class that te_ops exports, but a cache, which is no function of its inputs."""
    return {
        name: thing
        for name, thing in vars(te).items()
        if inspect.isclass(thing) and issubclass(thing, te.Op) and thing not in (te.Op, te.KVCache)
    }
