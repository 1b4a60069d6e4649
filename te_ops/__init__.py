"""te_ops: an operator-fusion op graph for Transformers on NVIDIA GPUs, exact on any CPU.

Compose small ops in a `Sequential`; te_ops plans forward and backward as one graph, quantizes by recipe, fuses where
a kernel takes it, and replays the plan. `model.explain(x)` says what happened and why.
"""

__version__ = "0.1.0"

import importlib

from te_ops import backends, basic, fused, graph, math, recipe, registry, runtime
from te_ops.backends import reference, register_cuda, register_hooks
from te_ops.basic.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from te_ops.basic.attention import Attention
from te_ops.basic.bias import Bias
from te_ops.basic.dropout import Dropout
from te_ops.basic.embedding import Embedding
from te_ops.basic.gemm import Linear
from te_ops.basic.kvcache import KVCache
from te_ops.basic.loss import CrossEntropy
from te_ops.basic.norm import L2Normalization, LayerNorm, RMSNorm
from te_ops.basic.pointwise import Col, Row
from te_ops.basic.pointwise import pointwise_op as pointwise
from te_ops.basic.quantize import Dequantize, Quantize
from te_ops.basic.rope import RoPE
from te_ops.basic.sequences import PackedSequences
from te_ops.basic.structure import (
    Add,
    AddExtraInput,
    ConstantScale,
    Identity,
    MakeExtraOutput,
    Reshape,
)
from te_ops.context import autocast
from te_ops.errors import Error, NoKernelError, PlanError, RecipeError, ShapeError
from te_ops.op import Op
from te_ops.op import Scalar as scalar
from te_ops.pointwise import Pair
from te_ops.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
    quantize,
)
from te_ops.recipe import Recipe, Role
from te_ops.runtime import (
    Graphed,
    checkpoint,
    free_workspaces,
    load_file,
    make_graphed,
    prepare,
    save_file,
    step,
    warmup,
    weights_frozen,
)
from te_ops.runtime.tune import tune
from te_ops.sequential import Branch, Cut, Recompute, Residual, Sequential


def __getattr__(name: str) -> object:
    if name in ("testing", "layers"):  # on first use: not every program needs them
        return importlib.import_module(f"te_ops.{name}")
    raise AttributeError(f"module 'te_ops' has no attribute {name!r}")


reference.register()
registry.REGISTRY.when("cuda", register_cuda)
register_hooks()
fused.register()
registry.load_plugins()

__all__ = [
    "Add",
    "AddExtraInput",
    "Attention",
    "Bias",
    "Branch",
    "ClampedSwiGLU",
    "Col",
    "ConstantScale",
    "CrossEntropy",
    "Cut",
    "Dequantize",
    "Dropout",
    "Embedding",
    "Error",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "GEGLU",
    "GELU",
    "GLU",
    "Graphed",
    "HybridQuantizer",
    "Identity",
    "IdentityQuantizer",
    "KVCache",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MXFP8Quantizer",
    "MakeExtraOutput",
    "NVFP4Quantizer",
    "NoKernelError",
    "Op",
    "PackedSequences",
    "Pair",
    "PlanError",
    "QGEGLU",
    "QGELU",
    "Quantize",
    "QuantizedTensor",
    "Quantizer",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Recipe",
    "RecipeError",
    "Recompute",
    "Reshape",
    "Residual",
    "RoPE",
    "Role",
    "Row",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "ShapeError",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "autocast",
    "checkpoint",
    "free_workspaces",
    "graph",
    "load_file",
    "make_graphed",
    "math",
    "pointwise",
    "prepare",
    "quantize",
    "recipe",
    "registry",
    "save_file",
    "scalar",
    "step",
    "tune",
    "warmup",
    "weights_frozen",
    "backends",
    "basic",
    "runtime",
]
