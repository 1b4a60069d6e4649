"""The Attention op: what goes around the primitive, from Transformer Engine's keywords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from te_ops.basic.arguments import FLOATS, flag, number, positive_int, show
from te_ops.basic.attention_core import (
    ATTENTION,
    ATTENTION_BACKWARD,
    PUBLIC_LSE,
    PUBLIC_MAX_LOGIT,
    attention,
)
from te_ops.basic.attention_form import LAYOUTS
from te_ops.basic.attention_masks import (
    MaskType,
    band_of,
    has_padding,
    is_bottom_right,
    mask_name,
)
from te_ops.basic.band import Band
from te_ops.basic.heads import merge_heads, split_heads, unpack_heads
from te_ops.basic.kvcache import KVCache
from te_ops.basic.pointwise import cast
from te_ops.basic.rope import RoPE
from te_ops.basic.score import Score, check_modifier, modifier, soft_cap
from te_ops.basic.sequences import alibi_slopes, constant_vector, packed_parts, padding_parts
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Value, require
from te_ops.op import Op, Scalar

BiasType = Literal["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
_BIASES = {"pre_scale_bias": "pre_bias", "post_scale_bias": "bias"}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "core_attention_bias_type": ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "attention_type": ("self", "cross"),
    "packed": (False, True, "kv"),
}


class Attention(Op):
    """Scaled dot product attention with everything around it, as one step of the plan.

    Takes q [b, s, num_heads, d], k and v [b, s, num_gqa_groups, d], returns [b, s, num_heads, d_v].
    With `packed=True` it takes one [b, s, (num_heads + 2 num_gqa_groups) d], laid out [Q | K | V]
    as a Linear makes it, and returns [b, s, num_heads d_v], without copies in between; with
    `packed="kv"` it takes [b, s, num_heads d] and [K | V]. Computes in the autocast dtype, else in
    that of its inputs. Options add inputs, in this order:

    1. "thd" formats: a `te.PackedSequences`.
    2. padding mask types of other formats: a bool mask (True = padding) [b, s] or [b, 1, 1, s], or
       int lengths [b]; with attention_type="cross" one for the queries and one for the keys.
    3. "arbitrary": a bool mask (True = masked out) that broadcasts to [b, heads, s_q, s_kv].
    4. a bias type: the bias, which broadcasts the same way; it has a gradient.
    5. alibi_slopes="input": slopes [heads] or [b, heads].
    6. a `rotary` that takes position offsets or ids: these.

    Args:
        num_heads: of q.
        num_gqa_groups: heads of k and v (`num_heads` if None); query head h reads key head
            h // (num_heads / num_gqa_groups).
        kv_channels: features of a head, or (of q and k, of v); if None the inputs say.
        attn_mask_type: "causal" (top-left diagonal), "causal_bottom_right", "no_mask", "padding",
            "padding_causal", "padding_causal_bottom_right" or "arbitrary".
        window_size: (left, right) keys that a query sees beside its own, inclusive; -1 is open.
        bottom_right_diagonal: where the diagonal ends if the lengths differ; None is False for
            "causal" and "padding_causal" and True for the others. It moves windows and ALiBi too.
        softmax_scale: a number or a `te.scalar`; 1/sqrt(d) if None.
        attention_type: "cross" where keys have padding or sequences of their own.
        attention_dropout: probability of dropping a probability, in training.
        core_attention_bias_type: "no_bias", "pre_scale_bias" (added before the scale),
            "post_scale_bias" or "alibi".
        alibi_slopes: numbers, one a head; those of the ALiBi paper if None; "input" for an input.
        softmax_type: "vanilla", "off-by-one" (one more key of score 0 and value 0) or "learnable"
            (its score is the parameter `softmax_offset` [heads]).
        logits_soft_cap: c > 0 makes scores c * tanh(s / c).
        score_mod: a `@te.pointwise` op of the scaled score and, by these names, i, j (row and key
            in the sequence), head and batch; its numbers may be te.scalar slots or Parameters, 0-dim
            or one number a head. Its gradient is derived.
        qkv_format: "bshd", "sbhd" ([s, b, h, d]) or "thd" ([tokens, h, d]); "sbhd_2bshd" and the
            like for keys in another format than queries.
        packed: one [Q | K | V] input, or "kv", see above.
        rotary: a `RoPE` that turns q and k first.
        q_norm: an op on q [b, s, h, d] before RoPE, such as `te.RMSNorm(d)`; k_norm: the same on k.
        qk_norm_before_rope: False puts the norms after RoPE.
        return_lse: also return log(sum(exp(scores))) [b, h, s] ("thd": [h, tokens]) in FP32; -inf
            for empty rows.
        return_max_logit: also return the largest score of each head [h], without a gradient.
        cache: a `te.KVCache` of earlier tokens: a call appends its keys and values, and its queries
            are the last rows ("causal" ends bottom-right). For inference; None for training.
        dtype: of `softmax_offset`; FP32 if None.

    Raises:
        PlanError: an option is out of range, or contradicts another.
        ShapeError: inputs do not fit: at planning, or at the call where a plan serves many sizes.
    """

    def __init__(
        self,
        num_heads: int,
        num_gqa_groups: int | None = None,
        *,
        kv_channels: int | tuple[int, int] | None = None,
        attn_mask_type: MaskType = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softmax_scale: float | Scalar | None = None,
        attention_type: Literal["self", "cross"] = "self",
        attention_dropout: float = 0.0,
        core_attention_bias_type: BiasType = "no_bias",
        alibi_slopes: Sequence[float] | torch.Tensor | Literal["input"] | None = None,
        softmax_type: SoftmaxType = "vanilla",
        logits_soft_cap: float | None = None,
        score_mod: Op | None = None,
        qkv_format: str = "bshd",
        packed: bool | Literal["kv"] = False,
        rotary: RoPE | None = None,
        q_norm: Op | None = None,
        k_norm: Op | None = None,
        qk_norm_before_rope: bool = True,
        return_lse: bool = False,
        return_max_logit: bool = False,
        cache: KVCache | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "Attention"
        self.num_heads = positive_int(name, "num_heads", num_heads)
        groups = num_heads if num_gqa_groups is None else num_gqa_groups
        self.num_gqa_groups = positive_int(name, "num_gqa_groups", groups)
        self.kv_channels = _channels(kv_channels)
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.softmax_scale = softmax_scale
        self.attention_type = attention_type
        self.attention_dropout = attention_dropout
        self.core_attention_bias_type = core_attention_bias_type
        self.alibi_slopes = _slopes(alibi_slopes, num_heads, core_attention_bias_type)
        self.softmax_type = softmax_type
        self.logits_soft_cap = logits_soft_cap
        self.score_mod = None if score_mod is None else check_modifier(score_mod)
        self.qkv_format = qkv_format
        self.packed = packed
        self.rotary = rotary
        self.q_norm, self.k_norm = q_norm, k_norm
        self.qk_norm_before_rope = qk_norm_before_rope
        self.return_lse = return_lse
        self.return_max_logit = return_max_logit
        self.cache = cache
        self._check_options()
        self._make_offset(device, dtype)

    # -- options

    def _check_options(self) -> None:
        """Refuse options that are wrong by themselves or together."""
        if self.num_heads % self.num_gqa_groups:
            raise PlanError(
                f"Attention: num_heads {self.num_heads} is not a multiple of num_gqa_groups "
                f"{self.num_gqa_groups}"
            )
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is c or (isinstance(c, str) and value == c) for c in choices):
                raise PlanError(
                    f"Attention: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
                )
        for name in ("qk_norm_before_rope", "return_lse", "return_max_logit"):
            flag("Attention", name, getattr(self, name))
        band_of(self.attn_mask_type, self.window_size, self.bottom_right_diagonal)
        number("Attention", "attention_dropout", self.attention_dropout, low=0.0, high=1.0)
        self._check_parts()
        self._check_format()
        self._check_packed()
        self._check_scores()
        self._check_cache()

    def _check_parts(self) -> None:
        for name, kind in (("rotary", RoPE), ("q_norm", Op), ("k_norm", Op), ("cache", KVCache)):
            part = getattr(self, name)
            if part is not None and not isinstance(part, kind):
                raise PlanError(
                    f"Attention: {name} must be a te.{kind.__name__} or None, got {part!r}"
                )

    def _check_format(self) -> None:
        layouts = _layouts(self.qkv_format)
        if self.rotary is not None and {self.rotary.qkv_format} != set(layouts):
            raise PlanError(
                f"Attention: rotary has qkv_format={self.rotary.qkv_format!r}, the attention has "
                f"{self.qkv_format!r}"
            )
        square = self.core_attention_bias_type in _BIASES or self.attn_mask_type == "arbitrary"
        if "thd" in layouts and square:
            raise PlanError(
                f"Attention: qkv_format={self.qkv_format!r} takes no mask and no bias tensor, whose "
                "rows and keys are those of one length; use mask types, windows, ALiBi or score_mod"
            )

    def _check_packed(self) -> None:
        if self.packed is True and (self.attention_type == "cross" or "_2" in self.qkv_format):
            raise PlanError(
                "Attention: packed=True is one input for q, k and v; queries and keys of different "
                'places or formats need packed="kv" or three inputs'
            )

    def _check_scores(self) -> None:
        if self.softmax_scale is not None and not isinstance(self.softmax_scale, Scalar):
            number("Attention", "softmax_scale", self.softmax_scale)
        if self.logits_soft_cap is not None:
            soft_cap(self.logits_soft_cap)
            if self.score_mod is not None:
                raise PlanError(
                    "Attention: logits_soft_cap and score_mod both change the score; write the cap "
                    "into score_mod"
                )

    def _check_cache(self) -> None:
        if self.cache is None:
            return
        square = self.core_attention_bias_type in _BIASES or self.attn_mask_type == "arbitrary"
        layouts = _layouts(self.qkv_format)
        if square or self.attention_type == "cross" or "thd" in layouts or layouts[0] != layouts[1]:
            raise PlanError(
                "Attention: a cache takes self-attention in bshd or sbhd without mask and bias "
                "tensors; use mask types, windows, ALiBi or score_mod"
            )
        if self.rotary is not None and (self.rotary.positions != "start" or self._starts_late()):
            raise PlanError(
                "Attention: a cache counts the positions of rotary itself; leave positions and "
                "start_position out"
            )
        seen, window = self.window_size and self.window_size[0], self.cache.window
        if window is not None and (seen in (None, -1) or seen >= window):
            raise PlanError(
                f"Attention: the cache is a ring for a window of {window} tokens, the attention has "
                f"window_size={self.window_size}; use window_size=({window - 1}, 0)"
            )

    def _starts_late(self) -> bool:
        start = self.rotary.start_position if self.rotary is not None else 0
        return isinstance(start, Scalar) or start != 0

    def _make_offset(self, device: Any, dtype: torch.dtype | None) -> None:
        if dtype is not None and dtype not in FLOATS:
            raise PlanError(f"Attention: dtype must be a floating-point dtype, got {dtype}")
        if self.softmax_type == "learnable":
            zeros = torch.zeros(self.num_heads, device=device, dtype=dtype or torch.float32)
            self.softmax_offset = torch.nn.Parameter(zeros)

    @property
    def band(self) -> Band:
        """Which keys a query sees, from the attributes as they are now."""
        band = band_of(self.attn_mask_type, self.window_size, self.bottom_right_diagonal)
        if self.cache is None:
            return band
        return Band(band.left, band.right, "bottom_right")  # its queries are the last rows

    @property
    def input_names(self) -> tuple[str, ...]:
        """What the inputs are, in order."""
        names = {False: ["q", "k", "v"], True: ["qkv"], "kv": ["q", "kv"]}[self.packed]
        if "thd" in _layouts(self.qkv_format):
            names.append("sequences")
        elif has_padding(self.attn_mask_type):
            cross = self.attention_type == "cross"
            names += ["q_padding", "kv_padding"] if cross else ["padding"]
        if self.attn_mask_type == "arbitrary":
            names.append("mask")
        if self.core_attention_bias_type in _BIASES:
            names.append(_BIASES[self.core_attention_bias_type])
        if self.alibi_slopes == "input":
            names.append("slopes")
        if isinstance(self.rotary, RoPE) and self.rotary.positions != "start":
            names.append("positions")
        return tuple(names)

    @property
    def num_inputs(self) -> int:  # type: ignore[override]
        """As many as the options ask for, see `input_names`."""
        return len(self.input_names)

    @property
    def feature_dims(self) -> int:  # type: ignore[override]
        """1 for packed inputs, 2 for heads and features."""
        return 1 if self.packed else 2

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        """The lse and the largest scores, if they are returned."""
        return int(self.return_lse) + int(self.return_max_logit)

    def state_operands(self) -> dict[str, str]:
        """q, k and v, which have scales of their own."""
        return dict.fromkeys(("q", "k", "v"), ATTENTION.name)

    # -- emission

    def emit(self, g: Graph, *xs: Value) -> Value | tuple[Value, ...]:
        """[unpack_heads] + [norm] + [rope] + attention + [merge_heads], and extra outputs."""
        self._check_options()  # attributes may have been assigned since
        names = self.input_names
        if len(xs) != len(names):
            raise ShapeError(f"Attention takes {_listed(names)}, got {len(xs)} inputs")
        given = dict(zip(names, xs, strict=True))
        q, k, v = self._unpack(g, given)
        self._check_heads(g, q, k, v)
        layout, kv_layout = _layouts(self.qkv_format)
        operands = self._sequences(g, given, q, k)
        if self.cache is None:
            q, k = self._turned(g, q, k, operands, given.get("positions"))
        else:
            q, k, v, kv_layout = self._cached(g, self.cache, (q, k, v), operands)
        score, captured = self._score(g)
        operands |= captured
        operands |= {name: given[name] for name in ("mask", "pre_bias", "bias") if name in given}
        operands |= self._vectors(g, given)
        bottom_right = self.cache is not None or is_bottom_right(
            self.attn_mask_type, self.bottom_right_diagonal
        )
        o, lse, max_logit = attention(
            g,
            q,
            k,
            v,
            operands=operands,
            band=self.band,
            scale=self.softmax_scale,
            layout=layout,
            kv_layout=kv_layout,
            score=score,
            dropout=self.attention_dropout if self.training else 0.0,
            slope_diagonal="bottom_right" if bottom_right else "top_left",
        )
        outputs = [merge_heads(g, o) if self.packed else o]
        outputs += [g.call(PUBLIC_LSE, lse)] if self.return_lse else []
        outputs += [g.call(PUBLIC_MAX_LOGIT, max_logit)] if self.return_max_logit else []
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _sequences(
        self, g: Graph, given: dict[str, Value], q: Value, k: Value
    ) -> dict[str, Value | None]:
        """Starts and lengths of queries and keys, where the options have them."""
        layout, kv_layout = _layouts(self.qkv_format)
        if "sequences" in given:
            own = self.attention_type == "self" and layout == kv_layout
            parts: dict[str, Value | None] = {**packed_parts(g, given["sequences"], own=own)}
            # A tensor with a batch axis has its sequences at the start of each row.
            dense = [side for side, at in (("q", layout), ("kv", kv_layout)) if at != "thd"]
            return {
                name: x for name, x in parts.items() if name.removesuffix("_starts") not in dense
            }
        rows = {"q": (q, int(layout != "sbhd")), "kv": (k, int(kv_layout != "sbhd"))}
        if "padding" in given:
            s_q, s_kv = (g.spec(x).shape[axis] for x, axis in rows.values())
            require(
                s_q == s_kv,
                f"padding of self-attention is that of queries and keys, which have lengths "
                f"{int(s_q)} and {int(s_kv)}; attention_type='cross' takes one for each",
            )
            one = padding_parts(g, "q", given["padding"], rows["q"])
            return {**one, **{name.replace("q_", "kv_"): x for name, x in one.items()}}
        made: dict[str, Value | None] = {}
        for side in ("q", "kv"):
            if f"{side}_padding" in given:
                made |= padding_parts(g, side, given[f"{side}_padding"], rows[side])
        return made

    def _cached(
        self,
        g: Graph,
        cache: KVCache,
        new: tuple[Value, Value, Value],
        operands: dict[str, Value | None],
    ) -> tuple[Value, Value, Value, str]:
        """q, and all keys and values: the new ones appended where the cache ends."""
        q, k, v = (cast(g, x, g.autocast_dtype) for x in new)
        layout, _ = _layouts(self.qkv_format)
        starts, lens = (operands.pop(f"kv_{what}", None) for what in ("starts", "lens"))
        offsets = cache.offsets(g, k, layout=layout, starts=starts)
        q, k = self._turned(g, q, k, operands, offsets)
        made = cache.append(g, k, v, layout=layout, starts=starts, lens=lens)
        operands |= made.operands
        return q, made.k, made.v, made.layout

    def _turned(
        self,
        g: Graph,
        q: Value,
        k: Value,
        operands: dict[str, Value | None],
        positions: Value | None,
    ) -> tuple[Value, Value]:
        """q and k after norms and RoPE."""
        norms = (self.q_norm, self.k_norm)
        made = []
        for side, x, norm in zip(("q", "kv"), (q, k), norms, strict=True):
            if norm is not None and self.qk_norm_before_rope:
                x = norm.emit(g, x)
            if self.rotary is not None:
                thd = self.rotary.qkv_format == "thd" and self.rotary.positions != "ids"
                found = [operands[f"{side}_{what}"] for what in ("starts", "lens") if thd]
                places = [place for place in found if place is not None]
                x = self.rotary.emit(g, x, *places, *([] if positions is None else [positions]))
            if norm is not None and not self.qk_norm_before_rope:
                x = norm.emit(g, x)
            made.append(x)
        return made[0], made[1]

    def _score(self, g: Graph) -> tuple[Score | None, dict[str, Value]]:
        if self.logits_soft_cap is not None:
            return soft_cap(self.logits_soft_cap), {}
        if self.score_mod is None:
            return None, {}
        return modifier(g, check_modifier(self.score_mod))

    def _vectors(self, g: Graph, given: dict[str, Value]) -> dict[str, Value]:
        """Operands with one number a head."""
        made: dict[str, Value] = {}
        if self.core_attention_bias_type == "alibi":
            numbers = self.alibi_slopes
            if "slopes" in given:
                made["slopes"] = given["slopes"]
            else:
                made["slopes"] = constant_vector(
                    g, alibi_slopes(self.num_heads) if numbers is None else numbers
                )
        if self.softmax_type == "off-by-one":
            made["sink"] = constant_vector(g, [0.0] * self.num_heads)
        elif self.softmax_type == "learnable":
            if "softmax_offset" not in self._parameters:
                raise PlanError(
                    "Attention: softmax_type='learnable' was assigned after construction; the "
                    "parameter softmax_offset is made by the constructor"
                )
            made["sink"] = g.param(self.softmax_offset)
        return made

    # -- inputs

    def _unpack(self, g: Graph, given: dict[str, Value]) -> list[Value]:
        if not self.packed:
            return [given[name] for name in ("q", "k", "v")]
        heads = (self.num_heads, self.num_gqa_groups, self.num_gqa_groups)
        name = "qkv" if self.packed is True else "kv"
        x, own = given[name], heads if name == "qkv" else heads[1:]
        widths = self._widths(g, x, own)
        parts = tuple((h, width // h) for h, width in zip(own, widths, strict=True))
        made = unpack_heads(g, x, parts)
        return [*made] if name == "qkv" else [split_heads(g, given["q"], heads[0]), *made]

    def _widths(self, g: Graph, x: Value, heads: tuple[int, ...]) -> tuple[int, ...]:
        """The features of each part of a packed input."""
        shape, (d_qk, d_v) = g.spec(x).shape, _channels(self.kv_channels)
        shown = " + ".join(str(h) for h in heads)
        if d_qk is None or d_v is None:
            require(
                len(shape) > 0 and shape[-1] % sum(heads) == 0,
                f"input {show(shape)} does not hold {shown} heads of one size; give "
                "kv_channels=(d_qk, d_v) if they differ",
            )
            d_qk = d_v = shape[-1] // sum(heads)
        widths = tuple(h * d for h, d in zip(heads, (d_qk, d_qk, d_v)[-len(heads) :], strict=True))
        rank = 2 if "thd" in _layouts(self.qkv_format) else 3
        require(
            len(shape) == rank and shape[-1] == sum(widths),
            f"packed input must have {rank} dimensions and {sum(widths)} features ({shown} heads "
            f"of {d_qk} and, of v, {d_v}), got {show(shape)}",
        )
        return widths

    def _check_heads(self, g: Graph, q: Value, k: Value, v: Value) -> None:
        d_qk, d_v = _channels(self.kv_channels)
        layout, kv_layout = _layouts(self.qkv_format)
        expected = (
            ("q", q, layout, self.num_heads, d_qk),
            ("k", k, kv_layout, self.num_gqa_groups, d_qk),
            ("v", v, kv_layout, self.num_gqa_groups, d_v),
        )
        for name, value, at, heads, channels in expected:
            shape = g.spec(value).shape
            rank = 3 if at == "thd" else 4
            require(
                len(shape) == rank and shape[-2] == heads and channels in (None, shape[-1]),
                f"{name} must be {at} with {heads} heads"
                + (f" of {channels}" if channels else "")
                + f", its shape is {show(shape)}",
            )

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        heads = f"{self.num_heads} heads, {self.num_gqa_groups} groups, {self.attn_mask_type}"
        return heads + (f", packed={self.packed!r}" if self.packed else "")


def _channels(channels: int | tuple[int | None, ...] | None) -> tuple[int | None, ...]:
    """Features of a head of q and k, and of v; None where the inputs say."""
    pair = channels if isinstance(channels, tuple | list) else (channels, channels)
    if len(pair) != 2:
        raise PlanError(f"Attention: kv_channels must be d or (d_qk, d_v), got {channels!r}")
    return tuple(None if d is None else positive_int("Attention", "kv_channels", d) for d in pair)


def _slopes(slopes: Any, heads: int, bias_type: str) -> Any:
    """None, "input" or numbers, one a head."""
    if slopes is None:
        return None
    if bias_type != "alibi":
        raise PlanError("Attention: alibi_slopes need core_attention_bias_type='alibi'")
    if isinstance(slopes, str):
        if slopes != "input":
            raise PlanError(f"Attention: alibi_slopes must be numbers or 'input', got {slopes!r}")
        return slopes
    numbers = slopes.tolist() if isinstance(slopes, torch.Tensor) else list(slopes)
    made = tuple(number("Attention", "alibi_slopes", value) for value in numbers)
    if len(made) != heads:
        raise PlanError(f"Attention: {len(made)} alibi_slopes for {heads} heads")
    return made


def _layouts(qkv_format: Any) -> tuple[str, str]:
    """Of q and of k and v."""
    parts = str(qkv_format).split("_2")
    made = (parts[0], parts[-1])
    if len(parts) > 2 or any(layout not in LAYOUTS for layout in made):
        raise PlanError(
            f"Attention: qkv_format must be one of {', '.join(LAYOUTS)}, or two of them as in "
            f"'sbhd_2bshd', got {qkv_format!r}"
        )
    return made


def _listed(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return "one packed input"
    return f"{', '.join(names[:-1])} and {names[-1]}"


__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "Attention",
    "Band",
    "attention",
    "band_of",
    "mask_name",
]
