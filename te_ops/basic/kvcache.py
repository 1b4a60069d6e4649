"""KV cache: keys and values of earlier tokens, contiguous, as a ring or in pages.

A plan writes new tokens into slots beyond the committed length, which are workspace, and reads the
old ones together with the new; what is committed when the whole call has succeeded is the length
(and the page table), so a failed step leaves the visible cache as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_ops.basic.arguments import FLOATS, INDICES, integer, on_host, positive_int, show
from te_ops.basic.rope import SEQUENCE_AXIS
from te_ops.errors import PlanError, ShapeError
from te_ops.graph import Graph, Node, Spec, Value, gradient, prim, require
from te_ops.op import Op

_PAGE = 16  # of a ring; a page table names its slots in order

# -- primitives; the (start, length) of the new tokens of each sequence are optional operands


def _new_lengths(
    spans: tuple[str, ...], values: Sequence[torch.Tensor], batch: int, steps: int
) -> list[int]:
    """How many new tokens each sequence has."""
    given = {name: on_host(x) for name, x in zip(spans, values, strict=True)}
    for name, x in given.items():
        require(len(x) == batch, f"KVCache: {len(x)} {name} for {batch} sequences")
    starts = given.get("starts", [0] * batch)
    made = given.get("lens", [steps - start for start in starts])
    for e, (start, length) in enumerate(zip(starts, made, strict=True)):
        require(
            start >= 0 and length >= 0 and start + length <= steps,
            f"KVCache: sequence {e} starts at {start} with length {length}, there are {steps} rows",
        )
    return made


def _new_places(
    lengths: torch.Tensor, total: torch.Tensor, starts: Sequence[torch.Tensor]
) -> list[tuple[int, slice, torch.Tensor]]:
    """For each sequence with new tokens: its number, their rows, their positions."""
    begin = on_host(starts[0]) if starts else [0] * lengths.shape[0]
    made = []
    for e, (first, end) in enumerate(zip(on_host(lengths), on_host(total), strict=True)):
        if end > first:
            rows = slice(begin[e], begin[e] + end - first)
            made.append((e, rows, torch.arange(first, end, device=lengths.device)))
    return made


def _total_infer(lengths: Spec, steps: Spec, *_: Spec, **__: Any) -> Spec:
    return lengths.like()


@prim("kv_total", infer=_total_infer, differentiable=False)
def KV_TOTAL(
    lengths: torch.Tensor,
    steps: tuple[int, ...],
    *values: torch.Tensor,
    spans: tuple[str, ...],
    limit: int | None,
    max_step: int | None,
) -> torch.Tensor:
    """Lengths with the new tokens.

    Raises:
        ShapeError: they do not fit.
    """
    new = _new_lengths(spans, values, lengths.shape[0], steps[0])
    total = lengths + torch.tensor(new, dtype=torch.int64, device=lengths.device)
    for e, (length, step) in enumerate(zip(on_host(total), new, strict=True)):
        require(
            limit is None or length <= limit,
            f"KVCache: sequence {e} would have {length} tokens, the cache holds {limit}",
        )
        require(
            max_step is None or step <= max_step,
            f"KVCache: sequence {e} gets {step} tokens at once, a ring takes max_step={max_step}",
        )
    return total


@prim("kv_offsets", infer=lambda lengths, *_: lengths.like(), differentiable=False)
def KV_OFFSETS(lengths: torch.Tensor, *starts: torch.Tensor) -> torch.Tensor:
    """The position of row 0 of each sequence; negative where its tokens start later."""
    return lengths - starts[0].to(lengths) if starts else lengths.clone()


def _append_infer(
    cache: Spec, new: Spec, lengths: Spec, *_: Spec, layout: str, page: int | None
) -> Spec:
    axis = SEQUENCE_AXIS[layout]
    require(
        len(new.shape) == 4 and new.shape[2:] == cache.shape[2:],
        f"KVCache: holds heads {show(cache.shape[2:])}, got {layout} {show(new.shape)}",
    )
    _same_batch(new.shape[1 - axis], lengths.shape[0])
    require(
        new.dtype is cache.dtype,
        f"KVCache: is {cache.dtype}, the new tokens are {new.dtype}; make it with dtype={new.dtype}",
    )
    if page is None:
        return cache.like()
    return cache.like((cache.shape[0] * cache.shape[1] // page, page, *cache.shape[2:]))


def _same_batch(given: int, held: int) -> None:
    require(
        given == held,
        f"KVCache: holds {int(held)} sequences, got {int(given)}; sequences without new tokens take "
        "part with length 0",
    )


# An effect on workspace: equal appends of two places in a pipeline must not become one.
@prim("kv_append", infer=_append_infer, nature="effect")
def KV_APPEND(
    cache: torch.Tensor,
    new: torch.Tensor,
    lengths: torch.Tensor,
    total: torch.Tensor,
    *starts: torch.Tensor,
    layout: str,
    page: int | None,
) -> torch.Tensor:
    """The cache [b, slots, h, d] with new tokens written behind each sequence's length, in place.

    With `page` the slots are a ring (the slot of position p is p % slots), seen as pages
    [b * slots / page, page, h, d].
    """
    rows = new.transpose(0, 1) if layout == "sbhd" else new
    for e, picked, positions in _new_places(lengths, total, starts):
        cache[e, positions % cache.shape[1]] = rows[e, picked]
    return cache if page is None else cache.view(-1, page, *cache.shape[2:])


class _Ring(NamedTuple):
    """Where a ring's visible keys are."""

    table: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor


def _ring_infer(lengths: Spec, total: Spec, slots: int, page: int, window: int) -> Any:
    each = total.like()
    return Spec((total.shape[0], slots // page), torch.int64), each, each


@prim("kv_ring", infer=_ring_infer, n_out=3, differentiable=False)
def KV_RING(
    lengths: torch.Tensor, total: torch.Tensor, slots: int, page: int, window: int
) -> _Ring:
    """(page_table, kv_starts, kv_lens) of the keys that the new rows see, in order of position."""
    first = (lengths - window + 1).clamp(min=0)
    start = first % slots
    pages = slots // page
    order = torch.arange(pages, device=total.device)
    table = ((start // page)[:, None] + order) % pages
    table = table + torch.arange(total.shape[0], device=total.device)[:, None] * pages
    return _Ring(table, start % page, total - first)


@prim(
    "kv_pages",
    infer=lambda table, *_: table.like(),
    nature="effect",
    differentiable=False,
)
def KV_PAGES(
    table: torch.Tensor,
    lengths: torch.Tensor,
    total: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """The page table with room for the new tokens.

    Free is what no sequence's visible tokens are in. A last page that is shared is copied to a free
    one first, if it is going to be written.

    Raises:
        ShapeError: there are too few free pages.
    """
    page = k.shape[1]
    made, held, wanted = table.clone(), on_host(lengths), on_host(total)
    visible = [row[: -(-n // page)] for row, n in zip(on_host(table), held, strict=True)]
    uses: dict[int, int] = {}
    for number in (p for row in visible for p in row):
        uses[number] = uses.get(number, 0) + 1
    free = iter(p for p in range(k.shape[0]) if p not in uses)
    for e, (has, needs) in enumerate(zip(held, wanted, strict=True)):
        if needs > has and has % page and uses[visible[e][-1]] > 1:
            last, fresh = visible[e][-1], _next(free, e)
            for pool in (k, v):
                pool[fresh, : has % page] = pool[last, : has % page]
            made[e, len(visible[e]) - 1] = fresh
            uses[last] -= 1
        for i in range(len(visible[e]), -(-needs // page)):
            made[e, i] = _next(free, e)
    return made


def _next(free: Any, entry: int) -> int:
    number: int | None = next(free, None)
    if number is None:
        raise ShapeError(
            f"KVCache: no page is free for sequence {entry}; truncate or reset sequences that are "
            "done, or make the cache with more pages (total_num_pages)"
        )
    return number


def _append_pages_infer(pool: Spec, new: Spec, lengths: Spec, *_: Spec, layout: str) -> Spec:
    return _append_infer(pool, new, lengths, layout=layout, page=None)


@prim("kv_append_pages", infer=_append_pages_infer, nature="effect")
def KV_APPEND_PAGES(
    pool: torch.Tensor,
    new: torch.Tensor,
    lengths: torch.Tensor,
    total: torch.Tensor,
    table: torch.Tensor,
    *starts: torch.Tensor,
    layout: str,
) -> torch.Tensor:
    """The pool [pages, page, h, d] with new tokens written behind each sequence's length, in place."""
    rows = new.transpose(0, 1) if layout == "sbhd" else new
    page = pool.shape[1]
    for e, picked, positions in _new_places(lengths, total, starts):
        pool[table[e, positions // page], positions % page] = rows[e, picked]
    return pool


@gradient(KV_APPEND)
@gradient(KV_APPEND_PAGES)
def _no_gradient(g: Graph, node: Node, dy: Value) -> tuple[Value | None, ...]:
    raise PlanError(
        "KVCache: a cache is for inference, its tokens have no gradient; run under torch.no_grad(), "
        "or set the attention's cache to None for training"
    )


# -- the op


class Cached(NamedTuple):
    """What attention reads: all keys and values, and where they are."""

    k: Value
    v: Value
    layout: str
    operands: dict[str, Value]


class KVCache(Op):
    """Keys and values of the tokens so far, for generation: `te.Attention(..., cache=te.KVCache(...))`.

    Every call appends its tokens and commits the new lengths if all of it succeeds. Contiguous by
    default; with `window` a ring that keeps what a sliding window sees; with `page_size` pages of a
    common pool, which sequences may share.

    Args:
        max_batch_size: sequences; a call has as many (those without new tokens with length 0).
        max_sequence_length: most tokens of a sequence; with `window` any number, and this is the
            most tokens of one call.
        num_heads_kv: heads of k and v.
        head_dim_k: features of a head of k.
        head_dim_v: features of a head of v; `head_dim_k` if None.
        window: tokens that a query sees, itself included (window_size[0] + 1).
        rollback: tokens that `truncate` may take back from a ring.
        page_size: slots of a page.
        total_num_pages: pages of the pool; enough for all sequences of full length if None.
        device: of the storage. dtype: likewise; it is that of the keys, not cast.

    Raises:
        PlanError: options that do not go together.
        ShapeError: a size below 1; at a call, more tokens than fit.
    """

    num_inputs = 2
    feature_dims = 2

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int,
        head_dim_k: int,
        head_dim_v: int | None = None,
        *,
        window: int | None = None,
        rollback: int = 0,
        page_size: int | None = None,
        total_num_pages: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "KVCache"
        self.max_batch_size = positive_int(name, "max_batch_size", max_batch_size)
        self.max_sequence_length = positive_int(name, "max_sequence_length", max_sequence_length)
        self.heads = positive_int(name, "num_heads_kv", num_heads_kv)
        d_k = positive_int(name, "head_dim_k", head_dim_k)
        d_v = d_k if head_dim_v is None else positive_int(name, "head_dim_v", head_dim_v)
        self.window = None if window is None else positive_int(name, "window", window)
        self.page_size = None if page_size is None else positive_int(name, "page_size", page_size)
        if self.window is not None and self.page_size is not None:
            raise PlanError("KVCache: window makes a ring, page_size a pool; choose one")
        if total_num_pages is not None and self.page_size is None:
            raise PlanError("KVCache: total_num_pages needs page_size")
        if isinstance(rollback, bool) or not isinstance(rollback, int) or rollback < 0:
            raise PlanError(f"KVCache: rollback must be an int of at least 0, got {rollback!r}")
        if rollback and self.window is None:
            raise PlanError("KVCache: rollback is for rings; other caches can be truncated anyhow")
        self.rollback = rollback
        dtype = dtype or torch.get_default_dtype()
        if dtype not in FLOATS:
            raise PlanError(f"KVCache: dtype must be floating point, got {dtype}")
        rows, slots = self._storage(total_num_pages)
        places = {"device": device, "dtype": dtype}
        for part, d in (("k", d_k), ("v", d_v)):
            storage = torch.zeros((rows, slots, self.heads, d), **places)  # type: ignore[arg-type]
            self.register_buffer(part, storage, persistent=False)
        lengths = torch.zeros(self.max_batch_size, dtype=torch.int64, device=device)
        self.register_buffer("lengths", lengths, persistent=False)
        if self.page_size is not None:
            pages = -(-self.max_sequence_length // self.page_size)
            table = torch.zeros((max_batch_size, pages), dtype=torch.int64, device=device)
            self.register_buffer("page_table", table, persistent=False)
        if self.window is not None:
            self.register_buffer("reached", torch.zeros_like(lengths), persistent=False)

    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    page_table: torch.Tensor
    reached: torch.Tensor  # of a ring: the greatest length before a truncation

    def _storage(self, total_num_pages: int | None) -> tuple[int, int]:
        """First two sizes of the storage."""
        batch, most = self.max_batch_size, self.max_sequence_length
        if self.window is not None:
            # The window, one call and what may be taken back, and a page of which only a part shows.
            needed = self.window + most + self.rollback
            return batch, -(-needed // _PAGE) * _PAGE + _PAGE
        if self.page_size is None:
            return batch, most
        full = batch * -(-most // self.page_size)
        pages = full if total_num_pages is None else total_num_pages
        return positive_int("KVCache", "total_num_pages", pages), self.page_size

    # -- emission

    def emit(self, g: Graph, k: Value, v: Value, *spans: Value) -> tuple[Value, ...]:
        """kv_total, kv_append of k and v: all keys, all values, their lengths; for a ring and pages
        also the page table and starts. In this order: kv_lens, kv_starts, page_table."""
        made = self.append(g, k, v)
        names = ("kv_lens", "kv_starts", "page_table")
        return (made.k, made.v, *(made.operands[n] for n in names if n in made.operands))

    def append(
        self,
        g: Graph,
        k: Value,
        v: Value,
        *,
        layout: str = "bshd",
        starts: Value | None = None,
        lens: Value | None = None,
    ) -> Cached:
        """Emit the new tokens of each sequence, rows starts .. starts + lens (all rows if None).

        Raises:
            PlanError: the cache is appended to twice in one pipeline.
        """
        lengths = g.buffer(self.lengths)
        if any(buffer == lengths for buffer, _, _ in g.updates):
            raise PlanError(
                "KVCache: two places of a pipeline append to one cache; give each its own"
            )
        given = {name: x for name, x in (("starts", starts), ("lens", lens)) if x is not None}
        for name, x in given.items():
            spec = g.spec(x)
            require(
                spec.dtype in INDICES and len(spec.shape) == 1,
                f"KVCache: {name} must be int32 or int64 [batch], got {spec.dtype} {show(spec.shape)}",
            )
        values, spans = tuple(given.values()), tuple(given)
        steps = g.dim(k, SEQUENCE_AXIS[layout])
        ring = self.window is not None
        total = g.call(
            KV_TOTAL,
            lengths,
            steps,
            *values,
            spans=spans,
            limit=None if ring else self.max_sequence_length,
            max_step=self.max_sequence_length if ring else None,
        )
        begin = () if starts is None else (starts,)
        write = self._write_pages if self.page_size is not None else self._write_rows
        made, operands = write(g, (k, v), (lengths, total), begin, layout)
        g.update(lengths, total)
        kind = "bshd" if not ring and self.page_size is None else "paged"
        return Cached(made[0], made[1], kind, operands)

    def _write_rows(
        self,
        g: Graph,
        new: tuple[Value, Value],
        held: tuple[Value, Value],
        starts: tuple[Value, ...],
        layout: str,
    ) -> tuple[list[Value], dict[str, Value]]:
        """Contiguous slots or a ring: keys and values, and where they are."""
        page = _PAGE if self.window is not None else None
        made = [
            g.call(KV_APPEND, g.buffer(store), x, *held, *starts, layout=layout, page=page)
            for store, x in zip((self.k, self.v), new, strict=True)
        ]
        if self.window is None:
            return made, {"kv_lens": held[1]}
        slots = self.k.shape[1]
        ring = g.calls(KV_RING, *held, slots=slots, page=_PAGE, window=self.window)
        return made, dict(zip(("page_table", "kv_starts", "kv_lens"), ring, strict=True))

    def _write_pages(
        self,
        g: Graph,
        new: tuple[Value, Value],
        held: tuple[Value, Value],
        starts: tuple[Value, ...],
        layout: str,
    ) -> tuple[list[Value], dict[str, Value]]:
        """Pages of a pool: keys and values, and where they are."""
        old, stores = g.buffer(self.page_table), [g.buffer(self.k), g.buffer(self.v)]
        table = g.call(KV_PAGES, old, *held, *stores)
        made = [
            g.call(KV_APPEND_PAGES, store, x, *held, table, *starts, layout=layout)
            for store, x in zip(stores, new, strict=True)
        ]
        g.update(old, table)
        return made, {"kv_lens": held[1], "page_table": table}

    def offsets(
        self, g: Graph, k: Value, *, layout: str = "bshd", starts: Value | None = None
    ) -> Value:
        """The position of row 0 of each sequence of new keys, whose tokens begin at row `starts`.

        Raises:
            ShapeError: there are not as many sequences as the cache holds.
        """
        shape = g.spec(k).shape
        batch = shape[1 - SEQUENCE_AXIS[layout]] if len(shape) == 4 else -1
        _same_batch(batch, self.max_batch_size)
        return g.call(KV_OFFSETS, g.buffer(self.lengths), *([] if starts is None else [starts]))

    # -- edits between calls

    def _entries(self, values: int | Sequence[int] | torch.Tensor) -> list[int]:
        given = values.tolist() if hasattr(values, "tolist") else values  # of torch or numpy
        each = given if isinstance(given, Sequence) else [given] * self.max_batch_size
        listed = [integer("KVCache", "a number of a sequence", value) for value in each]
        if len(listed) != self.max_batch_size:
            raise ShapeError(f"KVCache: {len(listed)} numbers for {self.max_batch_size} sequences")
        return listed

    def truncate(self, lengths: int | Sequence[int] | torch.Tensor) -> None:
        """Forget tokens beyond these lengths (one for all, or one a sequence).

        Raises:
            ShapeError: a length is negative or more than there is; or, of a ring, so far back that
                the window before it is gone: `rollback` counts from the most tokens there were.
        """
        wanted, held = self._entries(lengths), self.lengths.tolist()
        for e, (new, old) in enumerate(zip(wanted, held, strict=True)):
            if not 0 <= new <= old:
                raise ShapeError(f"KVCache: sequence {e} has {old} tokens, it cannot have {new}")
        if self.window is not None:
            self._keep_window(wanted, held)
        self.lengths.copy_(torch.tensor(wanted, dtype=torch.int64))

    def _keep_window(self, wanted: Sequence[int], held: Sequence[int]) -> None:
        """Refuse lengths whose window a ring has written over, and note how far it had come."""
        reached = [max(pair) for pair in zip(self.reached.tolist(), held, strict=True)]
        for e, (new, old, most) in enumerate(zip(wanted, held, reached, strict=True)):
            if new not in (0, old) and new < most - self.rollback:
                had = f"has {old} tokens" if most == old else f"has {old} tokens, had {most},"
                raise ShapeError(
                    f"KVCache: sequence {e} {had} and a ring with rollback={self.rollback}: it "
                    f"cannot go back to {new}"
                )
        kept = [most if new else 0 for new, most in zip(wanted, reached, strict=True)]
        self.reached.copy_(torch.tensor(kept, dtype=torch.int64))

    def reset(self) -> None:
        """Forget all tokens."""
        self.truncate(0)

    def reorder(self, index: Sequence[int] | torch.Tensor) -> None:
        """Sequence i becomes what sequence index[i] was (beam search). Pages are shared, not copied.

        Raises:
            ShapeError: an index is out of range, or there are not as many as sequences.
        """
        order = self._entries(index)
        for i in order:
            if not 0 <= i < self.max_batch_size:
                raise ShapeError(f"KVCache: there is no sequence {i} of {self.max_batch_size}")
        picked = torch.tensor(order, device=self.lengths.device)
        moved = ["page_table"] if self.page_size is not None else ["k", "v"]
        moved += ["reached"] if self.window is not None else []
        for name in ("lengths", *moved):
            store: torch.Tensor = getattr(self, name)
            store.copy_(store[picked])

    def extra_repr(self) -> str:
        """Shown by print(module)."""
        kind = "contiguous" if self.page_size is None else f"pages of {self.page_size}"
        kind = kind if self.window is None else f"ring for a window of {self.window}"
        return f"{self.max_batch_size} x {self.max_sequence_length}, {self.heads} heads, {kind}"


__all__ = [
    "KV_APPEND",
    "KV_APPEND_PAGES",
    "KV_OFFSETS",
    "KV_PAGES",
    "KV_RING",
    "KV_TOTAL",
    "Cached",
    "KVCache",
]
