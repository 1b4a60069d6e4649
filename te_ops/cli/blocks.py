"""Standard blocks of te_ops ops and layers: what `te-ops explain` shows and `te-ops train` trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import te_ops as te
from te_ops import layers
from te_ops.errors import Error


@dataclass(frozen=True)
class ModelSizes:
    """Extents of a language model and its inputs: tokens are [batch, context].

    Raises:
        Error: a size is not positive, or the heads do not divide `dim` into even parts.
    """

    layers: int = 2
    dim: int = 96
    heads: int = 4
    ffn: int = 256
    context: int = 128
    batch: int = 8
    vocab: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise Error(f"{name} must be at least 1, got {value}")
        if self.dim % (2 * self.heads):
            raise Error(
                f"dim {self.dim} must be a multiple of 2 x heads ({2 * self.heads}): rotary "
                "embedding turns pairs of a head's features"
            )


def attention(s: ModelSizes) -> te.Residual:
    """x + proj(attention(qkv(norm(x)))) of x [batch, context, dim]."""
    return te.Residual(
        {
            "norm": te.RMSNorm(s.dim),
            "qkv": te.Linear(s.dim, 3 * s.dim, bias=False),
            "attention": te.Attention(s.heads, packed=True, rotary=te.RoPE(s.dim // s.heads)),
            "proj": te.Linear(s.dim, s.dim, bias=False),
        }
    )


def swiglu_mlp(s: ModelSizes) -> te.Residual:
    """x + fc2(swiglu(fc1(norm(x))))."""
    return te.Residual(
        {
            "norm": te.RMSNorm(s.dim),
            "fc1": te.Linear(s.dim, 2 * s.ffn, bias=False),
            "act": te.SwiGLU(),
            "fc2": te.Linear(s.ffn, s.dim, bias=False),
        }
    )


def gelu_mlp(s: ModelSizes) -> te.Residual:
    """x + fc2(gelu(fc1(norm(x)))) with biases and a LayerNorm."""
    return te.Residual(
        {
            "norm": te.LayerNorm(s.dim),
            "fc1": te.Linear(s.dim, s.ffn),
            "act": te.GELU(),
            "fc2": te.Linear(s.ffn, s.dim),
        }
    )


def _config(s: ModelSizes, *, tied: bool = True) -> layers.LlamaConfig:
    return layers.LlamaConfig(s.vocab, s.dim, s.ffn, s.layers, s.heads, tied=tied)


def layer(s: ModelSizes) -> layers.TransformerLayer:
    """Attention and SwiGLU MLP, each behind an RMSNorm and with its residual."""
    return _config(s).layer()


def language_model(s: ModelSizes, *, tied: bool = True) -> te.Sequential:
    """(tokens, targets) [batch, context] -> mean cross entropy.

    `tied`: the head at path "head" has the embedding's weight.
    """
    model = layers.llama_model(_config(s, tied=tied))
    model.add_module("loss", te.CrossEntropy())
    return model


def _linear(s: ModelSizes) -> te.Sequential:
    return te.Sequential(te.Linear(s.dim, s.ffn))


def _norm_linear(s: ModelSizes) -> te.Sequential:
    return te.Sequential(te.RMSNorm(s.dim), te.Linear(s.dim, s.ffn, bias=False))


BLOCKS: dict[str, Callable[[ModelSizes], te.Op]] = {
    "linear": _linear,
    "norm_linear": _norm_linear,
    "swiglu_mlp": swiglu_mlp,
    "gelu_mlp": gelu_mlp,
    "attention": attention,
    "lm_layer": layer,
    "lm": language_model,
}


def build(name: str, s: ModelSizes, device: torch.device) -> tuple[te.Op, tuple[Any, ...]]:
    """A block on a device, and inputs for it: tokens and targets for "lm", else activations."""
    model = BLOCKS[name](s).to(device)
    if name == "lm":
        tokens = torch.zeros(2, s.batch, s.context, dtype=torch.int64, device=device)
        return model, (tokens[0], tokens[1])
    return model, (torch.zeros(s.batch, s.context, s.dim, device=device, requires_grad=True),)


__all__ = ["BLOCKS", "ModelSizes", "build", "language_model"]
