"""Number formats with their scaling rules, and the tensors they make.

A `Quantizer` is an immutable value; it turns a tensor into `Record` objects, one a usage, which
plans pass about, or into a `QuantizedTensor`, which behaves as a torch tensor. A quantizer of your
own is a frozen dataclass derived from `Quantizer`; see there.
"""

from __future__ import annotations

from te_ops.quantizers.base import Layout, Quantizer
from te_ops.quantizers.block import Float8BlockQuantizer
from te_ops.quantizers.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from te_ops.quantizers.hybrid import HybridQuantizer, IdentityQuantizer
from te_ops.quantizers.kinds import quantizer_from_dict, quantizer_to_dict
from te_ops.quantizers.mxfp8 import MXFP8Quantizer
from te_ops.quantizers.nvfp4 import NVFP4Quantizer
from te_ops.quantizers.philox import philox_u32, philox_u32_at, philox_uniform
from te_ops.quantizers.record import Record, Usage
from te_ops.quantizers.state import (
    delayed_update,
    join_nonfinite,
    observe_amax,
    resize_history,
    scale_from_amax,
    scale_from_history,
    split_nonfinite,
)
from te_ops.quantizers.tensor import QuantizedTensor, quantize

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "Layout",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "QuantizedTensor",
    "Quantizer",
    "Record",
    "Usage",
    "delayed_update",
    "join_nonfinite",
    "observe_amax",
    "philox_u32",
    "philox_u32_at",
    "philox_uniform",
    "quantize",
    "quantizer_from_dict",
    "quantizer_to_dict",
    "resize_history",
    "scale_from_amax",
    "scale_from_history",
    "split_nonfinite",
]
