"""TransformerLayer: attention and MLP with their residuals, as one pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from te_ops.basic.arguments import flag, number
from te_ops.basic.dropout import Dropout
from te_ops.basic.droppath import DropPath
from te_ops.basic.structure import add
from te_ops.basic.unsupported import rest
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Value
from te_ops.layers.attention import MultiheadAttention
from te_ops.layers.linear import LayerNormMLP
from te_ops.layers.parts import Init, Normalization, norm
from te_ops.op import Op

_NAME = "TransformerLayer"


class TransformerLayer(Op):
    """x + attention(x), x + mlp(x), each with its norm, dropout and residual; "decoder" has cross
    attention between them.

    Inputs: x; for "decoder" the encoder's output (or its keys and values, see `MultiheadAttention`);
    then what the options of self attention ask for, and those of cross attention.

    Args:
        hidden_size: features of x.
        ffn_hidden_size: features inside the MLP.
        num_attention_heads: of q.
        num_gqa_groups: heads of k and v; those of q if None.
        layernorm_epsilon: of the norms.
        hidden_dropout: of each branch before its residual, in training.
        attention_dropout: of probabilities, in training.
        init_method: fills the weights of qkv and fc1; N(0, 0.023) if None.
        output_layer_init_method: fills the weights of proj and fc2.
        kv_channels: features of a head; hidden_size / num_attention_heads if None.
        self_attn_mask_type: as `attn_mask_type` of `te.Attention`; window_size and
            bottom_right_diagonal belong to self attention, too.
        enc_dec_attn_mask_type: the same of cross attention, with enc_dec_attn_window_size and
            enc_dec_bottom_right_diagonal; nothing is inherited from self attention.
        apply_residual_connection_post_layernorm: residuals start at the norms' outputs.
        output_layernorm: a norm after the layer instead of one before self attention.
        parallel_attention_mlp: attention and MLP both read x, and are added with it at once.
        layer_type: "encoder" or "decoder".
        drop_path_rate: probability of dropping a branch for a whole sample, in training.
        bias: of all Linears.
        activation: as `LayerNormMLP`; activation_params: its constants.
        normalization: "LayerNorm" or "RMSNorm"; zero_centered_gamma: multiply by 1 + weight.
        attn_input_format: "sbhd", "bshd" or "thd", of x [s, b, hidden_size] and so on.
        fuse_wgrad_accumulation: weight gradients are added to the weights' `main_grad`, see `te.Linear`.
        fuse_qkv_params, qkv_weight_interleaved: as `MultiheadAttention`, of both attentions.
        checkpoint_mlp: recompute the inside of the MLP in backward.
        params_dtype: of the parameters; the default dtype if None. device: likewise.
        options: further keywords of `MultiheadAttention` and `te.Attention` for self attention:
            rotary, qk_norm_type, softmax_type, cache and so on. Those of Transformer Engine that are not supported
            yet may only ask for nothing (`tp_size=1`).

    Raises:
        PlanError: an option is out of range, contradicts another, or is of what is not supported yet.
        ShapeError: a size is out of range; at planning, inputs do not fit.
    """

    feature_dims = 1

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        *,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_attn_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: Literal["encoder", "decoder"] = "encoder",
        drop_path_rate: float = 0.0,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        normalization: Normalization = "LayerNorm",
        zero_centered_gamma: bool = False,
        attn_input_format: str = "sbhd",
        fuse_wgrad_accumulation: bool = False,
        fuse_qkv_params: bool | None = None,
        qkv_weight_interleaved: bool | None = None,
        checkpoint_mlp: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.layer_type = layer_type
        residual = apply_residual_connection_post_layernorm
        self.post_norm_residual = flag(_NAME, "apply_residual_connection_post_layernorm", residual)
        self.output_layernorm = flag(_NAME, "output_layernorm", output_layernorm)
        self.parallel_attention_mlp = flag(_NAME, "parallel_attention_mlp", parallel_attention_mlp)
        options = rest(_NAME, options)
        self._check_options(options)
        norms = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
        inits = {"init_method": init_method, "output_layer_init_method": output_layer_init_method}
        shared: dict[str, Any] = {**norms, **inits, "bias": bias, "params_dtype": params_dtype}
        shared |= {"device": device, "return_layernorm_output": self.post_norm_residual}
        shared |= {"fuse_wgrad_accumulation": fuse_wgrad_accumulation}
        heads = {"num_gqa_groups": num_gqa_groups, "kv_channels": kv_channels, **shared}
        heads |= {"attention_dropout": attention_dropout, "layernorm_epsilon": layernorm_epsilon}
        heads |= {"num_attention_heads": num_attention_heads, "qkv_format": attn_input_format}
        orders = {"fuse_qkv_params": fuse_qkv_params}
        heads |= {**orders, "qkv_weight_interleaved": qkv_weight_interleaved}
        own = _masks(self_attn_mask_type, window_size, bottom_right_diagonal)
        cross = (enc_dec_attn_mask_type, enc_dec_attn_window_size, enc_dec_bottom_right_diagonal)
        self._add_attention(hidden_size, heads, {**own, **options}, _masks(*cross))
        inside = {"activation": activation, "activation_params": activation_params, **shared}
        inside |= {"eps": layernorm_epsilon, "checkpoint": checkpoint_mlp}
        self.mlp = LayerNormMLP(hidden_size, ffn_hidden_size, **inside)
        self._add_ends(hidden_size, inside, hidden_dropout)
        self.drop_path = DropPath(drop_path_rate, qkv_format=attn_input_format)

    def _add_attention(
        self, hidden: int, heads: dict[str, Any], own: dict[str, Any], cross: dict[str, Any]
    ) -> None:
        """Self attention, and cross attention of a decoder; `heads` is what they share."""
        own["input_layernorm"] = not self.output_layernorm
        self.self_attention = MultiheadAttention(hidden, **{**heads, **own})
        if self.layer_type == "decoder":
            cross |= {"input_layernorm": True, "attention_type": "cross"}
            self.inter_attention = MultiheadAttention(hidden, **{**heads, **cross})

    def _add_ends(self, hidden: int, inside: dict[str, Any], dropout: float) -> None:
        """What comes after a branch, and after the layer."""
        if self.output_layernorm:
            self.layernorm = norm(
                _NAME,
                inside["normalization"],
                hidden,
                eps=inside["eps"],
                zero_centered_gamma=inside["zero_centered_gamma"],
                places={"device": inside["device"], "dtype": inside["params_dtype"]},
            )
        self.dropout = Dropout(number(_NAME, "hidden_dropout", dropout, low=0.0, high=1.0))

    def _check_options(self, options: dict[str, Any]) -> None:
        if options.get("return_lse") or options.get("return_max_logit"):
            raise PlanError(f"{_NAME}: return_lse and return_max_logit are options of te.Attention")
        if options.get("return_bias"):
            raise PlanError(
                f"{_NAME}: return_bias is an option of MultiheadAttention and LayerNormMLP"
            )
        if self.layer_type not in ("encoder", "decoder"):
            raise PlanError(
                f"TransformerLayer: layer_type must be 'encoder' or 'decoder', got {self.layer_type!r}"
            )
        if self.post_norm_residual and self.output_layernorm:
            raise PlanError(
                "TransformerLayer: apply_residual_connection_post_layernorm needs the norm before self "
                "attention, which output_layernorm moves behind the layer"
            )
        odd = self.layer_type == "decoder" or self.output_layernorm or self.post_norm_residual
        if self.parallel_attention_mlp and odd:
            raise PlanError(
                "TransformerLayer: parallel_attention_mlp is for encoders without output_layernorm and "
                "apply_residual_connection_post_layernorm"
            )

    # -- inputs

    @property
    def input_names(self) -> tuple[str, ...]:
        """What the inputs are, in order."""
        own = self.self_attention.input_names[1:]
        if self.layer_type == "encoder":
            return ("x", *own)
        cross = self.inter_attention.input_names[2:]
        return ("x", "memory", *own, *(f"cross {name}" for name in cross))

    @property
    def num_inputs(self) -> int:  # type: ignore[override]
        """As many as the options ask for."""
        return len(self.input_names)

    # -- emission

    def emit(self, g: Graph, *xs: Value) -> Value:
        """norm + attention + add [+ cross attention + add] + norm + mlp + add [+ norm]."""
        if len(xs) != self.num_inputs:
            raise ShapeError(f"takes {', '.join(self.input_names)}, got {len(xs)} inputs")
        decoder = int(self.layer_type == "decoder")
        count = 1 + decoder + len(self.self_attention.input_names) - 1
        own, cross = xs[1 + decoder : count], xs[count:]
        sequences = own[:1] if self.self_attention.input_names[1:2] == ("sequences",) else ()
        with g.nested() as outermost:
            x = self._stream(g, xs[0], outermost)
            if self.parallel_attention_mlp:
                branches: tuple[Any, ...] = (
                    self.self_attention.emit(g, x, *own),
                    self.mlp.emit(g, x),
                )
                x = add(g, x, *(self._dropped(g, branch, sequences) for branch in branches))
            else:
                x = self._residual(g, x, self.self_attention.emit(g, x, *own), sequences)
                x = self._stream(g, x, outermost)
                if decoder:
                    attended = self.inter_attention.emit(g, x, xs[1], *cross)
                    x = self._stream(g, self._residual(g, x, attended, sequences), outermost)
                x = self._residual(g, x, self.mlp.emit(g, x), sequences)
            x = self._stream(g, x, outermost)
        made: Value = self.layernorm.emit(g, x) if self.output_layernorm else x
        return made

    @staticmethod
    def _stream(g: Graph, x: Value, outermost: bool) -> Value:
        return g.cut(x, kind="stream") if outermost else x

    def _dropped(self, g: Graph, branch: Value, sequences: tuple[Value, ...]) -> Value:
        """A branch after dropout and drop path."""
        dropped: Value = self.dropout.emit(g, branch)
        made: Value = self.drop_path.emit(g, dropped, *sequences)
        return made

    def _residual(self, g: Graph, x: Value, branch: Any, sequences: tuple[Value, ...]) -> Value:
        """x, or the norm's output, plus a branch."""
        if not isinstance(branch, Value):
            branch, x = branch[0], branch[-1]
        return add(g, x, self._dropped(g, branch, sequences))


def _masks(kind: str, window: tuple[int, int] | None, bottom_right: bool | None) -> dict[str, Any]:
    """The keywords that say who sees whom."""
    return {
        "attn_mask_type": kind,
        "window_size": window,
        "bottom_right_diagonal": bottom_right,
    }


__all__ = ["TransformerLayer"]
