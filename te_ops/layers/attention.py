"""DotProductAttention and MultiheadAttention: te.Attention, with projections around it."""

from __future__ import annotations

from typing import Any, Literal

import torch

from te_ops.basic.arguments import flag, positive_int
from te_ops.basic.attention import Attention
from te_ops.basic.heads import merge_heads
from te_ops.basic.unsupported import rest
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Value
from te_ops.layers.parts import Init, Normalization, linear, norm, outputs, qk_norm
from te_ops.op import Op

Order = Literal["interleaved", "stacked", "separate"]


class DotProductAttention(Op):
    """te.Attention on q, k and v [s, b, heads, d] that returns merged heads [s, b, heads * d].

    Args:
        num_attention_heads: of q.
        kv_channels: features of a head, or (of q and k, of v); if None the inputs say.
        num_gqa_groups: heads of k and v; those of q if None.
        qkv_format: "sbhd" as in Transformer Engine; any that `te.Attention` takes.
        options: everything else that `te.Attention` takes, by keyword.

    Raises:
        PlanError: an option is out of range, or contradicts another.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int] | None = None,
        num_gqa_groups: int | None = None,
        *,
        qkv_format: str = "sbhd",
        **options: Any,
    ) -> None:
        super().__init__()
        if "packed" in options:
            raise PlanError(
                "DotProductAttention takes q, k and v; te.Attention takes packed inputs"
            )
        self.attention = Attention(
            num_attention_heads,
            num_gqa_groups,
            kv_channels=kv_channels,
            qkv_format=qkv_format,
            **rest("DotProductAttention", options),
        )

    @property
    def input_names(self) -> tuple[str, ...]:
        """What the inputs are, in order."""
        return self.attention.input_names

    @property
    def num_inputs(self) -> int:  # type: ignore[override]
        """As many as the options ask for."""
        return self.attention.num_inputs

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        """The lse and the largest scores, if they are returned."""
        return self.attention.num_extra_outputs

    feature_dims = 2

    def emit(self, g: Graph, *xs: Value) -> Value | tuple[Value, ...]:
        """attention + merge_heads."""
        result = self.attention.emit(g, *xs)
        if isinstance(result, Value):
            return merge_heads(g, result)
        return (merge_heads(g, result[0]), *result[1:])


class MultiheadAttention(Op):
    """proj(attention(qkv(norm(x)))), planned as one: heads are slices of the projection, not copies.

    The fused parameter `qkv.weight` is [Q | K | V]; cross attention has `query` and, on the second
    input, `key_value` [K | V]. With `memory_projected` set to True the second input is what
    `key_value` made of it: generation does that once a sequence, and not with every token.

    Args:
        hidden_size: features of x (and of the second input).
        num_attention_heads: of q.
        kv_channels: features of a head; hidden_size / num_attention_heads if None.
        attention_dropout: of probabilities, in training.
        layernorm_epsilon: of the input norm.
        init_method: fills the first weights in place; N(0, 0.023) if None.
        output_layer_init_method: fills `proj.weight`.
        num_gqa_groups: heads of k and v; those of q if None.
        input_layernorm: normalise x first.
        attention_type: "self", or "cross" for keys and values from a second input.
        zero_centered_gamma: the norm multiplies by 1 + weight.
        normalization: "LayerNorm" or "RMSNorm".
        bias: of the projections.
        qkv_format: "sbhd", "bshd" or "thd", of x [s, b, hidden_size] and so on.
        qk_norm_type: None, "L2Normalization", "RMSNorm" or "LayerNorm" on the heads of q and k.
        qk_norm_eps: its epsilon. qk_norm_before_rope: whether it comes first.
        return_layernorm_output: also return the norm's output, as the last extra output.
        return_bias: the bias of proj is not added but returned, as the first extra output.
        fuse_wgrad_accumulation: weight gradients are added to the weights' `main_grad`, see `te.Linear`.
        fuse_qkv_params, qkv_weight_interleaved: how Transformer Engine's checkpoint of this layer has the
            projection's rows, for `te.layers.from_transformer_engine`; the parameter is the same.
        params_dtype: of the parameters; the default dtype if None. device: likewise.
        options: everything else that `te.Attention` takes, by keyword: attn_mask_type, window_size,
            rotary, softmax_type, cache and so on. Those of Transformer Engine that are not supported yet may only
            ask for nothing (`tp_size=1`).

    Raises:
        PlanError: an option is out of range, contradicts another, or is of what is not supported yet.
        ShapeError: a size is out of range.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        *,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        num_gqa_groups: int | None = None,
        input_layernorm: bool = False,
        attention_type: Literal["self", "cross"] = "self",
        zero_centered_gamma: bool = False,
        normalization: Normalization = "LayerNorm",
        bias: bool = True,
        qkv_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        fuse_qkv_params: bool | None = None,
        qkv_weight_interleaved: bool | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        name = "MultiheadAttention"
        self.memory_projected = False
        self.checkpoint_order = _order(name, fuse_qkv_params, qkv_weight_interleaved)
        places: dict[str, Any] = {"device": device, "dtype": params_dtype}
        hidden = positive_int(name, "hidden_size", hidden_size)
        heads, groups = _heads(name, num_attention_heads, num_gqa_groups)
        d = _channels(hidden, heads, kv_channels)
        self.input_layernorm = flag(name, "input_layernorm", input_layernorm)
        returned = flag(name, "return_layernorm_output", return_layernorm_output)
        self.return_layernorm_output = returned
        if returned and not self.input_layernorm:
            raise PlanError(f"{name}: return_layernorm_output needs input_layernorm=True")
        if self.input_layernorm:
            gamma: dict[str, Any] = {"zero_centered_gamma": zero_centered_gamma, "places": places}
            self.norm = norm(name, normalization, hidden, eps=layernorm_epsilon, **gamma)
        shape: dict[str, Any] = {"bias": bias, "init_method": init_method, "places": places}
        shape |= {"fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        self._add_projections(hidden, (heads * d, 2 * groups * d), attention_type, shape)
        qk: dict[str, Any] = {"eps": qk_norm_eps, "places": places}
        options = rest(name, options)
        for side in ("q_norm", "k_norm"):
            options[side] = _one_of(
                name, side, options.get(side), qk_norm(name, qk_norm_type, d, **qk)
            )
        self.attention = Attention(
            heads,
            groups,
            kv_channels=d,
            attention_type=attention_type,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            packed="kv" if attention_type == "cross" else True,
            qk_norm_before_rope=qk_norm_before_rope,
            **options,
        )
        shape |= {"init_method": output_layer_init_method, "return_bias": return_bias}
        self.proj = linear((heads * d, hidden), **shape)

    feature_dims = 1

    def _add_projections(
        self, hidden: int, widths: tuple[int, int], kind: str, shape: dict[str, Any]
    ) -> None:
        """To `widths` features of q and of [K | V]: one for both, or one for each of the inputs."""
        if kind == "cross":
            self.query = linear((hidden, widths[0]), **shape)
            self.key_value = linear((hidden, widths[1]), **shape)
        else:
            self.qkv = linear((hidden, sum(widths)), **shape)

    def _projected(self, g: Graph, x: Value, xs: tuple[Value, ...]) -> tuple[Value, ...]:
        """What the attention unpacks."""
        if self.cross:
            memory = xs[1] if self.memory_projected else self.key_value.emit(g, xs[1])
            return self.query.emit(g, x), memory
        return (self.qkv.emit(g, x),)

    @property
    def cross(self) -> bool:
        """Whether keys and values come from a second input."""
        return self.attention.attention_type == "cross"

    @property
    def input_names(self) -> tuple[str, ...]:
        """What the inputs are, in order."""
        own = 2 if self.cross else 1
        return ("x", "memory")[:own] + self.attention.input_names[own:]

    @property
    def num_inputs(self) -> int:  # type: ignore[override]
        """x, with cross attention the tensor that keys and values come from, and what options ask for."""
        return self.attention.num_inputs

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        """The bias of proj, those of the attention, then the norm's output, if they are returned."""
        own = self.proj.num_extra_outputs + int(self.return_layernorm_output)
        return own + self.attention.num_extra_outputs

    def emit(self, g: Graph, *xs: Value) -> Value | tuple[Value, ...]:
        """[norm] + gemm + attention + gemm."""
        if flag("MultiheadAttention", "memory_projected", self.memory_projected) and not self.cross:
            raise PlanError("memory_projected is for attention_type='cross'")
        if len(xs) != self.num_inputs:
            raise ShapeError(f"takes {', '.join(self.input_names)}, got {len(xs)} inputs")
        x = self.norm.emit(g, xs[0]) if self.input_layernorm else xs[0]
        packed: tuple[Value, ...] = self._projected(g, x, xs)
        result = self.attention.emit(g, *packed, *xs[len(packed) :])
        o, extras = (result, ()) if isinstance(result, Value) else (result[0], result[1:])
        return outputs(self.proj.emit(g, o), *extras, x if self.return_layernorm_output else None)


def _heads(name: str, heads: int, groups: int | None) -> tuple[int, int]:
    """Of q, and of k and v."""
    made = positive_int(name, "num_attention_heads", heads)
    return made, made if groups is None else positive_int(name, "num_gqa_groups", groups)


def _one_of(name: str, side: str, given: Op | None, made: Op | None) -> Op | None:
    """The norm of q or k: given as such, or made from qk_norm_type."""
    if given is not None and made is not None:
        raise PlanError(f"{name}: qk_norm_type and {side} are both given; give one of them")
    return made if given is None else given


def _order(name: str, fused: bool | None, interleaved: bool | None) -> Order | None:
    """Of the projection's rows in Transformer Engine's checkpoint; None where neither keyword is given."""
    for keyword, value in (("fuse_qkv_params", fused), ("qkv_weight_interleaved", interleaved)):
        if value is not None:
            flag(name, keyword, value)
    if fused is False:
        return "separate"
    if interleaved is None:
        return None if fused is None else "interleaved"
    return "interleaved" if interleaved else "stacked"


def _channels(hidden: int, heads: int, kv_channels: int | None) -> int:
    if kv_channels is not None:
        return positive_int("MultiheadAttention", "kv_channels", kv_channels)
    if hidden % heads:
        raise PlanError(
            f"MultiheadAttention: hidden_size {hidden} is not a multiple of num_attention_heads "
            f"{heads}; give kv_channels"
        )
    return hidden // heads


__all__ = ["DotProductAttention", "MultiheadAttention", "Order"]
