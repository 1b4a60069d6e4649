"""GEMMs by cuBLAS and cuBLASLt: dense, FP8 with one scale a tensor or one a block.

Through torch, and where `nvmath.bindings` is installed through cuBLASLt itself: that adds to a result (FP32
`main_grad`), offers every algorithm (`te.tune`) and costs half the host time.

Importing it touches no CUDA and no vendor library; `register()` adds the kernels, which say what they refuse and why.
"""

from __future__ import annotations

from te_ops.backends.cublas.kernels import DIRECT, KERNELS, register
from te_ops.backends.cublas.lt import release

__all__ = ["DIRECT", "KERNELS", "register", "release"]
