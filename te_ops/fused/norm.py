"""Rules around a norm: residual add before it, quantize after it, backward with the residual gradient."""

from te_ops.registry import Rule

_NORM = "rmsnorm|layernorm"

RULES = (
    Rule("add_norm_quantize", ("sum|pointwise", _NORM, "quantize?")),
    Rule("norm_quantize", (_NORM, "quantize")),
    Rule(
        "norm_backward_sum",
        ("rmsnorm_backward|layernorm_backward", "sum", "quantize?"),
        commutes=("sum",),
    ),
)
