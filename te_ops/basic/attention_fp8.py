"""Attention over per-tensor E4M3 records, whose output is a record too: the forward of `fp8_dpa`.

What tensor cores do with FP8 operands, besides the products: exp(s - largest score of the row) is rounded to E4M3
before it meets v, under the constant scale 448, since it is 1 at most; the output is a mean of v, so v's own scale
holds for it. Nothing else needs a scale, and none has a history. Backward is `attention_backward` over the dense
numbers that the records hold: p = exp(s - lse) then sums to 1.
"""

from __future__ import annotations

from typing import Any

import torch

from te_ops.basic.attention_core import Problem, attend, attention_infer, attention_roles
from te_ops.basic.attention_form import Form, Sizes, named
from te_ops.basic.kvcache import KV_APPEND, KV_APPEND_PAGES
from te_ops.basic.tiles import ungrouped
from te_ops.graph import Graph, Kind, Node, Spec, prim, require
from te_ops.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, Record, Usage
from te_ops.quantizers.codec import encode_fp8

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
OUTPUT = Float8CurrentScalingQuantizer(E4M3)
"""How the output's bytes are to be read: one scale for the tensor."""


def is_per_tensor(spec: Spec) -> bool:
    """Whether a value is an E4M3 record with one scale, along rows."""
    made = spec.kind.quantizer
    return (
        isinstance(made, Float8Quantizer | Float8CurrentScalingQuantizer)
        and made.dtype is E4M3
        and spec.kind.usage is Usage.ROW
    )


def over_a_cache(g: Graph, node: Node) -> bool:
    """Whether an attention node reads the keys of a `KVCache`.

    These stay dense: all of them would be quantized anew with every token.
    """
    place: int = node.operands.index("k")
    return g.node(node.inputs[place]).prim in (KV_APPEND, KV_APPEND_PAGES)


def _infer(*specs: Spec, **form: Any) -> tuple[Spec, Spec, Spec]:
    by_name = named(Form(**form), specs)
    for name in ("q", "k", "v"):
        require(
            is_per_tensor(by_name[name]),
            f"attention_fp8: {name} must be an E4M3 record with one scale, along rows",
        )
    o, lse, top = attention_infer(*specs, **form)
    return Spec(o.shape, o.dtype, Kind("record", OUTPUT, Usage.ROW)), lse, top


@prim(
    "attention_fp8",
    infer=_infer,
    n_out=3,
    roles=attention_roles,
    differentiable=False,
    selective=True,
)
def ATTENTION_FP8(
    *inputs: Any, live: tuple[bool, ...] = (True, True, True), **form: Any
) -> tuple[Record, torch.Tensor, torch.Tensor | None]:
    """(o, lse, max_logit) as of `ATTENTION`, of E4M3 records q, k and v; o is a record with the scale of v.

    Dropout makes probabilities larger by 1 / (1 - dropout), so o's scale is smaller by that.
    """
    problem = Problem(Form(**form), inputs)
    o, lse, largest = attend(problem, peak=live[2], rounded=_rounded)
    q, v = problem.by_name["q"], problem.by_name["v"]
    scale_inv = output_scale_inv(v.scale_inv, problem.form.dropout)
    wide = ungrouped(o, problem.n.h_kv, problem.form.layout, torch.float32)
    return output(encode_fp8(wide.div_(scale_inv), E4M3), scale_inv, q.dtype), lse, largest


def _rounded(p: torch.Tensor) -> torch.Tensor:
    return encode_fp8(p.float() * LARGEST, E4M3).to(p.dtype).div_(LARGEST)


def output_scale_inv(of_values: torch.Tensor, dropout: float) -> torch.Tensor:
    """scale_inv of the output, from that of v."""
    return of_values / (1.0 - dropout) if 0.0 < dropout < 1.0 else of_values


def output(data: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> Record:
    """The record of an output: `dtype` is what q, k and v had before they were quantized."""
    return Record(data, scale_inv, None, OUTPUT, Usage.ROW, tuple(data.shape), dtype)


def _merge_infer(x: Spec) -> Spec:
    return Spec((*x.shape[:-2], x.shape[-2] * x.shape[-1]), x.dtype, x.kind)


@prim("merge_record_heads", infer=_merge_infer, nature="view", differentiable=False)
def MERGE_RECORD_HEADS(record: Record) -> Record:
    """[..., h, d] -> [..., h * d] of a record whose bytes are in the tensor's own order."""
    made = record.reshaped((*record.shape[:-2], record.shape[-2] * record.shape[-1]))
    assert made is not None, "one scale for the tensor: any shape will do"
    return made


def slow_note(n: Sizes) -> str | None:
    """Why FP8 is expected to be no faster than 16 bits at these sizes, or None.

    Measured on an H200: what quantizing costs against what the products save (docs/design/0022).
    """
    s, d = max(int(n.s_q), int(n.s_kv)), int(n.d_qk)
    if d <= 64:
        return f"heads of {d} features: the exponentials, not the products, take the time"
    if s <= 2048:
        return (
            f"sequences of {s}: quantizing costs what the products save; they pay from about 4096"
        )
    if s <= 4096 and n.h_q == n.h_kv:
        return f"sequences of {s} with a key head for each query head: quantizing costs what the products save"
    return None


__all__ = [
    "ATTENTION_FP8",
    "E4M3",
    "LARGEST",
    "MERGE_RECORD_HEADS",
    "OUTPUT",
    "is_per_tensor",
    "output",
    "output_scale_inv",
    "over_a_cache",
    "slow_note",
]
