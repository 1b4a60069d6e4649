"""What a graph computes, exactly: sizes, strides, mask and extras, as a value that is the key of its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from te_ops.basic.attention_core import ATTENTION_BACKWARD
from te_ops.basic.attention_form import Form, Sizes, learned, named, sizes
from te_ops.basic.attention_fp8 import ATTENTION_FP8
from te_ops.basic.band import Band
from te_ops.basic.sequences import CONSTANT_VECTOR, alibi_slopes
from te_ops.graph import Spec, Value
from te_ops.registry import Call

HALF = (torch.bfloat16, torch.float16)
LENGTHS = ("q_starts", "q_lens", "kv_starts", "kv_lens")


@dataclass(frozen=True)
class Problem:
    """An attention call, forward or backward.

    Attributes:
        form: the node's attributes; operands in the order of its inputs.
        backward: whether it is the gradient.
        sizes: of this call.
        dtype: of q, k and v, or of what was quantized; None if they have several.
        live: which outputs are wanted.
        shapes: of the operands, by name, as pairs.
        dtypes: the same.
        alibi: the slopes are those that the library makes itself.
        quantized: q, k, v and the output are E4M3.
        longest: the greatest lengths of queries and keys, where the host knows them.
        whole: no row is without a sequence, and every row sees a key.
    """

    form: Form
    backward: bool
    sizes: Sizes
    dtype: torch.dtype | None
    live: tuple[bool, ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    alibi: bool = False
    deterministic: bool = False
    quantized: bool = False
    longest: tuple[int | None, int | None] = (None, None)
    whole: bool = False

    @property
    def has(self) -> frozenset[str]:
        """Names of the operands."""
        return frozenset(self.form.operands)

    @property
    def band(self) -> Band:
        """The mask of these sizes."""
        n, form = self.sizes, self.form
        if self.varied:
            return form.band
        return form.band.normalized(n.s_q, n.s_kv, equal=n.s_q == n.s_kv)

    @property
    def varied(self) -> bool:
        """Sequences have lengths of their own."""
        return not self.has.isdisjoint(LENGTHS)

    @property
    def ragged(self) -> bool:
        """Sequences start where a tensor says."""
        packed = "thd" in (self.form.layout, self.form.kv_layout)
        return packed or not self.has.isdisjoint(("q_starts", "kv_starts"))

    @property
    def bias(self) -> str | None:
        """The operand that is added to the scores."""
        found = [name for name in ("bias", "pre_bias") if name in self.has]
        return found[0] if found else None

    @property
    def peak(self) -> bool:
        """The largest scores are wanted."""
        return not self.backward and self.live[2]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an operand."""
        return dict(self.shapes)[name]

    def wants(self, name: str) -> bool:
        """Whether the gradient of an operand is wanted."""
        if not self.backward:
            return False
        names = ("q", "k", "v", *learned(self.form.operands))
        return name in names and self.live[names.index(name)]

    def at(
        self,
        by_name: dict[str, Any],
        *,
        longest: tuple[int | None, int | None] = (None, None),
        whole: bool = False,
    ) -> Problem:
        """The same call with the sizes of these tensors, and what is known of their sequences.

        Raises:
            ShapeError: they do not fit each other.
        """
        return replace(
            self,
            longest=longest,
            whole=whole,
            sizes=sizes(self.form, by_name),
            shapes=tuple((name, tuple(x.shape)) for name, x in by_name.items()),
            dtypes=self.dtypes if self.quantized else _dtypes(by_name),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )


def problem_of(call: Call) -> Problem:
    """The problem of a call, with the sizes that it was planned for.

    Pages are gathered first (`gathered`): then it is a problem of a batch with lengths.
    """
    node = call.node
    backward = node.prim is ATTENTION_BACKWARD
    form = Form(**node.attrs)
    by_name: dict[str, Spec] = named(form, [call.spec(v) for v in node.inputs], backward=backward)
    if form.kv_layout == "paged":
        form, by_name = _unpaged(form, by_name, sizes(form, by_name))
    dtypes = {by_name[name].dtype for name in ("q", "k", "v")}
    return Problem(
        form=form,
        backward=backward,
        sizes=sizes(form, by_name),
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        live=call.live(node),
        shapes=tuple((name, tuple(int(s) for s in x.shape)) for name, x in by_name.items()),
        dtypes=_dtypes(by_name),
        quantized=node.prim is ATTENTION_FP8,
        alibi=_alibi(call, dict(zip(node.operands, node.inputs, strict=True)).get("slopes")),
    )


def _unpaged(form: Form, by_name: dict[str, Spec], n: Sizes) -> tuple[Form, dict[str, Spec]]:
    left = {name: x for name, x in by_name.items() if name != "page_table"}
    for name in ("k", "v"):
        left[name] = Spec((n.b, n.s_kv, *by_name[name].shape[2:]), by_name[name].dtype)
    return replace(form, operands=tuple(left), kv_layout="bshd"), left


def gathered(by_name: dict[str, Any]) -> dict[str, Any]:
    """The operands of `_unpaged`: keys and values of each sequence side by side, as the page table has them.

    The library could read the pages where they lie. But it multiplies what lies beyond a length by 0, unwritten slots
    may hold NaN, and pages may be shared, so nobody may write zeros there. What comes here is a copy, and is cleaned.
    """
    table = by_name["page_table"].long()
    made = {name: x for name, x in by_name.items() if name != "page_table"}
    for name in ("k", "v"):
        pool = by_name[name]
        pages = pool.index_select(0, table.flatten().clamp(0, max(pool.shape[0] - 1, 0)))
        made[name] = pages.view(table.shape[0], table.shape[1] * pool.shape[1], *pool.shape[2:])
    return made


def _dtypes(by_name: dict[str, Any]) -> tuple[tuple[str, torch.dtype], ...]:
    """Of records, those of what was quantized."""
    return tuple((name, x.dtype) for name, x in by_name.items())


def _alibi(call: Call, slopes: Value | None) -> bool:
    """Whether slopes are the numbers of the ALiBi paper, which the library knows, for a power of two of heads."""
    producer = None if slopes is None else call.nodes_by_id.get(slopes.node)
    if producer is None or producer.prim is not CONSTANT_VECTOR:
        return False
    values = producer.attrs["values"]
    heads = len(values)
    return heads & (heads - 1) == 0 and values == alibi_slopes(heads)
