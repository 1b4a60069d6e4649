"""Rules around a GEMM: its epilogue, and GEMMs that share an operand."""

from te_ops.registry import Rule

_CHAIN = ("gemm", "pointwise*", "sum?")
_COMMUTES = ("sum", "pointwise")
_BESIDE = ("quantize", "reduce")

RULES = (
    Rule("gemm_epilogue", (*_CHAIN, "quantize?"), commutes=_COMMUTES),
    # FP8 copies and the gradient of a bias are made of one value, beside each other.
    # So is a copy of the activation, which backward rebuilds of what its gradient reads anyway.
    Rule(
        "gemm_epilogue_together",
        _CHAIN,
        follow=_BESIDE,
        beside=("pointwise",),
        commutes=_COMMUTES,
    ),
    # Current scaling reads its values again, as they were written: rounded.
    Rule("gemm_epilogue_rounded", _CHAIN, follow=_BESIDE, commutes=_COMMUTES, exact=True),
    Rule("gemm_accumulate", ("gemm", "accumulate")),
    Rule("gemm_sum", ("gemm", "sum"), commutes=("sum",)),
    Rule("gemm_together", ("gemm", "gemm"), together=True),
    Rule("wgrad_dbias", ("gemm", "reduce"), together=True),
)
