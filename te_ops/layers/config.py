"""Llama-like language models: what a checkpoint's config says, and the pipeline of layers that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_ops.basic.embedding import Embedding
from te_ops.basic.gemm import Linear
from te_ops.basic.norm import RMSNorm
from te_ops.basic.rope import RoPE
from te_ops.errors import PlanError
from te_ops.layers.parts import INIT_STD
from te_ops.layers.transformer import TransformerLayer
from te_ops.sequential import Sequential

# What the class of a model there takes for keys that its config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
}
_META_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and options of a decoder-only model with RMSNorm, RoPE and SwiGLU.

    Args:
        vocab_size, hidden_size, ffn_hidden_size: features of logits, of the residual stream, inside the MLP.
        num_layers: layers. num_attention_heads: heads of q. num_gqa_groups: of k and v; as many if None.
        kv_channels: features of a head; hidden_size / num_attention_heads if None.
        layernorm_epsilon: of all norms.
        rope_base, rope_scaling: of `te.RoPE`.
        tied: the head has the embedding's weight.
        bias: of all Linears but the head. qk_norm: RMSNorms on the heads of q and k, before RoPE.
        window: keys that a query sees, itself included; None for all.
    """

    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    kv_channels: int | None = None
    layernorm_epsilon: float = 1e-5
    rope_base: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tied: bool = False
    bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Of the `config.json` of a Llama, Mistral or Qwen 3 checkpoint.

        Raises:
            PlanError: another model, or an option that these layers do not have.
        """
        kind = config.get("model_type", "llama")
        if kind not in _DEFAULTS:
            raise PlanError(
                f"config: model_type must be one of {', '.join(_DEFAULTS)}, got {kind!r}"
            )
        config = {**_DEFAULTS[kind], **config}
        if config.get("hidden_act", "silu") != "silu":
            raise PlanError(f"config: hidden_act must be 'silu', got {config['hidden_act']!r}")
        biases = {bool(config.get(name, False)) for name in ("attention_bias", "mlp_bias")}
        if len(biases) > 1:
            raise PlanError(
                "config: attention_bias and mlp_bias differ; a layer has biases or none"
            )
        base, scaling = _rope(config)
        return cls(
            **_needed(
                config,
                vocab_size="vocab_size",
                hidden_size="hidden_size",
                ffn_hidden_size="intermediate_size",
                num_layers="num_hidden_layers",
                num_attention_heads="num_attention_heads",
            ),
            num_gqa_groups=config.get("num_key_value_heads"),
            kv_channels=config.get("head_dim"),
            layernorm_epsilon=config.get("rms_norm_eps", 1e-6),
            rope_base=base,
            rope_scaling=scaling,
            tied=bool(config.get("tie_word_embeddings", False)),
            bias=biases.pop(),
            qk_norm=kind == "qwen3",
            window=_window(config),
        )

    @classmethod
    def from_meta(cls, params: Mapping[str, Any], *, vocab_size: int, tied: bool) -> LlamaConfig:
        """Of a `params.json` in Meta's names, which does not tell the rows of the embedding, or whether it is the head.

        Raises:
            PlanError: a key is missing.
        """
        needed = _needed(
            params, hidden_size="dim", num_layers="n_layers", num_attention_heads="n_heads"
        )
        scaling: dict[str, Any] | None = None
        if params.get("use_scaled_rope"):
            scaling = {**_META_SCALING, "factor": params.get("rope_scaling_factor") or 8.0}
            scaling["high_freq_factor"] = params.get("rope_high_freq_factor") or 4.0
        return cls(
            **needed,
            vocab_size=vocab_size,
            ffn_hidden_size=params.get("hidden_dim") or _meta_ffn(params),
            num_gqa_groups=params.get("n_kv_heads"),
            kv_channels=params.get("head_dim"),
            layernorm_epsilon=params.get("norm_eps", 1e-5),
            rope_base=float(params.get("rope_theta") or 10000.0),
            rope_scaling=scaling,
            tied=tied,
        )

    @property
    def head_size(self) -> int:
        """Features of a head.

        Raises:
            PlanError: the heads do not divide the residual stream, and nothing else says.
        """
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise PlanError(
                f"LlamaConfig: hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; give kv_channels"
            )
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def layer(self, **options: Any) -> TransformerLayer:
        """One decoder layer; `options` are further keywords of `TransformerLayer`."""
        form = options.get("attn_input_format", "bshd")
        rotary = RoPE(
            self.head_size, self.rope_base, qkv_format=form, rope_scaling=self.rope_scaling
        )
        made: dict[str, Any] = {
            "num_gqa_groups": self.num_gqa_groups,
            "kv_channels": self.head_size,
            "layernorm_epsilon": self.layernorm_epsilon,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "bias": self.bias,
            "attn_input_format": form,
            "rotary": rotary,
        }
        if self.qk_norm:
            made |= {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True}
            made |= {"qk_norm_eps": self.layernorm_epsilon}
        if self.window is not None:
            made["window_size"] = (self.window - 1, 0)
        sizes = (self.hidden_size, self.ffn_hidden_size, self.num_attention_heads)
        return TransformerLayer(*sizes, **{**made, **options})


def llama_model(
    config: LlamaConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Sequential:
    """tokens -> logits, as one pipeline: "embedding", "layers" (a Sequential of `TransformerLayer`), "norm", "head".

    Args:
        config: what is built.
        dtype: of the parameters; the default dtype if None. device: likewise.
        options: further keywords of every `TransformerLayer`; tokens are [b, s] unless attn_input_format says
            "sbhd" ([s, b]) or "thd" ([tokens], and for each layer a `te.PackedSequences`).
    """
    places: dict[str, Any] = {"device": device, "dtype": dtype}
    embedding = Embedding(config.vocab_size, config.hidden_size, **places)
    head = Linear(config.hidden_size, config.vocab_size, bias=False, init_std=INIT_STD, **places)
    if config.tied:
        head.weight = embedding.weight
    made = (
        config.layer(params_dtype=dtype, device=device, **options) for _ in range(config.num_layers)
    )
    return Sequential(
        {
            "embedding": embedding,
            "layers": Sequential(*made),
            "norm": RMSNorm(config.hidden_size, config.layernorm_epsilon, **places),
            "head": head,
        }
    )


def _needed(config: Mapping[str, Any], **names: str) -> dict[str, Any]:
    missing = [theirs for theirs in names.values() if theirs not in config]
    if missing:
        raise PlanError(f"config: it has no {', '.join(missing)}")
    return {ours: config[theirs] for ours, theirs in names.items()}


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling.

    Raises:
        PlanError: only some features of a head are turned.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    part = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise PlanError(f"config: partial_rotary_factor must be 1, got {part!r}")
    stretched = rope.get("rope_type", rope.get("type")) in ("dynamic", "yarn")
    longest = config.get("max_position_embeddings")
    if stretched and longest is not None:  # where these rules speak of no other length
        rope.setdefault("original_max_position_embeddings", longest)
    return float(base), rope or None


def _window(config: Mapping[str, Any]) -> int | None:
    """Of all layers alike.

    Raises:
        PlanError: some layers have one and others not.
    """
    window: int | None = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return None
    kinds = set(config.get("layer_types") or ())
    if not kinds and "max_window_layers" in config:
        whole, count = config["max_window_layers"], config["num_hidden_layers"]
        kinds = {"full_attention"} if whole > 0 else set()
        kinds |= {"sliding_attention"} if whole < count else set()
    if len(kinds) > 1:
        raise PlanError(
            "config: layers with and without sliding windows in one model are not supported"
        )
    return None if "full_attention" in kinds else window


def _meta_ffn(params: Mapping[str, Any]) -> int:
    """Meta's rule: two thirds of 4 dim, times a factor, rounded up."""
    inner = 2 * 4 * int(params["dim"]) // 3
    if params.get("ffn_dim_multiplier") is not None:
        inner = int(params["ffn_dim_multiplier"] * inner)
    multiple = int(params.get("multiple_of", 256))
    return -(-inner // multiple) * multiple


__all__ = ["LlamaConfig", "llama_model"]
