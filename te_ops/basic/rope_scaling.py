"""Frequencies of rotary embeddings, and how they are stretched to longer contexts.

The rules are those that Hugging Face checkpoints name in `rope_scaling` (keys as there): "linear"
(Chen et al., "Extending Context Window of LLMs via Positional Interpolation"), "dynamic" (NTK-aware
base, from the length of the call), "yarn" (Peng et al., "YaRN", section 3) and "llama3" (Llama 3.1's
scaling of low frequencies).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.basic.arguments import number, positive_int
from te_ops.errors import PlanError

_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # needed, optional
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
}
_NAMES = ("rope_type", "type")  # older checkpoints say "type"
_IGNORED = ("rope_theta",)  # newer ones put the base beside the rest


@dataclass(frozen=True)
class Scaling:
    """One rule with its numbers, as a value."""

    kind: str
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    truncate: bool = True

    @property
    def needs_length(self) -> bool:
        """Whether the frequencies depend on how many positions a call has."""
        return self.kind == "dynamic"


def scaling_of(given: Mapping[str, Any] | None, base: float) -> Scaling | None:
    """The rule that a checkpoint's `rope_scaling` describes; None for none.

    Raises:
        PlanError: an unknown rule, a missing or unknown key, or a value out of range.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise PlanError(f"RoPE: rope_scaling must be a dictionary or None, got {given!r}")
    items = dict(given)
    kind = next((items[name] for name in _NAMES if name in items), None)
    if kind not in _KEYS:
        raise PlanError(f"RoPE: rope_type must be one of {', '.join(_KEYS)}, got {kind!r}")
    for name in (*_NAMES, *_IGNORED):
        items.pop(name, None)
    needed, optional = _KEYS[kind]
    missing = [name for name in needed if name not in items]
    unknown = [name for name in items if name not in (*needed, *optional)]
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise PlanError(f"RoPE: rope_scaling of type {kind!r} {problem}")
    if kind in ("dynamic", "yarn") and base <= 1.0:
        raise PlanError(f"RoPE: rope_scaling of type {kind!r} needs a base above 1, got {base}")
    return None if kind == "default" else _made(kind, items)


def _made(kind: str, items: dict[str, Any]) -> Scaling:
    factor = number("RoPE", "factor", items["factor"], low=1.0)
    original = items.get("original_max_position_embeddings", 0)
    if "original_max_position_embeddings" in items:
        positive_int("RoPE", "original_max_position_embeddings", original)
    low, high = (
        number("RoPE", name, items.get(name, 1.0), low=1e-6)
        for name in ("low_freq_factor", "high_freq_factor")
    )
    if kind == "llama3" and not low < high:
        raise PlanError(f"RoPE: low_freq_factor {low} must be below high_freq_factor {high}")
    fast, slow = (
        number("RoPE", name, items.get(name) or default, low=1e-6)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    truncate = items.get("truncate", True)
    if not isinstance(truncate, bool):
        raise PlanError(f"RoPE: truncate must be True or False, got {truncate!r}")
    amplitude = _amplitude(factor, items) if kind == "yarn" else 1.0
    return Scaling(kind, factor, original, low, high, fast, slow, amplitude, truncate)


def _amplitude(factor: float, items: dict[str, Any]) -> float:
    """What YaRN multiplies cos and sin by."""
    given = items.get("attention_factor")
    if given is not None:
        return number("RoPE", "attention_factor", given, low=0.0)

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, all_dim = (items.get(name) for name in ("mscale", "mscale_all_dim"))
    if mscale and all_dim:
        return of(number("RoPE", "mscale", mscale)) / of(number("RoPE", "mscale_all_dim", all_dim))
    return of(1.0)


def frequencies(
    dim: int, base: float, scaling: Scaling | None, length: Any, like: torch.Tensor
) -> torch.Tensor:
    """inv_freq [dim / 2] in dtype and device of `like`; `length` is the number of positions."""
    kind = "default" if scaling is None else scaling.kind
    return _RULES[kind](dim, base, scaling, length, like)


def _plain(dim: int, base: Any, _: Any, __: Any, like: torch.Tensor) -> torch.Tensor:
    powers = torch.arange(0, dim, 2, dtype=like.dtype, device=like.device) / dim
    made: torch.Tensor = 1.0 / base**powers
    return made


def _linear(dim: int, base: float, s: Scaling, _: Any, like: torch.Tensor) -> torch.Tensor:
    return _plain(dim, base, None, None, like) / s.factor


def _dynamic(dim: int, base: float, s: Scaling, length: Any, like: torch.Tensor) -> torch.Tensor:
    if dim == 2:
        return _plain(dim, base, None, None, like)  # one frequency, which is 1
    longest = torch.as_tensor(length, dtype=like.dtype, device=like.device).clamp(min=s.original)
    stretch = s.factor * longest / s.original - (s.factor - 1.0)
    return _plain(dim, base * stretch ** (dim / (dim - 2)), None, None, like)


def _yarn(dim: int, base: float, s: Scaling, _: Any, like: torch.Tensor) -> torch.Tensor:
    def pair_of(turns: float) -> float:
        """The pair that turns so many times within the original length."""
        return dim * math.log(s.original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(s.beta_fast), pair_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    pairs = torch.arange(dim // 2, dtype=like.dtype, device=like.device)
    slow = ((pairs - low) / width).clamp(0, 1)  # 1: interpolated, 0: as it was
    inverse = _plain(dim, base, None, None, like)
    return inverse / s.factor * slow + inverse * (1 - slow)


def _llama3(dim: int, base: float, s: Scaling, _: Any, like: torch.Tensor) -> torch.Tensor:
    inverse = _plain(dim, base, None, None, like)
    turns = s.original * inverse / (2 * math.pi)  # within the original length
    smooth = ((turns - s.low) / (s.high - s.low)).clamp(0, 1)
    return (1 - smooth) * inverse / s.factor + smooth * inverse


_RULES: dict[str, Callable[..., torch.Tensor]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}

__all__ = ["Scaling", "frequencies", "scaling_of"]
