"""Sequences of different lengths: packed tokens, and padding as starts and lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_ops.basic.arguments import INDICES, checked_here, integer, show
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Spec, Value, prim, require

Numbers = torch.Tensor | Sequence[int]
_ROWS = ("q_starts", "q_lens", "kv_starts", "kv_lens")


class PackedSequences(torch.Tensor):
    """Where the sequences of packed tokens ("thd") are; made once per batch, an input of every op.

    Sequence i has the rows cu_q_padded[i] .. cu_q_padded[i] + cu_q[i + 1] - cu_q[i] of the queries,
    the same with kv of the keys. Rows that belong to none (padding between sequences) are
    ordinary rows for every op but attention, which neither reads them nor writes other than 0 there.
    It is an int64 tensor (the starts and lengths), so it moves and is passed like one.

        packed = te.PackedSequences([0, 20, 20, 37])        # lengths 20, 0 and 17
        o = attention(q, k, v, packed)                      # q [37, heads, d]

    Args:
        cu_q: cumulative lengths of the queries, [sequences + 1], from 0 and never falling.
        cu_kv: those of the keys; the queries' if None.
        cu_q_padded: where the sequences of the queries start, and the end; `cu_q` if None.
        cu_kv_padded: the same of the keys; `cu_q_padded` if there are no keys of their own.
        max_q: the greatest length of queries, for kernels that must know one; if None it is read
            from values on the CPU, elsewhere the number of tokens stands in.
        max_kv: the same of keys.
        device: where to put it; that of `cu_q` if None.

    Raises:
        ShapeError: lengths that do not fit each other. Values are looked at on the CPU only: on
            other devices falling ones count as empty sequences.
    """

    max_q: int | None
    max_kv: int | None
    _rows: tuple[int | None, int | None]  # that sequences cover without a gap, of queries and keys
    _stamp: int  # version of the values that all this is about
    _parts: tuple[torch.Tensor, ...] | None  # what ops read, once for all of them
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        cu_q: Numbers,
        cu_kv: Numbers | None = None,
        cu_q_padded: Numbers | None = None,
        cu_kv_padded: Numbers | None = None,
        *,
        max_q: int | None = None,
        max_kv: int | None = None,
        device: torch.device | str | None = None,
    ) -> PackedSequences:
        """The starts and lengths of all sequences."""
        q = _side("q", cu_q, cu_q_padded)
        if cu_kv is None and cu_kv_padded is not None:
            raise ShapeError("PackedSequences: cu_kv_padded needs cu_kv")
        kv = q if cu_kv is None else _side("kv", cu_kv, cu_kv_padded)
        if q[0].shape != kv[0].shape:
            raise ShapeError(
                f"PackedSequences: {q[0].shape[0]} sequences of q, {kv[0].shape[0]} of kv"
            )
        table = torch.cat([*q, *(x.to(q[0].device) for x in kv)])
        made = table if device is None else table.to(device)
        limits = (_limit("max_q", max_q, q[1]), _limit("max_kv", max_kv, kv[1]))
        return cls._made(made, limits, (_covered(q), _covered(kv)))

    @classmethod
    def _made(
        cls,
        table: torch.Tensor,
        limits: tuple[int | None, int | None],
        rows: tuple[int | None, int | None],
    ) -> PackedSequences:
        made = torch.Tensor._make_subclass(cls, table)
        made.max_q, made.max_kv = limits
        made._rows = rows
        made._stamp = 0 if made.is_inference() else made._version
        made._parts = None
        return made

    @property
    def _as_made(self) -> bool:
        """Whether the values are those that it was made with, and can be known to be."""
        return not self.is_inference() and self._version == self._stamp

    def _known(self, part: int) -> Known:
        side = part // 2
        return Known((self.max_q, self.max_kv)[side], self._rows[side])

    @property
    def count(self) -> int:
        """How many sequences there are."""
        return self.shape[0] // 4

    def part(self, name: str) -> torch.Tensor:
        """ "q_starts", "q_lens", "kv_starts" or "kv_lens": int64 [sequences]."""
        return self.as_subclass(torch.Tensor).view(4, -1)[_ROWS.index(name)]

    def to(self, device: Any, *, non_blocking: bool = False) -> PackedSequences:  # type: ignore[override]
        """On another device."""
        table = self.as_subclass(torch.Tensor).to(device, non_blocking=non_blocking)
        if table.dtype is not torch.int64:
            raise PlanError("PackedSequences: to() takes a device; its dtype is int64")
        return self._like(table)

    def _like(self, table: torch.Tensor) -> PackedSequences:
        """Another table of the same values."""
        rows = self._rows if self._as_made else (None, None)
        return self._made(table, (self.max_q, self.max_kv), rows)

    def clone(self, **_: Any) -> PackedSequences:
        """A copy."""
        return self._like(self.as_subclass(torch.Tensor).clone())

    def __deepcopy__(self, memo: Any) -> PackedSequences:
        return self.clone()

    def cpu(self, *_: Any, **__: Any) -> PackedSequences:
        """On the CPU."""
        return self.to("cpu")

    def cuda(self, device: Any = "cuda", *_: Any, **__: Any) -> PackedSequences:
        """On a CUDA device."""
        return self.to(device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedSequences({self.count} sequences, {self.device})"


class Known(NamedTuple):
    """What the host knows of the sequences that a tensor of lengths is about, without looking at it.

    `longest`: the greatest length; `rows`: how many rows they cover, one after the other without a gap. None: unknown.
    """

    longest: int | None = None
    rows: int | None = None


def known_of(lens: torch.Tensor | None) -> Known:
    """Of lengths that come from a `PackedSequences`, what it knows; nothing of others."""
    found: Known = getattr(lens, _KNOWN, Known())
    return found


_KNOWN = "_te_known"


def _covered(side: tuple[torch.Tensor, torch.Tensor]) -> int | None:
    starts, lens = side
    if not checked_here(lens):
        return None
    ends = lens.cumsum(0)
    return (int(ends[-1]) if ends.numel() else 0) if torch.equal(starts, ends - lens) else None


def _side(name: str, lengths: Numbers, padded: Numbers | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and lengths."""
    cu = _cumulative(f"cu_{name}", lengths)
    lens = cu.diff()
    if padded is None:
        return cu[:-1], lens.clamp(min=0)
    places = _cumulative(f"cu_{name}_padded", padded).to(cu.device)
    if places.shape != cu.shape:
        raise ShapeError(
            f"PackedSequences: cu_{name} has {cu.shape[0]} entries, cu_{name}_padded "
            f"{places.shape[0]}"
        )
    if checked_here(cu) and bool((places.diff() < lens).any()):
        i = int((places.diff() < lens).nonzero()[0])
        raise ShapeError(
            f"PackedSequences: sequence {i} of {name} has length {int(lens[i])}, its place from "
            f"cu_{name}_padded {int(places.diff()[i])}"
        )
    return places[:-1], lens.clamp(min=0)


def _cumulative(name: str, values: Numbers) -> torch.Tensor:
    try:
        made = torch.as_tensor(values)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"PackedSequences: {name} must be integers, got {values!r}") from error
    if made.dim() != 1 or made.shape[0] < 1 or made.dtype not in INDICES:
        raise ShapeError(
            f"PackedSequences: {name} must be int32 or int64 with sequences + 1 entries, it is "
            f"{made.dtype} {show(made.shape)}"
        )
    if checked_here(made):
        if int(made[0]) < 0 or (not name.endswith("padded") and int(made[0]) != 0):
            raise ShapeError(
                f"PackedSequences: {name} must start at 0, it starts at {int(made[0])}"
            )
        falls = (made.diff() < 0).nonzero()
        if falls.numel():
            i = int(falls[0])
            raise ShapeError(
                f"PackedSequences: {name} falls from {int(made[i])} to {int(made[i + 1])} at entry "
                f"{i + 1}; it holds cumulative lengths"
            )
    return made.to(torch.int64)


def _limit(name: str, value: int | None, lens: torch.Tensor) -> int | None:
    known = checked_here(lens)
    greatest = int(lens.max()) if known and lens.numel() else 0
    if value is None:
        return greatest if known else None
    if integer("PackedSequences", name, value) < greatest:
        raise ShapeError(f"PackedSequences: {name} is {value}, a sequence has length {greatest}")
    return value


# -- in the graph


def _table_infer(table: Spec, own: bool) -> tuple[Spec, ...]:
    require(
        len(table.shape) == 1 and table.shape[0] % 4 == 0 and table.dtype is torch.int64,
        f"the sequences must be a te.PackedSequences, got {table.dtype} {show(table.shape)}",
    )
    return (Spec((table.shape[0] // 4,), torch.int64),) * 4


# Not a view in the graph's sense: its outputs are rows of a table that no kernel reads as a whole.
@prim("sequence_table", infer=_table_infer, n_out=4, differentiable=False)
def SEQUENCE_TABLE(table: torch.Tensor, own: bool) -> tuple[torch.Tensor, ...]:
    """q_starts, q_lens, kv_starts, kv_lens of a `PackedSequences`.

    With `own`, keys are in the same places as queries, which is checked on the CPU.
    """
    parts = _parts(table)
    if own and checked_here(table):
        same = torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3])
        require(
            same,
            "the keys of self-attention have the sequences of the queries; use "
            'attention_type="cross" for sequences of their own',
        )
    return parts


def _parts(table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a `PackedSequences` that was not written to, the same tensors for every op, with what is known of them."""
    # Detached: views of the table itself would keep it alive, and it keeps them.
    made = table.as_subclass(torch.Tensor).detach().view(4, table.shape[0] // 4).unbind(0)
    if not (isinstance(table, PackedSequences) and table._as_made):
        return made
    if table._parts is None:
        for i in (1, 3):
            setattr(made[i], _KNOWN, table._known(i))
        table._parts = made
    return table._parts


def _runs_infer(mask: Spec, *length: Spec, rows: int | None) -> tuple[Spec, Spec]:
    middle = len(mask.shape) == 4
    require(
        mask.dtype is torch.bool and len(mask.shape) in (2, 4),
        f"a padding mask must be bool (True = padding) [b, s] or [b, 1, 1, s], got {mask.dtype} "
        f"{show(mask.shape)}; masks of other shapes need attn_mask_type='arbitrary'",
    )
    static = [size for size in mask.shape[1:3] if type(size) is int] if middle else []
    require(
        all(size == 1 for size in static),
        f"a padding mask must be [b, s] or [b, 1, 1, s], got {show(mask.shape)}",
    )
    if rows is not None and type(mask.shape[-1]) is int:
        _same_rows(mask.shape, rows)
    return (Spec((mask.shape[0],), torch.int64),) * 2


def _same_rows(mask: Sequence[int], rows: int) -> None:
    require(
        mask[-1] == rows,
        f"a padding mask of {rows} positions must be [b, {rows}] or [b, 1, 1, {rows}], got {show(mask)}",
    )


@prim("mask_runs", infer=_runs_infer, n_out=2, differentiable=False)
def MASK_RUNS(
    mask: torch.Tensor, *length: tuple[int, ...], rows: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(start, length) of the run of positions that a padding mask [b, s] or [b, 1, 1, s] leaves.

    How many positions there are is `length` where it differs from call to call, else `rows`.

    Raises:
        ShapeError: the mask has another number of positions; on the CPU, a row leaves more than one run.
    """
    require(
        mask.dim() == 2 or tuple(mask.shape[1:3]) == (1, 1),
        f"a padding mask must be [b, s] or [b, 1, 1, s], got {show(mask.shape)}",
    )
    for size in length[0] if length else (rows,):
        if size is not None:
            _same_rows(mask.shape, size)
    keep = ~mask.reshape(mask.shape[0], mask.shape[-1])
    lens = keep.sum(1)
    if not keep.shape[1]:
        return torch.zeros_like(lens), lens
    starts = keep.to(torch.int32).argmax(1)
    if checked_here(keep):
        ends = keep.shape[1] - keep.flip(1).to(torch.int32).argmax(1)
        holes = ((lens > 0) & (ends - starts != lens)).nonzero()
        require(
            not holes.numel(),
            f"row {int(holes[0]) if holes.numel() else 0} of the padding mask has holes; padding is "
            "on the left or on the right, other masks need attn_mask_type='arbitrary'",
        )
    return starts, lens


def packed_parts(g: Graph, table: Value, *, own: bool) -> dict[str, Value]:
    """Starts and lengths of packed sequences by operand name; with `own`, one for both sides."""
    parts = dict(zip(_ROWS, g.calls(SEQUENCE_TABLE, table, own=own), strict=True))
    if own:
        parts |= {"kv_starts": parts["q_starts"], "kv_lens": parts["q_lens"]}
    return parts


def padding_parts(g: Graph, side: str, padding: Value, rows: tuple[Value, int]) -> dict[str, Value]:
    """Starts and lengths of one side, from a bool mask or from int lengths [b] (right padding).

    `rows` is the tensor that is padded, and the axis of its positions.

    Raises:
        ShapeError: it is neither.
    """
    spec = g.spec(padding)
    if spec.dtype in INDICES and len(spec.shape) == 1:
        return {f"{side}_lens": padding}
    require(
        spec.dtype is torch.bool,
        f"padding must be a bool mask (True = padding) or int lengths [b], got {spec.dtype} "
        f"{show(spec.shape)}",
    )
    size = g.spec(rows[0]).shape[rows[1]]
    # A size that the plan fixes is an attribute: layers then share one step, whatever their tensors are.
    fixed = type(size) is int
    varies = [] if fixed else [g.dim(*rows)]
    starts, lens = g.calls(MASK_RUNS, padding, *varies, rows=size if fixed else None)
    return {f"{side}_starts": starts, f"{side}_lens": lens}


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slopes of Press et al., "Train Short, Test Long", for any number of heads.

    2^(-8 k / n) for k = 1 .. n if n is a power of two; else those of the power of two below, then
    every other one of the next.
    """
    power = 1 << (heads.bit_length() - 1)
    made = [2.0 ** (-8.0 * k / power) for k in range(1, power + 1)]
    made += [2.0 ** (-8.0 * k / (2 * power)) for k in range(1, 2 * power + 1, 2)]
    return tuple(made[:heads])


def _constant_infer(values: tuple[float, ...]) -> Spec:
    return Spec((len(values),), torch.float32)


@prim("constant_vector", infer=_constant_infer, differentiable=False, placed=True)
def CONSTANT_VECTOR(
    values: tuple[float, ...], device: torch.device | str | None = None
) -> torch.Tensor:
    """FP32 numbers that the plan knows; made on the device, since a copy to it may be a wait."""
    parts = [torch.full((1,), value, dtype=torch.float32, device=device) for value in values]
    return torch.cat(parts)


def constant_vector(g: Graph, values: Sequence[float]) -> Value:
    """A vector of known finite numbers, equal ones being one value of the graph.

    Raises:
        PlanError: a number is not finite.
    """
    if not all(math.isfinite(v) for v in values):
        raise PlanError(f"numbers must be finite, got {list(values)}")
    return g.call(CONSTANT_VECTOR, values=tuple(float(v) for v in values))


__all__ = [
    "CONSTANT_VECTOR",
    "MASK_RUNS",
    "Known",
    "SEQUENCE_TABLE",
    "PackedSequences",
    "alibi_slopes",
    "constant_vector",
    "known_of",
    "packed_parts",
    "padding_parts",
]
