"""A whole Transformer layer as one step of a case: its weights, its FP64 reference, and how each library builds it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_ops as te
from te_ops import layers

from .data import Layer

EPS = 1e-5
BASE = 10000.0
"""Of the rotary embedding's frequencies."""


def shapes(layer: Layer) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Shape, scale and mean of every weight: norm, [Q|K|V], projection, norm, [gate|up], down."""
    hidden, kv = layer.width, layer.width // layer.heads * layer.groups
    found: tuple[tuple[int, ...], ...] = (
        (hidden,), (hidden + 2 * kv, hidden), (hidden, hidden),
        (hidden,), (2 * layer.ffn, hidden), (hidden, layer.ffn),
    )  # fmt: skip
    for shape in found:
        gain = len(shape) == 1
        yield shape, 0.1 if gain else shape[1] ** -0.5, float(gain)


# -- plain torch


def table(length: int, size: int, like: Tensor) -> Tensor:
    """cos and sin [2, length, size / 2] of the rotary embedding, in FP64 or FP32."""
    wide = torch.promote_types(like.dtype, torch.float32)
    powers = torch.arange(0, size, 2, dtype=wide, device=like.device) / size
    angle = torch.arange(length, dtype=wide, device=like.device)[:, None] / BASE**powers
    return torch.stack((angle.cos(), angle.sin()))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [b, h, s, d] rotated: pairs (i, i + d / 2)."""
    cos, sin = angles.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def heads_of(qkv: Tensor, layer: Layer) -> list[Tensor]:
    """q, k and v [b, heads, s, d] of a packed projection [b, s, ..]."""
    size = layer.width // layer.heads
    counts = (layer.heads, layer.groups, layer.groups)
    parts = torch.split(qkv, [n * size for n in counts], -1)
    return [
        p.view(*p.shape[:-1], n, size).transpose(1, 2) for p, n in zip(parts, counts, strict=True)
    ]


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def forward(layer: Layer, x: Tensor, weights: Sequence[Tensor], attend: Attend) -> Tensor:
    """x [b, s, hidden] through the layer."""
    gain1, qkv, proj, gain2, up, down = weights
    q, k, v = heads_of(F.linear(F.rms_norm(x, x.shape[-1:], gain1, EPS), qkv), layer)
    angles = table(x.shape[1], q.shape[-1], x)
    o = attend(turned(q, angles), turned(k, angles), v)
    x = x + F.linear(o.transpose(1, 2).flatten(2), proj)
    gate, linear = F.linear(F.rms_norm(x, x.shape[-1:], gain2, EPS), up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * linear, down)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax as it is defined, a group of heads at a time, none kept for backward: memory of one."""
    ratio = q.shape[1] // k.shape[1]
    found = [
        checkpoint(_one_group, q[:, i * ratio : (i + 1) * ratio], k[:, i : i + 1], v[:, i : i + 1],
                   use_reentrant=False)
        for i in range(k.shape[1])
    ]  # fmt: skip
    return torch.cat(found, 1)


def _one_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    made: Tensor = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
    return made


def reference(layer: Layer, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The output, in the dtype of x."""
    return forward(layer, x, weights, exact)


class TorchLayer(nn.Module):
    """The layer in plain torch."""

    NAMES = ("gain1", "qkv.weight", "proj.weight", "gain2", "up.weight", "down.weight")

    def __init__(self, layer: Layer, **places: Any) -> None:
        super().__init__()
        self.layer = layer
        (hidden,), (packed, _), *_, (wide, _), (_, ffn) = (shape for shape, _, _ in shapes(layer))
        self.gain1 = nn.Parameter(torch.empty(hidden, **places))
        self.qkv = nn.Linear(hidden, packed, bias=False, **places)
        self.proj = nn.Linear(hidden, hidden, bias=False, **places)
        self.gain2 = nn.Parameter(torch.empty(hidden, **places))
        self.up = nn.Linear(hidden, wide, bias=False, **places)
        self.down = nn.Linear(ffn, hidden, bias=False, **places)

    def forward(self, x: Tensor) -> Tensor:
        """See `forward`; Linears are called as modules, so that a library may replace them."""
        q, k, v = heads_of(self.qkv(F.rms_norm(x, x.shape[-1:], self.gain1, EPS)), self.layer)
        angles = table(x.shape[1], q.shape[-1], x)
        o = fused(turned(q, angles), turned(k, angles), v)
        x = x + self.proj(o.transpose(1, 2).flatten(2))
        gate, linear = self.up(F.rms_norm(x, x.shape[-1:], self.gain2, EPS)).chunk(2, -1)
        made: Tensor = x + self.down(F.silu(gate) * linear)
        return made


# -- te_ops, Transformer Engine

OURS = (
    "self_attention.norm.weight", "self_attention.qkv.weight", "self_attention.proj.weight",
    "mlp.norm.weight", "mlp.fc1.weight", "mlp.fc2.weight",
)  # fmt: skip
THEIRS = (
    "layer.self_attention.layernorm_qkv.layer_norm_weight", "layer.self_attention.layernorm_qkv.weight",
    "layer.self_attention.proj.weight", "layer.layernorm_mlp.layer_norm_weight",
    "layer.layernorm_mlp.fc1_weight", "layer.layernorm_mlp.fc2_weight",
)  # fmt: skip

_SAME: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "layernorm_epsilon": EPS,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "bias": False,
    "attn_input_format": "bshd",
    "self_attn_mask_type": "causal",
}
"""Keywords of both."""


def ours(layer: Layer, places: dict[str, Any]) -> nn.Module:
    """te_ops' TransformerLayer."""
    return layers.TransformerLayer(
        layer.width, layer.ffn, layer.heads, num_gqa_groups=layer.groups,
        rotary=te.RoPE(layer.width // layer.heads, BASE), params_dtype=places["dtype"],
        device=places["device"], **_SAME,
    )  # fmt: skip


class _Turning(nn.Module):
    """Transformer Engine's layer with the rotary embedding that it is called with."""

    def __init__(self, layer: nn.Module, angles: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The output."""
        made: Tensor = self.layer(x, rotary_pos_emb=self.angles)
        return made


def transformer_engine(layer: Layer, length: int, device: torch.device) -> nn.Module:
    """Transformer Engine's TransformerLayer. The rows of its fused weight are [Q|K|V], from which it takes heads as
    views; interleaved as is its default it copies them where they share keys.

    Its unfused attention, which it would take without a word where it finds no fused one, is no peer: without it the
    call fails. It chooses at every forward, in every recipe and in graphs, so this holds for the process.
    """
    os.environ["NVTE_UNFUSED_ATTN"] = "0"
    library = importlib.import_module("transformer_engine.pytorch")
    rotary = getattr(library, "RotaryPositionEmbedding", None)
    if rotary is None:
        rotary = importlib.import_module(
            "transformer_engine.pytorch.attention.rope"
        ).RotaryPositionEmbedding
    made = library.TransformerLayer(
        layer.width, layer.ffn, layer.heads, num_gqa_groups=layer.groups, fuse_qkv_params=True,
        qkv_weight_interleaved=False, params_dtype=torch.bfloat16, device=device, **_SAME,
    )  # fmt: skip
    angles = rotary(layer.width // layer.heads, rotary_base=BASE)(length).to(device)
    return _Turning(made, angles)


def parameters(module: nn.Module) -> list[Tensor]:
    """The weights of a layer, of whichever library, in the order of `shapes`; of another module, none."""
    names: tuple[str, ...] = ()
    if isinstance(module, layers.TransformerLayer):
        names = OURS
    elif isinstance(module, TorchLayer):
        names = TorchLayer.NAMES
    elif isinstance(module, _Turning):
        names = THEIRS
    return [module.get_parameter(name) for name in names]


__all__ = [
    "TorchLayer",
    "ours",
    "parameters",
    "reference",
    "shapes",
    "transformer_engine",
]
