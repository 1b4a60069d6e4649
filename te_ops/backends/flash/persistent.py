"""FlashAttention's forward for Hopper with blocks of threads that stay: each takes one block of rows after the other.

Its own kernel ends with each block of rows, so that nothing hides how the next one begins (a launch, barriers, the
first loads) and how the last one ends. Where a block sees a few blocks of keys only, in windows and short sequences,
that was a third to a half of the time. Here the thread that loads runs ahead into the next block while the others
finish this one, and the warpgroups that multiply end theirs each for itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass as _cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import FastDivmodDivisorV2
from cutlass.utils import LayoutEnum
from flash_attn.cute import utils
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.tile_scheduler import WorkTileInfo
from quack import layout_utils, sm90_utils
from quack.cute_dsl_utils import ParamsBase

cutlass: Any = _cutlass  # most of its names come by a star
const_expr = cutlass.const_expr
maths: Any = cute.math

WARP, GROUP = 32, 128  # threads
LOG2_E = 1.4426950408889634
VECTOR = 8  # elements of 16 bits in the 16 bytes that a thread writes at once
_SINK = 9  # its place among the arguments of the class's `mma`
BARRIER = 8  # of the first warpgroup's end; the class uses those up to 6
PAIRS = 32
"""Sequences and heads at a time, of which a device's blocks of threads share keys four by four, also beyond that."""
CACHED = 40 << 20
"""Bytes of keys and values that stay in the L2 cache while blocks of rows read them."""


# -- which block of rows is next


@dataclass
class Order(ParamsBase):  # type: ignore[misc]
    """The blocks of rows of a call: long ones first, those that share keys side by side.

    Attributes:
        heads: of keys, if query heads that share them are packed into blocks of rows. by_heads: the same, to divide by.
        batch: entries, or sequences.
        blocks: of rows of an entry; of a packed call those of `lengths`.
        near: heads and entries whose keys fit into the cache together; of a packed call their blocks of rows.
        lengths: of packed sequences.
    """

    heads: Int32
    by_heads: FastDivmodDivisorV2
    batch: Int32
    blocks: Int32
    near: Int32
    lengths: Any = None
    group: cutlass.Constexpr[int] = 1
    rows: cutlass.Constexpr[int] = 128


class Blocks:
    """The blocks of rows that one block of threads takes, in the form of flash-attn's schedulers.

    Rounds go through the processors in turns forth and back: costs fall along the order, and everyone gets as much.
    """

    def __init__(self, order: Order, turn: Any, *place: Any, loc: Any = None, ip: Any = None):
        self.order, self.turn, self.place = order, turn, place
        self._loc, self._ip = loc, ip

    @staticmethod
    def create(order: Order, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> Blocks:
        """At the first block of rows."""
        place: tuple[Any, ...] = ()
        if const_expr(order.lengths is not None):
            count, size, most = _counted(order, Int32(0))
            place = (Int32(0), size, count, most - 1, Int32(0))
        return Blocks(order, Int32(0), *place, loc=loc, ip=ip)

    def initial_work_tile_info(self, *, loc: Any = None, ip: Any = None) -> Any:
        """The first."""
        return self.get_current_work(loc=loc, ip=ip)

    def get_current_work(self, *, loc: Any = None, ip: Any = None) -> Any:
        """(block, head, entry, 0), and whether there is one."""
        size, own = cute.arch.grid_dim()[0], cute.arch.block_idx()[0]
        back = size - 1 - own
        tile = self.turn * size + own + (self.turn % 2) * (back - own)
        if const_expr(self.order.lengths is None):
            return _dense(self.order, tile)
        made = _packed(self.order, tile, self.place)
        self.place = tuple(made[:5])
        return WorkTileInfo((made[3], made[5], made[6], Int32(0)), made[7])

    def prefetch_next_work(self, *, loc: Any = None, ip: Any = None) -> None:
        """Nothing: every warp finds its next block by itself."""

    def advance_to_next_work(self, *, loc: Any = None, ip: Any = None) -> None:
        """On to the next."""
        self.turn += 1

    def producer_tail(self, *, loc: Any = None, ip: Any = None) -> None:
        """Nothing."""

    def __extract_mlir_values__(self) -> list[Any]:
        values: list[Any] = []
        self._counts = []
        for part in (self.order, self.turn, *self.place):
            found = cutlass.extract_mlir_values(part)
            values += found
            self._counts.append(len(found))
        return values

    def __new_from_mlir_values__(self, values: list[Any]) -> Blocks:
        made = []
        for part, count in zip((self.order, self.turn, *self.place), self._counts, strict=True):
            made.append(cutlass.new_from_mlir_values(part, values[:count]))
            values = values[count:]
        return Blocks(*made, loc=self._loc, ip=self._ip)


@cute.jit
def _dense(order: Order, tile: Int32) -> Any:
    whole = order.heads * order.batch
    section = tile // (order.near * order.blocks)
    at = tile - section * order.near * order.blocks
    width = cutlass.min(order.near, whole - section * order.near)
    width = cutlass.max(width, 1)
    rank = at // width
    entry, head = divmod(section * order.near + at - rank * width, order.by_heads)
    return WorkTileInfo(
        (order.blocks - 1 - rank, Int32(head), Int32(entry), Int32(0)), tile < whole * order.blocks
    )


@cute.jit
def _counted(order: Order, first: Int32) -> Any:
    """Blocks of rows of a warp's sequences from `first` on, one a lane, how many sequences these are, and the most.

    As many as keep their keys in the cache together; where each has many blocks, neighbours share them in any case.
    """
    lane = cute.arch.lane_idx()
    exists = first + lane < order.batch
    count = Int32(0)
    if exists:
        count = cute.ceil_div(order.lengths[first + lane] * order.group, order.rows)
    sums = utils.warp_prefix_sum(count, lane)
    fits = sums * order.heads <= order.near or lane < cutlass.max(PAIRS // order.heads, 1)
    size = cute.arch.popc(cute.arch.vote_ballot_sync(exists and fits))
    if lane >= size:
        count = Int32(0)
    most = count
    for i in cutlass.range_constexpr(5):
        most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, offset=1 << i))
    return count, size, most


@cute.jit
def _packed(order: Order, tile: Int32, place: Any) -> Any:
    """Its place and where a block is, from the place of the one before.

    Blocks come by their number, from the last of the longest sequence on, of all sequences of a group that have it:
    long ones first. A place is a group's first sequence and its size, a lane's blocks, a number, and how many blocks
    came before those of that number.
    """
    first, size, count, number, before = place
    lane = cute.arch.lane_idx()
    have = cute.arch.vote_ballot_sync(count > number and number >= 0)
    while before + cute.arch.popc(have) * order.heads <= tile and first < order.batch:
        before += cute.arch.popc(have) * order.heads
        number -= 1
        if number < 0:
            first += size
            count, size, number = _counted(order, first)
            number -= 1
        have = cute.arch.vote_ballot_sync(count > number and number >= 0)
    there = tile < before + cute.arch.popc(have) * order.heads
    which, head = divmod(tile - before, order.by_heads)
    rank = cute.arch.popc(have & ((1 << lane) - 1))
    own = cute.arch.vote_ballot_sync(count > number and rank == which)
    return first, size, count, number, before, Int32(head), first + cute.arch.popc(own - 1), there


# -- the kernel


class _Launcher:
    """What a kernel's call gives, with a grid of its own."""

    def __init__(self, made: Any, grid: Any) -> None:
        self.made, self.grid = made, grid

    def launch(self, *, grid: Any, **settings: Any) -> None:
        self.made.launch(grid=self.grid, **settings)


class Persistent(FlashAttentionForwardSm90):  # type: ignore[misc]
    """The forward, over `processors` blocks of threads at most, which is set before a call."""

    processors: Any = None
    sink: Any = None

    @property
    def use_tma_O(self) -> bool:
        """False: results are written by the threads that made them."""
        return False

    @use_tma_O.setter
    def use_tma_O(self, value: bool) -> None:
        """The class wants to."""

    def _get_shared_storage_cls(self) -> Any:
        """With a place for o beside that for q, which the next block's q overwrites early."""
        own: Any = self.sQ_layout
        self.sQ_layout: Any = sm90_utils.make_smem_layout(
            self.dtype, LayoutEnum.ROW_MAJOR, (self.tile_m, self.tile_hdim), 2
        )
        made = super()._get_shared_storage_cls()
        self.sQ_layout = own
        return made

    def mma(self, *given: Any) -> None:
        """The sink is added by `epilogue`, whatever its size: the class overflows where it is far above all scores."""
        self.sink = given[_SINK]
        super().mma(*given[:_SINK], None, *given[_SINK + 1 :])

    def kernel(self, *given: Any) -> Any:
        """The kernel's call with another order of blocks."""
        q, k, v, lengths = given[0], given[1], given[2], given[7]
        packed = const_expr(lengths is not None)
        group = self.qhead_per_kvhead if self.pack_gqa else 1
        heads = cute.size(q.shape[2])
        batch = cute.size(lengths.shape[0]) if packed else cute.size(q.shape[3])
        rows = cute.size(q.shape[0])
        row = 2 * (k.shape[1] + v.shape[1])  # bytes of a key and its value
        if packed:
            blocks = (rows + batch * (self.tile_m - 1)) // self.tile_m
            near = CACHED // row * group // self.tile_m
        else:
            blocks = cute.ceil_div(rows, self.tile_m)
            near = cutlass.max(CACHED // row // k.shape[0], 1)
            if not self.pack_gqa:
                near *= self.qhead_per_kvhead
        order = Order(
            heads=heads, by_heads=FastDivmodDivisorV2(heads), batch=batch, blocks=blocks, near=near,
            lengths=lengths, group=group, rows=self.tile_m,
        )  # fmt: skip
        tiles = blocks * heads * (1 if packed else batch)
        made = super().kernel(*given[:-5], order, Blocks, *given[-3:])
        return _Launcher(made, (cutlass.min(self.processors, tiles), 1, 1))

    @cute.jit
    def epilogue(  # noqa: PLR0917  (the signature of the class)
        self,
        acc_O: cute.Tensor,
        lse: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        sO: cute.Tensor,
        seqlen: Any,
        gmem_tiled_copy_O: Any,
        tma_atom_O: Any,
        tiled_mma: cute.TiledMma,
        tidx: Int32,
        m_block: Int32,
        head_idx: Int32,
        batch_idx: Int32,
    ) -> None:
        """Writes the rows of a warpgroup; others may be in another block by then."""
        group = self.qhead_per_kvhead if const_expr(self.pack_gqa) else 1
        left = seqlen.seqlen_q * group - m_block * self.tile_m  # rows that there are
        wg = cute.arch.make_warp_uniform(tidx // GROUP)

        places = tiled_mma.get_slice(tidx).partition_C(
            cute.make_identity_tensor((self.tile_m, self.tile_hdimv))
        )
        places = layout_utils.reshape_acc_to_mn(places)
        if const_expr(self.sink is not None):
            self._add_sink(acc_O, lse, places, m_block, head_idx)
        narrow = cute.make_fragment_like(acc_O, self.dtype)
        utils.cvt_f16(acc_O, narrow)
        place = cute.make_tensor(sO.iterator + self.tile_m * self.tile_hdim, sO.layout)
        atom = utils.get_smem_store_atom(90, self.dtype)
        to_shared = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(tidx)
        # The last block's rows are read.
        cute.arch.barrier(barrier_id=BARRIER + wg, number_of_threads=GROUP)
        cute.copy(atom, to_shared.retile(narrow), to_shared.partition_D(place))

        statistic = seqlen.offset_batch_Q(mLSE, batch_idx, dim=2)[None, head_idx]
        if places[0, 0][1] == 0:
            for i in cutlass.range(cute.size(places, mode=[0]), unroll_full=True):
                row = places[i, 0][0]
                if row < left:
                    statistic[m_block * self.tile_m + row] = lse[i]

        cute.arch.barrier(barrier_id=BARRIER + wg, number_of_threads=GROUP)
        self._write(mO, place, seqlen, (m_block, head_idx, batch_idx), left)

    @cute.jit
    def _add_sink(
        self, acc_O: cute.Tensor, lse: cute.Tensor, places: Any, m_block: Int32, head: Int32
    ) -> None:
        """o * sigmoid(lse - sink) and log(exp(lse) + exp(sink)); rows that see no key stay as they are."""
        values = layout_utils.reshape_acc_to_mn(acc_O)
        for i in cutlass.range(cute.size(lse), unroll_full=True):
            own = head
            if const_expr(self.pack_gqa):
                row = m_block * self.tile_m + places[i, 0][0]
                own = row % self.qhead_per_kvhead + head * self.qhead_per_kvhead
            if lse[i] != -Float32.inf:
                apart = (Float32(self.sink[own]) - lse[i]) * LOG2_E
                less = maths.exp2(cutlass.min(apart, -apart))
                both = 1.0 + less
                weight = (less if apart > 0.0 else 1.0) / both
                values[i, None].store(values[i, None].load() * weight)
                lse[i] += (cutlass.max(apart, 0.0) + maths.log2(both)) / LOG2_E

    @cute.jit
    def _write(
        self, mO: cute.Tensor, place: cute.Tensor, seqlen: Any, at: Any, left: Int32
    ) -> None:
        """A warpgroup's rows from shared memory, 16 bytes a thread."""
        m_block, head, entry = at
        tidx = cute.arch.thread_idx()[0] - GROUP
        wg = tidx // GROUP
        wide = math.gcd(self.tile_hdimv // VECTOR, GROUP)
        rows = GROUP // wide
        copy = cute.make_tiled_copy_tv(
            cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128),
            cute.make_ordered_layout((rows, wide), order=(1, 0)),
            cute.make_layout((1, VECTOR)),
        ).get_slice(tidx % GROUP)
        own = cute.local_tile(place, (64, self.tile_hdimv), (wg, 0))
        read = copy.partition_S(own)
        where = copy.partition_S(cute.make_identity_tensor((64, self.tile_hdimv)))
        values = cute.make_fragment_like(read, self.dtype)
        cute.autovec_copy(read, values)
        out = seqlen.offset_batch_Q(mO, entry, dim=3)[None, None, head]
        for i in cutlass.range_constexpr(cute.size(values, mode=[1])):
            row = wg * 64 + where[0, i, 0][0]
            if row < left:
                for j in cutlass.range_constexpr(cute.size(values, mode=[2])):
                    column = where[0, i, j][1]
                    if const_expr(not self.check_hdim_v_oob) or column < mO.shape[1]:  # type: ignore[index]
                        offset = cute.crd2idx((m_block * self.tile_m + row, column), out.layout)
                        address = (out.iterator + cute.assume(offset, divby=VECTOR)).align(16)
                        cute.autovec_copy(
                            values[None, i, j],
                            cute.make_tensor(address, cute.make_layout((VECTOR,))),
                        )
