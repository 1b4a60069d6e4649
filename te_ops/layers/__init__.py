"""Layers with Transformer Engine's constructor keywords; each is a composition of ops, planned as one pipeline.

Inputs are positional: x first, then what the options ask for (`input_names` lists them).
"""

from te_ops.basic.gemm import Linear
from te_ops.layers.attention import DotProductAttention, MultiheadAttention
from te_ops.layers.checkpoints import from_transformer_engine, to_transformer_engine
from te_ops.layers.config import LlamaConfig, llama_model
from te_ops.layers.folders import load_llama
from te_ops.layers.linear import LayerNormLinear, LayerNormMLP
from te_ops.layers.llama import from_llama, to_llama
from te_ops.layers.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LlamaConfig",
    "MultiheadAttention",
    "TransformerLayer",
    "from_llama",
    "from_transformer_engine",
    "llama_model",
    "load_llama",
    "to_llama",
    "to_transformer_engine",
]
