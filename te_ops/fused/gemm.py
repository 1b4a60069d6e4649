"""Rules around a GEMM: its epilogue, and GEMMs that share an operand."""

from te_ops.registry import Rule

RULES = (
    Rule(
        "gemm_epilogue", ("gemm", "pointwise*", "sum?", "quantize?"), commutes=("sum", "pointwise")
    ),
    Rule("gemm_epilogue_reduce", ("gemm", "pointwise*", "reduce")),
    Rule("gemm_accumulate", ("gemm", "accumulate")),
    Rule("gemm_sum", ("gemm", "sum"), commutes=("sum",)),
    Rule("gemm_together", ("gemm", "gemm"), together=True),
    Rule("wgrad_dbias", ("gemm", "reduce"), together=True),
)
