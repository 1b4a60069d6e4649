"""Scaled dot product attention: the primitive, its linear-memory reference, gradient and Op.

Formula (Vaswani et al., "Attention Is All You Need", 3.2.1, with the band of `te_ops.basic.band`):
s = scale * q k^T, hidden keys -inf; p = exp(s - lse), lse = log(sum exp s); o = p v. A row without
a key is 0, its lse +inf. Query head h reads key/value head h // (hq / hkv).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from te_ops.attrs import Dim
from te_ops.basic.arguments import FLOATS, flag, number, positive_int, show, wide
from te_ops.basic.band import Band
from te_ops.basic.heads import merge_heads, split, split_heads
from te_ops.basic.pointwise import cast
from te_ops.basic.rope import SEQUENCE_AXIS, Layout, RoPE
from te_ops.basic.tiles import grouped, tiles, ungrouped
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require
from te_ops.op import Op, Scalar

MaskType = Literal["no_mask", "causal", "causal_bottom_right"]

# -- operands by name

_MASK_WAY_OUT = "describe the mask by attn_mask_type and window_size"
_LENGTHS_WAY_OUT = "call attention on batches of sequences of equal length"
_CACHE_WAY_OUT = "pass the keys and values of all positions as contiguous tensors"
_DROPOUT_WAY_OUT = "leave dropout out of attention (a Dropout op may follow it)"
UNSERVED = {
    "bias": "add positions with RoPE instead",
    "slopes": "add positions with RoPE instead",
    "mask": _MASK_WAY_OUT,
    "q_lens": _LENGTHS_WAY_OUT,
    "kv_lens": _LENGTHS_WAY_OUT,
    "q_starts": _LENGTHS_WAY_OUT,
    "kv_starts": _LENGTHS_WAY_OUT,
    "page_table": _CACHE_WAY_OUT,
    "seed": _DROPOUT_WAY_OUT,
    "offset": _DROPOUT_WAY_OUT,
}
_FORWARD = frozenset({"q", "k", "v", "scale"})
_BACKWARD = _FORWARD | {"o", "lse", "do", "dlse"}
_QUANTIZABLE = frozenset({"q", "k", "v", "do"})


def _named(
    operands: tuple[str, ...], values: Sequence[Any], known: frozenset[str]
) -> dict[str, Any]:
    """The operands of a node by name.

    Raises:
        PlanError: a name is not served, or the number of values is wrong.
    """
    for name in operands:
        if name in UNSERVED:
            raise PlanError(
                f"attention with {name!r} is not served by this version; {UNSERVED[name]}"
            )
        if name not in known:
            raise PlanError(
                f"attention has no operand {name!r}; it knows {', '.join(sorted(known))}"
            )
    if len(operands) != len(values) or len(set(operands)) != len(operands):
        raise PlanError(
            f"attention: {len(values)} values for the operands {operands}; name each of them once"
        )
    missing = {"q", "k", "v"} - set(operands)
    if missing:
        raise PlanError(f"attention: the operands {operands} lack {', '.join(sorted(missing))}")
    return dict(zip(operands, values, strict=True))


def _roles(node: Node) -> tuple[tuple[str, str] | None, ...]:
    return tuple((name, "row") if name in _QUANTIZABLE else None for name in node.operands)


# -- shape rules


class _Sizes(NamedTuple):
    """batch, queries, keys, query heads, key/value heads, features of q and k, features of v."""

    b: int
    s_q: int
    s_kv: int
    h_q: int
    h_kv: int
    d_qk: int
    d_v: int


def _sizes(q: Any, k: Any, v: Any, layout: str) -> _Sizes:
    """Sizes of three specs, tensors or records, checked against each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(
            len(x.shape) == 4, f"attention: {name} must be {layout}, its shape is {show(x.shape)}"
        )
    axis = SEQUENCE_AXIS[layout]
    batches = [x.shape[1 - axis] for x in (q, k, v)]
    require(len(set(batches)) == 1, f"attention: q, k and v have batches {_ints(batches)}")
    h_q, h_kv, h_v = (x.shape[2] for x in (q, k, v))
    require(
        h_kv == h_v and k.shape[axis] == v.shape[axis],
        f"attention: k {show(k.shape)} and v {show(v.shape)} must have the same length and heads",
    )
    require(
        h_q >= 1 and h_kv >= 1 and h_q % h_kv == 0,
        f"attention: {int(h_q)} query heads cannot share {int(h_kv)} key/value heads evenly",
    )
    d_qk, d_v = q.shape[3], v.shape[3]
    require(
        d_qk == k.shape[3] and d_qk >= 1 and d_v >= 1,
        f"attention: heads of q have {int(d_qk)} features, of k {int(k.shape[3])}, of v "
        f"{int(d_v)}; those of q and k must agree, none may be 0",
    )
    return _Sizes(batches[0], q.shape[axis], k.shape[axis], h_q, h_kv, d_qk, d_v)


def _ints(values: Sequence[int]) -> str:
    return ", ".join(str(int(v)) for v in values)


def _attention_infer(
    *specs: Spec, operands: tuple[str, ...], layout: str, band: Band, scale: float | None, **_: Any
) -> tuple[Spec, Spec, Spec]:
    named = _named(operands, specs, _FORWARD)
    if layout not in SEQUENCE_AXIS:
        raise PlanError(
            f"attention in layout {layout!r} is not served by this version; use 'bshd' or 'sbhd'"
        )
    if (scale is None) != ("scale" in named):
        raise PlanError("attention: scale is either a number or the operand 'scale'")
    q, k, v = named["q"], named["k"], named["v"]
    n = _sizes(q, k, v, layout)
    dtypes = [x.dtype for x in (q, k, v)]
    require(
        len(set(dtypes)) == 1 and dtypes[0] in FLOATS,
        f"attention: q, k and v have dtypes {', '.join(map(str, dtypes))}; they must have one "
        "floating-point dtype: cast them, or run under torch.autocast",
    )
    statistic = wide(q.dtype)
    return (
        q.like((*q.shape[:-1], n.d_v)),
        Spec((n.b, n.h_q, n.s_q), statistic),
        Spec((n.h_q,), statistic),
    )


def _backward_infer(*specs: Spec, operands: tuple[str, ...], **_: Any) -> tuple[Spec, ...]:
    named = _named(operands, specs, _BACKWARD)
    return named["q"].like(), named["k"].like(), named["v"].like()


# -- the reference


def _prepared(
    named: dict[str, Any], layout: str, scale: float | None
) -> tuple[_Sizes, torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Sizes, scaled q [n, g, s_q, d], k and v [n, s_kv, d] in FP32 (FP64), and the scale."""
    q, k, v = named["q"], named["k"], named["v"]
    n, dtype = _sizes(q, k, v, layout), wide(q.dtype)
    factor = named["scale"] if scale is None else scale
    rows = grouped(q, n.h_kv, layout, dtype).mul_(factor)
    keys, values = (grouped(x, n.h_kv, layout, dtype).squeeze(1) for x in (k, v))
    return n, rows, keys, values, factor


@prim("attention", infer=_attention_infer, n_out=3, roles=_roles, selective=True)
def ATTENTION(
    *inputs: Any,
    operands: tuple[str, ...],
    layout: str,
    band: Band,
    scale: float | None,
    live: tuple[bool, ...] = (True, True, True),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(o, lse, max_logit) of q, k, v in `layout`, and "scale" (0-dim) unless `scale` is a number.

    o is like q, with v's features; lse [b, h, s] is the natural log in FP32, +inf for empty rows.
    Works in FP32 (FP64 for FP64) on blocks of query rows, so memory is linear in the lengths.
    max_logit is the largest score of each head over batch and rows, -inf if there is none.
    """
    named = _named(operands, inputs, _FORWARD)
    n, q, k, v, _ = _prepared(named, layout, scale)
    o = q.new_zeros((*q.shape[:3], n.d_v))
    lse = torch.full_like(q[..., 0], math.inf)
    peak = torch.full_like(lse, -math.inf) if live[2] else None
    for tile in tiles(band, q, k):
        scores = torch.bmm(tile.queries(q), k[tile.heads, tile.keys].transpose(1, 2))
        top = tile.hide(scores).amax(-1, keepdim=True)
        p = scores.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        tile.store(o, torch.bmm(p, v[tile.heads, tile.keys]).div_(total))
        tile.store(lse, top + total.log())
        if peak is not None:
            tile.store(peak, top)
    by_head = (n.b, n.h_q, n.s_q)
    return (
        ungrouped(o, n.h_kv, layout, named["q"].dtype),
        lse.view(by_head),
        None if peak is None else _largest(peak.view(by_head)),
    )


def _largest(peak: torch.Tensor) -> torch.Tensor:
    flat = peak.transpose(0, 1).flatten(1)
    return flat.amax(1) if flat.shape[1] else flat.new_full((flat.shape[0],), -math.inf)


@prim(
    "attention_backward",
    infer=_backward_infer,
    n_out=3,
    roles=_roles,
    differentiable=False,
    selective=True,
)
def ATTENTION_BACKWARD(
    *inputs: Any,
    operands: tuple[str, ...],
    layout: str,
    band: Band,
    scale: float | None,
    live: tuple[bool, ...] = (True, True, True),
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv from q, k, v, lse, with o and do, or dlse [b, h, s], or all of them.

    With p = exp(s - lse): dv = p^T do, ds = p * (do v^T - delta), delta = rowsum(do * o) - dlse,
    dq = scale * ds k, dk = scale * ds^T q. Empty rows take no part, whatever do and dlse hold.
    """
    named = _named(operands, inputs, _BACKWARD)
    n, q, k, v, factor = _prepared(named, layout, scale)
    lse = named["lse"].to(q.dtype).reshape(q.shape[:3])
    delta = torch.zeros_like(lse)
    if "do" in named:
        do, o = (grouped(named[name], n.h_kv, layout, q.dtype) for name in ("do", "o"))
        delta += (do * o).sum(-1)
    else:
        do = q.new_zeros((*q.shape[:3], n.d_v))
    if "dlse" in named:
        delta -= named["dlse"].reshape(delta.shape)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for tile in tiles(band, q, k):
        rows, grad = tile.queries(q), tile.queries(do)
        keys, values = k[tile.heads, tile.keys], v[tile.heads, tile.keys]
        below = tile.queries(lse).neg().unsqueeze(-1)
        p = tile.hide(torch.baddbmm(below, rows, keys.transpose(1, 2))).exp_()
        if live[2]:
            dv[tile.heads, tile.keys].add_(torch.bmm(p.transpose(1, 2), grad))
        if live[0] or live[1]:
            shift = tile.queries(delta).neg().unsqueeze(-1)
            ds = torch.baddbmm(shift, grad, values.transpose(1, 2)).mul_(p)
            tile.store(dq, torch.bmm(ds, keys))
            dk[tile.heads, tile.keys].add_(torch.bmm(ds.transpose(1, 2), rows))
    made = (dq.mul_(factor), dk.unsqueeze(1), dv.unsqueeze(1))
    return tuple(
        ungrouped(x, n.h_kv, layout, named[name].dtype) if wanted else None
        for name, x, wanted in zip(("q", "k", "v"), made, live, strict=True)
    )


@gradient(ATTENTION)
def _attention_gradient(
    g: Graph, node: Node, do: Value | None, dlse: Value | None, dmax: Value | None
) -> tuple[Value | None, ...]:
    if dmax is not None:
        raise PlanError(
            "attention: max_logit has no gradient; detach it before it reaches the loss"
        )
    named = dict(zip(node.operands, node.inputs, strict=True))
    more = {"o": Value(node.id, 0), "lse": Value(node.id, 1), "do": do, "dlse": dlse}
    if do is None:
        del more["o"]  # only read together with do
    named |= {name: value for name, value in more.items() if value is not None}
    grads = g.calls(
        ATTENTION_BACKWARD,
        *named.values(),
        operands=tuple(named),
        layout=node.layout,
        band=node.band,
        scale=node.scale,
    )
    by_name = dict(zip(("q", "k", "v"), grads, strict=True))
    return tuple(by_name.get(name) for name in node.operands)


@prim("attention_lse", infer=lambda lse: lse.like())
def PUBLIC_LSE(lse: torch.Tensor) -> torch.Tensor:
    """The LSE as users know it: -inf for empty rows, which are +inf inside."""
    return lse.masked_fill(lse == math.inf, -math.inf)


@gradient(PUBLIC_LSE)
def _public_lse_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value]:
    return (dy,)  # attention_backward leaves empty rows out


# -- emission


def _static(size: int) -> int | None:
    return None if isinstance(size, Dim) else size


def _one_size(a: int, b: int) -> bool:
    if isinstance(a, Dim) or isinstance(b, Dim):
        return isinstance(a, Dim) and isinstance(b, Dim) and a.source == b.source
    return a == b


def attention(
    g: Graph,
    q: Value,
    k: Value,
    v: Value,
    *,
    band: Band | None = None,
    scale: float | Scalar | None = None,
    layout: Layout = "bshd",
) -> tuple[Value, Value]:
    """Emit attention of q [b, s, hq, d], k and v [b, s, hkv, d]; returns o and lse [b, hq, s].

    The lse is +inf for empty rows. `scale` is 1/sqrt(d) if None. Values are cast to the autocast
    dtype, if there is one.

    Raises:
        ShapeError: shapes or dtypes of q, k and v do not fit.
    """
    q, k, v = (cast(g, x, g.autocast_dtype) for x in (q, k, v))
    names: tuple[str, ...] = ("q", "k", "v")
    values: tuple[Value, ...] = (q, k, v)
    if isinstance(scale, Scalar):
        names, values, scale = (*names, "scale"), (*values, g.scalar(scale)), None
    elif scale is None:
        scale = 1.0 / math.sqrt(max(1, g.spec(q).shape[-1]))
    n = _sizes(g.spec(q), g.spec(k), g.spec(v), layout)
    band = (band or Band()).normalized(
        _static(n.s_q), _static(n.s_kv), equal=_one_size(n.s_q, n.s_kv)
    )
    o, lse, _ = g.calls(ATTENTION, *values, operands=names, layout=layout, band=band, scale=scale)
    return o, lse


# -- the op

# mask type -> (right side, diagonal where bottom_right_diagonal is None), as Transformer Engine
_MASKS: dict[str, tuple[int | None, bool]] = {
    "no_mask": (None, True),
    "causal": (0, False),
    "causal_bottom_right": (0, True),
}
_UNSERVED_MASKS = {
    "padding": _LENGTHS_WAY_OUT,
    "padding_causal": _LENGTHS_WAY_OUT,
    "causal,padding": _LENGTHS_WAY_OUT,
    "padding,causal": _LENGTHS_WAY_OUT,
    "padding_causal_bottom_right": _LENGTHS_WAY_OUT,
    "arbitrary": _MASK_WAY_OUT,
}


def band_of(
    attn_mask_type: str,
    window_size: tuple[int, int] | None = None,
    bottom_right_diagonal: bool | None = None,
) -> Band:
    """The band that Transformer Engine's mask keywords mean; -1 opens a side of the window.

    Raises:
        PlanError: a mask type is unknown or not served, or keywords contradict each other.
    """
    if attn_mask_type in _UNSERVED_MASKS:
        raise PlanError(
            f"attn_mask_type={attn_mask_type!r} is not served by this version; "
            f"{_UNSERVED_MASKS[attn_mask_type]}"
        )
    if attn_mask_type not in _MASKS:
        raise PlanError(
            f"attn_mask_type must be one of {', '.join(_MASKS)}, got {attn_mask_type!r}"
        )
    right, bottom_right = _MASKS[attn_mask_type]
    left = None
    if window_size is not None:
        left, open_right = (_side(window_size, i) for i in (0, 1))
        if right is not None and open_right not in (None, 0):
            raise PlanError(
                f"window_size={window_size} sees keys after the query, which "
                f"attn_mask_type={attn_mask_type!r} hides; use ({window_size[0]}, 0)"
            )
        right = open_right if right is None else right
    if attn_mask_type == "causal_bottom_right" and bottom_right_diagonal is False:
        raise PlanError("causal_bottom_right contradicts bottom_right_diagonal=False; use 'causal'")
    if bottom_right_diagonal is not None:
        bottom_right = bottom_right_diagonal
    return Band(left, right, "bottom_right" if bottom_right else "top_left")


def _side(window: tuple[int, int], i: int) -> int | None:
    fits = isinstance(window, tuple | list) and len(window) == 2
    if not fits or not all(type(side) is int and side >= -1 for side in window):
        raise PlanError(
            f"window_size must be two ints, each -1 (open) or at least 0, got {window!r}"
        )
    return None if window[i] == -1 else window[i]


class Attention(Op):
    """Scaled dot product attention, with grouped heads, causal masks and windows.

    Takes q [b, s, num_heads, d], k and v [b, s, num_gqa_groups, d], returns [b, s, num_heads, d_v].
    With `packed=True` it takes one [b, s, (num_heads + 2 num_gqa_groups) d], laid out [Q | K | V]
    as a Linear makes it, and returns [b, s, num_heads d_v], without copies in between. Computes in
    the autocast dtype, else in that of its inputs.

    Args:
        num_heads: of q.
        num_gqa_groups: heads of k and v (`num_heads` if None); query head h reads head
            h // (num_heads / num_gqa_groups).
        kv_channels: features of a head, or (of q and k, of v); if None the inputs say.
        attn_mask_type: "causal" (top-left diagonal), "causal_bottom_right" or "no_mask".
        window_size: (left, right) keys that a query sees beside its own, inclusive; -1 is open.
        bottom_right_diagonal: where the diagonal ends if the lengths differ; None is False for
            "causal" and True for the others.
        softmax_scale: a number or a `te.scalar`; 1/sqrt(d) if None.
        qkv_format: "bshd", or "sbhd" for [s, b, h, d].
        packed: one [Q | K | V] input, see above.
        rotary: a `RoPE` that turns q and k first.
        return_lse: also return log(sum(exp(scores))) [b, h, s] in FP32; -inf for empty rows.

    Raises:
        PlanError: an option is out of range, contradicts another or is not served by this version.
        ShapeError: at planning, inputs do not fit.
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
        qkv_format: Layout = "bshd",
        packed: bool = False,
        rotary: RoPE | None = None,
        return_lse: bool = False,
    ) -> None:
        super().__init__()
        name = "Attention"
        self.num_heads = positive_int(name, "num_heads", num_heads)
        groups = num_heads if num_gqa_groups is None else num_gqa_groups
        self.num_gqa_groups = positive_int(name, "num_gqa_groups", groups)
        if self.num_heads % self.num_gqa_groups:
            raise PlanError(
                f"Attention: num_heads {num_heads} is not a multiple of num_gqa_groups {groups}"
            )
        pair = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.kv_channels = tuple(
            None if d is None else positive_int(name, "kv_channels", d) for d in pair
        )
        if len(self.kv_channels) != 2:
            raise PlanError(f"Attention: kv_channels must be d or (d_qk, d_v), got {kv_channels!r}")
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        band_of(attn_mask_type, window_size, bottom_right_diagonal)  # refuses wrong values now
        if softmax_scale is not None and not isinstance(softmax_scale, Scalar):
            softmax_scale = number(name, "softmax_scale", softmax_scale)
        self.softmax_scale = softmax_scale
        if qkv_format not in SEQUENCE_AXIS:
            raise PlanError(
                f"Attention: qkv_format={qkv_format!r} is not served by this version; use "
                "'bshd' or 'sbhd'"
            )
        self.qkv_format: Layout = qkv_format
        self.packed = flag(name, "packed", packed)
        if rotary is not None and rotary.qkv_format != qkv_format:
            raise PlanError(
                f"Attention: rotary has qkv_format={rotary.qkv_format!r}, the attention has "
                f"{qkv_format!r}"
            )
        self.rotary = rotary
        self.return_lse = flag(name, "return_lse", return_lse)
        self.num_inputs = 1 if packed else 3
        self.feature_dims = 1 if packed else 2
        self.num_extra_outputs = 1 if return_lse else 0

    @property
    def band(self) -> Band:
        """Which keys a query sees, from the attributes as they are now."""
        return band_of(self.attn_mask_type, self.window_size, self.bottom_right_diagonal)

    def emit(self, g: Graph, *xs: Value) -> Value | tuple[Value, Value]:
        """[split + split_heads] + [rope] + attention + [merge_heads], and the lse if returned."""
        if len(xs) != self.num_inputs:
            takes = "one packed input" if self.packed else "q, k and v"
            raise ShapeError(f"Attention takes {takes}, got {len(xs)} inputs")
        q, k, v = self._unpack(g, xs[0]) if self.packed else xs
        self._check(g, q, k, v)
        if self.rotary is not None:
            q, k = self.rotary.emit(g, q), self.rotary.emit(g, k)
        o, lse = attention(
            g, q, k, v, band=self.band, scale=self.softmax_scale, layout=self.qkv_format
        )
        if self.packed:
            o = merge_heads(g, o)
        return (o, g.call(PUBLIC_LSE, lse)) if self.return_lse else o

    def _unpack(self, g: Graph, x: Value) -> list[Value]:
        shape, groups = g.spec(x).shape, self.num_gqa_groups
        d_qk, d_v = self.kv_channels
        if d_qk is None or d_v is None:
            count = self.num_heads + 2 * groups
            require(
                len(shape) > 0 and shape[-1] % count == 0,
                f"input {show(shape)} does not hold {self.num_heads} + 2 x {groups} heads of one "
                "size; give kv_channels=(d_qk, d_v) if they differ",
            )
            d_qk = d_v = shape[-1] // count
        sizes = (self.num_heads * d_qk, groups * d_qk, groups * d_v)
        require(
            len(shape) == 3 and shape[-1] == sum(sizes),
            f"packed input must have 3 dimensions and {sum(sizes)} features "
            f"({self.num_heads} and {groups} heads of {d_qk}, {groups} of {d_v}), got "
            f"{show(shape)}",
        )
        heads = (self.num_heads, groups, groups)
        parts = split(g, x, sizes)
        return [split_heads(g, part, h) for part, h in zip(parts, heads, strict=True)]

    def _check(self, g: Graph, q: Value, k: Value, v: Value) -> None:
        d_qk, d_v = self.kv_channels
        expected = (
            ("q", q, self.num_heads, d_qk),
            ("k", k, self.num_gqa_groups, d_qk),
            ("v", v, self.num_gqa_groups, d_v),
        )
        for name, value, heads, channels in expected:
            shape = g.spec(value).shape
            require(
                len(shape) == 4 and shape[2] == heads and channels in (None, shape[3]),
                f"{name} must be {self.qkv_format} with {heads} heads"
                + (f" of {channels}" if channels else "")
                + f", its shape is {show(shape)}",
            )

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        heads = f"{self.num_heads} heads, {self.num_gqa_groups} groups, {self.attn_mask_type}"
        return heads + (", packed" if self.packed else "")


__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "Attention",
    "Band",
    "attention",
    "band_of",
]
