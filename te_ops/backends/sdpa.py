"""Attention through torch's own fused kernels: the plain cases, wherever torch has them.

The kernels are those of `torch.nn.functional.scaled_dot_product_attention`, called below its dispatch, which returns no
lse: cuDNN's, and FlashAttention's. Dropout is refused: torch draws the mask from its own generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_ops.basic.attention_core import ATTENTION_BACKWARD
from te_ops.basic.attention_form import Form, Sizes, named, sizes
from te_ops.graph import Spec
from te_ops.registry import REGISTRY, ArchRange, Call, Kernel, Launch

HALF = (torch.bfloat16, torch.float16)
_PLAIN = frozenset({"q", "k", "v", "o", "lse", "do"})


@dataclass(frozen=True)
class _Family:
    """One of torch's kernels: its operators, and what it takes beyond what all take."""

    forward: str
    backward: str
    arch: str
    priority: int
    features: int  # the most of a head
    own_values: bool  # v may have other features than q and k
    off_square: bool  # causal with other numbers of queries than of keys
    single: bool  # one query by one key (cuDNN 9.19 refuses its backward when it is called)


CUDNN = _Family(
    forward="_scaled_dot_product_cudnn_attention",
    backward="_scaled_dot_product_cudnn_attention_backward",
    arch="sm_80+",
    priority=12,
    features=128,
    own_values=True,
    off_square=True,
    single=False,
)
FLASH = _Family(
    forward="_scaled_dot_product_flash_attention",
    backward="_scaled_dot_product_flash_attention_backward",
    arch="sm_80+",
    priority=10,
    features=256,
    own_values=False,
    off_square=False,
    single=True,
)


def _form(call: Call) -> tuple[Form, dict[str, Spec]]:
    node = call.node
    form = Form(**node.attrs)
    backward = node.prim is ATTENTION_BACKWARD
    return form, named(form, [call.spec(v) for v in node.inputs], backward=backward)


def refuse(family: _Family, call: Call) -> str | None:
    """None if a family runs the call, else why not."""
    form, specs = _form(call)
    return _refuse_form(call, form, specs) or _refuse_sizes(family, form, sizes(form, specs))


def _refuse_form(call: Call, form: Form, specs: dict[str, Spec]) -> str | None:
    backward = call.node.prim is ATTENTION_BACKWARD
    extra = set(form.operands) - _PLAIN
    if any(x.kind.name != "dense" for x in specs.values()) or specs["q"].dtype not in HALF:
        return "q, k and v must be dense BF16 or FP16 tensors"
    if form.score is not None or form.dropout or "thd" in (form.layout, form.kv_layout):
        return "torch's kernels are given no score modifier, no dropout and no packed tokens"
    if form.scale is not None and form.scale <= 0:
        return "torch's kernels take the largest score of a row before the scale, which has to be positive"
    if extra:
        return f"torch's kernels are given no {', '.join(sorted(extra))}"
    if not backward and call.live(call.node)[2]:
        return "torch's kernels return no largest scores"
    return None


def _refuse_sizes(family: _Family, form: Form, n: Sizes) -> str | None:
    band = form.band.normalized(n.s_q, n.s_kv, equal=n.s_q == n.s_kv)
    most = max(n.d_qk, n.d_v)
    if 0 in n:
        return "nothing of size zero is given to the library"
    if n.s_q == n.s_kv == 1 and not family.single:
        return "this kernel has no backward of one query by one key"
    if n.d_qk % 8 or n.d_v % 8 or most > family.features:
        return f"the features of a head must divide by 8, and be {family.features} at most"
    if n.d_qk != n.d_v and not family.own_values:
        return "this kernel needs as many features of v as of q and k"
    if (band.left, band.right) not in ((None, None), (None, 0)) or band.diagonal != "top_left":
        return "torch's kernels know no mask but the causal one that starts at the first key"
    if band.right == 0 and n.s_q != n.s_kv and not family.off_square:
        return "this kernel ends a causal mask at the last key, where the numbers of queries and keys differ"
    return None


_ORDERS = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}
_BACK = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}


class _Launch:
    """An attention call through a family's operators; sizes that it does not take go to the reference."""

    def __init__(self, family: _Family, call: Call) -> None:
        node = call.node
        self.family, self.backward = family, node.prim is ATTENTION_BACKWARD
        self.form, _ = _form(call)
        self.names = self.form.operands
        self.places = tuple(call.reads.index(v) for v in node.inputs)
        self.writes = tuple(v.index for v in call.writes)
        self.reference: Callable[..., Any] = partial(
            node.prim.reference, live=call.live(node), **node.attrs
        )
        self.empty = torch.empty(0, dtype=torch.int64, device=call.device)

    def __call__(self, *reads: Any) -> Any:
        """Over the values that the call reads, each of which comes once."""
        xs = [reads[i] for i in self.places]
        by_name = dict(zip(self.names, xs, strict=True))
        n = sizes(self.form, by_name)
        if _refuse_sizes(self.family, self.form, n) is not None:
            made = self.reference(*xs)
        else:
            made = (self._backward if self.backward else self._forward)(by_name, n)
        picked = tuple(made[i] for i in self.writes)
        return picked[0] if len(picked) == 1 else picked

    def _in(self, xs: dict[str, Tensor], name: str) -> Tensor:
        keys = name in ("k", "v")
        x = xs[name] if xs[name].stride(-1) == 1 else xs[name].contiguous()
        return x.permute(_ORDERS[self.form.kv_layout if keys else self.form.layout])

    def _out(self, x: Tensor, name: str) -> Tensor:
        keys = name in ("k", "v")
        return x.permute(_BACK[self.form.kv_layout if keys else self.form.layout])

    def _causal(self, n: Sizes) -> bool:
        return self.form.band.normalized(n.s_q, n.s_kv, equal=n.s_q == n.s_kv).right == 0

    def _forward(self, xs: dict[str, Tensor], n: Sizes) -> tuple[Tensor | None, ...]:
        q, k, v = (self._in(xs, name) for name in ("q", "k", "v"))
        operator = getattr(torch.ops.aten, self.family.forward).default
        scale, causal = self.form.scale, self._causal(n)
        if self.family is CUDNN:
            made = operator(q, k, v, None, True, 0.0, causal, False, scale=scale)
        else:
            made = operator(q, k, v, 0.0, causal, False, scale=scale)
        return self._out(made[0], "q"), made[1].view(n.b, n.h_q, n.s_q), None

    def _backward(self, xs: dict[str, Tensor], n: Sizes) -> tuple[Tensor | None, ...]:
        q, k, v, o, do = (self._in(xs, name) for name in ("q", "k", "v", "o", "do"))
        lse = xs["lse"].contiguous()
        operator = getattr(torch.ops.aten, self.family.backward).default
        scale, causal, none = self.form.scale, self._causal(n), self.empty
        if self.family is CUDNN:
            lse = lse.unsqueeze(-1)
            grads = operator(
                *(do, q, k, v, o, lse, none, none, None, None, None, n.s_q, n.s_kv, 0.0, causal),
                scale=scale,
            )
        else:
            grads = operator(
                *(do, q, k, v, o, lse, None, None, n.s_q, n.s_kv, 0.0, causal, none, none),
                scale=scale,
            )
        return tuple(self._out(x, name) for x, name in zip(grads, ("q", "k", "v"), strict=True))


def _kernel(name: str, family: _Family, runs: str) -> Kernel:
    def bind(call: Call) -> Launch:
        return _Launch(family, call)

    return Kernel(
        runs=runs,
        name=f"sdpa.{name}_{runs}",
        bind=bind,
        arch=ArchRange(family.arch),
        priority=family.priority,
        refuse=partial(refuse, family),
        available=lambda: None if hasattr(torch.ops.aten, family.forward) else "not in this torch",
    )


KERNELS: tuple[Kernel, ...] = tuple(
    _kernel(name, family, runs)
    for name, family in (("cudnn", CUDNN), ("flash", FLASH))
    for runs in ("attention", "attention_backward")
)
"""Both directions of both families."""


def register() -> None:
    """Add the kernels; safe to call again."""
    REGISTRY.add(*KERNELS, replace=True)


__all__ = ["CUDNN", "FLASH", "KERNELS", "refuse", "register"]
