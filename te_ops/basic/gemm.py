"""GEMM and Linear: y = x W^T (+ b), its dgrad and wgrad, with the operand roles that recipes quantize."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from te_ops.basic.arguments import empty, flag, number, positive_int
from te_ops.basic.bias import emit_bias
from te_ops.basic.pointwise import cast, pointwise
from te_ops.basic.unsupported import refuse_others
from te_ops.errors import PlanError
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require, same
from te_ops.op import Op
from te_ops.pointwise import activations

# (layout, backward?) -> role and usage of each operand; a usage is read along the contracted dimension.
_ROLES = {
    ("nt", False): (("input", "row"), ("weight", "row")),
    ("nn", True): (("grad_output", "row"), ("weight", "col")),
    ("tn", True): (("grad_output", "col"), ("input", "col")),
}


def _roles(node: Node) -> tuple[tuple[str, str] | None, ...]:
    return _ROLES.get((node.attrs["layout"], node.phase.is_backward), (None, None))


def _gemm_infer(a: Spec, b: Spec, layout: str, dtype: torch.dtype, **_: Any) -> Spec:
    if layout == "tn":
        require(
            a.shape[:-1] == b.shape[:-1],
            f"gemm tn: leading shapes {a.shape[:-1]} and {b.shape[:-1]} differ, and they are contracted",
        )
        return Spec((a.shape[-1], b.shape[-1]), dtype)
    require(
        len(b.shape) == 2,
        f"gemm {layout}: the second operand must be a matrix, its shape is {b.shape}",
    )
    inner, outer = (b.shape[1], b.shape[0]) if layout == "nt" else (b.shape[0], b.shape[1])
    require(
        len(a.shape) >= 1 and a.shape[-1] == inner,
        f"input has {int(a.shape[-1]) if a.shape else 0} features, weight expects {int(inner)} "
        f"(weight is {int(b.shape[0])}x{int(b.shape[1])})",
    )
    return Spec((*a.shape[:-1], outer), dtype)


@prim("gemm", infer=_gemm_infer, roles=_roles)
def GEMM(
    a: Any, b: Any, layout: str, dtype: torch.dtype, accumulation: str | None = None
) -> torch.Tensor:
    """nt: a b^T; nn: a b; tn: a^T b over all leading dimensions. Records are dequantized and multiplied in FP32.

    A result wider than dense operands is not rounded to their dtype before. `accumulation` ("fast" or "split") says how
    FP8 tensor cores sum; FP32 arithmetic needs no such choice.
    """
    dense = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if not dense or dtype.itemsize > a.dtype.itemsize:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        a = a.to(wide) if isinstance(a, torch.Tensor) else a.dequantize(wide)
        b = b.to(wide) if isinstance(b, torch.Tensor) else b.dequantize(wide)
    if layout == "tn":
        y = a.flatten(0, -2).t() @ b.flatten(0, -2) if a.dim() > 1 else torch.outer(a, b)
    else:
        y = a @ (b.t() if layout == "nt" else b)
    made: torch.Tensor = y if y.dtype is dtype else y.to(dtype)
    return made


@gradient(GEMM)
def _gemm_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value, Value]:
    a, b = node.inputs
    da, db = {
        "nt": ((dy, b, "nn"), (dy, a, "tn")),
        "nn": ((dy, b, "nt"), (a, dy, "tn")),
        "tn": ((b, dy, "nt"), (a, dy, "nn")),
    }[node.layout]
    return (
        g.call(GEMM, *da[:2], layout=da[2], dtype=g.spec(a).dtype),
        g.call(GEMM, *db[:2], layout=db[2], dtype=g.spec(b).dtype),
    )


@prim("accumulate", nature="effect", differentiable=False, infer=same)
def ACCUMULATE(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Adds `part` to `total` in place, in the wider of the two dtypes, and returns `total`.

    An effect: equal nodes are two additions. The next addition to the same tensor reads this one's result, which
    orders them; whatever else reads `total` in between is wrong.
    """
    return total.add_(part)


def _one_dtype(dtype: torch.dtype | None, params_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype under either of its names.

    Raises:
        PlanError: the two differ.
    """
    if dtype is not None and params_dtype not in (None, dtype):
        raise PlanError(f"Linear: dtype is {dtype}, params_dtype {params_dtype}; give one of them")
    return dtype or params_dtype


class Linear(Op):
    """y = x W^T + b with W [out_features, in_features]; computes in the autocast dtype, else the weight's.

    Under `te.autocast` the recipe quantizes input, weight and output gradient of its three GEMMs.

    Args:
        init_std: the weight is N(0, init_std), and uniform(-1/sqrt(in), 1/sqrt(in)) if None.
        init_method: fills the weight in place instead.
        params_dtype: Transformer Engine's name of `dtype`.
        accumulate_into_main_grad: the weight's gradient is added to `weight.main_grad` in the GEMM that makes it,
            and `weight.grad` stays None. `main_grad` is a tensor of the weight's shape in FP32 or BF16 that the
            caller makes before the first forward, and zeroes at the start of a step.
        fuse_wgrad_accumulation: the name of the same in Transformer Engine's modules.
        return_bias: returns x W^T, and as an extra output the bias, which is not added.
        others: further keywords of Transformer Engine's module, which may only ask for nothing (`tp_size=1`).

    Raises:
        ShapeError: a size that is no int of at least 1, or an input without `in_features` features.
        PlanError: a bad `init_std` or dtype, `return_bias` without a bias, or a keyword of what is not supported yet.
    """

    return_bias = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        init_std: float | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        refuse_others("Linear", others)
        dtype = _one_dtype(dtype, params_dtype)
        adds = flag("Linear", "accumulate_into_main_grad", accumulate_into_main_grad)
        also = flag("Linear", "fuse_wgrad_accumulation", fuse_wgrad_accumulation)
        self.accumulate_into_main_grad = adds or also
        self.in_features = positive_int("Linear", "in_features", in_features)
        self.out_features = positive_int("Linear", "out_features", out_features)
        self.init_std = (
            None if init_std is None else number("Linear", "init_std", init_std, low=0.0)
        )
        self.weight = empty("Linear", (self.out_features, self.in_features), device, dtype)
        self.bias = empty("Linear", (self.out_features,), device, dtype) if bias else None
        self.return_bias = flag("Linear", "return_bias", return_bias)
        if self.return_bias and not bias:
            raise PlanError("Linear: return_bias needs bias=True")
        if not self.weight.is_meta:
            self.reset_parameters()
            if init_method is not None:
                with torch.no_grad():
                    init_method(self.weight)

    def reset_parameters(self) -> None:
        """Uniform(-1/sqrt(in), 1/sqrt(in)) for the weight (normal if `init_std`), zeros for the bias."""
        with torch.no_grad():
            if self.init_std is None:
                bound = 1 / math.sqrt(self.in_features)
                self.weight.uniform_(-bound, bound)
            else:
                self.weight.normal_(0.0, self.init_std)
            if self.bias is not None:
                self.bias.zero_()

    def state_operands(self) -> dict[str, str]:
        """input, weight and grad_output of its GEMMs."""
        return dict.fromkeys(("input", "weight", "grad_output"), "gemm")

    def main_grads(self) -> tuple[str, ...]:
        """The weight, if its gradient is accumulated elsewhere."""
        return ("weight",) if self.accumulate_into_main_grad else ()

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        """The bias, if it is returned."""
        return int(self.return_bias)

    def emit(self, g: Graph, x: Value) -> Any:
        """gemm + bias; with `return_bias` the gemm, and a copy of the bias in the dtype of the result."""
        dtype = g.autocast_dtype or self.weight.dtype
        w = cast(g, g.param(self.weight), dtype)
        y = g.call(GEMM, cast(g, x, dtype), w, layout="nt", dtype=dtype)
        if self.return_bias and self.bias is not None:
            return y, pointwise(g, activations["identity"](), g.param(self.bias), dtype=dtype)
        return y if self.bias is None else emit_bias(g, y, g.param(self.bias))

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        more = "" if self.bias is not None else ", bias=False"
        more += ", accumulate_into_main_grad=True" if self.accumulate_into_main_grad else ""
        return f"{self.in_features} -> {self.out_features}{more}"
