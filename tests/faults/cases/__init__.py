"""The generator behind tests/faults: every op, recipe, quantizer, dtype, gradient mask and hard value.

A `Case` is an op with its inputs and an oracle in plain torch, written without te_ops. A fault that
applies to one op is tested over all cases it can apply to; `test_cases.py` asserts what is covered.
"""

from tests.faults.cases.modes import (
    DELAYED,
    MODES,
    QUANTIZERS,
    RECIPES,
    SOME,
    STOCHASTIC,
    every_mode,
    every_quantizer,
    every_recipe,
    every_usage,
    make_quantized,
    quantizer_classes,
    recipe_classes,
    some_modes,
    step,
    within,
)
from tests.faults.cases.ops import (
    BY_NAME,
    CASES,
    CORE,
    DTYPES,
    QUANTIZED,
    ROWS,
    WIDTH,
    Case,
    every_case,
    op_classes,
    quantized_case,
    softcap,
    wide_twin,
)
from tests.faults.cases.results import (
    Result,
    backward,
    compare,
    grad_masks,
    loss_weights,
    outputs_of,
    relative_error,
    run,
    same,
    tolerance_of,
)
from tests.faults.cases.values import VALUES, Values, every_value

__all__ = [
    "BY_NAME", "CASES", "CORE", "DELAYED", "DTYPES", "MODES", "QUANTIZED", "QUANTIZERS", "RECIPES", "ROWS", "SOME",
    "STOCHASTIC", "VALUES", "WIDTH", "Case", "Result", "Values", "backward", "compare", "every_case", "every_mode",
    "every_quantizer", "every_recipe", "every_usage", "every_value", "grad_masks", "loss_weights", "make_quantized",
    "op_classes", "outputs_of", "quantized_case", "quantizer_classes", "recipe_classes", "relative_error", "run",
    "same", "softcap", "some_modes", "step", "tolerance_of", "wide_twin", "within",
]  # fmt: skip
