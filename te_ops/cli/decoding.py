"""Token by token: a language model with a KV cache in every attention, and the choice of the next token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import te_ops as te
from te_ops.cli.models import LanguageModel
from te_ops.errors import Error


class Decoder:
    """Logits of tokens that follow those of earlier calls. Made by `decoding`, which places the caches."""

    def __init__(self, made: LanguageModel, caches: list[te.KVCache], device: torch.device) -> None:
        self._body: te.Sequential = made.model[:-1]  # all but the loss
        self._body.eval()
        self._arm = made.arm
        self._caches = caches
        self._device = device

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """FP32 logits [batch, s, vocab] of tokens [batch, s], which join the caches.

        Raises:
            ShapeError: they do not fit into the caches.
        """
        with self._arm.active(self._device):
            logits: torch.Tensor = self._body(tokens.to(self._device))
        return logits.float()

    def reset(self) -> None:
        """Forget all tokens."""
        for cache in self._caches:
            cache.reset()


@contextlib.contextmanager
def decoding(
    made: LanguageModel, capacity: int, device: torch.device, *, batch: int = 1
) -> Iterator[Decoder]:
    """Within, every attention of the model has a cache of `capacity` tokens, the model is in eval mode, and its weights
    are quantized once for all calls.
    """
    model, training = made.model, made.model.training
    attentions = [op for op in model.modules() if isinstance(op, te.Attention)]
    dtype = made.arm.dtype or model["embedding"].weight.dtype
    caches = []
    for op in attentions:
        sizes: Any = (op.num_gqa_groups, *op.kv_channels)
        op.cache = te.KVCache(batch, capacity, *sizes, device=device, dtype=dtype)
        caches.append(op.cache)
    model.eval()
    try:
        with te.weights_frozen():
            yield Decoder(made, caches, device)
    finally:
        for op in attentions:
            op.cache = None
        model.train(training)


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen: temperature 0 takes the likeliest; else one is drawn from softmax(logits /
    temperature), of the `top_k` likeliest if that is not 0.

    Raises:
        Error: one of them is negative.
    """

    temperature: float = 0.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.top_k < 0:
            raise Error(
                "--temperature and --top-k must be at least 0, got "
                f"{self.temperature:g} and {self.top_k}"
            )

    def __call__(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """int64 [batch, 1] from logits [batch, vocab]; drawn on the CPU, so that a seed means the same everywhere."""
        logits = logits.float().cpu()
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1]), -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        chances = (logits / self.temperature).softmax(-1)
        return torch.multinomial(chances, 1, generator=generator)


__all__ = ["Choice", "Decoder", "decoding"]
