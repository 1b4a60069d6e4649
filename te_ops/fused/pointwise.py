"""Rules around pointwise nodes: with the reduction of a broadcast gradient, and with quantize."""

from te_ops.registry import Rule

RULES = (
    Rule("pointwise_quantize", ("pointwise*", "pointwise", "quantize")),
    Rule("pointwise_reduce", ("pointwise", "reduce")),
    Rule("reduce_quantize", ("reduce", "quantize"), together=True),
)
