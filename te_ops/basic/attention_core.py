"""Scaled dot product attention: the primitive, its linear-memory reference and its gradient.

Formula (Vaswani et al., "Attention Is All You Need", 3.2.1, with what `Scores` adds to the scores):
s = scale * q k^T, hidden keys -inf; p = exp(s - lse), lse = log(sum exp s); o = p v. A row without
a key is 0, its lse +inf. Query head h reads key/value head h // (hq / hkv).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_ops.attrs import Dim
from te_ops.basic.arguments import wide
from te_ops.basic.attention_form import (
    QUANTIZABLE,
    Form,
    Sizes,
    entries,
    infer,
    learned,
    named,
    sizes,
)
from te_ops.basic.attention_scores import Scores
from te_ops.basic.band import Band, Diagonal
from te_ops.basic.pointwise import cast
from te_ops.basic.score import Score
from te_ops.basic.tiles import gathered, grouped, tiles, ungrouped
from te_ops.errors import PlanError
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim
from te_ops.op import Scalar


def attention_roles(node: Node) -> tuple[tuple[str, str] | None, ...]:
    """The operands that a recipe may quantize."""
    return tuple((name, "row") if name in QUANTIZABLE else None for name in node.operands)


# -- shape rules


def attention_infer(*specs: Spec, **form: Any) -> tuple[Spec, Spec, Spec]:
    """Specs of o, lse and max_logit."""
    made = Form(**form)
    by_name, n = infer(made, specs)
    q = by_name["q"]
    statistic = wide(q.dtype)
    by_row = (n.h_q, n.s_q) if made.layout == "thd" else (n.b, n.h_q, n.s_q)
    return (
        q.like((*q.shape[:-1], n.d_v)),
        Spec(by_row, statistic),
        Spec((n.h_q,), statistic),
    )


def _backward_infer(*specs: Spec, **form: Any) -> tuple[Spec, ...]:
    made = Form(**form)
    by_name = named(made, specs, backward=True)
    return tuple(by_name[name].like() for name in _graded(made))


def _graded(form: Form) -> tuple[str, ...]:
    """The operands whose gradients attention_backward returns."""
    return ("q", "k", "v", *learned(form.operands))


# -- the reference


class Problem:
    """What forward and backward share: operands by name, grouped heads, and the walk."""

    def __init__(self, form: Form, inputs: tuple[Any, ...], *, backward: bool = False) -> None:
        self.form = form
        self.by_name = named(form, inputs, backward=backward)
        self.n: Sizes = sizes(form, self.by_name)
        self.dtype = wide(self.by_name["q"].dtype)
        self.factor = self.by_name["scale"] if form.scale is None else form.scale
        # Scaled q [n, g, s_q, d], k and v [n, s_kv, d].
        self.q = grouped(self.by_name["q"], self.n.h_kv, form.layout, self.dtype).mul_(self.factor)
        apart = self._apart()
        self.entries = entries(form, self.by_name, self.n, apart=apart)
        self.k, self.v = self._keys("k"), self._keys("v")

    def _apart(self) -> bool:
        special = {"mask", "pre_bias", "bias", "slopes"} & set(self.by_name)
        return bool(special) or self.form.score is not None or self.form.dropout > 0

    def _keys(self, name: str) -> torch.Tensor:
        x = self.by_name[name]
        if self.form.kv_layout == "paged":
            ends = [sum(entry.kv) for entry in self.entries]
            return gathered(x, self.by_name["page_table"], ends, self.dtype)
        return grouped(x, self.n.h_kv, self.form.kv_layout, self.dtype).squeeze(1)

    def scores(self, wanted: tuple[str, ...] = ()) -> Scores:
        """What turns products into scores."""
        return Scores(
            self.form, self.by_name, self.n, factor=self.factor, like=self.q, wanted=wanted
        )

    def tiles(self) -> Any:
        """The walk over all scores that the structure does not hide."""
        group = self.n.h_q // self.n.h_kv
        return tiles(self.form.band, self.entries, group, self.q)

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, g, s_q] -> [b, h, s_q], or [h, tokens]."""
        n = self.n
        return x.view(n.h_q, n.s_q) if self.form.layout == "thd" else x.view(n.b, n.h_q, n.s_q)

    def rows(self, name: str) -> torch.Tensor:
        """o or its gradient, grouped."""
        return grouped(self.by_name[name], self.n.h_kv, self.form.layout, self.dtype)

    def back(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """A grouped result in layout and dtype of an operand."""
        layout = self.form.layout if name == "q" else self.form.kv_layout
        return ungrouped(x, self.n.h_kv, layout, self.by_name[name].dtype)


@prim("attention", infer=attention_infer, n_out=3, roles=attention_roles, selective=True)
def ATTENTION(
    *inputs: Any, live: tuple[bool, ...] = (True, True, True), **form: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(o, lse, max_logit) of operands and attributes as `Form` names them.

    o is like q, with v's features; lse [b, h, s] ([h, tokens] for "thd") is the natural log in FP32,
    +inf for empty rows. Rows beyond a length or between sequences are empty, and never read. Works
    in FP32 (FP64 for FP64) on blocks of query rows, so memory is linear in the lengths. max_logit
    is the largest score of each head over batch and rows, -inf if there is none.
    """
    problem = Problem(Form(**form), inputs)
    o, lse, largest = attend(problem, peak=live[2])
    layout, dtype = problem.form.layout, problem.by_name["q"].dtype
    return ungrouped(o, problem.n.h_kv, layout, dtype), lse, largest


def attend(
    problem: Problem, *, peak: bool, rounded: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Grouped o, lse and, with `peak`, max_logit, all wide.

    `rounded` is what happens to exp(s - largest) before it is multiplied with v; the sum that divides has it exact.
    """
    n, q, k, v = problem.n, problem.q, problem.k, problem.v
    score = problem.scores()
    o = q.new_zeros((*q.shape[:3], n.d_v))
    lse = torch.full_like(q[..., 0], math.inf)
    peaks = torch.full_like(lse, -math.inf) if peak else None
    for tile in problem.tiles():
        scores, _ = score(tile, tile.queries(q), tile.values(k))
        top = scores.amax(-1, keepdim=True)
        if peaks is not None:
            tile.store(peaks, top)
        if score.may_hide_rows:
            top = top.masked_fill(top == -math.inf, 0.0)
        p = scores.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        p = p if rounded is None else rounded(p)
        if problem.form.dropout:
            p = p.mul_(score.keep(tile)).mul_(score.rescale)
        out = torch.bmm(p, tile.values(v))
        logarithm = top + total.log()
        if score.may_hide_rows:
            empty = total == 0
            total, logarithm = total.masked_fill(empty, 1.0), logarithm.masked_fill(empty, math.inf)
        tile.store(o, out.div_(total))
        tile.store(lse, logarithm)
    if "sink" in problem.by_name:
        o, lse = add_sink(o, lse, problem.by_name["sink"])
    largest = None if peaks is None else _largest(problem.by_head(peaks))
    return o, problem.by_head(lse), largest


def _largest(peak: torch.Tensor) -> torch.Tensor:
    flat = peak if peak.dim() == 2 else peak.transpose(0, 1).flatten(1)
    return flat.amax(1) if flat.shape[1] else flat.new_full((flat.shape[0],), -math.inf)


def add_sink(
    o: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with one more key of score `sink` [h] and value 0, from o and lse without it.

    o * sigmoid(lse - sink), logaddexp(lse, sink) of o [n, g, s, d] and lse [n, g, s], whose heads
    n * g are those of `sink` repeated; rows without a key stay 0 and +inf. The gradient of q, k and
    v is that of attention without a sink, from these o and lse.
    """
    n, g, s = lse.shape
    wide_sink = sink.to(lse).view(1, sink.shape[0] // g, g, 1)
    split = lse.view(n // wide_sink.shape[1], wide_sink.shape[1], g, s)
    weight = torch.sigmoid(split - wide_sink).view(n, g, s, 1)
    joined = torch.logaddexp(split, wide_sink.expand_as(split)).view(n, g, s)
    return o * weight, joined.masked_fill(lse == math.inf, math.inf)


@prim(
    "attention_backward",
    infer=_backward_infer,
    n_out=3,
    roles=attention_roles,
    differentiable=False,
    selective=True,
)
def ATTENTION_BACKWARD(
    *inputs: Any, live: tuple[bool, ...] | None = None, **form: Any
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv, and the gradients of bias, slopes and captured values, in operand order.

    Takes the operands of `ATTENTION` without "sink", and lse, with o and do, or dlse, or all of
    them. With p = exp(s - lse): dv = p^T do, ds = p * (do v^T - delta), delta = rowsum(do * o) -
    dlse, dq = scale * ds k, dk = scale * ds^T q; dropout scales p in dv and do v^T in ds. Empty
    rows take no part, whatever do and dlse hold.
    """
    problem = Problem(Form(**form), inputs, backward=True)
    names = _graded(problem.form)
    asked = {
        name for name, wanted in zip(names, live or (True,) * len(names), strict=True) if wanted
    }
    q, k, v = problem.q, problem.k, problem.v
    score = problem.scores(tuple(name for name in names[3:] if name in asked))
    lse = problem.by_name["lse"].to(q.dtype).reshape(q.shape[:3])
    delta, do = _delta(problem, lse)
    empty = lse == math.inf
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for tile in problem.tiles():
        rows, grad = tile.queries(q), tile.queries(do)
        keys = tile.values(k)
        scores, raw = score(tile, rows, keys)
        p = scores.sub_(tile.queries(lse).unsqueeze(-1)).exp_()
        keep = score.keep(tile) if problem.form.dropout else None
        if "v" in asked:
            kept = p if keep is None else p * keep * score.rescale
            tile.values(dv).add_(torch.bmm(kept.transpose(1, 2), grad))
        if asked == {"v"}:
            continue
        ds = torch.bmm(grad, tile.values(v).transpose(1, 2))
        if keep is not None:
            ds.mul_(keep).mul_(score.rescale)
        ds.sub_(tile.queries(delta).unsqueeze(-1)).mul_(p)
        if score.may_hide_rows:
            ds.masked_fill_(tile.queries(empty).unsqueeze(-1), 0.0)
        ds = score.backward(tile, ds, raw)
        tile.store(dq, torch.bmm(ds, keys))
        tile.values(dk).add_(torch.bmm(ds.transpose(1, 2), rows))
    made = {"q": dq.mul_(problem.factor), "k": dk.unsqueeze(1), "v": dv.unsqueeze(1)}
    by_name = {name: problem.back(x, name) for name, x in made.items() if name in asked}
    by_name |= {name: dx.to(problem.by_name[name].dtype) for name, dx in score.grads.items()}
    return tuple(by_name.get(name) for name in names)


def _delta(problem: Problem, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rowsum(do * o) - dlse, and do, grouped."""
    delta = torch.zeros_like(lse)
    if "do" in problem.by_name:
        do = problem.rows("do")
        delta += (do * problem.rows("o")).sum(-1)
    else:
        do = lse.new_zeros((*lse.shape, problem.n.d_v))
    if "dlse" in problem.by_name:
        delta -= problem.by_name["dlse"].reshape(delta.shape)
    return delta, do


def _sink_infer(sink: Spec, *_: Spec, **__: Any) -> Spec:
    return sink.like()


@prim("attention_sink_backward", infer=_sink_infer, differentiable=False)
def ATTENTION_SINK_BACKWARD(
    sink: torch.Tensor, lse: torch.Tensor, *grads: torch.Tensor, given: tuple[str, ...], layout: str
) -> torch.Tensor:
    """dsink [h] = -sum exp(sink - lse) * (rowsum(do * o) - dlse), of lse and o with the sink.

    `grads` are those of "o", "do" and "dlse" that `given` names. Empty rows take no part.
    """
    dtype = wide(lse.dtype)
    by_name = dict(zip(given, grads, strict=True))
    delta = torch.zeros_like(lse, dtype=dtype)
    if "do" in by_name:
        product = (by_name["do"].to(dtype) * by_name["o"].to(dtype)).sum(-1)
        if layout == "thd":
            delta += product.t()
        else:
            delta += product.transpose(1, 2) if layout == "bshd" else product.permute(1, 2, 0)
    if "dlse" in by_name:
        delta -= by_name["dlse"].to(dtype)
    weight = torch.exp(sink.to(dtype).view(-1, 1) - lse.to(dtype))
    made = (weight * delta).masked_fill(lse == math.inf, 0.0)
    by_head = made if layout == "thd" else made.transpose(0, 1).flatten(1)
    return -by_head.sum(1).to(sink.dtype)


@gradient(ATTENTION)
def _attention_gradient(
    g: Graph, node: Node, do: Value | None, dlse: Value | None, dmax: Value | None
) -> tuple[Value | None, ...]:
    if dmax is not None:
        raise PlanError(
            "attention: max_logit has no gradient; detach it before it reaches the loss"
        )
    by_name = dict(zip(node.operands, node.inputs, strict=True))
    if node.kv_layout == "paged":
        raise PlanError("attention: a paged cache is for inference; run under torch.no_grad()")
    sink = by_name.pop("sink", None)
    more = {"o": Value(node.id, 0), "lse": Value(node.id, 1), "do": do, "dlse": dlse}
    if do is None:
        del more["o"]  # only read together with do
    given = {name: value for name, value in more.items() if value is not None}
    by_name |= given
    attrs = {name: value for name, value in node.attrs.items() if name != "operands"}
    grads = g.calls(ATTENTION_BACKWARD, *by_name.values(), operands=tuple(by_name), **attrs)
    made = dict(zip(("q", "k", "v", *learned(tuple(by_name))), grads, strict=True))
    if sink is not None:
        lse = given.pop("lse")
        made["sink"] = g.call(
            ATTENTION_SINK_BACKWARD,
            sink,
            lse,
            *given.values(),
            given=tuple(given),
            layout=node.layout,
        )
    return tuple(made.get(name) for name in node.operands)


@prim("attention_lse", infer=lambda lse: lse.like())
def PUBLIC_LSE(lse: torch.Tensor) -> torch.Tensor:
    """The LSE as users know it: -inf for empty rows, which are +inf inside."""
    return lse.masked_fill(lse == math.inf, -math.inf)


@gradient(PUBLIC_LSE)
def _public_lse_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value]:
    return (dy,)  # attention_backward leaves empty rows out


@prim("attention_max_logit", infer=lambda top: top.like(), differentiable=False)
def PUBLIC_MAX_LOGIT(top: torch.Tensor) -> torch.Tensor:
    """The largest scores as users get them: a statistic without a gradient."""
    return top.clone()


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
    operands: Mapping[str, Value | None] | None = None,
    band: Band | None = None,
    scale: float | Scalar | None = None,
    layout: str = "bshd",
    kv_layout: str | None = None,
    score: Score | None = None,
    dropout: float = 0.0,
    slope_diagonal: Diagonal = "top_left",
) -> tuple[Value, Value, Value]:
    """Emit attention of q [b, s, hq, d], k and v [b, s, hkv, d]: o, lse [b, hq, s], max_logit [hq].

    The lse is +inf for empty rows. `scale` is 1/sqrt(d) if None. q, k and v are cast to the autocast
    dtype, if there is one. `operands` holds further ones by name (None: left out): q_starts, q_lens,
    kv_starts, kv_lens (int [sequences]), page_table, mask (bool, True = masked out), pre_bias and
    bias, which broadcast to [b, h, s_q, s_kv], slopes of ALiBi and sink, and what `score` captures.
    Dropout draws the call's seed, unless "seed" is among them.

    Raises:
        ShapeError: shapes or dtypes do not fit.
        PlanError: operands do not.
    """
    named_values = {
        name: cast(g, x, g.autocast_dtype) for name, x in (("q", q), ("k", k), ("v", v))
    }
    named_values |= {name: x for name, x in (operands or {}).items() if x is not None}
    if isinstance(scale, Scalar):
        named_values["scale"], scale = g.scalar(scale), None
    elif scale is None:
        scale = 1.0 / math.sqrt(max(1, g.spec(q).shape[-1]))
    if dropout and "seed" not in named_values:
        named_values["seed"] = g.seed()
    form = Form(
        operands=tuple(named_values),
        layout=layout,
        kv_layout=kv_layout or layout,
        band=band or Band(),
        scale=scale,
        score=score,
        dropout=float(dropout),
        stream=g.stream() if dropout else 0,
        slope_diagonal=slope_diagonal,
    )
    _, n = infer(form, [g.spec(x) for x in named_values.values()])
    attrs = {field: getattr(form, field) for field in Form.__dataclass_fields__}
    equal = _one_length(named_values, n)
    attrs["band"] = form.band.normalized(_static(n.s_q), _static(n.s_kv), equal=equal)
    if equal or "slopes" not in named_values:
        attrs["slope_diagonal"] = "top_left"
    o, lse, max_logit = g.calls(ATTENTION, *named_values.values(), **attrs)
    return o, lse, max_logit


def _one_length(values: Mapping[str, Value], n: Sizes) -> bool:
    """Whether each sequence has as many queries as keys, so that both diagonals are one."""
    q_lens, kv_lens = values.get("q_lens"), values.get("kv_lens")
    if q_lens is not None or kv_lens is not None:
        return q_lens == kv_lens
    return _one_size(n.s_q, n.s_kv)


__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "ATTENTION_SINK_BACKWARD",
    "PUBLIC_LSE",
    "PUBLIC_MAX_LOGIT",
    "Problem",
    "add_sink",
    "attend",
    "attention_infer",
    "attention_roles",
    "attention",
]
