"""GEMMs by cuBLAS and cuBLASLt through torch: dense, FP8 with one scale a tensor or one a block.

Importing it touches no CUDA; `register()` adds the kernels, which say what they refuse and why.
"""

from __future__ import annotations

from te_ops.backends.cublas.kernels import KERNELS, register

__all__ = ["KERNELS", "register"]
