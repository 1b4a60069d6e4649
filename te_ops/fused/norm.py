"""Rules around a norm: residual add before it, quantize after it; backward with the residual gradient and the gradients
of its weights."""

from te_ops.registry import Rule

_NORM = "rmsnorm|layernorm"
_BACKWARD = "rmsnorm_backward|layernorm_backward"
_WEIGHTS = (_BACKWARD, "rmsnorm_dgamma|layernorm_dgamma?", "reduce?")

RULES = (
    Rule("add_norm_quantize", ("sum|pointwise", _NORM, "quantize?")),
    Rule("norm_quantize", (_NORM, "quantize")),
    # Current scaling reads its values again, as they were written: rounded.
    Rule("norm_quantize_rounded", (_NORM, "quantize"), exact=True),
    # The gradients of gamma and beta read what the gradient of the input reads.
    Rule(
        "norm_backward_together",
        _WEIGHTS,
        together=True,
        follow=("sum",),
        commutes=("sum",),
    ),
    # The same where the sum needs the gradient of the input by another way too.
    Rule("norm_backward_weights", _WEIGHTS, together=True),
    Rule("norm_backward_sum", (_BACKWARD, "sum", "quantize?"), commutes=("sum",)),
)
