"""A norm before a Linear, and before an MLP."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from te_ops.basic.arguments import flag, positive_int
from te_ops.basic.unsupported import refuse_others
from te_ops.graph import Graph, Value
from te_ops.layers.parts import Init, Normalization, activation, linear, norm, outputs
from te_ops.op import Op


class LayerNormLinear(Op):
    """linear(norm(x)): the norm writes what the GEMM reads.

    Args:
        in_features: of x.
        out_features: of the result.
        eps: of the norm.
        bias: of the Linear.
        normalization: "LayerNorm" or "RMSNorm".
        init_method: fills the weight in place; N(0, 0.023) if None.
        zero_centered_gamma: the norm multiplies by 1 + weight.
        return_layernorm_output: also return norm(x), as an extra output.
        return_bias: the last bias is not added but returned, as the first extra output.
        fuse_wgrad_accumulation: weight gradients are added to the weights' `main_grad`, see `te.Linear`.
        params_dtype: of the parameters; the default dtype if None. device: likewise.
        others: further keywords of Transformer Engine's module, which may only ask for nothing (`tp_size=1`).

    Raises:
        PlanError: an option is out of range, or of what is not supported yet. ShapeError: a size is.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        init_method: Init | None = None,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        name, places = "LayerNormLinear", {"device": device, "dtype": params_dtype}
        refuse_others(name, others)
        self.norm = norm(
            name,
            normalization,
            positive_int(name, "in_features", in_features),
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            places=places,
        )
        self.linear = linear(
            (in_features, out_features),
            places,
            bias=bias,
            init_method=init_method,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            return_bias=return_bias,
        )
        self.return_layernorm_output = flag(
            name, "return_layernorm_output", return_layernorm_output
        )

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        """The bias and the norm's output, if they are returned."""
        return self.linear.num_extra_outputs + int(self.return_layernorm_output)

    def emit(self, g: Graph, x: Value) -> Value | tuple[Value, ...]:
        """norm + gemm + bias."""
        normed = self.norm.emit(g, x)
        y = self.linear.emit(g, normed)
        return outputs(y, normed if self.return_layernorm_output else None)


class LayerNormMLP(Op):
    """fc2(activation(fc1(norm(x)))); fc1 makes [gate | linear] for gated activations.

    Args:
        hidden_size: features of x and of the result.
        ffn_hidden_size: features between.
        eps: of the norm.
        bias: of both Linears.
        normalization: "LayerNorm" or "RMSNorm".
        activation: "gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu",
            "silu", "swiglu" or "clamped_swiglu".
        activation_params: constants of the activation, by name.
        init_method: fills fc1's weight in place. output_layer_init_method: fc2's.
        zero_centered_gamma: the norm multiplies by 1 + weight.
        return_layernorm_output: also return norm(x), as an extra output.
        return_bias: the last bias is not added but returned, as the first extra output.
        fuse_wgrad_accumulation: weight gradients are added to the weights' `main_grad`, see `te.Linear`.
        checkpoint: recompute what is between norm and result in backward.
        params_dtype: of the parameters; the default dtype if None. device: likewise.
        others: further keywords of Transformer Engine's module, which may only ask for nothing (`tp_size=1`).

    Raises:
        PlanError: an option is out of range, or of what is not supported yet. ShapeError: a size is.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: Normalization = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        checkpoint: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        name, places = "LayerNormMLP", {"device": device, "dtype": params_dtype}
        refuse_others(name, others)
        hidden = positive_int(name, "hidden_size", hidden_size)
        inner = positive_int(name, "ffn_hidden_size", ffn_hidden_size)
        self.norm = norm(
            name,
            normalization,
            hidden,
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            places=places,
        )
        self.activation, times = _activation(name, activation, activation_params)
        shared = {"bias": bias, "fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        self.fc1 = linear((hidden, times * inner), places, init_method=init_method, **shared)
        shared |= {"return_bias": return_bias}
        second = output_layer_init_method
        self.fc2 = linear((inner, hidden), places, init_method=second, **shared)
        self.return_layernorm_output = flag(
            name, "return_layernorm_output", return_layernorm_output
        )
        self.checkpoint = flag(name, "checkpoint", checkpoint)

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        """The bias of fc2 and the norm's output, if they are returned."""
        return self.fc2.num_extra_outputs + int(self.return_layernorm_output)

    def emit(self, g: Graph, x: Value) -> Value | tuple[Value, ...]:
        """norm + gemm + bias + activation + gemm + bias."""
        normed: Value = self.norm.emit(g, x)
        with g.recompute() if self.checkpoint else contextlib.nullcontext():
            y = self.fc2.emit(g, self.activation.emit(g, self.fc1.emit(g, normed)))
        return outputs(y, normed if self.return_layernorm_output else None)


_activation = activation  # the constructors' keyword hides it

__all__ = ["LayerNormLinear", "LayerNormMLP"]
